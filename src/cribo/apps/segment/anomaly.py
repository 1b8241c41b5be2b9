"""Implementation of `cribo segment --anomaly`: find images that differ from normal ones, and where."""

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from jaxtyping import Float, UInt8
from matplotlib.figure import Figure
from PIL import Image
from rich.console import Console
from torch import Tensor

from cribo.apps.segment.config import AnomalyConfig
from cribo.apps.segment.results import OUT, OVERVIEW, SUMMARY, write_finished
from cribo.apps.segment.targets import open_targets, result_name
from cribo.base.bounds import at_least
from cribo.base.console import Phases, duration
from cribo.base.devices import resolve_device, resolve_threads
from cribo.base.drawing import house_style, panel_grid, title_row, write_figure
from cribo.base.errors import UnreadableImage
from cribo.base.files import write_text, write_whole
from cribo.base.job import Job
from cribo.base.painting import as_picture
from cribo.base.tables import Table, texts
from cribo.base.versions import versions
from cribo.base.wording import counted
from cribo.data.labelled.inputs import DecodedImage, decode_image
from cribo.data.reading import read_values
from cribo.data.sources.collection import ImageCollection
from cribo.data.sources.images import collection_name, require_readable
from cribo.data.survey import surveyed
from cribo.features.anomaly import NormalPatches, PatchEncoder, has_data, image_score, pixel_distances
from cribo.features.config import AnomalySettings
from cribo.features.encoder import open_network
from cribo.features.prefetching import prefetch
from cribo.features.probes.examples import content_hash
from cribo.features.reading import completed_for

KIND = "anomalies"

MAPS, OVERLAYS = "maps", "overlays"

STEPS = 10_000
"""Factor from distances to the values of the maps."""

_NO_DATA = "no patch has data in all of its pixels"
_COLOURS = "magma"
_OPACITY = 0.8  # of the brightest colour in overlays
_JPEG_QUALITY = 90
_OVERVIEW_SIDE = 480  # limit on the longer side of an image in the overview, in pixels


@dataclass(frozen=True)
class Scored:
    """An image with its score.

    Attributes:
        name: name of the image.
        size: height and width in pixels.
        score: mean of the largest 1 % of the distances of its patches with data, 0 to 2.
        is_normal: whether it is one of the normal images, and was compared with the others.
    """

    name: str
    size: tuple[int, int]
    score: float
    is_normal: bool


@dataclass(frozen=True)
class Anomalies:
    """Result of `find_anomalies`.

    Attributes:
        folder: output folder.
        images: the scored images, highest score first.
        threshold: largest score of a normal image compared with the others; None for a single normal image.
        worst: name of this normal image; "" without a threshold.
        normal: number of normal images.
        left_out: number of normal images that were left out for the threshold.
        skipped: reasons why images could not be read or scored, by name.
        unread: the same for normal images.
        reused: number of images that were already scored.
        seconds: duration of the command, without imports.
    """

    folder: Path
    images: Sequence[Scored]
    threshold: float | None
    worst: str
    normal: int
    left_out: int
    skipped: dict[str, str]
    unread: dict[str, str]
    reused: int
    seconds: float

    def is_above(self, image: Scored) -> bool:
        """Whether the score of an image is above the threshold."""
        return self.threshold is not None and image.score > self.threshold

    @property
    def verdict(self) -> str:
        """The threshold and the number of images above it, as text."""
        if self.threshold is None:
            return "no threshold: it needs at least two normal images; the images are sorted by their score"
        above, left_out = sum(map(self.is_above, self.images)), counted(self.left_out, "normal image")
        return (
            f"{above} of {counted(len(self.images), 'image')} above the threshold {self.threshold:.3f}, the largest "
            f"score of {left_out} when left out, that of {self.worst}"
        )

    @property
    def speed(self) -> str:
        """Number of images and duration, as text."""
        text = f"{counted(len(self.images) - self.reused, 'image')} in {duration(self.seconds)}"
        return text + (f", {self.reused} already scored" if self.reused else "")


def find_anomalies(
    config: AnomalyConfig,
    settings: AnomalySettings | None = None,
    *,
    out: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    pictures: int = 6,
    command: str = "",
    console: Console | None = None,
) -> Anomalies:
    """Score images by the distance of their patches to those of normal images, and write maps, overlays and a summary.

    Distances and scores are those of AnomalyDINO (`cribo.features.anomaly`). The threshold is the largest score of a
    normal image when it is left out and compared with the others. Normal images that are among the images, with the
    same pixels, are compared with the others, too. Patches with a pixel without data (`read_valid`) have no distance,
    and are not among the normal ones.

    Args:
        config: options of the command.
        settings: size and blocks.
        out: output folder; by default a numbered folder `segmented/<images>`.
        resume: resume results in `out` with the same normal images and settings.
        overwrite: replace existing results in `out`.
        pictures: number of images with the highest scores in the overview; 0 for no overview.
        command: command line to record in the results.
        console: console for progress.

    Raises:
        ValueError: an option is invalid, or there are no readable images or normal images; raised before anything is
            written.
        FileNotFoundError: a file of the backbone or the images does not exist.
        OSError: results cannot be written.
    """
    console, settings, started = console or Console(quiet=True), settings or AnomalySettings(), time.perf_counter()
    at_least(0).check(pictures=pictures)
    job = Job(
        out or OUT / collection_name(config.images),
        KIND,
        numbered=out is None,
        resume=resume,
        overwrite=overwrite,
        inputs=(config.images, config.examples, config.backbone.source),
    )
    config = replace(config, reading=completed_for(config.backbone, config.reading))
    images = open_targets(config.images, apart_from=out or OUT, reading=config.reading)
    examples = open_targets(config.examples, apart_from=out or OUT, reading=config.reading)
    images.reading = examples.reading = surveyed(examples)
    config = replace(config, reading=examples.reading)
    require_readable(images, config.images)
    require_readable(examples, config.examples)
    network, about = open_network(config.backbone, in_chans=config.reading.in_chans)
    network = network.eval().to(resolve_device(config.device))
    encode = PatchEncoder(network, settings, batch_size=config.batch_size)
    names = [images.name(index) for index in range(len(images))]
    with Phases(console) as progress:
        normal = _encode_normal(examples, encode, config, progress)
        identity = {
            "folder": config.images,
            "normal images": normal.identity,
            "backbone": about,
            "settings": asdict(settings),
        }
        with job.open(identity, command=command):
            scored, skipped, reused, seconds = _score_images(images, names, normal, encode, config, job, progress)
            found = Anomalies(
                job.path,
                sorted(scored, key=lambda each: -each.score),
                normal.threshold,
                normal.worst,
                len(normal.names),
                len(normal.left_out),
                skipped,
                normal.unread,
                reused,
                time.perf_counter() - started,
            )
            _write_summary(found, names)
            write_finished(
                job.path,
                {
                    "command": command,
                    "images": {"folder": config.images},
                    **identity,
                    "blocks": encode.blocks,
                    "normal": {"folder": config.examples, "images": len(normal.names), "skipped": len(normal.unread)},
                    "threshold": normal.threshold,
                    "left_out_scores": normal.left_out,
                    "maps": f"{STEPS} times the distance of each pixel, 1 - cosine, 0 to 2; 0 without data",
                    "versions": versions(str(encode.encoder.device)),
                },
                seconds=seconds,
                found=len(names),
                segmented=len(scored) - reused,
                reused=reused,
                skipped=len(skipped),
            )
            job.finish()
            if pictures and scored:
                figure = _draw_overview(found, found.images[:pictures], images, names, normal.brightest)
                write_figure(job.path / OVERVIEW, figure)
    return found


class _Normal(NamedTuple):
    """The normal images: patches, names, index by the hash of the pixels, unreadable ones, and left-out scores."""

    patches: NormalPatches
    names: list[str]
    hashes: Mapping[str, int]
    unread: dict[str, str]
    left_out: dict[str, float]

    @property
    def identity(self) -> str:
        """Hash of the pixels of all images."""
        return hashlib.sha256("\n".join(sorted(self.hashes)).encode()).hexdigest()

    @property
    def worst(self) -> str:
        """Name of the normal image with the largest left-out score; "" if there is only one image."""
        return max(self.left_out, key=lambda name: self.left_out[name], default="")

    @property
    def threshold(self) -> float | None:
        """The largest left-out score."""
        return self.left_out[self.worst] if self.left_out else None

    @property
    def brightest(self) -> float:
        """Distance that has the brightest colour: twice the threshold."""
        return min(1.0, 2 * self.threshold) if self.threshold else 1.0


class _Read(NamedTuple):
    """An image by its number, or the reason why it could not be read."""

    number: int
    image: DecodedImage | None
    reason: str = ""

    @property
    def nbytes(self) -> int:
        return 0 if self.image is None else self.image.nbytes


def _encode_normal(examples: ImageCollection, encode: PatchEncoder, config: AnomalyConfig, progress: Phases) -> _Normal:
    """Encode the readable normal images with data, each content once, and score some of them when left out."""
    grids: list[Tensor] = []
    names: list[str] = []
    hashes: dict[str, int] = {}
    unread: dict[str, str] = {}
    done = 0
    for batch in _batches(examples, range(len(examples)), config):
        unread |= {examples.name(each.number): each.reason for each in batch if each.image is None}
        fresh: dict[str, tuple[str, DecodedImage]] = {}  # by the hash of the pixels
        for each in batch:
            if each.image is not None and (content := content_hash(each.image.pixels)) not in hashes:
                fresh.setdefault(content, (examples.name(each.number), each.image))
        encoded = encode([image for _, image in fresh.values()])
        for (content, (name, _)), grid in zip(fresh.items(), encoded, strict=True):
            if not has_data(grid).any():
                unread[name] = _NO_DATA
                continue
            hashes[content] = len(names)
            names.append(name)
            grids.append(grid)
        done += len(batch)
        progress("normal images", done, len(examples))
    patches = NormalPatches(grids, encode.encoder.device)
    return _Normal(
        patches, names, hashes, unread, {names[index]: score for index, score in patches.left_out_scores().items()}
    )


def _batches(images: ImageCollection, indices: Sequence[int], config: AnomalyConfig) -> Iterator[list[_Read]]:
    """Read images in threads, and yield them in batches."""

    def read(index: int) -> _Read:
        try:
            return _Read(index, decode_image(images.read(index), images.reading))
        except UnreadableImage as error:
            return _Read(index, None, error.reason)
        except OSError as error:
            return _Read(index, None, error.strerror or str(error))

    threads = resolve_threads(config.workers)
    ahead = threads + 2 * config.batch_size
    found = prefetch(
        read, indices, threads=threads, ahead=ahead, nbytes=lambda _, each: None if each is None else each.nbytes
    )
    with closing(found):
        while batch := list(islice(found, config.batch_size)):
            yield batch


class _Scores(NamedTuple):
    """The scored images, reasons for those without a score, number of reused scores, and duration."""

    scored: list[Scored]
    skipped: dict[str, str]
    reused: int
    seconds: float


def _score_images(
    images: ImageCollection,
    names: Sequence[str],
    normal: _Normal,
    encode: PatchEncoder,
    config: AnomalyConfig,
    job: Job,
    progress: Phases,
) -> _Scores:
    """Score the images that are not scored yet, and write their files."""
    missing = {*job.missing(names, lambda name: all(map(Path.is_file, _files_of(job.path, name))), unit="images")}
    scored = {name: _of_account(name, job.accounts[name]) for name in names if name not in missing}
    reused, skipped, begun = len(scored), {}, time.perf_counter()
    progress("images", reused, len(names))
    for batch in _batches(images, [index for index, name in enumerate(names) if name in missing], config):
        skipped |= {names[each.number]: each.reason for each in batch if each.image is None}
        readable = [(each.number, each.image) for each in batch if each.image is not None]
        own = [normal.hashes.get(content_hash(image.pixels)) for _, image in readable]
        grids = iter(encode([image for (_, image), place in zip(readable, own, strict=True) if place is None]))
        for (index, image), place in zip(readable, own, strict=True):
            name, size = names[index], (image.pixels.shape[1], image.pixels.shape[2])
            distances = normal.patches.distances(next(grids)) if place is None else normal.patches.left_out(place)
            if distances.isnan().all():
                skipped[name] = _NO_DATA
                continue
            of_pixels = pixel_distances(distances, size)
            if image.valid is not None:
                of_pixels = of_pixels * image.valid
            _write_files(job.path, name, image.pixels, of_pixels, normal.brightest)
            scored[name] = Scored(name, size, image_score(distances), place is not None)
            job.done(name, size=size, score=scored[name].score, is_normal=place is not None)
        progress("images", len(scored) + len(skipped), len(names))
    return _Scores([*scored.values()], skipped, reused, time.perf_counter() - begun)


def _of_account(name: str, values: Mapping[str, Any]) -> Scored:
    return Scored(name, (values["size"][0], values["size"][1]), values["score"], values["is_normal"])


def _files_of(folder: Path, name: str) -> tuple[Path, Path]:
    """Return the paths of map and overlay of an image."""
    stem = result_name(name)
    return folder / MAPS / f"{stem}.png", folder / OVERLAYS / f"{stem}.jpg"


def _write_files(
    folder: Path, name: str, image: UInt8[Tensor, "c h w"], distances: Float[Tensor, "h w"], brightest: float
) -> None:
    """Write the map and the overlay of an image, each atomically."""
    map_file, overlay_file = _files_of(folder.absolute(), name)
    for path in (map_file, overlay_file):
        path.parent.mkdir(parents=True, exist_ok=True)
    grey = Image.fromarray((distances * STEPS).round().numpy().astype(np.uint16))
    write_whole(map_file, lambda part: grey.save(part, "PNG"))
    drawn = Image.fromarray(heat(image, distances.numpy(), brightest))
    write_whole(overlay_file, lambda part: drawn.save(part, "JPEG", quality=_JPEG_QUALITY))


def heat(
    image: UInt8[Tensor, "c h w"], distances: Float[np.ndarray, "h w"], brightest: float
) -> UInt8[np.ndarray, "h w 3"]:
    """Blend an image with the colours of its distances: unchanged at 0, lightest at `brightest` and above."""
    strength = np.clip(distances / brightest, 0, 1)
    colours = matplotlib.colormaps[_COLOURS](strength)[..., :3] * 255
    opacity = _OPACITY * strength[..., None]
    return np.rint((1 - opacity) * as_picture(image.numpy()) + opacity * colours).astype(np.uint8)


def _write_summary(found: Anomalies, names: Sequence[str]) -> None:
    """Write `SUMMARY`, with a row for each image in their order."""
    by_name, rows = {image.name: image for image in found.images}, []
    for name in names:
        if name in found.skipped:
            rows.append([name, "", "", "", "", "", found.skipped[name]])
            continue
        image = by_name[name]
        above = "" if found.threshold is None else str(int(found.is_above(image)))
        height, width = image.size
        rows.append([name, str(width), str(height), f"{image.score:.6f}", above, str(int(image.is_normal)), ""])
    columns = texts("image", "width", "height", "score", "above threshold", "normal image", "error")
    write_text(found.folder / SUMMARY, Table(columns, [rows]).csv())


@house_style()
def _draw_overview(
    found: Anomalies, shown: Sequence[Scored], images: ImageCollection, names: Sequence[str], brightest: float
) -> Figure:
    """Draw images with their overlays and distances, highest score first."""
    threshold = "" if found.threshold is None else f"; the threshold is {found.threshold:.3f}"
    figure, rows = panel_grid(
        [image.size for image in shown],
        ("image", "overlay", "distance"),
        title=f"Highest scores{threshold}. Distances from 0 (black) to {brightest:.2g} (white)",
        row_titles=True,
    )
    for row, image in zip(rows, shown, strict=True):
        pixels = images.load(names.index(image.name))
        step = max(1, -(-max(image.size) // _OVERVIEW_SIDE))
        values = np.array(read_values(_files_of(found.folder, image.name)[0]))[::step, ::step] / STEPS
        small = pixels[:, ::step, ::step]
        row[0].imshow(as_picture(small.numpy()))
        row[1].imshow(heat(small, values, brightest))
        row[2].imshow(values, cmap=_COLOURS, vmin=0, vmax=brightest)
        title_row(row, image.name, f"{image.score:.3f}{', above the threshold' if found.is_above(image) else ''}")
    return figure
