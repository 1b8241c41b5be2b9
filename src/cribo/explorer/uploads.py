"""What may come from a browser: pictures within limits, read from bytes that nobody has looked at before."""

import os
from pathlib import Path
from typing import Any

from jaxtyping import UInt8
from torch import Tensor

from cribo.data.reading import EncodedImage, UnreadableImage, read_image
from cribo.explorer.config import Limits


class Refused(ValueError):
    """What a visitor asked for and cannot have; the message is a sentence for the page."""


class Uploads:
    """The pictures that visitors have sent, in one folder.

    Args:
        folder: where the server puts them; nothing outside of it is ever read for a visitor.
        limits: of each.
    """

    def __init__(self, folder: Path, limits: Limits) -> None:
        self.folder = folder.resolve()
        self.limits = limits

    def holds(self, path: str | os.PathLike[str]) -> bool:
        """Whether a path leads, through all links, to something below the folder."""
        try:
            return Path(path).resolve().is_relative_to(self.folder)
        except (OSError, ValueError):  # a loop of links, a zero byte
            return False

    def read(self, sent: Any, *, what: str = "picture") -> UInt8[Tensor, "3 h w"]:
        """Read the picture that a field of the page has sent.

        Args:
            sent: as `content` takes it.
            what: it is called in messages.

        Raises:
            Refused: there is none, it is gone, too large, or no image.
        """
        content = self.content(sent, what=what)
        try:
            return read_image(EncodedImage(what, content), max_pixels=self.limits.pixels)
        except UnreadableImage as error:
            if "max_pixels" in error.reason:
                pixels = error.reason.partition(" pixels")[0]
                raise Refused(
                    f"The {what} has {pixels} pixels and {self.limits.megapixels:g} megapixels are allowed: make it "
                    "smaller, or start the page with a larger --max_megapixels."
                ) from error
            raise Refused(f"The {what} cannot be used: {error.reason}.") from error

    def content(self, sent: Any, *, what: str = "picture") -> bytes:
        """The bytes of a file that a field of the page has sent.

        Args:
            sent: the field's content, as the browser sent it: its `path` below the folder is all that counts.
            what: it is called in messages.

        Raises:
            Refused: there is none, it is gone, or too large.
        """
        path = sent.get("path") if isinstance(sent, dict) else None
        if not isinstance(path, str) or not path:
            raise Refused(f"There is no {what} yet: drop one on the page, or choose a file.")
        if not self.holds(path):
            raise Refused(f"This {what} was not sent to this page: drop the file on the page itself.")
        file = Path(path)
        if not file.is_file():
            raise Refused(f"The {what} is no longer kept here: send it again.")
        size = file.stat().st_size
        if size > self.limits.bytes:
            raise Refused(
                f"The {what} has {size / 1e6:.1f} MB and {self.limits.megabytes:g} MB are allowed: make it smaller, or "
                "start the page with a larger --max_megabytes."
            )
        return file.read_bytes()
