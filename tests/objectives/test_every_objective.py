"""Properties of the training of every objective; each has a row in `CHANGES`."""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.commands import Commands
from tests.pretraining.test_spread import assert_same_checkpoint, last

from cribo.base.errors import ConfigError
from cribo.models import build_backbone, load_backbone, save_backbone
from cribo.pretraining import PretrainConfig, pretrain
from cribo.pretraining.loading import dump_config
from cribo.pretraining.monitoring import read_metrics

Tiny = Callable[..., PretrainConfig]
Options = Callable[..., dict[str, Any]]
Whole = Callable[[str], dict[str, Any]]

COMMON: dict[str, Any] = {
    "data.scenes.count": 32,
    "backbone.drop_path": 0.2,
    "objects.group_size": 4,
    "optim.epochs": 1,
    "optim.lr": 1e-3,
    "optim.warmup_epochs": 0,
    "optim.freeze_last_layers_epochs": 0,
    "runtime.precision": "64-true",
    "runtime.log_every": 100,  # unread sums stay in the checkpoints
}
CHANGES: dict[str, dict[str, Any]] = {
    "croc": {"objective.args": {"k_start": 6, "k_max": 4, "object_prototypes": 16}, "objects.position_weight": 4.0},
    "dino": {"objective.args": {"local_crops": 2, "local_size": 16}},
    "distill": {},
    "ibot": {"objective.args": {"local_crops": 2, "local_size": 16}},
    "loca": {"objective.args": {"local_crops": 2, "local_size": 16}, "head.init_std": 0.2},
    "neco": {"objective.args": {"local_crops": 2, "local_size": 16, "grid": 3, "queue": 100}},
    "paka": {"objective.args": {"local_crops": 2, "local_size": 16}, "head.init_std": 0.2},
    "cribo.objectives.controls.RandomPairsCrIBo": {},
    "cribo.objectives.controls.SupervisedCrIBo": {"losses.cross_image_from_epoch": 0},
    "slotcon": {"objective.args": {"batch_norm": False}, "head.init_std": 0.2},
    "timet": {"objective.args": {"frames": 3}, "data.scenes.frames": 4, "head.init_std": 0.2},
    "contextual": {"objective.args": {"memory_images": 20, "pooling_queries": 2}, "head.init_std": 0.2},
    "byol": {"objective.args": {"batch_norm": False}, "head.init_std": 0.2},
    "orl": {
        "objective.args": {"batch_norm": False, "neighbours": 3, "min_side": 12, "patch_size": 16},
        "head.init_std": 0.2,
    },
}
WHOLE_BATCH = {"contextual", "slotcon"}
"""Objectives that reject micro-batches."""
GENERATES_CODE = {"croc", "distill", "ibot"}
"""Objectives whose compiled code differs from that of the others."""


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Options:
    """Return the options of an objective, with changes; the teacher of `distill` is saved once."""
    folder = tmp_path_factory.mktemp("teacher")
    args = {"patch_size": 12, "depth": 1, "embed_dim": 24, "num_heads": 2}
    save_backbone(build_backbone("vit_tiny_patch16_224", args=args, image_size=36, seed=5), folder)

    def make(name: str, **changes: Any) -> dict[str, Any]:
        own = {key.replace("__", "."): value for key, value in changes.items()}
        taught = {"objective.args": {"teacher": str(folder)}} if name == "distill" else {}
        return {**COMMON, "objective.name": name, **CHANGES[name], **taught, **own}

    return make


def trained(config: PretrainConfig, out: Path, name: str) -> dict[str, Any]:
    """Train without a report; return the last checkpoint, without its configuration."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cribo.pretraining.run.write_report", lambda *args, **kwargs: [])
        return last(pretrain(config, out=out, name=name).folder)


@pytest.fixture(scope="module")
def whole(tiny: Tiny, options: Options, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Train an objective in one process and without micro-batches, once; return the last checkpoint."""
    folder = tmp_path_factory.mktemp("whole")
    return functools.cache(lambda name: trained(tiny(options(name)), folder, name))


@pytest.mark.parametrize("name", sorted(CHANGES.keys() - WHOLE_BATCH))
def test_micro_batches_change_nothing(tiny: Tiny, options: Options, whole: Whole, name: str, tmp_path: Path) -> None:
    split = trained(tiny(options(name, optim__micro_batches=2)), tmp_path, "split")
    assert_same_checkpoint(whole(name)["state_dict"], split["state_dict"], 1e-9)


@pytest.mark.parametrize("name", sorted(WHOLE_BATCH))
def test_micro_batches_are_rejected(tiny: Tiny, options: Options, name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"micro_batches must be 1 for {name}, .* got 2: use a smaller"):
        pretrain(tiny(options(name, optim__micro_batches=2)), out=tmp_path)


# Train each of the configurations in this process, which is one of two.
TRAIN_ALL = """
import cribo.pretraining.run as run
run.write_report = lambda *args, **kwargs: []
out, *configs = sys.argv[1:]
for config in configs:
    name = os.path.basename(config).removesuffix(".yaml")
    print("training", name, flush=True)
    run.pretrain(config, out=out, name=name)
"""


@pytest.fixture(scope="module")
def two(
    tiny: Tiny, options: Options, commands: Commands, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[str]]:
    """Train all objectives, one after the other, in two processes; return the folder and the outputs."""
    folder = tmp_path_factory.mktemp("two")
    configs = [folder / f"{name}.yaml" for name in sorted(CHANGES)]
    for config in configs:
        config.write_text(dump_config(tiny(options(config.stem, runtime__devices=2))))
    started = commands.fork_program_all(2, TRAIN_ALL, folder, *configs)
    for each in started:
        each.wait(900)
    return folder, [each.output for each in started]


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_two_processes_train_the_same_network(whole: Whole, two: tuple[Path, list[str]], name: str) -> None:
    folder, outputs = two
    assert (folder / name / "summary.json").is_file(), "".join(output[-5000:] for output in outputs)
    for part in ("state_dict", "cribo"):
        assert_same_checkpoint(whole(name)[part], last(folder / name)[part], 1e-9)


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_a_run_from_a_network_with_a_linear_layer_keeps_it_and_resumes(
    tiny: Tiny, options: Options, name: str, resumed_state: Callable[..., Any], tmp_path: Path
) -> None:
    adapted = build_backbone("vit_tiny_patch16_224", args=tiny().backbone.args, image_size=32, seed=1)
    adapted.set_readout(torch.randn(7, 32), torch.zeros(7))
    save_backbone(adapted, tmp_path / "adapted")
    start = str(tmp_path / "adapted" / "backbone.safetensors")
    changes = {"runtime__precision": "32-true", "runtime__checkpoint_every": 3, "backbone__pretrained": start}
    resumed_state(tiny(options(name, **changes)))
    (run,) = (path.parent for path in tmp_path.glob("*/summary.json"))
    assert load_backbone(run).embed_dim == 7


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.endurance] if "controls" in name else []) for name in sorted(CHANGES)],
)
def test_a_compiled_run_is_the_same(
    tiny: Tiny, options: Options, whole: Whole, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are traced; code is generated only for those that compile more than backbones and the cross-entropy."""
    if name not in GENERATES_CODE:
        compiler = torch.compile
        monkeypatch.setattr(torch, "compile", lambda *args, mode=None, **how: compiler(*args, backend="eager", **how))
    elif shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler")
    torch.compiler.reset()
    compiled = trained(tiny(options(name, runtime__compile="default")), tmp_path, "compiled")
    torch.compiler.reset()
    assert_same_checkpoint(whole(name)["state_dict"], compiled["state_dict"], 1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", sorted(CHANGES))
def test_the_first_losses_on_a_gpu_are_those_of_the_cpu(
    tiny: Tiny, options: Options, name: str, tmp_path: Path
) -> None:
    rows = []
    for accelerator, precision in (("cpu", "32-true"), ("gpu", "bf16-mixed")):
        config = tiny(
            options(name, runtime__accelerator=accelerator, runtime__precision=precision, runtime__log_every=1)
        )
        trained(config, tmp_path, accelerator)
        rows.append(read_metrics(tmp_path / accelerator / "metrics.csv"))
    expected, found = ({name: value for name, value in row[0].items() if name.startswith("loss")} for row in rows)
    assert found == pytest.approx(expected, rel=0.05, abs=0.01)
    assert len(rows[1]) == len(rows[0])
