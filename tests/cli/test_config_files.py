"""Options from a file, by all commands."""

import re
from pathlib import Path

import pytest
import yaml

from cribo.base.errors import ConfigError
from cribo.cli import COMMANDS, main
from cribo.pretraining.loading import load_config

# For each command: other words that it requires, an option with the values of the file and of the command line, and a
# misspelt option with the valid one.
CASES = {
    "pretrain": ("", "objects.num_objects", 7, 9, "optim.epoch", "optim.epochs"),
    "profile": ("", "steps", 7, 9, "warmups", "warmup"),
    "adapt": ("IMAGES --backbone mean-colour", "dims", 7, 9, "minuts", "minutes"),
    "distill": ("IMAGES --teacher resnet18 --backbone resnet18", "steps", 7, 9, "minuts", "minutes"),
    "study": ("table5_small", "part", "1/2", "2/2", "nam", "name"),
    "benchmark": ("--backbone mean-colour --data SETS", "pictures", 7, 9, "picture", "pictures"),
    "segment": ("--backbone mean-colour --images I --memory M --out O", "neighbours", 7, 9, "wondow", "window"),
    "embed": ("IMAGES --backbone mean-colour --out O", "num_objects", 7, 9, "formats", "format"),
    "index": ("--db D --images I", "backbone", "mean-colour", "resnet18", "num_object", "num_objects"),
    "merge": ("PART", "out", "here", "there", "overwrit", "overwrite"),
    "search": ("--db D --image I", "k", 7, 9, "points", "point"),
    "serve": ("--memory M --backbone mean-colour", "max_waiting", 7, 9, "hosts", "host"),
    "explore": ("--run R", "limit", 7, 9, "hosts", "host"),
    "figures": ("", "run", ["a", "b"], ["c"], "querys", "queries"),
    "export": ("--backbone mean-colour", "to", "timm", "onnx", "opsets", "opset"),
    "shard": ("IMAGES OUT", "shard_mb", 7.0, 9.0, "sise", "size"),
    "evaluate dense-nn": ("--data voc --data.root R --backbone mean-colour", "ratios", "1,8", [1, 64], "vot", "vote"),
    "evaluate linear": ("--data voc --data.root R", "backbone", "mean-colour", "resnet18", "trustt", "trust"),
    "evaluate compare": ("RESULTS", "out", "here", "there", "sweep", "sweeps"),
}
# Options in the printed configuration, where they differ from the name.
PRINTED = {"backbone": "backbone.source"}


def printed(command: str, words: list[str], name: str, capsys: pytest.CaptureFixture[str]) -> object:
    """Return the value of an option in the configuration that a command prints."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        main([*command.split(), *words, "--print_config"])
    assert caught.value.code == 0
    place = yaml.safe_load(capsys.readouterr().out)
    for key in PRINTED.get(name, name).split("."):
        place = place[key]
    return place


def said(value: object) -> list[str]:
    return [",".join(map(str, value)) if isinstance(value, list) else str(value)]


@pytest.mark.parametrize("command", CASES)
def test_a_file_sets_options_and_the_command_line_overrides_it(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    given, name, value, other, misspelt, valid = CASES[command]
    words = given.split()
    Path("options.yaml").write_text(yaml.safe_dump({name: value}))
    expected = [1, 8] if value == "1,8" else value
    assert printed(command, ["--config", "options.yaml", *words], name, capsys) == expected
    override = [f"--{name}", *said(other)]
    assert printed(command, [*words, *override, "--config", "options.yaml"], name, capsys) == other
    Path("wrong.yaml").write_text(yaml.safe_dump({misspelt: 3}))
    assert main([*command.split(), *words, "--config", "wrong.yaml"]) == 2
    assert f"did you mean {valid}?" in capsys.readouterr().err
    assert sorted(path.name for path in Path().iterdir()) == ["options.yaml", "wrong.yaml"]


@pytest.mark.parametrize("command", ["embed", "pretrain", "evaluate dense-nn"])
def test_keys_that_a_file_has_twice_and_missing_files_are_errors(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given, name, value, other, *_ = CASES[command]
    file = tmp_path / "options.yaml"
    file.write_text(yaml.safe_dump({name: value}) + "\n# a comment\n" + yaml.safe_dump({name: other}))
    assert main([*command.split(), *given.split(), "--config", str(file)]) == 2
    message = capsys.readouterr().err
    assert name in message
    assert str(file) in message
    assert re.search(r"lines 1 and \d", message), message
    assert main([*command.split(), *given.split(), "--config", "missing.yaml"]) == 2
    assert "missing.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "key", "lines"),
    [
        ("optim:\n  lr: 1\n  lr: 2\n", "optim.lr", (2, 3)),
        ("optim: {lr: 1}\nseed: 1\noptim: {epochs: 2}\n", "optim", (1, 3)),
        ("optim.lr: 1\noptim:\n  lr: 2\n", "optim.lr", (1, 3)),
        ("optim:\n  lr: 1\n'optim': {}\n", "optim", (1, 3)),
        ("objective:\n  args:\n    crops: 1\n    crops: 1\n", "objective.args.crops", (3, 4)),
    ],
)
def test_nested_and_dotted_keys_are_compared(text: str, key: str, lines: tuple[int, int], tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=f" {key} .*lines {lines[0]} and {lines[1]}"):
        load_config(tmp_path / "mine.yaml")


@pytest.mark.parametrize("words", [["--objective.args", "{crops: 1, crops: 2}"], ["--optim", "optim.yaml"]])
def test_a_key_that_a_value_has_twice_is_an_error(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("optim.yaml").write_text("lr: 1\nlr: 2\n")
    assert main(["pretrain", *words, "--print_config"]) == 2
    assert re.search("(crops|lr)", capsys.readouterr().err)


def test_every_command_is_tested() -> None:
    assert {command.split()[0] for command in CASES} == set(COMMANDS) - {"doctor"}  # has no option with a value


def test_required_options_and_arguments_can_come_from_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "options.yaml").write_text("images: photographs\nbackbone: mean-colour\nlayers: 1\nout: features\n")
    words = ["--config", str(tmp_path / "options.yaml"), "--backbone.network", "student"]
    for name, value in {"images": "photographs", "out": "features", "backbone": "mean-colour"}.items():
        assert printed("embed", words, name, capsys) == value
