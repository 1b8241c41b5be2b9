"""Generate the table of public backbones in docs/backbones.md, with size, licence and access.

    uv run python -m benchmarks.backbones

Sizes and licences are those of timm's registry. The registry does not list gated repositories: GATED does.
"""

from pathlib import Path
from typing import NamedTuple

import timm
import torch

from cribo.cli.running import SUGGESTED
from cribo.models.licences import timm_licence

PAGE = Path(__file__).parents[1] / "docs/backbones.md"
BEGIN, END = "<!-- table: python -m benchmarks.backbones -->", "<!-- end of the table -->"
HEADER = ("`--backbone`", "parameters", "patch", "licence", "commercial use", "gated")

NAMES = (
    "vit_small_patch14_dinov2.lvd142m",
    "vit_small_patch14_reg4_dinov2.lvd142m",
    "vit_base_patch14_dinov2.lvd142m",
    "vit_base_patch14_reg4_dinov2.lvd142m",
    "vit_large_patch14_dinov2.lvd142m",
    "vit_large_patch14_reg4_dinov2.lvd142m",
    "vit_giant_patch14_dinov2.lvd142m",
    "vit_small_patch16_224.dino",
    "vit_small_patch8_224.dino",
    "vit_base_patch16_224.dino",
    "vit_base_patch8_224.dino",
    "vit_base_patch16_siglip_224.v2_webli",
    "vit_large_patch16_siglip_256.v2_webli",
    "convnext_tiny.in12k",
    "resnet50.a1_in1k",
    "vit_small_patch16_dinov3.lvd1689m",
    "vit_base_patch16_dinov3.lvd1689m",
    "vit_large_patch16_dinov3.lvd1689m",
    "convnext_tiny.dinov3_lvd1689m",
    "vit_base_patch16_224.mae",
    "vit_large_patch16_224.mae",
    "convnextv2_tiny.fcmae",
)
"""Names of timm, whose repositories on the hub, timm/NAME, are public."""

GATED = {
    "hf://facebook/dinov3-vits16-pretrain-lvd1689m": "vit_small_patch16_dinov3.lvd1689m",
    "hf://facebook/dinov3-vitb16-pretrain-lvd1689m": "vit_base_patch16_dinov3.lvd1689m",
    "hf://facebook/dinov3-vitl16-pretrain-lvd1689m": "vit_large_patch16_dinov3.lvd1689m",
}
"""Gated repositories and timm's names of the same weights. Access requires an account and contact information."""


class Row(NamedTuple):
    """A row of the table."""

    name: str
    parameters: str
    patch: str
    licence: str
    commercial: str
    gated: str


def row(name: str, of_timm: str, *, gated: bool) -> Row:
    """Return the row of a backbone, from timm's registry."""
    with torch.device("meta"):
        model = timm.create_model(of_timm.partition(".")[0], num_classes=0)
    embedding = getattr(model, "patch_embed", None)
    size = getattr(embedding, "patch_size", None) or getattr(embedding, "stride", (32,))
    config = timm.get_pretrained_cfg(of_timm)
    licence = timm_licence(of_timm, None if config is None else config.license)
    parameters = f"{sum(parameter.numel() for parameter in model.parameters()) / 1e6:.0f} M"
    mark = " (suggested)" if name == SUGGESTED else ""
    cells = (licence.name or "not recorded", licence.commercial, "yes" if gated else "no")
    return Row(f"`{name}`{mark}", parameters, str(int(size[0])), *cells)


def rows() -> list[Row]:
    """Return all rows: without an account first, then by commercial use."""
    found = [row(name, name, gated=False) for name in NAMES]
    found += [row(name, of_timm, gated=True) for name, of_timm in GATED.items()]
    order = ["yes", "own terms", "no", "unknown"]
    return sorted(found, key=lambda each: (each.gated == "yes", order.index(each.commercial)))


def table() -> str:
    """Render the table as Markdown."""
    lines = [HEADER, ("---",) * len(HEADER), *rows()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Replace the table in the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
