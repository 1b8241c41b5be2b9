"""Images cached in memory."""

from jaxtyping import UInt8
from torch import Tensor

from cribo.data.sources.images import ImageSource


class CachedImages:
    """Caches the images of a source: each is loaded once per process, within a memory limit.

    Args:
        source: the images.
        limit_bytes: total size of cached images; others are loaded each time.

    >>> from cribo.data.scenes import Scenes
    >>> images = CachedImages(Scenes(4), limit_bytes=2**20)
    >>> images.load(2) is images.load(2)
    True
    """

    def __init__(self, source: ImageSource, *, limit_bytes: int) -> None:
        self.name = source.name
        self.labels = getattr(source, "labels", None)
        self._source = source
        self._kept: dict[int, Tensor] = {}
        self._bytes_left = limit_bytes

    def __len__(self) -> int:
        return len(self._source)

    def load(self, index: int) -> UInt8[Tensor, "c h w"]:
        """Return an image, which must not be modified in place; raises UnreadableImage as the source does."""
        if index in self._kept:
            return self._kept[index]
        image = self._source.load(index)
        if image.nbytes <= self._bytes_left:
            self._kept[index] = image
            self._bytes_left -= image.nbytes
        return image
