"""Pairs of views of a run's images and their joint-space clusters, as a training step sees them."""

import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from cribo.explorer.pictures import shown_size
from cribo.explorer.uploads import Refused
from cribo.models import load_backbone
from cribo.objectives.sampling import ObjectSample, sample_objects
from cribo.pretraining.config import PretrainConfig
from cribo.pretraining.files import CONFIG
from cribo.pretraining.presets import load_config
from cribo.pretraining.session import open_source

PAIRS = 24
"""Pairs that are drawn from the data."""

_LONGEST = 384


@dataclass(frozen=True)
class PairPicture:
    """One pair of views.

    Attributes:
        views: the two views, as they are cropped.
        clusters: the same, each cluster that both views have in a colour of its own, the rest grey.
        sentence: what is to be seen.
    """

    views: tuple[UInt8[np.ndarray, "h w 3"], UInt8[np.ndarray, "h w 3"]]
    clusters: tuple[UInt8[np.ndarray, "h w 3"], UInt8[np.ndarray, "h w 3"]]
    sentence: str


class PairSample:
    """Some view pairs of a run, clustered when they are first asked for.

    Args:
        run: the run folder.
        source: of its network, as `load_backbone` takes it.
        images: where the images are, if not where the run says.
        device: of the network.
    """

    def __init__(self, run: Path, source: str, images: Path | None, device: str) -> None:
        self._run = run
        self._source = source
        self._images = images
        self._device = device
        self._lock = threading.Lock()
        self._sample: ObjectSample | None = None

    def picture(self, number: int) -> tuple[int, PairPicture]:
        """A pair by its number; numbers beyond the ends begin anew at the other end.

        Returns:
            the number, and the pair.

        Raises:
            Refused: the run's images are not there, or the run has no clusters.
        """
        with self._lock:
            if self._sample is None:
                self._sample = self._open()
        number %= len(self._sample.pairs)
        return number, _draw(self._sample, number)

    def _open(self) -> ObjectSample:
        config = run_config(self._run, self._images)
        if not config.needs_objects:
            raise Refused("This run was trained at image level alone (losses.cross_view and cross_image are off).")
        try:
            source = open_source(config)
        except (ValueError, OSError) as error:
            raise Refused(
                f"The images of this run cannot be read ({error}): start the page with --images DIR."
            ) from error
        backbone = load_backbone(self._source).to(self._device)
        return sample_objects(backbone, source, config, count=PAIRS)


def run_config(run: Path, images: Path | None) -> PretrainConfig:
    """A run's configuration, with its images elsewhere if they are.

    Raises:
        Refused: it cannot be read.
    """
    elsewhere = {} if images is None else {"data.root": str(images), "data.images": ""}
    try:
        return load_config(run / CONFIG, elsewhere)
    except ValueError as error:
        raise Refused(f"The configuration of the run cannot be read: {error}.") from error


def _draw(sample: ObjectSample, number: int) -> PairPicture:
    colours = sample.object_colours(number)
    views = [_enlarged(sample.view(number, view)) for view in (0, 1)]
    clusters = [_enlarged(sample.painted(number, view, colours)) for view in (0, 1)]
    sentence = (
        f"Pair {number} of {len(sample.pairs)} (counted from 0): {len(colours)} objects are seen in both views. One "
        "colour is one object; grey is seen in one view only."
    )
    return PairPicture((views[0], views[1]), (clusters[0], clusters[1]), sentence)


def _enlarged(picture: np.ndarray) -> UInt8[np.ndarray, "h w 3"]:
    """A picture (H, W, 3) in 0-1 at the size at which it is shown, with sharp pixels."""
    height, width = shown_size(picture.shape[0], picture.shape[1], _LONGEST)
    rows = np.arange(height) * picture.shape[0] // height
    columns = np.arange(width) * picture.shape[1] // width
    return np.rint(255 * picture[rows][:, columns]).astype(np.uint8)
