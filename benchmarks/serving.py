"""Throughput of `cribo serve` on this machine, against `SegmentationMemory.segment` on the same images.

    uv run python -m benchmarks.serving --backbone WEIGHTS --data CAMVID

CAMVID has images/train and labels/train, images/val and classes.txt. A memory of `--examples` training images is
written to a temporary file. In each round, one process labels the files of `--images` validation images, and then
clients, each in a thread with a connection of its own, send the same files to the server for palette PNGs of their
labels. Printed are images per second and CPU seconds per image of both processes, their ratios in each round, and the
latency of requests. The ratio of CPU seconds does not depend on other load of the machine.
"""

import argparse
import io
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import psutil
from PIL import Image

from cribo.data.config import spread
from cribo.data.labelled.label_maps import CLASSES_FILE
from cribo.features.memory import Example, SegmentationMemory


def write_memory(backbone: str, data: Path, examples: int, file: Path) -> SegmentationMemory:
    """Write a memory of evenly spread training images, and return it."""
    images = sorted((data / "images" / "train").iterdir())
    memory = SegmentationMemory(backbone, classes=data / CLASSES_FILE, device="cpu")
    chosen = [images[number] for number in spread(len(images), examples)]
    memory.extend([Example(image, data / "labels" / "train" / f"{image.stem}.png") for image in chosen])
    memory.fitted()
    memory.save(file)
    return memory


@contextmanager
def serving(backbone: str, file: Path, *options: str) -> Iterator[tuple[str, int]]:
    """Serve a memory by the command; yield its address and process."""
    words = ["serve", "--memory", str(file), "--backbone", backbone, "--port", "0", "--device", "cpu", *options]
    command = [sys.executable, "-m", "cribo", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "200"})
    assert process.stdout is not None
    try:
        address = next(found[0] for line in process.stdout if (found := re.search(r"http://[\d.:]+\d", line)))
        yield address, process.pid
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(120)


def cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU seconds that a process has used."""
    used = process.cpu_times()
    return used.user + used.system


def send_all(address: str, files: Sequence[bytes], clients: int) -> tuple[list[bytes], list[float]]:
    """Send files from several clients; return the responses and the seconds of each request."""

    def send(number: int) -> list[tuple[int, bytes, float]]:
        found = []
        headers = {"content-type": "application/octet-stream", "accept": "image/png"}
        with httpx.Client(base_url=address, timeout=600, headers=headers) as client:
            for place in range(number, len(files), clients):
                begun = time.perf_counter()
                answer = client.post("/segment", content=files[place]).raise_for_status()
                found.append((place, answer.content, time.perf_counter() - begun))
        return found

    with ThreadPoolExecutor(clients) as pool:
        answers = sorted(answer for part in pool.map(send, range(clients)) for answer in part)
    return [content for _, content, _ in answers], [seconds for _, _, seconds in answers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--examples", type=int, default=8)
    parser.add_argument("--images", type=int, default=40)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    listed = sorted((options.data / "images" / "val").iterdir())
    paths = [listed[number] for number in spread(len(listed), options.images)]
    files = [path.read_bytes() for path in paths]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "memory.safetensors"
        memory = write_memory(options.backbone, options.data, options.examples, file)
        with serving(options.backbone, file) as (address, pid):
            server = psutil.Process(pid)
            send_all(address, files[:1], 1)
            expected = [memory.segment(paths[0])]
            latencies: dict[int, list[float]] = {clients: [] for clients in options.clients}
            ratios: dict[int, list[float]] = {clients: [] for clients in options.clients}
            costs: dict[int, list[float]] = {clients: [] for clients in options.clients}
            for number in range(options.rounds):
                begun, used = time.perf_counter(), time.process_time()
                expected = [memory.segment(path) for path in paths]
                alone = len(paths) / (time.perf_counter() - begun)
                cost = (time.process_time() - used) / len(paths)
                print(f"round {number}: segment {alone:.2f} images/s, {cost:.3f} CPU s per image", flush=True)
                for clients in options.clients:
                    begun, used = time.perf_counter(), cpu_seconds(server)
                    answers, seconds = send_all(address, files, clients)
                    speed = len(paths) / (time.perf_counter() - begun)
                    own = (cpu_seconds(server) - used) / len(paths)
                    latencies[clients] += seconds
                    costs[clients].append(cost / own)
                    ratios[clients].append(speed / alone)
                    print(
                        f"  {clients} clients: {speed:.2f} images/s (ratio {speed / alone:.2f}), {own:.3f} CPU s per "
                        f"image (ratio {cost / own:.2f})",
                        flush=True,
                    )
                    found = [np.array(Image.open(io.BytesIO(answer))) for answer in answers]
                    same = [float((a == b.labels.numpy()).mean()) for a, b in zip(found, expected, strict=True)]
                    print(f"    equal labels: {min(same):.5f} of the pixels of the worst image", flush=True)
    for clients in options.clients:
        p50, p99 = np.percentile(latencies[clients], [50, 99])
        middle = statistics.median(ratios[clients])
        cost = statistics.median(costs[clients])
        print(f"{clients} clients: ratio {middle:.2f}, by CPU seconds {cost:.2f} (medians)")
        print(f"  latency p50 {p50:.2f} s, p99 {p99:.2f} s")


if __name__ == "__main__":
    main()
