"""Implementation of `cribo embed`: encode the parts of a collection, and write their features to files."""

import hashlib
import json
import os
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import tee
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from cribo.apps.embed.config import EmbedConfig, Format
from cribo.apps.embed.embedder import Embedder
from cribo.apps.embed.writing import PARTS, complete_parts, part_path, require_writer, write_part
from cribo.base.console import Phases
from cribo.base.errors import InputError, Stopped, if_interrupted
from cribo.base.files import read_json_lines, remove_parts, write_json, write_text
from cribo.base.folders import ResultFolder, describe_changes, lock_replaced, lock_writer, require_same
from cribo.base.versions import versions
from cribo.base.wording import counted
from cribo.data.sources.collection import ImageCollection, content_hash, fingerprint, open_collection, without_repeats
from cribo.data.sources.images import is_url, require_readable
from cribo.features.config import ObjectSettings
from cribo.features.object_extraction import MAX_PATCHES
from cribo.features.prefetching import BUDGET
from cribo.features.spread.engines import open_engine
from cribo.features.spread.parts import part_size
from cribo.features.spread.shares import Share

ABOUT, SKIPPED = "about.json", "skipped.jsonl"
FORMAT = 3
"""Version of the results."""
SKIPPED_IN_PARTS = ".skipped"
"""Folder with a list for each part that has unreadable images."""

IMAGES_OF_PARTS = ".images"
"""Folder with a file for each part: hashes of the modification times and of the contents of its images."""

_MOST_IMAGES = 512  # limit per part; an interrupted part is encoded again
_ADVICE = "choose another --out, continue it with --resume, or replace it with --overwrite"


@dataclass(frozen=True)
class Embedded:
    """Result of `embed_images`.

    Attributes:
        folder: output folder.
        features: folder or dataset of the features.
        images: number of images in all parts, without unreadable ones.
        reused: number of these images in parts that already existed.
        skipped: reasons why images could not be read, by name.
        seconds: duration of encoding the other images.
    """

    folder: Path
    features: Path
    images: int
    reused: int
    skipped: dict[str, str]
    seconds: float


def embed_images(
    config: EmbedConfig,
    *,
    out: Path,
    resume: bool = False,
    overwrite: bool = False,
    command: str = "",
    console: Console | None = None,
) -> Embedded:
    """Write the features of a collection of images to files in parts, each atomically.

    Args:
        config: options of the command.
        out: output folder; with --engine ray, all workers must see it.
        resume: keep existing parts in `out` and write the missing ones; images, backbone and settings must be the same.
        overwrite: replace existing results in `out`.
        command: command line to record in the results.
        console: console for progress.

    Raises:
        ValueError: backbone, images, settings, cluster or folder are invalid, or no image can be read; raised before
            anything is written.
        FileNotFoundError: a file of the backbone or the images does not exist.
        ConnectionError: the images, the weights or the cluster cannot be reached.
        ImportError: the library of the format, or Ray, is not installed.
        OSError: results cannot be written.
    """
    console = console or Console(quiet=True)
    if resume and overwrite:
        raise InputError("--resume and --overwrite exclude each other: choose one")
    require_writer(config.format)
    target = ResultFolder(
        out,
        "embedding",
        overwrite=overwrite,
        resume=resume,
        inputs=(config.images, config.backbone.source),
        advice=_ADVICE,
    )
    images = open_collection(config.images, column=config.column, reading=config.reading)
    require_readable(images, config.images)
    embedder = Embedder(
        config.backbone,
        features=config.features,
        blocks=config.blocks,
        settings=_settings(config),
        precision=config.precision,
        batch_size=config.batch_size,
        workers=config.workers,
        device=config.device,
    )
    # Workers open the backbone on their own devices; here it is only described.
    described = embedder if config.engine == "local" else embedder.on("cpu")
    embedder.network.expect(described.network.encoder.identity)
    options = _options(config, described)
    plan = _Plan(images, config.share, _images_in_part(config, described, len(images)), options)
    about = _about(config, described, plan, options, command)
    with open_engine(config, writes_to=out) as engine, Phases(console) as progress:
        if target.resumes:
            require_same(out / ABOUT, lambda: _changes(out, about, plan, config.format))
        else:
            with lock_replaced(target, command="cribo embed"):
                target.create(lambda part: write_json(part / ABOUT, about))
        with lock_writer(out, command="cribo embed", advice="choose another --out"):
            for folder in (PARTS, IMAGES_OF_PARTS):
                (out / folder).mkdir(exist_ok=True)
            started = time.perf_counter()
            with if_interrupted(lambda: f"complete parts are in {out}; to continue, repeat the command with --resume"):
                missing = [part for part in plan.parts if not part_path(out, part.name, config.format).exists()]
                work = _EmbedParts(embedder, out, config.format)
                total = sum(len(part.images) for part in plan.parts)
                reused = total - sum(len(part.images) for part in missing)
                done = 0
                progress("images", reused, total)
                with closing(engine.run(work, missing)) as results:
                    for count in results:
                        done += count
                        progress("images", reused + done, total)
            skipped = write_skipped(out, [part.name for part in plan.parts])
            if len(skipped) == plan.images:  # although one could be read at first
                raise Stopped(f"the images can no longer be read: see {SKIPPED} in {out}")
            features = complete_parts(out, config.format)
            write_json(out / ABOUT, {**about, "finished": True, "skipped": len(skipped)})
            for folder in (PARTS, IMAGES_OF_PARTS):
                remove_parts(out / folder)
            new = {part.name for part in missing}
            reused -= sum(name in skipped for part in plan.parts if part.name not in new for name in part.names)
            return Embedded(out, features, total - len(skipped), reused, skipped, time.perf_counter() - started)


def _settings(config: EmbedConfig) -> ObjectSettings | None:
    """Return the given settings; None for global features at the network's own size."""
    if config.features == "global" and config.size is None:
        return None
    return config.settings(ObjectSettings())


class _Part(NamedTuple):
    """A part of the collection.

    Attributes:
        name: its number, and a hash of the names and sizes of its images and of the options.
        images: its images.
        times: hash of the modification times of its images.
    """

    name: str
    images: ImageCollection
    times: str

    def __str__(self) -> str:
        return self.name

    @property
    def names(self) -> list[str]:
        """Names of its images."""
        return [self.images.name(index) for index in range(len(self.images))]


class _Plan:
    """The parts of a share of a collection, each image once.

    Attributes:
        parts: the parts of the share.
        count: number of parts of all shares.
        images: number of images of all shares.
        fingerprint: hash of the names and sizes of all images.
    """

    def __init__(self, images: ImageCollection, share: Share, size: int, options: Mapping[str, Any]) -> None:
        images = without_repeats(images)
        every = range(len(images))
        parts = [images.part(every[start : start + size]) for start in every[::size]]
        found = [fingerprint(part) for part in parts]
        digests = [hashlib.sha256(f"{each.files} {json.dumps(options)}".encode()).hexdigest() for each in found]
        self.count, self.images = len(parts), len(images)
        self.fingerprint = hashlib.sha256("".join(each.files for each in found).encode()).hexdigest()
        self.parts = [
            _Part(f"part-{number:05d}-{digests[number][:8]}", parts[number], found[number].times)
            for number in share.of(range(len(parts)), f"parts of {counted(size, 'image')}")
        ]


def _images_in_part(config: EmbedConfig, embedder: Embedder, images: int) -> int:
    """Return the number of images per part, which does not depend on the workers or the sizes of the images."""
    rows = {"global": 1, "patches": MAX_PATCHES, "objects": embedder.settings.num_objects}[config.features]
    wanted = part_size(images, most=_MOST_IMAGES)
    return min(wanted, max(1, BUDGET // (rows * embedder.dim * 4)))


def _options(config: EmbedConfig, embedder: Embedder) -> dict[str, Any]:
    """Return the options on which the features depend."""
    return {
        "encoder": embedder.network.encoder.identity,
        "features": config.features,
        "format": config.format,
        "precision": config.precision,
        **json.loads(json.dumps(asdict(embedder.settings))),
        **({} if config.reading.range is None else {"range": list(config.reading.range)}),
    }


def _about(
    config: EmbedConfig, embedder: Embedder, plan: _Plan, options: Mapping[str, Any], command: str
) -> dict[str, Any]:
    network = embedder.network
    return {
        "format": FORMAT,
        "command": command,
        "finished": False,
        "same": {
            "range": None,
            **options,
            "images": plan.images,
            "files": plan.fingerprint,
            "parts": plan.count,
            "part": str(config.share),
        },
        "images": config.images if is_url(config.images) else os.path.realpath(config.images),
        "backbone": network.about,
        "blocks": list(network.encoder.blocks),
        "channels": embedder.dim,
        "versions": versions(network.device),
    }


def changes_between(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """Yield the differences between two descriptions of results: images, backbone or settings."""
    if before["format"] != now["format"]:
        yield "it was written by another version of cribo"
        return
    settings = {name: value for name, value in now["same"].items() if name not in ("files", "parts")}
    changes = [*describe_changes({name: before["same"].get(name) for name in settings}, settings)]
    yield from changes
    # The hash depends on the division into parts, and that on the options.
    divided_alike = not changes or before["same"]["parts"] == now["same"]["parts"]
    if divided_alike and before["same"]["files"] != now["same"]["files"]:
        place, folder = "the place of the images", before["images"]
        moved = list(describe_changes({place: folder}, {place: now["images"]}))
        yield from moved or [f"images of {folder} were added, removed or changed"]


def _changes(folder: Path, about: dict[str, Any], plan: _Plan, kind: Format) -> Iterator[str]:
    """Yield the differences between the results in a folder and those to write.

    Modification times tell whether images may have changed; if so, they are read again, since copies have other times.
    """
    changes = [*changes_between(json.loads((folder / ABOUT).read_text(encoding="utf-8")), about)]
    yield from changes
    for part in plan.parts if not changes else ():
        record = folder / IMAGES_OF_PARTS / f"{part.name}.json"
        if not part_path(folder, part.name, kind).exists():
            continue
        before = json.loads(record.read_text(encoding="utf-8"))
        if before["times"] == part.times:
            continue
        if before["content"] != content_hash(part.images):
            names = part.names
            yield f"the content of images of {about['images']} has changed, among {names[0]} to {names[-1]}"
            return
        write_json(record, {**before, "times": part.times})


class _EmbedParts:
    """Writes the features of each part and yields its number of images; run by an engine."""

    def __init__(self, embedder: Embedder, folder: Path, kind: Format) -> None:
        self.embedder, self.folder = embedder, folder.absolute()
        self.kind: Format = kind

    def __call__(self, parts: Iterable[_Part]) -> Generator[int, None, None]:
        first, second = tee(parts)
        found = self.embedder.stream(part.images for part in first)
        with closing(found):
            for part, features in zip(second, found, strict=True):
                skipped = self.folder / SKIPPED_IN_PARTS / f"{part.name}.jsonl"
                skipped.unlink(missing_ok=True)  # of an attempt that was killed
                if features.errors:  # before the part, so that a complete part has its list
                    (self.folder / SKIPPED_IN_PARTS).mkdir(exist_ok=True)
                    lines = ({"image": features.names[i], "reason": why} for i, why in features.errors.items())
                    write_text(skipped, _json_lines(lines))
                record = {"times": part.times, "content": features.content}
                write_json(self.folder / IMAGES_OF_PARTS / f"{part.name}.json", record)
                write_part(self.folder, part.name, self.kind, features)
                yield len(part.images)


def write_skipped(folder: Path, parts: Iterable[str]) -> dict[str, str]:
    """Join the lists of the parts, given by name; return the reasons why images could not be read, by name."""
    lists = (read_json_lines(folder / SKIPPED_IN_PARTS / f"{part}.jsonl") for part in parts)
    skipped = {entry["image"]: entry["reason"] for entries in lists for entry in entries}
    if skipped:
        lines = ({"image": name, "reason": reason} for name, reason in skipped.items())
        write_text(folder / SKIPPED, _json_lines(lines))
    return skipped


def _json_lines(entries: Iterable[dict[str, str]]) -> str:
    return "".join(f"{json.dumps(entry)}\n" for entry in entries)
