"""Steps of `cribo distill`: closed form, training by the objective `distill`, verdict, and export."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from cribo.apps.adapt.averaging import averaged
from cribo.apps.adapt.config import DistillConfig
from cribo.apps.adapt.labelled import mean_iou
from cribo.apps.adapt.planning import fast_precision, inflation_of, open_for, plan_training
from cribo.apps.adapt.regression import predict_teacher
from cribo.apps.adapt.sequence import Exported, Start, Steps, run_steps
from cribo.apps.adapt.verdict import DISTILLATION, Candidate, Measures, Verdict, judge, measure
from cribo.base.console import Progress
from cribo.data import ImageFiles
from cribo.models import Backbone, load_backbone, save_backbone
from cribo.models.building import is_import_path
from cribo.models.saving import DESCRIPTION_FILE, reserve_readout
from cribo.pretraining.batches import fit_batch
from cribo.pretraining.config import PretrainConfig
from cribo.pretraining.run import Run

_TEACHER = "teacher"

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
    folder, kept, verdict = run_steps(
        Distillation, config, out=out, name=name, resume=resume, overwrite=overwrite, console=console
    )
    return Distilled(folder, kept.name, verdict)


class Distillation(Steps[DistillConfig, DistillVerdict]):
    """A linear layer that is fitted in closed form, and training by the objective `distill`."""

    kind = "distillation"
    suffix = "distilled"
    otherwise = "fewer images or a smaller teacher"

    def __init__(self, config: DistillConfig, images: ImageFiles) -> None:
        super().__init__(config, images)
        self.teacher, self.student = (
            open_for(source, config.reading).to(self.device) for source in (config.teacher, config.backbone)
        )
        self.networks = (self.teacher, self.student)
        reserve_readout(copy.deepcopy(self.student), self.teacher.embed_dim)  # an error if this is not possible

    def begin(self, folder: Path) -> None:
        """Copy the teacher, so that the training does not depend on the options with which it was loaded."""
        if not (folder / _TEACHER / DESCRIPTION_FILE).is_file():
            save_backbone(self.teacher, folder / _TEACHER)
        self.teacher = load_backbone(folder / _TEACHER, name=self.teacher.name).to(self.device)

    def adjusted(self, network: Backbone, folder: Path) -> PretrainConfig:
        """Set the student, the teacher that is saved in `folder`, the views and the batch size of the recipe."""
        given = self.config.training
        recipe = fit_batch(self.recipe, len(self.images))
        arguments = {**recipe.objective.args, "teacher": str((folder / _TEACHER).absolute())}
        if is_import_path(self.teacher.name):
            arguments["teacher_network"] = self.teacher.name
        size = given.get(_SIZE) or network.fixed_size or _GRID * network.patch_size
        return replace(
            recipe,
            objective=replace(recipe.objective, args=arguments),
            backbone=replace(recipe.backbone, name=network.name, args=network.args),
            views=replace(recipe.views, size=size),
            runtime=replace(recipe.runtime, precision=given.get(_PRECISION) or fast_precision(network)),
        )

    def fit(self, progress: Progress) -> Start:
        """Fit a linear layer that predicts the teacher's features, with the share of variance that it predicts."""
        fitting = partial(progress, "prediction of the teacher's patches")
        [(start, share)] = predict_teacher([self.student], self.teacher, self.images, progress=fitting)
        return Start(start, {"share": share})

    def describe(self, start: Start) -> str:
        """Return the share of variance that is predicted."""
        return f"a linear layer predicts {100 * start.account['share']:.0f} % of the variance of the teacher's patches"

    def plan(self, start: Backbone, folder: Path, seconds: float) -> PretrainConfig:
        """Return the configuration of the training."""
        otherwise = """, or smaller views, such as --training '{"views.size": 160}'"""
        recipe = self.adjusted(start, folder)
        return plan_training(recipe, self.config, self.images, folder, seconds, otherwise=otherwise)

    def judge(self, start: Start, run: Run | None, folder: Path, progress: Progress) -> tuple[DistillVerdict, Backbone]:
        """Compare the student, the closed form, the trained student and an average, and measure the teacher."""
        students = {
            "original student": (self.student, 0.0),  # without a linear layer, it predicts nothing
            "closed form": (start.backbone, start.account["share"]),
        }
        if run is not None:
            trained = run.backbone().to(self.device)
            networks = [averaged(trained, start.backbone, 0.5), trained]
            refitting = partial(progress, "closed forms of the averaged and the trained student")
            fitted = predict_teacher(networks, self.teacher, self.images, progress=refitting)
            students |= dict(zip(("averaged student", "trained student"), fitted, strict=True))
        verdict = judge(
            [Candidate(name, network) for name, (network, _) in students.items()],
            {name: {DISTILLATION.criterion: share} for name, (_, share) in students.items()},
            self.labelled,
            None,
            keep_last=self.config.keep == "trained" and run is not None,
            process=DISTILLATION,
            progress=progress,
        )
        measured = measure([Candidate(_TEACHER, self.teacher)], self.labelled, None, progress=progress)
        inflation = inflation_of(self.student, trained=run is not None)
        verdict = replace(verdict, sentences=[*verdict.sentences, *inflation])
        return _with_teacher(verdict, measured), students[verdict.kept][0]


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
