"""The model card of an export: what the weights are, how to load them, and how near they are to the backbone."""

from cribo.export.options import ExportOptions, Target
from cribo.models import Backbone

CARD = "README.md"
"""The name by which the Hugging Face hub finds a model card."""

_LIBRARIES: dict[Target, str] = {
    "timm": "timm",
    "transformers": "transformers",
    "onnx": "onnx",
    "torch-export": "pytorch",
}

_TEXT = """\
---
library_name: {library}
pipeline_tag: image-feature-extraction
tags:
- image-feature-extraction
- cribo
---
# {name}

Dense features of images: one for each patch, and one for the image. Written by `cribo export --to {target}`.

| | |
|---|---|
| architecture | `{name}` |
| weights | {source} |
| parameters | {parameters:.1f} million |
| precision | {precision} |
| channels | {channels} |
| patch | {patch} pixels |
| image size | {size} pixels |
| mean, standard deviation | {mean}; {std} |

## Use

```python
{how_to_load}
```

## Check

Loaded back, features differ from those of the backbone in float32 by at most {difference:.1e} of the largest.

## Licence

The licence of the weights, and the data that they were trained on, are those of their source: state them here before
you publish this folder.
"""


def model_card(backbone: Backbone, to: Target, options: ExportOptions, *, difference: float, how_to_load: str) -> str:
    """Describe an export in Markdown, with the header that the Hugging Face hub reads.

    `difference` is the maximum difference of the features, relative to the largest feature.
    """
    return _TEXT.format(
        library=_LIBRARIES[to],
        target=to,
        name=backbone.name,
        source="random" if backbone.loaded is None else f"`{backbone.loaded.source}`",
        parameters=sum(parameter.numel() for parameter in backbone.parameters()) / 1e6,
        precision=options.precision,
        channels=backbone.embed_dim,
        patch=backbone.patch_size,
        size=backbone.image_size,
        mean=", ".join(f"{value:g}" for value in backbone.mean),
        std=", ".join(f"{value:g}" for value in backbone.std),
        how_to_load=how_to_load,
        difference=difference,
    )
