"""The run folder: what is in it, and making it without harm to anything that is there."""

from pathlib import Path

from cribo.files import FolderError, claim_folder, make_numbered_folder
from cribo.training.lock import run_lock

CONFIG, SUMMARY, METRICS, SKIPPED = "config.yaml", "summary.json", "metrics.csv", "skipped.csv"
REPORT = "report"


def claim_run_folder(out: Path, name: str | None, default_name: str, *, overwrite: bool) -> Path:
    """Make the folder of a new run, `out/name`.

    Without a name, the first of `default_name`, `default_name-2`, ... that does not exist.

    Raises:
        FolderError: the folder exists and `overwrite` is not set, holds something that is no run or a run that goes
            on, is a file, or cannot be written to.
    """
    if name is None:
        folder = make_numbered_folder(out, default_name)
    else:
        folder = out / name
        if folder.is_file():
            raise FolderError(f"{folder} is a file, not a run folder: choose another --name or --out")
        if overwrite and (folder / CONFIG).is_file():
            with run_lock(folder):  # no run that goes on is taken away
                pass
        claim_folder(
            folder,
            marker=CONFIG,
            overwrite=overwrite,
            advice=f"choose another --name, go on with it by --resume {folder} or --continue, or --overwrite it",
        )
    return folder
