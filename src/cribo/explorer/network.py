"""One network for all visitors of the page, with a lock and a cache of features."""

import dataclasses
import hashlib
import threading
from collections import OrderedDict
from dataclasses import dataclass

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from cribo.retrieval import PatchEncoder
from cribo.retrieval.patches import grid_size, resize_image


@dataclass(frozen=True)
class Dense:
    """The features of one image.

    Attributes:
        tokens: (h, w, D) of the patches, on the host.
        size: (height, width) of the image in pixels.
    """

    tokens: Float[Tensor, "h w d"]
    size: tuple[int, int]

    @property
    def grid(self) -> tuple[int, int]:
        """Patches (down, across)."""
        return self.tokens.shape[0], self.tokens.shape[1]

    def patch_at(self, x: float, y: float) -> tuple[int, int]:
        """(row, column) of the patch at a point of the image, or the nearest one for points outside."""
        row = int(y * self.grid[0] / self.size[0])
        column = int(x * self.grid[1] / self.size[1])
        return self.clamped(row, column)

    def clamped(self, row: int, column: int) -> tuple[int, int]:
        """(row, column), moved into the grid."""
        return min(max(row, 0), self.grid[0] - 1), min(max(column, 0), self.grid[1] - 1)


class SharedEncoder:
    """Features of images for many visitors at once.

    The network processes one image at a time. Recently used features are cached, because visitors send several requests
    for one image.

    Args:
        encoder: of patches.
        device: of the network.
        max_patches: limit per image; larger images are reduced.
        cache_bytes: size of the cache.

    Attributes:
        encoder: the encoder behind the same lock, for object search and segmentation.
    """

    def __init__(
        self, encoder: PatchEncoder, device: str, *, max_patches: int = 4096, cache_bytes: int = 256 * 2**20
    ) -> None:
        self.device = device
        self.max_patches = max_patches
        self.cache_bytes = cache_bytes
        self._lock = threading.RLock()
        self._network = encoder.encode
        self.encoder = dataclasses.replace(encoder, encode=self._in_turn)
        self._kept: OrderedDict[bytes, Dense] = OrderedDict()

    @property
    def kept_bytes(self) -> int:
        """Size of the cached features."""
        return sum(dense.tokens.nbytes for dense in self._kept.values())

    def encode(self, image: UInt8[Tensor, "3 h w"]) -> Dense:
        """Compute the features of an image, or return cached ones.

        Raises:
            ValueError: the network does not accept images of this size.
        """
        key = hashlib.sha256(str(tuple(image.shape)).encode() + image.contiguous().numpy().tobytes()).digest()
        with self._lock:
            dense = self._kept.get(key)
            if dense is None:
                dense = self._encode(image)
                self._kept[key] = dense
            self._kept.move_to_end(key)
            while len(self._kept) > 1 and self.kept_bytes > self.cache_bytes:
                self._kept.popitem(last=False)
            return dense

    def _in_turn(self, images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b n d"]:
        with self._lock:
            return self._network(images)

    @torch.no_grad()
    def _encode(self, image: UInt8[Tensor, "3 h w"]) -> Dense:
        patch = self.encoder.patch_size
        height, width = image.shape[1:]
        scale = min(1.0, (self.max_patches * patch**2 / (height * width)) ** 0.5)
        size = grid_size(round(scale * height), round(scale * width), patch)
        tokens = self.encoder.grids(resize_image(image, size, "bicubic")[None], self.device)[0]
        return Dense(tokens.cpu().clone(), (height, width))
