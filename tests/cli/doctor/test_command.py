import json
import re
from pathlib import Path

import pytest
import torch

from cribo.base.packages import install_command
from cribo.cli import main
from cribo.cli.doctor.packages import USES
from cribo.cli.doctor.speed import Speed

FAST = Speed("cpu", "32-true", 256, 0.5, 2.0, 0.6, 0.1, 0.3, 0.25, seconds=12.3)


@pytest.fixture(autouse=True)
def no_imports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Optional packages are not imported, which takes long; they have their own tests."""
    monkeypatch.setattr("cribo.cli.doctor.packages.broken_modules", lambda names: ({}, []))
    monkeypatch.chdir(tmp_path)


def test_facts_speed_and_problems_are_printed_in_eighty_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = Speed("cpu", "32-true", segment_image=0.25, failures={"pretrain": "MemoryError: " + 30 * "no memory "})
    for speed in (FAST, slow):
        monkeypatch.setattr("cribo.cli.doctor.speed.measure_speed", lambda *_, speed=speed: speed)
        assert main(["doctor"]) == 0
        shown, problems = re.split(r"\n(?=problems:|no problems found)", capsys.readouterr().out)
        assert max(len(line) for line in shown.splitlines() if not line.startswith("to install")) == 80
        assert ("could not be measured: MemoryError" in problems) == (speed is slow)
        for text in ("Software", "Optional packages", "4 images/s", "Speed on cpu, training in 32-true"):
            assert text in shown
    assert not list(Path().iterdir())


def test_json_contains_the_same_facts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cribo.cli.doctor.speed.measure_speed", lambda *_: FAST)
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["speed"]["segment_image"] == 0.25
    assert found["Software"]["python"]
    assert isinstance(found["problems"], list)
    assert main(["doctor", "--json", "--no_speed"]) == 0
    assert json.loads(capsys.readouterr().out)["speed"] is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_device_that_cannot_be_used_is_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "cuda", "--json"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "'cuda' cannot be used" in shown.err


def test_a_missing_extra_is_printed_with_its_use_and_its_installation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.requires", lambda package: ["no-such-package>=2; extra == 'lora'"])
    assert main(["doctor", "--no_speed"]) == 0
    shown = capsys.readouterr().out
    assert f"missing: no-such-package; for {USES['lora']}" in " ".join(shown.replace("│", " ").split())
    assert f"\nto install one of them, such as lora: {install_command('lora')}\n" in shown
