"""Share of the objects in a training step with a fixed number of kept objects, as in the paper's profiling table.

    uv run python -m benchmarks.share                   # ViT-S/16, 16 images, on the CPU; about ten minutes
    uv run python -m benchmarks.share --device cuda     # ViT-B/16, 128 images, bf16

K = 32, a full bank, half of the objects with a valid match, and 8, 16 and 32 objects per image. The share includes
clustering, pooling, retrieval, the bank, and the heads and losses of objects, forward and backward, in the median step;
the table also shows the target.
"""

import argparse
import sys

from rich.console import Console
from rich.table import Table

from cribo.base.console import Phases
from cribo.pretraining.loading import load_config
from cribo.pretraining.profile_report import profile_table
from cribo.pretraining.profiling import Profile, profile

KEPT = (8, 16, 32)
GOALS = {"cpu": (0.15, 0.28, 0.55), "cuda": (0.06, 0.15, 0.35)}


def measure(device: str, precision: str, bank_images: int, steps: int, console: Console) -> Profile:
    on_cpu = device == "cpu"
    overrides = {
        "data.root": "scenes",
        "data.scenes.count": 512,
        "data.scenes.size": 224,
        "data.workers": 1 if on_cpu else 15,
        "backbone.name": "vit_small_patch16_224" if on_cpu else "vit_base_patch16_224",
        "objects.num_objects": 32,
        "objects.bank_images": bank_images,
        "objects.group_size": 16 if on_cpu else 64,
        "optim.batch_size": 16 if on_cpu else 128,
        "runtime.accelerator": "cpu" if on_cpu else "gpu",
        "runtime.precision": precision,
    }
    config = load_config("imagenet_vits16" if on_cpu else "imagenet_vitb16", overrides)
    with Phases(console) as progress:
        return profile(config, kept=KEPT, steps=steps, progress=progress)


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=tuple(GOALS), default="cpu")
    parser.add_argument(
        "--precision",
        nargs="+",
        default=None,
        help="precisions; by default 32-true and bf16-mixed on a CPU, bf16-mixed otherwise",
    )
    parser.add_argument("--bank_images", type=int, default=1000, help="S")
    parser.add_argument("--steps", type=int, default=5, help="number of timed steps per number of objects")
    arguments = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 130)
    precisions = arguments.precision or (["32-true", "bf16-mixed"] if arguments.device == "cpu" else ["bf16-mixed"])
    summary = Table(title="Share of the objects in a step")
    for column in ("precision", "objects per image", "step, ms", "for the objects", "goal", "clustering"):
        summary.add_column(column, justify="right")
    for precision in precisions:
        found = measure(arguments.device, precision, arguments.bank_images, arguments.steps, console)
        console.print(profile_table(found))
        for step, goal in zip(found.steps, GOALS[arguments.device], strict=True):
            summary.add_row(
                precision,
                str(step.fixed_objects),
                f"{1000 * step.step:.0f}",
                f"{step.object_share:.1%}",
                f"{goal:.0%}",
                f"{step.parts['clustering'] / step.step:.1%}",
            )
    console.print(summary)


if __name__ == "__main__":
    main()
