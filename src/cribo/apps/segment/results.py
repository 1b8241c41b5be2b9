"""Files that describe the results of `cribo segment`: a record for each image, the summary and the settings."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cribo.apps.segment.targets import result_name
from cribo.base.files import write_json, write_text
from cribo.base.job import Account, describe_changes
from cribo.base.tables import Table, texts
from cribo.base.wording import enumerated
from cribo.features.probes.fitting import Choice, Probe

KIND = "segmentation"

ABOUT = "about.json"
"""File in the output folder that describes the results."""

SUMMARY = "summary.csv"

FOLDERS = ("labels", "overlays", "confidence")


@dataclass(frozen=True)
class Record:
    """Row of `SUMMARY` for an image, with the hash of the image file.

    Attributes:
        name: name of the image.
        content: SHA-256 of its file.
        size: height and width in pixels.
        shares: share of each class in its pixels, by name.
        confidence: mean confidence, 0 to 1.
    """

    name: str
    content: str
    size: tuple[int, int]
    shares: Mapping[str, float]
    confidence: float


def files_of(folder: Path, name: str) -> tuple[Path, Path, Path]:
    """Return the paths of label map, overlay and confidence of an image."""
    stem = result_name(name)
    return (
        folder / "labels" / f"{stem}.png",
        folder / "overlays" / f"{stem}.jpg",
        folder / "confidence" / f"{stem}.png",
    )


def read_records(folder: Path, accounts: Mapping[str, Account]) -> dict[str, Record]:
    """Return the records of images whose files are complete, by name.

    Args:
        folder: output folder.
        accounts: those of its job, by name of the image.
    """
    records: dict[str, Record] = {}
    for name, values in accounts.items():
        record = Record(name, **{**values, "size": tuple(values["size"])})
        if all(path.is_file() for path in files_of(folder, record.name)):
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


def write_summary(
    folder: Path,
    names: Iterable[str],
    records: Mapping[str, Record],
    earlier: Mapping[str, Record],
    skipped: Mapping[str, str],
    classes: Sequence[str],
) -> None:
    """Write `SUMMARY`.

    Args:
        folder: output folder.
        names: names of all images.
        records: records of the labelled images by name.
        earlier: records of images of earlier calls that are no longer among the images.
        skipped: reasons why the other images could not be read, by name.
        classes: names of the classes.
    """
    rows = []
    for name in (*names, *earlier):
        if name in skipped:
            rows.append([name, *[""] * (3 + len(classes)), skipped[name]])
            continue
        record = records.get(name) or earlier[name]
        shares = [f"{record.shares.get(c, 0):.6f}" for c in classes]
        rows.append([name, *map(str, reversed(record.size)), f"{record.confidence:.4f}", *shares, ""])
    columns = texts("image", "width", "height", "confidence", *classes, "error")
    write_text(folder / SUMMARY, Table(columns, [rows]).csv())


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
