"""Labelling of images by examples that are painted on the page; the work of recent visitors is kept in memory."""

import base64
import io
import logging
import re
import tempfile
import threading
import time
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor
from torchvision.transforms.v2.functional import to_pil_image

from cribo.apps.segment.pictures import overlay
from cribo.base.colours import Colour, class_colours
from cribo.base.console import Progress
from cribo.base.errors import InputError, UnreadableImage
from cribo.base.painting import as_picture
from cribo.data.config import Reading
from cribo.data.labelled.crops import resize_labels
from cribo.data.labelled.inputs import open_labels
from cribo.data.labelled.label_maps import IGNORE_INDEX, LabelledBox
from cribo.data.reading import EncodedImage, open_picture
from cribo.explorer.candidates import ENCODED, Candidates
from cribo.explorer.example_folder import ExampleFolder, ExistingLabels, PageOfStack, Written
from cribo.explorer.images import FolderImages, PageImage, bounded
from cribo.explorer.network import SharedNetwork
from cribo.explorer.painting import Painting, from_runs, to_runs
from cribo.explorer.text import as_text
from cribo.explorer.uploads import Refused
from cribo.features.memory import SegmentationMemory, SegmentationSettings
from cribo.features.memory.pixels import label_pixels
from cribo.features.memory.settings import Refine
from cribo.features.probes.fitting import Choice, FittedProbe, Probe, candidate_probes, default_probe

log = logging.getLogger("cribo")

SHOWN = 768
"""Longer side of a picture to paint on, in pixels."""

LONGEST_NAME = 40
"""Maximum number of characters in the name of a class."""

_TILE = 256  # longer side of a small picture, in pixels
_TRIED = 8  # pictures, in search of one that can be read
_MOST_PATCHES = 65_536  # of the examples of a visitor
_MOST_VISITORS = 32
_SESSION_BYTES = 256 * 2**20
_MOST_BYTES = 2 * 2**30  # of all visitors
_IDLE_SECONDS = 1800  # after which the work of a visitor is removed if another one needs the memory
_COLOUR = re.compile(r"[\s,](#[0-9a-fA-F]{6}|\d{1,3}([\s,]+\d{1,3}){2})$")  # such lines of classes.txt list colours

Tile = tuple[UInt8[np.ndarray, "h w 3"], str]
"""A small picture and its caption."""


class Session:
    """The work of a visitor: classes, paintings, and uploaded pictures.

    Images are addressed by keys: `c` and the number of an image in the collection, `e` and the number of another image
    in the folder of examples, or `u` and the number of an upload.

    Args:
        encoder: the shared encoder.
        candidates: images of the collection to suggest; None without a collection.
        folder: folder to which examples are saved. Those that it contains are the first examples.
        progress: called while these are read.

    Attributes:
        classes: names of the classes.
        current: key of the image to paint on; None if there is none.
        unsaved: why examples are not saved, by key.
        limit_bytes: limit of `nbytes` for uploads and new paintings.

    Raises:
        DataError: the folder contains an invalid example.
    """

    def __init__(
        self,
        encoder: SharedNetwork,
        candidates: Candidates | None = None,
        folder: ExampleFolder | None = None,
        *,
        progress: Progress = lambda what, done, total: None,
    ) -> None:
        self.classes: list[str] = []
        self.current: str | None = None
        self._opened = 0  # times that an image was shown
        self.unsaved: dict[str, str] = {}
        self.limit_bytes = _SESSION_BYTES
        self._encoder, self._candidates, self._folder = encoder, candidates, folder
        self._memory = empty_memory(encoder)
        self._choice = Choice(probe_of(encoder), 1.0, None, None, {}, "")
        self._fitted_probe: FittedProbe | None = None
        self._colours: list[Colour] = []
        self._own: dict[str, PageImage] = {}
        self._paintings: dict[str, Painting] = {}
        self._written = Written()
        self._upcoming: list[str] = []
        self._lock = threading.RLock()
        if folder is not None:
            self._restore(folder, progress)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        uploads = [image.source for image in self._own.values() if isinstance(image.source, EncodedImage)]
        paintings = sum(painting.nbytes for painting in self._paintings.values())
        return self._memory.nbytes + paintings + sum(len(upload.content) for upload in uploads)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to lose: no class, painting or upload that is not in the folder of examples."""
        uploads = any(isinstance(image.source, EncodedImage) for image in self._own.values())
        saved = self._folder is not None and not self.unsaved
        unsaved = (p for p in self._paintings.values() if p.is_changed or (p.confirmed is not None and not saved))
        return not uploads and not any(unsaved) and (saved or not self.classes)

    @property
    def examples(self) -> list[str]:
        """Keys of the examples."""
        return [key for key, painting in self._paintings.items() if painting.confirmed is not None]

    def _restore(self, folder: ExampleFolder, progress: Progress) -> None:
        self.classes, self._colours = folder.classes, folder.palette
        if (examples := folder.examples()) is None:
            return
        numbers = {} if self._candidates is None else self._candidates.images.numbers
        for index in range(len(examples)):
            path, label_map, name = examples.example(index)
            image, labels = PageImage(str(name), Path(str(path)), folder.reading), open_labels(label_map).labels
            key = f"c{numbers.get(image.name)}"
            if image.name not in numbers or not self._has_content(key, image.content):
                key = f"e{index}"
                self._own[key] = image
            labels = _with_data(labels, image)
            self._paintings[key] = Painting(resize_labels(labels, bounded(*image.size, SHOWN)))
            if bool((labels != IGNORE_INDEX).any()):
                self._add(key)
            progress("examples", index + 1, len(examples))

    def _has_content(self, key: str, content: bytes) -> bool:
        """Whether the file of an image has this content."""
        try:
            return self.image(key).content == content
        except Refused:  # deleted, or outside the folder
            return False

    # ---------------------------------------------------------------------------------------------- images

    def image(self, key: str) -> PageImage:
        """Return an image by its key.

        Raises:
            Refused: there is no image with this key.
        """
        if key in self._own:
            return self._own[key]
        if self._candidates is None or not re.fullmatch(r"c\d{1,9}", key):
            raise Refused("This picture is unknown: reload the page.")
        return self._candidates.images[int(key[1:])]

    def upload(self, name: str, content: bytes, *, reading: Reading) -> None:
        """Add a picture and show it for painting.

        Args:
            name: name of the file.
            content: bytes of the file.
            reading: how the picture is read.

        Raises:
            Refused: the file is not an image, has too many pixels, or the session is full.
        """
        try:
            with open_picture(EncodedImage(name, content), reading=reading) as picture:
                extension = picture.kind.extensions[0]
        except UnreadableImage as error:
            raise Refused(f"The picture cannot be used: {error.reason}.") from error
        stem = re.sub(r"[^\w-]+", "_", PurePosixPath(name).stem).strip("_")[:60] or "picture"
        sent = PageImage(stem + extension, EncodedImage(stem + extension, content), reading)
        with self._lock:
            key = next((key for key, image in self._own.items() if image == sent), f"u{len(self._own)}")
            if key not in self._own:
                self._require_room(len(content))
            self._own[key] = sent
            self.open(key)

    def _require_room(self, more: int) -> None:
        """Raise Refused if the session would have more than `limit_bytes`."""
        if self.nbytes + more > self.limit_bytes:
            raise Refused(
                f"Your pictures and paintings exceed {max(0, self.limit_bytes) / 2**20:.0f} MiB: download the "
                "examples, and label the other images with cribo segment."
            )

    def begin(self) -> None:
        """Show the first picture, unless one is shown or there is none."""
        with self._lock:
            if self.current is None:
                with suppress(Refused):
                    self.open(None)

    def open(self, key: str | None) -> None:
        """Show an image for painting: one by its key, or the next one for None.

        Raises:
            Refused: there is no such image, or it cannot be read.
        """
        with self._lock:
            if key is None:
                key = next((key for key in self._next(_TRIED) if self._is_readable(key)), None)
            if key is None:
                raise Refused("There are no other pictures: upload one, or choose one of your examples.")
            self.image(key).load(_TILE)
            self.current = key
            self._opened += 1

    def open_upcoming(self, place: int) -> None:
        """Show a picture of `upcoming` for painting.

        Raises:
            Refused: there is no such picture.
        """
        self._open_one_of(self._upcoming, place)

    def open_example(self, place: int) -> None:
        """Show a picture of `painted` for painting.

        Raises:
            Refused: there is no such picture.
        """
        self._open_one_of(self.examples[::-1], place)

    def _open_one_of(self, keys: Sequence[str], place: int) -> None:
        if not 0 <= place < len(keys):
            raise Refused("This picture is unknown: reload the page.")
        self.open(keys[place])

    def _is_readable(self, key: str) -> bool:
        try:
            self.image(key).load(_TILE)
        except Refused:
            return False
        return True

    def _next(self, count: int) -> list[str]:
        """Return the keys of images to label next: begun or uploaded ones, then suggestions; not the current one."""
        examples = self.examples
        begun = [key for key, painting in self._paintings.items() if key not in examples and painting.is_changed]
        uploaded = [key for key in self._own if key not in examples and key not in begun]
        found = [key for key in (*begun, *uploaded) if key != self.current][:count]
        if self._candidates is not None:
            done = {int(key[1:]) for key in (*examples, *begun) if key[0] == "c"}
            current = [int(key[1:]) for key in (self.current,) if key is not None and key[0] == "c"]
            # With a single class, no label is uncertain.
            fitted = self._fitted() if len(self._present) > 1 else None
            found += [f"c{number}" for number in self._candidates.order(fitted, current, done, count - len(found))]
        return found

    # ---------------------------------------------------------------------------------------------- painting

    def name_classes(self, names: Sequence[str]) -> None:
        """Rename classes, or add classes at the end.

        Raises:
            Refused: names are empty, repeated, too many or like colours; or the class is one of the folder's, which
                others may use.
        """
        names = [" ".join(name.split())[:LONGEST_NAME] for name in names]
        with self._lock:
            if "" in names:
                raise Refused("The name of a class must not be empty.")
            if coloured := next((name for name in names if _COLOUR.search(name)), None):
                raise Refused(f"The name of a class must not end with a colour, got “{coloured}”.")
            if comment := next((name for name in names if name.startswith("#")), None):
                raise Refused(f"The name of a class must not start with #, got “{comment}”: it would be a comment.")
            if repeated := next((name for name in names if names.count(name) > 1), None):
                raise Refused(f"There is a class “{repeated}” already: choose another name.")
            if not len(self.classes) <= len(names) <= IGNORE_INDEX:
                raise Refused(f"There must be {len(self.classes)} to {IGNORE_INDEX} classes, got {len(names)}.")
            for old, new in zip(self.classes, names, strict=False):
                if old != new and self._folder is not None:
                    self._folder.rename_class(old, new, self._written)
            self.classes = names
            # The colours of existing classes never change.
            self._colours = class_colours(names, self._colours)

    def draw(self, key: str, time: float, runs: Any) -> None:
        """Store what is painted on an image, without adding it to the examples.

        Args:
            key: key of the image.
            time: time of the last stroke; no-op if a later painting was stored.
            runs: the labels (see `from_runs`).

        Raises:
            Refused: the painting does not have the size of the image, contains unknown classes, or the session is full.
        """
        with self._lock:
            labels = from_runs(runs, bounded(*self.image(key).size, SHOWN), len(self.classes))
            if key not in self._paintings:
                self._require_room(2 * labels.nbytes)
            painting = self._paintings.setdefault(key, Painting(labels, time))
            if time >= painting.time:
                painting.labels, painting.time = labels, time

    def propose(self, key: str, corners: Any) -> list[int]:
        """Return the region of an object that is marked in an image, as runs (`to_runs`) of 0, and 255 elsewhere.

        Args:
            key: key of the image.
            corners: (left, top, right, bottom) of a box around it, or (x, y) of a point, in pixels of the shown image.

        Raises:
            Refused: there is no such image, or the box or point is not in it, or has no data.
        """
        with self._lock:
            image = self.image(key)
            shown = image.load(SHOWN)
            height, width = shown.shape[1:]
            place = _place(corners, height, width)
            prompts = self._memory.prompts(shown, self._memory.encode([image.load(ENCODED)])[0])
            mask = prompts.mask_of_box(place) if isinstance(place, LabelledBox) else prompts.mask_at_point(*place)
            labels = _with_data(torch.where(mask, 0, IGNORE_INDEX).byte(), image)
            if not bool((labels != IGNORE_INDEX).any()):
                raise Refused("The picture has no data at the marked place: mark another one.")
            return to_runs(labels)

    def confirm(self, key: str) -> None:
        """Add the painting of an image to the examples and save it; remove the example if the painting was erased.

        Raises:
            Refused: the painted region is too small or has no data, or the memory is full.
        """
        with self._lock:
            painting = self._paintings.get(key)
            if painting is None or not painting.is_changed:
                return
            if bool((painting.labels != IGNORE_INDEX).any()):
                self._add(key)
                self._save(key)
            else:
                self._remove(key)

    def _add(self, key: str) -> None:
        if key not in self.examples and self._memory.patches >= _MOST_PATCHES:
            raise Refused("The memory is full: download the examples, and label the other images with cribo segment.")
        painting, image = self._paintings[key], self.image(key)
        encoded = image.load(ENCODED)
        painted = _with_data(painting.labels, image)
        if not bool((painted != IGNORE_INDEX).any()):
            raise Refused("The picture has no data in the painted region: paint elsewhere.")
        labels = resize_labels(painted, (encoded.shape[1], encoded.shape[2]))
        if not bool((labels != IGNORE_INDEX).any()):
            raise Refused("The painted region is too small: paint more.")
        self._memory.add(encoded, labels, name=key)
        painting.labels = painting.confirmed = painted
        self._fitted_probe = None

    def _remove(self, key: str) -> None:
        del self._paintings[key]
        others = [place for place, name in enumerate(self._memory.names) if name != key]
        if not others:
            self._memory = empty_memory(self._encoder)
        elif len(others) < len(self._memory):
            self._memory.remove([*{*range(len(self._memory))} - {*others}])
        self._fitted_probe = None
        if self._folder is not None:
            self._folder.remove(self.image(key), self._written)
            self.unsaved.pop(key, None)

    def _save(self, key: str, *, replace: bool = False) -> None:
        labels = self._paintings[key].confirmed
        if self._folder is None or labels is None:
            return
        self.unsaved.pop(key, None)
        try:
            self._folder.save(self.image(key), labels, self.classes, self._written, replace=replace)
        except ExistingLabels:
            self.unsaved[key] = "it contains other labels"
        except PageOfStack:
            self.unsaved[key] = "a page of a stack: convert the stack to one file per page"
        except (OSError, InputError) as error:
            log.exception("cannot save an example")
            self.unsaved[key] = (error.strerror if isinstance(error, OSError) else None) or "see the log"

    def replace(self) -> None:
        """Save the unsaved examples, replacing other labels of their images in the folder."""
        with self._lock:
            for key in [*self.unsaved]:
                self._save(key, replace=True)

    def zipped(self) -> bytes:
        """Return a zip file with all examples in the layout that `cribo segment --examples` reads.

        Raises:
            Refused: there are no examples.
        """
        if not self.examples:
            raise Refused("There are no examples yet: paint one and confirm it first.")
        content, written = io.BytesIO(), Written()
        with self._lock, tempfile.TemporaryDirectory(prefix="cribo-examples-") as place:
            folder = ExampleFolder(Path(place) / "examples")
            for key in self.examples:
                labels = self._paintings[key].confirmed
                assert labels is not None
                folder.save(self.image(key), labels, self.classes, written)
            with zipfile.ZipFile(content, "w") as archive:
                for file in sorted(folder.path.rglob("*")):
                    archive.write(file, file.relative_to(place))
        return content.getvalue()

    # ---------------------------------------------------------------------------------------------- labels

    @property
    def _present(self) -> list[str]:
        """Names of the classes that occur in the examples."""
        return [name for name, count in zip(self.classes, self._memory.holding, strict=False) if count]

    def _fitted(self) -> FittedProbe | None:
        """Return the probe fitted to the examples; None if there are none."""
        if self._fitted_probe is None and len(self._memory):
            self._fitted_probe = self._memory.fitted_with(self._choice)
        return self._fitted_probe

    def _predicted(
        self, image: PageImage, shown: UInt8[Tensor, "c h w"], refine: Refine
    ) -> UInt8[Tensor, "h w"] | None:
        """Return the predicted labels of an image at the shown size, 255 without data; None without examples."""
        if (fitted := self._fitted()) is None:
            return None
        (features,) = self._memory.encode([image.load(ENCODED)], fitted.choice.probe.blocks)
        votes = fitted(fitted.rows(features.flatten(0, 1))).unflatten(0, features.shape[:2])
        found = label_pixels(votes, shown, patch_size=self._memory.encoder.patch_size, refine=refine)
        return _with_data(found.labels, image)

    def canvas(self) -> dict[str, Any]:
        """Return the classes, and the current image with its painting and predicted labels, as JSON."""
        with self._lock:
            pairs = zip(self.classes, self._colours, strict=True)
            classes = [{"name": name, "colour": list(colour)} for name, colour in pairs]
            if self.current is None:
                return {"key": None, "classes": classes}
            image = self.image(self.current)
            shown = image.load(SHOWN)
            height, width = shown.shape[1:]
            predicted = self._predicted(image, shown, "bilateral")
            painting = self._paintings.get(self.current)
            return {
                "key": self.current,
                "opened": self._opened,
                "name": image.name,
                "width": width,
                "height": height,
                "image": _data_url(shown),
                "painted": [IGNORE_INDEX, width * height] if painting is None else to_runs(painting.labels),
                "predicted": None if predicted is None else to_runs(predicted),
                "changed": painting is not None and painting.is_changed,
                "time": 0 if painting is None else painting.time,
                "classes": classes,
            }

    def upcoming(self, count: int) -> list[Tile]:
        """Return pictures of the images to label next, with their predicted labels."""
        with self._lock:
            self._upcoming = self._next(count)
            return [self._upcoming_tile(self.image(key)) for key in self._upcoming]

    def _upcoming_tile(self, image: PageImage) -> Tile:
        try:
            shown = image.load(_TILE)
            predicted = self._predicted(image, shown, "none")
        except Refused:
            return np.full((_TILE, _TILE, 3), 128, dtype=np.uint8), f"{image.name}: cannot be read"
        picture = as_picture(shown.numpy())
        return picture if predicted is None else overlay(shown, predicted, self._colours), image.name

    def painted(self) -> list[Tile]:
        """Return pictures of the examples with their paintings, the last one first."""
        with self._lock:
            return [self._painted_tile(key) for key in self.examples[::-1]]

    def _painted_tile(self, key: str) -> Tile:
        image = self.image(key)
        shown = image.load(_TILE)
        labels = resize_labels(self._paintings[key].labels, (shown.shape[1], shown.shape[2]))
        unpainted = (labels == IGNORE_INDEX).numpy()[..., None]
        return np.where(unpainted, as_picture(shown.numpy()), overlay(shown, labels, self._colours)), image.name

    def score(self) -> None:
        """Measure the score on left-out examples, and calibrate the probabilities that suggestions compare."""
        # The halves of a single picture often have different classes, so a score from them would be misleading.
        if len(self._memory) > 1 and len(self._present) > 1:
            self._choice = self._memory.fit()

    @property
    def advice(self) -> str:
        """The examples so far, and what to do next, as Markdown."""
        count, present = len(self.examples), self._present
        if self.current is None:
            return "Upload a picture to paint on."
        if not self.classes:
            return (
                "Name a class, such as “road”, and paint over parts of its objects. Unpainted pixels are ignored, so a "
                "few strokes are enough."
            )
        if not count:
            return (
                "No examples yet: paint parts of two classes or more and confirm. Then the next pictures are labelled."
            )
        summary = f"{count} example{'s' * (count > 1)}, {self._memory.patches} patches: {as_text(', '.join(present))}."
        if len(present) == 1:
            return f"{summary} Paint a second class: with a single class, all pixels are assigned to it."
        if count == 1 or self._choice.expected is None:
            return summary
        coverage = self._choice.coverage(len(present))
        return f"{summary} mIoU on what is painted in left-out examples{coverage}: {self._choice.expected:.0%}."

    @property
    def saved(self) -> str:
        """Whether the examples are saved, as Markdown; empty without examples."""
        if not self.examples:
            return ""
        if self._folder is None:
            return (
                "The examples are kept until the server stops: download them, or start the page with `--examples DIR`."
            )
        if not self.unsaved:
            return f"All examples are saved in {as_text(self._folder)}."
        reasons = ", ".join(f"{self.image(key).name} ({reason})" for key, reason in self.unsaved.items())
        return f"Not saved in {as_text(self._folder)}: {as_text(reasons)}."


class Visitors:
    """Sessions of the most recently active visitors.

    Their number and their total memory are bounded. The names of sessions come from browsers, so a visitor could send
    any number of them: sessions with work are removed for others only after half an hour without a request.

    Args:
        encoder: the shared encoder.
        images: the collection; None if there is none.
        folder: folder to which examples are saved; None if there is none.
    """

    def __init__(
        self, encoder: SharedNetwork, images: FolderImages | None = None, folder: ExampleFolder | None = None
    ) -> None:
        self.images = images
        self._encoder, self._folder = encoder, folder
        self._candidates = None
        if images is not None:
            self._candidates = Candidates(images, empty_memory(encoder).encode, probe_of(encoder).blocks)
        self._lock = threading.Lock()
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._active: dict[str, float] = {}  # time of the last request of each session

    def __len__(self) -> int:
        """Return the number of sessions."""
        return len(self._sessions)

    def __contains__(self, visitor: str) -> bool:
        """Whether a visitor has a session."""
        return visitor in self._sessions

    def warm(self, progress: Progress) -> None:
        """Read the examples of the folder, which finds errors and caches the features of their images.

        Raises:
            DataError: an example is invalid.
        """
        Session(self._encoder, self._candidates, self._folder, progress=progress)

    def session(self, visitor: str) -> Session:
        """Return the session of a visitor, which is new if there is none.

        Raises:
            Refused: there are too many visitors.
        """
        if self._candidates is not None:
            self._candidates.start()
        session = self._sessions.get(visitor) or Session(self._encoder, self._candidates, self._folder)
        with self._lock:
            while len(self) + (visitor not in self) > _MOST_VISITORS or self._nbytes() > _MOST_BYTES:
                others = [name for name in self._sessions if name != visitor]
                removed = next((name for name in others if self._may_be_removed(name)), None)
                if removed is None and visitor in self:
                    break
                if removed is None:
                    raise Refused("The page has too many visitors: try again in half an hour.")
                del self._sessions[removed], self._active[removed]
            session = self._sessions.setdefault(visitor, session)
            self._sessions.move_to_end(visitor)
            self._active[visitor] = time.monotonic()
            session.limit_bytes = min(_SESSION_BYTES, _MOST_BYTES - self._nbytes() + session.nbytes)
            return session

    def _may_be_removed(self, visitor: str) -> bool:
        return self._sessions[visitor].is_empty or time.monotonic() - self._active[visitor] > _IDLE_SECONDS

    @contextmanager
    def working(self, visitor: str) -> Iterator[Session]:
        """Yield the session of a visitor while nothing is encoded in the background."""
        if self._candidates is None:
            yield self.session(visitor)
            return
        with self._candidates.paused():
            yield self.session(visitor)

    def close(self) -> None:
        """Stop encoding in the background."""
        if self._candidates is not None:
            self._candidates.stop()

    def _nbytes(self) -> int:
        return sum(session.nbytes for session in self._sessions.values())


def probe_of(encoder: SharedNetwork) -> Probe:
    """Return the default probe: comparing probes would take several seconds after each example."""
    blocks = encoder.probed.blocks
    return default_probe(candidate_probes(blocks), blocks)


def empty_memory(encoder: SharedNetwork) -> SegmentationMemory:
    """Return a memory without examples, whose probe is fixed."""
    settings = SegmentationSettings(**vars(probe_of(encoder)))
    return SegmentationMemory(encoder.probed, settings=settings, batch_size=1)


def _with_data(labels: UInt8[Tensor, "h w"], image: PageImage) -> UInt8[Tensor, "h w"]:
    """Return labels of an image, at any size, with 255 where it has no data."""
    return labels.masked_fill(~image.valid((labels.shape[0], labels.shape[1])), IGNORE_INDEX)


def _place(corners: Any, height: int, width: int) -> LabelledBox | tuple[float, float]:
    """Return a box or point that the browser sent."""
    try:
        numbers = [float(each) for each in (corners if isinstance(corners, list) else [])]
        x, y = numbers[:2]
        box = LabelledBox(0, (x, y, numbers[2], numbers[3])) if len(numbers) > 2 else None
    except (TypeError, ValueError, IndexError, OverflowError) as error:
        raise Refused("The marked place is invalid: mark it again.") from error
    if box is None and 0 <= x <= width and 0 <= y <= height:
        return x, y
    if box is not None and box.clipped(height, width) is not None:
        return box
    raise Refused("The marked place is outside the picture: mark it again.")


def _data_url(image: UInt8[Tensor, "c h w"]) -> str:
    content = io.BytesIO()
    to_pil_image(as_picture(image.numpy())).save(content, "JPEG", quality=90)
    return f"data:image/jpeg;base64,{base64.b64encode(content.getvalue()).decode()}"
