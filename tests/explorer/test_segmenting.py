import numpy as np
import pytest
import torch
from PIL import Image
from tests.explorer.conftest import COLOURS, draw_square, encoded

from cribo.explorer import segmenting
from cribo.explorer.network import SharedEncoder
from cribo.explorer.segmenting import BRUSHES, Visitors, add_example, example_of, memory_sentence, segment
from cribo.explorer.uploads import Refused
from cribo.retrieval import mean_colour_encoder


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


def test_painted_pixels_are_of_their_brush_and_others_of_none() -> None:
    painted = layer(("green", (0, 0, 10, 96)), ("cyan", (20, 0, 30, 96)))
    _, labels = example_of(as_tensor(draw_square(COLOURS["red"], (0, 0))), painted, max_pixels=10**6)
    assert labels[50, 5] == list(BRUSHES).index("green")
    assert labels[50, 25] == list(BRUSHES).index("cyan")
    assert labels[50, 60] == 255


def test_soft_edges_of_strokes_are_of_the_brush_or_of_none() -> None:
    soft = Image.new("RGBA", (96, 96), (*BRUSHES["blue"], 100))
    soft.paste((10, 120, 190, 200), (0, 0, 48, 96))
    _, labels = example_of(as_tensor(draw_square(COLOURS["red"], (0, 0))), encoded(soft), max_pixels=10**6)
    assert set(labels[:, :48].flatten().tolist()) == {list(BRUSHES).index("blue")}
    assert set(labels[:, 48:].flatten().tolist()) == {255}


def test_large_examples_become_smaller_with_their_labels() -> None:
    image = torch.zeros(3, 1536, 1536, dtype=torch.uint8)
    small, labels = example_of(image, layer(("red", (0, 0, 768, 1536)), size=1536), max_pixels=10**7)
    assert small.shape[1:] == labels.shape == (768, 768)
    assert (labels != 255).float().mean() == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(
    ("painted", "said"),
    [
        (layer(), "Nothing is painted yet"),
        (layer(("red", (0, 0, 9, 9)), size=64), "The painting has 64 x 64 pixels and its picture 96 x 96"),
        (layer(("red", (0, 0, 9, 9)), size=200), "The painting cannot be used"),
        (b"no image", "The painting cannot be used"),
    ],
)
def test_paintings_that_cannot_be_used(painted: bytes, said: str) -> None:
    with pytest.raises(Refused, match=said):
        example_of(as_tensor(draw_square(COLOURS["red"], (0, 0))), painted, max_pixels=20_000)


def test_a_square_is_found_where_it_is_in_another_picture(visitors: Visitors) -> None:
    memory = visitors.memory("a")
    assert memory_sentence(memory) == "No examples yet."
    areas = ("magenta", (4, 4, 44, 44)), ("yellow", (60, 60, 90, 90))
    add_example(memory, *example_of(as_tensor(draw_square(COLOURS["red"], (0, 0))), layer(*areas), max_pixels=10**6))
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
    add_example(memory, *example_of(as_tensor(draw_square(COLOURS["red"], (9, 0))), layer(*areas), max_pixels=10**6))
    assert "yellow, magenta. Expected mIoU on new pictures: " in memory_sentence(memory)


def test_memories_are_each_visitors_own_and_bounded(visitors: Visitors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segmenting, "_MOST_VISITORS", 3)
    monkeypatch.setattr(segmenting, "_MOST_EXAMPLES", 2)
    first = visitors.memory("first")
    for shade in (0, 90):
        picture = Image.fromarray(np.full((96, 96, 3), shade, np.uint8))
        add_example(first, *example_of(as_tensor(picture), layer(("red", (0, 0, 96, 96))), max_pixels=10**6))
    with pytest.raises(Refused, match=r"The memory is full \(2 examples\): start over"):
        add_example(first, torch.zeros(3, 96, 96, dtype=torch.uint8), torch.zeros(96, 96, dtype=torch.uint8))
    assert "Paint another class, too" in memory_sentence(first)
    assert visitors.memory("first") is first
    assert len(visitors.memory("second")) == 0
    for name in ("third", "first", "fourth"):
        visitors.memory(name)
    assert len(visitors) == 3
    assert visitors.memory("first") is first  # it was asked for after the second
    visitors.forget("first")
    assert len(visitors.memory("first")) == 0
    with pytest.raises(Refused, match="There are no examples yet"):
        segment(visitors.memory("first"), torch.zeros(3, 96, 96, dtype=torch.uint8), [])
