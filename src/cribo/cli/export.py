"""`cribo export`: write a backbone for other libraries."""

from pathlib import Path

from rich.console import Console

from cribo.cli.running import BACKBONE_SHORT, NETWORK, print_places
from cribo.console import Phases, importing

HELP = """\
Write a backbone for other libraries. The export is loaded back by the other library, and kept only if its features
agree with those of the backbone to 1e-4 of the largest (1e-2 in float16), at several image sizes.

  cribo export --backbone runs/camvid --to timm           timm.create_model("local-dir:...", pretrained=True)
  cribo export --backbone runs/camvid --to transformers   AutoModel.from_pretrained
  cribo export --backbone runs/camvid --to onnx           RGB images in 0-1 to tokens and global token, any size
  cribo export --backbone runs/camvid --to torch-export   the same, for PyTorch

Any backbone that can be evaluated can be exported: a run, a checkpoint of another project, a timm name. Choose timm or
transformers to continue training or to publish weights, and onnx for other runtimes.
"""

LESS_MEMORY = "use --to timm, which needs the least memory"


def run(words: list[str], console: Console) -> None:
    """Run the command."""
    from cribo.arguments import Parser
    from cribo.export.options import TARGETS, ExportOptions, require_target
    from cribo.retrieval.source import BackboneSource, backbone_name

    parser = Parser(
        prog="cribo export",
        description=HELP,
        usage="cribo export --backbone SOURCE --to TARGET [--out FOLDER] [options]",
        short=BACKBONE_SHORT,
    )
    parser.add_argument("--to", required=True, choices=TARGETS, help="format to write")
    parser.add_argument("--out", type=Path, help="output folder; by default exports/BACKBONE-TARGET")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing export in --out")
    parser.add_argument(
        "--image_size",
        type=int,
        help="image size in pixels for which the position embedding is resized and stored; for other sizes it is "
        "resized at each use. By default unchanged",
    )
    parser.add_class_arguments(ExportOptions, skip={"layers"})
    parser.add_class_arguments(BackboneSource, "backbone")
    parser.explain("--backbone.source", NETWORK)
    parsed = parser.parse_args(words)
    config = parser.instantiate(parsed)["backbone"]
    options = parser.build(ExportOptions, parsed, layers=config.layers)
    require_target(parsed.to)
    out = parsed.out or Path("exports") / f"{backbone_name(config)}-{parsed.to}"
    with importing(console):
        from cribo.export.run import export_backbone
        from cribo.retrieval.encoders import open_backbone

    backbone = open_backbone(config, image_size=parsed.image_size)
    with Phases(console) as progress:
        report = export_backbone(
            backbone,
            parsed.to,
            out,
            overwrite=parsed.overwrite,
            progress=progress,
            **vars(options),
        )
    sizes = ", ".join(f"{batch}x3x{height}x{width}" for batch, height, width in report.checked)
    console.print(
        f"loaded back in {parsed.precision}: features differ by at most {report.difference:.1e} of the largest from "
        f"those of the backbone in float32 (images of {sizes})",
    )
    for note in report.notes:
        console.print(f"note: {note}")
    print_places(console, {"written": f"{report.folder}, {report.size_bytes / 1e6:.1f} MB"})
    console.print("  to load it:")
    for line in report.how_to_load.splitlines():
        console.print(f"    {line}")
