"""Export of a backbone to another library, verified by loading it with that library and comparing features."""

import copy
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cribo.apps.export.config import TARGETS, ExportOptions, Target, require_target
from cribo.apps.export.target import Encode, Exporter, Step, data_type
from cribo.base.errors import DifferentFeatures, InputError
from cribo.base.files import write_json, write_text
from cribo.base.job import Job
from cribo.data.randomness import keyed_generator
from cribo.features.config import FeaturePrecision
from cribo.models import Backbone, Features, describe, normalise
from cribo.models.hub.card import CARD, model_card
from cribo.models.hub.download import source_name

ABOUT = "export.json"
"""The file that describes an export, in its folder."""

TOLERANCES: Mapping[FeaturePrecision, float] = {"float32": 1e-4, "float16": 1e-2}
"""Tolerance of the largest absolute difference of features, relative to the largest absolute feature.

float16 rounds to 5e-4; trained and untrained networks differ by 5e-4 to 2e-3 from themselves in float32.
"""

_ROUNDING, _MOST_ROUNDING = 4, 1e-3
"""Tolerated multiple of the rounding error of the backbone itself (float32 against float64), and the limit of both.

Another order of additions causes errors of the same size; they exceed 1e-4 in deep networks with large activations.
"""

_EXPORTERS: Mapping[Target, tuple[str, str]] = {
    "timm": ("timm_folder", "TIMM"),
    "transformers": ("transformers_folder", "TRANSFORMERS"),
    "onnx": ("graph", "ONNX"),
    "torch-export": ("graph", "TORCH_EXPORT"),
}
_LIBRARIES = ("cribo-ssl", "torch", "timm", "transformers", "onnx", "onnxruntime", "onnxscript")
_OPSETS = range(18, 24)  # the first with antialiased resizing is 18
CARD_LIBRARIES: Mapping[Target, str] = {
    "timm": "timm",
    "transformers": "transformers",
    "onnx": "onnx",
    "torch-export": "pytorch",
}
"""Name of each target's library in model cards."""

_IMAGES = 0x6578706F7274  # key that separates the draws of the check from others


@dataclass(frozen=True)
class ExportReport:
    """The result of an export.

    Attributes:
        target: format of the export.
        folder: folder of the export.
        files: maps file names to sizes in bytes.
        difference: largest absolute difference of the features after loading the export from those of the backbone
            in float32, relative to the largest absolute feature.
        checked: (batch, height, width) of the images used for the comparison.
        how_to_load: Python code that loads the export.
        notes: notes for the user.
    """

    target: Target
    folder: Path
    files: Mapping[str, int]
    difference: float
    checked: tuple[tuple[int, int, int], ...]
    how_to_load: str
    notes: tuple[str, ...]

    @property
    def size_bytes(self) -> int:
        """Total size of all files in bytes."""
        return sum(self.files.values())


def export_backbone(
    backbone: Backbone,
    to: Target,
    out: str | Path,
    *,
    overwrite: bool = False,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    **options: Any,
) -> ExportReport:
    """Export a backbone to another library, and verify the features of the export.

    They may differ from those of the backbone in float32 by at most 1e-4 of the largest, in float16 by 1e-2. The folder
    is created once it is complete and verified.

    Args:
        backbone: the backbone, on any device; it is not changed.
        to: `timm`: a folder for `timm.create_model("local-dir:...", pretrained=True)`.
            `transformers`: a folder for `AutoModel.from_pretrained`.
            `onnx`: `backbone.onnx`, which maps `images` in 0-1 (RGB, or the channels of the backbone) to `tokens`
            (B, N, D) and `global_token` (B, D); batch size, height and width are dynamic. Images are float32 in both
            precisions.
            `torch-export`: `backbone.pt2`, the same for `torch.export.load`, without timm or this package.
        out: the folder to write.
        overwrite: replace an existing export.
        progress: called with the phase, the number of processed items and their total.
        **options: fields of `ExportOptions`, such as `precision="float16"`.

    Raises:
        ValueError: the target is unknown or does not support the network (the message lists targets that do), an option
            is invalid for the target, weights are not finite, or the folder already exists.
        ImportError: the target's library is not installed.
        DifferentFeatures: the verification failed; the export is removed.
        OSError: writing failed; the export is removed.

    Example:
        >>> from cribo.models import build_backbone
        >>> small = build_backbone("resnet18", args={"channels": (8, 8, 8, 8)})
        >>> report = export_backbone(small, "timm", getfixture("tmp_path") / "small")
        >>> sorted(report.files), report.difference < 1e-4
        (['README.md', 'config.json', 'cribo.json', 'export.json', 'model.safetensors'], True)
    """
    out = Path(out)
    chosen = ExportOptions(**options)
    exporter = _exporter(to)
    require_target(to)
    _check(backbone, to, chosen)
    source = None if backbone.loaded is None else backbone.loaded.source
    target = Job(out, "export", overwrite=overwrite, inputs=[source])
    plain = _plain(backbone)
    reports: list[ExportReport] = []

    def write(folder: Path) -> None:
        try:
            written = exporter.write(plain, folder, chosen, steps_of(progress))
        except InputError as error:
            raise InputError(f"{to}: {error}{_others(plain, to, chosen)}") from error
        try:
            difference, checked = compare_features(plain, lambda: exporter.load(folder, chosen), chosen, progress)
        except DifferentFeatures as error:
            raise DifferentFeatures(f"{to}: {error}; the export was removed{_others(plain, to, chosen)}") from error
        report = ExportReport(
            to, out, {}, difference, checked, written.how_to_load.replace("{folder}", out.as_posix()), written.notes
        )
        # Files that are moved or published contain no local paths.
        in_folder = written.how_to_load.replace("{folder}", ".")
        write_json(folder / ABOUT, _describe(report, plain, chosen, in_folder))
        card = model_card(
            plain,
            library=CARD_LIBRARIES[to],
            how_to_load=f"# in the folder of this file\n{in_folder}",
            written_by=f"`cribo export --to {to}`",
            precision=chosen.precision,
            notes=written.notes,
            sections=(check_section(difference),),
        )
        write_text(folder / CARD, card)
        files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
        reports.append(replace(report, files=files))

    target.create(write)
    return reports[0]


def steps_of(progress: Callable[[str, int, int], None]) -> Step:
    """Return a `Step` that reports to `progress`, with the phase, the number of processed items and their total."""

    @contextmanager
    def step(name: str) -> Iterator[None]:
        progress(name, 0, 1)
        yield
        progress(name, 1, 1)

    return step


def check_section(difference: float) -> str:
    """Return the section of a model card about the verification; `difference` is relative to the largest feature."""
    return (
        "## Check\n\nLoaded back, features differ from those of the backbone in float32 by at most "
        f"{difference:.1e} of the largest."
    )


@torch.no_grad()
def compare_features(
    backbone: Backbone,
    load: Callable[[], Encode],
    options: ExportOptions,
    progress: Callable[[str, int, int], None],
) -> tuple[float, tuple[tuple[int, int, int], ...]]:
    """Return the largest relative difference of the export's features, and (batch, height, width) of the images.

    Raises DifferentFeatures if it is above the tolerance, shapes or data types differ, or the export cannot be loaded.
    """
    sizes, tolerance = _sizes(backbone, options.fixed_size), TOLERANCES[options.precision]
    largest = 0.0

    def exact_features(images: Tensor) -> Features:
        exact = copy.deepcopy(backbone).double()
        return exact.encode(normalise(images.double(), mean=backbone.mean, std=backbone.std), options.layers)

    with naming_failures("the export cannot be loaded"):
        encode = load()
    for number, (batch, height, width) in enumerate(sizes):
        progress("comparing", number, len(sizes))
        images = torch.rand(batch, backbone.in_chans, height, width, generator=keyed_generator(_IMAGES, number))
        expected = backbone.encode(normalise(images, mean=backbone.mean, std=backbone.std), options.layers)
        at = f"images of {batch}x{backbone.in_chans}x{height}x{width}"
        with naming_failures(f"the export fails on {at}"):
            tokens, global_token = encode(images)
        for name, own, other in (
            ("tokens", expected.tokens, tokens),
            ("global_token", expected.global_token, global_token),
        ):
            if other.dtype != data_type(options):
                raise DifferentFeatures(f"{name} must be {options.precision}, got {other.dtype}")
            difference = _difference(own, other, f"{name} of {at}")
            allowed = tolerance
            if not difference <= tolerance and options.precision == "float32":
                exact = getattr(exact_features(images), name)
                rounding = _difference(exact, own.double(), f"{name} of {at}")
                allowed = max(tolerance, min(_ROUNDING * rounding, _MOST_ROUNDING))
            if not difference <= allowed:  # also for NaN
                raise DifferentFeatures(
                    f"{name} of {at} must differ by at most {allowed:.0e} of the largest value, got {difference:.1e}"
                )
            largest = max(largest, difference)
    progress("comparing", len(sizes), len(sizes))
    return largest, sizes


def _difference(own: Tensor, other: Tensor, what: str) -> float:
    if own.shape != other.shape:
        raise DifferentFeatures(f"{what} must have shape {tuple(own.shape)}, got {tuple(other.shape)}")
    return float((own - other).abs().max() / own.abs().max().clamp(min=torch.finfo(torch.float32).tiny))


def _sizes(backbone: Backbone, fixed_size: tuple[int, int] | None) -> tuple[tuple[int, int, int], ...]:
    """Return batch and image sizes to compare: the network's own and, if supported, a wide and a tall image."""
    if fixed_size is not None:
        return ((1, *fixed_size),)
    own, patch = backbone.image_size, backbone.patch_size
    if not backbone.takes_any_size:
        return (1, own, own), (2, own, own)
    return (1, own, own), (2, 4 * patch, 6 * patch), (3, 7 * patch, 3 * patch)


def _exporter(to: str) -> Exporter:
    if to not in TARGETS:
        raise InputError(f"the export target must be one of {', '.join(TARGETS)}, got {to!r}")
    module, name = _EXPORTERS[to]
    return getattr(import_module(f"cribo.apps.export.{module}"), name)


def _check(backbone: Backbone, to: Target, options: ExportOptions) -> None:
    backbone.check_layers(options.layers)
    if options.layers > 1 and to in ("timm", "transformers"):
        raise InputError(
            f"layers={options.layers} is supported by onnx and torch-export only: {to} returns tokens of the last "
            "block, and those of other blocks by its own options"
        )
    if options.fixed_size is not None:
        _check_fixed(backbone, to, options.fixed_size)
    check_opset(options.opset)
    if reason := _exporter(to).unsupported_reason(backbone, options):
        ways_out = f"{_others(backbone, to, options)}{_by_timm_positions(backbone, to, options)}"
        raise InputError(f"{to} does not support this network: {reason}{ways_out}")
    for key, value in backbone.model.state_dict().items():
        if not value.isfinite().all():
            raise InputError(f"weights must be finite, got NaN or infinity in {key}; nothing was written")
        largest = torch.finfo(data_type(options)).max
        if value.is_floating_point() and value.abs().amax() > largest:
            raise InputError(
                f"weights must be at most {largest:.0f} in {options.precision}, got {value.abs().amax():.3g} in {key}: "
                "use --precision float32"
            )


def check_opset(opset: int) -> None:
    """Raise InputError unless graphs of this opset can be written."""
    if opset not in _OPSETS:
        raise InputError(f"opset must be {_OPSETS[0]} to {_OPSETS[-1]}, got {opset}")


def _check_fixed(backbone: Backbone, to: Target, size: tuple[int, int]) -> None:
    said, patch, own = f"fixed_size {size[0]},{size[1]}", backbone.patch_size, backbone.image_size
    if to in ("timm", "transformers"):
        raise InputError(f"{said} is for onnx and torch-export: {to} holds a network, whose images may have any size")
    if min(size) < patch or size[0] % patch or size[1] % patch:
        raise InputError(f"fixed_size must be multiples of {patch}, the patch size of {backbone.name}, got {size}")
    if not backbone.takes_any_size and size != (own, own):
        raise InputError(f"{backbone.name} takes images of {own} x {own} pixels only, got {said}: give {own}")


def _others(backbone: Backbone, to: Target, options: ExportOptions) -> str:
    """Return advice to use other targets that support a backbone, as the end of a message."""
    able = [name for name in TARGETS if name != to and _exporter(name).unsupported_reason(backbone, options) is None]
    if options.layers > 1 or options.fixed_size is not None:
        able = [name for name in able if name in ("onnx", "torch-export")]
    return f"; use --to {' or '.join(able)}" if able else ""


@torch.no_grad()
def _by_timm_positions(backbone: Backbone, to: Target, options: ExportOptions) -> str:
    """Return advice to resize positions as timm does, with the change of the features, if the target supports that."""
    if backbone.numerics.positions == "timm":
        return ""
    plain, other = _plain(backbone), _plain(backbone)
    other.set_numerics(replace(backbone.numerics, positions="timm"))
    if _exporter(to).unsupported_reason(other, options) is not None:
        return ""
    changes = []
    for number, (batch, height, width) in enumerate(_sizes(backbone, None)):
        images = torch.rand(batch, backbone.in_chans, height, width, generator=keyed_generator(_IMAGES, number))
        images = normalise(images, mean=backbone.mean, std=backbone.std)
        own, changed = plain.encode(images).tokens, other.encode(images).tokens
        changes.append((_difference(own, changed, "tokens"), f"{height}x{width}"))
    change, size = max(changes)
    return (
        f"; or give up the project's method with --backbone.positions timm: features do not change at "
        f"{backbone.image_size}x{backbone.image_size} pixels, and by up to {change:.1%} of the largest at {size}"
    )


def _plain(backbone: Backbone) -> Backbone:
    """Return a copy on the host, in float32 and in evaluation mode."""
    plain = copy.deepcopy(backbone).cpu().float().eval().requires_grad_(False)
    plain.set_checkpointing("none")
    return plain


def _describe(report: ExportReport, backbone: Backbone, options: ExportOptions, how_to_load: str) -> dict[str, Any]:
    return {
        "target": report.target,
        "backbone": describe(backbone),
        "fingerprint": backbone.fingerprint(),
        "source": None if backbone.loaded is None else source_name(backbone.loaded.source),
        "revision": None if backbone.loaded is None else backbone.loaded.revision,
        "options": asdict(options),
        "difference": report.difference,
        "checked": [list(size) for size in report.checked],
        "how_to_load": how_to_load.splitlines(),
        "notes": list(report.notes),
        "versions": library_versions(),
    }


def library_versions() -> dict[str, str]:
    """Return the versions of the libraries that take part in exports, of those that are installed."""
    installed = {name: list(importlib.metadata.distributions(name=name)) for name in _LIBRARIES}
    return {name: found[0].version for name, found in installed.items() if found}


@contextmanager
def naming_failures(failure: str) -> Iterator[None]:
    """Convert errors, whose types depend on the library, to DifferentFeatures."""
    try:
        yield
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise DifferentFeatures(f"{failure} ({type(error).__name__}: {reason})") from error
