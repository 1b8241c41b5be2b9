"""Finetuning with Segmenter for several learning rates; the best network is kept."""

import copy
import json
import logging
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from cribo.evaluation.protocol import Outcome
from cribo.evaluation.runner import Run
from cribo.evaluation.runtime import TrainingRuntime
from cribo.evaluation.scores import best_place, mean_iou
from cribo.evaluation.segmentation.mask_transformer import MaskTransformer
from cribo.evaluation.segmentation.module import follow_rules
from cribo.evaluation.segmentation.outcome import outcome, rows_of, training_crops, whole_images
from cribo.evaluation.segmentation.protocol import FinetunedSegmenter, scale_of
from cribo.evaluation.segmentation.segmenter import Segmenter, SegmenterFinetuning
from cribo.evaluation.segmentation.trained import SEGMENTER_FILE, TrainedSegmenter, load_segmenter, save_segmenter
from cribo.evaluation.training import fit
from cribo.files import FolderError, write_json
from cribo.processes import is_first_process
from cribo.retrieval.encoders import open_backbone
from cribo.training.checkpoints import CHECKPOINTS

log = logging.getLogger("cribo")

_SCORE = "score.json"
"""Score of a learning rate, written when its training has finished."""


def finetune(settings: FinetunedSegmenter, run: Run) -> Outcome:
    """Finetune the network once for each learning rate, score it, and keep the best one.

    Each training has its own folder, such as `lr=8e-05`, with checkpoints and TensorBoard logs. The network of the best
    learning rate is saved as `segmenter.safetensors` (`load_segmenter`). Finished trainings are not repeated.
    """
    trainings = [_Training(settings, run, rate) for rate in settings.learning_rates]
    for number, training in enumerate(trainings, start=1):
        training.finish()
        if is_first_process():
            best = _best(trainings[:number])
            for other in trainings[:number]:
                if other is not best:
                    (other.folder / SEGMENTER_FILE).unlink(missing_ok=True)
    rows, best = rows_of({training.rate: training.confusion for training in trainings}, run)
    module = trainings[best].module()
    if is_first_process():
        network = trainings[best].folder / SEGMENTER_FILE
        if network.is_file():  # already moved if the evaluation was killed here before
            network.replace(run.folder / SEGMENTER_FILE)
        trained = load_segmenter(run.folder)
        module = SegmenterFinetuning(trained.network, learning_rate=1.0, steps=1, inference=trained.inference)
    seconds = sum(training.seconds for training in trainings)
    return outcome(settings, rows, module.to(run.devices[0]), 0, run, seconds=seconds)


def build_segmenter(settings: FinetunedSegmenter, run: Run) -> Segmenter:
    """Return the untrained network: the backbone with position embeddings resized to the crops, and a new decoder.

    Raises:
        ValueError: backbone, decoder and settings are incompatible.
    """
    backbone = open_backbone(run.source, image_size=settings.crop, drop_path=settings.drop_path)
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


def warn_of_batch_norms(runtime: TrainingRuntime, segmenter: Segmenter) -> None:
    """Warn if several CPU processes train batch norms."""
    several = runtime.num_nodes > 1 or runtime.devices not in ("auto", 1, "1")
    if several and not runtime.on_gpu and any(isinstance(module, _BatchNorm) for module in segmenter.modules()):
        log.warning(
            "batch norms are synchronised on GPUs only: several CPU processes compute their statistics independently, "
            "and training differs from that of a single process"
        )


class _Training:
    """Training with one learning rate, in its own folder.

    Attributes:
        rate: the learning rate.
        folder: folder of checkpoints, TensorBoard logs, score and network.
        confusion: confusion matrix (labels in rows), set when training has finished.
        seconds: duration, set when training has finished; excludes the time before resuming.
    """

    def __init__(self, settings: FinetunedSegmenter, run: Run, rate: float) -> None:
        self.settings, self.run, self.rate = settings, run, rate
        self.folder: Path = run.folder / f"lr={rate!r}"
        self.confusion: Int[Tensor, "c c"] = torch.zeros(0, 0, dtype=torch.long)
        self.seconds = 0.0

    def module(self) -> SegmenterFinetuning:
        """Return the untrained module, with a copy of the prepared network."""
        return SegmenterFinetuning(
            copy.deepcopy(self.run.prepared),
            learning_rate=self.rate,
            steps=self.settings.iterations,
            inference=self.settings.windows,
            rules=self.settings.rules,
        )

    def finish(self) -> None:
        """Train or resume, or read the score of a finished training."""
        if (self.folder / _SCORE).is_file():
            self._read()
        else:
            self._train()
        if is_first_process():
            # Checkpoints are much larger than the network, and no longer needed.
            shutil.rmtree(self.folder / CHECKPOINTS, ignore_errors=True)

    def _read(self) -> None:
        path = self.folder / _SCORE
        try:
            score = json.loads(path.read_text(encoding="utf-8"))
            self.confusion, self.seconds = torch.tensor(score["confusion"]), float(score["seconds"])
        except (ValueError, KeyError, TypeError) as error:
            raise FolderError(f"{path} is corrupt ({error}): remove {self.folder} to repeat the training") from error
        if is_first_process():
            log.info("learning rate %g is finished: mIoU %.1f %%", self.rate, 100 * mean_iou(self.confusion))

    def _train(self) -> None:
        started = time.perf_counter()
        settings, run, module = self.settings, self.run, self.module()
        number = settings.learning_rates.index(self.rate) + 1
        fit(
            module,
            train=training_crops(settings, run, module.segmenter.num_drop_path_sites),
            validation=whole_images(settings, run),
            batch_size=settings.batch_size,
            steps=settings.iterations,
            seed=settings.seed,
            folder=self.folder,
            label=f"learning rate {self.rate:g} ({number} of {len(settings.learning_rates)})",
            runtime=run.runtime,
            console=run.console,
        )
        self.confusion, self.seconds = module.confusions[0], time.perf_counter() - started
        if is_first_process():
            log.info("learning rate %g: mIoU %.1f %%", self.rate, 100 * mean_iou(self.confusion))
            trained = TrainedSegmenter(
                module.eval().segmenter,
                classes=tuple(run.data.train.classes),
                palette=tuple(run.data.train.palette),
                scale=scale_of(run.data.about["name"]),
                inference=module.inference,
            )
            save_segmenter(trained, self.folder / SEGMENTER_FILE)
            score = {"learning_rate": self.rate, "seconds": self.seconds, "confusion": self.confusion.tolist()}
            write_json(self.folder / _SCORE, score)


def _best(finished: Sequence[_Training]) -> _Training:
    """Return the training with the highest mIoU, the first on ties."""
    return finished[best_place([mean_iou(training.confusion) for training in finished])]
