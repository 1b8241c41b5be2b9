import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
import yaml
from tests.evaluation.benchmark.conftest import write_labelled
from tests.hub_server import TOKEN, Hub

from cribo import load_backbone
from cribo.apps.export import publish_backbone
from cribo.apps.export.publishing import BENCHMARK_CARD
from cribo.base.errors import InputError
from cribo.cli import main
from cribo.evaluation import EvaluationRuntime
from cribo.evaluation.benchmark import BenchmarkConfig, BenchmarkData, benchmark
from cribo.evaluation.benchmark.card import CARD
from cribo.features.config import BackboneSource
from cribo.models import Backbone, save_backbone
from cribo.models.licences import Licence, split_header

Network = Callable[[str], Backbone]


@pytest.fixture(autouse=True)
def logged_in(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)


def card_of(source: str, root: Path) -> Path:
    """Evaluate a backbone on a small set and on an incomplete one, and return the folder of the card."""
    write_labelled(root / "squares", images=2)
    (write_labelled(root / "half", ("train",), images=1) / "images" / "val").mkdir()
    runtime = EvaluationRuntime(devices=("cpu",), workers=0, cache="none")
    data = BenchmarkData(str(root))
    return benchmark(BenchmarkConfig(BackboneSource(source), data, ("dense-nn",), quick=True, runtime=runtime))[1]


def test_a_published_backbone_is_the_same_for_cribo_and_timm(
    network: Network,
    hub: Hub,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    backbone = network("registers")
    timm_name = "vit_small_patch14_dinov2.lvd142m"
    backbone.licences = (Licence(timm_name, "apache-2.0", hub=f"timm/{timm_name}"),)
    save_backbone(backbone, tmp_path / "camvid")
    card = card_of("camvid", Path("my data/secret"))
    words = ["export", "--backbone", str(tmp_path / "camvid"), "--to", "hub", "--repo", "owner/camvid"]
    assert main([*words, "--card", str(card)]) == 0
    assert f"{hub.address}/owner/camvid" in capsys.readouterr().out
    repository = hub.repositories["owner/camvid"]
    assert len(repository.commits) == 2  # that of the hub, and one with all files
    assert set(repository.files) == {
        *(".gitattributes", "README.md", "config.json", "cribo.json", "export.json", "model.safetensors"),
        *("evaluation/card.png", "evaluation/dense-nn-squares.png"),
    }
    assert load_backbone("hf://owner/camvid").fingerprint() == backbone.fingerprint()
    assert Backbone.from_pretrained("owner/camvid").licences == backbone.licences
    model = timm.create_model("hf-hub:owner/camvid", pretrained=True).eval()
    image = torch.rand(1, 3, 56, 56)
    with torch.no_grad():
        features = model.forward_features(image)[:, model.num_prefix_tokens :]  # pyright: ignore[reportCallIssue]
        torch.testing.assert_close(features, backbone.encode(image).tokens)
    files = [repository.files[name].decode() for name in ("README.md", "export.json", "config.json")]
    assert not any(place in text for text in files for place in (str(tmp_path), "my data", "secret"))
    header, text = split_header(files[0])
    about = yaml.safe_load(header)
    assert (about["license"], about["library_name"], about["base_model"]) == (
        *("apache-2.0", "timm"),
        "timm/vit_small_patch14_dinov2.lvd142m",
    )
    assert 'timm.create_model("hf-hub:owner/camvid", pretrained=True)' in text
    assert "![card](evaluation/card.png)" in text
    assert re.search(r"\| dense-nn \| squares \| mIoU, memory share 1/1( \| \d+\.\d){3} \|", text)
    assert "- Not measured: dense-nn on half" in text
    assert "| weights | `camvid` |" in text
    assert main(words) == 2
    assert "contains an earlier export" in capsys.readouterr().err
    assert main([*words, "--overwrite"]) == 0
    assert len(repository.commits) == 3
    assert {"export.json", "model.safetensors"} <= set(repository.files)


def test_a_failed_upload_leaves_the_files_as_they_were(network: Network, hub: Hub) -> None:
    publish_backbone(network("vit"), "owner/tiny")
    before = dict(hub.repositories["owner/tiny"].files)
    for step in ("PUT /lfs/", "/preupload/", "/commit/"):
        hub.failing = (step,)
        with pytest.raises(ConnectionError, match="repeat the command"):
            publish_backbone(network("resnet"), "owner/tiny", overwrite=True)
        assert hub.repositories["owner/tiny"].files == before
    hub.status = 403
    for step in ("PUT /lfs/", "/commit/"):
        hub.failing = (step,)
        with pytest.raises(InputError, match=r"token may not write to owner/tiny .*: give it write access at http"):
            publish_backbone(network("resnet"), "owner/tiny", overwrite=True)
    with pytest.raises(InputError, match=r"repository http.*/owner/new remains and is empty: repeat the command"):
        publish_backbone(network("vit"), "owner/new")


def test_the_card_must_be_of_the_backbone(network: Network, hub: Hub, tmp_path: Path) -> None:
    card = tmp_path / "card"
    card.mkdir()
    (card / CARD).write_text("# camvid\n")
    about = {"kind": "card", "backbone": {"name": "camvid", "fingerprint": network("vit").fingerprint()}}
    (card / "results.json").write_text(json.dumps(about))
    assert BENCHMARK_CARD == CARD
    with pytest.raises(InputError, match="has scores of another backbone, camvid"):
        publish_backbone(network("resnet"), "owner/tiny", card=card)
    with pytest.raises(InputError, match="is not the folder of a finished cribo benchmark"):
        publish_backbone(network("vit"), "owner/tiny", card=tmp_path)
    assert not hub.repositories


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--to hub", "--to hub requires --repo"),
        ("--to hub --repo owner/x --out x", "--out x"),
        ("--to timm --repo owner/x", "--repo applies to --to hub only"),
        ("--to hub --repo other/x", "cannot write to other/x"),
        ("--to hub --repo owner/x --card none", "--card none is not the folder"),
    ],
)
def test_options_are_checked_before_the_backbone_is_loaded(
    words: str, named: str, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "--backbone", "no_such_file.pth", *words.split()]) == 2
    assert named in capsys.readouterr().err
