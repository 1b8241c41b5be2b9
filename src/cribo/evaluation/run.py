"""Evaluations from beginning to end: backbone, data, score, results and pictures in a folder."""

import dataclasses
import logging
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from cribo.arguments import ConfigError
from cribo.console import Phases
from cribo.data import LabelledImages, LabelledSubset, default_splits, open_segmentation
from cribo.data.scenes import Scenes
from cribo.devices import resolve_devices, resolve_workers
from cribo.evaluation.config import DataConfig, DenseNNConfig, RuntimeConfig
from cribo.evaluation.dense_nn import DenseRetrieval, RatioScore, dense_nn
from cribo.evaluation.features import FeatureCache
from cribo.evaluation.memory import Machine
from cribo.evaluation.pictures import Panel, write_pictures
from cribo.evaluation.protocols import protocol_settings
from cribo.evaluation.results import RESULTS, EvaluationResult, versions
from cribo.files import claim_folder, holds_results, make_numbered_folder
from cribo.retrieval.encoders import PatchEncoder, open_encoder

log = logging.getLogger("cribo")

_OUT = Path("evaluations")
_CLAIM = {"marker": RESULTS, "advice": "choose another --out, or replace it with --overwrite"}
_SCENES = "scenes"
_SCENE_COUNTS = 400, 100  # memory, queries
_FIRST_SCENE = 1_000_000  # nobody trains on that many


def evaluate_dense_nn(
    config: DenseNNConfig,
    *,
    out: Path | None = None,
    overwrite: bool = False,
    pictures: int = 6,
    command: str = "",
    console: Console | None = None,
) -> tuple[EvaluationResult, Path]:
    """Score a backbone by dense nearest-neighbour retrieval, and write results and pictures.

    Args:
        config: what is asked for.
        out: the folder; `evaluations/dense-nn-<data>-<backbone>`, numbered, when not given.
        overwrite: replace results that stand in `out`.
        pictures: of how many images the prediction is drawn.
        command: by which it can be repeated, for the record.
        console: shows how far it is.

    Returns:
        the result, and the folder it was written to.

    Raises:
        ValueError: backbone, data, settings or folder cannot be used; said before anything is computed, as far as
            it can be known then.
        FileNotFoundError: a file of the backbone or the data is not there.
        ConnectionError: timm's weights cannot be fetched.
        UnreadableImage: an image is broken.
    """
    if pictures < 0:
        raise ValueError(f"pictures must be >= 0, got {pictures}")
    console = console or Console(quiet=True)
    started = time.perf_counter()
    memory, memory_split, queries, query_split = open_splits(config.data)
    devices = resolve_devices(config.runtime.devices)
    encoder, about_backbone = open_encoder(config.backbone, devices[0])
    choices = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name not in ("backbone", "data", "protocol", "runtime")
    }
    settings = protocol_settings(config.protocol, encoder.patch_size, memory.classes, **choices)
    machine = _machine(config.runtime, devices, encoder, about_backbone)
    folder, old = _claim(out, f"dense-nn-{config.data.name}-{about_backbone['name']}", overwrite=overwrite)
    try:
        with Phases(console) as progress:
            found = dense_nn(encoder, memory, queries, settings, machine=machine, pictures=pictures, progress=progress)
    except BaseException:
        # rmdir removes what is empty only.
        with suppress(OSError):
            folder.rmdir()
            if out is None:
                folder.parent.rmdir()
        raise
    about_data = {
        **dataclasses.asdict(config.data),
        "memory": memory_split,
        "queries": query_split,
        "memory_images": len(memory),
        "query_images": len(queries),
        "memory_patches": found.memory_patches,
        "query_patches": found.query_patches,
    }
    result = EvaluationResult(
        evaluation="dense-nn",
        settings={**found.settings.used(), "layers": config.backbone.layers},
        backbone=about_backbone,
        data=about_data,
        classes=list(memory.classes),
        metrics=["miou"],
        varies="ratio",
        results=[_row(score, memory.classes) for score in found.scores],
        seconds=time.perf_counter() - started,
        versions=versions(devices[0]),
        command=command,
    )
    if old:
        claim_folder(folder, overwrite=True, **_CLAIM)
    result.write(folder)
    write_pictures(result, _panels(found, queries), queries.palette, folder)
    return result, folder


def open_splits(config: DataConfig) -> tuple[LabelledImages, str, LabelledImages, str]:
    """Open the memory's images and the queries, each followed by the name of its split.

    Raises:
        DataError: an unknown set, a folder of another layout, missing images or labels.
    """
    if config.name == _SCENES:
        memory, queries = _SCENE_COUNTS if config.limit is None else (min(config.limit, n) for n in _SCENE_COUNTS)
        first, second = Scenes(memory, first=_FIRST_SCENE), Scenes(queries, first=_FIRST_SCENE + max(_SCENE_COUNTS))
        return first, "held out", second, "held out"
    if config.root is None:
        raise ConfigError(f"data.root must be given: the folder that {config.name} was unpacked to")
    memory_split, query_split = default_splits(config.name, config.root)
    memory_split, query_split = config.memory or memory_split, config.queries or query_split
    opened = []
    for split in (memory_split, query_split):
        images = open_segmentation(config.name, config.root, split, partial=config.partial)
        if config.limit is not None and config.limit < len(images):
            images = LabelledSubset(images, _spread(len(images), config.limit))
        opened.append(images)
    return opened[0], memory_split, opened[1], query_split


def _spread(count: int, number: int) -> list[int]:
    """`number` indices below `count`, evenly apart."""
    return [place * count // number for place in range(number)]


def _machine(config: RuntimeConfig, devices: tuple[str, ...], encoder: PatchEncoder, about: dict[str, Any]) -> Machine:
    cache = None
    if config.cache != "none":
        cache = FeatureCache(Path(config.cache), encoder, {name: about[name] for name in ("source", "architecture")})
    return Machine(devices, config.batch_size, resolve_workers(config.workers), config.memory_gib, cache)


def _claim(out: Path | None, name: str, *, overwrite: bool) -> tuple[Path, bool]:
    """The folder for results, and whether it holds old ones, which stay until there are new ones."""
    if out is None:
        return make_numbered_folder(_OUT, name), False
    if holds_results(out, overwrite=overwrite, **_CLAIM):
        return out, True
    claim_folder(out, overwrite=False, **_CLAIM)
    return out, False


def _row(score: RatioScore, classes: Any) -> dict[str, Any]:
    return {
        "ratio": score.ratio,
        "miou": score.miou,
        "miou_std": score.miou_std,
        "per_class": dict(zip(classes, score.per_class, strict=True)),
        "draws": list(score.draws),
        "memory_patches": score.patches,
        **({} if score.recall is None else {"recall": score.recall}),
        "confusion": score.confusion.tolist(),
    }


def _panels(found: DenseRetrieval, queries: LabelledImages) -> list[Panel]:
    """Images beside their labels and predictions, patches drawn as they are."""
    panels = []
    for prediction in sorted(found.predictions, key=lambda prediction: prediction.index):
        image, labels = queries.load(prediction.index), queries.labels(prediction.index)
        label = torch.where(prediction.labels == len(queries.classes), queries.ignore_index, prediction.labels)
        shown = torch.nn.functional.interpolate(label[None, None].float(), size=labels.shape, mode="nearest-exact")
        panels.append(
            Panel(queries.name(prediction.index), image, labels, shown[0, 0].to(torch.uint8), queries.ignore_index)
        )
    return panels
