"""View pairs of a run's images and their joint-space clusters, as in a training step."""

import logging
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from cribo.base.errors import Untrusted
from cribo.data.config import DEFAULT_READING, Reading
from cribo.explorer.pictures import shown_size, with_numbers
from cribo.explorer.uploads import Refused
from cribo.models import load_backbone
from cribo.objectives.sampling import ObjectSample, sample_objects
from cribo.pretraining.config import PretrainConfig
from cribo.pretraining.recorded import check_run_config, open_run_images, read_run_config

log = logging.getLogger("cribo")

PAIRS = 24
"""Number of pairs."""

COMMAND = "cribo explore --run"
"""Start of the command that opens a run, for errors."""

_LONGEST = 384


@dataclass(frozen=True)
class PairPicture:
    """A pair of views.

    Attributes:
        views: the two views.
        clusters: the two views with clusters that occur in both in colour, and other pixels in grey.
        sentence: description of the picture.
    """

    views: tuple[UInt8[np.ndarray, "h w 3"], UInt8[np.ndarray, "h w 3"]]
    clusters: tuple[UInt8[np.ndarray, "h w 3"], UInt8[np.ndarray, "h w 3"]]
    sentence: str


class PairSample:
    """Some view pairs of a run, clustered on first use.

    Args:
        run: the run folder.
        source: source of the network, for `load_backbone`.
        images: the images, as given by the user.
        device: device of the network.
        reading: how these images are read.
        trust: use the custom code that the run names. Only for runs from sources that you trust.
    """

    def __init__(
        self,
        run: Path,
        source: str,
        images: str | Path | None,
        device: str,
        *,
        reading: Reading = DEFAULT_READING,
        trust: bool = False,
    ) -> None:
        self._run = run
        self._source = source
        self._images = images
        self._reading = reading
        self._device = device
        self._trust = trust
        self._lock = threading.Lock()
        self._sample: ObjectSample | None = None

    def picture(self, number: int) -> tuple[int, PairPicture]:
        """Return a pair by its number, modulo the number of pairs.

        Returns:
            The number, and the pair.

        Raises:
            Refused: the images are missing, or the run has no clusters.
        """
        with self._lock:
            if self._sample is None:
                self._sample = self._open()
        number %= len(self._sample.pairs)
        return number, _draw(self._sample, number)

    def _open(self) -> ObjectSample:
        config = run_config(self._run)
        if not config.needs_objects:
            raise Refused(
                "This run was trained with the image-level loss only (losses.cross_view and cross_image are off)."
            )
        try:
            check_run_config(config, self._run, trust=self._trust, names=("objects",))
            source = open_run_images(
                config, self._run, self._images, reading=self._reading, command=COMMAND, trust=self._trust
            )
        except Untrusted as error:
            raise Refused(str(error)) from error
        except (ValueError, OSError) as error:
            log.warning("the images of %s cannot be read: %s", self._run, error)
            raise Refused("The images of this run cannot be read: start the page with --images DIR.") from error
        backbone = load_backbone(self._source, trust=self._trust).to(self._device)
        return sample_objects(backbone, source, config, count=PAIRS)


def run_config(run: Path) -> PretrainConfig:
    """Read the configuration of a run.

    Raises:
        Refused: the configuration cannot be read.
    """
    try:
        return read_run_config(run)
    except ValueError as error:
        log.warning("the configuration of %s cannot be read: %s", run, error)
        raise Refused("The configuration of the run cannot be read; see the log of `cribo explore`.") from error


def _draw(sample: ObjectSample, number: int) -> PairPicture:
    colours = sample.object_colours(number)
    views = [_enlarged(sample.view(number, view)) for view in (0, 1)]
    numbers = {cluster: place for place, cluster in enumerate(colours, start=1)}
    clusters = [
        with_numbers(_enlarged(sample.painted(number, view, colours)), sample.clusters(number, view), numbers)
        for view in (0, 1)
    ]
    sentence = (
        f"Pair {number} of {len(sample.pairs)} (counted from 0): {len(colours)} objects occur in both views. Each "
        "number and colour is one object; grey regions occur in one view only."
    )
    return PairPicture((views[0], views[1]), (clusters[0], clusters[1]), sentence)


def _enlarged(picture: UInt8[np.ndarray, "h w 3"]) -> UInt8[np.ndarray, "new_h new_w 3"]:
    """Resize a picture to the shown size by nearest neighbour."""
    height, width = shown_size(picture.shape[0], picture.shape[1], _LONGEST)
    rows = np.arange(height) * picture.shape[0] // height
    columns = np.arange(width) * picture.shape[1] // width
    return picture[rows][:, columns]
