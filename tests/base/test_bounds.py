import math
import re
from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest

from cribo.base.arguments import Parser
from cribo.base.bounds import Bounds, above, at_least, at_most, below, between, check_bounds, find_bounds
from cribo.base.errors import ConfigError


@pytest.mark.parametrize(
    ("bounds", "text", "inside", "outside"),
    [
        (at_least(1), ">= 1", (1, 2.5, 10**400), (0, 0.999, -1)),
        (above(0), "> 0", (1e-300, 5), (0, -0.0, -1)),
        (at_most(3), "<= 3", (3, -7), (4, 3.001)),
        (below(3), "< 3", (2.999, -7), (3, 4)),
        (between(0, 0.5), ">= 0 and <= 0.5", (0, 0.25, 0.5), (-1e-9, 0.6)),
        (above(0) & at_most(10), "> 0 and <= 10", (10, 0.1), (0, 10.1)),
    ],
)
def test_bounds_contain_numbers_between_their_limits(
    bounds: Bounds, text: str, inside: tuple[float, ...], outside: tuple[float, ...]
) -> None:
    assert str(bounds) == text
    bounds.check(**{f"value{number}": number for number in inside})
    for number in (*outside, math.nan, math.inf, -math.inf):
        with pytest.raises(ConfigError) as caught:
            bounds.check(rate=number)
        assert str(caught.value) == f"rate must be {text}, got {number}"


@pytest.mark.parametrize("value", [(1, 0), [0], {"a": 1, "b": 0}, (None, 0)])
def test_bounds_of_a_tuple_list_or_mapping_are_those_of_its_numbers(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^sizes must be >= 1, got "):
        at_least(1).check(sizes=value)


def test_null_and_empty_values_are_valid() -> None:
    at_least(1).check(nothing=None, empty=(), mapping={}, within=(None, 1))


@pytest.mark.parametrize(
    ("hint", "found"),
    [
        (Annotated[int, at_least(1)], at_least(1)),
        (tuple[Annotated[float, above(0)], ...] | None, above(0)),
        (Annotated[dict[str, float] | None, at_least(0)], at_least(0)),
        (Annotated[int, "a comment"], None),
        (tuple[int, ...], None),
        ("int", None),
    ],
)
def test_bounds_are_found_in_types(hint: Any, found: Bounds | None) -> None:
    assert find_bounds(hint) == found


Decay = Annotated[float, at_least(0)]


@dataclass
class Optimiser:
    """Optimiser."""

    lr: Annotated[float, above(0) & at_most(10)] = 0.1
    decay: tuple[Decay, Decay] = (0.0, 1.0)
    sizes: tuple[Annotated[int, at_least(1)], ...] | None = None
    clip: Annotated[float, above(0)] | None = None


@dataclass
class Training:
    """Training."""

    epochs: Annotated[int, at_least(1)] = 3
    weight: Annotated[float, at_least(0)] | bool = 1.0
    optim: Optimiser = field(default_factory=Optimiser)

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass
class LongTraining(Training):
    more: Annotated[int, at_least(2)] = 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epochs": 0}, "epochs must be >= 1, got 0"),
        ({"more": 1}, "more must be >= 2, got 1"),
        ({"optim": Optimiser(lr=11)}, "optim.lr must be > 0 and <= 10, got 11"),
        ({"optim": Optimiser(decay=(0.0, -1.0))}, r"optim.decay must be >= 0, got (0.0, -1.0)"),
    ],
)
def test_fields_are_checked_also_inherited_and_nested_ones(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        LongTraining(**values)
    with pytest.raises(ConfigError, match=r"^train\.lr must be > 0"):
        check_bounds(Optimiser(lr=0), "train.")


# ------------------------------------------------------------------ command line


def training_parser() -> Parser:
    parser = Parser(prog="train")
    parser.add_class_arguments(Training)
    return parser


def test_help_prints_bounds() -> None:
    text = " ".join(training_parser().format_help().split())
    for option in (
        "--epochs EPOCHS (type: int >= 1, default: 3)",
        "--optim.lr LR (type: float > 0 and <= 10, default: 0.1)",
        "--optim.decay [ITEM,...] (type: tuple[float, float], each >= 0, default: (0.0, 1.0))",
        "--optim.sizes SIZES (type: Optional[tuple[int, ...]], each >= 1, default: null)",
        "--optim.clip CLIP (type: Optional[float] > 0, default: null)",
        "--weight WEIGHT (type: Union[float, bool] >= 0, default: 1.0)",
    ):
        assert option in text
    assert "Annotated" not in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--epochs", "many"], "epochs must be an integer >= 1, got 'many'"),
        (["--optim.decay", "a,b"], "optim.decay must be two numbers separated by commas, each >= 0, got"),
        (["--epochs", "0"], "epochs must be >= 1, got 0"),
        (["--optim.clip", "nan"], "optim.clip must be a number > 0, got 'nan'"),
        (["--optim.sizes", "3,0"], "optim.sizes must be >= 1, got (3, 0)"),
    ],
)
def test_errors_name_the_bounds(words: list[str], message: str) -> None:
    parser = training_parser()
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        parser.build(Training, parser.parse_args(words))


def test_types_with_bounds_have_the_syntax_of_others() -> None:
    parser = training_parser()
    built = parser.build(Training, parser.parse_args(["--optim.decay", "1", "2", "--weight", "--optim.clip", "null"]))
    assert built == Training(weight=True, optim=Optimiser(decay=(1.0, 2.0)))
