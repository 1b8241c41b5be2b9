"""`cribo distill` on the command line, with small networks and synthetic scenes."""

import copy
import json
from pathlib import Path

import pytest
import torch
from tests.apps.adapt.test_run import write_scenes

from cribo.apps.adapt import DistillConfig, distill, planning
from cribo.apps.adapt.encoding import encode
from cribo.apps.adapt.regression import predict_teacher
from cribo.base.errors import ConfigError
from cribo.cli import main
from cribo.data import open_images
from cribo.features.config import BackboneSource
from cribo.models import Licence, build_backbone, load_backbone, save_backbone

TEACHER_ARGS = {"depth": 2, "embed_dim": 24, "num_heads": 2, "patch_size": 12}
STUDENT_ARGS = {"layers": [1, 1, 0, 0], "channels": [8, 16, 16, 16]}
TRAINING = {"runtime.checkpoint_every": 4, "views.size": 32, "optim.batch_size": 4}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scenes(tmp_path_factory.mktemp("scenes"), 32)


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a teacher with a linear layer behind its features, as an adapted one has, and a student."""
    folder = tmp_path_factory.mktemp("networks")
    teacher = build_backbone("vit_tiny_patch16_224", args=TEACHER_ARGS, image_size=36)
    generator = torch.Generator().manual_seed(0)
    teacher.set_readout(torch.randn(10, 24, generator=generator), torch.zeros(10))
    save_backbone(teacher, folder / "teacher")
    save_backbone(build_backbone("resnet18", args=STUDENT_ARGS, image_size=32), folder / "student")
    return folder


def wanted(scenes: Path, networks: Path, **changes: object) -> DistillConfig:
    values = {"images": str(scenes / "images"), "steps": 10, "training": TRAINING, "workers": 0, "device": "cpu"}
    teacher, student = (BackboneSource(str(networks / name)) for name in ("teacher", "student"))
    return DistillConfig(teacher=teacher, backbone=student, **{**values, **changes})


@pytest.mark.slow
def test_the_command_writes_a_student_and_a_verdict(
    scenes: Path, networks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"--teacher {networks / 'teacher'} --backbone {networks / 'student'} --labelled {scenes} --steps 10"
    words += f" --workers 0 --keep trained --out {tmp_path} --name mine --device cpu"
    assert main(["distill", str(scenes / "images"), *words.split(), "--training", json.dumps(TRAINING)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Dense retrieval on" in said
    assert "For comparison, the teacher: retrieval " in said
    backbone, before = load_backbone(tmp_path / "mine"), load_backbone(networks / "student")
    assert (backbone.name, backbone.embed_dim) == ("resnet18", 10)
    assert not torch.equal(backbone.model.conv1.weight, before.model.conv1.weight)
    verdict = json.loads((tmp_path / "mine" / "verdict.json").read_text())
    assert set(verdict["students"]["labelled"]) == {"closed form", "averaged student", "trained student"}
    assert 0 < verdict["teacher"]["retrieval"] < 1


def test_an_interrupted_distillation_continues_to_the_same_weights(
    scenes: Path, networks: Path, tmp_path: Path
) -> None:
    folder, asked = tmp_path / "cut", wanted(scenes, networks, keep="trained")
    whole = distill(asked, out=tmp_path, name="cut")
    predicted = [found["predicted"] for found in whole.verdict.students.indicators.values()]
    assert predicted[0] == 0 < predicted[1] < 1
    assert whole.verdict.sentences[0] == (
        "Share of the teacher's variance that is predicted, the criterion without labels: "
        f"original student 0%, closed form {predicted[1]:.0%}, averaged student {predicted[2]:.0%}, "
        f"trained student {predicted[3]:.0%}."
    )
    weights = (folder / "backbone.safetensors").read_bytes()
    for name in ("backbone.safetensors", "verdict.json", "training/summary.json", "training/backbone.safetensors"):
        (folder / name).unlink()
    for checkpoint in (folder / "training" / "checkpoints").glob("*10.ckpt"):
        checkpoint.unlink()
    again = distill(asked, out=tmp_path, name="cut", resume=True)
    assert again.verdict == whole.verdict
    assert (folder / "backbone.safetensors").read_bytes() == weights
    with pytest.raises(ValueError, match=r"steps was 10, is 12\. Choose another --name"):
        distill(wanted(scenes, networks, steps=12), out=tmp_path, name="cut", resume=True)


def test_the_time_can_be_changed_until_the_training_begins(scenes: Path, networks: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "seconds_per_step", lambda session: 1e6)  # on a slow machine
        short = distill(wanted(scenes, networks, steps=None, minutes=30, keep="trained"), out=tmp_path, name="short")
    assert set(short.verdict.students.indicators) == {"original student", "closed form"}
    assert short.verdict.students.kept == "closed form"
    assert short.backbone().embed_dim == 10
    trained = distill(wanted(scenes, networks, keep="trained"), out=tmp_path, name="short", resume=True)
    assert trained.folder == short.folder
    assert trained.verdict.students.kept == "trained student"


def test_too_little_time_for_the_closed_form_is_an_error_before_any_work(
    scenes: Path, networks: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"--minutes 1e-06 is too short for the closed form.* use --minutes \d+"):
        distill(wanted(scenes, networks, steps=None, minutes=1e-6), out=tmp_path, name="short")
    assert not list(tmp_path.iterdir())


def test_invalid_training_options_leave_an_older_folder_as_it_was(scenes: Path, networks: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "cribo.json").write_text('{"made_by": "cribo", "kind": "distillation"}')
    asked = wanted(scenes, networks, training={**TRAINING, "objective.args": {"patches": -1.0}})
    with pytest.raises(ValueError, match="patches must be >= 0"):
        distill(asked, out=tmp_path, name="mine", overwrite=True)
    assert [path.name for path in folder.iterdir()] == ["cribo.json"]


def test_the_linear_layer_predicts_a_linear_teacher(scenes: Path, networks: Path) -> None:
    student = load_backbone(networks / "student")
    teacher = copy.deepcopy(student)
    generator = torch.Generator().manual_seed(0)
    teacher.set_readout(torch.randn(4, student.embed_dim, generator=generator), torch.ones(4))
    teacher.licences = (Licence("teacher.pth", "mit"),)
    [(found, share)] = predict_teacher([student], teacher, open_images(scenes / "images"))
    assert student.readout is None
    assert share > 0.99
    image = open_images(scenes / "images").load(3)
    assert found.licences == (Licence("teacher.pth", "mit", role="teacher"),)
    predicted, wanted = encode(found, image).tokens, encode(teacher, image).tokens
    assert (predicted - wanted).square().mean() < 0.02 * wanted.var()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"minutes": 0.0}, "minutes must be > 0, got 0"),
        ({"steps": 0}, "steps must be >= 1, got 0"),
        ({"teacher": BackboneSource("mean-colour")}, "--teacher mean-colour has no weights: choose a network"),
        ({"backbone": BackboneSource("x", layers=2)}, "distill does not support --backbone.layers 2"),
    ],
)
def test_invalid_options_are_rejected(scenes: Path, networks: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DistillConfig(**{**vars(wanted(scenes, networks)), **changes})
