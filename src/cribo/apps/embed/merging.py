"""Implementation of `cribo merge` for features: join the results of `cribo embed` on the shares of a collection."""

from collections.abc import Sequence
from pathlib import Path

from cribo.apps.embed.run import ABOUT, KIND, Embedded, changes_between, write_skipped
from cribo.apps.embed.writing import complete_parts, part_files, require_writer
from cribo.base.errors import DataError
from cribo.base.files import link_or_copy, path_inside, read_json, write_json
from cribo.base.job import FinishedShare, Job, finished_shares
from cribo.base.shares import Share
from cribo.base.wording import counted


def merge_embeddings(parts: Sequence[str | Path], *, out: Path, overwrite: bool = False, command: str = "") -> Embedded:
    """Join the features of all shares of a collection, as if they had been written by one command.

    Files are hard links to those of the shares, or copies on another file system. Nothing is encoded, and the results
    appear in `out` once they are complete.

    Args:
        parts: output folders of `embed_images` with `part` 1/n to n/n, in any order.
        out: output folder.
        overwrite: replace existing results in `out`.
        command: command line to record in the results.

    Raises:
        ValueError: shares are missing, repeated, not finished, damaged, or of different options or images, or the
            output folder is invalid; raised before anything is written.
        FileNotFoundError: a folder does not exist.
        ImportError: the library of the format is not installed.
        OSError: results cannot be written.

    >>> merge_embeddings(["part-1", "part-2"], out=Path("all"))  # doctest: +SKIP
    """
    folders = [Path(part).expanduser() for part in parts]
    job = Job(out, KIND, overwrite=overwrite, inputs=folders)
    shares = finished_shares(folders, KIND, changes=changes_between)
    identity = shares[0].identity
    require_writer(identity["format"])
    files = [path for share in shares for path in _checked_files(share)]
    skipped: dict[str, str] = {}

    def write(folder: Path) -> None:
        for share, path in files:
            linked = folder / path.relative_to(share.folder)
            linked.parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(path, linked)
        skipped.update(write_skipped(folder, job.accounts.values()))
        about = read_json(shares[0].folder / ABOUT)
        write_json(folder / ABOUT, {**about, "command": command, "skipped": len(skipped)})
        features.append(complete_parts(folder, identity["format"]).name)

    features: list[str] = []
    job.merge(shares, write, command=command)
    images = identity["images"] - len(skipped)
    return Embedded(job.path, job.path / features[0], images, images, skipped, 0.0)


def _checked_files(share: FinishedShare) -> list[tuple[FinishedShare, Path]]:
    """Return the files of all parts; raises DataError unless each part of the share exists once, with its files."""
    folder, part = share.folder, share.record.share
    if not isinstance(parts := share.identity.get("parts"), int):
        raise DataError(f"the record of {folder} is damaged, it names {parts} parts: {_REPEAT}")
    expected = Share.parse(part).of(range(parts))
    files = part_files(folder, share.identity["format"])
    found: dict[int, str] = {}
    for name in files:
        number = int(name.split("-")[1])
        if number in found:
            raise DataError(f"{folder} contains a part twice, {found[number]} and {name}: {_REPEAT}")
        if number not in expected:
            raise DataError(f"{folder} is part {part}, but contains {name} of another part: {_REPEAT}")
        found[number] = name
    if (missing := next((number for number in expected if number not in found), None)) is not None:
        lacking = expected[-1] - expected[0] + 1 - len(found)  # as `len`, which allows 2^63
        raise DataError(
            f"{folder} lacks {counted(lacking, 'file')} of features, such as part-{missing:05d}-*: repeat its "
            "command with --resume"
        )
    if unknown := [name for name in files if name not in share.accounts]:
        raise DataError(f"{folder} has no record of {unknown[0]}: {_REPEAT}")
    every = [path for several in files.values() for path in several]
    if gone := [path for path in every if not path.is_file()]:
        raise DataError(f"{folder} lacks {counted(len(gone), 'file')}, such as {gone[0]}: {_REPEAT}")
    for path in every:  # links in a share may lead anywhere
        path_inside(folder, str(path.relative_to(folder)), source=folder)
    return [(share, path) for path in every]


_REPEAT = "repeat its command with --overwrite"
