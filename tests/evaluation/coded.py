"""Labelled images with exactly known features."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from cribo.data import colour_map
from cribo.features import Encoder


@dataclass
class Coded:
    """Labelled images whose red channel is the class of each pixel times 20, with some pixels without class."""

    maps: list[torch.Tensor]
    classes: tuple[str, ...] = ("a", "b", "c", "d")
    ignore_index: int = 255

    @property
    def palette(self) -> list[tuple[int, int, int]]:
        return colour_map(len(self.classes))

    def __len__(self) -> int:
        return len(self.maps)

    def load(self, index: int) -> torch.Tensor:
        labels = self.maps[index]
        red = torch.where(labels == 255, 7, labels * 20)
        return torch.stack((red, torch.full_like(red, 3), torch.full_like(red, 200))).to(torch.uint8)

    def labels(self, index: int) -> torch.Tensor:
        return self.maps[index].to(torch.uint8)

    def name(self, index: int) -> str:
        return f"{index}"


def blocks(*rows: list[int], side: int = 4) -> torch.Tensor:
    """Return a label map with one class per patch."""
    return torch.tensor(rows).repeat_interleave(side, 0).repeat_interleave(side, 1)


def random_maps(count: int, seed: int, ignored: float = 0.2) -> list[torch.Tensor]:
    """Return label maps of 5 x 6 patches of 4 pixels."""
    generator = torch.Generator().manual_seed(seed)
    maps = []
    for _ in range(count):
        cells = torch.randint(0, 4, (5, 6), generator=generator)
        cells[torch.rand((5, 6), generator=generator) < ignored] = 255
        maps.append(blocks(*cells.tolist()))
    return maps


def one_hot_of_red(images: torch.Tensor) -> torch.Tensor:
    """Return perfect features: the class, from the mean red of a patch."""
    red = F.avg_pool2d(images[:, :1] * 255, 4).flatten(2)[:, 0]
    return F.one_hot((red / 20).round().long(), 16).float()


PERFECT = Encoder.from_function(one_hot_of_red, 4, identity="one-hot")
