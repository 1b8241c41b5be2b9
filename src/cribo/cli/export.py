"""`cribo export`: write a backbone, or a memory with its backbone, for other libraries."""

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from cribo.apps.export.config import TARGETS, ExportOptions, require_target
from cribo.base.arguments import Parser
from cribo.base.console import Phases, importing_networks
from cribo.base.errors import ConfigError
from cribo.cli.command import Call, Command
from cribo.cli.running import (
    BACKBONE_SHORT,
    NETWORK,
    SUGGESTION,
    add_optional_backbone,
    optional_backbone,
    print_places,
)
from cribo.features.config import BackboneSource, backbone_name

if TYPE_CHECKING:
    from cribo.apps.export import ExportReport, MemoryReport

HELP = """\
Write a backbone or a memory for other libraries. The export is loaded back by the other library, and kept only if its
features agree with those of the backbone to 1e-4 of the largest (1e-2 in float16), at several image sizes.

  cribo export --backbone runs/camvid --to timm           timm.create_model("local-dir:...", pretrained=True)
  cribo export --backbone runs/camvid --to transformers   AutoModel.from_pretrained
  cribo export --backbone runs/camvid --to onnx           RGB images in 0-1 to tokens and global token, any size
  cribo export --backbone runs/camvid --to torch-export   the same, for PyTorch
  cribo export --backbone runs/camvid --to hub --repo owner/name   publish on the Hugging Face hub, for timm and cribo
  cribo export --memory mine.safetensors --to onnx         images in, labels and confidence out, any size

Any backbone that can be evaluated can be exported: a run, a checkpoint of another project, a timm name, or
hf://owner/name. Choose timm or transformers to continue training, hub to publish weights, and onnx for other runtimes.
A memory of `cribo segment` becomes one graph (onnx or torch-export) with its backbone, which --backbone names if it has
moved; 99.9 % of the labels must be those of the memory.
Publishing requires a token of the hub (`hf auth login`); all files are uploaded in one commit. The model card states
the licence of the weights.
"""

_HUB = "hub"


def add_options(parser: Parser) -> None:
    """Add the options of the command."""
    parser.add_argument("--to", required=True, choices=(*TARGETS, _HUB), help="format to write")
    parser.add_argument(
        "--memory", type=Path, help="file of a memory of cribo segment, to export as a graph that labels pixels"
    )
    parser.add_argument("--out", type=Path, help="output folder; by default exports/BACKBONE-TARGET")
    parser.add_argument("--repo", type=str, help="repository on the hub, owner/name; created if it does not exist")
    parser.add_argument("--private", action="store_true", help="create a private --repo")
    parser.add_argument("--card", type=Path, help="folder of cribo benchmark, to add its scores to the model card")
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace an existing export in --out, or, in a new commit, the weights in --repo and the files that "
        "describe them",
    )
    parser.add_argument(
        "--image_size",
        type=int,
        help="image size in pixels for which the position embedding is resized and stored; for other sizes it is "
        "resized at each use. By default unchanged",
    )
    parser.add_class_arguments(ExportOptions, skip={"layers"})
    add_optional_backbone(parser, f"{NETWORK}; required, except for a --memory whose backbone has not moved")


def run(call: Call) -> None:
    """Run the command."""
    if call.options.memory is not None:
        _export_memory(call)
        return
    config = optional_backbone(call.options)
    if config is None:
        raise ConfigError(f"--backbone is required, or --memory: {SUGGESTION}")
    options = call.build(ExportOptions, layers=config.layers)
    if call.options.to == _HUB:
        if call.options.out is not None:
            raise ConfigError(f"--to hub writes to --repo, got --out {call.options.out}: for a folder, use --to timm")
        if call.options.repo is None:
            raise ConfigError("--to hub requires --repo OWNER/NAME, the repository to write")
        _publish(call, config, options)
        return
    if given := [f"--{name}" for name in ("repo", "private", "card") if call.options[name]]:
        raise ConfigError(f"{given[0]} applies to --to hub only, got --to {call.options.to}")
    require_target(call.options.to)
    out = call.options.out or Path("exports") / f"{backbone_name(config)}-{call.options.to}"
    with importing_networks(call.console):
        from cribo.apps.export.run import export_backbone
        from cribo.features.encoder import open_backbone

    backbone = open_backbone(config, image_size=call.options.image_size)
    with Phases(call.console, first_line=0) as progress:
        report = export_backbone(
            backbone,
            call.options.to,
            out,
            overwrite=call.options.overwrite,
            progress=progress,
            **vars(options),
        )
    _print_check(report, call.options.precision, call.console)
    _print_written(report, call.console)


def _export_memory(call: Call) -> None:
    """Export a memory, and print the result."""
    parsed, plain = call.options, ExportOptions()
    given = [f"--{name}" for name in ("repo", "private", "card", "image_size") if parsed[name]]
    given += [f"--{name}" for name in ("precision", "fixed_size") if parsed[name] != getattr(plain, name)]
    if given:
        raise ConfigError(f"{given[0]} does not apply to --memory: omit it")
    with importing_networks(call.console):
        from cribo.apps.export.memory import export_memory, require_graph
        from cribo.features.memory import SegmentationMemory
        from cribo.features.memory.storage import read_memory

    require_graph(parsed.to)
    require_target(parsed.to)
    backbone = optional_backbone(parsed)
    if backbone is None:
        source = read_memory(parsed.memory).source
        if not Path(source).expanduser().exists():  # only a file is opened because a memory names it
            raise ConfigError(f"{parsed.memory} was created with {source}: add --backbone with its source")
        backbone = BackboneSource(source)
    memory = SegmentationMemory.load(parsed.memory, backbone, device="cpu")
    out = parsed.out or Path("exports") / f"{parsed.memory.stem}-{parsed.to}"
    with Phases(call.console, first_line=0) as progress:
        report = export_memory(
            memory, parsed.to, out, overwrite=parsed.overwrite, progress=progress, opset=parsed.opset
        )
    sizes = ", ".join(f"{height}x{width}" for height, width in report.checked)
    call.console.print(
        f"loaded back: at least {report.equal:.2%} of the labels are those of the memory; the confidence differs by at "
        f"most {report.difference:.1e} on average (images of {sizes})"
    )
    _print_written(report, call.console)


def _print_written(report: "ExportReport | MemoryReport", console: Console) -> None:
    """Print the folder of an export, and the code that loads it."""
    print_places(console, {"written": f"{report.folder}, {decimal(report.size_bytes)}"})
    console.print("  to load it:")
    for line in report.how_to_load.splitlines():
        console.print(Text(f"    {line}"))


def _publish(call: Call, config: BackboneSource, options: ExportOptions) -> None:
    """Check the repository, then load the backbone and upload it."""
    from cribo.models.hub.publishing import require_publishable

    parsed, console = call.options, call.console
    private, overwrite = parsed.private, parsed.overwrite
    with importing_networks(console):
        from cribo.apps.export.publishing import publish_backbone, require_card
        from cribo.features.encoder import open_backbone
    if parsed.card is not None:
        require_card(parsed.card)
    require_publishable(parsed.repo, overwrite=overwrite, private=private)
    backbone = open_backbone(config, image_size=parsed.image_size)
    with Phases(console, first_line=0) as progress:
        published = publish_backbone(
            backbone,
            parsed.repo,
            card=parsed.card,
            private=private,
            overwrite=overwrite,
            progress=progress,
            **vars(options),
        )
    _print_check(published.report, parsed.precision, console)
    print_places(console, {"published": published.address, "commit": published.commit})
    console.print(f"  to load it: --backbone hf://{parsed.repo}, or timm.create_model with hf-hub:{parsed.repo}")


def _print_check(report: "ExportReport", precision: str, console: Console) -> None:
    sizes = ", ".join(f"{batch}x3x{height}x{width}" for batch, height, width in report.checked)
    console.print(
        f"loaded back in {precision}: features differ by at most {report.difference:.1e} of the largest from "
        f"those of the backbone in float32 (images of {sizes})",
    )
    for note in report.notes:
        console.print(f"note: {note}")


COMMAND = Command(
    help=HELP,
    usage="cribo export (--backbone SOURCE | --memory FILE) --to TARGET [--out FOLDER | --repo OWNER/NAME] [options]",
    short=BACKBONE_SHORT,
    less_memory="use --to timm, which needs the least memory",
    add_options=add_options,
    run=run,
)
