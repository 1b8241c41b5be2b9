"""What the methods of `Backbone` for the hub do, in a module that builds on `Backbone` and is imported on first use."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from cribo.base.errors import InputError
from cribo.models.backbone import Backbone
from cribo.models.hub.card import model_card
from cribo.models.hub.download import download, hub_name
from cribo.models.hub.publishing import OUTDATED, publishing_to
from cribo.models.hub.publishing import require_publishable as require_publishable
from cribo.models.hub.timm_layout import how_to_load, notes_on
from cribo.models.hub.timm_layout import write_timm_layout as write_timm_layout
from cribo.models.loading import load_backbone


def load(source: str | Path, arguments: Mapping[str, Any], *, revision: str | None, **options: Any) -> Backbone:
    """Load a backbone as `Backbone.from_pretrained`; `options` are those of `download`."""
    name = hub_name(source)
    if name is None and isinstance(source, str) and source.count("/") == 1 and not Path(source).exists():
        name = hub_name(f"hf://{source}")
    if name is None:
        return load_backbone(source, **arguments).eval()
    try:
        found = download(name._replace(revision=revision or name.revision), **options)
    except (InputError, ConnectionError) as error:
        if str(source).startswith("hf:"):
            raise
        raise type(error)(f"{error}. The local folder {source} does not exist") from error
    return load_backbone(found, **arguments).eval()


def push(
    backbone: Backbone, repo: str, upload: Callable[..., str], *, overwrite: bool, options: Mapping[str, Any]
) -> str:
    """Check a repository, and upload a backbone as `Backbone.push_to_hub` by the method `upload` of the mixin."""
    options = {"commit_message": f"{backbone.name} by cribo", "model_card_kwargs": {"repo_id": repo}, **options}
    if overwrite:
        options.setdefault("delete_patterns", list(OUTDATED))
    where = {name: options.get(name) for name in ("private", "token", "branch")}
    with publishing_to(repo, overwrite=overwrite, **where):
        return upload(repo, **options)


def card(backbone: Backbone, repo: str | None) -> ModelCard:
    """Return the model card of what `Backbone.save_pretrained` writes."""
    code = how_to_load(backbone, "local-dir:." if repo is None else f"hf-hub:{repo}")
    written_by = "`Backbone.save_pretrained`"
    text = model_card(backbone, library="timm", how_to_load=code, written_by=written_by, notes=notes_on(backbone))
    return ModelCard(text)
