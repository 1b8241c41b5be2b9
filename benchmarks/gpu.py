"""What a GPU is measured for, in sections of less than two minutes each, with results as JSON as they come.

    uv run python -m benchmarks.gpu                          # all sections that gpu.json lacks
    uv run python -m benchmarks.gpu --only step objects      # some of them
    uv run python -m benchmarks.gpu --small --device cpu     # the same code with tiny networks, to try it

A step of CrIBo: ViT-B/16, 128 pairs of 224 pixels, K = 32, a full bank, half of the objects with a valid match, bf16.
Every section is a process of its own, on generated images; one that fails or takes too long is recorded with its error,
and runs again in the next call. Figures of different cards do not compare: each result names its card.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.measuring import product_ceiling, timed
from torch.profiler import ProfilerActivity
from torchvision.io import decode_jpeg, encode_jpeg, write_jpeg

from cribo.apps.embed.embedder import Embedder
from cribo.base.files import write_json
from cribo.data import Photometric, apply_photometric, open_images, sample_photometric
from cribo.data.photometric import compile_photometric
from cribo.data.scenes import Scenes
from cribo.features.encoder import Encoder
from cribo.features.spread.parts import ImagePart
from cribo.method import ViewRecipe
from cribo.models import build_backbone
from cribo.pretraining.config import PretrainConfig
from cribo.pretraining.loading import load_config
from cribo.pretraining.planning import seconds_per_step
from cribo.pretraining.profiling import profile
from cribo.pretraining.session import Session

LIMIT_SECONDS = 170
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
SYNCHRONISATIONS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


@dataclass(frozen=True)
class Scale:
    """Sizes of the measurements.

    Attributes:
        device: cuda or cpu.
        small: whether networks and batches are tiny.
    """

    device: str
    small: bool

    @property
    def backbone(self) -> dict[str, Any]:
        """Arguments of `build_backbone` for the network of a step."""
        if self.small:
            return {"name": "vit_tiny_patch16_224", "args": {"depth": 2}, "image_size": self.size}
        return {"name": "vit_base_patch16_224", "image_size": self.size}

    @property
    def size(self) -> int:
        """Side of a view in pixels."""
        return 64 if self.small else 224

    @property
    def batch(self) -> int:
        """Number of image pairs."""
        return 4 if self.small else 128

    @property
    def rounds(self) -> int:
        """Number of timed repetitions."""
        return 2 if self.small else 20

    def config(self, preset: str, **changes: Any) -> PretrainConfig:
        """Return a preset with generated images and this scale's sizes."""
        common: dict[str, Any] = {
            "data.root": "scenes",
            "data.images": "",
            "data.scenes.count": 64 if self.small else 1024,
            "data.scenes.size": self.size + 32,
            "data.workers": 0 if self.small else max(1, len(os.sched_getaffinity(0)) - 1),
            "optim.batch_size": self.batch,
            "optim.micro_batches": 1,
            "score.root": None,
            "runtime.accelerator": "cpu" if self.device == "cpu" else "gpu",
            "runtime.precision": "32-true" if self.device == "cpu" else "bf16-mixed",
        }
        if self.small:
            common |= {"backbone.name": "vit_tiny_patch16_224", "backbone.args": {"depth": 2}, "views.size": self.size}
            common |= {"head.hidden_dim": 64, "head.prototypes": 256}
        return load_config(preset, common | {name.replace("__", "."): value for name, value in changes.items()})

    def cribo(self, compile_mode: str) -> PretrainConfig:
        """Return the configuration of the step."""
        changes: dict[str, Any] = {"objects.num_objects": 8, "objects.bank_images": 8} if self.small else {}
        changes |= {"objects.group_size": min(32, self.batch), "runtime.compile": compile_mode}
        return self.config("imagenet_vits16" if self.small else "imagenet_vitb16", **changes)

    def median_ms(self, call: Callable[[], object]) -> float:
        """Measure the median milliseconds of a call, after two others."""
        for _ in range(2):
            call()
        return 1000 * statistics.median(timed(call, self.device) for _ in range(self.rounds))


def backbones_ms(scale: Scale, *, compiled: bool) -> float:
    """Measure a step of the two bare backbones: both forward passes, and the student's backward pass."""
    student, teacher = (build_backbone(**scale.backbone).to(scale.device).train() for _ in range(2))
    views = torch.randn(2 * scale.batch, 3, scale.size, scale.size, device=scale.device)
    for network in (student, teacher) if compiled else ():
        network.compile()

    def step() -> None:
        with torch.autocast(scale.device, torch.bfloat16, enabled=scale.device != "cpu"):
            with torch.no_grad():
                teacher(views)
            features = student(views)
            loss = features.tokens.float().mean() + features.global_token.float().mean()
        loss.backward()
        for parameter in student.parameters():
            parameter.grad = None

    return scale.median_ms(step)


def machine(scale: Scale) -> dict[str, Any]:
    """Measure the throughput of large matrix products, an upper bound for everything else."""
    dtype = torch.float32 if scale.device == "cpu" else torch.bfloat16
    return {"cores": len(os.sched_getaffinity(0)), "teraflops": product_ceiling(scale.device, dtype) / 1e12}


def step(scale: Scale) -> dict[str, Any]:
    """Measure a compiled step with 8 objects an image beside its two compiled backbones; the goal is 1.15."""
    kept = () if scale.small else (8,)
    begun = time.perf_counter()
    found = profile(scale.cribo("default"), kept=kept, steps=scale.rounds, warmup=3).steps[0]
    seconds = time.perf_counter() - begun
    backbones = backbones_ms(scale, compiled=True)
    return {
        "step_ms": 1000 * found.step,
        "backbones_ms": backbones,
        "step_over_backbones": 1000 * found.step / backbones,
        "parts_ms": {name: 1000 * value for name, value in found.parts.items()},
        "peak_gib": found.peak / 2**30,
        "seconds_with_compilation": seconds,
    }


def eager(scale: Scale) -> dict[str, Any]:
    """Measure the same without compilation."""
    kept = () if scale.small else (8,)
    found = profile(scale.cribo("none"), kept=kept, steps=scale.rounds, warmup=3).steps[0]
    return {
        "step_ms": 1000 * found.step,
        "backbones_ms": backbones_ms(scale, compiled=False),
        "parts_ms": {name: 1000 * value for name, value in found.parts.items()},
        "peak_gib": found.peak / 2**30,
    }


def objects(scale: Scale) -> dict[str, Any]:
    """Measure the objects' share at 8, 16 and 32 objects an image; the goals are 6, 12 and 20 %.

    It runs after `step`, whose compiled code it uses: `seconds` shows whether a second run starts at once.
    """
    begun = time.perf_counter()
    found = profile(scale.cribo("default"), kept=(2, 4) if scale.small else (8, 16, 32), steps=scale.rounds).steps
    return {
        "share": {each.fixed_objects: each.object_share for each in found},
        "step_ms": {each.fixed_objects: 1000 * each.step for each in found},
        "seconds": time.perf_counter() - begun,
    }


def launches(scale: Scale) -> dict[str, Any]:
    """Count kernel launches and synchronisations of a step, compiled and not."""
    counts: dict[str, Any] = {}
    for mode in ("none", "default"):
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.json"
            profile(scale.cribo(mode), kept=() if scale.small else (8,), steps=2, warmup=3, trace=trace)
            events = Counter(event.get("name") for event in json.loads(trace.read_text())["traceEvents"])
        # A trace has two steps.
        counts[mode] = {
            "launches": sum(events[name] for name in LAUNCHES) / 2,
            "synchronisations": sum(events[name] for name in SYNCHRONISATIONS) / 2,
        }
    return counts


def photometric(scale: Scale) -> dict[str, Any]:
    """Measure the photometric operations of a batch, compiled and not; the goal is at most 2 ms of GPU time."""
    generator = torch.Generator().manual_seed(0)
    draws = [sample_photometric(ViewRecipe(), generator=generator) for _ in range(scale.batch)]
    parameters = Photometric.cat(draws)
    views = torch.randint(0, 256, (2 * scale.batch, 3, scale.size, scale.size), dtype=torch.uint8)
    on_device, expected = views.to(scale.device), apply_photometric(views[:16], parameters.select(slice(16)))
    found: dict[str, Any] = {}
    for name, compiled in (("eager", False), ("compiled", True)):
        compile_photometric(compiled)
        difference = apply_photometric(on_device, parameters)[:16].cpu() - expected
        milliseconds = scale.median_ms(lambda: apply_photometric(on_device, parameters))
        with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            apply_photometric(on_device, parameters)
        events = profiler.key_averages()
        found[name] = {
            "ms": milliseconds,
            "device_ms": sum(event.self_device_time_total for event in events) / 1000,
            "launches": sum(event.count for event in events if event.key in LAUNCHES),
            "share_beyond_a_grey_level": float((difference.abs() > 1 / 255).float().mean()),
        }
    return found


def feeding(scale: Scale) -> dict[str, Any]:
    """Measure what feeds a step: the loader, the copy of a batch, and JPEG decoding on both devices."""
    config = scale.cribo("none")
    found = profile(config, steps=2, warmup=2)
    views = torch.randint(0, 256, (2 * scale.batch, 3, scale.size, scale.size), dtype=torch.uint8)
    pinned = views.pin_memory() if scale.device != "cpu" else views
    return {
        "workers": found.machine["workers"],
        "loader_images_per_second": found.loader_images_per_second,
        "step_images_per_second": found.steps[0].images_per_second,
        "copy_ms": scale.median_ms(lambda: pinned.to(scale.device, non_blocking=True)),
        "decoded_per_second": _decoded_per_second(scale),
    }


def _decoded_per_second(scale: Scale) -> dict[str, float]:
    """Measure JPEG files decoded per second by one core, and by the GPU's decoder."""
    scenes = Scenes(16, size=256 if scale.small else 480)
    files: Any = [encode_jpeg(scenes.load(index)) for index in range(len(scenes))]
    devices = ["cpu"] if scale.device == "cpu" else ["cpu", scale.device]
    return {
        device: 1000 * len(files) / scale.median_ms(lambda device=device: decode_jpeg(files, device=device))
        for device in devices
    }


def encode(scale: Scale) -> dict[str, Any]:
    """Measure `cribo embed` on files against its encoder alone, with half and with all of the cores reading."""
    scenes = Scenes(32 if scale.small else 1024, size=96 if scale.small else 480)
    cores = len(os.sched_getaffinity(0))
    name = "vit_tiny_patch16_224" if scale.small else "vit_small_patch16_224"
    network = build_backbone(name, image_size=scale.size)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for index in range(len(scenes)):
            write_jpeg(scenes.load(index), f"{folder}/{index:05d}.jpg")
        for workers in sorted({max(1, cores // 2), max(1, cores - 1)}):
            embedder = Embedder(network, device=scale.device, batch_size=64, workers=workers)
            _embed(embedder, folder)  # starts libraries
            begun = time.perf_counter()
            images = _embed(embedder, folder)
            found[f"images_per_second, {workers} threads"] = images / (time.perf_counter() - begun)
    encoder = Encoder(network, device=scale.device)
    pixels = torch.randint(0, 256, (64, 3, scale.size, scale.size), dtype=torch.uint8)
    with torch.no_grad():
        milliseconds = scale.median_ms(lambda: encoder.global_tokens(pixels).cpu())
    return {**found, "encoder_images_per_second": 64_000 / milliseconds}


def _embed(embedder: Embedder, folder: str) -> int:
    """Compute the features of a folder's images, and return their number."""
    return sum(1 for _, results in embedder.stream([ImagePart(open_images(folder))]) for _ in results)


def rivals(scale: Scale) -> dict[str, Any]:
    """Measure steps of NeCo and CrIBo with a ViT-S/16, compiled and not."""
    found = {}
    for name in ("neco", "cribo"):
        changes: dict[str, Any] = {"objective.name": name, "objects.group_size": min(32, scale.batch)}
        if scale.small:
            changes |= {"objects.num_objects": 8, "objects.bank_images": 8}
        for mode in ("none", "default"):
            session = Session(scale.config("imagenet_vits16", **changes, **{"runtime.compile": mode}))
            found[f"{name}, {mode}"] = 1000 * seconds_per_step(session)
    return {"step_ms": found}


SECTIONS: dict[str, Callable[[Scale], dict[str, Any]]] = {
    "machine": machine,
    "step": step,
    "objects": objects,
    "photometric": photometric,
    "launches": launches,
    "eager": eager,
    "feeding": feeding,
    "encode": encode,
    "rivals": rivals,
}


def main() -> int:
    """Run the sections that are missing, and return 1 if any failed."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"  {name:<12}{(run.__doc__ or '').splitlines()[0]}" for name, run in SECTIONS.items()),
    )
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION")
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="file of the results [gpu.json]")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny networks and batches")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.section is not None:
        result = SECTIONS[arguments.section](Scale(arguments.device, arguments.small))
        print(f"\n{json.dumps(result)}")  # the last line; the progress of others may precede it
        return 0
    results: dict[str, Any] = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    own = ["--device", arguments.device, *(["--small"] if arguments.small else [])]
    failed = []
    for name in arguments.only:
        if "error" not in results.get(name, {"error": ""}):
            print(f"{name}: done before, in {arguments.out}", flush=True)
            continue
        results[name] = {**_described(arguments.device), **_run(name, own)}
        write_json(arguments.out, results)
        print(json.dumps({name: results[name]}, indent=1), flush=True)
        if "error" in results[name]:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def _run(name: str, options: list[str]) -> dict[str, Any]:
    """Run a section in a process of its own; return its results, or its error."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--section", name, *options]
    begun = time.perf_counter()
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {LIMIT_SECONDS} s"}
    if ended.returncode:
        return {"error": ended.stderr[-2000:]}
    return {**json.loads(ended.stdout.splitlines()[-1]), "section_seconds": time.perf_counter() - begun}


def _described(device: str) -> dict[str, str]:
    """Return the card, the date and the version of PyTorch."""
    card = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return {"card": card, "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__}


if __name__ == "__main__":
    sys.exit(main())
