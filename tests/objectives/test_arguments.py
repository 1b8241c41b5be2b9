"""Bounds of `objective.args`, which objectives declare in the signatures of their constructors."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from cribo.base.bounds import find_bounds
from cribo.base.errors import ConfigError
from cribo.objectives import Setting, make_objective
from cribo.objectives.base import BUILT_IN, objective_class
from cribo.pretraining import PretrainConfig

REQUIRED: dict[str, dict[str, Any]] = {"distill": {"teacher": "resnet10t"}}
"""Arguments without a default."""


def outside() -> list[Any]:
    """Each argument with bounds of each objective, with values just outside."""
    cases = []
    for name in (*BUILT_IN, "tests.objectives.custom_objectives.Bounded"):
        for argument in inspect.signature(objective_class(name)).parameters.values():
            if (bounds := find_bounds(argument.annotation)) is None:
                continue
            for sign, limit in bounds.limits:
                value = {">=": limit - 1, ">": limit, "<=": limit + 1, "<": limit}[sign]
                is_pair = "tuple" in str(argument.annotation)
                cases.append((name, argument.name, [value, value] if is_pair else value))
    return cases


@pytest.mark.parametrize(("name", "argument", "value"), outside())
def test_arguments_out_of_bounds_are_refused(
    name: str, argument: str, value: Any, tiny: Callable[..., PretrainConfig]
) -> None:
    args = {**REQUIRED.get(name, {}), argument: value}
    with pytest.raises(ConfigError, match=rf"^objective\.args\.{argument} must be [<>].*, got "):
        make_objective(name, args, Setting(tiny(), 36, 4))
