"""Ablation of `cribo adapt` at equal numbers of views.

    uv run python -m benchmarks.adapting --backbone WEIGHTS --images IMAGES --labelled NEAR FAR --out FOLDER
    uv run python -m benchmarks.adapting ... --only points cross_view --cache 4

Each row trains from the same closed form and is scored by dense retrieval as in the verdict of `cribo adapt`, with the
whitening refitted to the memory images of each labelled set. Differences have 95 % intervals from a paired
bootstrap over images. Rows that already exist in FOLDER are not trained again.
"""

import argparse
import copy
import re
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor

from cribo.apps.adapt.averaging import averaged
from cribo.apps.adapt.closed_form import choose_closed_form, refit_whitening
from cribo.apps.adapt.config import AdaptConfig
from cribo.apps.adapt.indicators import measure_indicators
from cribo.apps.adapt.labelled import gain, open_labelled, score_images
from cribo.apps.adapt.run import Adaptation
from cribo.base.console import Phases
from cribo.data import LabelledSubset, open_images
from cribo.features import BackboneSource
from cribo.models import Backbone, load_backbone, save_backbone
from cribo.pretraining import load_config, pretrain

POWER = 0.6
_ALIGNMENT = {"points": 0, "cross_view": 0, "cross_image": 0, "object_neighbours": 0, "patch_neighbours": 0}
_HEADS = {"head.prototypes": 2048, "losses.centring": "sinkhorn", "optim.freeze_last_layers_epochs": 0}
_CRIBO = {"objective.name": "cribo", **_HEADS}


def without_heads(**weights: float) -> dict[str, Any]:
    """Return options of the objective `alignment` with these loss weights."""
    return {"objective.args": {**_ALIGNMENT, **weights}}


ROWS: dict[str, dict[str, Any]] = {
    "points": without_heads(points=1),  # the preset
    "cross_view": without_heads(cross_view=1),
    "points + cross_image": without_heads(points=1, cross_image=1),
    "patch_neighbours": without_heads(patch_neighbours=1),
    "object_neighbours": without_heads(object_neighbours=1),
    "all without heads": without_heads(**dict.fromkeys(_ALIGNMENT, 1)),
    "points, anchor": {"losses.anchor": 1.0},
    "points, LoRA": {"backbone.lora": 16},
    "points, all blocks": {"backbone.train_blocks": None},  # except the embeddings
    "cribo: image level": {**_CRIBO, "losses.cross_view": 0, "losses.cross_image": 0},
    "cribo: + cross-view": {**_CRIBO, "losses.cross_image": 0},
    "cribo": _CRIBO,
    "croc": {"objective.name": "croc", **_HEADS},
    "ibot": {"objective.name": "ibot", "objective.args": {"local_size": 98}, **_HEADS},
    "neco": {"objective.name": "neco", "optim.lr_factors": {"head.": 10}},
    "paka": {"objective.name": "paka", "optim.lr_factors": {"head.": 10}},
    "timet": {
        "objective.name": "timet",
        "data.video.frames": 8,
        "head.prototypes": 200,
        "optim.lr_factors": {"head.": 10},
    },
}
"""Changes to the preset `adapt` in each row."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", type=Path, required=True)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--labelled", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--cache", type=int, help="number of view pairs per image whose frozen features are cached on disk"
    )
    arguments = parser.parse_args()
    console = Console(soft_wrap=True)
    original = load_backbone(arguments.backbone)
    start = closed_form(original, arguments, console)
    images, views = open_images(arguments.images), load_config("adapt").views
    reference: list[Tensor] = []
    print(
        "| trained on | agreement |" + "".join(f" {path.name} | over the closed form |" for path in arguments.labelled)
    )
    for row in ("closed form", "starting weights", *arguments.only):
        if row == "closed form":
            network = copy.deepcopy(start)
        elif row == "starting weights":
            network = original
        else:
            network = train(row, start, arguments, console)
        agreement = measure_indicators(network, images, views).agreement
        tallies = scored(network, arguments, refit=row != "starting weights")
        reference = reference or tallies
        gains = [gain(before, after) for before, after in zip(reference, tallies, strict=True)]
        cells = [
            f"{100 * found.after:.1f} | {100 * found.mean:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"
            for found in gains
        ]
        print(f"| {row} | {agreement:.0%} | {' | '.join(cells)} |", flush=True)


def closed_form(original: Backbone, arguments: argparse.Namespace, console: Console) -> Backbone:
    folder = arguments.out / "closed_form"
    if not folder.exists():
        images, recipe = open_images(arguments.images), load_config("adapt")
        with Phases(console) as progress:
            save_backbone(choose_closed_form(original, images, recipe.views, progress=progress)[0], folder)
    return load_backbone(folder)


def train(row: str, start: Backbone, arguments: argparse.Namespace, console: Console) -> Backbone:
    """Train a row and refit its whitening to the images."""
    changes = {"seed": arguments.seed, "backbone.cache_trunk": arguments.cache, **ROWS[row]}
    training = {key: "null" if value is None else value for key, value in changes.items()}
    images, source = open_images(arguments.images), BackboneSource(str(arguments.backbone))
    steps = arguments.epochs * (len(images) // load_config("adapt", training).optim.batch_size)
    config = AdaptConfig(str(arguments.images), source, steps=steps, training=training)
    planned = Adaptation(config, images).plan(start, arguments.out, seconds=0)
    name = f"{re.sub('[^a-z_]+', '-', row.lower())}-{arguments.seed}"
    run = pretrain(planned, out=arguments.out, name=name, continue_run=True, console=console)
    adapted = averaged(start, run.backbone(), 1.0)
    refit_whitening(adapted, images, power=POWER)
    return adapted


def scored(backbone: Backbone, arguments: argparse.Namespace, *, refit: bool) -> list[Tensor]:
    """Compute the confusion matrices per image on each labelled set."""
    tallies = []
    for path in arguments.labelled:
        labelled = open_labelled(path)
        if refit:
            memory = LabelledSubset(labelled.memory, labelled.folds[0][0])
            refit_whitening(backbone, memory, power=POWER)
        tallies.append(score_images(backbone, labelled))
    return tallies


if __name__ == "__main__":
    main()
