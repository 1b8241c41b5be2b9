"""Disk cache of the tokens after the frozen blocks, for a few fixed view pairs per image (`backbone.cache_trunk`).

Epochs that use the cache run only the trained blocks, and neither decode images nor draw views.
"""

import json
import logging
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float16

from cribo.base.errors import ConfigError, UnreadableImage
from cribo.base.files import write_json
from cribo.data.batches import Batches, unchanged
from cribo.data.samples import Batch, LazyImage, Sample, SampleDataset
from cribo.data.sources.collection import sampled_hash
from cribo.data.sources.images import ImageSource
from cribo.objectives.base import Objective
from cribo.objectives.trunk import shared_blocks
from cribo.objectives.views import ViewPairs, normalised_views

log = logging.getLogger("cribo")

_IMAGES_AT_ONCE = 8
_ABOUT = "about.json"
_FREE_SHARE = 0.9  # share of the free disk space that may be used


class CachedViewPairs:
    """Transform that reads the tokens of an image's view pairs from the cache.

    A batch contains `trunk` (B, 2, T, D) in half precision instead of `views` and `photometric`; the rest is as in
    `ViewPairs`. One of an image's pairs is drawn in each epoch.

    Args:
        views: transform that created the pairs.
        folder: folder written by `fill`.
        pairs: m, number of pairs per image.
    """

    def __init__(self, views: ViewPairs, folder: Path, pairs: int) -> None:
        self.views = views
        self.folder = folder
        self.pairs = pairs
        self._arrays: dict[str, np.ndarray] = {}

    def __call__(self, image: LazyImage, generator: torch.Generator) -> Sample:
        """Read one of the image's pairs, and draw the other random numbers.

        Raises:
            UnreadableImage: the image could not be read when the cache was filled.
        """
        row = image.index * self.pairs + int(torch.randint(self.pairs, (1,), generator=generator))
        if not self._array("filled")[row]:
            raise UnreadableImage(image.name, "it could not be read when the trunk was cached")
        return {
            "trunk": torch.from_numpy(self._array("tokens")[row].copy()),
            "coordinates": torch.from_numpy(self._array("coordinates")[row].copy()),
            **self.views.draw(generator),
        }

    def _array(self, name: str) -> np.ndarray:
        if name not in self._arrays:  # opened in the worker process
            self._arrays[name] = np.load(self.folder / f"{name}.npy", mmap_mode="r")
        return self._arrays[name]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_arrays": {}}


def fill(
    objective: Objective,
    source: ImageSource,
    folder: Path,
    *,
    workers: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> CachedViewPairs:
    """Run the frozen blocks on m view pairs of each image and cache the tokens; resumes a partly filled cache.

    Args:
        objective: objective before training; its samples must be view pairs.
        source: the images.
        folder: folder of the cache; created if missing.
        workers: number of worker processes that read images.
        progress: called with the number of images done and their total.

    Raises:
        ConfigError: no block is frozen, samples are not view pairs, the disk is too full, or the folder contains a
            cache of other weights, images or views.
    """
    options = objective.options
    pairs = options.backbone.cache_trunk
    backbone, views = objective.exported(), objective.samples()
    assert pairs is not None
    if not isinstance(views, ViewPairs):
        raise ConfigError(
            "backbone.cache_trunk requires an objective whose samples are view pairs: cribo, croc, byol, contextual or "
            "alignment"
        )
    blocks = shared_blocks(backbone, options.backbone)
    if not blocks:
        raise ConfigError(
            "backbone.cache_trunk caches the tokens after the frozen blocks of a vision transformer: also set "
            "backbone.train_blocks, to less than the network's depth"
        )
    rows, patches = len(source) * pairs, views.grid[0] * views.grid[1]
    shapes = {
        "tokens": ((rows, 2, patches + backbone.model.num_prefix_tokens, backbone.model.embed_dim), np.float16),
        "coordinates": ((rows, 2, patches, 2), np.float32),
        "filled": ((rows,), np.bool_),
    }
    about = {
        "weights": backbone.fingerprint(),
        "frozen_blocks": blocks,
        "pairs": pairs,
        "seed": options.seed,
        "images": len(source),
        "first_image": source.name(0),
        "last_image": source.name(len(source) - 1),
        "content": sampled_hash(source),
        "views": json.loads(json.dumps(asdict(options.views))),
    }
    done = _open(folder, about, shapes)
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r+") for name in shapes}
    starts = range(done, len(source), _IMAGES_AT_ONCE)
    chunks = [range(start, min(start + _IMAGES_AT_ONCE, len(source))) for start in starts]
    # Negative epochs: pairs that a run without a cache never draws.
    keys = [[(-1 - pair, image) for image in chunk for pair in range(pairs)] for chunk in chunks]
    dataset = SampleDataset(source, views, seed=options.seed)
    loader = Batches(dataset, unchanged, batch_sampler=keys, workers=workers)
    for chunk, batch in zip(chunks, loader, strict=True):
        place = slice(chunk.start * pairs, chunk.stop * pairs)
        arrays["tokens"][place] = _frozen_tokens(objective, batch)
        arrays["coordinates"][place] = batch["coordinates"].numpy()
        wanted = torch.tensor([image for image in chunk for _ in range(pairs)])
        arrays["filled"][place] = (batch.images == wanted).numpy()  # unreadable images are replaced by others
        for array in arrays.values():
            array.flush()
        write_json(folder / _ABOUT, {**about, "done": chunk.stop})
        progress(chunk.stop, len(source))
    return CachedViewPairs(views, folder, pairs)


@torch.no_grad()
def _frozen_tokens(objective: Objective, batch: Batch) -> Float16[np.ndarray, "b 2 t d"]:
    options, backbone = objective.options, objective.exported()
    device = next(backbone.parameters()).device
    views = normalised_views(batch.to(device), options.views, backbone)
    trunk = backbone.encode_trunk(views, shared_blocks(backbone, options.backbone))
    return trunk.tokens.unflatten(0, (-1, 2)).half().cpu().numpy()


def _open(folder: Path, about: Mapping[str, Any], shapes: Mapping[str, tuple[tuple[int, ...], type]]) -> int:
    """Create the files of a cache, or check existing ones; return the number of images done."""
    if (folder / _ABOUT).is_file():
        found = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
        changed = [name for name in about if found.get(name) != about[name]]
        if changed:
            raise ConfigError(
                f"{folder} is a cache of different {changed[0].replace('_', ' ')} ({found.get(changed[0])} instead of "
                f"{about[changed[0]]}): start a new run, or delete the cache"
            )
        return int(found["done"])
    needed = sum(math.prod(shape) * np.dtype(kind).itemsize for shape, kind in shapes.values())
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    log.info("backbone.cache_trunk needs %.1f GB in %s (%.1f GB are free)", needed / 1e9, folder, free / 1e9)
    if needed > _FREE_SHARE * free:
        raise ConfigError(
            f"backbone.cache_trunk {about['pairs']} needs {needed / 1e9:.1f} GB in {folder}, but only "
            f"{free / 1e9:.1f} GB are free: use fewer pairs or images, or remove the option"
        )
    for name, (shape, kind) in shapes.items():
        np.lib.format.open_memmap(folder / f"{name}.npy", mode="w+", dtype=kind, shape=shape).flush()
    write_json(folder / _ABOUT, {**about, "done": 0})
    return 0
