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
from hypothesis import given
from hypothesis import strategies as st
from tests.fuzz.profile import fuzzed

from cribo.base.errors import ConfigError
from cribo.pretraining.config import PretrainConfig
from cribo.pretraining.loading import ConfigParser, config_from, dump_config, load_config

FUZZED = fuzzed(10)

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


@pytest.fixture(scope="module")
def parser() -> ConfigParser:
    made = ConfigParser()
    made.add_class_arguments(PretrainConfig)
    return made


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


PIECES = [
    *("optim", "data", "lr", "1", ":", " ", "\n", "\t", "&a ", "*a", "- ", "{", "}", "[", "]", "? ", "<<", "|", ">"),
    *("'", '"', "#", "!", "%", "@", "`", "---", "...", "!!python/name:os.system "),
]


@FUZZED
@given(
    content=st.one_of(
        st.binary(max_size=100), st.text(max_size=100), st.lists(st.sampled_from(PIECES), max_size=40).map("".join)
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
def test_any_words(parser: ConfigParser, name: str, value: str, joined: bool) -> None:
    try:
        config_from(parser.parse_args([f"--{name}={value}"] if joined else [f"--{name}", value]))
    except ConfigError as error:
        assert str(error).strip()  # noqa: PT017


@pytest.mark.parametrize(
    "words",
    [
        *(["--config"], ["--config="], ["--config", ""], ["--config", "\0"], ["--config", "/dev/null"]),
        *(["--config", "."], ["--config", "x" * 5000], ["--config", "a\nb"], ["--optim", "{"], ["--optim", "[1"]),
        *(["--backbone.args", "&a [*a]"], ["--", "x"], ["x"], ["-x"], ["---"], ["--=1"], ["--optim.lr"]),
        *(["--optim.lr", "--optim.epochs"], ["--data", "null"], ["--optim.lr+=1"], ["--backbone.args.x.y.z=1"]),
        *(["--optim.betas=(1,"], ["--data.__class__=1"], ["--optim.__init__=1"]),
    ],
)
def test_invalid_arguments(parser: ConfigParser, words: list[str]) -> None:
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


FORMS = (
    "!!python/object/apply:os.mkdir ['{path}']",
    "!!python/object/new:os.mkdir ['{path}']",
    "!!python/object/apply:os.mkdir {{args: ['{path}']}}",
    "!!python/name:os.mkdir",
    "!!python/module:os",
    "!!python/object:pathlib.Path {{}}",
    "{{class_path: pathlib.Path.mkdir, init_args: {{self: '{path}'}}}}",
    "!!binary {pickled}",
    "${{oc.env:HOME}}",
)
MEANINGFUL = FORMS[-3:-1]
"""Forms whose meaning could depend on their place; the tags of Python are read, or not, before places differ."""


def filled(form: str, made: Path) -> str:
    """Return a value that would create a folder if it were executed."""
    return form.format(path=made, pickled=base64.b64encode(pickle.dumps(Payload(made))).decode())


PLACES = (
    "{value}",
    "optim: {value}",
    "optim: {{lr: {value}}}",
    "backbone: {{args: {value}}}",
    "backbone: {{args: {{x: {value}}}}}",
    "objective: {{name: {value}}}",
    "objective: {{args: {{x: {value}}}}}",
    "data: {{root: {value}}}",
    "{value}: 1",
)


@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_executed_in_files(tmp_path: Path, form: str) -> None:
    for place in PLACES if form in MEANINGFUL else PLACES[3:5]:
        assert_accepted_or_refused(tmp_path / "x.yaml", place.format(value=filled(form, tmp_path / "made")))
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_executed_in_options(parser: ConfigParser, tmp_path: Path, form: str) -> None:
    names = ("optim.lr", "backbone.args", "optim", "objective.name", "objective.args", "data.root")
    for name in names if form in MEANINGFUL else names[:2]:
        with contextlib.suppress(ConfigError):
            config_from(parser.parse_args([f"--{name}={filled(form, tmp_path / 'made')}"]))
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("place", [*PLACES[:2], *PLACES[4:], "x: {value}"])
def test_aliases_of_aliases_do_not_multiply(tmp_path: Path, place: str) -> None:
    lines = ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    assert assert_accepted_or_refused(tmp_path / "x.yaml", "\n".join([*lines, place.format(value="*a11")])) is None


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "a:\n"])
def test_unlimited_nesting(tmp_path: Path, opening: str) -> None:
    assert assert_accepted_or_refused(tmp_path / "x.yaml", "backbone: {args: {x: " + opening * 1500) is None


@pytest.mark.parametrize(
    "text",
    [
        "backbone: {args: {x: " + "[" * 1500 + "]" * 1500 + "}}",
        *("&a {x: *a}", "backbone: {args: &a {x: *a}}", "optim: &a [*a]", "data: {root: &a [*a]}"),
    ],
    ids=["deep", "itself", "arguments", "group", "value"],
)
def test_nested_and_recursive_values_are_refused(tmp_path: Path, text: str) -> None:
    assert assert_accepted_or_refused(tmp_path / "x.yaml", text) is None
