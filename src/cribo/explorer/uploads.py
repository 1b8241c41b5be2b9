"""Validation and reading of uploaded pictures."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxtyping import UInt8
from torch import Tensor

from cribo.base.errors import InputError, UnreadableImage
from cribo.data.config import DEFAULT_READING, Reading
from cribo.data.reading import EncodedImage, read_image
from cribo.explorer.config import Limits


class Refused(InputError):
    """A request is refused. The message is shown on the page."""


class Uploads:
    """The folder of uploaded pictures.

    Args:
        folder: folder of the uploads; requests cannot read files outside it.
        limits: limits of a picture.
        reading: how pictures are read; the limit of pixels is that of `limits`.
    """

    def __init__(self, folder: Path, limits: Limits, reading: Reading = DEFAULT_READING) -> None:
        self.folder = folder.resolve()
        self.limits = limits
        self.reading = replace(reading, max_pixels=limits.pixels)

    def holds(self, path: str | os.PathLike[str]) -> bool:
        """Whether a path, with links resolved, is inside the folder."""
        try:
            return Path(path).resolve().is_relative_to(self.folder)
        except (OSError, ValueError):  # a loop of links, or a null byte
            return False

    def read(self, sent: Any, *, what: str = "picture") -> UInt8[Tensor, "c h w"]:
        """Read an uploaded picture.

        Args:
            sent: see `content`.
            what: name of the picture in messages.

        Raises:
            Refused: the file is missing, too large, or not an image.
        """
        content = self.content(sent, what=what)
        try:
            return read_image(EncodedImage(what, content), reading=self.reading)
        except UnreadableImage as error:
            if "max_pixels" in error.reason:
                pixels = error.reason.partition(" pixels")[0]
                raise Refused(
                    f"The {what} has {pixels} pixels, but at most {self.limits.max_megapixels:g} megapixels are "
                    "allowed: make it smaller, or start the page with a larger --max_megapixels."
                ) from error
            raise Refused(f"The {what} cannot be used: {error.reason}.") from error

    def content(self, sent: Any, *, what: str = "picture") -> bytes:
        """Read the bytes of an uploaded file.

        Args:
            sent: value of a field of the page as sent by the browser; only its `path` is used.
            what: name of the file in messages.

        Raises:
            Refused: the file is missing or too large.
        """
        path = sent.get("path") if isinstance(sent, dict) else None
        if not isinstance(path, str) or not path:
            raise Refused(f"No {what} was uploaded yet: drop one on the page, or choose a file.")
        if not self.holds(path):
            raise Refused(f"This {what} was not uploaded to this page: drop the file on the page.")
        file = Path(path)
        if not file.is_file():
            raise Refused(f"The {what} has expired: upload it again.")
        size = file.stat().st_size
        if size > self.limits.bytes:
            raise Refused(
                f"The {what} has {size / 1e6:.1f} MB, but at most {self.limits.max_megabytes:g} MB are allowed: make "
                "it smaller, or start the page with a larger --max_megabytes."
            )
        return file.read_bytes()
