"""All benchmarks of speed and memory, run sequentially, each in a separate process.

uv run python -m benchmarks                     # on the CPU; up to an hour on two idle cores
uv run python -m benchmarks --device cuda
uv run python -m benchmarks --only method search
"""

import argparse
import subprocess
import sys
import time

import torch

# Description of each benchmark.
BENCHMARKS = {
    "step": "a training step against the reference",
    "method": "clustering, search and losses against the reference and against bare matrix products",
    "share": "share of the objects in a step",
    "backbone": "backbones relative to the machine's peak throughput, and activation checkpointing",
    "input": "decoding, cropping and photometric augmentation against a PIL pipeline",
    "growth": "scaling of a step with batch, objects, bank, patches and processes",
    "startup": "start-up time of commands",
    "loading": "loading of a large network against timm",
    "search": "exact search of dense retrieval against faiss",
    "segmentation": "segmentation from a few examples: time per image of each part",
    "object_search": "indexing of images and search among their objects, Lance against faiss",
    "cluster": "embedding of images on a Ray cluster of this machine against one process",
    "database": "object database: writers in several processes, the vector index, recall and latency",
}
WITHOUT_DEVICE = ("startup", "loading", "object_search", "step", "cluster", "database")


def main() -> int:
    """Run the benchmarks and return 1 if any failed."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"  {name:<12}{text}" for name, text in BENCHMARKS.items()),
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS), metavar="NAME")
    arguments = parser.parse_args()
    failed = []
    print(f"PyTorch {torch.__version__}, {torch.get_num_threads()} threads, {arguments.device}", flush=True)
    for name in arguments.only:
        print(f"\n== {name}: {BENCHMARKS[name]}", flush=True)
        device = [] if name in WITHOUT_DEVICE else ["--device", arguments.device]
        begun = time.perf_counter()
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *device], check=False).returncode:
            failed.append(name)
        print(f"{name}: {time.perf_counter() - begun:.0f} s", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
