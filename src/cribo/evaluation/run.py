"""Context of a running evaluation."""

import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console

from cribo.base.console import Phases
from cribo.base.devices import resolve_devices, resolve_workers
from cribo.data import LabelledImages
from cribo.evaluation.config import EvaluationRuntime
from cribo.evaluation.data import Splits
from cribo.features.cache import FeatureCache, Machine
from cribo.features.config import BackboneSource, FeaturePrecision
from cribo.features.encoder import Encoder
from cribo.features.extraction import EncodedView, PatchFeatures, Preparation, extract_patches
from cribo.method.config import Interpolation
from cribo.models import Backbone


@dataclass
class Run:
    """Context of a running evaluation, passed to its protocol.

    Attributes:
        source: source of the backbone.
        data: opened splits.
        runtime: runtime configuration of the protocol.
        backbone: the network, on the CPU.
        about: description of the backbone in `results.json`.
        console: console for progress bars.
        num_pictures: number of images to draw.
        folder: output folder, set before `measure`; protocols that train write their checkpoints there.
        prepared: any object passed from `prepare` to `measure`.
        started: `time.perf_counter` at the start.
    """

    source: BackboneSource
    data: Splits
    runtime: Any
    backbone: Backbone
    about: dict[str, Any]
    console: Console
    num_pictures: int
    folder: Path = Path()
    prepared: Any = None
    started: float = field(default_factory=time.perf_counter)

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """Devices of the run."""
        if isinstance(self.runtime, EvaluationRuntime):
            return resolve_devices(self.runtime.devices)
        return ("cuda" if self.runtime.on_gpu else "cpu",)

    @cached_property
    def encoder(self) -> Encoder:
        """The network on the first device, with the features of the last `source.layers` blocks."""
        return Encoder(self.backbone.to(self.devices[0]), layers=self.source.layers)

    def machine(self, identity: str | None) -> Machine:
        """Return the resources of a protocol that does not train, with the cache of features with this identity."""
        runtime, cache = self.runtime, None
        if runtime.cache != "none":
            about = {name: self.about[name] for name in ("source", "architecture")}
            cache = FeatureCache(Path(runtime.cache), identity, about)
        workers = resolve_workers(runtime.workers)
        return Machine(self.devices, runtime.batch_size, workers, runtime.memory_gib, cache)

    def patches(
        self,
        images: LabelledImages,
        *,
        size: tuple[int, int] | None = None,
        interpolation: Interpolation = "bicubic",
        precision: FeaturePrecision = "float32",
        unit: bool = True,
    ) -> PatchFeatures:
        """Return the features of all patches of images, with the class counts of each patch.

        Features are cached by encoder, image and size, and are shared between protocols.

        Args:
            images: images to encode.
            size: (height, width) in pixels of all images; None rounds each size to multiples of the patch size.
            interpolation: interpolation of resized images.
            precision: precision of the stored features.
            unit: whether features are scaled to unit length.

        Raises:
            UnreadableImage, DataError: an image or label map is unusable.
            ValueError: the features do not fit in memory or on the disk.
        """
        encoder = self.encoder
        views = [EncodedView(index) for index in range(len(images))]
        preparation = Preparation(encoder.patch_size, size, interpolation, unit=unit)
        with Phases(self.console) as progress:
            return extract_patches(
                encoder,
                images,
                views,
                preparation,
                machine=self.machine(encoder.identity),
                precision=precision,
                progress=progress,
            )
