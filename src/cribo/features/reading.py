"""How images are read for a backbone: with the channels, range and pixel size of its training; no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from cribo.base import files
from cribo.base.errors import DataError, InputError
from cribo.data.config import PixelOptions
from cribo.features.config import BackboneSource
from cribo.models.hub.download import download, hub_name

_DESCRIPTIONS = (("backbone.json", ()), ("config.json", ("cribo",)))
"""Files that describe a backbone of this project, and the entry of the description in them."""

_STORED = ("channels", "range", "pixel_size")

Options = TypeVar("Options", bound=PixelOptions)


def completed_for(source: BackboneSource | str | None, reading: Options) -> Options:
    """Complete reading options with those that a backbone was trained with.

    Args:
        source: of the backbone; None for none.
        reading: the options that the user has given.

    Raises:
        InputError: the stored options are invalid.
        ConnectionError: weights on the hub are not cached and cannot be downloaded.
    """
    return reading if source is None else reading.completed(saved_pixels(source))


def saved_pixels(source: BackboneSource | str) -> Mapping[str, Any]:
    """Return the channels, the range and the pixel size that are stored with a backbone; empty without any.

    Reads only the description of a backbone that this project has saved, and downloads a repository of the hub.

    Raises:
        InputError: they are invalid.
        ConnectionError: weights on the hub are not cached and cannot be downloaded.
    """
    place = source.source if isinstance(source, BackboneSource) else source
    hub = hub_name(place)
    path = Path(place).expanduser() if hub is None else download(hub).path
    folder = path if path.is_dir() else path.parent
    for name, entries in _DESCRIPTIONS:
        file = folder / name
        if not path.exists() or not file.is_file():
            continue
        try:
            about = files.read_json(file)
        except DataError:  # loading the backbone reports it
            return {}
        for entry in (*entries, "pixels"):
            about = about.get(entry) if isinstance(about, Mapping) else None
        if not isinstance(about, Mapping):
            continue
        found = {option: about[option] for option in _STORED if about.get(option) is not None}
        try:
            return PixelOptions(**found).given
        except (InputError, TypeError, ValueError) as error:
            raise InputError(f"{file} has invalid pixels ({error}): save the backbone again") from error
    return {}
