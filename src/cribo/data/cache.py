"""Images kept in memory once they have been loaded."""

from jaxtyping import UInt8
from torch import Tensor

from cribo.data.images import ImageSource


class CachedImages:
    """A source whose images are loaded once per process, as far as memory allows.

    For images that cost more to make than to keep, such as small scenes. Each worker keeps its own.

    Args:
        source: the images.
        limit_bytes: how much to keep; images beyond it are loaded each time.

    Example:
        >>> from cribo.data.scenes import Scenes
        >>> images = CachedImages(Scenes(4), limit_bytes=2**20)
        >>> images.load(2) is images.load(2)
        True
    """

    def __init__(self, source: ImageSource, *, limit_bytes: int) -> None:
        self.source = source
        self.limit_bytes = limit_bytes
        self._kept: dict[int, Tensor] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self.source)

    def name(self, index: int) -> str:
        """The source's name for an image."""
        return self.source.name(index)

    def load(self, index: int) -> UInt8[Tensor, "3 h w"]:
        """An image; not to be written to.

        Raises:
            UnreadableImage: as the source does.
        """
        kept = self._kept.get(index)
        if kept is None:
            kept = self.source.load(index)
            if self._bytes + kept.nbytes <= self.limit_bytes:
                self._kept[index] = kept
                self._bytes += kept.nbytes
        return kept
