"""Updates of student, teacher, bank and centres in a step."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F

from cribo.models.backbone import Backbone
from cribo.objectives.cribo import CrIBo
from cribo.pretraining import PretrainConfig, PretrainingModule

Tiny = Callable[..., PretrainConfig]
Train = Callable[..., Any]
State = dict[str, torch.Tensor]

WEIGHTS = {"image": 0.5, "cross_view": 2.0, "cross_image": 1.0}


def cribo(module: L.LightningModule) -> CrIBo:
    assert isinstance(module, PretrainingModule)
    assert isinstance(module.objective, CrIBo)
    return module.objective


class Record(L.Callback):
    """Records student, teacher and optimiser state after 0, 1, 2, ... steps, and the objective's results."""

    def __init__(self) -> None:
        self.student: list[State] = []
        self.teacher: list[State] = []
        self.with_state: list[set[str]] = []
        self.results: list[Any] = []
        self.bank: Any = None

    def _copy(self, module: L.LightningModule) -> None:
        objective = cribo(module)
        for target, network in ((self.student, objective.student), (self.teacher, objective.teacher)):
            target.append({name: value.detach().clone() for name, value in network.named_parameters()})

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._copy(pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any, **__: Any) -> None:
        self._copy(pl_module)
        objective, state = cribo(pl_module), trainer.optimizers[0].state
        self.with_state.append({name for name, value in objective.student.named_parameters() if value in state})
        self.results.append(objective.last_result)
        self.bank = objective.bank


def moved(before: State, after: State) -> set[str]:
    return {name for name, value in before.items() if not torch.equal(value, after[name])}


Recorded = Callable[..., tuple[Record, Any]]


@pytest.fixture
def recorded(tiny: Tiny, train: Train) -> Recorded:
    """Train one epoch of four steps, with all losses from the first one, and changed options."""

    def call(changes: dict[str, Any]) -> tuple[Record, Any]:
        record = Record()
        changes = {"optim.epochs": 1, "losses.cross_image_from_epoch": 0, **changes}
        return record, train(tiny(changes), callbacks=[record])

    return call


@pytest.fixture(scope="module")
def short(tiny: Tiny, whole: Train) -> tuple[Record, Any]:
    """A recorded run of one epoch, for tests that only read it."""
    record, changes = Record(), {
        "optim.epochs": 1,
        "optim.freeze_last_layers_epochs": 0,
        "head.train_gain": False,
        "objects.bank_images": 10,
        "losses.centre_momentum": 0.8,
        "losses.cross_image_from_epoch": 0,
        **{f"losses.{name}": weight for name, weight in WEIGHTS.items()},
    }  # fmt: skip
    return record, whole(tiny(changes), callbacks=[record])


# ------------------------------------------------------------------ updated parameters


def test_frozen_layers_do_not_move_and_have_no_optimiser_state(recorded: Recorded) -> None:
    changes = {"optim.freeze_last_layers_epochs": 1, "optim.freeze_backbone_epochs": 2, "optim.warmup_epochs": 0}
    record, _ = recorded({**changes, "optim.epochs": 3, "optim.weight_decay": (0.4, 0.4)})
    last = {f"{level}_prototypes.{part}" for level in ("image", "object") for part in ("direction", "gain")}
    backbone = {name for name in record.student[0] if name.startswith("backbone.")}
    for frozen, steps in ((last, 4), (backbone, 8)):
        for networks in (record.student, record.teacher):
            changed = moved(networks[0], networks[steps])
            assert not frozen & changed
            assert "head.mlp.0.weight" in changed
        assert not frozen & record.with_state[steps - 1]
        assert frozen & moved(record.student[steps], record.student[steps + 1])
    assert last <= moved(record.student[4], record.student[5])
    assert last <= record.with_state[4]


def test_the_gain_is_frozen_when_it_is_not_trained(short: tuple[Record, Any]) -> None:
    record, _ = short
    changed = moved(record.student[0], record.student[-1])
    assert {"image_prototypes.direction", "object_prototypes.direction"} <= changed
    assert not {name for name in changed if name.endswith("gain")}
    assert torch.equal(record.student[-1]["image_prototypes.gain"], torch.ones(32, 1))


def test_weight_decay_does_not_apply_to_biases(recorded: Recorded) -> None:
    """AdamW normalises even strongly clipped gradients, so two decays are compared."""
    runs = []
    for decay in (0.0, 5.0):
        changes = {"optim.weight_decay": (decay, decay), "optim.warmup_epochs": 0}
        runs.append(recorded(changes)[0].student[1])
    decayed = moved(*runs)
    assert {"backbone.model.cls_token", "backbone.model.pos_embed", "head.mlp.0.weight"} <= decayed
    assert not {name for name in decayed if runs[0][name].ndim <= 1}


def test_the_teacher_is_the_moving_average_of_the_student(short: tuple[Record, Any]) -> None:
    record, trained = short
    momenta = [float(row["momentum"]) for row in trained.rows]
    assert momenta[0] == 0.9
    for step, momentum in enumerate(momenta):
        for name, value in record.teacher[step + 1].items():
            expected = momentum * record.teacher[step][name] + (1 - momentum) * record.student[step + 1][name]
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("clip_norm", "expected"), [("tensor", None), ("global", 0.01)])
def test_the_global_norm_is_that_of_all_gradients_that_are_not_frozen(
    tiny: Tiny, train: Train, clip_norm: str, expected: float | None
) -> None:
    norms: list[float] = []  # of each step's clipped gradients

    class Norms(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any, **__: Any) -> None:
            gradients = [p.grad for p in cribo(pl_module).student.parameters() if p.grad is not None]
            norms.append(float(torch.nn.utils.get_total_norm(gradients)))

    changes = {"optim.clip": 0.01, "optim.clip_norm": clip_norm, "optim.freeze_last_layers_epochs": 1}
    train(tiny({**changes, "optim.epochs": 1}), callbacks=[Norms()])
    assert norms
    if expected is None:
        assert min(norms) > 0.02
    else:
        assert norms == pytest.approx([expected] * len(norms), rel=1e-3)


@pytest.mark.parametrize("name", ["sgd", "lars"])
def test_other_optimisers_move_all_trained_parameters(recorded: Recorded, name: str) -> None:
    changes = {"optim.name": name, "optim.lr": 1.0, "optim.warmup_epochs": 0, "optim.freeze_last_layers_epochs": 0}
    student = recorded(changes)[0].student
    assert moved(student[0], student[-1]) == student[0].keys()


@pytest.mark.parametrize("level", ["image", "object"])
def test_the_centre_is_the_moving_average_of_the_teachers_logits(short: tuple[Record, Any], level: str) -> None:
    record, trained = short
    expected = torch.zeros(32)
    for step, result in enumerate(record.results):
        embeddings = result.teacher_images if level == "image" else result.teacher_objects
        direction = record.teacher[step][f"{level}_prototypes.direction"]  # as in the step
        weight = record.teacher[step][f"{level}_prototypes.gain"] * F.normalize(direction, dim=1)
        expected = 0.8 * expected + 0.2 * (embeddings.flatten(0, 1) @ weight.T).mean(dim=0)
    torch.testing.assert_close(trained.weights[f"{level}_centre.value"], expected, rtol=1e-4, atol=1e-6)


def test_drop_path_reaches_the_student_only(tiny: Tiny, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Backbone, torch.Tensor | None]] = []
    encode = Backbone.encode

    def spy(self: Backbone, images: Any, *args: Any, drop_path_noise: Any = None, **kwargs: Any) -> Any:
        if images.shape[0] > 1:  # a single image probes a network during construction
            calls.append((self, drop_path_noise))
        return encode(self, images, *args, drop_path_noise=drop_path_noise, **kwargs)

    class Networks(L.Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            objective = cribo(pl_module)
            self.student, self.teacher = objective.student.backbone, objective.teacher.backbone

    networks = Networks()
    config = tiny({"backbone.drop_path": 0.4, "optim.epochs": 1})
    with monkeypatch.context() as patched:
        patched.setattr(Backbone, "encode", spy)
        train(config, callbacks=[networks])
    students = [noise for backbone, noise in calls if backbone is networks.student]
    teachers = [noise for backbone, noise in calls if backbone is networks.teacher]
    assert len(students) == 4
    assert teachers == [None] * (4 + 2)  # the record of clusters, at the start and at the end
    sites = networks.student.num_drop_path_sites
    assert sites > 0
    noise = torch.cat([noise for noise in students if noise is not None])
    assert noise.shape == (4 * 16, sites)
    assert len(noise.flatten().unique()) == noise.numel()  # different for every view of every image


# ------------------------------------------------------------------ selection of losses


def test_the_image_level_computes_no_objects(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("no loss works on objects")

    monkeypatch.setattr("cribo.objectives.pairs.find_objects", fail)
    record, trained = recorded({"losses.cross_view": False, "losses.cross_image": False})
    assert record.bank is None
    assert trained.bank is None
    assert all(result.objects is None and result.matches is None for result in record.results)
    for row in trained.rows:
        assert float(row["loss_cross_view"]) == float(row["loss_cross_image"]) == 0
        assert float(row["loss"]) == float(row["loss_image"]) > 0
        assert not {"objects_per_image", "bootstrapping_ratio", "object_entropy_of_mean"} & row.keys()


def test_without_the_cross_image_loss_there_is_no_bank(recorded: Recorded) -> None:
    record, trained = recorded({"losses.cross_image": False})
    assert record.bank is None
    assert trained.bank is None
    assert all(result.matches is None and result.objects is not None for result in record.results)
    assert all("bootstrapping_ratio" not in row and float(row["objects_per_image"]) > 0 for row in trained.rows)
    assert all(float(row["loss_cross_image"]) == 0 < float(row["loss_cross_view"]) for row in trained.rows)


def test_object_losses_without_the_image_level(recorded: Recorded) -> None:
    record, trained = recorded({"losses.image": False, "optim.freeze_last_layers_epochs": 0})
    assert all(float(row["loss_image"]) == 0 for row in trained.rows)
    assert all(float(row["loss_cross_view"]) > 0 for row in trained.rows)
    changed = moved(record.student[0], record.student[-1])
    assert "object_prototypes.direction" in changed
    assert "image_prototypes.direction" not in changed  # no gradient reaches it


def test_the_cross_image_loss_starts_in_its_epoch(recorded: Recorded) -> None:
    _, trained = recorded({"optim.epochs": 2, "losses.cross_image_from_epoch": 1, "objects.criterion": "none"})
    started = [float(row["loss_cross_image"]) > 0 for row in trained.rows]
    assert started == [False] * 4 + [True] * 4
    # Before that the bank is filled, but not searched; the column of the ratio is added with its first value.
    assert [row["bootstrapping_ratio"] for row in trained.rows] == [""] * 4 + ["1"] * 4
    assert len({line.count(",") for line in (trained.run.folder / "metrics.csv").read_text().splitlines()}) == 1


def test_cycle_consistency_keeps_fewer_matches_than_no_criterion(short: tuple[Record, Any]) -> None:
    ratios = [float(row["bootstrapping_ratio"]) for row in short[1].rows if row["bootstrapping_ratio"]]
    assert 0 < sum(ratios) / len(ratios) < 1


def test_the_loss_is_the_weighted_sum_of_the_three(short: tuple[Record, Any]) -> None:
    for row in short[1].rows:
        assert float(row["loss"]) == pytest.approx(
            sum(weight * float(row[f"loss_{name}"]) for name, weight in WEIGHTS.items()), rel=1e-6
        )


def test_a_weight_scales_the_gradients_of_its_loss(tiny: Tiny, train: Train) -> None:
    class Gradients(L.Callback):
        def on_before_optimizer_step(
            self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any, **__: Any
        ) -> None:
            if trainer.global_step == 0:
                named = cribo(pl_module).student.named_parameters()
                self.found = {name: value.grad.clone() for name, value in named if value.grad is not None}

    found = []
    for weight in (1.0, 0.25):
        gradients = Gradients()
        changes = {"losses.cross_view": weight, "losses.image": 0, "losses.cross_image": 0, "optim.epochs": 1}
        train(tiny(changes), callbacks=[gradients])
        found.append(gradients.found)
    whole, quarter = found
    assert "backbone.model.cls_token" in whole
    assert whole.keys() == quarter.keys()
    for name, gradient in whole.items():
        torch.testing.assert_close(quarter[name], 0.25 * gradient, rtol=1e-4, atol=1e-9)


def test_the_bank_contains_only_the_last_images(short: tuple[Record, Any]) -> None:
    record, trained = short
    assert record.bank.images_held == 10
    assert trained.bank["rows"].shape[1] == int(trained.bank["counts"].sum()) == len(record.bank)
