"""Synthetic images with pixel labels: textured, shaded objects on a textured ground, generated from a seed.

The class of an object determines its outline and texture; the class of a ground determines its texture. Hues, sizes,
outline orientations, lighting and overlaps are drawn independently of the class, and all classes have the same
luminances, so the mean colour is uninformative. Textures are rotated by up to 32 degrees.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from cribo.base.bounds import at_least, check_bounds
from cribo.base.colours import Colour, class_colours
from cribo.base.errors import InputError
from cribo.data.labelled.sets import HELD_OUT_SCENES

OBJECT_CLASSES = (
    "striped disc",
    "dotted square",
    "chequered triangle",
    "zigzag cross",
    "scaled hexagon",
    "marbled flower",
)
GROUND_CLASSES = ("sand", "clouds", "water")

_FIRST_QUERY = 1_000_400  # above the numbers of all training scenes

# Motion per frame, at most: of objects and the ground in sides of a scene, and the turn of objects in radians.
_SPEED = 0.04
_GROUND_SPEED = 0.02
_SPIN = 0.1

_TILE = 512  # side of a seamless texture tile in texels
_TEXELS_PER_PIXEL = 7.0  # tiles are sampled far below their resolution, so the nearest texel suffices
_ANGLES = 720  # entries of an outline table

Array = np.ndarray


@dataclass(frozen=True)
class Scenes:
    """A data set of `count` square scenes, each generated from `(seed, first + index)` only.

    With several frames, objects and ground move and turn; the images are the frames of all scenes, scene after scene.

    Args:
        count: number of scenes.
        size: side of a scene in pixels.
        seed: the seed of the whole data set; scenes of two seeds are unrelated.
        first: number of the first scene, so that index ranges of one seed serve as training and held-out sets.
        min_objects: fewest objects in a scene.
        max_objects: most objects in a scene; objects painted early may end up hidden.
        frames: number of frames of each scene; the first frame is the scene without motion.

    Raises:
        ValueError: a value is out of its range.

    Example:
        >>> train, held_out = Scenes(2000), Scenes(200, first=2000)
        >>> train.load(0).shape, train.labels(0).shape
        (torch.Size([3, 96, 96]), torch.Size([96, 96]))
    """

    count: Annotated[int, at_least(1)]
    size: Annotated[int, at_least(16)] = 96
    seed: Annotated[int, at_least(0)] = 0
    first: Annotated[int, at_least(0)] = 0
    min_objects: Annotated[int, at_least(1)] = 4
    max_objects: int = 6
    frames: Annotated[int, at_least(1)] = 1

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.max_objects < self.min_objects:
            raise InputError(f"max_objects must be >= min_objects ({self.min_objects}), got {self.max_objects}")

    @property
    def classes(self) -> list[str]:
        """Class names; the position in this list is the class index used in `labels`."""
        return [*OBJECT_CLASSES, *GROUND_CLASSES]

    @property
    def palette(self) -> list[Colour]:
        """The colour of each class in pictures of labels; in the scenes, every class has all hues."""
        return class_colours(self.classes)

    @property
    def ignore_index(self) -> int:
        """The label of ignored pixels; it does not occur."""
        return 255

    def __len__(self) -> int:
        return self.count * self.frames

    def name(self, index: int) -> str:
        """Return the name of a scene, which contains its seed and number, or of a frame of a moving scene."""
        number, frame = self._numbers(index)
        return f"scene-{self.seed}-{number:06d}" + (f"-{frame:02d}" if self.frames > 1 else "")

    def load(self, index: int) -> UInt8[Tensor, "3 size size"]:
        """Return the RGB image of a scene.

        Raises:
            IndexError: `index` is out of range.
        """
        return torch.tensor(self._compose(index)[0])

    def labels(self, index: int) -> UInt8[Tensor, "size size"]:
        """Return the class index of every pixel of a scene.

        Raises:
            IndexError: `index` is out of range.
        """
        return torch.tensor(self._compose(index)[1])

    def _numbers(self, index: int) -> tuple[int, int]:
        """Return the numbers of scene and frame."""
        if not 0 <= index < len(self):
            raise IndexError(f"scene index must be in 0..{len(self) - 1}, got {index}")
        scene, frame = divmod(index, self.frames)
        return self.first + scene, frame

    def _compose(self, index: int) -> tuple[Array, Array]:
        number, frame = self._numbers(index)
        return compose_scene(self.seed, number, self.size, self.min_objects, self.max_objects, frame)


def held_out_scenes(memory: int = HELD_OUT_SCENES[0], queries: int = HELD_OUT_SCENES[1]) -> tuple[Scenes, Scenes]:
    """Return held-out scenes: the memory and the queries of dense retrieval.

    Example:
        >>> memory, queries = held_out_scenes()
        >>> len(memory), len(queries)
        (200, 100)
    """
    return Scenes(memory, first=_FIRST_QUERY - memory), Scenes(queries, first=_FIRST_QUERY)


@lru_cache(maxsize=1)  # paints a scene once if its labels are read after its image
def compose_scene(
    seed: int, number: int, size: int, min_objects: int, max_objects: int, frame: int = 0
) -> tuple[Array, Array]:
    """Paint a frame of a scene, the nearest object last: image (3, size, size) and classes (size, size), both uint8."""
    random = np.random.Generator(np.random.Philox(key=[seed, number]))
    scene = random.random(8)
    num_objects = min_objects + int(scene[0] * (max_objects - min_objects + 1))
    ground = len(OBJECT_CLASSES) + int(scene[1] * len(GROUND_CLASSES))
    light = 2 * np.pi * scene[2]
    light_x, light_y = np.cos(light), np.sin(light)
    draws = random.random((num_objects + 1, 16)).astype(np.float32)
    dark, bright = _colour_pairs(draws[:, :6])
    # Right, down and turn, of the ground first; float32, so that scenes without motion keep their rounding.
    motion = (frame * (2 * random.random((num_objects + 1, 3)) - 1)).astype(np.float32)

    pixel = np.arange(size, dtype=np.float32)
    x, y = pixel[None, :], pixel[:, None]
    pan_x, pan_y = _GROUND_SPEED * size * motion[0, :2]
    canvas = _paint(ground, x - pan_x, y - pan_y, draws[0], dark[0], bright[0], turned=0.0)
    labels = np.full((size, size), ground, np.uint8)
    scales = np.sort(draws[1:, 6])[::-1]  # paint large objects first, since they are hidden less often

    for order in range(num_objects):
        draw = draws[order + 1]
        # float32 draws just below 1 may round up to 1.
        object_class = min(int(draw[7] * len(OBJECT_CLASSES)), len(OBJECT_CLASSES) - 1)
        radius = size * (0.18 + 0.16 * float(scales[order]))
        move_x, move_y = _SPEED * motion[order + 1, :2]
        turned = _SPIN * motion[order + 1, 2]
        centre_x, centre_y = size * (1.1 * draw[8] - 0.05 + move_x), size * (1.1 * draw[9] - 0.05 + move_y)
        margin = 1.25 * radius + 2
        left, right = int(max(centre_x - margin, 0)), int(min(centre_x + margin + 1, size))
        top, bottom = int(max(centre_y - margin, 0)), int(min(centre_y + margin + 1, size))
        if left >= right or top >= bottom:
            continue
        window = slice(top, bottom), slice(left, right)
        dx, dy = x[:, left:right] - centre_x, y[top:bottom] - centre_y

        stretch = 0.8 + 0.2 * draw[10]
        turn = 2 * np.pi * draw[11] + turned
        coverage, rim = _cover(object_class, dx, dy, radius, turn, stretch)
        drop_x, drop_y = 0.09 * radius * light_x, 0.09 * radius * light_y
        shade, _ = _cover(object_class, dx + drop_x, dy + drop_y, radius, turn, stretch)
        surface = _paint(object_class, dx, dy, draw, dark[order + 1], bright[order + 1], turned=turned)
        relief = 0.99 + (0.05 + 0.13 * draw[12]) * (light_x * dx + light_y * dy) / radius * (0.4 + rim)

        part = canvas[(slice(None), *window)]
        part *= 1 - 0.3 * shade
        part += coverage * (surface * relief - part)
        labels[window][coverage > 0.5] = object_class

    slope = (light_x * (x - size / 2) + light_y * (y - size / 2)) / size
    canvas *= 0.92 + 0.16 * scene[3] + (0.05 + 0.2 * scene[4]) * slope
    return (canvas.clip(0, 1) * 255 + 0.5).astype(np.uint8), labels


def _paint(texture: int, x: Array, y: Array, draw: Array, dark: Array, bright: Array, *, turned: float) -> Array:
    """Mix two colours by a rotated, scaled and shifted part of a texture; returns (3, h, w)."""
    turn = np.pi * (draw[13] - 0.5) * 0.35 + turned
    step = _TEXELS_PER_PIXEL * (0.9 + 0.25 * draw[14])
    along, across = step * np.cos(turn), step * np.sin(turn)
    shift_x, shift_y = _TILE * draw[14] * 7, _TILE * draw[15]
    column = (along * x + across * y + shift_x).astype(np.int32) & (_TILE - 1)
    row = (along * y - across * x + shift_y).astype(np.int32) & (_TILE - 1)
    mix = _textures()[texture, row, column]
    return dark[:, None, None] + (bright - dark)[:, None, None] * mix


def _cover(outline: int, dx: Array, dy: Array, radius: float, turn: float, stretch: float) -> tuple[Array, Array]:
    """Return the coverage of each pixel by an object, antialiased, and the squared distance from its centre."""
    cosine, sine = np.cos(turn), np.sin(turn)
    u = cosine * dx + sine * dy
    v = (cosine * dy - sine * dx) / stretch
    distance = np.sqrt(u * u + v * v)
    table = _outlines()[outline]
    border = radius * table[((np.arctan2(v, u) + np.pi) * (_ANGLES / (2 * np.pi))).astype(np.int32) % _ANGLES]
    return (border - distance + 0.5).clip(0, 1), (distance / border) ** 2


def _colour_pairs(draws: Float[Array, "n 6"]) -> tuple[Float[Array, "n 3"], Float[Array, "n 3"]]:
    """Return two colours per row, with random hues and similar luminances in all rows; either may be brighter."""
    low = 0.30 + 0.06 * draws[:, 0]
    luminance = np.stack([low, low + 0.32 + 0.06 * draws[:, 1]], 1)
    flipped = draws[:, 2] < 0.5
    luminance = np.where(flipped[:, None], luminance[:, ::-1], luminance)
    hue = 2 * np.pi * np.stack([draws[:, 3], draws[:, 3] + 0.4 * (draws[:, 4] - 0.5)], 1)
    chroma = (0.16 + 0.16 * draws[:, 5])[:, None]
    # The chroma axes of YIQ do not change the luminance.
    in_phase = np.array([0.956, -0.272, -1.106], np.float32)
    quadrature = np.array([0.621, -0.647, 1.703], np.float32)
    offset = np.cos(hue)[..., None] * in_phase + np.sin(hue)[..., None] * quadrature
    rgb = luminance[..., None] + chroma[..., None] * offset
    return rgb[:, 0], rgb[:, 1]


@lru_cache(maxsize=1)
def _outlines() -> Float[Array, "outlines angles"]:
    """Return the radius of every outline as a function of the angle; areas are 0.8 times that of the unit disc."""
    angle = np.linspace(-np.pi, np.pi, _ANGLES, endpoint=False)

    def polygon(corners: int) -> Array:
        sector = 2 * np.pi / corners
        return np.cos(sector / 2) / np.cos((angle + np.pi) % sector - sector / 2)

    across = np.abs(np.stack([np.cos(angle), np.sin(angle)]))
    arm = 0.36
    cross = np.minimum(1 / across.max(0), np.maximum(arm / np.maximum(across.min(0), 1e-6), arm * np.sqrt(2)))
    petals = 1 + 0.3 * np.cos(5 * angle)
    shapes = [np.ones(_ANGLES), polygon(4), polygon(3), cross, polygon(6), petals]
    stacked = np.stack([shape * np.sqrt(0.8 / np.mean(shape**2)) for shape in shapes])
    return np.minimum(stacked, 1.25).astype(np.float32)


@lru_cache(maxsize=1)
def _textures() -> Float[Array, "textures tile tile"]:
    """Return one seamless tile per class, in class order, with values of about 0 to 1 and mean 1/2."""
    fixed = np.random.Generator(np.random.Philox(key=[7, 7]))
    unit = np.arange(_TILE) / _TILE
    u, v = np.meshgrid(2 * np.pi * unit, 2 * np.pi * unit)

    def band(low: float, high: float) -> Array:
        """Return Gaussian noise with `low` to `high` cycles per tile and standard deviation 1."""
        cycles = np.hypot(*np.meshgrid(*2 * [np.fft.fftfreq(_TILE, 1 / _TILE)]))
        spectrum = np.fft.fft2(fixed.standard_normal((_TILE, _TILE)))
        noise = np.fft.ifft2(spectrum * ((cycles >= low) & (cycles <= high))).real
        return noise / noise.std()

    def centred(field: Array) -> Array:
        """Shift the median to 0, so that both colours cover equal areas."""
        return field - np.median(field)

    wobble = band(1, 4)
    rows = np.floor(unit[:, None] * 24).astype(int)
    brick_u = (unit[None] * 12 + 0.5 * (rows % 2)) % 1 - 0.5
    brick_v = (unit[:, None] * 24) % 1
    scales = 0.75 - np.hypot(brick_u * 1.3, brick_v - 0.1)

    fields = [
        np.cos(8 * u),
        1.2 * (np.cos(11 * u) + np.cos(11 * v) - 0.75),
        4 * np.cos(6 * u) * np.cos(6 * v),
        np.cos(10 * v + 2.4 * np.arcsin(np.cos(5 * u))),
        5 * centred(scales),
        3 * centred(np.abs(band(4, 9))),
        centred(band(34, 68)),
        centred(band(4, 7)),
        np.cos(16 * v + 2.5 * wobble),
    ]
    tiles = [0.5 * np.tanh(1.8 * field) for field in fields]
    # With equal means, brightness does not reveal the class; the colours are assigned at random for each object.
    return np.stack([tile - tile.mean() + 0.5 for tile in tiles]).astype(np.float32)
