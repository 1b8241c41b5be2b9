"""Files that describe the results of `cribo segment`: a record for each image, the summary and the settings."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from cribo.apps.segment.instances import Instance, InstanceCounts
from cribo.apps.segment.targets import result_name
from cribo.base.console import duration
from cribo.base.files import write_json, write_text
from cribo.base.job import Account, describe_changes
from cribo.base.tables import Table, texts
from cribo.base.wording import counted, enumerated
from cribo.features.probes.fitting import Choice, Probe

KIND = "segmentation"

OUT = Path("segmented")
"""Parent folder of results without --out."""

OVERVIEW = "contact.png"

ABOUT = "about.json"
"""File in the output folder that describes the results."""

SUMMARY = "summary.csv"

FOLDERS = ("labels", "overlays", "confidence")

INSTANCES = "instances"
"""Folder of the instance maps, if classes are split."""

INSTANCE_TABLE = "instances.csv"


@dataclass(frozen=True)
class Record:
    """Row of `SUMMARY` for an image, with the hash of the image file.

    Attributes:
        name: name of the image.
        content: SHA-256 of its file.
        size: height and width in pixels.
        shares: share of each class in its pixels, by name.
        confidence: mean confidence, 0 to 1.
        instances: its instances; None if no class is split.
        suffix: of its label map and confidence: .tif for large images.
    """

    name: str
    content: str
    size: tuple[int, int]
    shares: Mapping[str, float]
    confidence: float
    instances: Sequence[Instance] | None = None
    suffix: str = ".png"

    @property
    def account(self) -> dict[str, Any]:
        """The fields other than the name, as JSON types."""
        values = {name: value for name, value in vars(self).items() if name not in ("name", "instances", "suffix")}
        if self.suffix != ".png":
            values["suffix"] = self.suffix
        return values if self.instances is None else {**values, "instances": [*map(astuple, self.instances)]}

    @classmethod
    def of_account(cls, name: str, values: Mapping[str, Any]) -> "Record":
        """Return the record of an account."""
        found: dict[str, Any] = {**values, "size": tuple(values["size"])}
        if "instances" in values:
            found["instances"] = [Instance(*each[:3], box=tuple(each[3])) for each in values["instances"]]
        return cls(name, **found)


@dataclass(frozen=True)
class Segmented:
    """Result of a command that labels images.

    Attributes:
        folder: output folder.
        images: number of labelled images.
        reused: number of images that were already labelled.
        earlier: number of images of earlier calls that are no longer among the images; their results are kept.
        skipped: reasons why images could not be read, by name.
        seconds: duration of the command, without imports.
        labelling_seconds: duration of labelling the other images.
        shares: share of each class in the pixels of all images.
        instances: numbers of instances of the split classes.
    """

    folder: Path
    images: int
    reused: int
    earlier: int
    skipped: dict[str, str]
    seconds: float
    labelling_seconds: float
    shares: dict[str, float]
    instances: Mapping[str, InstanceCounts] = field(default_factory=dict)

    @property
    def speed(self) -> str:
        """Number of images, duration and speed, as text."""
        fresh = self.images - self.reused
        text = f"{counted(fresh, 'image')} in {duration(self.seconds)}"
        if fresh:
            speed = f"{fresh / self.labelling_seconds:.1f} images/s"
            text += f", of which labelling took {duration(self.labelling_seconds)} ({speed})"
        if self.reused:
            text += f", {self.reused} already labelled"
        if self.earlier:
            text += f", results of {counted(self.earlier, 'earlier image')} kept"
        return text


def files_of(folder: Path, name: str, suffix: str = ".png") -> tuple[Path, Path, Path]:
    """Return the paths of label map, overlay and confidence of an image; the suffix is that of its `Record`."""
    stem = result_name(name)
    return (
        folder / "labels" / f"{stem}{suffix}",
        folder / "overlays" / f"{stem}.jpg",
        folder / "confidence" / f"{stem}{suffix}",
    )


def instances_file(folder: Path, name: str) -> Path:
    """Return the path of the numbers of an image's instances."""
    return folder / INSTANCES / f"{result_name(name)}.png"


def files_of_record(folder: Path, record: Record) -> list[Path]:
    """Return the paths of all files of an image."""
    return [
        *files_of(folder, record.name, record.suffix),
        *([] if record.instances is None else [instances_file(folder, record.name)]),
    ]


def read_records(folder: Path, accounts: Mapping[str, Account]) -> dict[str, Record]:
    """Return the records of images whose files are complete, by name.

    Args:
        folder: output folder.
        accounts: those of its job, by name of the image.
    """
    records: dict[str, Record] = {}
    for name, values in accounts.items():
        record = Record.of_account(name, values)
        if all(path.is_file() for path in files_of_record(folder, record)):
            # Images that differ only in the extension share files; keep the last one.
            records[result_name(record.name)] = record
    return {record.name: record for record in records.values()}


def changes_between(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield the differences between the identities of two results: image folder, memory or settings."""
    both = before, now

    def changed(values: Callable[[Mapping[str, Any]], dict[str, Any]]) -> list[str]:
        return list(describe_changes(*map(values, both)))

    def of_features(identity: Mapping[str, Any]) -> dict[str, Any]:
        backbone = {
            f"{name} of the backbone": value
            for name, value in identity["backbone"].items()
            if name not in ("revision", "licences")  # they do not change features
        }
        return {**identity["settings"], **backbone, "the list of classes": ", ".join(identity["classes"])}

    yield from changed(lambda identity: {"the folder of the images": identity["folder"]})
    yield from changed(
        lambda identity: {
            "instances": ", ".join(identity.get("instances", [])) or "no class",
            "min_area": identity.get("min_area"),
        }
    )
    if before["memory"] == now["memory"]:
        yield from changed(lambda identity: {"the probe": _probe_of(identity["choice"])})
        return
    yield from (
        changed(of_features)
        or changed(lambda identity: {"the list of examples": enumerated(identity["examples"])})
        or ["the images or labels of the examples have changed"]
    )


def _probe_of(choice: Mapping[str, Any]) -> Probe | str:
    found = Choice.from_json(choice)
    return "one of an earlier version" if found is None else found.probe


def class_shares(records: Sequence[Record], classes: Sequence[str]) -> dict[str, float]:
    """Return the share of each class in the pixels of all images, in descending order."""
    pixels = dict.fromkeys(classes, 0.0)
    for record in records:
        for name, share in record.shares.items():
            pixels[name] += share * math.prod(record.size)
    total = sum(math.prod(record.size) for record in records) or 1
    return {name: count / total for name, count in sorted(pixels.items(), key=lambda pair: -pair[1])}


def instance_counts(
    records: Sequence[Record], classes: Sequence[str], split: Sequence[str]
) -> dict[str, InstanceCounts]:
    """Return the numbers of instances of the split classes in all images, by name."""
    found = {name: [] for name in split}
    for record in records:
        for each in record.instances or ():
            found[classes[each.label]].append(each)
    return {name: InstanceCounts.of(own, len(records)) for name, own in found.items()}


def write_summary(
    folder: Path,
    names: Iterable[str],
    records: Mapping[str, Record],
    earlier: Mapping[str, Record],
    skipped: Mapping[str, str],
    classes: Sequence[str],
    split: Sequence[str] = (),
) -> None:
    """Write `SUMMARY`, and `INSTANCE_TABLE` if classes are split.

    Args:
        folder: output folder.
        names: names of all images.
        records: records of the labelled images by name.
        earlier: records of images of earlier calls that are no longer among the images.
        skipped: reasons why the other images could not be read, by name.
        classes: names of the classes.
        split: those of the split classes.
    """
    rows, objects = [], []
    of_instances = [f"{name} {figure}" for name in split for figure in ("instances", "mean area", "mean confidence")]
    for name in (*names, *earlier):
        if name in skipped:
            rows.append([name, *[""] * (3 + len(classes) + len(of_instances)), skipped[name]])
            continue
        record = records.get(name) or earlier[name]
        shares = [f"{record.shares.get(c, 0):.6f}" for c in classes]
        counts = [
            cell
            for own in instance_counts([record], classes, split).values()
            for cell in (str(own.count), *((f"{own.area:.1f}", f"{own.confidence:.4f}") if own.count else ("", "")))
        ]
        rows.append([name, *map(str, reversed(record.size)), f"{record.confidence:.4f}", *shares, *counts, ""])
        for number, each in enumerate(record.instances or (), start=1):
            cells = number, classes[each.label], each.area, f"{each.confidence:.4f}", *each.box
            objects.append([name, *map(str, cells)])
    columns = texts("image", "width", "height", "confidence", *classes, *of_instances, "error")
    write_text(folder / SUMMARY, Table(columns, [rows]).csv())
    if split:
        columns = texts("image", "instance", "class", "area", "confidence", "left", "top", "width", "height")
        write_text(folder / INSTANCE_TABLE, Table(columns, [objects]).csv())


def write_finished(folder: Path, about: Mapping[str, Any], *, seconds: float, **images: int) -> None:
    """Write the final `ABOUT`.

    Args:
        folder: output folder.
        about: backbone, memory and settings.
        seconds: duration of labelling.
        images: numbers of images: found, segmented, reused, earlier and skipped.
    """
    fresh = images["segmented"]
    final = {
        **about,
        "finished": True,
        "images": {**about["images"], **images},
        "seconds": round(seconds, 3),
        "seconds_per_image": round(seconds / fresh, 4) if fresh else None,
    }
    write_json(folder / ABOUT, final)
