"""Throughput from files to batches of views on one core, compared with a pipeline of PIL images.

    uv run python -m benchmarks.input                              # synthetic photographs, about five minutes
    uv run python -m benchmarks.input --folder photographs         # photographs of a folder
    uv run python -m benchmarks.input --device cuda                # photometric augmentation on the GPU

The PIL pipeline is the classic torchvision pipeline of self-supervised training: Image.open, convert,
then twice RandomResizedCrop (bicubic), flip, ColorJitter, greyscale, Pillow's GaussianBlur, solarise, ToTensor,
Normalize; its batches are collated by PyTorch. Both pipelines are interleaved in one process on one thread; rates are
medians, the ratio is the median of the ratios within rounds. "the same part" compares a part with the same part of
PIL's pipeline, "whole pipeline" with the complete one, since PIL's photometric augmentation must run in the workers.
Files are read from the page cache, not from disk. The second table measures the complete loaders, with workers.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import BytesIO
from itertools import count
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from benchmarks.measuring import times
from PIL import Image, ImageFilter
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision import transforms as classic
from torchvision.transforms.functional import pil_to_tensor

from cribo.data import ImageFiles, apply_photometric, open_images
from cribo.data.loading import BatchLoader
from cribo.data.samples import Batch, SampleDataset, StepBatchSampler
from cribo.data.scenes import Scenes
from cribo.method import ViewRecipe
from cribo.models.backbone import IMAGENET_MEAN, IMAGENET_STD, normalise
from cribo.objectives.views import ViewPairs

RECIPE = ViewRecipe()
GRID = (14, 14)
BATCH = 32
VIT_S_ON_H200 = 9_000
"""Estimated throughput of training a ViT-S/16 in views per second, the target of a loader on 16 cores."""


@dataclass(frozen=True)
class Photographs:
    """Synthetic photographs of one size: scenes with noise, compressed to a given number of bits per pixel."""

    name: str
    height: int
    width: int
    bits: float
    count: int = 16

    def save(self, folder: Path) -> None:
        """Write the photographs as JPEGs."""
        for index in range(self.count):
            image = Image.fromarray(photograph(self.height, self.width, index))
            (folder / f"{index:03d}.jpg").write_bytes(compressed(image, self.bits * self.height * self.width / 8))


# Files of COCO and ImageNet have 4 to 5 bits per pixel, most photographs from phones and the web 1 to 2.
CASES = (
    Photographs("640 x 480, as COCO", 480, 640, 4.2),
    Photographs("640 x 480, as the web", 480, 640, 1.5),
    Photographs("500 x 375, as ImageNet", 375, 500, 4.5),
    Photographs("2048 x 1536, as phones", 1536, 2048, 2.0, count=8),
)


def photograph(height: int, width: int, seed: int) -> np.ndarray:
    """Return an enlarged scene with noise of a natural image spectrum: uint8 (height, width, 3)."""
    side = max(height, width)
    scene = Scenes(1, size=max(96, side // 4), seed=seed).load(0)[None].float()
    large = F.interpolate(scene, (side, side), mode="bicubic")[0, :, :height, :width].permute(1, 2, 0).numpy()
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = 1
    spectrum = np.fft.rfft2(np.random.default_rng(seed).standard_normal((height, width)))
    noise = np.fft.irfft2(spectrum / frequency**1.3, s=(height, width))
    return (large + 20 * (noise / noise.std())[..., None]).clip(0, 255).astype(np.uint8)


def compressed(image: Image.Image, size: float) -> bytes:
    """Encode as the largest JPEG of at most `size` bytes over all qualities."""
    low, high, best = 1, 100, b""
    while low <= high:
        quality = (low + high) // 2
        buffer = BytesIO()
        image.save(buffer, "JPEG", quality=quality)
        if buffer.tell() <= size or not best:
            best = buffer.getvalue()
        low, high = (quality + 1, high) if buffer.tell() <= size else (low, quality - 1)
    return best


class PilBlur:
    """Pillow's blur, as used by DINO; several times faster than torchvision's."""

    def __init__(self, sigma: tuple[float, float]) -> None:
        self.sigma = sigma

    def __call__(self, image: Image.Image) -> Image.Image:
        """Blur an image."""
        return image.filter(ImageFilter.GaussianBlur(float(torch.empty(1).uniform_(*self.sigma))))


def classic_views(size: int) -> tuple[list, list]:
    """Return the geometric and photometric transforms of the classic pipeline for both views, on PIL images."""
    r = RECIPE
    geometric = [
        classic.RandomResizedCrop(size, scale=r.area, interpolation=classic.InterpolationMode.BICUBIC),
        classic.RandomHorizontalFlip(r.flip),
    ]
    jitter = classic.ColorJitter(r.brightness, r.contrast, r.saturation, r.hue)
    blur = PilBlur(r.blur_sigma)
    photometric = [
        [
            classic.RandomApply([jitter], p=r.jitter),
            classic.RandomGrayscale(r.greyscale),
            classic.RandomApply([blur], p=r.blur[view]),
            classic.RandomSolarize(r.solarise_threshold, p=r.solarise[view]),
            classic.ToTensor(),
            classic.Normalize(IMAGENET_MEAN, IMAGENET_STD),
        ]
        for view in (0, 1)
    ]
    return [classic.Compose(geometric)] * 2, [classic.Compose(steps) for steps in photometric]


class PilPairs(Dataset[Tensor]):
    """The classic pipeline: pairs of views (2, 3, s, s) of files, including photometric augmentation."""

    def __init__(self, files: ImageFiles) -> None:
        self.files = files
        self.geometric, self.photometric = classic_views(RECIPE.size)

    def __len__(self) -> int:
        return len(self.files)

    def cut(self, index: int) -> list[Image.Image]:
        """Crop both views of a file, without photometric augmentation."""
        with Image.open(self.files.path(index)) as file:
            image = file.convert("RGB")
        return [cut(image) for cut in self.geometric]

    def colour(self, pair: list[Image.Image]) -> Tensor:
        """Apply photometric augmentation to both views; returns (2, 3, s, s)."""
        return torch.stack([colour(view) for colour, view in zip(self.photometric, pair, strict=True)])

    def __getitem__(self, index: int) -> Tensor:
        return self.colour(self.cut(index % len(self.files)))


def ours(files: ImageFiles) -> SampleDataset:
    """Return the view pairs for pretraining a ViT-S/16."""
    return SampleDataset(files, ViewPairs(RECIPE, grid=GRID, num_objects=32, drop_path_sites=24), seed=0)


@dataclass
class Parts:
    """The parts of both pipelines; each method processes all files once."""

    files: ImageFiles
    device: str
    epochs: Iterator[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self.dataset, self.pil = ours(self.files), PilPairs(self.files)
        self.cut = [self.pil.cut(index) for index in range(len(self.files))]
        self.batch = self.load()
        self.views = self.batch["views"].flatten(0, 1).to(self.device)

    def load(self) -> Batch:
        """Load 8-bit views with our pipeline."""
        epoch = next(self.epochs)
        return self.dataset.__getitems__([(epoch, index) for index in range(len(self.files))])

    def colour(self) -> Tensor:
        """Apply our photometric augmentation to loaded views."""
        return normalise(apply_photometric(self.views, self.batch["photometric"].flatten()))

    def both(self) -> Tensor:
        """Run our pipeline from files to network inputs."""
        batch = self.load()
        views = batch["views"].flatten(0, 1).to(self.device)
        return normalise(apply_photometric(views, batch["photometric"].flatten()))

    def pil_load(self) -> Tensor:
        """Load 8-bit views with PIL's pipeline."""
        pairs = [self.pil.cut(index) for index in range(len(self.files))]
        return default_collate([torch.stack([pil_to_tensor(view) for view in pair]) for pair in pairs])

    def pil_colour(self) -> Tensor:
        """Apply PIL's photometric augmentation to loaded views."""
        return default_collate([self.pil.colour(pair) for pair in self.cut])

    def pil_both(self) -> Tensor:
        """Run PIL's pipeline from files to network inputs."""
        return default_collate([self.pil[index] for index in range(len(self.files))])

    def rows(self) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
        """Return our and PIL's function for each row."""
        return {
            "decode, crop, collate | the same part": (self.load, self.pil_load),
            "decode, crop, collate | whole pipeline": (self.load, self.pil_both),
            "photometric | the same part": (self.colour, self.pil_colour),
            "end to end | whole pipeline": (self.both, self.pil_both),
        }


def bits_per_pixel(files: ImageFiles) -> float:
    """Compute the mean number of bits per pixel over the files."""
    found = []
    for index in range(len(files)):
        path = Path(files.path(index))
        with Image.open(path) as image:
            found.append(8 * path.stat().st_size / (image.width * image.height))
    return statistics.mean(found)


def add_rows(table: Table, name: str, files: ImageFiles, device: str, rounds: int) -> None:
    """Measure one set of files and add its rows."""
    parts, views = Parts(files, device), 2 * len(files)
    described = f"{name}, {bits_per_pixel(files):.1f} bit"
    for row, (mine, plain) in parts.rows().items():
        part, against = row.split(" | ")
        fast, slow, ratio = times(mine, plain, device, rounds)
        needed = f"{16 * views / fast / VIT_S_ON_H200:.1f}" if part.startswith("decode") else ""
        table.add_row(described, part, against, f"{views / fast:,.0f}", f"{views / slow:,.0f}", f"{ratio:.1f}", needed)
        described = ""


def views_per_second(batches: Iterator[object], size: int, number: int) -> float:
    """Measure the throughput after the first batches, which include the start of the workers."""
    for _ in range(8):
        next(batches)
    start = time.perf_counter()
    for _ in range(number):
        next(batches)
    return 2 * size * number / (time.perf_counter() - start)


def loader_rates(files: ImageFiles, workers: int, batches: int) -> tuple[float, float]:
    """Measure views per second of our loader, without photometric augmentation, and of PIL's, which includes it."""
    # Repeat the files as often as the batches need.
    names = [files.name(index % len(files)) for index in range(BATCH * (batches + 16))]
    many = ImageFiles(files.folder, names)
    sampler = StepBatchSampler(len(many), BATCH, 0, position=lambda: 0)
    loader = BatchLoader(ours(many), sampler, workers=workers, pin_memory=False)
    mine = views_per_second(iter(loader), BATCH, batches)
    loader.close()
    plain = DataLoader(PilPairs(many), batch_size=BATCH, num_workers=workers, prefetch_factor=4)
    return mine, views_per_second(iter(plain), BATCH, batches)


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="device of the photometric augmentation")
    parser.add_argument("--rounds", type=int, default=5, help="number of measurements of each pair")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="numbers of workers of the loaders")
    parser.add_argument("--batches", type=int, default=24, help="number of batches of 32 images to time a loader")
    parser.add_argument(
        "--folder", type=Path, nargs="*", default=[], help="folders of JPEGs instead of synthetic photographs"
    )
    parser.add_argument("--images", type=int, default=16, help="number of images of a folder")
    parser.add_argument("--only", choices=("parts", "loader"), help="table to print")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    where = torch.cuda.get_device_name() if arguments.device.startswith("cuda") else "CPU, one thread"
    versions = f"{where}, PyTorch {torch.__version__}, Pillow {Image.__version__}"
    parts = Table(title=f"views of 224 px per second and core, {versions}")
    for column in ("images", "part", "PIL's", "ours", "PIL", "times", "16 cores / ViT-S on H200"):
        parts.add_column(column, justify="left" if column in ("images", "part", "PIL's") else "right")
    loaders = Table(title=f"loaders, views of 224 px per second, {versions}")
    for column in ("images", "workers", "ours, without photometric", "PIL, with it", "times"):
        loaders.add_column(column, justify="left" if column == "images" else "right")

    with tempfile.TemporaryDirectory() as temporary:
        for name, files in sets(arguments.folder, arguments.images, Path(temporary)):
            if arguments.only != "loader":
                add_rows(parts, name, files, arguments.device, arguments.rounds)
            for workers in arguments.workers if arguments.only != "parts" else ():
                mine, plain = loader_rates(files, workers, arguments.batches)
                loaders.add_row(name, str(workers), f"{mine:,.0f}", f"{plain:,.0f}", f"{mine / plain:.1f}")
    console = Console(width=None if sys.stdout.isatty() else 150)
    for table in (parts, loaders):
        if table.row_count:
            console.print(table)


def sets(folders: list[Path], images: int, temporary: Path) -> Iterator[tuple[str, ImageFiles]]:
    """Yield the first images of the folders, or the synthetic photographs."""
    for folder in folders:
        files = open_images(folder)
        names = [files.name(index) for index in range(min(images, len(files)))]
        yield folder.name, ImageFiles(files.folder, names)
    for number, case in enumerate(() if folders else CASES):
        folder = temporary / str(number)
        folder.mkdir()
        case.save(folder)
        yield case.name, open_images(folder)


if __name__ == "__main__":
    main()
