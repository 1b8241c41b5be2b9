"""A run whose losses or weights are not finite stops, and can be resumed from an earlier checkpoint."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from cribo.base.errors import NonFiniteLoss
from cribo.objectives.cribo import CrIBo
from cribo.pretraining import PretrainConfig, PretrainingModule
from cribo.pretraining.monitoring import read_metrics
from cribo.training.checkpoints import checkpoint_files

Tiny = Callable[..., PretrainConfig]
Train = Callable[..., Any]


def cribo(module: L.LightningModule) -> CrIBo:
    assert isinstance(module, PretrainingModule)
    assert isinstance(module.objective, CrIBo)
    return module.objective


class Poison(L.Callback):
    """Makes one weight infinite before or after a step."""

    def __init__(self, step: int, *, after: bool = False) -> None:
        self.step = step
        self.after = after

    def _poison(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.global_step == self.step:
            with torch.no_grad():
                cribo(module).student.prototypes("image").direction[0, 0] = torch.inf

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any, **__: Any) -> None:
        if not self.after:
            self._poison(trainer, pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any, **__: Any) -> None:
        if self.after:
            self._poison(trainer, pl_module)


class Overflow(L.Callback):
    """Makes the activations of both networks overflow in one step."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._hooks: list[Any] = []

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any, **__: Any) -> None:
        if trainer.global_step == self.step:
            objective = cribo(pl_module)
            for network in (objective.student, objective.teacher):
                model: Any = network.backbone.model
                self._hooks.append(model.patch_embed.register_forward_hook(lambda layer, inputs, x: x * 3e38))

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def assert_sound(path: Path) -> None:
    """Assert that all values in a checkpoint are finite."""
    content = torch.load(path, weights_only=True)
    held = content["state_dict"].pop("_extra_state")["bank"]
    moments = [value for state in content["optimizer_states"][0]["state"].values() for value in state.values()]
    sums = content["cribo"]["sums"].values()
    for value in (*content["state_dict"].values(), *held.values(), *moments, *sums):
        assert torch.as_tensor(value).isfinite().all()


@pytest.mark.parametrize(
    ("fault", "log_every", "what"),
    [(Poison, 1, "the loss image"), (Overflow, 4, "a loss"), (Poison, 100, "a loss")],
)
def test_a_loss_that_is_not_finite_stops_the_run_and_is_never_saved(
    tiny: Tiny, train: Train, tmp_path: Path, fault: type[Poison | Overflow], log_every: int, what: str
) -> None:
    config = tiny({"runtime.checkpoint_every": 2, "runtime.keep_checkpoints": 9, "runtime.log_every": log_every})
    with pytest.raises(NonFiniteLoss, match=rf"^{what} was not finite, seen at step 6\. .*--resume") as caught:
        train(config, callbacks=[fault(5)])
    assert (caught.value.what, caught.value.step) == (what, 6)
    kept = checkpoint_files(tmp_path / "run")
    assert [path.name for path in kept] == ["step=00000004.ckpt", "step=00000002.ckpt"]
    for path in kept:
        assert_sound(path)
    rows = read_metrics(tmp_path / "run" / "metrics.csv")
    assert [row["step"] for row in rows] == list(range(log_every, 6, log_every))


@pytest.mark.parametrize("log_every", [1, 100])
def test_a_run_that_diverges_in_its_last_step_leaves_no_backbone(
    tiny: Tiny, train: Train, tmp_path: Path, log_every: int
) -> None:
    with pytest.raises(NonFiniteLoss, match="the loss image was not finite, seen at step 4"):
        train(tiny({"runtime.log_every": log_every, "optim.epochs": 1}), callbacks=[Poison(3)])
    assert not checkpoint_files(tmp_path / "run")
    for name in ("backbone.safetensors", "summary.json"):
        assert not (tmp_path / "run" / name).exists()


@pytest.mark.parametrize(("step", "kept"), [(2, "step=00000001.ckpt"), (4, "step=00000003.ckpt")])
def test_weights_that_are_not_finite_are_never_saved(
    tiny: Tiny, train: Train, tmp_path: Path, step: int, kept: str
) -> None:
    """Even if no loss was computed with them."""
    config = tiny({"runtime.checkpoint_every": 1, "runtime.log_every": 100, "optim.epochs": 1})
    with pytest.raises(NonFiniteLoss, match=f"the weights were not finite, seen at step {step}"):
        train(config, callbacks=[Poison(step, after=True)])
    path = checkpoint_files(tmp_path / "run")[0]
    assert path.name == kept
    assert_sound(path)
    assert not (tmp_path / "run" / "backbone.safetensors").exists()


def test_a_diverged_run_resumes_from_an_earlier_checkpoint(
    tiny: Tiny, train: Train, resumed: Train, whole: Train
) -> None:
    changes = {"losses.cross_image_from_epoch": 0, "optim.epochs": 2}
    with pytest.raises(NonFiniteLoss, match="seen at step 7"):
        train(tiny({**changes, "runtime.checkpoint_every": 4}), "diverged", callbacks=[Poison(6)])
    again, expected = resumed("diverged"), whole(tiny(changes))
    assert again.rows == expected.rows
    for name, value in expected.weights.items():
        assert torch.equal(value, again.weights[name]), name


def test_a_run_without_finite_values_stops_at_the_first_check(tiny: Tiny, train: Train, tmp_path: Path) -> None:
    with pytest.raises(NonFiniteLoss, match="seen at step 2") as caught:
        train(tiny({"losses.student_temperature": 1e-44, "runtime.log_every": 2}))
    for option in ("optim.lr", "optim.warmup_epochs", "optim.clip"):
        assert option in str(caught.value)
    assert not checkpoint_files(tmp_path / "run")


def test_an_extreme_learning_rate_stops_the_run(tiny: Tiny, train: Train, tmp_path: Path) -> None:
    """AdamW's steps are as large as the learning rate, so sums of squares soon overflow in float32."""
    changes = {"optim.lr": 10, "optim.warmup_epochs": 0, "optim.weight_decay": (10, 10), "runtime.checkpoint_every": 1}
    try:
        train(tiny(changes))
    except NonFiniteLoss as error:
        assert "lower optim.lr" in str(error)  # noqa: PT017
    for path in checkpoint_files(tmp_path / "run"):
        assert_sound(path)


# ------------------------------------------------------------------ scaled losses, as with 16-mixed


class Scale(L.Callback):
    """Scales losses, with an initial scale. Lightning does so only with 16-mixed, on GPUs."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        plugin: Any = trainer.precision_plugin
        plugin.scaler = torch.amp.GradScaler("cpu", init_scale=self.scale)


class Weights(L.Callback):
    """One weight of the student after 0, 1, 2, ... steps."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.found.append(cribo(pl_module).student.backbone.state_dict()["model.cls_token"].clone())

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any, **__: Any) -> None:
        self.on_train_start(trainer, pl_module)


SCALED = {
    "runtime.precision": "bf16-mixed",
    "optim.epochs": 2,
    "optim.warmup_epochs": 0,
    "losses.cross_image_from_epoch": 0,
}


def test_steps_skipped_by_the_loss_scaler_are_not_errors(tiny: Tiny, train: Train, tmp_path: Path) -> None:
    weights = Weights()
    config = tiny({**SCALED, "runtime.checkpoint_every": 1, "runtime.keep_checkpoints": 99})
    train(config, callbacks=[Scale(2.0**121), weights])
    moved = [not torch.equal(a, b) for a, b in pairwise(weights.found)]
    assert not any(moved[:2])
    assert any(moved[2:])
    assert len(checkpoint_files(tmp_path / "run")) == 8
    for path in checkpoint_files(tmp_path / "run"):
        assert_sound(path)


def test_a_run_with_scaled_losses_resumes_without_a_scaler(tiny: Tiny, train: Train, resumed: Train) -> None:
    config = tiny({**SCALED, "runtime.checkpoint_every": 4})
    with pytest.raises(NonFiniteLoss, match=r"--runtime\.precision bf16-mixed helps"):
        train(config, callbacks=[Scale(64.0), Overflow(5)])
    done = resumed()
    assert done.run.summary["steps"] == 8
    assert all(value.isfinite().all() for value in done.weights.values())


class Clipped(L.Callback):
    """Records the gradients of the optimiser's first step, with its scale."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.lengths: list[float] = []
        trainer.optimizers[0].register_step_pre_hook(self._look)

    def _look(self, optimizer: Any, *_: Any) -> None:
        scale = getattr(optimizer, "grad_scale", None)
        found = [p.grad.norm() for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not self.lengths:
            self.lengths = [float(length / (1 if scale is None else scale)) for length in found]


def test_gradients_are_clipped_with_a_loss_scale(tiny: Tiny, train: Train) -> None:
    lengths = {}
    for limit in (None, 0.05):
        clipped = Clipped()
        train(tiny({**SCALED, "optim.clip": limit, "optim.epochs": 1}), callbacks=[Scale(256.0), clipped])
        lengths[limit] = clipped.lengths
    assert max(lengths[None]) > 0.1
    assert lengths[0.05] == pytest.approx([min(length, 0.05) for length in lengths[None]], rel=1e-3, abs=1e-6)
