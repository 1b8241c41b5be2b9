"""Implementation of `cribo embed`: encode the parts of a collection, and write their features to files."""

import hashlib
import json
import os
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from cribo.apps.embed.config import EmbedConfig, Format
from cribo.apps.embed.embedder import Embedder
from cribo.apps.embed.mapping import require_mappable, write_map
from cribo.apps.embed.writing import PARTS, complete_parts, part_path, require_writer, write_part
from cribo.base.console import Phases
from cribo.base.errors import Stopped
from cribo.base.files import write_json, write_text
from cribo.base.job import Account, Job, describe_changes
from cribo.base.shares import Share
from cribo.base.versions import versions
from cribo.base.wording import counted
from cribo.data.sources.collection import ImageCollection, content_hash, fingerprint, open_collection, without_repeats
from cribo.data.sources.images import collection_name, is_url, require_readable
from cribo.data.survey import surveyed
from cribo.features.config import ObjectSettings
from cribo.features.object_extraction import MAX_PATCHES
from cribo.features.prefetching import BUDGET
from cribo.features.reading import completed_for
from cribo.features.spread.engines import open_engine
from cribo.features.spread.parts import ImagePart, part_size

KIND = "embedding"
OUT = Path("features")
"""Parent folder of results without --out."""

ABOUT, SKIPPED = "about.json", "skipped.jsonl"

_MOST_IMAGES = 512  # limit per part; an interrupted part is encoded again


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
        map: file of the map; None without one.
    """

    folder: Path
    features: Path
    images: int
    reused: int
    skipped: dict[str, str]
    seconds: float
    map: Path | None = None


def embed_images(
    config: EmbedConfig,
    *,
    out: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    command: str = "",
    console: Console | None = None,
) -> Embedded:
    """Write the features of a collection of images to files in parts, each atomically.

    Args:
        config: options of the command.
        out: output folder; by default a numbered folder `features/<images>`. With --engine ray, all workers must see
            it.
        resume: keep existing parts in `out`, or without `out` in the last folder of this name, and write the missing
            ones; images, backbone and settings must be the same.
        overwrite: replace existing results in `out`.
        command: command line to record in the results.
        console: console for progress.

    Raises:
        ValueError: backbone, images, settings, cluster or folder are invalid, or no image can be read; raised before
            anything is written.
        FileNotFoundError: a file of the backbone or the images does not exist.
        ConnectionError: the images, the weights or the cluster cannot be reached.
        ImportError: the library of the format, UMAP or Ray is not installed.
        DataError: the map cannot be computed from the features, which are complete.
        OSError: results cannot be written.
    """
    console = console or Console(quiet=True)
    require_writer(config.format)
    if config.map is not None:
        require_mappable(config.map)
    job = Job(
        out or OUT / f"{collection_name(config.images)}{config.share.suffix}",
        KIND,
        numbered=out is None,
        resume=resume,
        overwrite=overwrite,
        inputs=(config.images, config.backbone.source),
    )
    config = replace(config, reading=completed_for(config.backbone, config.reading))
    images = open_collection(config.images, column=config.column, reading=config.reading)
    if (known := job.resumed_identity.get("range")) is None:
        images.reading = surveyed(images)
    else:  # the images may have changed
        images.reading = config.reading.completed({"range": known})
    config = replace(config, reading=images.reading)
    require_readable(images, config.images, windows=True)
    embedder = Embedder(
        config.backbone,
        features=config.features,
        blocks=config.blocks,
        settings=_settings(config),
        precision=config.precision,
        batch_size=config.batch_size,
        workers=config.workers,
        device=config.device,
        reading=config.reading,
    )
    # Workers open the backbone on their own devices; here it is only described.
    described = embedder if config.engine == "local" else embedder.on("cpu")
    embedder.encoder.expect(described.encoder.identity)
    options = _options(config, described)
    plan = _Plan(images, config.share, _images_in_part(config, described, len(images)), options)
    if config.map is not None and config.features == "global":
        require_mappable(config.map, plan.images)
    place = config.images if is_url(config.images) else os.path.realpath(config.images)
    identity = {**options, "images": plan.images, "files": plan.fingerprint, "parts": plan.count, "place": place}

    def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
        yield from changes_between(before, now) or _changed_content(job, plan.parts, place)

    with (
        open_engine(config, writes_to=out or OUT) as engine,
        Phases(console) as progress,
        job.open(identity, command=command, share=str(config.share), changes=changes),
    ):
        out = job.path
        (out / PARTS).mkdir(exist_ok=True)
        missing = job.missing(plan.parts, lambda part: part_path(out, part.name, config.format).exists())
        started = time.perf_counter()
        total = sum(len(part.images) for part in plan.parts)
        done = reused = total - sum(len(part.images) for part in missing)
        progress("images", done, total)
        with closing(engine.run(_EmbedParts(embedder, out, config.format), missing)) as results:
            for name, account in results:
                job.done(name, **account)
                done += account["images"]
                progress("images", done, total)
        skipped = write_skipped(out, [job.accounts[part.name] for part in plan.parts])
        if len(skipped) == plan.images:  # although one could be read at first
            raise Stopped(f"the images can no longer be read: see {SKIPPED} in {out}")
        features = complete_parts(out, config.format)
        write_json(out / ABOUT, _about(identity, described, command, len(skipped)))
        job.finish()
        seconds = time.perf_counter() - started
        drawn = None
        if config.map is not None:
            drawn = write_map(out, config.format, config.map, seed=config.map_seed, progress=progress)
        new = {part.name for part in missing}
        reused -= sum(len(job.accounts[part.name]["skipped"]) for part in plan.parts if part.name not in new)
        return Embedded(out, features, total - len(skipped), reused, skipped, seconds, drawn)


def _settings(config: EmbedConfig) -> ObjectSettings | None:
    """Return the given settings; None for global features at the network's own size."""
    if config.features == "global" and config.size is None:
        return None
    return config.settings(ObjectSettings())


@dataclass(frozen=True, kw_only=True)
class _Part(ImagePart):
    """A part of the collection.

    Attributes:
        name: its number, and a hash of the names and sizes of its images and of the options.
        times: hash of the modification times of its images.
    """

    name: str
    times: str

    def __str__(self) -> str:
        return self.name


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
            _Part(parts[number], name=f"part-{number:05d}-{digests[number][:8]}", times=found[number].times)
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
        "encoder": embedder.encoder.identity,
        "features": config.features,
        "format": config.format,
        "precision": config.precision,
        **asdict(embedder.settings),
        **config.reading.given,
    }


def _about(identity: Mapping[str, Any], embedder: Embedder, command: str, skipped: int) -> dict[str, Any]:
    """Describe the results for their readers."""
    encoder = embedder.encoder
    return {
        "command": command,
        "same": {name: value for name, value in identity.items() if name != "place"},
        "images": identity["place"],
        "backbone": encoder.about,
        "blocks": list(encoder.blocks),
        "channels": embedder.dim,
        "skipped": skipped,
        "versions": versions(str(encoder.device)),
    }


def changes_between(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the differences between two identities: images, backbone or settings."""
    settings = {name: value for name, value in now.items() if name not in ("files", "parts", "place")}
    changes = [*describe_changes({name: before.get(name) for name in settings}, settings)]
    # The hash depends on the division into parts, and that on the options.
    divided_alike = not changes or before.get("parts") == now.get("parts")
    if divided_alike and before.get("files") != now.get("files"):
        places = ({"the place of the images": each.get("place")} for each in (before, now))
        changes += [*describe_changes(*places)] or [f"images of {now.get('place')} were added, removed or changed"]
    return changes


def _changed_content(job: Job, parts: Sequence[_Part], place: str) -> Iterator[str]:
    """Yield the first part whose images have changed.

    Modification times tell whether images may have changed; if so, they are read again, since copies have other times.
    """
    for part in parts:
        account = job.accounts.get(part.name)
        if account is None or account["times"] == part.times:
            continue
        if account["content"] != content_hash(part.images):
            names = [part.images.name(index) for index in (0, len(part.images) - 1)]
            yield f"the content of images of {place} has changed, among {names[0]} to {names[1]}"
            return
        job.done(part.name, **{**account, "times": part.times})


class _EmbedParts:
    """Writes the features of each part and yields its name and account; run by an engine."""

    def __init__(self, embedder: Embedder, folder: Path, kind: Format) -> None:
        self.embedder, self.folder = embedder, folder.absolute()
        self.kind: Format = kind

    def __call__(self, parts: Iterable[_Part]) -> Generator[tuple[str, Account], None, None]:
        with closing(self.embedder.stream(parts)) as found:
            for part, images in found:
                features = self.embedder.join([*images])
                write_part(self.folder, part.name, self.kind, features)
                skipped = {features.names[place]: reason for place, reason in features.errors.items()}
                account = {"images": len(part.images), "times": part.times, "content": features.content}
                yield part.name, {**account, "skipped": skipped}


def write_skipped(folder: Path, accounts: Iterable[Account]) -> dict[str, str]:
    """Write the list of unreadable images; return the reasons why they could not be read, by name."""
    skipped = {name: reason for account in accounts for name, reason in account["skipped"].items()}
    if skipped:
        lines = (json.dumps({"image": name, "reason": reason}) for name, reason in skipped.items())
        write_text(folder / SKIPPED, "".join(f"{line}\n" for line in lines))
    return skipped
