"""Steps that are not finite are left out; what follows is as the policy says."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from cribo.pretraining import NonFiniteLoss, PretrainConfig, PretrainingModule
from cribo.training.checkpoints import checkpoint_files

Tiny = Callable[..., PretrainConfig]
Train = Callable[..., Any]


class Overflow(L.Callback):
    """Makes the activations of both networks overflow in some steps, from one micro-batch on."""

    def __init__(self, *steps: int, micro_batch: int = 0) -> None:
        self.steps = steps
        self.micro_batch = micro_batch
        self._hooks: list[Any] = []

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any, **__: Any) -> None:
        assert isinstance(pl_module, PretrainingModule)
        if trainer.global_step not in self.steps:
            return
        for network in (pl_module.student, pl_module.teacher):
            model: Any = network.backbone.model
            first = model.patch_embed if hasattr(model, "patch_embed") else model.conv1
            self._hooks.append(first.register_forward_hook(self._overflow()))

    def _overflow(self) -> Callable[..., Tensor]:
        calls = -1

        def hook(layer: Any, inputs: Any, output: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return output * torch.finfo(output.dtype).max * 4 if calls == self.micro_batch else output

        return hook

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any, **__: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


class Scale(L.Callback):
    """Has the scale of 16-bit losses begin elsewhere."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        plugin: Any = trainer.precision_plugin
        plugin.scaler = torch.amp.GradScaler("cpu", init_scale=self.scale)


class States(L.Callback):
    """What there is after 0, 1, 2, ... steps, flat."""

    def __init__(self) -> None:
        self.states: list[dict[str, Tensor]] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.note(trainer, pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any, **__: Any) -> None:
        self.note(trainer, pl_module)

    def note(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        assert isinstance(module, PretrainingModule)
        state = {name: value.clone() for name, value in module.state_dict().items()}
        for number, moments in trainer.optimizers[0].state_dict()["state"].items():
            state |= {f"optimiser.{number}.{name}": value.clone() for name, value in moments.items()}
        if module.bank is not None:
            held = module.bank.state_dict()
            state |= {f"bank.{name}": held[name].clone() for name in ("rows", "norms", "images")}
        self.states.append(state)


def of(states: dict[str, Tensor], *parts: str) -> dict[str, Tensor]:
    return {name: value for name, value in states.items() if name.startswith(parts)}


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert a
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


def assert_finite(states: dict[str, Tensor]) -> None:
    for name, value in states.items():
        assert value.isfinite().all(), name


BASE = {"losses.cross_image_from_epoch": 0, "optim.freeze_last_layers_epochs": 0, "runtime.log_every": 2}


@pytest.mark.parametrize(
    ("precision", "changes", "micro_batch"),
    [
        ("32-true", {}, 0),
        ("bf16-mixed", {}, 0),
        ("16-mixed", {}, 0),
        ("bf16-mixed", {"optim.micro_batches": 2, "losses.centring": "sinkhorn"}, 1),
        ("32-true", {"optim.clip": 0.3, "runtime.log_every": 100}, 0),
    ],
)
def test_a_step_that_overflows_is_left_out(
    tiny: Tiny, train: Train, precision: str, changes: dict[str, Any], micro_batch: int
) -> None:
    states = States()
    config = tiny({**BASE, "runtime.precision": precision, **changes})
    # Gradients of so small a network overflow with the scale that larger ones begin with.
    small: list[L.Callback] = [Scale(1.0)] if precision == "16-mixed" else []
    trained = train(config, callbacks=[*small, Overflow(5, micro_batch=micro_batch), states])
    before, after, later = states.states[5], states.states[6], states.states[-1]
    for state in states.states:
        assert_finite(state)
    assert_equal(of(before, "student", "optimiser"), of(after, "student", "optimiser"))
    if not micro_batch:  # nothing was finite
        assert_equal(of(before, "image_centre", "object_centre"), of(after, "image_centre", "object_centre"))
    name = "student.head.mlp.0.weight"
    assert not torch.equal(later[name], after[name])
    summary = trained.run.summary
    assert (summary["steps"], summary["steps_left_out"], summary["returns_to_checkpoints"]) == (12, 1, [])
    assert json.loads((trained.run.folder / "summary.json").read_text()) == summary
    counted = [float(row["steps_left_out"]) for row in trained.rows]
    assert sum(counted) == 1
    assert all(0 < float(row["loss"]) < 100 for row in trained.rows)


def test_a_row_of_nothing_but_left_out_steps_has_no_losses(tiny: Tiny, train: Train) -> None:
    rows = train(tiny(BASE), callbacks=[Overflow(4, 5)]).rows
    assert [row["steps_left_out"] for row in rows] == ["0", "0", "2", "0", "0", "0"]
    assert [bool(row["loss"]) for row in rows] == [True, True, False, True, True, True]
    assert rows[2]["lr"]


def test_statistics_of_batch_norms_stay_finite(tiny: Tiny, train: Train) -> None:
    changes = {"backbone.name": "resnet10t", "backbone.args": {}, "backbone.drop_path": 0.0, "optim.epochs": 1}
    states = States()
    config = tiny({**BASE, **changes, "views.size": 64, "objects.num_objects": 3})
    train(config, callbacks=[Overflow(1), states])
    before, after = (
        {name: value for name, value in state.items() if "running" in name} for state in states.states[1:3]
    )
    assert_equal(before, after)
    for state in states.states:
        assert_finite({name: value for name, value in state.items() if value.is_floating_point()})


def test_objects_of_a_step_that_overflows_match_nothing_later(tiny: Tiny, train: Train) -> None:
    """Rows of the bank are counted as ever, so later steps are as they would be with other objects there."""
    states = States()
    train(tiny(BASE), callbacks=[Overflow(5), states])
    before, after = states.states[5], states.states[6]
    new = after["bank.rows"][:, (after["bank.rows"] == 0).all(dim=-1).all(dim=0)]
    assert new.shape[1] > 0
    assert not (before["bank.rows"] == 0).all(dim=-1).any()


def test_the_search_for_the_scale_of_16_bit_losses_is_no_trouble(
    tiny: Tiny, train: Train, caplog: pytest.LogCaptureFixture
) -> None:
    states = States()
    config = tiny({**BASE, "runtime.precision": "16-mixed", "runtime.on_nonfinite": "stop", "optim.epochs": 8})
    trained = train(config, callbacks=[Scale(2.0**28), states])
    assert 5 < trained.run.summary["steps_left_out"] < 32
    assert "not finite" not in caplog.text
    assert_equal(of(states.states[0], "student"), of(states.states[1], "student"))
    name = "student.head.mlp.0.weight"
    assert not torch.equal(states.states[0][name], states.states[-1][name])
    for state in states.states:
        assert_finite(state)


# ------------------------------------------------------------------ stop, roll back


def test_stopping_names_the_step_and_what_can_be_done(tiny: Tiny, train: Train, resumed: Train) -> None:
    config = tiny({**BASE, "runtime.on_nonfinite": "stop", "runtime.checkpoint_every": 4})
    with pytest.raises(NonFiniteLoss, match=r"the loss image was not finite at step 6\. .*--on_nonfinite skip"):
        train(config, callbacks=[Overflow(6)])
    done = resumed(callbacks=[Overflow(6)], **{"runtime.on_nonfinite": "skip"})
    assert done.run.summary["steps_left_out"] == 1


def test_rolling_back_takes_the_state_of_the_last_checkpoint(
    tiny: Tiny, train: Train, resumed: Train, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny({**BASE, "runtime.on_nonfinite": "rollback", "runtime.checkpoint_every": 4})
    states = States()
    overflow = Overflow(6)
    whole = train(config, "whole", callbacks=[overflow, states])
    back, at = states.states[8], states.states[4]
    # Step 7 was taken, but the look after it, at a checkpoint, finds what happened in step 6.
    assert_equal(back, at)
    assert "those of the checkpoint of step 4 again" in caplog.text
    assert whole.run.summary["returns_to_checkpoints"] == [{"step": 8, "to": 4}]
    assert [row["steps_left_out"] for row in whole.rows] == ["0", "0", "0", "1", "0", "0"]
    assert whole.run.summary["steps"] == 12
    assert_finite(states.states[-1])

    class Stop(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
            if trainer.global_step == 9:
                raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        train(config, "stopped", callbacks=[Overflow(6), Stop()])
    again = resumed("stopped", callbacks=[Overflow(6)])
    assert_equal(whole.weights, again.weights)
    assert again.run.summary["returns_to_checkpoints"] == whole.run.summary["returns_to_checkpoints"]


def test_rolling_back_needs_a_checkpoint(tiny: Tiny, train: Train) -> None:
    config = tiny({**BASE, "runtime.on_nonfinite": "rollback"})
    with pytest.raises(NonFiniteLoss, match="at step 3, before there was a checkpoint to return to"):
        train(config, callbacks=[Overflow(3)])


def test_rolling_back_for_ever_ends(tiny: Tiny, train: Train) -> None:
    """Even where each checkpoint between is a copy of the one before, to which nobody returns often."""
    changes = {"runtime.on_nonfinite": "rollback", "runtime.checkpoint_every": 4}
    config = tiny({**BASE, **changes, "data.scenes.count": 800, "optim.epochs": 1})
    with pytest.raises(NonFiniteLoss, match=r"and 5\d steps in a row were left out"):
        train(config, callbacks=[Overflow(*range(5, 100))])


def test_nobody_returns_to_one_checkpoint_for_ever(tiny: Tiny, train: Train, tmp_path: Path) -> None:
    changes = {"runtime.on_nonfinite": "rollback", "runtime.checkpoint_every": 4, "runtime.log_every": 1}
    config = tiny({**BASE, **changes, "data.scenes.count": 400, "optim.epochs": 1})
    with pytest.raises(NonFiniteLoss, match="after 3 returns to the checkpoint of step 4"):
        train(config, callbacks=[Overflow(5, 6, 7), Again()])
    assert [path.name for path in checkpoint_files(tmp_path / "run")][-1] == "step=00000004.ckpt"


class Again(Overflow):
    """Overflows in step 4 too, at whose end there would be another checkpoint if it were not for the step before."""

    def __init__(self) -> None:
        super().__init__(4)


@pytest.mark.parametrize("epochs", [1, 20])
def test_a_run_in_which_nothing_is_finite_stops(tiny: Tiny, train: Train, epochs: int) -> None:
    """However short it is, and before it has wasted many steps."""
    config = tiny({**BASE, "losses.student_temperature": 1e-44, "optim.epochs": epochs})
    steps = min(50, 4 * epochs)
    with pytest.raises(NonFiniteLoss, match=f", and {steps} steps in a row were left out"):
        train(config)
