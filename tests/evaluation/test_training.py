import json
import os
import re
import signal
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.commands import Commands
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchmetrics import SumMetric

from cribo.base.errors import ConfigError, FolderError, Interrupted, NonFiniteLoss, UnreadableImage
from cribo.base.job import RECORD
from cribo.data.randomness import keyed_generator
from cribo.evaluation.config import TrainingRuntime
from cribo.evaluation.training import KIND, KeyStream, evaluation_folder, fit
from cribo.training.checkpoints import checkpoint_files
from cribo.training.loggers import SERVICES, Service, Status
from cribo.training.module import ResumableModule

STEPS = 12


class Points(Dataset[Any]):
    """Points on a plane, disturbed by a keyed draw."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, key: Any) -> tuple[Tensor, Tensor]:
        epoch, index = key if isinstance(key, tuple) else (0, key)
        x = torch.rand(3, generator=keyed_generator(7, epoch, index), dtype=torch.float64)
        return x, x @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)


class Regression(ResumableModule):
    """A linear layer; its score is the sum of squared errors."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = lr
        self.layer = nn.Linear(3, 1, dtype=torch.float64)
        nn.init.zeros_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)
        self.error, self.seen = SumMetric(), SumMetric()
        self.scores: list[tuple[int, float, int]] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.1, 1 - step / 400))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = (self.layer(x)[:, 0] - y).square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.error.update((self.layer(x)[:, 0] - y).square().sum())
        self.seen.update(len(x))

    def on_validation_epoch_end(self) -> None:
        self.scores.append((self.global_step, float(self.error.compute()), int(self.seen.compute())))
        self.log("error", self.error.compute())
        self.error.reset()
        self.seen.reset()


class Stop(L.Callback):
    """Send this process a signal after a step."""

    def __init__(self, step: int, number: signal.Signals = signal.SIGTERM) -> None:
        self.step, self.number = step, number

    def on_before_optimizer_step(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), self.number)


def run(folder: Path, module: Regression | None = None, **changes: Any) -> Regression:
    module = module or Regression()
    runtime = {"accelerator": "cpu", "workers": 0, "log_every": 4, **changes.pop("runtime", {})}
    arguments: dict[str, Any] = {
        "train": Points(),
        "validation": Points(),
        "batch_size": 4,
        "steps": STEPS,
        "seed": 0,
        "label": "linear",
        "console": Console(quiet=True),
        **changes,
    }
    fit(module, folder=folder, runtime=TrainingRuntime(**runtime), **arguments)
    return module


def assert_same(module: Regression, other: Regression) -> None:
    for name, value in module.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    assert module.scores[-1] == other.scores[-1]


def test_it_trains_and_scores_every_sample_once(tmp_path: Path) -> None:
    module = run(tmp_path, steps=300)
    step, error, seen = module.scores[-1]
    assert (step, seen) == (300, 5)
    assert error < 0.01 * run(tmp_path / "short", steps=1).scores[-1][1]


def test_the_stream_is_a_sequence_of_permutations() -> None:
    keys = [key for batch in KeyStream(5, 4, 10, seed=3, position=lambda: 0) for key in batch]
    for epoch in range(8):
        indices = [index for known, index in keys if known == epoch]
        assert sorted(indices) == [0, 1, 2, 3, 4]
    assert [epoch for epoch, _ in keys] == sorted(epoch for epoch, _ in keys)
    assert len({tuple(keys[5 * e + i][1] for i in range(5)) for e in range(8)}) > 1


def test_processes_share_each_batch_and_resume_within_the_stream() -> None:
    whole = list(KeyStream(7, 6, 9, seed=1, position=lambda: 0))
    parts = [list(KeyStream(7, 6, 9, seed=1, position=lambda: 0, rank=r, world_size=3)) for r in range(3)]
    assert [a + b + c for a, b, c in zip(*parts, strict=True)] == whole
    assert list(KeyStream(7, 6, 9, seed=1, position=lambda: 4)) == whole[4:]
    with pytest.raises(ConfigError, match="batch_size must be a multiple of the 4 devices, got 6"):
        KeyStream(7, 6, 9, seed=1, position=lambda: 0, world_size=4)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stopped_training_resumes_with_identical_results(tmp_path: Path, workers: int) -> None:
    runtime = {"workers": workers}
    whole = run(tmp_path / "whole", runtime=runtime)
    with pytest.raises(Interrupted, match="after step 6"):
        run(tmp_path / "stopped", callbacks=[Stop(5)], runtime=runtime)
    assert [path.name for path in checkpoint_files(tmp_path / "stopped")] == ["step=00000006.ckpt"]
    assert_same(run(tmp_path / "stopped", runtime=runtime), whole)


def test_intermediate_scores_keep_their_steps_after_resumption(tmp_path: Path) -> None:
    runtime = {"evaluate_every": 4, "checkpoint_every": 3}
    whole = run(tmp_path / "whole", runtime=runtime)
    assert [step for step, _, _ in whole.scores] == [4, 8, 12, 12]
    with pytest.raises(Interrupted):
        run(tmp_path / "stopped", callbacks=[Stop(5)], runtime=runtime)
    resumed = run(tmp_path / "stopped", runtime=runtime)
    assert resumed.scores == whole.scores[1:]


def test_a_finished_training_is_scored_again_without_a_step(tmp_path: Path) -> None:
    whole = run(tmp_path)
    again = run(tmp_path)
    assert_same(again, whole)


def test_ctrl_c_raises_keyboard_interrupt(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, callbacks=[Stop(2, signal.SIGINT)])
    assert checkpoint_files(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_an_interrupted_score_is_computed_after_resumption(tmp_path: Path, number: signal.Signals) -> None:
    class Signalling(Points):
        def __getitem__(self, key: Any) -> tuple[Tensor, Tensor]:
            if key == 2:
                os.kill(os.getpid(), number)
            return super().__getitem__(key)

    handler = signal.getsignal(number)
    module = Regression()
    with pytest.raises(Interrupted, match=rf"stopped by {number.name} after step 12: .*--resume") as stopped:
        run(tmp_path, module, validation=Signalling())
    assert stopped.value.status == 128 + number
    assert not module.scores
    assert signal.getsignal(number) == handler
    assert_same(run(tmp_path), run(tmp_path / "whole"))


def test_a_signal_in_the_last_step_ends_the_score(tmp_path: Path) -> None:
    module = Regression()
    with pytest.raises(Interrupted, match="after step 12"):
        run(tmp_path, module, callbacks=[Stop(STEPS - 1)])
    assert not module.scores
    assert checkpoint_files(tmp_path)[0].name == "step=00000012.ckpt"


def test_more_devices_than_samples_to_score_are_refused(tmp_path: Path) -> None:
    class One(Points):
        def __len__(self) -> int:
            return 1

    with pytest.raises(ConfigError, match="each of the 2 devices needs at least one image to score, got 1: use fewer"):
        run(tmp_path, validation=One(), runtime={"devices": 2})
    assert not checkpoint_files(tmp_path)


def test_non_finite_weights_are_not_saved(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteLoss, match=r"not finite, seen at step 2\. .* lower learning rate"):
        run(tmp_path, Regression(lr=float("inf")), runtime={"checkpoint_every": 2})
    assert not checkpoint_files(tmp_path)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreadable_sample_raises_its_own_error(tmp_path: Path, workers: int) -> None:
    class Broken(Points):
        def __getitem__(self, key: Any) -> tuple[Tensor, Tensor]:
            if key[1] == 3:
                raise UnreadableImage("a/b.jpg", "truncated")
            return super().__getitem__(key)

    with pytest.raises(UnreadableImage, match=r"a/b\.jpg.*truncated"):
        run(tmp_path, train=Broken(), runtime={"workers": workers})


def test_logged_values_are_in_tensorboard(tmp_path: Path) -> None:
    module = run(tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [3, 7, 11]
    assert events.Scalars("error")[-1].value == pytest.approx(module.scores[-1][1])


def test_a_service_has_the_settings_of_the_evaluation_and_its_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Memory(Service):
        packages = ()
        extra = ""

        def __init__(self, folder: Path, name: str, run_id: str | None, settings: Mapping[str, Any]) -> None:
            self.id = "a"
            self.steps: dict[str, list[int]] = defaultdict(list)
            opened.append((name, run_id, settings, self.steps))

        def log(self, metrics: Mapping[str, float], step: int) -> None:
            for name in metrics:
                self.steps[name].append(step)

        def log_picture(self, path: Path, step: int) -> None: ...

        def finish(self, status: Status) -> None:
            ended.append(status)

    opened: list[Any] = []
    ended: list[Status] = []
    monkeypatch.setitem(SERVICES, "trackio", Memory)
    (tmp_path / "lr=0.1").mkdir()
    record = {"made_by": "cribo", "kind": KIND, "identity": {"data": {"name": "voc"}}}
    (tmp_path / RECORD).write_text(json.dumps(record))
    runtime = {"logger": ("trackio",)}
    with pytest.raises(Interrupted):
        run(tmp_path / "lr=0.1", runtime=runtime, callbacks=[Stop(5)])
    run(tmp_path / "lr=0.1", runtime=runtime)
    (first, second) = opened
    assert first[:3] == (f"{tmp_path.name}/lr=0.1", None, {"data.name": "voc"})
    assert first[3]["loss"] == [3]
    assert second[1] == "a"
    assert second[3]["loss"] == [7, 11]
    assert second[3]["error"] == [12]
    assert ended == ["interrupted", "finished"]
    assert not (tmp_path / "lr=0.1" / "tensorboard").exists()


def test_a_line_shows_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("cribo.base.console._LINE_SECONDS", 0)
    run(tmp_path, console=Console(soft_wrap=True))
    output = capsys.readouterr().out
    assert re.search(r"linear: 11/12, ETA \d:\d\d loss [\d.]+", output)
    assert "linear: score: 5/5" in output


@pytest.mark.slow
def test_two_processes_train_like_one(tmp_path: Path, commands: Commands) -> None:
    program = f"""
import json
from pathlib import Path
os.chdir({str(tmp_path)!r})
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.evaluation.test_training import Regression, TrainingRuntime, evaluation_folder, run
runtime = {{"devices": 2, "accelerator": "cpu"}}
choices = {{"overwrite": False, "resume": False, "runtime": TrainingRuntime(**runtime)}}
with evaluation_folder(Path("two"), "two", {{}}, **choices) as folder:
    for part in ("a", "b"):
        module = run(folder / part, runtime=runtime)
        found = {{"scores": module.scores, "weights": module.layer.weight.tolist()}}
        Path(f"{{part}}{{module.global_rank}}.json").write_text(json.dumps(found))
"""
    for process in commands.fork_program_all(2, program):
        assert process.wait(900) == 0, process.output
    one = run(tmp_path / "one")
    for name in ("a0", "a1", "b0", "b1"):
        found = json.loads((tmp_path / f"{name}.json").read_text())
        step, error, seen = found["scores"][-1]
        assert (step, seen) == (12, 5)
        assert [error, *found["weights"][0]] == pytest.approx([one.scores[-1][1], *one.layer.weight[0].tolist()])
    assert checkpoint_files(tmp_path / "two" / "a")


# ---------------------------------------------------------------------------- folders


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., Any]:
    def call(settings: dict[str, Any], *, overwrite: bool = False, resume: bool = False, out: str = "out") -> Any:
        runtime = TrainingRuntime(accelerator="cpu")
        return evaluation_folder(tmp_path / out, "x", settings, overwrite=overwrite, resume=resume, runtime=runtime)

    return call


def test_a_folder_is_resumed_only_with_the_same_settings(opened: Callable[..., Any], tmp_path: Path) -> None:
    voc = {"layers": 1, "data": {"name": "voc"}}
    with opened(voc, resume=True) as folder:  # a new one
        (folder / "work").touch()
    with opened(voc, resume=True) as folder:
        assert (folder / "work").exists()
    with pytest.raises(FolderError, match=r"cannot be resumed: data\.name was voc, is ade20k"):
        opened({"layers": 1, "data": {"name": "ade20k"}}, resume=True).__enter__()
    assert (tmp_path / "out" / "work").exists()


def test_folders_that_cannot_be_resumed_are_refused(tmp_path: Path) -> None:
    runtime = TrainingRuntime(accelerator="cpu")
    with pytest.raises(ConfigError, match="--overwrite requires --out"):
        evaluation_folder(None, "x", {}, overwrite=True, resume=False, runtime=runtime).__enter__()
    with pytest.raises(ConfigError, match=r"runtime\.accelerator gpu"):
        evaluation_folder(
            tmp_path / "out", "x", {}, overwrite=False, resume=False, runtime=TrainingRuntime(accelerator="gpu")
        ).__enter__()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [({"devices": "two"}, "devices must be auto or a number"), ({"log_every": 0}, "log_every must be >= 1, got 0")],
)
def test_an_invalid_runtime_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainingRuntime(**change)
