"""The folder that an evaluation leaves: claimed before anything is computed, replaced on demand only."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cribo.evaluation.results import RESULTS
from cribo.files import claim_folder, holds_results, make_numbered_folder

OUT = Path("evaluations")
"""Where folders are made that nobody has named."""

_CLAIM = {"marker": RESULTS, "advice": "choose another --out, or replace it with --overwrite"}


@contextmanager
def results_folder(out: Path | None, name: str, *, overwrite: bool) -> Iterator[Callable[[], Path]]:
    """A folder for the results of what is computed under it; results that stand there stay until there are new ones.

    Where the computation fails, an empty folder that was made for it is removed.

    Args:
        out: the folder; `evaluations/<name>`, numbered, when None.
        name: of a folder that nobody has named.
        overwrite: replace results that stand in `out`.

    Returns:
        what empties the folder for the new results and gives its path.

    Raises:
        FolderError: it cannot be used.
    """
    old = out is not None and holds_results(out, overwrite=overwrite, **_CLAIM)
    if out is None:
        folder = make_numbered_folder(OUT, name)
    else:
        folder = out
        if not old:
            claim_folder(folder, overwrite=False, **_CLAIM)

    def ready() -> Path:
        if old:
            claim_folder(folder, overwrite=True, **_CLAIM)
        return folder

    try:
        yield ready
    except BaseException:
        # rmdir removes what is empty only.
        with suppress(OSError):
            folder.rmdir()
            if out is None:
                folder.parent.rmdir()
        raise
