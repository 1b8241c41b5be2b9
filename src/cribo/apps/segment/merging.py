"""Implementation of `cribo merge` for labels: join the results of `cribo segment` on the shares of a collection."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cribo.apps.segment.results import (
    ABOUT,
    FOLDERS,
    KIND,
    SUMMARY,
    Record,
    Segmented,
    changes_between,
    class_shares,
    files_of_record,
    instance_counts,
    read_records,
    write_finished,
    write_summary,
)
from cribo.apps.segment.targets import result_name
from cribo.base.errors import DataError
from cribo.base.files import link_or_copy, path_inside, read_json
from cribo.base.job import ACCOUNTS, FinishedShare, Job, finished_shares
from cribo.base.shares import Share


def merge_segmentations(
    parts: Sequence[str | Path], *, out: Path, overwrite: bool = False, command: str = ""
) -> Segmented:
    """Join the labels of all shares of a collection, as if they had been written by one command.

    Files are hard links to those of the shares, or copies on another file system. Nothing is labelled, and the results
    appear in `out` once they are complete. Pictures and COCO files are not joined.

    Args:
        parts: output folders of `segment_images` with `part` 1/n to n/n, in any order.
        out: output folder.
        overwrite: replace existing results in `out`.
        command: command line to record in the results.

    Raises:
        ValueError: shares are missing, repeated, not finished, damaged, or of different images, memories or settings,
            or the output folder is invalid; raised before anything is written.
        FileNotFoundError: a folder does not exist.
        OSError: results cannot be written.

    >>> merge_segmentations(["part-1", "part-2"], out=Path("all"))  # doctest: +SKIP
    """
    folders = [Path(part).expanduser() for part in parts]
    job = Job(out, KIND, overwrite=overwrite, inputs=folders)
    shares = finished_shares(folders, KIND, changes=_changes)
    abouts = [read_json(share.folder / ABOUT) for share in shares]
    classes = shares[0].identity["classes"]
    merged = _Merged()
    for share, about in zip(shares, abouts, strict=True):
        merged.add(share, about["images"]["found"])
    merged.drop_earlier()
    everything = {**merged.records, **merged.earlier}
    split = shares[0].identity.get("instances", ())
    sources = {
        name: files_of_record(place, everything[name]) for name, place in merged.places.items() if name in everything
    }
    for name, paths in sources.items():  # links in a share may lead anywhere
        for path in paths:
            path_inside(place := merged.places[name], str(path.relative_to(place)), source=place / ACCOUNTS)

    def write(folder: Path) -> None:
        for name in FOLDERS:
            (folder / name).mkdir()
        for name, record in everything.items():
            for source, linked in zip(sources[name], files_of_record(folder, record), strict=True):
                linked.parent.mkdir(parents=True, exist_ok=True)
                link_or_copy(source, linked)
        write_summary(folder, merged.names, merged.records, merged.earlier, merged.skipped, classes, split)
        write_finished(
            folder,
            {**abouts[0], "command": command, "images": {**abouts[0]["images"], "part": str(Share())}},
            seconds=sum(about["seconds"] for about in abouts),
            found=len(merged.names),
            segmented=len(merged.records) - reused,
            reused=reused,
            earlier=len(merged.earlier),
            skipped=len(merged.skipped),
        )

    reused = sum(about["images"]["reused"] for about in abouts)
    job.merge(shares, write, command=command)
    counts = len(merged.records), len(merged.records), len(merged.earlier)
    records = [*everything.values()]
    found = class_shares(records, classes), instance_counts(records, classes, split)
    return Segmented(job.path, *counts, merged.skipped, 0.0, 0.0, *found)


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the differences between two identities, as text."""
    changes = [*changes_between(before, now)]
    first, second = (identity["collection"] for identity in (before, now))
    if not changes and first != second:
        first, second = (text.partition(" ")[0] for text in (first, second))
        changes = [f"images were added, removed or renamed: the collection had {first} images, has {second}"]
    return changes


@dataclass
class _Merged:
    """Joined results.

    Attributes:
        names: names of the images of all shares, in order.
        records: records of the labelled images by name, in order.
        earlier: records of images of earlier calls that are no longer among the images.
        skipped: reasons why images could not be read, by name.
        places: folder of the files of each record, by name.
    """

    names: list[str] = field(default_factory=list)
    records: dict[str, Record] = field(default_factory=dict)
    earlier: dict[str, Record] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    places: dict[str, Path] = field(default_factory=dict)

    def add(self, share: FinishedShare, found: int) -> None:
        """Add the results of a share of so many images; raises DataError if they are incomplete."""
        folder = share.folder
        records = read_records(folder, share.accounts)
        try:
            with (folder / SUMMARY).open(encoding="utf-8", newline="") as file:
                rows = [(row[0], row[-1]) for row in csv.reader(file)][1:]
        except (OSError, ValueError, IndexError, csv.Error) as error:
            raise DataError(f"{folder / SUMMARY} is damaged: {_AGAIN}") from error
        for name, reason in rows[:found]:
            if reason:
                self.skipped[name] = reason
            elif name in records:
                self.records[name] = records[name]
                self.places[name] = folder
            else:
                raise DataError(f"{folder} lacks the results of {name}, or some of its files: {_AGAIN}")
        self.names += [name for name, _ in rows[:found]]
        if len(rows) < found:
            raise DataError(f"{folder} lacks the results of {found - len(rows)} of {found} images: {_AGAIN}")
        for name, _ in rows[found:]:
            if name in records:
                self.earlier[name] = records[name]
                self.places.setdefault(name, folder)

    def drop_earlier(self) -> None:
        """Drop records of earlier images whose results have the name of those of a present one."""
        present = {result_name(name) for name in self.names}
        self.earlier = {name: record for name, record in self.earlier.items() if result_name(name) not in present}


_AGAIN = "repeat its command with --resume"
