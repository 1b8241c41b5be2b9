"""`cribo export`: a backbone for other programs."""

from pathlib import Path

from rich.console import Console

from cribo.cli.running import BACKBONE_SHORT, BACKBONE_SWITCHES, guarded, print_places
from cribo.console import Phases, loading, log_to

HELP = """\
Write a backbone for other programs. What was written is loaded back by the other library, and stays only if its
features are those of the backbone, to 1e-4 of the largest, at several sizes.

  cribo export --backbone runs/camvid --to timm           timm.create_model("local-dir:...", pretrained=True)
  cribo export --backbone runs/camvid --to transformers   AutoModel.from_pretrained
  cribo export --backbone runs/camvid --to onnx           RGB images in 0-1 to tokens and global token, any size
  cribo export --backbone runs/camvid --to torch-export   the same for PyTorch alone

Any backbone that can be evaluated can be exported: a run, a checkpoint of another project, a timm name. To train on,
or to publish weights, choose timm or transformers; to run elsewhere, onnx.
"""

LESS_MEMORY = "choose --to timm, which needs the least"


def main(words: list[str]) -> int:
    """Run the command."""
    return guarded("cribo export", _export, words, less_memory=LESS_MEMORY)


def _export(words: list[str]) -> None:
    from cribo.arguments import Parser
    from cribo.export.options import TARGETS
    from cribo.retrieval.source import BackboneSource, backbone_name

    console = Console(soft_wrap=True)
    log_to(console)
    parser = Parser(
        prog="cribo export",
        description=HELP,
        usage="cribo export --backbone SOURCE --to TARGET [--out FOLDER] [options]",
        short=BACKBONE_SHORT,
        switches=BACKBONE_SWITCHES,
    )
    parser.add_argument("--to", required=True, choices=TARGETS, help="whose format to write")
    parser.add_argument("--out", type=Path, help="folder to write; exports/BACKBONE-TARGET by default")
    parser.add_argument("--overwrite", action="store_true", help="replace an export that stands in --out")
    parser.add_argument(
        "--image_size",
        type=int,
        help="size in pixels for which the position embedding is stored, resized if need be; other sizes are resized "
        "at each use. As it is when not given",
    )
    parser.add_argument("--opset", type=int, default=20, help="of ONNX: lower it for an older runtime, 18 at least")
    parser.add_class_arguments(BackboneSource, "backbone")
    parsed = parser.parse_args(words)
    config = parser.instantiate(parsed)["backbone"]
    out = parsed.out or Path("exports") / f"{backbone_name(config)}-{parsed.to}"
    with loading(console):
        from cribo.export.run import export_backbone
        from cribo.retrieval.encoders import open_backbone

    backbone = open_backbone(config, image_size=parsed.image_size)
    with Phases(console) as progress:
        report = export_backbone(
            backbone,
            parsed.to,
            out,
            overwrite=parsed.overwrite,
            layers=config.layers,
            opset=parsed.opset,
            progress=progress,
        )
    sizes = ", ".join(f"{batch}x3x{height}x{width}" for batch, height, width in report.checked)
    console.print(
        f"loaded back, features differ by {report.difference:.1e} of the largest at most (images of {sizes})",
        highlight=False,
    )
    for note in report.notes:
        console.print(f"note: {note}", highlight=False)
    print_places(console, {"written": f"{report.folder}, {report.size_bytes / 1e6:.1f} MB"})
    console.print("  to load it:")
    for line in report.how_to_load.splitlines():
        console.print(f"    {line}", highlight=False, markup=False)
