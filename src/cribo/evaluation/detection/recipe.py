"""How YOLOS is finetuned: the recipe of the paper, and one for small machines."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cribo.evaluation.runtime import Schedule

if TYPE_CHECKING:
    import torch

ADVICE = "choose a vision transformer with a [CLS] token and no registers, such as vit_small_patch16_224"
"""What to finetune in place of a network that YOLOS cannot be built on."""


@dataclass(frozen=True)
class Recipe:
    """What training depends on.

    The defaults are those of YOLOS-S: the command in YOLOS's README (epochs, learning rate, sizes of position
    embeddings and of scored images) and the defaults of its `main.py` (all others), but for the batch, which is CrIBo's
    (appendix "Object detection with YOLO-S": 32 instead of 8). YOLOS lowers the learning rate once per epoch; here it
    is lowered at each step, along the same half cosine. The backbone's biases, norms, tokens and first position
    embedding do not decay, all of the two heads does, and so do the position embeddings between blocks, as there.

    Attributes:
        epochs: over the training images.
        batch_size: images of a step, over all devices.
        learning_rate: at the beginning; there is no warm-up.
        size: of the shorter side of images when they are scored, and its largest in training.
        tokens: how many objects can be found in an image.
        final_learning_rate: at the end.
        weight_decay: of AdamW.
        clip: length to which all gradients together are shortened.
    """

    epochs: int = 150
    batch_size: int = 32
    learning_rate: float = 2.5e-5
    size: int = 800
    tokens: int = 100
    final_learning_rate: float = 1e-7
    weight_decay: float = 1e-4
    clip: float = 0.1


RECIPES: dict[Schedule, Recipe] = {
    "paper": Recipe(),
    # A small network on a CPU in minutes: small images, small batches for more steps, and a higher rate for both.
    "short": Recipe(epochs=40, batch_size=8, learning_rate=2e-4, size=256),
}


def rate_at(recipe: Recipe, step: int, steps: int) -> float:
    """The learning rate of a step, from 0, of so many.

    Example:
        >>> recipe = Recipe(learning_rate=2e-5, final_learning_rate=0.0)
        >>> [rate_at(recipe, step, 100) for step in (0, 50, 100)]
        [2e-05, 1e-05, 0.0]
    """
    share = (1 + math.cos(math.pi * step / steps)) / 2
    return recipe.final_learning_rate + (recipe.learning_rate - recipe.final_learning_rate) * share


def optimiser(model: Any, recipe: Recipe) -> "torch.optim.AdamW":
    """AdamW over a `YolosForObjectDetection`."""
    import torch  # here, so that a configuration need not wait for it

    without_decay = [
        parameter
        for name, parameter in model.vit.named_parameters()
        if parameter.ndim == 1 or (name.startswith("embeddings.") and not name.endswith("projection.weight"))
    ]
    apart = {id(parameter) for parameter in without_decay}
    with_decay = [parameter for parameter in model.parameters() if id(parameter) not in apart]
    return torch.optim.AdamW(
        [{"params": with_decay}, {"params": without_decay, "weight_decay": 0.0}],
        lr=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
    )
