"""Dense nearest-neighbour retrieval from beginning to end: backbone, data, score, results and pictures in a folder."""

import dataclasses
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from cribo.console import Phases
from cribo.data import LabelledImages
from cribo.devices import resolve_devices
from cribo.evaluation.data import open_splits, whole_path
from cribo.evaluation.dense_neighbours.config import DenseNNConfig
from cribo.evaluation.dense_neighbours.protocols import protocol_settings
from cribo.evaluation.dense_neighbours.retrieval import DenseRetrieval, RatioScore, dense_nn
from cribo.evaluation.machine import make_machine
from cribo.evaluation.pictures import Panel, write_pictures
from cribo.evaluation.results import OUT, EvaluationResult, versions
from cribo.folders import ResultFolder
from cribo.retrieval.encoders import open_encoder


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
    machine = make_machine(config.runtime, devices, encoder, about_backbone)
    folder = ResultFolder(
        out or OUT / f"dense-nn-{config.data.name}-{about_backbone['name']}",
        "evaluation",
        numbered=out is None,
        overwrite=overwrite,
        inputs=(config.backbone.source, config.data.root),
    )
    with Phases(console) as progress:
        found = dense_nn(encoder, memory, queries, settings, machine=machine, pictures=pictures, progress=progress)
    about_data = {
        **dataclasses.asdict(config.data),
        "root": whole_path(config.data.root),
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

    def write(part: Path) -> None:
        result.write(part)
        write_pictures(result, _panels(found, queries), queries.palette, part)

    return result, folder.create(write)


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
