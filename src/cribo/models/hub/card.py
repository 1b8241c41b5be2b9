"""Model cards: what weights are, how to load them, and under which licence, with the header that the hub reads."""

from collections.abc import Sequence
from typing import Any

import yaml

from cribo.models.backbone import Backbone
from cribo.models.hub.download import source_name
from cribo.models.licences import SEE_CARD, Licence

CARD = "README.md"
"""The name by which the Hugging Face hub finds a model card."""

_OWN_NAMES = ("dinov3-license", "nvidia-open-model-license")
"""Licences that the hub lists only as `other`, with their name beside it."""

_TEXT = """\
# {title}

{summary} Written by {written_by}.

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
"""


def model_card(
    backbone: Backbone,
    *,
    library: str,
    how_to_load: str,
    written_by: str,
    precision: str = "float32",
    notes: Sequence[str] = (),
    sections: Sequence[str] = (),
    title: str | None = None,
    summary: str = "Dense features of images: one for each patch, and one for the image.",
    task: str = "image-feature-extraction",
) -> str:
    """Describe saved weights in Markdown; the text contains no local paths.

    Args:
        backbone: the backbone.
        library: name of the library that loads the weights, as the hub writes it.
        how_to_load: Python code that loads them.
        written_by: name of the command or function that wrote them.
        precision: data type of the weights.
        notes: notes for users of the code.
        sections: further sections, before the licence.
        title: title; by default the name of the architecture.
        summary: a sentence that says what the file computes.
        task: name of the task, as the hub writes it.
    """
    source = "trained from random weights"
    if backbone.loaded is not None:
        source = f"`{source_name(backbone.loaded.source)}`"
        if backbone.loaded.revision:
            source += f", commit `{backbone.loaded.revision}`"
    text = _TEXT.format(
        title=title or backbone.name,
        summary=summary,
        name=backbone.name,
        written_by=written_by,
        source=source,
        parameters=sum(parameter.numel() for parameter in backbone.parameters()) / 1e6,
        precision=precision,
        channels=backbone.embed_dim,
        patch=backbone.patch_size,
        size=backbone.image_size,
        mean=", ".join(f"{value:g}" for value in backbone.mean),
        std=", ".join(f"{value:g}" for value in backbone.std),
        how_to_load=how_to_load,
    )
    header = yaml.safe_dump(_header(backbone, library, task), sort_keys=False)
    text += "".join(f"\n- Note: {note}.\n" for note in notes)
    return "\n".join([f"---\n{header}---", text, *(f"{section}\n" for section in sections), _licence_section(backbone)])


def _header(backbone: Backbone, library: str, task: str) -> dict[str, Any]:
    header: dict[str, Any] = {
        **_licence_header(backbone.licences),
        "library_name": library,
        "pipeline_tag": task,
        "tags": [task, "cribo"],
    }
    if bases := base_models(backbone):
        header["base_model"] = bases if len(bases) > 1 else bases[0]
    return header


def _licence_header(licences: Sequence[Licence]) -> dict[str, str]:
    """Return the licence in the hub's terms: empty if the weights are from nowhere else, or it is not recorded."""
    names = {each.name for each in licences}
    if len(names) != 1:
        return {"license": "other", "license_name": SEE_CARD} if names else {}
    [name] = names
    if name is None:
        return {}
    link = next((each.link for each in licences if each.link), None)
    is_known = licences[0].commercial != "unknown" and name not in _OWN_NAMES
    if is_known or any(each.listed for each in licences):
        return {"license": name}
    named = {} if name == "other" else {"license_name": name}
    return {"license": "other", **named, **({"license_link": link} if link and "://" in link else {})}


def base_models(backbone: Backbone) -> list[str]:
    """Return the names on the hub of the weights from which a backbone was made, the direct parent first."""
    parent = None if backbone.loaded is None else backbone.loaded.parent
    return list(dict.fromkeys(filter(None, (parent, *(each.hub for each in backbone.licences)))))


def _licence_section(backbone: Backbone) -> str:
    lines = ["## Licence", ""]
    if not backbone.licences:
        lines += [
            "The network was trained from random weights, so no licence of other weights applies: its publisher "
            "chooses the licence. State it here and as `license` in the header of this file before you publish it."
        ]
    for each in backbone.licences:
        what = "made from the weights of" if each.role == "weights" else "trained to predict the features of"
        lines += [f"- {what} `{each.source}`: {each}"]
    if any(each.name is None for each in backbone.licences):
        lines += ["", "State the licence here and as `license` in the header of this file before you publish it."]
    lines += ["", "Terms of the images on which it was trained may apply as well.", ""]
    return "\n".join(lines)
