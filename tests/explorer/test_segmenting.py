import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.explorer.conftest import COLOURS, draw_square, encoded

from cribo.explorer import segmenting
from cribo.explorer.network import SharedEncoder
from cribo.explorer.segmenting import BRUSHES, Visitors, example_of, memory_sentence, segment
from cribo.explorer.uploads import Refused
from cribo.retrieval import mean_colour_encoder
from cribo.segmentation import SegmentationMemory
from cribo.segmentation.examples import find_examples
from cribo.segmentation.inputs import open_labels


def as_tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def layer(*areas: tuple[str, tuple[int, int, int, int]], size: int = 96) -> bytes:
    image = Image.new("RGBA", (size, size))
    for brush, box in areas:
        image.paste((*BRUSHES[brush], 255), box)
    return encoded(image)


@pytest.fixture
def visitors() -> Visitors:
    return Visitors(SharedEncoder(mean_colour_encoder(16), "cpu"))


def test_painted_pixels_get_the_class_of_the_brush() -> None:
    painted = layer(("green", (0, 0, 10, 96)), ("cyan", (20, 0, 30, 96)))
    _, labels = example_of(as_tensor(draw_square(COLOURS["red"], (0, 0))), painted, max_pixels=10**6)
    assert labels[50, 5] == list(BRUSHES).index("green")
    assert labels[50, 25] == list(BRUSHES).index("cyan")
    assert labels[50, 60] == 255


def test_soft_edges_get_the_class_of_the_brush_or_are_ignored() -> None:
    soft = Image.new("RGBA", (96, 96), (*BRUSHES["blue"], 100))
    soft.paste((10, 120, 190, 200), (0, 0, 48, 96))
    _, labels = example_of(as_tensor(draw_square(COLOURS["red"], (0, 0))), encoded(soft), max_pixels=10**6)
    assert set(labels[:, :48].flatten().tolist()) == {list(BRUSHES).index("blue")}
    assert set(labels[:, 48:].flatten().tolist()) == {255}


def test_large_examples_are_reduced_with_their_labels() -> None:
    image = torch.zeros(3, 1536, 1536, dtype=torch.uint8)
    small, labels = example_of(image, layer(("red", (0, 0, 768, 1536)), size=1536), max_pixels=10**7)
    assert small.shape[1:] == labels.shape == (768, 768)
    assert (labels != 255).float().mean() == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(
    ("painted", "said"),
    [
        (layer(), "Nothing is painted yet"),
        (layer(("red", (0, 0, 9, 9)), size=64), "size of its picture, 96 x 96, got 64 x 64"),
        (layer(("red", (0, 0, 9, 9)), size=200), "The painting cannot be used"),
        (b"no image", "The painting cannot be used"),
    ],
)
def test_invalid_paintings_are_refused(painted: bytes, said: str) -> None:
    with pytest.raises(Refused, match=said):
        example_of(as_tensor(draw_square(COLOURS["red"], (0, 0))), painted, max_pixels=20_000)


def test_a_square_is_found_where_it_is_in_another_picture(visitors: Visitors) -> None:
    examples = visitors.examples("a")
    memory = examples.memory
    assert memory_sentence(memory) == "No examples yet."
    areas = ("magenta", (4, 4, 44, 44)), ("yellow", (60, 60, 90, 90))
    examples.add(*example_of(as_tensor(draw_square(COLOURS["red"], (0, 0))), layer(*areas), max_pixels=10**6))
    assert memory_sentence(memory).endswith("patches: yellow, magenta.")
    names = ["", "", "", "", "tomato", ""]
    found = segment(memory, as_tensor(draw_square(COLOURS["red"], (48, 32))), names)
    assert found.sentence.startswith("yellow 7")
    assert "tomato 2" in found.sentence
    side = found.overlay.shape[0]
    inside = found.overlay[int(0.75 * side), int(0.6 * side)].astype(int)
    outside = found.overlay[int(0.2 * side), int(0.2 * side)].astype(int)
    assert inside[2] > inside[1]  # magenta
    assert outside[1] > outside[2]  # yellow
    assert found.confidence.shape == found.overlay.shape
    examples.add(*example_of(as_tensor(draw_square(COLOURS["red"], (9, 0))), layer(*areas), max_pixels=10**6))
    assert "yellow, magenta. Expected mIoU on new pictures: " in memory_sentence(memory)


def test_downloaded_examples_can_be_read_by_cribo_segment(visitors: Visitors, tmp_path: Path) -> None:
    examples = visitors.examples("a")
    with pytest.raises(Refused, match="There are no examples yet"):
        examples.zipped([])
    picture = as_tensor(draw_square(COLOURS["red"], (0, 0)))
    for area in ((4, 4, 44, 44), (0, 0, 48, 48)):  # a correction
        painted = example_of(picture, layer(("magenta", area), ("yellow", (60, 60, 90, 90))), max_pixels=10**6)
        examples.add(*painted)
    with zipfile.ZipFile(io.BytesIO(examples.zipped(["", "", "", "", "tomato"]))) as archive:
        archive.extractall(tmp_path)
    found = find_examples(tmp_path / "examples")
    memory = SegmentationMemory("mean-colour", classes=found.classes, palette=found.palette)
    memory.extend([*found])
    assert memory.classes == ["red", "green", "blue", "yellow", "tomato", "cyan"]
    assert memory.palette == list(BRUSHES.values())
    assert memory.names == ["01.png"]
    assert torch.equal(open_labels(tmp_path / "examples" / "labels" / "01.png").labels, painted[1])


def test_examples_of_all_visitors_together_are_bounded(visitors: Visitors, monkeypatch: pytest.MonkeyPatch) -> None:
    painted = example_of(
        as_tensor(draw_square(COLOURS["red"], (0, 0))), layer(("red", (0, 0, 96, 96))), max_pixels=10**6
    )
    for name in "abc":
        visitors.examples(name).add(*painted)
    monkeypatch.setattr(segmenting, "_MOST_BYTES", 2 * visitors.examples("c").nbytes)
    visitors.examples("c")
    assert [name in visitors for name in "abc"] == [False, True, True]


def test_memories_are_separate_per_visitor_and_bounded(visitors: Visitors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segmenting, "_MOST_VISITORS", 3)
    monkeypatch.setattr(segmenting, "_MOST_EXAMPLES", 2)
    first = visitors.examples("first")
    for shade in (0, 90):
        picture = Image.fromarray(np.full((96, 96, 3), shade, np.uint8))
        first.add(*example_of(as_tensor(picture), layer(("red", (0, 0, 96, 96))), max_pixels=10**6))
    with pytest.raises(Refused, match=r"The memory is full \(2 examples\): start over"):
        first.add(torch.zeros(3, 96, 96, dtype=torch.uint8), torch.zeros(96, 96, dtype=torch.uint8))
    assert "Paint a second class" in memory_sentence(first.memory)
    assert visitors.examples("first") is first
    assert len(visitors.examples("second").memory) == 0
    for name in ("third", "first", "fourth"):
        visitors.examples(name)
    assert len(visitors) == 3
    assert visitors.examples("first") is first  # it was used after the second
    visitors.forget("first")
    assert len(visitors.examples("first").memory) == 0
    with pytest.raises(Refused, match="There are no examples yet"):
        segment(visitors.examples("first").memory, torch.zeros(3, 96, 96, dtype=torch.uint8), [])
