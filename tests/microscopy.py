"""A made-up set of microscopy: five channels of 16 bits, cells and debris with known labels.

python -m tests.microscopy FOLDER --seed 0
"""

import argparse
from pathlib import Path

import numpy as np
import tifffile
from PIL import Image
from scipy.ndimage import gaussian_filter

CLASSES = ("background", "cell", "debris")
CHANNELS = ("nuclei", "membrane", "debris", "fibres", "autofluorescence")
SIDE = 256

_CELLS, _DEBRIS, _FIBRES = 9, 7, 4  # objects of an image
_DARK, _NOISE = 200.0, 40.0  # of the camera
_SHADES = 3  # uneven background: bright spots much larger than objects


def draw(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw an image.

    A cell has a nucleus in channel 0 and a body with a bright rim in channel 1. Debris has the size of cells, is dim in
    channels 0 and 1 as well, and is bright in channel 2. Fibres, in channel 3, and the light of channel 4 have no class
    of their own. The background of each channel is uneven, and light leaks into the next channel.

    Returns:
        The channels (5, SIDE, SIDE), uint16 with values up to about 4,000; the class of each pixel (SIDE, SIDE), uint8.
    """
    light = np.zeros((len(CHANNELS), SIDE, SIDE))
    labels = np.zeros((SIDE, SIDE), dtype=np.uint8)
    for _ in range(_CELLS):
        distance, brightness = _ellipse(generator, 12, 24), generator.uniform(0.5, 1.2)
        inside = distance < 1
        light[1] += brightness * inside * np.where(distance > 0.75, 1500, 600)
        light[0] += brightness * 1400 * (distance < 0.5)
        labels[inside] = 1
    for _ in range(_DEBRIS):
        distance, brightness = _ellipse(generator, 8, 20), generator.uniform(0.5, 1.2)
        inside = distance < 1 + 0.3 * generator.standard_normal((SIDE, SIDE)).clip(-1, 1)
        light[2] += brightness * 1300 * inside
        light[0] += brightness * 500 * inside
        light[1] += brightness * 500 * inside
        labels[inside & (labels == 0)] = 2
    for _ in range(_FIBRES):
        light[3] += generator.uniform(800, 1600) * _fibre(generator)
    light[4] += 700 * gaussian_filter(generator.standard_normal((SIDE, SIDE)), 6) * 20
    light += np.stack([_shades(generator) for _ in CHANNELS])
    light += 0.15 * np.roll(light, 1, axis=0)
    light = gaussian_filter(light.clip(0), (0, 1.2, 1.2)) + _DARK
    noisy = generator.poisson(light.clip(0)) + generator.normal(0, _NOISE, light.shape)
    return noisy.clip(0, 65535).astype(np.uint16), labels


def _ellipse(generator: np.random.Generator, least: float, most: float) -> np.ndarray:
    """Return the distance of each pixel from the centre of a random ellipse; 1 at its rim."""
    y, x = np.mgrid[:SIDE, :SIDE]
    centre, angle = generator.uniform(0, SIDE, 2), generator.uniform(0, np.pi)
    radii = generator.uniform(least, most, 2)
    along = (x - centre[0]) * np.cos(angle) + (y - centre[1]) * np.sin(angle)
    across = (y - centre[1]) * np.cos(angle) - (x - centre[0]) * np.sin(angle)
    return np.hypot(along / radii[0], across / radii[1])


def _fibre(generator: np.random.Generator) -> np.ndarray:
    """Return a curved line, 0 to 1."""
    y, x = np.mgrid[:SIDE, :SIDE]
    phase, wave, slope = generator.uniform(0, 2 * np.pi), generator.uniform(40, 120), generator.uniform(-1, 1)
    middle = generator.uniform(0, SIDE) + slope * x + 12 * np.sin(x / wave * 2 * np.pi + phase)
    line = np.exp(-(((y - middle) / 2) ** 2))
    return line if generator.random() < 0.5 else line.T


def _shades(generator: np.random.Generator) -> np.ndarray:
    """Return an uneven background: a few wide bright spots."""
    y, x = np.mgrid[:SIDE, :SIDE]
    shades = np.zeros((SIDE, SIDE))
    for _ in range(_SHADES):
        centre, radius = generator.uniform(0, SIDE, 2), generator.uniform(60, 140)
        shades += generator.uniform(100, 600) * np.exp(-((x - centre[0]) ** 2 + (y - centre[1]) ** 2) / radius**2)
    return shades


def write(folder: Path, *, seed: int, train: int = 8, val: int = 24) -> Path:
    """Write a set in the layout of labelled folders, and return its folder."""
    generator = np.random.default_rng([0x6D6963, seed])
    for split, count in (("train", train), ("val", val)):
        images, labels = folder / "images" / split, folder / "labels" / split
        for each in (images, labels):
            each.mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels, classes = draw(generator)
            tifffile.imwrite(
                images / f"{number:02}.ome.tif", pixels, metadata={"axes": "CYX", "Channel": {"Name": list(CHANNELS)}}
            )
            Image.fromarray(classes).save(labels / f"{number:02}.ome.png")
    (folder / "classes.txt").write_text("\n".join(CLASSES) + "\n")
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write(arguments.folder, seed=arguments.seed)
