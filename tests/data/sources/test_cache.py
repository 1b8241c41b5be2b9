import torch

from cribo.data.sources.cache import CachedImages


class _Counting:
    def __init__(self) -> None:
        self.loads: list[int] = []

    def __len__(self) -> int:
        return 3

    def name(self, index: int) -> str:
        return f"image-{index}"

    def load(self, index: int) -> torch.Tensor:
        self.loads.append(index)
        return torch.full((3, 2, 2), index, dtype=torch.uint8)


def test_an_image_is_loaded_once_within_the_limit():
    source = _Counting()
    images = CachedImages(source, limit_bytes=2 * 12)
    for index in (0, 1, 0, 1, 2, 2):
        assert (images.load(index) == index).all()
    assert source.loads == [0, 1, 2, 2]
    assert (len(images), images.name(1)) == (3, "image-1")
