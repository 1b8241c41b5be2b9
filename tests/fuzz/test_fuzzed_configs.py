"""Untrusted configurations, in files and options: a configuration or a clear error; no code is executed."""

import base64
import contextlib
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cribo.base.errors import ConfigError
from cribo.pretraining.config import PretrainConfig
from cribo.pretraining.loading import ConfigParser, config_from, dump_config, load_config

FUZZED = settings(
    max_examples=settings().max_examples // 10,
    derandomize=settings().max_examples <= 100,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)

NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.sampled_from([0, -1, 10**400, 1e308, -0.0, float("nan"), float("inf")]),
)
VALUES = st.recursive(
    st.one_of(NUMBERS, st.booleans(), st.none(), st.text(max_size=12), st.dates(), st.binary(max_size=6)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.one_of(st.text(max_size=8), st.integers()), inner, max_size=4)
    ),
    max_leaves=8,
)


def names(values: dict[str, Any], prefix: str = "") -> list[str]:
    """Return the dotted names of all values and groups."""
    found: list[str] = []
    for key, value in values.items():
        found.append(prefix + key)
        if isinstance(value, dict):
            found += names(value, f"{prefix}{key}.")
    return found


WHOLE: dict[str, Any] = yaml.safe_load(dump_config(PretrainConfig()))
NAMES = names(WHOLE)


def assert_accepted_or_refused(path: Path, content: str | bytes) -> PretrainConfig | None:
    path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
    try:
        config = load_config(path)
    except ConfigError as error:
        assert str(error).strip()  # noqa: PT017
        return None
    assert isinstance(config, PretrainConfig)
    return config


@FUZZED
@given(name=st.sampled_from(NAMES), value=VALUES)
def test_any_value_in_any_place(tmp_path: Path, name: str, value: Any) -> None:
    changed = json.loads(json.dumps(WHOLE))
    inside = changed
    *above, last = name.split(".")
    for part in above:
        inside = inside[part]
    inside[last] = value
    assert_accepted_or_refused(tmp_path / "x.yaml", yaml.safe_dump(changed, allow_unicode=True))


@FUZZED
@given(value=VALUES)
def test_any_document(tmp_path: Path, value: Any) -> None:
    assert_accepted_or_refused(tmp_path / "x.yaml", yaml.safe_dump(value, allow_unicode=True))


@FUZZED
@given(
    content=st.one_of(
        st.binary(max_size=100),
        st.text(max_size=100),
        st.lists(
            st.sampled_from(
                [
                    "optim",
                    "data",
                    ":",
                    " ",
                    "\n",
                    "&a ",
                    "*a",
                    "- ",
                    "{",
                    "}",
                    "[",
                    "]",
                    "!!python/name:os.system ",
                    "? ",
                    "<<",
                    "|",
                    ">",
                    "'",
                    '"',
                    "#",
                    "!",
                    "%",
                    "@",
                    "`",
                    "\t",
                    "1",
                    "lr",
                    "---",
                    "...",
                ]
            ),
            max_size=40,
        ).map("".join),
    )
)
def test_any_text(tmp_path: Path, content: str | bytes) -> None:
    assert_accepted_or_refused(tmp_path / "x.yaml", content)


@FUZZED
@given(
    name=st.sampled_from(NAMES),
    value=st.one_of(st.text(max_size=20), VALUES.map(str), VALUES.map(lambda v: yaml.safe_dump(v))),
    joined=st.booleans(),
)
def test_any_words(name: str, value: str, joined: bool) -> None:
    parser = ConfigParser()
    parser.add_class_arguments(PretrainConfig)
    try:
        config_from(parser.parse_args([f"--{name}={value}"] if joined else [f"--{name}", value]))
    except ConfigError as error:
        assert str(error).strip()  # noqa: PT017


@pytest.mark.parametrize(
    "words",
    [
        ["--config"],
        ["--config="],
        ["--config", ""],
        ["--config", "\0"],
        ["--config", "/dev/null"],
        ["--config", "."],
        ["--config", "x" * 5000],
        ["--config", "a\nb"],
        ["--optim", "{"],
        ["--optim", "[1"],
        ["--backbone.args", "&a [*a]"],
        ["--", "x"],
        ["x"],
        ["-x"],
        ["--optim.lr"],
        ["--optim.lr", "--optim.epochs"],
        ["--data", "null"],
        ["--optim.lr+=1"],
        ["--backbone.args.x.y.z=1"],
        ["--optim.betas=(1,"],
        ["---"],
        ["--=1"],
        ["--data.__class__=1"],
        ["--optim.__init__=1"],
    ],
)
def test_invalid_arguments(words: list[str]) -> None:
    parser = ConfigParser()
    parser.add_class_arguments(PretrainConfig)
    try:
        config_from(parser.parse_args(words))
    except ConfigError as error:
        assert str(error).strip()  # noqa: PT017


class Payload:
    """Creates a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


FORMS = pytest.mark.parametrize(
    "form",
    [
        "!!python/object/apply:os.mkdir ['{path}']",
        "!!python/object/new:os.mkdir ['{path}']",
        "!!python/object/apply:os.mkdir {{args: ['{path}']}}",
        "!!python/name:os.mkdir",
        "!!python/module:os",
        "!!python/object:pathlib.Path {{}}",
        "{{class_path: pathlib.Path.mkdir, init_args: {{self: '{path}'}}}}",
        "!!binary {pickled}",
        "${{oc.env:HOME}}",
    ],
)


def filled(form: str, made: Path) -> str:
    """Return a value that would create a folder if it were executed."""
    return form.format(path=made, pickled=base64.b64encode(pickle.dumps(Payload(made))).decode())


@FORMS
@pytest.mark.parametrize(
    "place",
    [
        "{value}",
        "optim: {value}",
        "optim: {{lr: {value}}}",
        "backbone: {{args: {value}}}",
        "backbone: {{args: {{x: {value}}}}}",
        "objective: {{name: {value}}}",
        "objective: {{args: {{x: {value}}}}}",
        "data: {{root: {value}}}",
        "{value}: 1",
    ],
)
def test_nothing_is_executed_in_files(tmp_path: Path, form: str, place: str) -> None:
    made = tmp_path / "made"
    assert_accepted_or_refused(tmp_path / "x.yaml", place.format(value=filled(form, made)))
    assert not made.exists()


@FORMS
def test_nothing_is_executed_in_options(tmp_path: Path, form: str) -> None:
    made = tmp_path / "made"
    parser = ConfigParser()
    parser.add_class_arguments(PretrainConfig)
    for name in ("optim", "optim.lr", "backbone.args", "objective.name", "objective.args", "data.root"):
        with contextlib.suppress(ConfigError):
            config_from(parser.parse_args([f"--{name}={filled(form, made)}"]))
    assert not made.exists()


@pytest.mark.parametrize(
    "name",
    [
        "backbone: {{args: {{x: {value}}}}}",
        "objective: {{args: {{x: {value}}}}}",
        "optim: {value}",
        "data: {{root: {value}}}",
        "x: {value}",
    ],
)
def test_aliases_of_aliases_do_not_multiply(tmp_path: Path, name: str) -> None:
    lines = ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    assert assert_accepted_or_refused(tmp_path / "x.yaml", "\n".join([*lines, name.format(value="*a11")])) is None


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "a:\n"])
def test_unlimited_nesting(tmp_path: Path, opening: str) -> None:
    assert assert_accepted_or_refused(tmp_path / "x.yaml", "backbone: {args: {x: " + opening * 1500) is None
    assert (
        assert_accepted_or_refused(tmp_path / "x.yaml", "backbone: {args: {x: " + "[" * 1500 + "]" * 1500 + "}}")
        is None
    )


def test_a_recursive_mapping(tmp_path: Path) -> None:
    for text in ("&a {x: *a}", "backbone: {args: &a {x: *a}}", "optim: &a [*a]", "data: {root: &a [*a]}"):
        assert assert_accepted_or_refused(tmp_path / "x.yaml", text) is None
