"""Labelled images with one colour per class, and small networks."""

from dataclasses import dataclass

import torch
from torch.utils.data import default_collate

from cribo.data import colour_map
from cribo.data.labelled.crops import Crops, WholeImages
from cribo.evaluation.segmentation.training import SegmentationModule
from cribo.models import Backbone, build_backbone

SIDE = 64  # of the squares of one class: four patches


@dataclass
class Squares:
    """Images of squares, each with the colour of its class."""

    count: int = 4
    rows: int = 2
    columns: int = 3
    seed: int = 0
    classes: tuple[str, ...] = ("black", "red", "green", "blue")
    ignore_index: int = 255

    @property
    def palette(self) -> list[tuple[int, int, int]]:
        return colour_map(len(self.classes))

    def __len__(self) -> int:
        return self.count

    def name(self, index: int) -> str:
        return f"squares-{index}"

    def labels(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * self.seed + index)
        cells = torch.randint(0, len(self.classes), (self.rows, self.columns), generator=generator)
        return cells.repeat_interleave(SIDE, 0).repeat_interleave(SIDE, 1).to(torch.uint8)

    def load(self, index: int) -> torch.Tensor:
        colours = 140 * torch.nn.functional.one_hot(torch.arange(4), 4)[:, 1:] + 60
        return colours[self.labels(index).long()].permute(2, 0, 1).to(torch.uint8)


def tiny_vit(depth: int = 2, seed: int = 0) -> Backbone:
    """Build a small vision transformer with patches of 16 pixels."""
    return build_backbone(
        "vit_tiny_patch16_224", args={"depth": depth, "embed_dim": 32, "num_heads": 2}, image_size=32, seed=seed
    )


def train(module: SegmentationModule, crops: Crops, *, steps: int, batch_size: int) -> None:
    """Train like Lightning on one device: batches of keys in order."""
    optimisers = module.configure_optimizers()
    optimizer, schedule = optimisers["optimizer"], optimisers["lr_scheduler"]["scheduler"]
    module.train()
    for step in range(steps):
        keys = [divmod(step * batch_size + place, len(crops)) for place in range(batch_size)]
        loss = module.training_step(default_collate([crops[key] for key in keys]), step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def score(module: SegmentationModule, images: WholeImages) -> list[float]:
    """Return the mIoU of each head."""
    module.eval()
    for index in range(len(images)):
        module.validation_step(default_collate([images[index]]), index)
    module.on_validation_epoch_end()
    return module.mious()
