"""Segmentation by example: label new images by the patches of a few labelled images."""

import dataclasses
import hashlib
import logging
import math
import os
import statistics
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from cribo.base.bounds import at_least
from cribo.base.colours import Colour, class_colours
from cribo.base.console import Progress, no_progress
from cribo.base.devices import resolve_devices
from cribo.base.errors import ConfigError, DataError, InputError, MissingBlocks
from cribo.data.config import PIXEL_OPTIONS, PixelOptions
from cribo.data.labelled.inputs import DecodedImage, Example, ImageLike, LabelsLike, decode_image, open_labels
from cribo.data.labelled.label_maps import IGNORE_INDEX, LabelMap, read_classes
from cribo.features.config import BackboneSource
from cribo.features.encoder import Encoder, open_network
from cribo.features.memory.pixels import label_pixels
from cribo.features.memory.prompts import PromptImage
from cribo.features.memory.settings import SegmentationSettings
from cribo.features.memory.storage import Stored, StoredExample, read_memory, write_memory
from cribo.features.probes.encoding import encode_grids, probe_encoder
from cribo.features.probes.examples import content_hash, label_features
from cribo.features.probes.fitting import (
    MOST_PATCHES,
    Choice,
    FittedProbe,
    LabelledPatches,
    concatenate,
    default_blocks,
    fit_probe,
    left_out_confusions,
    thinned,
)
from cribo.models import Backbone, inflate

log = logging.getLogger("cribo")

BackboneLike = Backbone | Encoder | BackboneSource | str | os.PathLike[str]

_LEAST_LABELLED = 0.5  # share of the examples' patches that calibration needs


@dataclass(frozen=True)
class Segmentation:
    """Predicted labels of one image, at its original size.

    Attributes:
        labels: class of each pixel; 255 where the confidence is below `min_confidence`.
        confidence: probability of the class, 0 to 1, calibrated on left-out halves of the examples unless
            `SegmentationMemory.uncalibrated` gives a reason.
        shares: share of the pixels of each class that occurs, by name, in descending order.
    """

    labels: UInt8[Tensor, "h w"]
    confidence: Float[Tensor, "h w"]
    shares: Mapping[str, float]

    @classmethod
    def of(
        cls,
        labels: UInt8[Tensor, "h w"],
        confidence: Float[Tensor, "h w"],
        classes: Sequence[str],
        valid: Bool[Tensor, "h w"] | None = None,
    ) -> "Segmentation":
        """Count the pixels of each class; pixels without data get no class and no confidence."""
        if valid is not None:
            labels, confidence = labels.masked_fill(~valid, IGNORE_INDEX), confidence * valid
        counts = labels[labels != IGNORE_INDEX].bincount().tolist()
        shares = {classes[label]: count / labels.numel() for label, count in enumerate(counts) if count}
        return cls(labels, confidence, dict(sorted(shares.items(), key=lambda share: -share[1])))


class SegmentationMemory:
    """Segments images given a few labelled examples, without training the backbone.

    Each patch of a new image is labelled by the most similar patches of the examples (paper, section 4.1; "in-context"
    segmentation of Balazevic et al. 2023), by ridge regression on them, or by both. The head and the blocks of the
    backbone are chosen by cross-validation over the examples (`fit`). Examples may be added at any time. A memory is
    thread-safe.

    Args:
        backbone: a `Backbone`, used on its own device by default; an `Encoder`; a `BackboneSource`; or a source
            that `load_backbone` accepts, or `mean-colour`.
        classes: names of the classes, or a text file with them; None for numbers up to the highest label.
        palette: a colour for each class; None for the palette of the first palette PNG, or else `class_colours`.
        settings: settings for encoding and labelling; values of None are chosen by cross-validation.
        device: device of the backbone; by default its current device, or for a source, the first GPU, else the CPU. An
            `Encoder` has its own.
        batch_size: number of images or windows of equal size to encode at once.
        keep_blocks: blocks whose features are kept; by default the fixed blocks and the last one, or all candidates.

    Raises:
        DataError: names of classes are invalid.
        ValueError: windows do not fit the patches, the backbone does not have the blocks, or `load_backbone` fails.

    Example:
        >>> from cribo.models import build_backbone
        >>> backbone = build_backbone("resnet10t", image_size=64)
        >>> memory = SegmentationMemory(backbone, classes=["left", "right"])
        >>> image = torch.zeros(3, 64, 64, dtype=torch.uint8)
        >>> image[:, :, 32:] = 255
        >>> memory.add(image, (torch.arange(64) >= 32).expand(64, 64))
        True
        >>> found = memory.segment(image)
        >>> found.labels.shape, int(found.labels[20, 10]), int(found.labels[20, 60])
        (torch.Size([64, 64]), 0, 1)
    """

    def __init__(
        self,
        backbone: BackboneLike,
        *,
        classes: Sequence[str] | str | os.PathLike[str] | None = None,
        palette: Sequence[Colour] | None = None,
        settings: SegmentationSettings | None = None,
        device: torch.device | str | None = None,
        batch_size: int = 8,
        keep_blocks: Sequence[int] | None = None,
    ) -> None:
        self.settings = settings or SegmentationSettings()
        self.reading = self.settings.reading
        wanted = keep_blocks or self.settings.blocks
        at_least(1).check(batch_size=batch_size)
        encoder, self.backbone = _opened(backbone, wanted, device, self.settings)
        self.settings.check(encoder.patch_size)
        if not set(wanted or ()) <= set(encoder.blocks):
            raise MissingBlocks(
                f"blocks must be among {_listed(encoder.blocks)} for {self.backbone['source']}, got "
                f"{_listed(wanted or ())}: omit blocks"
            )
        self.encoder, self.batch_size = encoder, batch_size
        self._classes = None if classes is None else read_classes(classes).names
        self._palette = None if palette is None else list(palette)
        self._stored: list[StoredExample] = []
        self._choice: Choice | None = None
        self._fitted: FittedProbe | None = None
        self._lock = threading.RLock()

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self._stored)

    @property
    def patches(self) -> int:
        """Number of labelled patches of all examples."""
        return sum(len(stored.features) for stored in self._stored)

    @property
    def nbytes(self) -> int:
        """Size of the features of all examples in bytes."""
        return sum(stored.features.nbytes for stored in self._stored)

    @property
    def names(self) -> list[str]:
        """Names of the examples, in the order of addition."""
        return [stored.name for stored in self._stored]

    @property
    def classes(self) -> list[str]:
        """Names of the classes; label c is `classes[c]`."""
        if self._classes is not None:
            return self._classes
        highest = max((int(stored.pixels[:, 1].max()) for stored in self._stored), default=-1)
        return [str(c) for c in range(highest + 1)]

    @property
    def palette(self) -> list[Colour]:
        """Colour of each class."""
        return class_colours(self.classes, self._palette or ())

    @property
    def holding(self) -> list[int]:
        """Number of examples in which each class occurs."""
        present = [set(stored.pixels[:, 1].tolist()) for stored in self._stored]
        return [sum(c in classes for classes in present) for c in range(len(self.classes))]

    @property
    def absent(self) -> list[str]:
        """Classes that occur in no example and are therefore never predicted."""
        return [name for name, count in zip(self.classes, self.holding, strict=True) if not count]

    @property
    def uncalibrated(self) -> str:
        """The reason why confidences are not calibrated, and what to do; "" if they are.

        A single image does not show how predictions on other images fail, and a few strokes, mostly in the middle of
        objects, do not show how the pixels between them do (benchmarks/RESULTS.md).
        """
        if len(self) < 2:
            return "there is only one example: label a second image"
        labelled = statistics.fmean(stored.labelled for stored in self._stored)
        if labelled < _LEAST_LABELLED:
            return f"only {labelled:.0%} of the examples' area is labelled: label at least {_LEAST_LABELLED:.0%}"
        return ""

    @property
    def patch_pixels(self) -> int:
        """Side of the square that a patch of the examples covers in their pixels, for large images.

        It is the patch size where examples are encoded at about their own size, and follows `scale` if that is set.
        """
        patch, scale = self.encoder.patch_size, self.settings.scale
        if scale is not None:
            return max(1, round(patch / scale))
        sides = []
        for stored in self._stored:
            counts = torch.bincount(stored.pixels[:, 0].long(), weights=stored.pixels[:, 2].double())
            sides.append(math.sqrt(float(counts.max())))
        side = statistics.median(sides)
        # Sides are rounded to whole patches, so that patches of the same size differ by a pixel.
        return patch if abs(side - patch) <= 1 else max(1, round(side))

    @property
    def fingerprint(self) -> str:
        """Hash of the backbone, examples, classes and settings, on which predictions depend."""
        settings = dataclasses.asdict(self.settings)
        for name in (*PIXEL_OPTIONS, "penalty", "prior"):  # which earlier versions lack
            if settings[name] is None:
                del settings[name]
        about = [self.encoder.identity, self._classes, sorted(settings.items())]
        digest = hashlib.sha256(repr(about).encode())
        for stored in self._stored:
            digest.update(f"{stored.image} {stored.labels}".encode())
        return digest.hexdigest()

    # ------------------------------------------------------------------------------------------------ examples

    def add(self, image: ImageLike, labels: LabelsLike, *, name: str | None = None) -> bool:
        """Add an example, and return whether the memory changed.

        If an example with the same pixels and labels is stored, this is a no-op. If an example with the same pixels
        and other labels is stored, it is replaced.

        Args:
            image: a file, a Pillow image, a uint8 array (H, W, C) or a uint8 tensor (C, H, W) with
                the C channels of the backbone.
            labels: the class of each pixel, 255 for none: a grey or palette PNG, or integers (H, W). Or boxes around
                objects (`LabelledBox`), whose pixels are found by their features (`prompts.PromptImage`).
            name: name in messages; by default the name of the file.

        Raises:
            UnreadableImage: a file cannot be read.
            DataError: the labels differ in size from the image, contain no class or an invalid value, or their palette
                contradicts that of earlier examples.
        """
        return self.extend([Example(image, labels, name)]) == 1

    def extend(self, examples: Sequence[Example]) -> int:
        """Add all examples, or none if one is invalid; return how many have changed the memory.

        Images of equal size are encoded as batches.

        Raises:
            DataError: see `add`.
        """
        with self._lock:
            palette = self._palette
            fresh: dict[str, tuple[str, Tensor, LabelMap]] = {}  # by the hash of the image
            for number, example in enumerate(examples):
                name = example.name or _name_of(example.image, len(self) + number + 1)
                image, valid = decode_image(example.image, self.reading, self.encoder.in_chans)
                labels = open_labels(example.labels, (image.shape[1], image.shape[2]))
                self._check(name, image, labels)
                if valid is not None:
                    labels = labels._replace(labels=labels.labels.masked_fill(~valid, IGNORE_INDEX))
                palette = _joined(palette, labels, name)
                hashes = content_hash(image), _hash_of(labels)
                if not any(hashes == (stored.image, stored.labels) for stored in self._stored):
                    fresh[hashes[0]] = (name, image, labels)
            features = self.encode([image for _, image, _ in fresh.values()])
            stored = [
                StoredExample(
                    name=name,
                    image=image,
                    labels=_hash_of(labels),
                    **vars(
                        label_features(
                            own,
                            self.prompts(pixels, own).fill(labels) if labels.boxes else labels.labels,
                            self.encoder.patch_size,
                            self.settings.precision,
                        )
                    ),
                )
                for (image, (name, pixels, labels)), own in zip(fresh.items(), features, strict=True)
            ]
            self._palette = palette
            places = {other.image: place for place, other in enumerate(self._stored)}
            for one in stored:
                if one.image in places:
                    log.info("replaced the labels of %s in the memory", one.name)
                    self._stored[places[one.image]] = one
                else:
                    self._stored.append(one)
            if stored:
                self._choice = self._fitted = None
            return len(stored)

    def prompts(self, image: UInt8[Tensor, "chans h w"], features: Float[Tensor, "rows columns l d"]) -> PromptImage:
        """Return an image with its features of all blocks (`encode`), to find objects from boxes and points."""
        blocks = self.encoder.blocks
        places = [blocks.index(block) for block in default_blocks(blocks)]
        rows = concatenate(features.flatten(0, 1).cpu(), places, None).unflatten(0, features.shape[:2])
        return PromptImage(image, rows, self.encoder.patch_size, self.settings.refine)

    def _check(self, name: str, image: Tensor, label_map: LabelMap) -> None:
        labels, boxes = label_map.labels, label_map.boxes
        if labels.shape != image.shape[1:]:
            raise DataError(
                f"{name}: labels must have the size of their image, {image.shape[2]} x {image.shape[1]}, "
                f"got {labels.shape[1]} x {labels.shape[0]}"
            )
        for box in boxes:
            if not 0 <= box.label < IGNORE_INDEX or box.clipped(*labels.shape) is None:
                raise DataError(
                    f"{name}: a box must have a class and an area in the image of {labels.shape[1]} x "
                    f"{labels.shape[0]}, got class {box.label} and (left, top, right, bottom) = {box.corners}"
                )
        values = torch.cat((labels[labels != IGNORE_INDEX], torch.tensor([box.label for box in boxes]).byte()))
        if not len(values):
            raise DataError(f"{name}: every pixel is {IGNORE_INDEX} (no class): label at least one pixel")
        if self._classes is not None and int(values.max()) >= len(self._classes):
            raise DataError(
                f"{name}: labels must be in 0..{len(self._classes) - 1} ({', '.join(self._classes)}) or "
                f"{IGNORE_INDEX} (no class), got {int(values.max())}: correct the labels, or add classes to the list"
            )

    def add_classes(self, names: Sequence[str]) -> None:
        """Add classes, which examples may have from now on; labels of the present ones do not change.

        Raises:
            DataError: a name is present, or there would be more than 255 classes.
        """
        with self._lock:
            self._classes = read_classes([*self.classes, *names]).names
            self._choice = self._fitted = None

    def remove(self, examples: Sequence[int]) -> None:
        """Remove examples by their indices in `names`, or none if an index is invalid.

        Raises:
            DataError: an index is out of range, or no example would be left.
        """
        with self._lock:
            if wrong := [place for place in examples if not 0 <= place < len(self)]:
                raise DataError(f"no example has the index {wrong[0]}: indices are 0 to {len(self) - 1}")
            kept = [stored for place, stored in enumerate(self._stored) if place not in set(examples)]
            if not kept:
                raise DataError(
                    f"cannot remove all {len(self)} examples of the memory: keep at least one, or delete the memory"
                )
            self._stored = kept
            self._choice = self._fitted = None

    def classes_of(self, example: int) -> dict[str, float]:
        """Return the class shares of an example's labelled pixels by name, in descending order."""
        pixels = self._stored[example].pixels
        counts = torch.bincount(pixels[:, 1], weights=pixels[:, 2].double(), minlength=len(self.classes))
        shares = zip(self.classes, (counts / counts.sum()).tolist(), strict=True)
        return dict(sorted(((name, share) for name, share in shares if share), key=lambda pair: -pair[1]))

    # ---------------------------------------------------------------------------------------------- new images

    def encode(
        self, images: Sequence[UInt8[Tensor, "chans h w"]], blocks: Sequence[int] | None = None
    ) -> list[Float[Tensor, "rows columns l d"]]:
        """Compute the features of images, by default of all blocks; see `encode_grids`."""
        return encode_grids(self.encoder, images, self.settings, batch_size=self.batch_size, blocks=blocks)

    def segment(self, image: ImageLike) -> Segmentation:
        """Label the pixels of an image.

        Raises:
            UnreadableImage: the file cannot be read.
            DataError: the memory is empty.
        """
        return self.segment_all([image])[0]

    @torch.no_grad()
    def segment_all(self, images: Sequence[ImageLike | DecodedImage]) -> list[Segmentation]:
        """Label several images; images of equal size are encoded as batches. Pixels without data get no label.

        Raises:
            DataError: the memory is empty.
        """
        opened = [decode_image(image, self.reading, self.encoder.in_chans) for image in images]
        fitted = self.fitted()
        features = self.encode([image.pixels for image in opened], fitted.choice.probe.blocks)
        votes = fitted(fitted.rows(torch.cat([own.flatten(0, 1) for own in features])))
        parts = votes.split([own.shape[0] * own.shape[1] for own in features])
        return [
            self._segmentation(part.unflatten(0, own.shape[:2]), *image)
            for part, own, image in zip(parts, features, opened, strict=True)
        ]

    def _segmentation(
        self,
        votes: Float[Tensor, "rows columns c"],
        image: UInt8[Tensor, "chans h w"],
        valid: Bool[Tensor, "h w"] | None,
    ) -> Segmentation:
        settings = self.settings
        found = label_pixels(
            votes,
            image,
            patch_size=self.encoder.patch_size,
            refine=settings.refine,
            reach=settings.reach,
            contrast=settings.contrast,
        )
        labels = found.labels.masked_fill(found.confidence < settings.min_confidence, IGNORE_INDEX)
        return Segmentation.of(labels, found.confidence, self.classes, valid)

    # ---------------------------------------------------------------------------------------------------- fit

    def fit(self, progress: Progress = no_progress) -> Choice:
        """Choose the values of the probe that are None in the settings.

        The choice is cached until examples change.

        Raises:
            DataError: the memory is empty.
        """
        with self._lock:
            if self._choice is None:
                blocks = self.encoder.blocks
                self._choice = fit_probe(self._examples(), blocks, self.settings, progress=progress)
            return self._choice

    def fitted(self) -> FittedProbe:
        """Return the probe fitted to the present examples.

        It is unaffected by later changes of the memory.

        Raises:
            DataError: the memory is empty.
        """
        with self._lock:
            if self._fitted is None:
                choice, neighbours = self.fit(), self.settings.neighbours
                if self.patches > MOST_PATCHES:
                    log.info("using %d of the %d patches of the examples", MOST_PATCHES, self.patches)
                self._fitted = self.fitted_with(choice)
                if choice.probe.head != "ridge" and self.patches < neighbours:
                    log.warning(
                        "the memory has %d patches, fewer than neighbours=%d: all of them vote",
                        *(self.patches, neighbours),
                    )
            return self._fitted

    def fitted_with(self, choice: Choice) -> FittedProbe:
        """Fit a given probe to the present examples, without the cross-validation of `fit`, which takes longer.

        Raises:
            DataError: the memory is empty.
        """
        with self._lock:
            blocks = self.encoder.blocks
            return FittedProbe(self._examples(), choice, blocks, device=self.encoder.device, **self.settings.voting)

    def left_out(self) -> Int[Tensor, "n c c"]:
        """Compute the confusion matrix (rows are labels) of each example's left-out patches.

        Uses the chosen probe.

        `fit().expected` is their mean IoU over the classes that occur in the rows.

        Raises:
            DataError: the memory is empty, or nothing can be left out (`fit().expected` is None).
        """
        with self._lock:
            probe = self.fit().probe
            if self.unmeasured is not None:
                raise DataError(f"{self.unmeasured}, so nothing can be left out: label more")
            return left_out_confusions(self._examples(), probe, self.encoder.blocks, self.settings)

    @property
    def unmeasured(self) -> str | None:
        """Reason why no score can be measured on left-out patches; None if `fit().expected` is measured."""
        if self.fit().expected is not None:
            return None
        if len(self) == 1 and len(self._stored[0].halves.unique()) == 1:
            return "all labels are in one half of a single image"
        return "all labelled patches have the same class"

    def _examples(self) -> list[LabelledPatches]:
        """Return the labelled patches to fit a probe to."""
        if not self._stored:
            raise DataError("the memory is empty: add an image with labels first")
        classes = len(self.classes)
        return thinned([stored.patches(classes) for stored in self._stored], MOST_PATCHES)

    # ----------------------------------------------------------------------------------------------- on disk

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the memory to one file atomically.

        Raises:
            ValueError: the encoder has no identity.
            OSError: the file cannot be written.
        """
        identity = self.encoder.identity
        if identity is None:
            raise InputError("cannot save the memory of an encoder without an identity: give it one")
        with self._lock:
            stored = Stored(
                encoder=identity,
                source=self.backbone["source"],
                classes=self._classes,
                palette=self._palette,
                settings=dataclasses.asdict(self.settings),
                blocks=self.encoder.blocks,
                choice=None if self._choice is None else self._choice.as_json(),
                examples=[*self._stored],
            )
        write_memory(path, stored)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        backbone: BackboneLike | None,
        *,
        changes: Mapping[str, Any] | None = None,
        device: torch.device | str | None = None,
        batch_size: int = 8,
    ) -> "SegmentationMemory":
        """Read a memory written by `save`.

        Args:
            path: the file.
            backbone: the backbone with which the memory was created; None to only list or remove examples.
            changes: settings, by name, that replace the saved ones; settings of the features cannot be changed.
            device: see `SegmentationMemory`.
            batch_size: see `SegmentationMemory`.

        Raises:
            DataError: the file does not exist, is damaged, is not a memory, or was created with another backbone.
            ValueError: a change affects a setting of the features, or a value is out of range.
        """
        stored = read_memory(path)
        of_earlier_versions = {"refine": "bilateral"} if stored.settings["refine"] == "guided" else {}
        saved = SegmentationSettings(**{**stored.settings, **of_earlier_versions})
        settings = saved.changed(changes or {})
        missing = sorted(set(settings.blocks or ()) - set(stored.blocks))
        if missing:
            raise InputError(
                f"{path} has features of blocks {_listed(stored.blocks)}, not of {_listed(missing)}: omit --blocks, or "
                "create another memory with these blocks"
            )
        another = f"{path} was created with another backbone, {stored.source} ({stored.encoder[:12]})"
        try:
            memory = cls(
                _without_network(stored) if backbone is None else backbone,
                classes=stored.classes,
                palette=stored.palette,
                settings=settings,
                device=device,
                batch_size=batch_size,
                keep_blocks=stored.blocks,
            )
        except MissingBlocks as error:
            raise DataError(f"{another}: use that backbone, or create another memory") from error
        identity = memory.encoder.identity
        if identity != stored.encoder:
            raise DataError(
                f"{another}, not with {memory.backbone['source']} ({str(identity)[:12]}): use that backbone, or create "
                "another memory"
            )
        if backbone is None:
            memory.backbone = {"source": stored.source}
        memory._stored = [*stored.examples]
        if stored.choice is not None and settings.of_choice == saved.of_choice:
            memory._choice = Choice.from_json(stored.choice)
        return memory


def _hash_of(labels: LabelMap) -> str:
    """Return a hash of a label map and its boxes."""
    pixels = content_hash(labels.labels)
    return hashlib.sha256(f"{pixels} {labels.boxes}".encode()).hexdigest() if labels.boxes else pixels


def _opened(
    backbone: BackboneLike,
    blocks: Sequence[int] | None,
    device: torch.device | str | None,
    pixels: PixelOptions,
) -> tuple[Encoder, dict[str, Any]]:
    """Open an encoder of these blocks and the last one for images of these channels; return it with its description."""
    in_chans = None if pixels.channels is None else pixels.in_chans
    if isinstance(backbone, Backbone):
        place = next(backbone.parameters()).device if device is None else torch.device(device)
        source = backbone.loaded.source if backbone.loaded else f"{backbone.name} with random weights"
        return probe_encoder((backbone if in_chans is None else inflate(backbone, in_chans)).to(place), blocks), {
            "source": source,
            "architecture": backbone.name,
        }
    if isinstance(backbone, Encoder):
        return backbone, {"source": f"an encoder named {backbone.identity}"}
    if not isinstance(backbone, BackboneSource):
        backbone = BackboneSource(os.fspath(backbone))
    if backbone.layers != 1:
        raise ConfigError(f"layers must be 1, got {backbone.layers}: set blocks in the settings (--blocks 9,10)")
    place = resolve_devices(None if device is None else (str(device),), "device")[0]
    network, about = open_network(backbone, in_chans=pixels.in_chans)
    return probe_encoder(network.eval().to(place), blocks), about


def _without_network(stored: Stored) -> Encoder:
    """Return a placeholder encoder with the identity of a stored memory; it cannot encode images."""

    def encode(images: Tensor) -> Tensor:
        raise InputError(f"the memory was opened without its backbone, {stored.source}, so it cannot encode images")

    return Encoder.from_function(encode, 1, identity=stored.encoder, blocks=stored.blocks)


def _listed(blocks: Sequence[int]) -> str:
    return ", ".join(map(str, blocks))


def _name_of(image: ImageLike | DecodedImage, number: int) -> str:
    return os.path.basename(image) if isinstance(image, str | os.PathLike) else f"example {number}"  # noqa: PTH119


def _joined(palette: list[Colour] | None, labels: LabelMap, name: str) -> list[Colour] | None:
    """Extend the palette by that of a label map; raise DataError if the colours of a class differ."""
    if labels.palette is None:
        return palette
    if palette is None:
        return list(labels.palette)
    for value in labels.labels.unique().tolist():
        if value == IGNORE_INDEX or value >= min(len(palette), len(labels.palette)):
            continue
        if labels.palette[value] != palette[value]:
            raise DataError(
                f"{name}: class {value} has the colour {labels.palette[value]} in its palette, but {palette[value]} "
                "in earlier examples: check that all were labelled with the same list of classes, and save them with "
                "one palette, or as grey PNGs"
            )
    return [*palette, *labels.palette[len(palette) :]]
