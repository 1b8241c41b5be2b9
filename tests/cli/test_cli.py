"""The command line."""

import importlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import cribo
from cribo.cli import main
from cribo.cli.evaluate import EVALUATIONS
from cribo.evaluation.config import PROTOCOLS
from cribo.evaluation.protocol import find_protocol

if TYPE_CHECKING:
    from cribo.pretraining import PretrainConfig


@pytest.fixture
def config(tmp_path: Path, tiny: "Callable[..., PretrainConfig]", monkeypatch: pytest.MonkeyPatch) -> str:
    """Write the configuration of a run of about a second to the working folder."""
    from cribo.pretraining.loading import dump_config

    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(dump_config(tiny({"optim.epochs": 1})))
    return "tiny.yaml"


@pytest.fixture
def refused(config: str, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that must fail without writing files, and return its error message."""

    def call(*words: str, status: int = 2) -> str:
        before = sorted(Path().rglob("*"))
        capsys.readouterr()
        assert main(words) == status
        assert sorted(Path().rglob("*")) == before
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return said.err

    return call


# ------------------------------------------------------------------ arguments


def test_without_a_command_it_prints_its_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    said = capsys.readouterr().out
    assert len(re.findall(r"^  cribo \w", said, re.M)) == 3  # examples
    page = re.search(r"docs/\w+\.md", said)
    assert page is not None
    assert (Path(__file__).parents[2] / page[0]).exists()


def test_help_shows_often_used_options_first_and_each_option_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["segment", "--help"])
    said = capsys.readouterr().out
    often = said[said.index("often used:") : said.index("\n\noptions:")]
    for option in ("IMAGES, --images", "--out", "--backbone", "--examples", "--memory", "--suggest"):
        assert f"  {option} " in often  # usage and examples name them
    for option in ("--pictures", "--temperature", "--trust"):
        assert option not in often
    named = re.findall(r"^  (--[\w.]+)", said, re.M)
    assert len(named) == len(set(named)) > 30
    with pytest.raises(SystemExit):
        main(["evaluate", "detection", "--help"])  # all options of the data are among the often used ones
    assert re.findall(r"^(\S.*:)\n\n", capsys.readouterr().out, re.M) == []  # so they have no other heading


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in ((["-h"], "usage: cribo <command>"), (["--version"], f"{cribo.__version__}\n")):
        assert main(words) == 0
        assert capsys.readouterr().out.startswith(said)


def test_threads_spin_briefly_unless_the_user_chose_how_they_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "active")
        monkeypatch.delenv(name)
    main(["--version"])
    assert os.environ.pop("GOMP_SPINCOUNT").isdigit()
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    main(["--version"])
    assert "GOMP_SPINCOUNT" not in os.environ


def test_help_of_pretrain_lists_and_explains_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["pretrain", "--help"])
    assert caught.value.code == 0
    said = capsys.readouterr().out
    for words in ("--data.root", "--optim.epochs", "--resume", "--print_config", "lambda_pos", "quickstart"):
        assert words in said


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("pretrian", "unknown command 'pretrian'"),
        ("pretrain --optim.epoch 3", "did you mean optim.epochs?"),
        ("pretrain --optim.epo=3", "did you mean optim.epochs?"),  # no abbreviations
        ("pretrain --overwrit", "did you mean overwrite?"),
        ("segment --min-confidence 0.5", "did you mean min_confidence?"),
        ("segment", "--backbone and IMAGES are required; usage: cribo segment IMAGES --backbone SOURCE"),
        ("embed", "IMAGES and --backbone are required"),
        ("search --db x --image x --point 3", "must be two integers"),
        ("export --backbone mean-colour --to timm", "mean-colour is a baseline"),
        ("pretrain --preset adapt", "did you mean config?"),
        ("pretrain --config camvit", "did you mean camvid?"),
        ("pretrain --config=imagenet_vitb61", "did you mean imagenet_vitb16?"),
        ("pretrain --config anything_else", "the presets are adapt, byol_resnet50, camvid"),
        ("pretrain --config unknown_key.yaml", "did you mean optim.epochs?"),
        ("pretrain --config unknown_group.yaml", "did you mean optim.epochs?"),
        ("pretrain --config broken.yaml", "broken.yaml is not YAML"),
        ("pretrain stray", "stray"),
        ("pretrain --optim.lr -1", "optim.lr must be > 0 and <= 10, got -1.0"),
        ("pretrain --runtime.accelerator cpu --runtime.devices 3", "32 x 1 x 3 = 96"),
    ],
)
def test_invalid_arguments_are_refused(words: str, named: str, refused: Callable[..., str]) -> None:
    Path("unknown_key.yaml").write_text("optim: {epoch: 3}\n")
    Path("unknown_group.yaml").write_text("optm: {epochs: 3}\n")
    Path("broken.yaml").write_text("optim: [\n")
    assert named in refused(*words.split())


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--views.size 30", "views.size"),
        ("--objects.num_objects 33", "objects.num_objects"),
        ("--objects.bank_images 7", "one batch of 8 images"),
        ("--data.scenes.count 7", "one batch of 8"),
        ("--data.root nowhere", "there is no 'nowhere'"),
        ("--data.root empty", "no images in empty"),
        ("--data.root empty --data.images train", "there is no 'train'"),
        ("--data.root texts", "none of the 8 images of data.root"),
        ("--backbone.name vit_tiny_patch16_242", "did you mean vit_tiny_patch16_224"),
        ('--backbone.args {"depht":3}', "has no argument 'depht'"),
        ("--backbone.pretrained nothing.pth", "no weights at nothing.pth"),
        ("--out file", "choose another --out"),
        ("--minutes 0", "minutes must be > 0"),
        ("--score.root empty", "there is no 'images'"),
        ("--score.root scenes --score.size 30,32", "score.size"),
        ("--runtime.devices 0", "runtime.accelerator cpu"),
        ("--runtime.accelerator abacus", "abacus"),
        ("--resume empty", "--config cannot be used with --resume"),
    ],
)
def test_invalid_values_are_refused_before_any_file_is_written(
    words: str, named: str, refused: Callable[..., str], config: str
) -> None:
    Path("empty").mkdir()
    Path("file").write_text("")
    Path("texts").mkdir()
    for number in range(8):
        Path(f"texts/{number}.jpg").write_text("no image")
    assert named in refused("pretrain", "--config", config, *words.split())


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--resume nothing", "it is not a run that can be resumed"),
        ("--resume --out nothing", "no run to resume in nothing"),
        ("--resume a --name b", "--name cannot be used with --resume"),
        ("--resume a --minutes 3", "--minutes cannot be used with --resume"),
        ("--resume run --optim.lr 0.1", "optim.lr cannot change"),
        ("--resume run --seed=3", "seed cannot change"),
        ('--resume run --objects {"num_objects":3}', "objects cannot change"),
    ],
)
def test_invalid_resumes_are_refused(words: str, named: str, refused: Callable[..., str], config: str) -> None:
    Path("run").mkdir()
    Path("run/config.yaml").write_text(Path(config).read_text())
    assert named in refused("pretrain", *words.split())


# ------------------------------------------------------------------ configurations


def printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        main(["pretrain", *words, "--print_config"])
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_a_printed_configuration_can_be_loaded(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    from cribo.pretraining import load_config

    first = printed(["--config", config, "--optim.epochs", "17"], capsys)
    Path("printed.yaml").write_text(first)
    assert printed(["--config", "printed.yaml"], capsys) == first
    assert load_config("printed.yaml").optim.epochs == 17


def test_values_after_the_configuration_override_it_and_the_default_is_quickstart(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from cribo.pretraining import load_config

    assert "num_objects: 11" in printed(["--config", config, "--objects.num_objects=11"], capsys)
    said = printed(["--optim.clip", "0.7"], capsys)
    assert f"count: {load_config('quickstart').data.scenes.count}\n" in said
    assert "clip: 0.7" in said


# ------------------------------------------------------------------ runs


def test_a_run_prints_its_results_and_files(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["pretrain", "--config", config, "--name", "mine", "--score.root", "scenes", "--score.images", "[4, 2]"]
    words += ["--score.neighbours", "10"]
    assert main(words) == 0
    said = capsys.readouterr().out
    summary = json.loads(Path("runs/mine/summary.json").read_text())
    for name in ("before", "after", "mean_color"):
        assert f"{100 * summary['dense_nn'][name]:.1f} %" in said
    assert "runs/mine/backbone.safetensors" in said
    assert "4 steps in" in said
    # Repeated: refused with a name, numbered without, replaced on request.
    assert main(words) == 2
    assert "runs/mine already exists" in capsys.readouterr().err
    monkeypatch.setattr("cribo.pretraining.run.write_report", lambda *args, **kwargs: [])  # pictures that nobody sees
    assert main([*words[:5], "--overwrite", "--seed", "5"]) == 0
    assert "seed: 5" in Path("runs/mine/config.yaml").read_text()
    # Resuming a finished run is not an error.
    assert main(["pretrain", "--resume"]) == 0
    assert "already finished" in capsys.readouterr().out


def test_a_short_run_of_the_quickstart_is_called_too_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from cribo.pretraining.loading import dump_config, load_config

    monkeypatch.chdir(tmp_path)

    def finished(epochs: int) -> str:
        folder = Path("runs") / f"of-{epochs}"
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(dump_config(load_config("quickstart", {"optim.epochs": epochs})))
        summary = {"epochs": epochs, "steps": 1, "seconds": 10.0, "images_per_second": 1.0, "peak_rss_bytes": 1}
        (folder / "summary.json").write_text(json.dumps(summary))
        assert main(["pretrain", "--optim.epochs", str(epochs), "--name", folder.name, "--continue"]) == 0
        return capsys.readouterr().out

    whole = load_config("quickstart").optim.epochs
    assert f"2 epochs are too few to judge: `cribo pretrain` trains {whole}, in about" in finished(2)
    assert "too few" not in finished(whole)


def test_a_diverged_run_ends_with_status_1(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pretrain", "--config", config, "--losses.student_temperature", "1e-44"]) == 1
    assert "the loss image was not finite, seen at step 1" in capsys.readouterr().err


def test_an_interrupt_at_any_time_ends_with_status_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(words: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("cribo.cli.evaluate.main", interrupted)
    assert main(["evaluate", "dense-nn"]) == 130


@pytest.mark.parametrize("command", ["pretrain", "profile", *(f"evaluate {name}" for name in EVALUATIONS)])
def test_the_advice_for_out_of_memory_names_existing_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    known = capsys.readouterr().out
    name = command.removeprefix("evaluate ")
    if name in PROTOCOLS:
        advice = find_protocol(name).less_memory
    else:
        advice = importlib.import_module(f"cribo.cli.{command.replace(' ', '.')}").COMMAND.less_memory
    for option in re.findall(r"--[\w.]+", advice):
        assert f"{option} " in known
