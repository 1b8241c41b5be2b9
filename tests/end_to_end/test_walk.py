"""The walk of a new user through the README's commands, on terminals of 80 and 120 columns: what is printed is read."""

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image

from cribo.cli import main
from cribo.data.scenes import Scenes
from cribo.pretraining.loading import dump_config

if TYPE_CHECKING:
    from cribo.pretraining import PretrainConfig

WIDTHS = (80, pytest.param(120, marks=pytest.mark.endurance))

BAR = re.compile(r".+ [━╸╺]+ +\d+/\d+ +\d+:\d\d:\d\d ETA (\d+:\d\d:\d\d|-:--:--)( .*)?")
"""A whole line of progress: bar, count, time and ETA; only what follows may be cut."""

UNREADABLE = re.compile(
    r"Traceback|WARN |ignored nothing|none of the 1 |\b1 (images|objects|examples|shards)\b(?!/)"
    r"| ints\b|or null|(?<!\[)\bNone\b|square root|/\.\./"
)
"""Texts that a user should not have to read."""


class Terminal:
    """Runs commands as on a terminal, and checks every line that they print.

    Args:
        width: number of columns.
        capsys: pytest's capture.
    """

    def __init__(self, width: int, capsys: pytest.CaptureFixture[str]) -> None:
        self.width = width
        self.capsys = capsys

    def __call__(self, command: str, *, status: int = 0) -> str:
        """Run a command, check what it prints, and return the text without styles and frames that were overwritten."""
        self.capsys.readouterr()
        assert main(command.split()) == status, self.capsys.readouterr().err
        printed = "".join(self.capsys.readouterr())
        lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", lambda code: "\n" if code[0][-1] in "KA\r" else "", printed)
        for line in map(str.rstrip, lines.splitlines()):
            if "ETA" in line and "━" in line:
                assert BAR.fullmatch(line), line
            if line.startswith(tuple("┏┃┡│└┗")) or "━" in line:
                assert len(line) <= self.width, line
            assert not UNREADABLE.search(line), line
        return lines


@pytest.fixture(params=WIDTHS)
def terminal(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Terminal:
    monkeypatch.setenv("COLUMNS", str(request.param))
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then writes to the capture as to a terminal
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal(request.param, capsys)


@pytest.fixture
def photographs(
    tmp_path: Path, tiny: "Callable[..., PretrainConfig]", monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """A working folder with photographs, three labelled examples, and the options of a short pretraining."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    scenes = Scenes(12, size=64)
    for folder in ("photographs/garden", "labelled/images", "labelled/labels"):
        Path(folder).mkdir(parents=True)
    for number in range(len(scenes)):
        image = Image.fromarray(scenes.load(number).permute(1, 2, 0).numpy())
        image.save(f"photographs/garden/{number}.jpg" if number > 2 else f"labelled/images/{number}.jpg")
        if number <= 2:
            Image.fromarray(scenes.labels(number).numpy()).save(f"labelled/labels/{number}.png")
    Path("labelled/classes.txt").write_text("\n".join(scenes.classes) + "\n")
    options: dict[str, Any] = {"score.root": "scenes", "score.images": (8, 4), "score.neighbours": 10}
    Path("tiny.yaml").write_text(dump_config(tiny(options)))
    yield
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.mark.usefixtures("photographs")
def test_everything_that_is_printed_can_be_read(terminal: Terminal) -> None:
    said = terminal("pretrain --config tiny.yaml --name mine")
    assert "mean intersection over union (mIoU)" in " ".join(said.split())
    backbone = "--backbone runs/mine"
    terminal(f"evaluate dense-nn {backbone} --data scenes --limit 20 --ratios 1 --out mine --cache none")
    terminal("evaluate dense-nn --backbone mean-colour --data scenes --limit 20 --ratios 1 --out colour --cache none")
    said = terminal("evaluate compare mine colour")
    segment = f"segment {backbone} --examples labelled --images photographs --out segmented"
    said = terminal(f"{segment} --suggest 2 --write coco,cvat")
    assert re.search(r"9 images in \d+:\d\d, of which labelling took \d+:\d\d", said)
    terminal(f"{segment} --resume")
    terminal(f"index {backbone} --images photographs --db photographs.db")
    said = terminal("index --db photographs.db")
    assert "9 unchanged" in said
    terminal("search --db photographs.db --image garden/5.jpg --object 0 --out found")
    terminal("search --db photographs.db --duplicates --min_similarity 0.2 --out pairs")
    terminal(f"embed photographs {backbone} --out features")
    terminal("figures --run runs/mine --only losses,schedules --format png")
    terminal(f"export {backbone} --to timm")
    terminal("shard photographs shards")
    terminal("profile --config tiny.yaml --steps 1 --warmup 2 --kept 2")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("segment --images photographs", "--backbone is required; usage: cribo segment"),
        ("pretrain --optim.epoch 3", "did you mean optim.epochs?"),
        ("segment --backbone mean-colour --examples labelled --images nowhere --out x", "there is no 'nowhere'"),
        ("search --db nowhere.db --image x", "there is no 'nowhere.db'"),
        ("adapt photographs --backbone mean-colour", "has no weights to adapt"),
    ],
)
@pytest.mark.usefixtures("photographs")
def test_errors_are_one_line(command: str, message: str, terminal: Terminal) -> None:
    assert message in terminal(command, status=2)
