"""Implementation of `cribo embed`: encode images and write their features to files in parts."""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from rich.console import Console
from torch import Tensor

from cribo.console import Phases
from cribo.data.collection import fingerprint, without_repeats
from cribo.data.images import ImageFiles, open_images, require_readable
from cribo.data.reading import UnreadableImage
from cribo.devices import resolve_device, resolve_workers
from cribo.embedding.config import EmbedConfig, Kind
from cribo.embedding.writing import Rows, part_path, require_writer, write_part
from cribo.errors import InputError, Stopped, if_interrupted
from cribo.files import append_json, read_json_lines, remove_parts, write_json
from cribo.folders import ResultFolder, describe_changes, require_same
from cribo.prefetching import BUDGET, prefetch
from cribo.retrieval.encoders import (
    PatchEncoder,
    backbone_encoder,
    blocks_encoder,
    image_encoder,
    map_by_size,
    open_network,
)
from cribo.retrieval.object_extraction import MAX_PATCHES, PreparedImage, extract_prepared, read_prepared
from cribo.retrieval.object_settings import ObjectSettings
from cribo.versions import versions

ABOUT, SKIPPED, PARTS = "about.json", "skipped.jsonl", "features"

_MOST_IMAGES = 512  # limit per part; an interrupted part is encoded again
_COLUMNS: Mapping[Kind, tuple[str, ...]] = {
    "global": (),
    "patches": ("row", "column"),
    "objects": ("object", "x0", "y0", "x1", "y1", "area"),
}

Encoded = list[tuple[Float[np.ndarray, "n d"], Int[np.ndarray, "n c"]]]
"""Feature rows of each image, and the values of their index columns."""


@dataclass(frozen=True)
class Embedded:
    """Result of `embed_images`.

    Attributes:
        folder: output folder.
        images: number of images in all parts, without unreadable ones.
        reused: number of these images in parts that already existed.
        skipped: reasons why images could not be read, by name.
        seconds: duration of encoding the other images.
    """

    folder: Path
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
        out: output folder.
        resume: keep existing parts in `out` and write the missing ones; images, backbone and settings must be the same.
        overwrite: replace existing results in `out`.
        command: command line to record in the results.
        console: console for progress.

    Raises:
        ValueError: backbone, images, settings or folder are invalid, or no image can be read; raised before anything is
            written.
        FileNotFoundError: a file of the backbone or the images does not exist.
        ImportError: the library of the format is not installed.
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
        advice="choose another --out, continue it with --resume, or replace it with --overwrite",
    )
    files = open_images(config.images)
    require_readable(files, config.images)
    names = list(dict.fromkeys(files.names))  # a list may name an image twice
    device = resolve_device(config.device)
    backbone, about_backbone = open_network(config.backbone)
    backbone.eval().to(device)
    default = ObjectSettings(size=backbone.image_size) if config.features == "global" else ObjectSettings()
    settings = config.settings(default)
    encoder = (
        backbone_encoder(backbone, layers=config.backbone.layers)
        if config.blocks is None
        else blocks_encoder(backbone, config.blocks)
    )
    dim = backbone.embed_dim if config.features == "global" else encoder.dim(device)
    about: dict[str, Any] = {
        "format": 1,
        "command": command,
        "finished": False,
        "same": {
            "encoder": encoder.identity,
            "features": config.features,
            "format": config.format,
            "precision": config.precision,
            "images": len(names),
            "files": fingerprint(without_repeats(files)),
            **json.loads(json.dumps(asdict(settings))),
        },
        "images": os.path.realpath(config.images),
        "backbone": about_backbone,
        "blocks": list(encoder.blocks),
        "channels": dim,
        "versions": versions(device),
    }
    if target.resumes:
        require_same(out / ABOUT, lambda: _changes(out / ABOUT, about))
    else:
        target.create(lambda part: write_json(part / ABOUT, about))
    (out / PARTS).mkdir(exist_ok=True)
    if config.features == "global":
        whole = image_encoder(backbone)
        encode = _by_size(lambda pixels: whole.features(pixels, device)[:, None, None])
    elif config.features == "patches":
        encode = _by_size(lambda pixels: encoder.grids(pixels, device))
    else:
        encode = _objects(encoder, settings, dim, device)
    kept = f"complete parts are in {out}; to continue, repeat the command with --resume"
    with if_interrupted(lambda: kept), Phases(console) as progress:
        embedded = _write_parts(config, files, names, encoder, settings, dim, encode, out, progress)
    if not embedded.images:  # although one could be read at first
        raise Stopped(f"the images can no longer be read: see {SKIPPED} in {out}")
    write_json(out / ABOUT, {**about, "finished": True, "skipped": len(embedded.skipped)})
    remove_parts(out / PARTS)
    return embedded


def _changes(file: Path, now: dict[str, Any]) -> Iterator[str]:
    """Yield what has changed since `file` was written: the images, the backbone or settings."""
    before = json.loads(file.read_text(encoding="utf-8"))
    settings = {name: value for name, value in now["same"].items() if name != "files"}
    yield from describe_changes({name: before["same"][name] for name in settings}, settings)
    if before["same"]["files"] != now["same"]["files"]:  # hashes
        place = "the folder of the images"
        folder = before.get("images", now["images"])  # earlier versions did not record it
        moved = list(describe_changes({place: folder}, {place: now["images"]}))
        yield from moved or [f"images of {folder} were added, removed or changed"]


# -------------------------------------------------------------------------------------------------------- features


def _by_size(
    encode: Callable[[Tensor], Float[Tensor, "b rows columns d"]],
) -> Callable[[Sequence[PreparedImage]], Encoded]:
    """Return a function that encodes images in batches of equal size."""

    def rows(batch: list[PreparedImage]) -> Encoded:
        grids = encode(torch.stack([image.pixels for image in batch])).cpu().numpy()
        places = np.indices(grids.shape[1:3], dtype=np.int32).reshape(2, -1).T
        return [(grid.reshape(-1, grid.shape[-1]), places) for grid in grids]

    @torch.no_grad()
    def encoded(images: Sequence[PreparedImage]) -> Encoded:
        return map_by_size(rows, images, lambda image: tuple(image.pixels.shape), lambda _: len(images))

    return encoded


def _objects(
    encoder: PatchEncoder, settings: ObjectSettings, dim: int, device: str
) -> Callable[[Sequence[PreparedImage]], Encoded]:
    def encoded(images: Sequence[PreparedImage]) -> Encoded:
        found = []
        for image in extract_prepared(encoder, images, settings, device=device):
            places = np.array([(each.number, *each.box, each.area) for each in image.objects], dtype=np.int32)
            vectors = np.array([each.vector for each in image.objects], dtype=np.float32)
            found.append((vectors.reshape(-1, dim), places.reshape(-1, len(_COLUMNS["objects"]))))
        return found

    return encoded


# ----------------------------------------------------------------------------------------------------------- parts


def _write_parts(
    config: EmbedConfig,
    files: ImageFiles,
    names: Sequence[str],
    encoder: PatchEncoder,
    settings: ObjectSettings,
    dim: int,
    encode: Callable[[Sequence[PreparedImage]], Encoded],
    out: Path,
    progress: Phases,
) -> Embedded:
    """Encode and write the missing parts; images are prefetched across parts."""
    size = _images_in_part(config, settings, dim)
    parts = [names[start : start + size] for start in range(0, len(names), size)]
    missing = [number for number in range(len(parts)) if not part_path(out / PARTS, number, config.format).exists()]
    existing = set(range(len(parts))) - set(missing)
    done = sum(len(parts[number]) for number in existing)

    def read(name: str) -> PreparedImage | UnreadableImage:
        try:
            return read_prepared(Path(files.folder) / name, encoder, settings)
        except UnreadableImage as error:
            return error

    images = prefetch(
        read,
        (name for number in missing for name in parts[number]),
        threads=max(1, resolve_workers(config.workers)),
        ahead=4 * config.batch_size,
        nbytes=lambda _, image: None if image is None else getattr(image, "nbytes", 0),
    )
    started = time.perf_counter()
    progress("images", done, len(names))
    try:
        for number in missing:
            found: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # by the index in the part
            own = enumerate(islice(images, len(parts[number])))
            while batch := list(islice(own, config.batch_size)):
                readable = {index: image for index, image in batch if isinstance(image, PreparedImage)}
                for index, image in batch:
                    if isinstance(image, UnreadableImage):
                        append_json(out / SKIPPED, {"image": parts[number][index], "reason": image.reason})
                found.update(zip(readable, encode([*readable.values()]), strict=True))
                done += len(batch)
                progress("images", done, len(names))
            write_part(out / PARTS, number, config.format, _joined(parts[number], found, config, dim))
    finally:
        images.close()
    skipped = {entry["image"]: entry["reason"] for entry in read_json_lines(out / SKIPPED)}  # also of earlier runs
    reused = sum(name not in skipped for number in existing for name in parts[number])
    return Embedded(out, len(names) - len(skipped), reused, skipped, time.perf_counter() - started)


def _images_in_part(config: EmbedConfig, settings: ObjectSettings, dim: int) -> int:
    """Return the number of images per part; independent of image sizes, so equal in resumed runs."""
    rows = {"global": 1, "patches": MAX_PATCHES, "objects": settings.num_objects}[config.features]
    return min(_MOST_IMAGES, max(1, BUDGET // (rows * dim * 4)))


def _joined(
    names: Sequence[str], found: Mapping[int, tuple[np.ndarray, np.ndarray]], config: EmbedConfig, dim: int
) -> Rows:
    none = np.empty(0, dtype=np.int32)
    images = (np.full(len(rows), index, dtype=np.int32) for index, (rows, _) in found.items())
    columns = {"image": np.concatenate([none, *images])}
    for place, name in enumerate(_COLUMNS[config.features]):
        columns[name] = np.concatenate([none, *(own[:, place] for _, own in found.values())])
    embedding = np.concatenate([np.empty((0, dim), dtype=np.float32), *(rows for rows, _ in found.values())])
    return Rows(list(names), columns, embedding.astype(config.precision))
