"""`cribo embed` on a Ray cluster of this machine against the same command in one process.

    uv run python -m benchmarks.cluster --backbone ../shared/weights/vits14_dinov2_descendant.safetensors \\
        --images ../shared/data/scenes/images
    uv run python -m benchmarks.cluster --small          # a minute, with a small random network

Both commands run alternately, as a user would start them: start-up, opening of the backbone and, with Ray, the start of
the cluster and of its workers are included. One process has as many threads as the machine has cores; each worker, its
share of them. The results are compared. CPU seconds, of all processes, depend less on other work of the
machine. The largest resident memory in the second and in the last third of a process shows whether it grows.
"""

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import pyarrow.parquet as pq
from benchmarks.measuring import MIB
from PIL import Image

WORKER = "_Worker"  # part of the title of a worker process
SECONDS = 1.0  # between samples of the workers' memory


class Run(NamedTuple):
    """A command: seconds, CPU seconds of all of its processes, and the resident memory of those that compute."""

    seconds: float
    cpu_seconds: float
    memory: list[list[int]]


def command(arguments: argparse.Namespace, images: Path, out: Path, engine: str) -> Run:
    """Run a command, and watch its processes."""
    words = [sys.executable, "-m", "cribo", "embed", str(images), "--backbone", *arguments.network, "--out", str(out)]
    words += ["--size", str(arguments.size), "--features", arguments.features]
    if engine == "ray":
        words += ["--engine", "ray", "--ray.workers", str(arguments.workers)]
    memory: dict[int, list[int]] = defaultdict(list)
    cpu: dict[int, float] = {}
    begun = time.perf_counter()
    process = psutil.Popen(words, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # it ended meanwhile
                cpu[each.pid] = sum(each.cpu_times()[:2])
                if engine == "local" or WORKER in " ".join(each.cmdline()):
                    memory[each.pid].append(each.memory_info().rss)
        time.sleep(SECONDS)
    if process.returncode:
        raise SystemExit(f"{' '.join(words)} ended with status {process.returncode}")
    return Run(time.perf_counter() - begun, sum(cpu.values()), [*memory.values()])


def rows(out: Path) -> tuple[list[str], np.ndarray]:
    """Return the images and features of all parts."""
    table = pq.read_table(out / "features")
    flat = table["embedding"].combine_chunks().flatten().to_numpy()
    return table["image"].to_pylist(), flat.reshape(len(table), -1)


def main() -> None:
    """Print the durations, their ratio, the difference of the results and the memory of the workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", help="[a random ViT-S/16]")
    parser.add_argument("--images", type=Path, help="folder of images [synthetic ones]")
    parser.add_argument("--features", default="global", choices=("global", "patches", "objects"))
    parser.add_argument("--size", type=int, default=140, help="shorter side of the encoded images")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--small", action="store_true", help="one round of 64 synthetic images")
    arguments = parser.parse_args()
    arguments.network = (
        [arguments.backbone] if arguments.backbone else ["vit_small_patch16_224", "--pretrained", "false"]
    )
    with tempfile.TemporaryDirectory() as place:
        images = arguments.images
        if images is None:
            images = Path(place) / "images"
            synthetic_images(images, 64 if arguments.small else 3539)
        runs: dict[str, list[Run]] = defaultdict(list)
        for number in range(1 if arguments.small else arguments.rounds):
            for engine in ("local", "ray"):
                run = command(arguments, images, Path(place) / f"{engine}{number}", engine)
                runs[engine].append(run)
                print(f"{engine:<6} {run.seconds:7.1f} s, {run.cpu_seconds:7.1f} CPU s", flush=True)
                for samples in run.memory:
                    middle, last = np.array_split(samples, 3)[1:]
                    sizes = f"{max(middle) / MIB:.0f} MiB in the second third, {max(last) / MIB:.0f} in the last"
                    print(f"       a process has at most {sizes}", flush=True)
        (names, local), (others, spread) = rows(Path(place) / "local0"), rows(Path(place) / "ray0")
        assert names == others
        print(
            f"{len(names)} rows, of which {(local == spread).all(axis=1).mean():.1%} are equal bit for bit; "
            f"largest difference {np.abs(local - spread).max():.1e}, relative to {np.abs(local).max():.1f}"
        )
        for name in ("seconds", "cpu_seconds"):
            one, other = (statistics.median(getattr(run, name) for run in runs[engine]) for engine in ("local", "ray"))
            print(f"median {name}: {one:.1f} in one process, {other:.1f} on Ray: {other / one - 1:+.1%}")


def synthetic_images(folder: Path, number: int) -> None:
    """Write JPEG images of random blocks."""
    folder.mkdir()
    for index in range(number):
        blocks = np.random.default_rng(index).integers(0, 256, (14, 18, 3), dtype=np.uint8)
        Image.fromarray(blocks.repeat(16, 0).repeat(16, 1)).save(folder / f"{index:05d}.jpg")


if __name__ == "__main__":
    main()
