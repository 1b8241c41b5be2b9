"""The network shared by all visitors of the page, with a lock and a feature cache."""

import hashlib
import threading
from collections import OrderedDict
from dataclasses import dataclass

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from cribo.features import Encoder


@dataclass(frozen=True)
class Dense:
    """The dense features of an image.

    Attributes:
        tokens: (h, w, D) patch features, on the host.
        size: (height, width) of the image in pixels.
    """

    tokens: Float[Tensor, "h w d"]
    size: tuple[int, int]

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.tokens.shape[0], self.tokens.shape[1]

    def patch_at(self, x: float, y: float) -> tuple[int, int]:
        """Return (row, column) of the patch nearest to a point (x, y), in pixels of the image."""
        row = int(y * self.grid[0] / self.size[0])
        column = int(x * self.grid[1] / self.size[1])
        return self.clamped(row, column)

    def clamped(self, row: int, column: int) -> tuple[int, int]:
        """Return (row, column), clamped to the grid."""
        return min(max(row, 0), self.grid[0] - 1), min(max(column, 0), self.grid[1] - 1)


class SharedNetwork:
    """A network shared by concurrent visitors.

    Requests are processed one at a time. Features of recent images are cached, since visitors usually send several
    requests for the same image.

    Args:
        encoder: the encoder.
        probed: the same network with the features of all blocks that segmentation may use; `encoder` by default.
        max_patches: maximum number of patches per image; larger images are reduced.
        cache_bytes: maximum size of the cache in bytes.

    Attributes:
        encoder: `encoder`, protected by the lock and with the cache.
        probed: `probed`, with the same lock and cache, whose features are kept in half precision.
    """

    def __init__(
        self,
        encoder: Encoder,
        *,
        probed: Encoder | None = None,
        max_patches: int = 4096,
        cache_bytes: int = 2**30,
    ) -> None:
        self.max_patches = max_patches
        self.cache_bytes = cache_bytes
        self._lock = threading.RLock()
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self.encoder = self._shared(encoder, torch.float32)
        self.probed = self._shared(probed or encoder, torch.float16)

    @property
    def kept_bytes(self) -> int:
        """Size of the cached features in bytes."""
        return sum(features.nbytes for features in self._kept.values())

    @torch.no_grad()
    def encode(self, image: UInt8[Tensor, "c h w"]) -> Dense:
        """Compute the features of an image.

        Raises:
            ValueError: the network does not accept images of this size.
        """
        pixels = self.encoder.resized(image, max_patches=self.max_patches)
        tokens = self.encoder.grids(pixels[None])[0]
        return Dense(tokens.cpu(), (image.shape[1], image.shape[2]))

    def _shared(self, encoder: Encoder, precision: torch.dtype) -> Encoder:
        def encode(images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b n d"]:
            if len(images) > 1:  # batches of a collection, whose images are encoded only once
                with self._lock:
                    return encoder.tokens(images)
            about = f"{encoder.blocks} {precision} {tuple(images.shape)}".encode()
            key = hashlib.sha256(about + images.cpu().contiguous().numpy().tobytes()).digest()
            with self._lock:
                features = self._kept.get(key)
                if features is None:
                    features = encoder.tokens(images).to("cpu", copy=True)
                    rounded = features.to(precision)
                    features = self._kept[key] = rounded if rounded.isfinite().all() else features
                self._kept.move_to_end(key)
                while len(self._kept) > 1 and self.kept_bytes > self.cache_bytes:
                    self._kept.popitem(last=False)
            return features.to(images.device, torch.float32)

        return encoder.through(encode)
