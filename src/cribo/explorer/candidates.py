"""Images to label next: a sample of the collection, encoded in the background, and its order for given examples."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from cribo.apps.segment.suggesting import cover, sample, similarity
from cribo.data.randomness import keyed_generator
from cribo.explorer.images import FolderImages
from cribo.explorer.uploads import Refused
from cribo.features.probes.fitting import FittedProbe, concatenate

log = logging.getLogger("cribo")

Encode = Callable[[Sequence[UInt8[Tensor, "c h w"]], Sequence[int]], list[Float[Tensor, "rows columns l d"]]]
"""Computes the features of some blocks for a list of images, as `SegmentationMemory.encode` does."""

ENCODED = 512
"""Longer side in pixels to which images are reduced before they are encoded."""

_MOST = 200  # candidates; features of as many images fit into the cache
_LABELLED = 512  # labelled patches that candidates are compared with


class Candidates:
    """Images of a collection that may be suggested for labelling.

    A background thread encodes them one by one, so that their features are in the cache of the encoder when the images
    are labelled. It pauses while requests are processed.

    Args:
        images: the collection; up to 200 random images of it are candidates.
        encode: encodes images, and keeps their features.
        blocks: numbers of the blocks whose features are compared.
    """

    def __init__(self, images: FolderImages, encode: Encode, blocks: Sequence[int]) -> None:
        self.images = images
        self._encode_images, self._blocks = encode, blocks
        order = torch.randperm(len(images), generator=keyed_generator(len(images)))
        self._waiting: list[int] = order[:_MOST].tolist()
        self._numbers: list[int] = []  # of the encoded candidates
        self._rows: list[Float[Tensor, "p e"]] = []  # of some patches of each
        self._similar: list[Float[Tensor, " n"]] = []  # of each to the patches of all (see `similarity`)
        self._state = threading.Condition()
        self._requests = 0
        self._encoding = self._stopped = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the background thread; no-op if it was started before."""
        with self._state:
            if self._thread is None and not self._stopped:
                self._thread = threading.Thread(target=self._encode_all, name="candidates", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Stop the background thread."""
        with self._state:
            self._stopped = True
            self._state.notify_all()
        if self._thread is not None:
            self._thread.join()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the background thread; wait until the image that it is encoding is finished."""
        with self._state:
            self._requests += 1
            self._state.wait_for(lambda: not self._encoding)
        try:
            yield
        finally:
            with self._state:
                self._requests -= 1
                self._state.notify_all()

    def order(self, fitted: FittedProbe | None, chosen: Sequence[int], without: set[int], count: int) -> list[int]:
        """Return the images to label next: those that cover the uncertain patches of all candidates best.

        Candidates that are not encoded yet come last.

        Args:
            fitted: the probe fitted to the examples; None if their labels cannot be compared yet, in which case all
                patches are equally uncertain.
            chosen: images that are being labelled.
            without: images that are not suggested.
            count: maximum number of images.
        """
        with self._state:
            waiting, numbers, groups, similar = [*self._waiting], [*self._numbers], [*self._rows], self._similar
        found: list[int] = []
        kept = [place for place, number in enumerate(numbers) if number not in without or number in chosen]
        if kept:
            rows = torch.cat(groups)
            covered, probabilities = torch.zeros(len(rows)), torch.full((len(rows), 1), 0.5)
            if fitted is not None:
                covered = similarity(rows, fitted.known_rows(_LABELLED).cpu())
                probabilities = fitted(rows).cpu()
            first = [row for row, place in enumerate(kept) if numbers[place] in chosen]
            own = torch.stack([similar[place] for place in kept])
            best = cover(own, probabilities, covered, count, first=first)
            found = [numbers[kept[place]] for place in best]
        left = (number for number in waiting if number not in without and number not in chosen)
        return [*found, *left][:count]

    def _encode_all(self) -> None:
        try:
            while True:
                with self._state:
                    self._state.wait_for(lambda: self._stopped or not self._requests)
                    if self._stopped or not self._waiting:
                        return
                    number = self._waiting[0]
                    self._encoding = True
                rows = None
                try:
                    rows = self._encode(number)
                finally:
                    with self._state:
                        self._waiting.pop(0)
                        if rows is not None:
                            self._add(number, rows)
                        self._encoding = False
                        self._state.notify_all()
        except Exception:
            log.exception("images are no longer encoded in the background")

    def _encode(self, number: int) -> Float[Tensor, "p e"] | None:
        """Return the rows of some patches of an image; None if it cannot be read or has no data."""
        try:
            image = self.images[number]
            pixels = image.load(ENCODED)
            valid = image.valid((pixels.shape[1], pixels.shape[2]))
        except Refused as error:
            log.warning("not suggested: %s", error)
            return None
        if not valid.any():
            log.warning("not suggested: %s has no data", image.name)
            return None
        (features,) = self._encode_images([pixels], self._blocks)
        return concatenate(sample(features, number, valid), range(len(self._blocks)), None)

    def _add(self, number: int, rows: Float[Tensor, "p e"]) -> None:
        earlier = zip(self._similar, self._rows, strict=True)
        similar = [torch.cat((own, similarity(rows, group))) for own, group in earlier]
        self._rows.append(rows)
        self._similar = [*similar, similarity(torch.cat(self._rows), rows)]
        self._numbers.append(number)
