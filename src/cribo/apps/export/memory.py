"""Export of a memory of labelled images as a graph from the pixels of an image to its labels, verified."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.export import Dim, ExportedProgram

from cribo.apps.export.config import ExportOptions, Target, require_target
from cribo.apps.export.graph import convert_to_onnx, name_sizes, save_torch, trace_module
from cribo.apps.export.run import ABOUT, CARD_LIBRARIES, check_opset, library_versions, naming_failures, steps_of
from cribo.base.errors import DifferentFeatures, InputError
from cribo.base.files import write_json, write_text
from cribo.base.job import Job
from cribo.base.wording import option_text
from cribo.data.randomness import keyed_generator
from cribo.features.memory import SegmentationMemory
from cribo.features.memory.graph import MOST_PIXELS, MemoryGraph
from cribo.models import describe
from cribo.models.backbone import RGB
from cribo.models.hub.card import CARD, model_card
from cribo.models.hub.download import source_name

GRAPHS: tuple[Target, ...] = ("onnx", "torch-export")
"""Formats that a memory can be exported to."""

LEAST_EQUAL = 0.999
"""Required share of the pixels with the label of the memory."""

MOST_DIFFERENCE = 1e-3
"""Tolerance of the mean absolute difference of the confidence."""

_FILES: Mapping[str, str] = {"onnx": "memory.onnx", "torch-export": "memory.pt2"}
_SIZES = ((160, 240), (301, 203), (384, 384))  # height and width of the compared images
_TRACED = (90, 130)
_IMAGES = 0x6D656D  # key that separates the draws of the check from others

_LOAD: Mapping[str, str] = {
    "onnx": """\
import numpy, onnxruntime
session = onnxruntime.InferenceSession("{folder}/memory.onnx")
pixels = numpy.asarray(picture.convert("RGB"))  # uint8, of any size
labels, confidence = session.run(["labels", "confidence"], {"image": pixels})""",
    "torch-export": """\
import numpy, torch
label = torch.export.load("{folder}/memory.pt2").module()
pixels = torch.from_numpy(numpy.array(picture.convert("RGB")))  # uint8, of any size
labels, confidence = label(pixels)""",
}

Label = Callable[[UInt8[Tensor, "h w c"]], tuple[UInt8[Tensor, "h w"], Float[Tensor, "h w"]]]
"""Computes labels and confidence of the pixels of an image with the target's library only."""


@dataclass(frozen=True)
class MemoryReport:
    """The result of the export of a memory.

    Attributes:
        target: format of the export.
        folder: folder of the export.
        files: maps file names to sizes in bytes.
        equal: smallest share of the pixels of an image with the same label, after loading the export.
        difference: largest mean absolute difference of the confidence.
        checked: (height, width) of the images used for the comparison.
        how_to_load: Python code that labels a picture with the export.
    """

    target: Target
    folder: Path
    files: Mapping[str, int]
    equal: float
    difference: float
    checked: tuple[tuple[int, int], ...]
    how_to_load: str

    @property
    def size_bytes(self) -> int:
        """Total size of all files in bytes."""
        return sum(self.files.values())


def export_memory(
    memory: SegmentationMemory,
    to: Target,
    out: str | Path,
    *,
    overwrite: bool = False,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    opset: int = ExportOptions.opset,
) -> MemoryReport:
    """Export a memory with its backbone as one graph, and verify its labels.

    The graph maps `image` (H, W, C) in uint8, of any size and with the C channels of the backbone, to `labels` (H, W)
    in uint8 and `confidence` (H, W) in float32. At three sizes, 99.9 % of the pixels must have the label of the memory,
    and the confidence may differ by 0.001 on average. The folder is created once it is complete and verified.

    Args:
        memory: the memory, on the host; it is not changed.
        to: `onnx` for `memory.onnx`, or `torch-export` for `memory.pt2`.
        out: the folder to write.
        overwrite: replace an existing export.
        progress: called with the phase, the number of processed items and their total.
        opset: version of the ONNX operator set, 18 to 23.

    Raises:
        DataError: the memory is empty.
        InputError: the target is no graph, the memory encodes in windows or is not on the host, the network cannot be
            traced, or the folder already exists.
        MissingPackage: the target's library is not installed.
        DifferentFeatures: the verification failed; the export is removed.
        OSError: writing failed; the export is removed.
    """
    require_graph(to)
    require_target(to)
    check_opset(opset)
    if memory.encoder.device.type != "cpu":
        raise InputError(f"the memory must be on the host, got {memory.encoder.device}: load it with device='cpu'")
    out, step = Path(out), steps_of(progress)
    graph = MemoryGraph(memory).eval()
    target = Job(out, "export", overwrite=overwrite, inputs=[memory.backbone["source"]])
    reports: list[MemoryReport] = []

    def write(folder: Path) -> None:
        with step("tracing"):
            program = _trace(graph)
        _write(program, folder / _FILES[to], to, memory, opset, step)
        equal, difference = compare_labels(memory, lambda: load(folder, to), progress)
        report = MemoryReport(
            to, out, {}, equal, difference, _SIZES, _how_to_load(to, memory).replace("{folder}", out.as_posix())
        )
        in_folder = _how_to_load(to, memory).replace("{folder}", ".")
        write_json(folder / ABOUT, _describe(report, memory, opset, in_folder))
        write_text(folder / CARD, _card(report, memory, in_folder))
        files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
        reports.append(replace(report, files=files))

    target.create(write)
    return reports[0]


def require_graph(to: str) -> None:
    """Raise InputError unless memories can be exported to a target."""
    if to not in GRAPHS:
        raise InputError(f"a memory is exported to {' or '.join(GRAPHS)}, got --to {to}: {to} holds a backbone only")


def load(folder: Path, to: Target) -> Label:
    """Load an export on the host, with the target's library only."""
    path = folder / _FILES[to]
    if to == "torch-export":
        module = torch.export.load(path).module()
        return lambda image: module(image)
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def label(image: UInt8[Tensor, "h w c"]) -> tuple[Tensor, Tensor]:
        labels, confidence = session.run(["labels", "confidence"], {"image": image.numpy()})
        return torch.from_numpy(labels), torch.from_numpy(confidence)

    return label


@torch.no_grad()
def compare_labels(
    memory: SegmentationMemory, load: Callable[[], Label], progress: Callable[[str, int, int], None]
) -> tuple[float, float]:
    """Compare an export with its memory: lowest share of equal labels, largest mean difference in confidence.

    Raises DifferentFeatures if one is beyond its limit, or the export cannot be loaded.
    """
    shares, differences = [1.0], [0.0]
    with naming_failures("the export cannot be loaded"):
        label = load()
    for number, (height, width) in enumerate(_SIZES):
        progress("comparing", number, len(_SIZES))
        spots = torch.rand(1, memory.encoder.in_chans, 5, 6, generator=keyed_generator(_IMAGES, number))
        image = (F.interpolate(spots, size=(height, width), mode="bicubic")[0].clamp(0, 1) * 255).to(torch.uint8)
        at = f"an image of {height}x{width}"
        with naming_failures(f"the export fails on {at}"):
            labels, confidence = label(image.permute(1, 2, 0).contiguous())
        own = memory.segment(image)
        shares.append(float((labels == own.labels).float().mean()))
        differences.append(float((confidence - own.confidence).abs().mean()))
        if shares[-1] < LEAST_EQUAL or not differences[-1] <= MOST_DIFFERENCE:  # also for NaN
            raise DifferentFeatures(
                f"of {at}, at least {LEAST_EQUAL:.1%} of the labels must be those of the memory, got {shares[-1]:.2%}, "
                f"and the confidence may differ by {MOST_DIFFERENCE:.0e} on average, got {differences[-1]:.1e}; the "
                "export was removed: use the other one of --to onnx and --to torch-export"
            )
    progress("comparing", len(_SIZES), len(_SIZES))
    return min(shares), max(differences)


def _trace(graph: MemoryGraph) -> ExportedProgram:
    sides = {place: Dim(name, min=2, max=MOST_PIXELS) for place, name in enumerate(("height", "width"))}
    return trace_module(
        graph, graph.backbone, torch.zeros(*_TRACED, graph.backbone.in_chans, dtype=torch.uint8), {"image": sides}
    )


def _write(program: ExportedProgram, path: Path, to: Target, memory: SegmentationMemory, opset: int, step: Any) -> None:
    about = json.dumps(
        {key: each if isinstance(each, str) else json.dumps(each) for key, each in _about(memory).items()}
    )
    if to == "torch-export":
        with step("writing"):
            save_torch(program, path, about, memory.encoder.backbone.name)
        return
    with step("converting to ONNX"):
        exported = convert_to_onnx(program, "image", ("labels", "confidence"), opset)
    name_sizes(exported.model.graph.inputs[0], ("height", "width", None))
    for output in exported.model.graph.outputs:
        name_sizes(output, ("height", "width"))
    exported.model.metadata_props.update(json.loads(about))
    with step("writing"):
        exported.save(path)


def _about(memory: SegmentationMemory) -> dict[str, Any]:
    """Return the description of the graph for the file's metadata."""
    return {
        **describe(memory.encoder.backbone),
        "classes": memory.classes,
        "palette": [list(colour) for colour in memory.palette],
        "probe": str(memory.fit().probe),
        "image": _images(memory),
        "unlabelled": 255,
    }


def _images(memory: SegmentationMemory) -> str:
    """Describe the input of the graph."""
    channels = memory.encoder.in_chans
    what = "RGB" if channels == RGB else f"{channels} channels"
    return f"{what} in uint8, (height, width, {channels}), of any size{_read_with(memory)}"


def _how_to_load(to: Target, memory: SegmentationMemory) -> str:
    """Return the code that loads the graph; images of other than three channels are arrays, not pictures."""
    channels = memory.encoder.in_chans
    if channels == RGB:
        return _LOAD[to]
    return _LOAD[to].replace('picture.convert("RGB")', "pixels").replace("uint8, of", f"uint8, (h, w, {channels}), of")


def _read_with(memory: SegmentationMemory) -> str:
    """Describe the reading options of the examples, as the end of a sentence; "" for the defaults."""
    given = [f"--{name} {option_text(value)}" for name, value in memory.settings.given.items()]
    return f", of files that cribo reads with {' '.join(given)}" if given else ""


def _describe(report: MemoryReport, memory: SegmentationMemory, opset: int, how_to_load: str) -> dict[str, Any]:
    backbone = memory.encoder.backbone
    return {
        "target": report.target,
        "memory": memory.fingerprint,
        "backbone": describe(backbone),
        "fingerprint": backbone.fingerprint(),
        "source": None if backbone.loaded is None else source_name(backbone.loaded.source),
        "classes": memory.classes,
        "palette": [list(colour) for colour in memory.palette],
        "examples": len(memory),
        "reading": memory.settings.given,
        "options": {"opset": opset},
        "equal": report.equal,
        "difference": report.difference,
        "checked": [list(size) for size in report.checked],
        "how_to_load": how_to_load.splitlines(),
        "versions": library_versions(),
    }


def _card(report: MemoryReport, memory: SegmentationMemory, how_to_load: str) -> str:
    rows = "\n".join(
        f"| {label} | {name} | {', '.join(map(str, colour))} |"
        for label, (name, colour) in enumerate(zip(memory.classes, memory.palette, strict=True))
    )
    return model_card(
        memory.encoder.backbone,
        library=CARD_LIBRARIES[report.target],
        how_to_load=f"# in the folder of this file\n{how_to_load}",
        written_by=f"`cribo export --memory --to {report.target}`",
        sections=(
            f"## Images\n\nThe graph takes {_images(memory)}.",
            f"## Classes\n\n| label | class | colour |\n|---|---|---|\n{rows}",
            f"## Check\n\nLoaded back, at least {report.equal:.2%} of the pixels of each image have the label of the "
            f"memory, and the confidence differs by at most {report.difference:.1e} on average.",
        ),
        title="Segmentation by example",
        summary=f"Labels the pixels of images, given {len(memory)} labelled examples: {memory.fit().probe}.",
        task="image-segmentation",
    )
