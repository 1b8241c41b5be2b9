"""Implementation of `cribo merge` for features: join the results of `cribo embed` on the shares of a collection."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cribo.apps.embed.run import (
    ABOUT,
    FORMAT,
    IMAGES_OF_PARTS,
    SKIPPED_IN_PARTS,
    Embedded,
    changes_between,
    write_skipped,
)
from cribo.apps.embed.writing import DATASET, PARTS, complete_parts, part_files, require_writer
from cribo.base.errors import DataError
from cribo.base.files import link_or_copy, path_inside, write_json
from cribo.base.folders import ResultFolder, lock_replaced, read_finished
from cribo.base.wording import counted
from cribo.data.sources.images import require
from cribo.features.spread.shares import Share, order_shares, require_mergeable


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
    target = ResultFolder(out, "embedding", overwrite=overwrite, inputs=folders)
    for folder in folders:
        require(folder)
    abouts = [read_finished(folder, "embedding", ABOUT) for folder in folders]
    names = [str(folder) for folder in folders]
    if old := [name for name, about in zip(names, abouts, strict=True) if about.get("format") != FORMAT]:
        raise DataError(f"{old[0]} was written by another version of cribo: {_REPEAT}")
    wholes = [_of_all_images(about) for about in abouts]
    for name, whole in zip(names, wholes, strict=True):
        require_mergeable(names[0], name, [*changes_between(wholes[0], whole)])
    order = order_shares(names, [about["same"]["part"] for about in abouts])
    same = abouts[0]["same"]
    require_writer(same["format"])
    files = {index: _checked_files(folders[index], abouts[index]["same"]) for index in order}
    lists = {
        index: [
            path
            for name in (SKIPPED_IN_PARTS, IMAGES_OF_PARTS)
            for path in sorted((folders[index] / name).glob("part-*.json*"))
        ]
        for index in order
    }
    for index in order:  # links in a share may lead anywhere
        for path in (*lists[index], *(path for several in files[index].values() for path in several)):
            path_inside(folders[index], str(path.relative_to(folders[index])), source=folders[index])

    def write(folder: Path) -> None:
        (folder / PARTS).mkdir()
        for index in order:
            for path in (path for several in files[index].values() for path in several):
                linked = folder / path.relative_to(folders[index])
                linked.parent.mkdir(parents=True, exist_ok=True)
                link_or_copy(path, linked)
            for path in lists[index]:
                (folder / path.parent.name).mkdir(exist_ok=True)
                link_or_copy(path, folder / path.parent.name / path.name)
        skipped.update(write_skipped(folder, (name for index in order for name in files[index])))
        complete_parts(folder, same["format"])
        write_json(folder / ABOUT, {**wholes[order[0]], "command": command, "skipped": len(skipped)})

    skipped: dict[str, str] = {}
    with lock_replaced(target, command="cribo embed"):
        target.create(write)
    images = same["images"] - len(skipped)
    features = DATASET if same["format"] == "lance" else PARTS
    return Embedded(target.path, target.path / features, images, images, skipped, 0.0)


def _of_all_images(about: dict[str, Any]) -> dict[str, Any]:
    """Return a description of results for all images instead of a share."""
    return {**about, "same": {**about["same"], "part": str(Share())}}


def _checked_files(folder: Path, same: dict[str, Any]) -> dict[str, list[Path]]:
    """Return the files of each part; raises DataError unless each part of the share exists once, with its files."""
    expected = Share.parse(same["part"]).of(range(same["parts"]))
    files = part_files(folder, same["format"])
    found: dict[int, str] = {}
    for name in files:
        number = int(name.split("-")[1])
        if number in found:
            raise DataError(f"{folder} contains a part twice, {found[number]} and {name}: {_REPEAT}")
        if number not in expected:
            raise DataError(f"{folder} is part {same['part']}, but contains {name} of another part: {_REPEAT}")
        found[number] = name
    if (missing := next((number for number in expected if number not in found), None)) is not None:
        lacking = expected[-1] - expected[0] + 1 - len(found)  # as `len`, which allows 2^63
        raise DataError(
            f"{folder} lacks {counted(lacking, 'file')} of features, such as part-{missing:05d}-*: repeat its "
            "command with --resume"
        )
    if gone := [path for several in files.values() for path in several if not path.is_file()]:
        raise DataError(f"{folder} lacks {counted(len(gone), 'file')}, such as {gone[0]}: {_REPEAT}")
    return files


_REPEAT = "repeat its command with --overwrite"
