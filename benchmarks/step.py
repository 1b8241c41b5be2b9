"""A complete training step compared with `cribo.method.reference`, or with another version of this project.

    uv run python -m benchmarks.step                             # about five minutes on two idle cores
    uv run python -m benchmarks.step --against ../cribo-0.1      # a checkout of another version; its src/ is used
    uv run python -m benchmarks.step --config quickstart --steps 100 --against ../cribo-0.1

By default ViT-S/16, B = 16, K = 32, S = 1,000, L = 65,536, float32 on the CPU. Steps are interleaved, so that other
load affects both: in one process with the reference, in two processes with another version. Ratios are medians of the
ratios within rounds, without the first steps. Peak memory is measured per process.
"""

import argparse
import copy
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

import lightning as L

WARM_UP = 3
VIT_S16: dict[str, Any] = {
    "data.root": "scenes",
    "data.images": "",
    "data.scenes.count": 4000,
    "data.scenes.size": 256,
    "backbone.drop_path": 0.0,
    "objects.bank_images": 1000,
    "objects.group_size": 16,
    "optim.batch_size": 16,
}
COMMON: dict[str, Any] = {
    "data.workers": 0,
    "losses.cross_image_from_epoch": 0,
    "optim.micro_batches": 1,
    "score.root": None,
    "runtime.accelerator": "cpu",
    "runtime.precision": "32-true",
    "runtime.log_every": 10_000,
}


def train(config: str, callback: L.Callback) -> None:
    """Train until the callback stops training."""
    from cribo.pretraining import pretrain
    from cribo.pretraining.loading import load_config

    changes = COMMON | (VIT_S16 if config.startswith("imagenet") else {})
    with tempfile.TemporaryDirectory() as folder:
        pretrain(load_config(config, changes), out=Path(folder), name="step", callbacks=[callback])


class AgainstReference(L.Callback):
    """Runs a step of the reference, from the same weights and batch, before each step."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.seconds: list[tuple[float, float]] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Copy the networks."""
        from cribo.method.reference import Reference
        from cribo.pretraining.parameters import parameter_groups

        config, objective = pl_module.config, pl_module.objective
        student = copy.deepcopy(objective.student)
        self.reference = Reference(
            student,
            copy.deepcopy(objective.teacher),
            num_objects=config.objects.num_objects,
            bank_images=objective.bank_images,
            position_weight=config.objects.position_weight,
            marginals=config.objects.marginals,
        )
        import torch

        self.optimizer = torch.optim.AdamW(parameter_groups(student), lr=1e-4, fused=True)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Time the reference, then start the timer."""
        from cribo.objectives.views import normalised_views

        start = time.perf_counter()
        views = normalised_views(batch, pl_module.config.views, pl_module.objective.student.backbone)
        self.reference.step(
            self.optimizer,
            0.996,
            views=views.unflatten(0, (-1, 2)),
            coordinates=batch["coordinates"],
            initial_tokens=batch["initial_tokens"],
            images=batch.images,
            teacher_temperature=0.04,
        )
        self.start = time.perf_counter()
        self.of_reference = self.start - start

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any, **__: Any) -> None:
        """Stop the timer."""
        self.seconds.append((time.perf_counter() - self.start, self.of_reference))
        trainer.should_stop = len(self.seconds) >= self.steps


class TurnByTurn(L.Callback):
    """Runs a step for each line of standard input and prints its seconds; at the end prints the peak memory in GiB."""

    def __init__(self, answers: IO[str]) -> None:
        self.answers = answers

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Wait for a line of standard input."""
        if sys.stdin.readline() != "step\n":
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            print(peak, file=self.answers, flush=True)
            os._exit(0)
        self.start = time.perf_counter()

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        """Print the seconds."""
        print(time.perf_counter() - self.start, file=self.answers, flush=True)


def against_version(config: str, other: Path, steps: int) -> tuple[list[tuple[float, float]], tuple[float, float]]:
    """Measure the seconds of each step in both versions, and the peak memory of both processes."""
    processes = []
    for source in (Path(__file__).parents[1] / "src", other / "src"):
        environment = os.environ | {"PYTHONPATH": str(source)}
        command = [sys.executable, __file__, "--config", config, "--take-turns"]
        pipe = subprocess.PIPE
        processes.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment))

    def ask(process: "subprocess.Popen[str]", line: str) -> float:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(line)
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    here, there = processes
    seconds = [(ask(here, "step\n"), ask(there, "step\n")) for _ in range(steps)]
    return seconds, (ask(here, "stop\n"), ask(there, "stop\n"))


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="imagenet_vits16", help="a preset")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--against", type=Path, help="a checkout of another version")
    parser.add_argument("--take-turns", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.take_turns:
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # redirect other output, which must not be parsed as results
        train(arguments.config, TurnByTurn(answers))
        return
    if arguments.against is None:
        callback = AgainstReference(arguments.steps)
        train(arguments.config, callback)
        seconds, peaks, other = callback.seconds, None, "reference"
    else:
        seconds, peaks = against_version(arguments.config, arguments.against, arguments.steps)
        other = str(arguments.against)
    timed = seconds[WARM_UP:]
    for place, name in enumerate(("this version", other)):
        of = [pair[place] for pair in timed]
        memory = f", peak {peaks[place]:.2f} GiB" if peaks else ""
        print(f"{name}: median {statistics.median(of):.3f} s ({min(of):.3f} to {max(of):.3f}){memory}")
    ratios = [there / here for here, there in timed]
    print(f"{other} / this version: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
