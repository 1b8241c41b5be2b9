"""BYOL (Grill et al. 2020): predict the target network's projection of one view from the other view.

Targets come from the moving average of the trained network. Without negatives, the predictor and the moving average
prevent collapse. It is the image level of ORL.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from cribo.base.errors import ConfigError
from cribo.data.samples import Batch, SampleTransform
from cribo.method.precision import in_float32
from cribo.models import Backbone
from cribo.objectives.base import Columns, Output, Setting, Step
from cribo.objectives.collapse import feature_std
from cribo.objectives.config import HeadConfig
from cribo.objectives.mlp import make_mlp, seeded_weights
from cribo.objectives.self_distillation import StudentNetwork, StudentTeacher
from cribo.objectives.trunk import Inputs, encode, inputs_of, split_inputs
from cribo.objectives.views import noise_of_views, view_pairs


@in_float32
def byol_loss(predicted: Float[Tensor, "*r e"], targets: Float[Tensor, "*r e"]) -> Float[Tensor, "*r"]:
    """Squared distance of the directions, 2 - 2 cos(prediction, target).

    Args:
        predicted: (..., E) predictions of the trained network.
        targets: (..., E) projections of the target network.

    Source: BYOL, equation 2.

    Example:
        >>> byol_loss(torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 3.0]])).item()
        2.0
    """
    return 2 - 2 * F.cosine_similarity(predicted, targets, dim=-1)


class PredictiveNetwork(StudentNetwork):
    """Backbone, projector, and a predictor for each level, such as `image`.

    Args:
        backbone: the backbone.
        config: sizes of the MLPs.
        levels: names of the predictors.
        batch_norm: whether the MLPs have batch norms.
        seed: the only source of the random weights of the MLPs.
    """

    student_only = "predictors"

    def __init__(
        self, backbone: Backbone, config: HeadConfig, *, levels: Sequence[str], batch_norm: bool, seed: int
    ) -> None:
        super().__init__(backbone)

        def mlp(dim: int) -> nn.Sequential:
            return make_mlp(
                dim, config, batch_norm=batch_norm, activation=nn.ReLU, running_statistics=True, last_bias=False
            )

        with seeded_weights(seed):
            self.projector = mlp(backbone.embed_dim)
            self.predictors = nn.ModuleDict({level: mlp(config.bottleneck_dim) for level in levels})


class BYOL(StudentTeacher):
    """Prediction of the target network's projection of each view from the other view.

    Reads `views`, `backbone`, `head` (MLPs of projector and predictor) and `optim`. The image is represented by the
    global token: the mean of the feature map of a convolutional network, or [CLS].

    Differs from the released code of ORL in this: the target network is exported, not the trained one; and weight decay
    is not applied to biases and batch norms. Batch norms use the statistics of a view, as there; on CPUs, those of a
    process.

    Args:
        setting: the run.
        batch_norm: whether projector and predictor have batch norms. If not, images are independent.

    Raises:
        ConfigError: micro-batches of a single image, with batch norms.
    """

    columns = Columns(labels={"image": "BYOL"}, progress={"feature_std": "spread {:.2f}"})
    levels: Sequence[str] = ("image",)
    """Names of the losses; each has its own predictor."""

    student: PredictiveNetwork
    teacher: PredictiveNetwork

    def __init__(self, setting: Setting, *, batch_norm: bool = True) -> None:
        super().__init__(setting)
        options = setting.options
        if batch_norm and options.optim.batch_size // options.optim.micro_batches < 2:
            raise ConfigError(
                f"batch norms require at least 2 images per micro-batch, got optim.batch_size "
                f"{options.optim.batch_size} and optim.micro_batches {options.optim.micro_batches}: use a larger "
                "batch or objective.args.batch_norm false"
            )
        self.batch_norm = batch_norm
        self.student = PredictiveNetwork(
            setting.build_backbone(), options.head, levels=self.levels, batch_norm=batch_norm, seed=options.seed
        )
        self.teacher = self.student.make_teacher()
        self.uses_all_parameters = not options.optim.freeze_backbone_epochs
        self._targets: Float[Tensor, "b e"] | None = None  # of the last micro-batch

    def samples(self) -> SampleTransform:
        """Return the transform to two views."""
        return view_pairs(self.options.views, self.student.backbone)

    def forward(self, batch: Batch, step: Step) -> Output:
        """Compute the loss of both views, the sum of both directions."""
        views = split_inputs(inputs_of(batch, self.teacher.backbone, self.options))
        return Output({"image": self.pair_loss("image", views, noise_of_views(batch))})

    def pair_loss(self, level: str, views: Sequence[Inputs], noise: Sequence[Tensor | None]) -> Float[Tensor, ""]:
        """Return the mean loss of pairs of views, the sum of both directions. Batch norms use the statistics of a view.

        Args:
            level: name of the predictor.
            views: inputs of both views, B each.
            noise: (B, sites) random numbers of the student's stochastic depth for each view; None if it is off.
        """
        student, teacher = self.student, self.teacher
        features = (
            encode(student.backbone, view, drop_path_noise=of_view).global_token
            for view, of_view in zip(views, noise, strict=True)
        )
        predicted = torch.stack([student.predictors[level](student.projector(view)) for view in features])
        with torch.no_grad():
            targets = (encode(teacher.backbone, view).global_token for view in views)
            projected = torch.stack([teacher.projector(view) for view in targets])
        self._targets = projected[0]
        return byol_loss(predicted, projected.flip(0)).sum(dim=0).mean()

    def watch(self, step: Step) -> dict[str, float]:
        """Return the spread of the projections: 0 if they have collapsed."""
        return {} if self._targets is None or len(self._targets) < 2 else {"feature_std": feature_std(self._targets)}
