"""Finetuning with Segmenter from beginning to end: one training for each learning rate, and the best one for use."""

import copy
import json
import logging
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Int
from rich.console import Console
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from cribo.evaluation.pictures import Panel, write_pictures
from cribo.evaluation.results import EvaluationResult, iou
from cribo.evaluation.segmentation.config import SegmenterConfig
from cribo.evaluation.segmentation.mask_transformer import MaskTransformer
from cribo.evaluation.segmentation.segmenter import NoisyCrops, Segmenter, SegmenterFinetuning
from cribo.evaluation.segmentation.task import SegmentationTask
from cribo.evaluation.segmentation.trained import SEGMENTER_FILE, TrainedSegmenter, load_segmenter, save_segmenter
from cribo.evaluation.training import evaluation_folder, finished_result, fit
from cribo.files import FolderError, write_json
from cribo.processes import is_first_process
from cribo.retrieval.encoders import open_backbone
from cribo.training.checkpoints import CHECKPOINTS

log = logging.getLogger("cribo")

_SCORE = "score.json"
"""What a finished training leaves in its folder: a training that has left it is not done again."""


def evaluate_segmenter(
    config: SegmenterConfig,
    *,
    out: Path | None = None,
    overwrite: bool = False,
    resume: bool = False,
    pictures: int = 6,
    command: str = "",
    console: Console | None = None,
) -> tuple[EvaluationResult, Path]:
    """Finetune a backbone with Segmenter, once for each learning rate, and write results, pictures and the best one.

    Each training has a folder of its own below that of the evaluation, `lr=8e-05` for example, with its checkpoints
    and TensorBoard's log. Beside the results, `segmenter.safetensors` is the network of the best learning rate
    (`load_segmenter`).

    Args:
        config: what is asked for.
        out: the folder; `evaluations/segmenter-<data>-<backbone>`, numbered, when not given.
        overwrite: replace an evaluation that stands in `out`.
        resume: go on with the one that stands in `out`, if there is one; trainings that are finished are not repeated.
        pictures: of how many images the prediction is drawn.
        command: by which it can be repeated, for the record.
        console: shows how far it is.

    Returns:
        the result, a row for each learning rate, and the folder it was written to.

    Raises:
        ValueError: backbone, data, settings or folder cannot be used; said before anything is trained.
        FileNotFoundError: a file of the backbone or the data is not there.
        ConnectionError: timm's weights cannot be fetched.
        Interrupted: a signal came; `resume` goes on from there.
        NonFiniteLoss: a learning rate is too high.
    """
    console = console or Console(quiet=True)
    task = SegmentationTask.open(config, pictures=pictures)
    segmenter = build_segmenter(config, task)
    _tell_of_batch_norms(config, segmenter)
    decoder = segmenter.decoder
    used = {
        **task.settings.used(),
        "decoder": {"layers": len(decoder.blocks), "width": decoder.width, "heads": decoder.heads},
        "drop_path": config.drop_path,
    }
    with evaluation_folder(
        out,
        f"segmenter-{config.data.name}-{task.backbone_about['name']}",
        {"evaluation": "segmenter", **task.identity(), "settings": used},
        overwrite=overwrite,
        resume=resume,
        runtime=config.runtime,
        inputs=(config.backbone.source, config.data.root),
    ) as folder:
        # Asked for here, where its settings are known to be these.
        if (done := finished_result(folder, resume=resume)) is not None:
            return done, folder
        rates = task.settings.learning_rates
        trainings = [_Training(config, task, segmenter, rate, folder / f"lr={rate!r}") for rate in rates]
        for number, training in enumerate(trainings, start=1):
            training.finish(console)
            if is_first_process():
                _keep_best(trainings[:number])
        result = task.result(
            "segmenter",
            used,
            {training.rate: training.confusion for training in trainings},
            seconds=sum(training.seconds for training in trainings),
            device=_device(config),
            command=command,
        )
        if is_first_process():
            panels = _publish(_best(trainings), task, pictures, console)
            # The result comes last: a folder that has one is finished.
            write_pictures(result, panels, task.val.palette, folder)
            result.write(folder)
    return result, folder


def build_segmenter(config: SegmenterConfig, task: SegmentationTask) -> Segmenter:
    """The network as each training begins: the backbone's weights, its position embedding resized to the crops.

    Raises:
        ValueError: backbone, decoder and the ways to train them do not go together.
    """
    backbone = open_backbone(config.backbone, image_size=task.settings.crop, drop_path=config.drop_path)
    backbone.set_checkpointing(config.checkpointing)
    decoder = MaskTransformer(
        backbone.embed_dim,
        len(task.train.classes),
        layers=config.decoder.layers,
        width=config.decoder.width,
        heads=config.decoder.heads,
        drop_path=config.drop_path,
        seed=config.seed,
    )
    return Segmenter(backbone, decoder)


class _Training:
    """The training of one learning rate, in a folder of its own.

    Attributes:
        config: what was asked for.
        task: data and settings.
        beginning: the network before any training, which stays as it is.
        rate: the learning rate.
        folder: for its checkpoints, TensorBoard's log, score and network.
        confusion: labels against predictions, once it is finished.
        seconds: that it took, once it is finished; a training that was gone on with counts from there.
    """

    def __init__(
        self, config: SegmenterConfig, task: SegmentationTask, beginning: Segmenter, rate: float, folder: Path
    ) -> None:
        self.config = config
        self.task = task
        self.beginning = beginning
        self.rate = rate
        self.folder = folder
        self.confusion: Int[Tensor, "c c"] = torch.zeros(0, 0, dtype=torch.long)
        self.seconds = 0.0

    @property
    def is_finished(self) -> bool:
        """Whether there is a score."""
        return (self.folder / _SCORE).is_file()

    @property
    def miou(self) -> float:
        """Once it is finished."""
        return float(iou(self.confusion).nanmean())

    def finish(self, console: Console) -> None:
        """Train, or go on, or read what was found before."""
        if self.is_finished:
            self._read()
        else:
            self._train(console)
        if is_first_process():
            # They are many times larger than the network, and nobody goes on from them.
            shutil.rmtree(self.folder / CHECKPOINTS, ignore_errors=True)

    def _read(self) -> None:
        path = self.folder / _SCORE
        try:
            score = json.loads(path.read_text(encoding="utf-8"))
            self.confusion, self.seconds = torch.tensor(score["confusion"]), float(score["seconds"])
        except (ValueError, KeyError, TypeError) as error:
            raise FolderError(f"{path} is damaged ({error}): remove {self.folder} to train it again") from error
        if is_first_process():
            log.info("learning rate %g is finished: mIoU %.1f %%", self.rate, 100 * self.miou)

    def _train(self, console: Console) -> None:
        started = time.perf_counter()
        settings = self.task.settings
        segmenter = copy.deepcopy(self.beginning)
        module = SegmenterFinetuning(
            segmenter, learning_rate=self.rate, steps=settings.iterations, inference=settings.inference
        )
        number = settings.learning_rates.index(self.rate) + 1
        fit(
            module,
            train=NoisyCrops(self.task.crops, segmenter.num_drop_path_sites),
            validation=self.task.scored,
            batch_size=settings.batch_size,
            steps=settings.iterations,
            seed=settings.seed,
            folder=self.folder,
            label=f"learning rate {self.rate:g} ({number} of {len(settings.learning_rates)})",
            runtime=self.config.runtime,
            console=console,
        )
        self.confusion, self.seconds = module.confusions[0], time.perf_counter() - started
        if is_first_process():
            log.info("learning rate %g: mIoU %.1f %%", self.rate, 100 * self.miou)
            save_segmenter(self._trained(module.eval()), self.folder / SEGMENTER_FILE)
            score = {"learning_rate": self.rate, "seconds": self.seconds, "confusion": self.confusion.tolist()}
            write_json(self.folder / _SCORE, score)

    def _trained(self, module: SegmenterFinetuning) -> TrainedSegmenter:
        return TrainedSegmenter(
            module.segmenter,
            classes=tuple(self.task.train.classes),
            palette=tuple(self.task.train.palette),
            scale=self.task.settings.scale,
            inference=module.inference,
        )


def _best(finished: Sequence[_Training]) -> _Training:
    """The training with the highest mIoU, the first of equal ones."""
    return max(finished, key=lambda training: training.miou)


def _keep_best(finished: Sequence[_Training]) -> None:
    """Remove the networks of the trainings that are not the best one."""
    best = _best(finished)
    for training in finished:
        if training is not best:
            (training.folder / SEGMENTER_FILE).unlink(missing_ok=True)


def _publish(best: _Training, task: SegmentationTask, pictures: int, console: Console) -> list[Panel]:
    """Put the best network beside the results, and have it label some images."""
    folder = best.folder.parent
    if (best.folder / SEGMENTER_FILE).is_file():  # an evaluation that was killed here has put it there already
        (best.folder / SEGMENTER_FILE).replace(folder / SEGMENTER_FILE)
    trained = load_segmenter(folder)
    module = SegmenterFinetuning(trained.network, learning_rate=best.rate, steps=1, inference=trained.inference)
    return task.panels(module.to(_device(best.config)), 0, pictures, console)


def _device(config: SegmenterConfig) -> torch.device:
    return torch.device("cuda" if config.runtime.on_gpu else "cpu")


def _tell_of_batch_norms(config: SegmenterConfig, segmenter: Segmenter) -> None:
    several = config.runtime.num_nodes > 1 or config.runtime.devices not in ("auto", 1, "1")
    if several and not config.runtime.on_gpu and any(isinstance(m, _BatchNorm) for m in segmenter.modules()):
        log.warning(
            "batch norms are synchronised on GPUs alone: on several CPU processes each has the statistics of its own "
            "share of the batch, and the training differs from that of one process"
        )
