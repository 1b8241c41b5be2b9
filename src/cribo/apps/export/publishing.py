"""Publication of a backbone on the Hugging Face hub: the verified export to timm, its model card and its benchmark."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote

from cribo.apps.export.config import ExportOptions
from cribo.apps.export.run import ExportReport, check_section, export_backbone
from cribo.apps.export.target import data_type
from cribo.base.errors import InputError
from cribo.base.files import path_inside, read_json, write_text
from cribo.base.tables import Table, numbers, texts
from cribo.evaluation.results import NONE, RESULTS, metric_title, score, varied_setting
from cribo.models import Backbone
from cribo.models.hub.card import CARD, model_card
from cribo.models.hub.download import address
from cribo.models.hub.publishing import OUTDATED, publishing_to
from cribo.models.hub.timm_layout import how_to_load

BENCHMARK_CARD = "card.md"
"""The text of a card of `cribo benchmark`, beside its `results.json`."""

_PICTURES = "evaluation"  # folder of the repository


@dataclass(frozen=True)
class Published:
    """A published backbone.

    Attributes:
        address: address of the repository.
        commit: address of the commit.
        report: the verified export.
    """

    address: str
    commit: str
    report: ExportReport


def publish_backbone(
    backbone: Backbone,
    repo: str,
    *,
    card: str | Path | None = None,
    private: bool = False,
    overwrite: bool = False,
    token: str | None = None,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    **options: Any,
) -> Published:
    """Export a backbone to timm, verify it, and upload it with its model card to the Hugging Face hub in one commit.

    `timm.create_model("hf-hub:owner/name", pretrained=True)`, `cribo.load_backbone("hf://owner/name")` and
    `Backbone.from_pretrained("owner/name")` load it.

    Args:
        backbone: the backbone, on any device; it is not changed.
        repo: owner/name; created if it does not exist.
        card: folder of `cribo benchmark`, whose scores and pictures are added to the model card.
        private: create a private repository.
        overwrite: replace the weights in the repository, and the files that describe them, in a new commit; earlier
            commits are kept.
        token: token of the hub; by default that of `hf auth login` or HF_TOKEN.
        progress: called with the phase, the number of processed items and their total.
        **options: fields of `ExportOptions`, such as `precision="float16"`.

    Raises:
        InputError: the token is missing or may not write; the repository contains files, and `overwrite` is not set;
            the card is of another backbone; or timm does not have the network.
        DifferentFeatures: the verification failed.
        ConnectionError: the hub cannot be reached; nothing was committed.
    """
    from huggingface_hub import HfApi

    name = repo.rpartition("/")[2]
    chosen = ExportOptions(**options)
    sections = [] if card is None else [read_card(Path(card), backbone)]
    with publishing_to(repo, overwrite=overwrite, private=private, token=token), TemporaryDirectory() as temporary:
        folder = Path(temporary) / name
        report = export_backbone(backbone, "timm", folder, progress=progress, **options)
        code = how_to_load(backbone, f"hf-hub:{repo}", data_type(chosen))
        text = model_card(
            backbone,
            library="timm",
            how_to_load=f'{code}\n\nimport cribo\nbackbone = cribo.load_backbone("hf://{repo}")',
            written_by="`cribo export --to hub`",
            precision=chosen.precision,
            notes=report.notes,
            sections=(*sections, check_section(report.difference)),
        )
        write_text(folder / CARD, text)
        if card is not None:
            for picture in _pictures(require_card(Path(card)), Path(card)):
                (folder / _PICTURES).mkdir(exist_ok=True)
                shutil.copyfile(Path(card) / picture, folder / _PICTURES / picture)
        progress("uploading", 0, 1)
        api = HfApi(token=token)
        api.create_repo(repo, private=private or None, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            commit_message=f"{backbone.name} by cribo",
            delete_patterns=list(OUTDATED) if overwrite else None,
        )
        progress("uploading", 1, 1)
    return Published(address(repo), commit.commit_url, report)


def require_card(folder: Path) -> dict[str, Any]:
    """Return the record of a card of `cribo benchmark`.

    Raises:
        InputError: the folder contains none.
    """
    record: dict[str, Any] = {}
    try:
        record = read_json(folder / RESULTS)
        is_card = record["kind"] == "card" and (folder / BENCHMARK_CARD).is_file()
    except (OSError, ValueError, KeyError, TypeError):
        is_card = False
    if not is_card:
        raise InputError(f"--card {folder} is not the folder of a finished cribo benchmark: it has no {BENCHMARK_CARD}")
    return record


def read_card(folder: Path, backbone: Backbone) -> str:
    """Return the section of a model card with the scores of a benchmark, without local paths.

    Raises:
        InputError: the folder contains no card, or that of another backbone.
    """
    record = require_card(folder)
    about = record["backbone"]
    if about.get("fingerprint") != backbone.fingerprint():
        raise InputError(
            f"--card {folder} has scores of another backbone, {about.get('name')}: run cribo benchmark with the "
            "backbone to publish, without --image_size"
        )
    return _evaluation_section(record, folder)


def _evaluation_section(record: Mapping[str, Any], folder: Path) -> str:
    """Return the scores and conditions of a benchmark, from fields that contain names and numbers only."""
    own = record["backbone"]["fingerprint"]
    lines: list[tuple[list[str], dict[str, str]]] = []  # the names and the scores by network of each
    for row in record["rows"]:
        compared = row["comparison"]
        varies, metric = compared["varies"], compared["metrics"][0]
        points = {
            "backbone" if result["backbone"]["fingerprint"] == own else result["name"]: {
                figure[varies]: figure for figure in result["figures"]
            }
            for result in compared["results"]
        }
        for value in dict.fromkeys(value for of in points.values() for value in of):
            title = f"{metric_title(metric)}, {varied_setting(varies, value)}"
            scores = {name: score(metric, of.get(value, {})) for name, of in points.items()}
            lines.append(([row["evaluation"], Path(row["set"]).name, title], scores))
    networks = list(dict.fromkeys(name for _, scores in lines for name in scores))
    cells = [[*names, *(scores.get(network, NONE) for network in networks)] for names, scores in lines]
    table = Table([*texts("evaluation", "set", "score [%]"), *numbers(*networks)], [cells])
    conditions = [f"- Features: of the last {_blocks(record['backbone']['layers'])}."]
    if record["quick"]:
        conditions.append("- Quick benchmark: few, small images; not comparable with published scores.")
    versions = {(name, value): None for row in record["rows"] for name, value in row["versions"].items()}
    conditions.append(f"- Computed with {', '.join(f'{name} {value}' for name, value in versions)}.")
    if missing := record["not_measured"]:
        conditions.append(f"- Not measured: {', '.join(missing)}.")
    pictures = [f"![{Path(file).stem}]({_PICTURES}/{quote(file)})" for file in _pictures(record, folder)]
    parts = [table.markdown() + "\n" + "\n".join(conditions), *pictures]
    return "## Evaluation\n\nBy `cribo benchmark`.\n\n" + "\n\n".join(parts)


def _blocks(layers: int) -> str:
    return "block" if layers == 1 else f"{layers} blocks"


def _pictures(record: Mapping[str, Any], folder: Path) -> list[str]:
    """Return the names of the pictures that the benchmark has written to its folder."""
    names = ["card.png", *(f"{row['evaluation']}-{row['set']}.png" for row in record["rows"])]
    return [name for name in names if path_inside(folder, name, source=folder / RESULTS).is_file()]
