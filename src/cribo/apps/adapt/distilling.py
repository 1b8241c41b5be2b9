"""Steps of `cribo distill`: closed form, training by the objective `distill`, verdict, and export."""

import copy
import json
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from cribo.apps.adapt.averaging import averaged
from cribo.apps.adapt.config import DistillConfig
from cribo.apps.adapt.labelled import mean_iou, open_labelled
from cribo.apps.adapt.planning import (
    CLOSED_FORM,
    VERDICT,
    Exported,
    fast_precision,
    load_recipe,
    open_listable,
    plan_training,
    record_options,
    require_time,
    result_folder,
    to_continue,
    train,
    try_objective,
)
from cribo.apps.adapt.regression import predict_teacher
from cribo.apps.adapt.verdict import DISTILLATION, Candidate, Measures, Verdict, judge, measure
from cribo.base.console import Phases, Progress
from cribo.base.devices import resolve_devices
from cribo.base.errors import if_interrupted
from cribo.base.files import write_json
from cribo.base.folders import named_folder
from cribo.data import ImageFiles
from cribo.features.config import backbone_name
from cribo.features.encoder import open_backbone
from cribo.models import Backbone, load_backbone, save_backbone
from cribo.models.building import is_import_path
from cribo.models.saving import DESCRIPTION_FILE, reserve_readout
from cribo.pretraining.batches import fit_batch
from cribo.pretraining.config import PretrainConfig
from cribo.training.folder import claim

log = logging.getLogger("cribo")

OPTIONS = "distill.json"
_TEACHER = "teacher"
_SHARE = "predicted.json"

_SIZE = "views.size"
_PRECISION = "runtime.precision"
_GRID = 12  # patches per side of a view


@dataclass(frozen=True)
class DistillVerdict:
    """The network to keep, and how close it comes to the teacher.

    Attributes:
        sentences: the verdict as text.
        students: comparison of the original student, the closed form, the trained student, and the average of the last
            two.
        teacher: mean IoU of the teacher's dense retrieval and of the segmentation with it, in 0-1; empty without
            labelled images.
    """

    sentences: Sequence[str]
    students: Verdict
    teacher: Mapping[str, float]


@dataclass(frozen=True)
class Distilled(Exported):
    """A finished distillation.

    Attributes:
        folder: folder of the exported backbone and the verdict.
        network: name of the backbone's network.
        verdict: the exported network and the evidence.
    """

    verdict: DistillVerdict


def distill(
    config: DistillConfig,
    *,
    out: str | Path = "distilled",
    name: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
) -> Distilled:
    """Train a backbone to predict the features of another one on unlabelled images, as `cribo distill` does.

    Args:
        config: the options.
        out: parent folder of the results.
        name: name of the results folder; by default that of the student, numbered.
        resume: resume the distillation with this name.
        overwrite: replace the distillation with this name.
        console: console for progress; silent by default.

    Raises:
        ValueError: images, networks, options or folder are invalid; raised before computation whenever possible.
        MissingPackage: the package of a logger is not installed.
        FileNotFoundError: a file of a network or the images does not exist.
        Interrupted: SIGTERM or SIGUSR1 was received during training, which can be resumed.
    """
    started = time.perf_counter()
    console = console or Console(quiet=True)
    target = result_folder(
        named_folder(out, name or f"{backbone_name(config.backbone)}-distilled"),
        "distillation",
        numbered=name is None,
        overwrite=overwrite,
        resume=resume,
        known_by=OPTIONS,
        inputs=(config.images, config.labelled, config.teacher.source, config.backbone.source),
    )
    images = open_listable(config.images, config.reading)
    labelled = None if config.labelled is None else open_labelled(config.labelled, reading=config.reading)
    device = resolve_devices(None if config.device is None else [config.device], "device")[0]
    recipe = load_recipe(config)
    teacher, student = (open_backbone(source).to(device) for source in (config.teacher, config.backbone))
    reserve_readout(copy.deepcopy(student), teacher.embed_dim)  # raises an error if the network does not support it
    if not (resume and (target.path / CLOSED_FORM / _SHARE).is_file()):
        require_time(config, (teacher, student), images, otherwise="fewer images or a smaller teacher")
    with TemporaryDirectory() as copied:
        save_backbone(teacher, Path(copied) / _TEACHER)
        try_objective(_for_networks(config, recipe, student, images, teacher.name, Path(copied)), images)
    with ExitStack() as stack:
        folder = claim(stack, target)
        stack.enter_context(if_interrupted(lambda: to_continue(folder)))
        record_options(folder / OPTIONS, config, images)
        # A copy, so that the training does not depend on the options with which the teacher was loaded.
        if not (folder / _TEACHER / DESCRIPTION_FILE).is_file():
            save_backbone(teacher, folder / _TEACHER)
        teacher = load_backbone(folder / _TEACHER, name=teacher.name).to(device)
        with Phases(console) as progress:
            start, before = _closed_form(student, teacher, images, folder, progress)
        plan = partial(_planned_training, config, recipe, start, images, teacher.name, folder)
        run = train(
            plan,
            _for_networks(config, recipe, start, images, teacher.name, folder),
            folder,
            minutes=config.minutes,
            started=started,
            logger=recipe.runtime.logger,
            console=console,
        )
        students = {
            "original student": (student, 0.0),  # without a linear layer, it predicts nothing
            "closed form": (start, before),
        }
        if run is not None:
            trained = run.backbone().to(device)
            with Phases(console) as progress:
                again = partial(progress, "closed forms of the averaged and the trained student")
                fitted = predict_teacher([averaged(trained, start, 0.5), trained], teacher, images, progress=again)
            students |= dict(zip(("averaged student", "trained student"), fitted, strict=True))
        candidates = [Candidate(name, network) for name, (network, _) in students.items()]
        indicators = {name: {DISTILLATION.criterion: share} for name, (_, share) in students.items()}
        keep_last = config.keep == "trained" and run is not None
        with Phases(console) as progress:
            verdict = judge(
                candidates, indicators, labelled, None, keep_last=keep_last, process=DISTILLATION, progress=progress
            )
            measured = measure([Candidate(_TEACHER, teacher)], labelled, None, progress=progress)
        save_backbone(students[verdict.kept][0], folder)
        verdict = _with_teacher(verdict, measured)
        write_json(folder / VERDICT, asdict(verdict))
    return Distilled(folder, student.name, verdict)


def _closed_form(
    student: Backbone, teacher: Backbone, images: ImageFiles, folder: Path, progress: Progress
) -> tuple[Backbone, float]:
    """Fit the closed form and save it with the share of variance that it predicts, or load both."""
    own = folder / CLOSED_FORM
    if not (own / _SHARE).is_file():
        fitting = partial(progress, "prediction of the teacher's patches")
        [(start, share)] = predict_teacher([student], teacher, images, progress=fitting)
        save_backbone(start, own)
        write_json(own / _SHARE, {DISTILLATION.criterion: share})
    share = json.loads((own / _SHARE).read_text(encoding="utf-8"))[DISTILLATION.criterion]
    log.info("closed form: a linear layer predicts %.0f %% of the variance of the teacher's patches", 100 * share)
    return load_backbone(own, name=student.name).to(next(student.parameters()).device), share


def _planned_training(
    config: DistillConfig,
    recipe: PretrainConfig,
    start: Backbone,
    images: ImageFiles,
    teacher: str,
    folder: Path,
    seconds: float,
) -> PretrainConfig:
    """Adjust the recipe to the images, the networks in `folder`, and the speed of the machine."""
    adjusted = _for_networks(config, recipe, start, images, teacher, folder)
    otherwise = """, or smaller views, such as --training '{"views.size": 160}'"""
    return plan_training(adjusted, config, images, folder, seconds, otherwise=otherwise)


def _for_networks(
    config: DistillConfig, recipe: PretrainConfig, start: Backbone, images: ImageFiles, teacher: str, folder: Path
) -> PretrainConfig:
    """Set the student, the teacher, of this network and saved in `folder`, and the batch size of the recipe."""
    recipe = fit_batch(recipe, len(images))
    arguments = {**recipe.objective.args, "teacher": str((folder / _TEACHER).absolute())}
    if is_import_path(teacher):
        arguments["teacher_network"] = teacher
    size = config.training.get(_SIZE) or start.fixed_size or _GRID * start.patch_size
    return replace(
        recipe,
        objective=replace(recipe.objective, args=arguments),
        backbone=replace(recipe.backbone, name=start.name, args=start.args),
        views=replace(recipe.views, size=size),
        runtime=replace(recipe.runtime, precision=config.training.get(_PRECISION) or fast_precision(start)),
    )


def _with_teacher(students: Verdict, measured: Measures) -> DistillVerdict:
    """Add the measures of the teacher."""
    found = {}
    if _TEACHER in measured.retrieval:
        found["retrieval"] = mean_iou(measured.retrieval[_TEACHER])
    if _TEACHER in measured.fits:
        found["segmentation"] = mean_iou(measured.fits[_TEACHER].tallies)
    sentences = list(students.sentences)
    if found:
        listed = ", ".join(f"{what} {100 * value:.1f} % mIoU" for what, value in found.items())
        sentences.append(f"For comparison, the teacher: {listed}.")
    return DistillVerdict(sentences, students, found)
