import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from cribo.base.arguments import Parser
from cribo.base.errors import ConfigError


@dataclass
class Source:
    """Source.

    Attributes:
        name: a name.
        trust: a switch.
    """

    name: str
    trust: bool = False


@dataclass
class Options:
    """Options.

    Attributes:
        source: a source.
        ratios: some numbers.
        size: height and width.
        counts: two numbers.
        area: two bounds.
        devices: some names.
        search: a choice.
        temperature: a number.
    """

    source: Source
    ratios: tuple[int, ...] = (1, 8)
    size: tuple[int, int] | None = None
    counts: tuple[int, int] = (400, 100)
    area: tuple[float, float] = (0.25, 1.0)
    devices: tuple[str, ...] | None = None
    search: Literal["exact", "faiss"] | None = None
    temperature: float = 0.02


def parser() -> Parser:
    made = Parser(
        prog="try",
        short={"--source": "--source.name", "--trust": "--source.trust"},
    )
    made.add_class_arguments(Options)
    made.add_argument("--run", nargs="+")
    made.add_argument("--format", choices=("pdf", "png"), default="pdf")
    return made


@pytest.mark.parametrize(
    "words",
    [
        ["--source", "a", "--trust", "--ratios", "2,4"],
        ["--source=a", "--trust=true", "--ratios=2,4"],
        ["--source.name", "a", "--source.trust", "true", "--ratios", "[2, 4]"],
        ["--trust", "--ratios", "(2,4)", "--source", "a"],
        ["--trust", "--ratios", "2", "4", "--source", "a"],
        ["--ratios", "[2,", "4]", "--trust", "--source", "a"],
    ],
)
def test_short_names_switches_and_lists(words: list[str]) -> None:
    parsed = parser().parse_args(words)
    assert (parsed.source.name, parsed.source.trust, parsed.ratios) == ("a", True, (2, 4))


def test_a_value_that_looks_like_a_short_name_is_a_value() -> None:
    assert parser().parse_args(["--source", "trust", "--size", "3,4"]).size == (3, 4)
    assert parser().parse_args(["--source", "a", "--size", "null"]).size is None
    assert parser().parse_args(["--source", "a", "--ratios", "7"]).ratios == (7,)


@pytest.mark.parametrize(
    "words",
    [
        ["--size", "364", "364"],
        ["--size", "364"],
        ["--size", "364,364"],
        ["--size", "[364,364]"],
        ["--size", "[364]"],
        ["--size=364"],
        ["--size=364,364"],
        ["--size=[364, 364]"],
    ],
)
def test_a_size_can_be_given_in_any_syntax(words: list[str]) -> None:
    assert parser().parse_args([*words, "--source", "a"]).size == (364, 364)
    assert parser().parse_args(["--source", "a", *words]).size == (364, 364)


@pytest.mark.parametrize(("said", "size"), [("364", (364, 364)), ("[32, 64]", (32, 64)), ("null", None)])
def test_a_size_in_a_file(tmp_path: Path, said: str, size: tuple[int, int] | None) -> None:
    made = parser()
    made.add_class_arguments(Options, "inner")
    (tmp_path / "a.yaml").write_text(f"size: {said}\ninner:\n  size: {said}\n  counts: [7, 8]\n")
    parsed = made.parse_args(["--config", str(tmp_path / "a.yaml"), "--source", "a", "--inner.source.name", "a"])
    assert (parsed.size, parsed.inner.size, parsed.inner.counts) == (size, size, (7, 8))
    (tmp_path / "a.yaml").write_text(f"inner:\n  size: {said}\n")
    parsed = made.parse_args(["--config", str(tmp_path / "a.yaml"), "--source", "a", "--inner.source.name", "a"])
    assert (parsed.size, parsed.inner.size) == (None, size)


@pytest.mark.parametrize(
    "content",
    [
        "source: a\ntrust: true\nratios: 2,4\nrun: x",
        "trust: true\nsource: {name: a}\nratios: [2, 4]\nrun: [x]",
        "source.name: a\nsource: {trust: true}\nratios: (2, 4)\nrun: x",
    ],
)
def test_a_file_uses_the_syntax_of_the_command_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.yaml").write_text(content)
    words = ["--config", str(tmp_path / "a.yaml")]
    parsed = parser().parse_args(words)
    assert (parsed.source.name, parsed.source.trust, parsed.ratios, parsed.run) == ("a", True, (2, 4), ["x"])
    parsed = parser().parse_args(["--run", "y", "--ratios", "3", "--run=z", "--source", "b", *words])
    assert (parsed.source.name, parsed.source.trust, parsed.ratios, parsed.run) == ("b", True, (3,), ["y", "z"])


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "is empty"),
        ("[a, b]", "mapping"),
        ("ratios: [1", "YAML"),
        ("a: &b {}\nsource: *b", "aliases"),
        ("rations: 3", "did you mean ratios?"),
        ("source: {nam: a}", "did you mean source.name?"),
        ("temperature: x", "temperature"),
        ("size: [1, 2, 3]", "size must be two integers"),
        ("size: x", "size must be two integers"),
        ("size: {a: 7}", "size must be two integers"),
        ("counts: 7", "counts must be two integers"),
    ],
)
def test_invalid_files_are_refused(tmp_path: Path, content: str, named: str) -> None:
    (tmp_path / "a.yaml").write_text(content)
    with pytest.raises(ConfigError, match=re.escape(named)):
        parser().parse_args(["--config", str(tmp_path / "a.yaml"), "--source", "a"])


def test_pairs_of_numbers_and_lists_of_names() -> None:
    parsed = parser().parse_args(["--source", "a", "--size", "32", "64", "--counts", "4", "2", "--area", "-1", "1e-3"])
    assert (parsed.size, parsed.counts, parsed.area) == ((32, 64), (4, 2), (-1.0, 0.001))  # height before width
    assert parser().parse_args(["--source", "a", "--devices", "cuda:0,cuda:1"]).devices == ("cuda:0", "cuda:1")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("", "--source is required"),
        ("--sourc a", "did you mean source?"),
        ("--source a --rations 1", "did you mean ratios?"),
        ("--source a --source.trusty 1", "did you mean source.trust?"),
        ("--source a --ratios x", "ratios must be integers separated by commas, got 'x'"),
        ("--source a --size 1,2,3", "size must be two integers"),
        ("--source a --size 1 2 3", "size must be two integers"),
        ("--source a --counts 4", "counts must be two integers"),  # only a size can be square
        ("--source a --area 1", "area must be two numbers"),
        ("--source a --search fais", "search must be exact or faiss"),
        ("--source a --temperature x", "temperature must be a number"),
        ("--source a --trust x", "--trust must be true or false"),
        ("--source a --format gif", "format must be pdf or png"),
        ("--source a --size", "--size: expected one argument"),
        ("--source --ratios 1", "--source: expected one argument"),
        ("--source a --run=", "--run must not be empty"),  # it is not the current folder
        ("--source= --run b", "--source must not be empty"),
        ("--source a --zzz 1", "zzz"),
        ("--source a zzz", "zzz"),
        ("--source a --zzz 1", "try --help"),
    ],
)
def test_invalid_arguments_are_refused(words: str, named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        parser().parse_args(words.split())


@pytest.mark.parametrize("words", [["--source", ""], ["", "--source", "a"]])
def test_an_empty_argument_is_not_the_current_folder(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="must not be empty"):
        parser().parse_args(words)


def test_help_contains_the_short_names() -> None:
    said = parser().format_help()
    assert "--source NAME" in said
    assert "--source.name" not in said
    assert "--trust" in said
    assert "Path to a configuration file" not in said


def test_a_group_of_options_with_another_file_than_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "weights.pth").write_bytes(b"PK\x03\x04\x80\xff")
    (tmp_path / "source.yaml").write_text("name: mine")
    made = Parser(prog="try")  # without a short name for the group's option
    made.add_class_arguments(Options)
    assert made.parse_args(["--source", str(tmp_path / "source.yaml")]).source.name == "mine"
    for words in (["--source", str(tmp_path / "weights.pth")], [f"--source={tmp_path / 'weights.pth'}"]):
        with pytest.raises(ConfigError, match=r"^--source is a group of options \(--source\.name, --source\.trust\)"):
            made.parse_args(words)


@pytest.mark.parametrize(
    "words",
    [
        ["a", "b", "--trust", "--source", "c"],
        ["--source", "c", "a", "--trust", "true", "b"],
        ["--ratios", "1", "--images", "a", "b"],
        ["b", "--images=a"],
        ["a", "--out", "b"],
        ["--config", "c.yaml", "--", "a", "b"],
    ],
)
def test_options_by_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text("images: x\nout: y")
    made = Parser(prog="try", by_position=["--images", "--out"])
    made.add_class_arguments(Options, skip={"source"})
    made.add_argument("--source", default="c")
    made.add_argument("--trust", type=bool, default=False)
    made.add_argument("--images", required=True)
    made.add_argument("--out")
    parsed = made.parse_args(words)
    assert (parsed.images, parsed.out, parsed.source) == ("a", "b", "c")
    with pytest.raises(ConfigError, match="third"):
        made.parse_args([*words, "third"])
    with pytest.raises(ConfigError, match="IMAGES is required"):
        made.parse_args(["--out", "b"])
