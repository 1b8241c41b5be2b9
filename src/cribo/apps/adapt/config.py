"""Options of `cribo adapt` and `cribo distill`, shared by the command line and Python."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from cribo.base.bounds import above, at_least, at_most, between, check_bounds
from cribo.base.errors import ConfigError
from cribo.data.config import DEFAULT_READING, Reading
from cribo.features.config import MEAN_COLOUR, BackboneSource

CLOSED_FORM_ALONE = 1.0
"""Duration in minutes up to which nothing is trained."""

Keep = Literal["better", "adapted"]


@dataclass
class AdaptConfig:
    """Adaptation of a pretrained backbone to unlabelled images.

    Attributes:
        images: a folder of images (nested or not), or a text file that lists images.
        backbone: the network to adapt.
        minutes: total time on this machine; up to 1, only the closed form is fitted. At most 500 steps are trained;
            set `steps` for more, which improves results on these images but degrades them on others.
        steps: number of training steps instead of `minutes`; the result is then independent of the machine's speed.
        labelled: folder of labelled images for the verdict: images/ and labels/ (PNG with class indices, 255 for
            ignored pixels), each with or without train/ and val/; at least ten images. They are never trained on.
        second: another such folder, of images from another domain, to measure forgetting.
        keep: the network to export: `better` for the best one that improves retrieval or segmentation and degrades
            neither, or `adapted` for the last one in any case.
        blocks: number of blocks of a vision transformer to keep; later blocks are dropped. [chosen by neighbour
            agreement]
        stride: output stride of a convolutional network, if it can be dilated: 16 gives four times as many features as
            32. [unchanged]
        power: power of the partial whitening: 0 only rotates, 1 whitens. [chosen by neighbour agreement, or no
            whitening]
        dims: number of directions of largest variance to keep. [all]
        trained_share: weight of the trained weights in the exported average with the starting weights. 1 exports the
            trained weights; lower values reduce forgetting.
        recipe: a preset or YAML file of `cribo pretrain`.
        training: values that override the recipe, such as {"optim.lr": 1e-3, "backbone.train_blocks": 2}.
        logger: where the training logs its numbers: tensorboard, wandb, mlflow, trackio, or several of them, such as
            tensorboard,wandb (docs/logging.md). [tensorboard]
        reading: how images are read.
        workers: number of data loading workers during training. [depends on the number of cores]
        device: device, such as cuda:0 or cpu. [a GPU if available]

    Raises:
        ConfigError: a value is out of range.
    """

    images: str
    backbone: BackboneSource
    minutes: Annotated[float, above(0)] = 15.0
    steps: int | None = None
    labelled: str | None = None
    second: str | None = None
    keep: Keep = "better"
    blocks: Annotated[int, at_least(1)] | None = None
    stride: Annotated[int, at_least(1)] | None = None
    power: Annotated[float, between(0, 1)] | None = None
    dims: Annotated[int, at_least(1)] | None = None
    trained_share: Annotated[float, above(0) & at_most(1)] = 0.75
    recipe: str = "adapt"
    training: dict[str, Any] = field(default_factory=dict)
    logger: tuple[str, ...] | None = None
    reading: Reading = DEFAULT_READING
    workers: Annotated[int, at_least(0)] | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.steps is not None and self.steps < 1:
            raise ConfigError(f"steps must be >= 1, got {self.steps}: to fit only the closed form, use --minutes 1")
        if self.backbone.source == MEAN_COLOUR:
            raise ConfigError(f"--backbone {MEAN_COLOUR} has no weights to adapt: choose a pretrained network")
        if self.backbone.layers != 1:
            raise ConfigError(f"adapt does not support --layers {self.backbone.layers}: choose one block with --blocks")
        if self.second is not None and self.labelled is None:
            raise ConfigError("--second requires --labelled")

    @property
    def trains(self) -> bool:
        """Whether weights are trained after the closed form."""
        return self.steps is not None or self.minutes > CLOSED_FORM_ALONE

    @property
    def inputs(self) -> tuple[str | None, ...]:
        """Files and folders that are read."""
        return self.images, self.labelled, self.second, self.backbone.source


@dataclass
class DistillConfig:
    """Distillation of a network into another one on unlabelled images.

    Attributes:
        images: a folder of images (nested or not), or a text file that lists images.
        teacher: the network whose features are learnt.
        backbone: the network to train.
        minutes: total time on this machine.
        steps: number of training steps instead of `minutes`; the result is then independent of the machine's speed.
        labelled: folder of labelled images for the verdict: images/ and labels/ (PNG with class indices, 255 for
            ignored pixels), each with or without train/ and val/; at least ten images. They are never trained on.
        keep: the network to export: `better` for the best one that improves retrieval or segmentation and degrades
            neither, or `trained` for the last one in any case.
        recipe: a preset or YAML file of `cribo pretrain`, with the objective `distill`.
        training: values that override the recipe, such as {"optim.lr": 1e-3, "views.size": 320}.
        logger: where the training logs its numbers: tensorboard, wandb, mlflow, trackio, or several of them, such as
            tensorboard,wandb (docs/logging.md). [tensorboard]
        reading: how images are read.
        workers: number of data loading workers during training. [depends on the number of cores]
        device: device, such as cuda:0 or cpu. [a GPU if available]

    Raises:
        ConfigError: a value is out of range.
    """

    images: str
    teacher: BackboneSource
    backbone: BackboneSource
    minutes: Annotated[float, above(0)] = 15.0
    steps: Annotated[int, at_least(1)] | None = None
    labelled: str | None = None
    keep: Literal["better", "trained"] = "better"
    recipe: str = "distill"
    training: dict[str, Any] = field(default_factory=dict)
    logger: tuple[str, ...] | None = None
    reading: Reading = DEFAULT_READING
    workers: Annotated[int, at_least(0)] | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        check_bounds(self)
        for option, source in (("teacher", self.teacher), ("backbone", self.backbone)):
            if source.source == MEAN_COLOUR:
                raise ConfigError(f"--{option} {MEAN_COLOUR} has no weights: choose a network")
            if source.layers != 1:
                raise ConfigError(f"distill does not support --{option}.layers {source.layers}: remove it")

    @property
    def trains(self) -> bool:
        """Whether weights are trained after the closed form: always."""
        return True

    @property
    def inputs(self) -> tuple[str | None, ...]:
        """Files and folders that are read."""
        return self.images, self.labelled, self.teacher.source, self.backbone.source
