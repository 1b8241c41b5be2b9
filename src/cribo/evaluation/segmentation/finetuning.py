"""Finetuning with Segmenter for several learning rates; the best network is kept."""

import copy
import dataclasses
import json
import logging
import shutil
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from cribo.base.errors import FolderError
from cribo.base.files import write_json
from cribo.base.machine import is_first_process
from cribo.evaluation.protocol import Outcome
from cribo.evaluation.run import Run
from cribo.evaluation.segmentation.config import DecoderConfig, SegmenterSettings, scale_of
from cribo.evaluation.segmentation.inference import Inference
from cribo.evaluation.segmentation.rules import PAPER, Rules
from cribo.evaluation.segmentation.segmenter import MaskTransformer, Segmenter
from cribo.evaluation.segmentation.trained import SEGMENTER_FILE, TrainedSegmenter, load_segmenter, save_segmenter
from cribo.evaluation.segmentation.training import (
    SegmentationModule,
    SegmentationTraining,
    follow_rules,
    outcome,
    rows_of,
    train,
)
from cribo.features.encoder import open_backbone
from cribo.features.scores import mean_iou
from cribo.training.checkpoints import CHECKPOINTS

log = logging.getLogger("cribo")

_SCORE = "score.json"
"""Score of a learning rate, written when its training has finished."""


@dataclass(frozen=True, kw_only=True)
class FinetunedSegmenter(SegmenterSettings, SegmentationTraining):
    """End-to-end finetuning with Segmenter."""

    def prepare(self, run: Run) -> Self:
        """Set all settings that are None, including those of the decoder."""
        settings = super().prepare(run)
        run.prepared = build_segmenter(settings, run)
        built = run.prepared.decoder
        return dataclasses.replace(settings, decoder=DecoderConfig(len(built.blocks), built.width, built.heads))

    def used(self, run: Run) -> dict[str, Any]:
        """Return the settings, without those of memory."""
        return {name: value for name, value in super().used(run).items() if name != "checkpointing"}

    def measure(self, run: Run) -> Outcome:
        """Finetune the network once for each learning rate, score it, and keep the best one.

        Each training has its own folder, such as `lr=8e-05`, with checkpoints and TensorBoard logs. The network of the
        best learning rate is saved as `segmenter.safetensors` (`load_segmenter`). Finished trainings are not repeated.
        """
        finished = {rate: _finish(self, run, rate) for rate in self.learning_rates}
        rows, best = rows_of({rate: score.confusion for rate, score in finished.items()}, run)
        if is_first_process():
            for place, rate in enumerate(self.learning_rates):
                network = _folder(run, rate) / SEGMENTER_FILE
                if place != best:
                    network.unlink(missing_ok=True)
                elif network.is_file():  # already moved if the evaluation was killed here before
                    network.replace(run.folder / SEGMENTER_FILE)

        @cache
        def trained() -> TrainedSegmenter:
            return load_segmenter(run.folder, run.devices[0], name=run.backbone.name)

        def segment(index: int) -> UInt8[Tensor, "h w"]:
            return trained().segment(run.data.val.load(index)).cpu()

        return outcome(rows, segment, run, seconds=sum(score.seconds for score in finished.values()))

    def places(self, folder: Path) -> dict[str, Any]:
        """Return the paths of the training curves and the network."""
        return {"curves": folder / "lr=*" / "tensorboard", "network": folder / SEGMENTER_FILE}


class SegmenterFinetuning(SegmentationModule):
    """Module that trains backbone and decoder with one learning rate.

    Batch norms use batch statistics (synchronised over GPUs), as in MMSegmentation and in pretraining, which untrained
    networks require. Parameters that `encode` does not use are not changed.

    Args:
        segmenter: network, trained in place.
        learning_rate: initial learning rate.
        steps: total number of training steps.
        inference: inference mode, whole images or windows.
        rules: rules of the variant.
    """

    def __init__(
        self,
        segmenter: Segmenter,
        *,
        learning_rate: float,
        steps: int,
        inference: Inference | None = None,
        rules: Rules = PAPER,
    ) -> None:
        super().__init__(
            segmenter.backbone,
            classes=segmenter.decoder.classes,
            heads=[f"{learning_rate:g}"],
            steps=steps,
            inference=inference or Inference(),
            rules=rules,
        )
        self.decoder = segmenter.decoder
        self.learning_rate = learning_rate

    @property
    def segmenter(self) -> Segmenter:
        """The network."""
        return Segmenter(self.backbone, self.decoder)

    def logits(
        self, images: Float[Tensor, "b chans h w"], *, drop_path_noise: Float[Tensor, "b sites"] | None = None
    ) -> Float[Tensor, "1 b c rows columns"]:
        """Return the scores of each class on the grid of patches."""
        return self.segmenter(images, drop_path_noise=drop_path_noise)[None]

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return all trainable parameters as one group."""
        return [{"params": [part for part in self.parameters() if part.requires_grad], "lr": self.learning_rate}]


def build_segmenter(settings: SegmenterSettings, run: Run) -> Segmenter:
    """Return the untrained network: the backbone with position embeddings resized to the crops, and a new decoder.

    Raises:
        ValueError: backbone, decoder and settings are incompatible.
    """
    backbone = open_backbone(
        run.source, image_size=settings.crop, drop_path=settings.drop_path, in_chans=run.backbone.in_chans
    )
    backbone.set_checkpointing(settings.checkpointing)
    decoder = MaskTransformer(
        backbone.embed_dim,
        len(run.data.train.classes),
        layers=settings.decoder.layers,
        width=settings.decoder.width,
        heads=settings.decoder.heads,
        drop_path=settings.drop_path,
        initial_weights=settings.rules.initial_weights,
        seed=settings.seed,
    )
    follow_rules(settings.rules, backbone, decoder)
    return Segmenter(backbone, decoder)


class _Score(NamedTuple):
    """Score of a finished training.

    Attributes:
        confusion: confusion matrix, with labels in rows.
        seconds: duration; excludes the time before resuming.
    """

    confusion: Int[Tensor, "c c"]
    seconds: float


def _folder(run: Run, rate: float) -> Path:
    """Return the folder of the checkpoints, TensorBoard logs, score and network of a learning rate."""
    return run.folder / f"lr={rate!r}"


def _finish(settings: FinetunedSegmenter, run: Run, rate: float) -> _Score:
    """Train or resume with a learning rate, or read the score of a finished training."""
    folder = _folder(run, rate)
    if (folder / _SCORE).is_file():
        state, score = " is finished", _read(folder / _SCORE)
    else:
        state, score = "", _train(settings, run, rate)
    if is_first_process():
        log.info("learning rate %g%s: mIoU %.1f %%", rate, state, 100 * mean_iou(score.confusion))
        # Checkpoints are much larger than the network, and no longer needed.
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    return score


def _read(path: Path) -> _Score:
    try:
        score = json.loads(path.read_text(encoding="utf-8"))
        return _Score(torch.tensor(score["confusion"]), float(score["seconds"]))
    except (ValueError, KeyError, TypeError) as error:
        raise FolderError(f"{path} is corrupt ({error}): remove {path.parent} to repeat the training") from error


def _train(settings: FinetunedSegmenter, run: Run, rate: float) -> _Score:
    """Train a copy of the prepared network, and save it with its score."""
    started, rates, folder = time.perf_counter(), settings.learning_rates, _folder(run, rate)
    segmenter = copy.deepcopy(run.prepared)
    module = SegmenterFinetuning(
        segmenter, learning_rate=rate, steps=settings.iterations, inference=settings.windows, rules=settings.rules
    )
    label = f"learning rate {rate:g} ({rates.index(rate) + 1} of {len(rates)})"
    train(module, settings, run, sites=segmenter.num_drop_path_sites, folder=folder, label=label)
    score = _Score(module.confusions[0], time.perf_counter() - started)
    if is_first_process():
        trained = TrainedSegmenter(
            segmenter.eval(),
            classes=tuple(run.data.train.classes),
            palette=tuple(run.data.train.palette),
            scale=scale_of(run.data.about["name"]),
            inference=module.inference,
        )
        save_segmenter(trained, folder / SEGMENTER_FILE)
        content = {"learning_rate": rate, "seconds": score.seconds, "confusion": score.confusion.tolist()}
        write_json(folder / _SCORE, content)
    return score
