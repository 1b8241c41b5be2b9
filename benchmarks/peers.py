"""A training step of DINO here, in LightlyTrain, and as a plain loop over timm.

    uv run python -m benchmarks.peers [--rounds 2]

A ViT-Ti/16 on generated images, batches of 32, two views of 224 and eight of 96 pixels, in float32 with two threads.
Each run is a new process; a step's CPU seconds are the difference of a run of many and one of few steps, so that
imports and start-up do not count. Rounds are interleaved. The plain loop has neither images to read and augment nor
logs, checkpoints and schedules: it is the floor.

uv runs LightlyTrain in an environment of its own, which it keeps in its cache; if that fails, it is left out.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.table import Table

from cribo.data.scenes import Scenes

PEER = "lightly-train==0.18.*"
BATCH, FEW, MANY = 32, 1, 4
THREADS = 2

FULL_VIEWS = (
    "{size: 224, area: [0.14, 1.0], greyscale: 0.2, jitter: 0.8, brightness: 0.4, contrast: 0.4, saturation: 0.2, "
    "hue: 0.1, blur: [1.0, 0.1], solarise: [0.0, 0.2]}"
)

LIGHTLY = """
import sys
import lightly_train, torch

torch.set_num_threads({threads})
lightly_train.pretrain(
    out={out!r}, data={data!r}, model="timm/vit_tiny_patch16_224", method="dino", epochs=1, batch_size={batch},
    num_workers=0, accelerator="cpu", devices=1, precision="32-true", loggers={{"tensorboard": None}},
    method_args={{"output_dim": {prototypes}}}, transform_args={{"local_view": {{"num_views": 8}}}},
)
"""

PLAIN = """
import copy
import timm, torch
from torch import nn
from torch.nn import functional as F

torch.set_num_threads({threads})
student = timm.create_model("vit_tiny_patch16_224", num_classes=0, dynamic_img_size=True, drop_path_rate=0.1)
head = nn.Sequential(nn.Linear(192, 2048), nn.GELU(), nn.Linear(2048, 2048), nn.GELU(), nn.Linear(2048, 256))
last = nn.utils.parametrizations.weight_norm(nn.Linear(256, {prototypes}, bias=False))
student = nn.ModuleList([student, head, last])
teacher = copy.deepcopy(student).requires_grad_(False)
optimiser = torch.optim.AdamW(student.parameters(), lr=1e-4)
centre = torch.zeros({prototypes})


def logits(networks, crops):
    backbone, head, last = networks
    return last(F.normalize(head(torch.cat([backbone(part) for part in crops])), dim=1))


for _ in range({steps}):
    views, local = torch.rand(2 * {batch}, 3, 224, 224), torch.rand(8 * {batch}, 3, 96, 96)
    with torch.no_grad():
        output = logits(teacher, [views])
        targets = ((output - centre) / 0.04).softmax(dim=1).chunk(2)
        centre = 0.9 * centre + 0.1 * output.mean(dim=0)
    found = (logits(student, [views, local]) / 0.1).log_softmax(dim=1).chunk(10)
    pairs = [(own, other) for own in range(2) for other in range(10) if own != other]
    loss = sum(-(targets[own] * found[other]).sum(dim=1).mean() for own, other in pairs) / len(pairs)
    optimiser.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(student.parameters(), 3.0)
    optimiser.step()
    with torch.no_grad():
        torch._foreach_lerp_(list(teacher.parameters()), list(student.parameters()), 0.004)
"""


def run(*command: str) -> tuple[float, float]:
    """Run a command, and return its CPU seconds and its peak memory in GiB."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(THREADS)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{command[0]} ended with status {process.returncode}: {errors[-2000:]}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 2**20


def write_images(folder: Path, steps: int) -> Path:
    """Write the images of some steps, and return their folder."""
    images = folder / f"images-{steps}"
    images.mkdir()
    scenes = Scenes(steps * BATCH, size=256)
    for number in range(len(scenes)):
        Image.fromarray(scenes.load(number).permute(1, 2, 0).numpy()).save(images / f"{number:04}.jpg", quality=90)
    return images


def peer_python() -> list[str]:
    """Return a command that runs Python with LightlyTrain; an empty list if uv cannot install it."""
    command = ["uv", "run", "--quiet", "--no-project", "--python", sys.executable, "--with", PEER, "python"]
    done = subprocess.run([*command, "-c", "import lightly_train"], capture_output=True, text=True)
    if done.returncode:
        print(f"LightlyTrain is left out, it cannot be installed: {done.stderr.strip()[-300:]}")
        return []
    return command


def programs(folder: Path, prototypes: int, peer: Sequence[str]) -> dict[str, Callable[[int], tuple[float, float]]]:
    """Return, for each competitor, a function that runs it for a number of steps."""
    images = {steps: str(write_images(folder, steps)) for steps in (FEW, MANY)}

    def out() -> str:
        return tempfile.mkdtemp(dir=folder)

    def ours(steps: int) -> tuple[float, float]:
        return run(
            *(sys.executable, "-m", "cribo", "pretrain", "--config", "scenes_dino", "--out", out()),
            *("--data.root", images[steps], "--data.workers", "0", "--score.root", "null", "--optim.epochs", "1"),
            *("--optim.lr", "5e-4", "--optim.warmup_epochs", "0", "--optim.weight_decay", "[0.04, 0.4]"),
            *("--optim.clip", "3", "--losses.centring", "mean", "--views", FULL_VIEWS),
            *("--objective.args", "{local_crops: 8, local_size: 96, local_area: [0.05, 0.14]}"),
            *("--backbone.name", "vit_tiny_patch16_224", "--backbone.args", "{}", "--backbone.drop_path", "0.1"),
            *("--head.hidden_dim", "2048", "--head.bottleneck_dim", "256", "--head.bias", "true"),
            *("--head.prototypes", str(prototypes), "--runtime.threads", str(THREADS), "--runtime.accelerator", "cpu"),
        )

    def lightly(steps: int) -> tuple[float, float]:
        values = {"threads": THREADS, "out": out() + "/run", "data": images[steps], "batch": BATCH}
        return run(*peer, "-c", LIGHTLY.format(**values, prototypes=prototypes))

    def plain(steps: int) -> tuple[float, float]:
        program = PLAIN.format(threads=THREADS, prototypes=prototypes, steps=steps, batch=BATCH)
        return run(sys.executable, "-c", program)

    found = {"cribo": ours, "LightlyTrain": lightly, "plain loop": plain}
    return {name: call for name, call in found.items() if peer or name != "LightlyTrain"}


def main() -> None:
    """Measure, and print a table for each number of prototypes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    rounds = parser.parse_args().rounds
    peer = peer_python()
    for prototypes in (65536, 1024):
        with tempfile.TemporaryDirectory() as folder:
            calls = programs(Path(folder), prototypes, peer)
            steps: dict[str, list[float]] = {name: [] for name in calls}
            peaks: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(rounds):
                for name, call in calls.items():
                    (few, _), (many, peak) = call(FEW), call(MANY)
                    steps[name].append((many - few) / (MANY - FEW))
                    peaks[name].append(peak)
        table = Table(title=f"DINO, ViT-Ti/16, batches of {BATCH}, {prototypes:,} prototypes, {rounds} rounds")
        for column in ("", "CPU seconds per step", "images per CPU second", "relative to the loop", "peak GiB"):
            table.add_column(column, justify="right" if column else "left")
        floor = statistics.median(steps["plain loop"])
        for name, seconds in steps.items():
            median = statistics.median(seconds)
            spread = f"{median:.2f} ({min(seconds):.2f} to {max(seconds):.2f})"
            row = (spread, f"{BATCH / median:.1f}", f"{median / floor:.2f}", f"{max(peaks[name]):.2f}")
            table.add_row(name, *row)
        Console(width=None if sys.stdout.isatty() else 120).print(table)


if __name__ == "__main__":
    main()
