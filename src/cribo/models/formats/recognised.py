"""What is found in a weight file: the network, under timm's names, and what its weights expect."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from cribo.models.config import NetworkName
from cribo.models.formats.beside import WeightFile
from cribo.models.formats.naming import State
from cribo.models.numerics import Numerics
from cribo.models.positions import RelativeResizing, Resizing, Windows


@dataclass(frozen=True)
class Expected:
    """Numerics and images that weights expect; None means timm's values, or ImageNet's normalisation.

    Attributes:
        norm_eps: epsilon of the layer norms.
        final_norm_eps: epsilon of the last norm, if different.
        mean, std: normalisation of images.
        act_layer: activation of the MLPs, by timm's name.
        assumed_act_layer: activation to assume if the project has several and files do not show it.
        positions: see `Numerics`.
        rope_coordinates: see `Numerics`.
        heads: number of attention heads by width, if unusual.
        dilate_entries: see `Numerics`.
        windows: see `Numerics`.
        relative_positions: see `Numerics`.
        note: note for the user.
    """

    norm_eps: float | None = None
    final_norm_eps: float | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    act_layer: str | None = None
    assumed_act_layer: str | None = None
    positions: Resizing | None = None
    rope_coordinates: Literal["separate", "max", "min"] | None = None
    heads: Mapping[int, int] = field(default_factory=dict)
    dilate_entries: bool | None = None
    windows: Windows | None = None
    relative_positions: RelativeResizing | None = None
    note: str | None = None

    def over(self, other: "Expected") -> "Expected":
        """Return these values, with the other's where None."""
        return replace(other, **{name: value for name, value in vars(self).items() if value not in (None, {})})


@dataclass(frozen=True)
class Recognised:
    """Network found in a file, under timm's names.

    Attributes:
        format: name of the project, or of the naming if the file contains only one network.
        configure: function of the format that applies the configurations beside the file.
        network: the network that was chosen; None if the file contains only one.
        part: prefix of the network's keys in the file.
        state: the network's tensors under timm's names.
        used: keys of the file that were used.
        dropped: keys of the file that were ignored, by group.
        num_heads: number of attention heads, if the file shows it.
        expected: numerics and images that the weights expect.
        rope_periods: periods of DINOv3's rotary embedding, if in the file.
        notes: notes for the user.
        positions: resizing of the position embedding in training, if configured.
        output_stride: output stride of a ResNet, if known from its training: 8, 16 or 32.
        may_be_dilated: whether the format has ResNets of several output strides, and the file does not show which.
        numerics: complete numerics, if in the weights' description.
        parent: repository on the hub, if in the weights' description (`LoadedWeights`).
    """

    format: str
    configure: "Configure"
    network: NetworkName | None
    part: str
    state: State
    used: tuple[str, ...]
    dropped: dict[str, tuple[str, ...]]
    num_heads: int | None
    expected: Expected
    rope_periods: tuple[float, ...] | None
    notes: tuple[str, ...]
    positions: Resizing | None = None
    output_stride: int | None = None
    may_be_dilated: bool = False
    numerics: Numerics | None = None
    parent: str | None = None

    def expecting(self, *notes: str, **values: Any) -> "Recognised":
        """Return the same with values of `expected` replaced where not None, and further notes before the others."""
        return replace(self, expected=Expected(**values).over(self.expected), notes=(*notes, *self.notes))


Configure = Callable[[Recognised, WeightFile], Recognised]
"""Applies the configurations in a checkpoint and beside it."""
