"""How long a ViT-L takes to load, with this checkout's code and with another's.

    uv run python -m benchmarks.loading --against ../main/src

Each load is a fresh process that has imported the package before its clock starts; the two take turns. The file of
1.2 GB is written just before, with random weights, so that both should find it in the page cache.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import timm
import torch

_LOAD = """
import sys, time
from cribo.models import load_backbone
begun = time.perf_counter()
load_backbone(sys.argv[1])
print(time.perf_counter() - begun)
"""


def seconds(source: Path, weights: Path) -> float:
    """Seconds of `load_backbone` with the package of a source folder."""
    environment = {**os.environ, "PYTHONPATH": str(source.resolve())}
    command = [sys.executable, "-c", _LOAD, str(weights)]
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    return float(output.split()[-1])


def main() -> None:
    """Measure, and print both medians and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, required=True, help="src folder of the other checkout")
    parser.add_argument("--name", default="vit_large_patch16_224")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    ours = Path(__file__).parents[1] / "src"
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "weights.pth"
        torch.save({"model": timm.create_model(arguments.name, num_classes=0).state_dict()}, weights)
        rounds = [(seconds(ours, weights), seconds(arguments.against, weights)) for _ in range(arguments.rounds)]
    for which, times in zip(("this checkout", str(arguments.against)), zip(*rounds, strict=True), strict=True):
        listed = ", ".join(f"{each:.1f}" for each in times)
        print(f"{which}: median {statistics.median(times):.1f} s of {listed}")
    ratios = [theirs / own for own, theirs in rounds]
    print(f"ratio: median {statistics.median(ratios):.2f} of {', '.join(f'{ratio:.2f}' for ratio in ratios)}")


if __name__ == "__main__":
    main()
