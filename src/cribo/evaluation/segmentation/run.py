"""Linear segmentation from beginning to end: backbone, data, training, results and pictures in a folder."""

import time
from pathlib import Path

from rich.console import Console

from cribo.evaluation.pictures import write_pictures
from cribo.evaluation.results import EvaluationResult
from cribo.evaluation.segmentation.config import LinearConfig
from cribo.evaluation.segmentation.linear import LinearSegmentation
from cribo.evaluation.segmentation.task import SegmentationTask, best_row
from cribo.evaluation.training import evaluation_folder, finished_result, fit
from cribo.processes import is_first_process


def evaluate_linear(
    config: LinearConfig,
    *,
    out: Path | None = None,
    overwrite: bool = False,
    resume: bool = False,
    pictures: int = 6,
    command: str = "",
    console: Console | None = None,
) -> tuple[EvaluationResult, Path]:
    """Score a frozen backbone by linear segmentation, and write results and pictures.

    Args:
        config: what is asked for.
        out: the folder; `evaluations/linear-<data>-<backbone>`, numbered, when not given.
        overwrite: replace an evaluation that stands in `out`.
        resume: go on with the one that stands in `out`, if there is one.
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
    """
    console = console or Console(quiet=True)
    started = time.perf_counter()
    task = SegmentationTask.open(config, pictures=pictures)
    used = {**task.settings.used(), "layers": config.backbone.layers}
    with evaluation_folder(
        out,
        f"linear-{config.data.name}-{task.backbone_about['name']}",
        {"evaluation": "linear", **task.identity(), "settings": used},
        overwrite=overwrite,
        resume=resume,
        runtime=config.runtime,
        inputs=(config.backbone.source, config.data.root),
    ) as folder:
        # Asked for here, where its settings are known to be these.
        if (done := finished_result(folder, resume=resume)) is not None:
            return done, folder
        module = LinearSegmentation(
            task.backbone,
            classes=len(task.train.classes),
            layers=config.backbone.layers,
            learning_rates=task.settings.learning_rates,
            steps=task.settings.iterations,
            inference=task.settings.inference,
            seed=config.seed,
        )
        trainer = fit(
            module,
            train=task.crops,
            validation=task.scored,
            batch_size=task.settings.batch_size,
            steps=task.settings.iterations,
            seed=config.seed,
            folder=folder,
            label="linear heads",
            runtime=config.runtime,
            console=console,
        )
        device = trainer.strategy.root_device
        result = task.result(
            "linear",
            used,
            dict(zip(task.settings.learning_rates, module.confusions, strict=True)),
            seconds=time.perf_counter() - started,
            device=device,
            command=command,
        )
        if is_first_process():
            panels = task.panels(module.to(device), best_row(result), pictures, console)
            # The result comes last: a folder that has one is finished.
            write_pictures(result, panels, task.val.palette, folder)
            result.write(folder)
    return result, folder
