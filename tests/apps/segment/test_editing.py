import unicodedata
from pathlib import Path

import pytest
import torch
from tests.features.memory.coded import EXACT, PERFECT, blocks, image_of

from cribo.apps.segment.editing import list_examples, remove_examples
from cribo.base.errors import DataError, InputError
from cribo.cli import main
from cribo.features.memory import Example, SegmentationMemory

MAPS = {
    "a.bmp": blocks([0, 1, 0], [2, 2, 0]),
    "b.bmp": blocks([3, 3, 3], [1, 255, 3]),
    "c.bmp": blocks([0, 1, 2], [3, 0, 2]),
}


def examples(names: str) -> list[Example]:
    return [Example(image_of(MAPS[f"{name}.bmp"]), MAPS[f"{name}.bmp"], f"{name}.bmp") for name in names]


def memory_of(names: str) -> SegmentationMemory:
    memory = SegmentationMemory(PERFECT, classes=["road", "sky", "car", "tree"], settings=EXACT, device="cpu")
    memory.extend(examples(names))
    return memory


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    memory = memory_of("abc")
    memory.fit()
    memory.save(tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def test_examples_are_listed_without_the_backbone(saved: Path) -> None:
    memory = SegmentationMemory.load(saved, None)
    listed = list_examples(memory)
    assert [(each.number, each.name) for each in listed] == [(1, "a.bmp"), (2, "b.bmp"), (3, "c.bmp")]
    assert list(listed[0].shares.items()) == [
        ("road", 0.5),
        ("car", pytest.approx(1 / 3)),
        ("sky", pytest.approx(1 / 6)),
    ]
    assert listed[1].shares == pytest.approx({"tree": 0.8, "sky": 0.2})  # pixels without class do not count
    # Features are the classes, and each class of c occurs in another example.
    assert listed[2].correct == 1
    with pytest.raises(InputError, match="opened without its backbone"):
        memory.segment(image_of(MAPS["a.bmp"]))


@pytest.mark.parametrize("word", ["b.bmp", "2"])
def test_removing_an_example_equals_never_adding_it(saved: Path, word: str) -> None:
    left = remove_examples(saved, [word])
    assert left.names == ["a.bmp", "c.bmp"]
    read, fresh = SegmentationMemory.load(saved, PERFECT), memory_of("ac")
    assert read.fingerprint == fresh.fingerprint
    assert read.fit() == fresh.fit()
    image = image_of(blocks([3, 1], [2, 0]))
    assert torch.equal(read.segment(image).confidence, fresh.segment(image).confidence)
    assert read.extend(examples("b")) == 1  # same backbone, so examples can be added


def test_examples_are_named_in_any_unicode_form(tmp_path: Path) -> None:
    memory = SegmentationMemory(PERFECT, classes=["road", "sky", "car", "tree"], settings=EXACT, device="cpu")
    composed, decomposed = (unicodedata.normalize(form, "é.bmp") for form in ("NFC", "NFD"))
    memory.extend([*examples("ab"), Example(image_of(MAPS["c.bmp"]), MAPS["c.bmp"], decomposed)])
    memory.fit()
    memory.save(tmp_path / "m.safetensors")
    assert remove_examples(tmp_path / "m.safetensors", [composed]).names == ["a.bmp", "b.bmp"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["d.bmp"], "no example is named d.bmp, and numbers are 1 to 3"),
        (["a.bmp", "4"], "no example is named 4, and numbers are 1 to 3"),
        (["a.bmp", "b.bmp", "3"], "cannot remove all 3 examples of the memory"),
    ],
)
def test_an_invalid_removal_leaves_the_memory_unchanged(saved: Path, words: list[str], message: str) -> None:
    before = saved.read_bytes()
    with pytest.raises(DataError, match=message):
        remove_examples(saved, words)
    assert saved.read_bytes() == before


def test_an_ambiguous_name_is_rejected_and_its_number_accepted(tmp_path: Path) -> None:
    memory = memory_of("ab")
    memory.add(image_of(MAPS["c.bmp"]), MAPS["c.bmp"], name="a.bmp")
    memory.save(tmp_path / "m")
    with pytest.raises(DataError, match=r"2 examples are named a\.bmp: give one of the numbers 1, 3 \(see"):
        remove_examples(tmp_path / "m", ["a.bmp"])
    assert remove_examples(tmp_path / "m", ["3"]).names == ["a.bmp", "b.bmp"]


def test_the_command_lists_and_removes(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["segment", "--memory", str(saved), "--list"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in ("a.bmp", "b.bmp", "c.bmp", "memory: 3 examples"))
    assert main(["segment", "--memory", str(saved), "--remove", "c.bmp", "1"]) == 0
    said = capsys.readouterr().out
    assert "b.bmp" in said
    assert "a.bmp" not in said
    assert main(["segment", "--list"]) == 2


def test_a_memory_with_more_than_ten_measured_classes_is_read(tmp_path: Path) -> None:
    rows = [list(range(6)), list(range(6, 12))]
    memory = SegmentationMemory(PERFECT, settings=EXACT, device="cpu")
    for blue in (100, 200):
        memory.add(image_of(blocks(*rows), blue), blocks(*rows))
    assert len(memory.fit().per_class) == 12
    memory.save(tmp_path / "m")
    assert SegmentationMemory.load(tmp_path / "m", PERFECT).fit() == memory.fit()
