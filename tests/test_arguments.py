from dataclasses import dataclass

import pytest

from cribo.arguments import ConfigError, Parser


@dataclass
class Source:
    """Where from.

    Attributes:
        name: of it.
        trust: believe it.
    """

    name: str
    trust: bool = False


@dataclass
class Options:
    """All there is.

    Attributes:
        source: where from.
        ratios: some numbers.
        size: two numbers.
    """

    source: Source
    ratios: tuple[int, ...] = (1, 8)
    size: tuple[int, int] | None = None


def parser() -> Parser:
    made = Parser(
        prog="try",
        short={"--source": "--source.name", "--trust": "--source.trust"},
        switches=("--source.trust",),
        lists=("--ratios", "--size"),
    )
    made.add_class_arguments(Options)
    return made


@pytest.mark.parametrize(
    "words",
    [
        ["--source", "a", "--trust", "--ratios", "2,4"],
        ["--source=a", "--trust=true", "--ratios=2,4"],
        ["--source.name", "a", "--source.trust", "true", "--ratios", "[2, 4]"],
        ["--trust", "--ratios", "(2,4)", "--source", "a"],
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
    ("words", "message"),
    [
        ([], "the following arguments are required: --source"),
        (["--sourc", "a"], "did you mean source?"),
        (["--source", "a", "--rations", "1"], "did you mean ratios?"),
        (["--source", "a", "--source.trusty", "1"], "did you mean source.trust?"),
        (["--source", "a", "--ratios", "x"], "ratios"),
        (["--source", "a", "--size", "1,2,3"], "size"),
    ],
)
def test_refusals(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parser().parse_args(words)
    assert message in str(caught.value)


def test_help_says_the_short_names() -> None:
    said = parser().format_help()
    assert "--source NAME" in said
    assert "--source.name" not in said
    assert "--trust" in said
    assert "Path to a configuration file" not in said
