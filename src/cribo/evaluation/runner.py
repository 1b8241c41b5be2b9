"""Runner of all evaluations: opens backbone and data, runs a protocol, and writes the results."""

import logging
import time
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from rich.console import Console
from torch import Tensor
from torch.optim.swa_utils import update_bn

from cribo.base.bounds import at_least
from cribo.base.errors import ConfigError
from cribo.base.job import Job
from cribo.base.machine import is_first_process
from cribo.base.versions import versions
from cribo.data import LabelledImages
from cribo.data.config import DEFAULT_READING, Reading
from cribo.evaluation.config import EvaluationRuntime
from cribo.evaluation.data import PLACES, Splits
from cribo.evaluation.intervals import write_counts
from cribo.evaluation.pictures import write_pictures
from cribo.evaluation.protocol import Outcome, Protocol
from cribo.evaluation.results import OUT, EvaluationResult, plain
from cribo.evaluation.run import Run
from cribo.features.config import BackboneSource
from cribo.features.encoder import open_network
from cribo.features.patches import resize_image
from cribo.features.reading import completed_for
from cribo.models import Backbone, normalise

log = logging.getLogger("cribo")

_CALIBRATION_IMAGES = 64


def evaluate(
    protocol: Protocol,
    backbone: BackboneSource | str,
    data: Any,
    runtime: Any = None,
    *,
    out: Path | None = None,
    overwrite: bool = False,
    resume: bool = False,
    pictures: int = 6,
    reading: Reading = DEFAULT_READING,
    command: str = "",
    console: Console | None = None,
) -> tuple[EvaluationResult, Path]:
    """Evaluate a backbone with a protocol, and write results and pictures to a folder.

    Args:
        protocol: protocol with its settings, such as `DenseNN(ratios=(1, 8))`.
        backbone: source of the backbone, such as a run folder or a timm model name.
        data: an instance of the protocol's `data_type`, such as `SegmentationData("camvid", "CAMVID")`.
        runtime: an instance of the protocol's `runtime_type`; its defaults if None.
        out: output folder; by default a numbered folder `evaluations/<protocol>-<data>-<backbone>`.
        overwrite: replace an existing evaluation in `out`.
        resume: resume the evaluation in `out`, or start it if it does not exist; for protocols that train.
        pictures: number of images to draw.
        reading: how images are read.
        command: command line that reproduces the evaluation, stored in the result.
        console: console for progress bars.

    Returns:
        The result and its folder.

    Raises:
        ValueError: backbone, data, settings or folder are invalid; raised before any work as far as possible.
        ImportError: an optional package is not installed.
        FileNotFoundError: a file of the backbone or the data does not exist.
        ConnectionError: timm's weights cannot be downloaded.
        UnreadableImage: an image is corrupt.
        Interrupted: SIGTERM or SIGUSR1 was received; use `resume` to continue. (Ctrl-C raises KeyboardInterrupt.)
        NonFiniteLoss: training has diverged.
    """
    if resume and not protocol.trains():
        raise ConfigError(f"{protocol.name} does not train and cannot be resumed: omit --resume")
    run, protocol = open_run(protocol, backbone, data, runtime, pictures=pictures, reading=reading, console=console)
    return evaluate_run(run, protocol, out=out, overwrite=overwrite, resume=resume, command=command)


def open_run(
    protocol: Protocol,
    backbone: BackboneSource | str,
    data: Any,
    runtime: Any = None,
    *,
    pictures: int = 6,
    reading: Reading = DEFAULT_READING,
    console: Console | None = None,
) -> tuple[Run, Protocol]:
    """Open backbone and data of an evaluation, and set all settings of the protocol; arguments as in `evaluate`.

    Returns:
        The run, and the protocol with all settings set.

    Raises:
        errors of `evaluate` about backbone, data and settings.
    """
    at_least(0).check(pictures=pictures)
    source = BackboneSource(backbone) if isinstance(backbone, str) else backbone
    protocol.check_packages()
    protocol.check_backbone(source)
    runtime = protocol.runtime_type(**protocol.runtime_defaults) if runtime is None else runtime
    started = time.perf_counter()
    reading = completed_for(source, reading)
    splits = data.open_by(reading)
    reading = splits.reading or reading
    network, about = open_network(source, in_chans=reading.in_chans)
    network.pixels = reading.trained_with  # described with a trained segmenter
    run = Run(source, splits, runtime, network, about, console or Console(quiet=True), pictures, started=started)
    return run, protocol.prepare(run)


def evaluate_run(
    run: Run,
    protocol: Protocol,
    *,
    out: Path | None = None,
    overwrite: bool = False,
    resume: bool = False,
    command: str = "",
) -> tuple[EvaluationResult, Path]:
    """Evaluate the run and protocol of `open_run`; other arguments, result and errors as in `evaluate`."""
    source, splits, runtime = run.source, run.data, run.runtime
    if not source.pretrained and not protocol.trains():
        calibrate_batch_norms(run.backbone, splits.train)
    name = f"{protocol.name}-{splits.title}-{run.about['name']}"
    inputs = source.source, splits.about.get("root")

    def measured() -> tuple[Outcome, EvaluationResult]:
        outcome = protocol.measure(run)
        seconds = time.perf_counter() - run.started if outcome.seconds is None else outcome.seconds
        return outcome, EvaluationResult(
            evaluation=protocol.name,
            settings=protocol.used(run),
            backbone=run.about,
            data={**data_facts(run, protocol), **outcome.data},
            classes=list(outcome.classes),
            metrics=list(protocol.metrics),
            varies=protocol.varies,
            results=outcome.rows,
            seconds=seconds,
            versions={**versions(outcome.device or run.devices[0]), **outcome.packages},
            command=command,
            evaluation_title=protocol.title,
            class_metric=protocol.class_metric,
        )

    def write(outcome: Outcome, result: EvaluationResult, folder: Path) -> None:
        if outcome.image_counts:
            write_counts(folder, outcome.image_counts)
        try:
            write_pictures(result, outcome.panels, outcome.palette, folder)
            if outcome.write is not None:
                outcome.write(result, folder)
        except Exception:
            if protocol.trains():
                raise  # --resume draws again
            log.exception("some pictures could not be written; the results are complete")
        result.write(folder)  # written last: marks the evaluation as finished

    if not protocol.trains():
        target = Job(out or OUT / name, "evaluation", numbered=out is None, overwrite=overwrite, inputs=inputs)
        outcome, result = measured()
        return result, target.create(lambda part: write(outcome, result, part))
    from cribo.evaluation.training import evaluation_folder, finished_result

    with evaluation_folder(
        out,
        name,
        identity(run, protocol),
        overwrite=overwrite,
        resume=resume,
        runtime=runtime,
        inputs=inputs,
    ) as run.folder:
        if (done := finished_result(run.folder, resume=resume)) is not None:
            return done, run.folder
        outcome, result = measured()
        if is_first_process():
            write(outcome, result, run.folder)
    return result, run.folder


def measure(protocol: Protocol, backbone: Backbone, data: Splits, *, device: torch.device | str = "cpu") -> Outcome:
    """Evaluate a network in memory with a protocol that does not train, without writing files.

    Args:
        protocol: protocol with its settings.
        backbone: the network, on `device`, in any mode.
        data: opened splits.
        device: device of the evaluation.

    Raises:
        ValueError: settings, network and data are incompatible.
        UnreadableImage, DataError: an image is unusable.
    """
    runtime = EvaluationRuntime(devices=(str(device),), workers=0, cache="none")
    source = BackboneSource(backbone.name)
    run = Run(source, data, runtime, backbone, {}, Console(quiet=True), num_pictures=0)
    return protocol.prepare(run).measure(run)


def calibrate_batch_norms(backbone: Backbone, images: LabelledImages) -> None:
    """Estimate the batch norm statistics of an untrained network from 64 images, for a stronger baseline.

    Args:
        backbone: modified in place; no-op if it has no batch norms.
        images: images of any size.
    """
    device = next(backbone.parameters()).device

    def normalised(index: int) -> Float[Tensor, "1 c h w"]:
        image, patch = images.load(index), backbone.patch_size
        height, width = (side // patch * patch for side in image.shape[1:])
        if not backbone.takes_any_size:
            height = width = backbone.image_size
        if not backbone.takes_any_size or min(height, width) < 2 * patch:  # statistics need more than one value
            height, width = max(height, 2 * patch), max(width, 2 * patch)
            image = resize_image(image, (height, width), "bicubic")
        pixels = image[None, :, :height, :width].to(device).float() / 255
        return normalise(pixels, mean=backbone.mean, std=backbone.std)

    update_bn(map(normalised, range(min(_CALIBRATION_IMAGES, len(images)))), backbone)


def data_facts(run: Run, protocol: Protocol) -> dict[str, Any]:
    """Return the description of the data in `results.json`, as far as known before the measurement."""
    return {protocol.roles.get(name, name): value for name, value in run.data.about.items()}


def is_result_of(result: EvaluationResult, run: Run, protocol: Protocol) -> bool:
    """Whether a result has the same backbone, protocol, settings and data (at the same path) as a run."""
    wanted = {
        "evaluation": protocol.name,
        "fingerprint": run.about["fingerprint"],
        "settings": protocol.used(run),
        "data": data_facts(run, protocol),
    }
    found = {
        "evaluation": result.evaluation,
        "fingerprint": result.backbone.get("fingerprint"),
        "settings": result.settings,
        "data": {name: result.data.get(name) for name in wanted["data"]},
    }
    return plain(wanted) == found


def identity(run: Run, protocol: Protocol) -> dict[str, Any]:
    """Return the settings that must be unchanged when an evaluation is resumed."""
    about = {name: value for name, value in run.data.about.items() if name not in PLACES}
    settings = protocol.used(run)
    return {"evaluation": protocol.name, "backbone": run.about["fingerprint"], "data": about, "settings": settings}
