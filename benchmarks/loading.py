"""Time to load a ViT-L, compared with `timm.create_model` on the same file.

    uv run python -m benchmarks.loading

Each load runs in a new process, timed after the imports; both are interleaved. The file of
1.2 GB with random weights is written just before, so that it should be in the page cache.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import timm
import torch

_OURS = """
import sys, time
from cribo.models import load_backbone
begun = time.perf_counter()
load_backbone(sys.argv[2])
print(time.perf_counter() - begun)
"""
_TIMM = """
import sys, time
import timm
begun = time.perf_counter()
timm.create_model(sys.argv[1], num_classes=0, checkpoint_path=sys.argv[2])
print(time.perf_counter() - begun)
"""


def seconds(program: str, name: str, weights: Path) -> float:
    """Run a program and return the seconds that it prints."""
    command = [sys.executable, "-c", program, name, str(weights)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def main() -> None:
    """Measure, and print both medians and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="vit_large_patch16_224")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "weights.pth"
        torch.save({"model": timm.create_model(arguments.name, num_classes=0).state_dict()}, weights)
        programs = (_OURS, _TIMM)
        rounds = [[seconds(each, arguments.name, weights) for each in programs] for _ in range(arguments.rounds)]
    for which, times in zip(("load_backbone", "timm"), zip(*rounds, strict=True), strict=True):
        listed = ", ".join(f"{each:.1f}" for each in times)
        print(f"{which}: median {statistics.median(times):.1f} s of {listed}")
    ratios = [theirs / own for own, theirs in rounds]
    print(f"ratio: median {statistics.median(ratios):.2f} of {', '.join(f'{ratio:.2f}' for ratio in ratios)}")


if __name__ == "__main__":
    main()
