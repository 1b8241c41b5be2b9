"""Errors of commands: one line for user errors, a traceback for others."""

import errno
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cribo.base.errors import InputError, MissingPackage
from cribo.base.files import require
from cribo.base.job import Job
from cribo.base.versions import project_url
from cribo.cli import main
from cribo.cli.command import Call, Command
from cribo.cli.running import run_command
from cribo.data.channels import DIM_IMAGES
from cribo.data.sources.images import open_images
from cribo.features import PCAColours
from cribo.models import build_backbone, save_backbone


def command_of(command: Callable[[], object]) -> Command:
    def call_it(call: Call) -> None:
        command()

    return Command(help="", usage="", less_memory="lower --size", add_options=lambda parser: None, run=call_it)


def run(command: Callable[[], object], *words: str) -> int:
    return run_command("test", command_of(command), list(words))


def missing() -> None:
    require(Path("/nowhere/images"))


def colours_of_nothing() -> None:
    PCAColours([])


def full_disk() -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [(missing, 2, "nowhere"), (colours_of_nothing, 2, "cribo test: "), (full_disk, 1, "No space left on device")],
)
def test_user_errors_are_printed_on_one_line(
    command: Callable[[], object], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command) == status
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert run(command, "--debug") == status
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def of_python() -> None:
    json.loads("{")


def of_a_library_in_our_code() -> None:
    Job(Path("a\0b"), "search")


def of_a_users_own_code() -> None:
    raise ValueError("in a user's module")


@pytest.mark.parametrize("command", [of_python, of_a_library_in_our_code, of_a_users_own_code])
def test_internal_errors_keep_their_traceback_and_ask_for_a_report(command: Callable[[], object]) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        run(command)
    (note,) = raised.value.__notes__
    assert "please report it" in note
    assert note.endswith("the output of cribo doctor")


def test_a_crash_of_the_doctor_does_not_ask_for_its_output() -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        run_command("doctor", command_of(of_a_users_own_code), [])
    assert raised.value.__notes__[0].endswith("with the lines above")


def test_a_request_for_a_report_gives_the_projects_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "cribo_ssl-9.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(
        "Metadata-Version: 2.4\nName: cribo-ssl\nVersion: 9.0\n"
        "Project-URL: Homepage, https://project.example\nProject-URL: Issues, https://project.example/issues\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert project_url("Issues") == "https://project.example/issues"
    assert project_url("Funding") is None
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        run(of_a_users_own_code)
    assert "please report it at https://project.example/issues with" in raised.value.__notes__[0]


def too_large_for_the_processor() -> None:
    torch.empty(2**55)


def too_large_for_python() -> None:
    raise MemoryError


def no_memory_for_a_library() -> None:
    try:
        raise ImportError("liblance.so: failed to map segment from shared object")
    except ImportError as error:
        raise MissingPackage("object search needs Lance") from error


def no_memory_for_a_process() -> None:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def no_memory_while_reading() -> None:
    try:
        too_large_for_python()
    except MemoryError as error:
        raise InputError("the file is damaged") from error


@pytest.mark.parametrize(
    "command",
    [
        too_large_for_the_processor,
        too_large_for_python,
        no_memory_for_a_library,
        no_memory_for_a_process,
        no_memory_while_reading,
    ],
)
def test_out_of_memory_on_the_processor_gets_advice(
    command: Callable[[], object], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command) == 1
    assert capsys.readouterr().err.endswith(": lower --size\n")


@contextmanager
def small_files(limit: int) -> Iterator[None]:
    """Let no file grow beyond a limit in bytes: writing fails as on a full disk, with another number."""
    resource = pytest.importorskip("resource")
    before, bytecode = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # Python would leave files that are cut off
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = bytecode


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(2):
        pixels = np.random.default_rng(number).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


@pytest.mark.parametrize("command", ["timm", "transformers", "torch-export", "parquet", "numpy", "safetensors"])
def test_a_full_disk_is_reported_with_the_path(
    command: str, tmp_path: Path, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = ["embed", str(pictures), "--backbone", "mean-colour", "--features", "patches", "--workers", "1"]
    words += ["--device", "cpu", "--format", command]
    if command in ("timm", "transformers", "torch-export"):
        small = {"depth": 1, "embed_dim": 48, "num_heads": 2}
        save_backbone(build_backbone("vit_tiny_patch16_224", args=small, image_size=64), tmp_path / "network")
        words = ["export", "--backbone", str(tmp_path / "network"), "--to", command]
    with small_files(8000):
        assert main([*words, "--out", str(out)]) == 1
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("cribo ")]
    assert os.strerror(errno.EFBIG) in line
    assert str(out) in line
    assert "--resume" in line
    assert not list(tmp_path.rglob("*.part"))


def test_names_in_errors_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise InputError("no image \x1b[2J" + "caf\udce9.jpg")

    assert run(fail) == 2
    error = capsys.readouterr().err
    assert "\x1b" not in error
    assert r"no image \x1b[2Jcaf\udce9.jpg" in error


def test_dark_images_are_reported_in_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(3):
        Image.fromarray(np.full((4, 4), 10_000, np.uint16)).save(tmp_path / f"{number}.png")

    def read() -> None:
        images = open_images(tmp_path)
        for index in range(3):
            images.load(index)

    DIM_IMAGES.take()
    assert run(read) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.count("--range LOW,HIGH") == 1
    assert "3 images" in text
