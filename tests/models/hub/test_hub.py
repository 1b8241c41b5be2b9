import copy
import json
import pickle
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import pytest
import timm
import torch
from PIL import Image
from tests.hub_server import OWNER, READ_TOKEN, TOKEN, Hub

from cribo.base.errors import FolderError, InputError
from cribo.features import BackboneSource, backbone_name
from cribo.features.config import portable_source
from cribo.models import Backbone, HubName, build_backbone, hub_name, load_backbone, load_pretrained, save_backbone
from cribo.models.hub.download import choose_files
from cribo.models.licences import Licence
from cribo.models.numerics import Numerics

TINY = {"embed_dim": 32, "depth": 2, "num_heads": 2}
CARD = b"---\nlicense: cc-by-nc-4.0\n---\n# A network\n"


@pytest.fixture
def backbone() -> Backbone:
    made = build_backbone("vit_tiny_patch16_224", args=TINY, image_size=32).eval()
    made.mean, made.std = (0.4, 0.45, 0.5), (0.2, 0.25, 0.3)
    made.set_numerics(Numerics(positions="bicubic_offset"))
    return made


@pytest.fixture
def published(backbone: Backbone, hub: Hub, tmp_path: Path) -> Backbone:
    backbone.save_pretrained(tmp_path / "saved")
    repository = hub.add_folder("owner/tiny", tmp_path / "saved")
    repository.commit({"README.md": CARD, "tf_model.h5": b"not downloaded"})
    return backbone


def test_weights_are_loaded_from_a_repository(published: Backbone, hub: Hub) -> None:
    loaded = load_backbone("hf://owner/tiny")
    assert loaded.fingerprint() == published.fingerprint()
    assert loaded.loaded is not None
    assert (loaded.loaded.source, loaded.loaded.revision) == (
        "hf://owner/tiny",
        list(hub.repositories["owner/tiny"].commits)[-1],
    )
    assert not any("tf_model" in request for request in hub.requests)
    assert load_backbone(Path("hf://owner/tiny")).fingerprint() == published.fingerprint()  # a Path loses a slash
    fresh = build_backbone("vit_tiny_patch16_224", args=TINY, image_size=32, seed=3)
    assert load_pretrained(fresh, "hf://owner/tiny/model.safetensors").source == "hf://owner/tiny/model.safetensors"
    assert torch.equal(fresh.model.norm.weight, published.model.norm.weight)


def test_a_revision_and_a_folder_of_a_repository(published: Backbone, hub: Hub, tmp_path: Path) -> None:
    save_backbone(published, tmp_path / "run")
    files = {f"run/{path.name}": path.read_bytes() for path in (tmp_path / "run").iterdir()}
    other = build_backbone("vit_tiny_patch16_224", args=TINY, image_size=32, seed=9)
    other.save_pretrained(tmp_path / "other")
    first = list(hub.repositories["owner/tiny"].commits)[-1]
    hub.repositories["owner/tiny"].commit(
        {**files, "model.safetensors": (tmp_path / "other/model.safetensors").read_bytes()}
    )
    assert load_backbone(f"hf://owner/tiny@{first}").fingerprint() == published.fingerprint()
    assert load_backbone("hf://owner/tiny").fingerprint() != published.fingerprint()
    assert load_backbone("hf://owner/tiny/run").fingerprint() == published.fingerprint()


@pytest.mark.parametrize("offline", [True, False])
def test_a_cached_copy_is_used_without_a_network(
    offline: bool, published: Backbone, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose_the_network() -> None:
        if offline:
            monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        else:
            monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")

    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(ConnectionError, match=r"(?s)HF_HUB_OFFLINE=1 is set.*model.safetensors.*and pass its path"):
            load_backbone("hf://owner/tiny")
    load_backbone("hf://owner/tiny")
    lose_the_network()
    assert load_backbone("hf://owner/tiny").fingerprint() == published.fingerprint()
    assert Backbone.from_pretrained("owner/tiny", local_files_only=True).fingerprint() == published.fingerprint()
    with pytest.raises(ConnectionError, match="cannot download hf://owner/tiny@v2"):
        load_backbone("hf://owner/tiny@v2")


def test_an_interrupted_update_does_not_hide_the_cached_version(
    published: Backbone, hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = load_backbone("hf://owner/tiny").loaded
    assert first is not None
    second = hub.repositories["owner/tiny"].commit({"model.safetensors": b"new", "config.json": b"{}"})
    hub.failing = ("model.safetensors",)
    with pytest.raises(ConnectionError):
        load_backbone("hf://owner/tiny")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    loaded = load_backbone("hf://owner/tiny")
    assert loaded.fingerprint() == published.fingerprint()
    assert f"{second} of hf://owner/tiny is not complete: using the cached commit {first.revision}" in caplog.text


def test_a_hub_that_does_not_answer_does_not_hang(
    published: Backbone, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_backbone("hf://owner/tiny")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_ETAG_TIMEOUT", 0.1)
    hub.is_silent = True
    assert load_backbone("hf://owner/tiny").fingerprint() == published.fingerprint()
    with pytest.raises(ConnectionError, match="cannot download hf://owner/other"):
        load_backbone("hf://owner/other")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("hf://owner/none", "owner/none does not exist on http.*, or is private: check the name.*`hf auth login`"),
        ("hf://owner/secret", "owner/secret does not exist on http.*, or is private"),
        ("hf://owner/gated", "hf://owner/gated is gated: accept its terms at http.*/owner/gated with your account"),
        ("hf://owner/tiny@v7", "owner/tiny has no revision 'v7'"),
        ("hf://owner/tiny/modle.safetensors", "no file or folder 'modle.safetensors': it has model.safetensors"),
        ("hf://owner/text", "hf://owner/text has no weights that cribo can read"),
        ("hf://owner/many", r"has several weights \(a.pth, b.pth\): name one, such as hf://owner/many/a.pth"),
        ("hf://owner/deep", r"has its weights elsewhere \(unet/a.pth\): name one, such as hf://owner/deep/unet/a.pth"),
        ("hf://owner/shards", "split into 2 files"),
        ("hf://owner", "'hf://owner' is not a name on the Hugging Face hub: write hf://owner/name"),
        ("hf://owner/name/../../etc", "is not a name on the Hugging Face hub"),
        ("hf://owner/name@refs/x/1", "is not a name on the Hugging Face hub"),
        ("hf:owner/name", "is not a name on the Hugging Face hub"),
    ],
)
def test_errors_name_the_repository_and_say_what_to_do(
    source: str, message: str, published: Backbone, hub: Hub
) -> None:
    hub.add("owner/gated", {"config.json": b"{}", "model.safetensors": b""}, gated=True)
    hub.add("owner/secret", {"model.safetensors": b""}, private=True)
    hub.add("owner/text", {"README.md": b"# Text"})
    hub.add("owner/many", {"a.pth": b"", "b.pth": b""})
    hub.add("owner/deep", {"unet/a.pth": b""})
    hub.add("owner/shards", {f"model-0000{number}-of-00002.safetensors": b"" for number in (1, 2)})
    with pytest.raises(InputError, match=message) as raised:
        load_backbone(source)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("part", ["/resolve/", "/api/models"])
def test_only_temporary_failures_are_connection_errors(part: str, published: Backbone, hub: Hub) -> None:
    hub.failing = (part,)
    with pytest.raises(ConnectionError, match="hf://owner/tiny"):
        load_backbone("hf://owner/tiny")
    hub.status = 403
    with pytest.raises(InputError, match=r"access to hf://owner/tiny is denied .*that your account may read it"):
        load_backbone("hf://owner/tiny")
    hub.status = 400
    with pytest.raises(InputError, match="refuses the request for hf://owner/tiny"):
        load_backbone("hf://owner/tiny")


def test_names_do_not_depend_on_the_file_system(tmp_path: Path) -> None:
    assert hub_name("hf://a/b@v1/c/d.pth") == HubName("a", "v1", "c/d.pth")._replace(repo="a/b")
    assert hub_name("hf://a/b@refs/pr/1/c.pth") == HubName("a/b", "refs/pr/1", "c.pth")
    assert backbone_name(BackboneSource("hf://a/b/model.safetensors")) == "b"
    assert backbone_name(BackboneSource("hf://a/b@v1", pretrained=False)) == "b-random"
    assert portable_source("hf://a/b").source == "hf://a/b"
    assert choose_files(["README.md", "x/config.json", "x/pytorch_model.bin"], HubName("a/b", path="x")) == (
        "x/pytorch_model.bin",
        ["README.md", "x/config.json"],
    )


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("facebook/dinov2-small", "hf://facebook/dinov2-small"),
        ("hf-hub:owner/name@v1", "hf://owner/name@v1"),
        ("https://huggingface.co/owner/name", "hf://owner/name"),
        ("https://huggingface.co/owner/name/blob/main/a/b.pth", "hf://owner/name/a/b.pth"),
    ],
)
def test_other_spellings_are_answered_with_the_name_to_write(source: str, name: str) -> None:
    with pytest.raises(FileNotFoundError, match=f"for the Hugging Face hub, write {name}$"):
        load_backbone(source)


def test_a_missing_folder_is_named_where_a_repository_is_missing(hub: Hub) -> None:
    with pytest.raises(InputError, match=r"runs/camvd does not exist on .*The local folder runs/camvd does not exist"):
        Backbone.from_pretrained("runs/camvd")


# Licences


def test_the_licence_of_a_repository_is_carried_along(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = build_backbone("vit_tiny_patch16_224", args=TINY, image_size=32)
    torch.save(plain.model.state_dict(), tmp_path / "weights.pth")
    hub.add("owner/plain", {"weights.pth": (tmp_path / "weights.pth").read_bytes(), "README.md": CARD})
    with caplog.at_level("INFO", "cribo"):
        loaded = load_backbone("hf://owner/plain", args={"num_heads": 2})
    assert "licence cc-by-nc-4.0 (non-commercial)" in caplog.text
    licence = Licence("hf://owner/plain", "cc-by-nc-4.0", hub="owner/plain", listed=True)
    assert loaded.licences == (licence,)
    save_backbone(loaded, tmp_path / "run")
    assert load_backbone(tmp_path / "run").licences == (licence,)
    fresh = build_backbone("vit_tiny_patch16_224", args=TINY, image_size=32)
    assert fresh.licences == ()
    load_pretrained(fresh, tmp_path / "run")
    assert fresh.licences == (licence,)
    fresh.save_pretrained(tmp_path / "saved")
    assert load_backbone(tmp_path / "saved").licences == (licence,)
    header = (tmp_path / "saved/README.md").read_text().split("---")[1]
    assert "license: cc-by-nc-4.0\n" in header
    assert "base_model: owner/plain\n" in header


def test_a_licence_beside_a_file_and_none(tmp_path: Path) -> None:
    plain = build_backbone("vit_tiny_patch16_224", args=TINY, image_size=32)
    torch.save(plain.model.state_dict(), tmp_path / "weights.pth")
    [unknown] = load_backbone(tmp_path / "weights.pth", args={"num_heads": 2}).licences
    assert str(unknown) == "licence not recorded, look it up at its source"
    header = "license: other\nlicense_name: dinov3-license\nlicense_link: LICENSE.md"
    (tmp_path / "README.md").write_text(f"---\n{header}\n---\n# Weights\n")
    [own] = load_backbone(tmp_path / "weights.pth", args={"num_heads": 2}).licences
    assert (own.source, own.name, own.link, own.commercial) == (
        "weights.pth",
        "dinov3-license",
        "LICENSE.md",
        "own terms",
    )


def test_runs_of_earlier_versions_have_no_recorded_licence(tmp_path: Path, backbone: Backbone) -> None:
    save_backbone(backbone, tmp_path / "run")
    assert load_backbone(tmp_path / "run").licences == ()  # random weights
    about = json.loads((tmp_path / "run/backbone.json").read_text())
    del about["licences"]
    (tmp_path / "run/backbone.json").write_text(json.dumps(about))
    assert load_backbone(tmp_path / "run").licences == (Licence("run"),)


# from_pretrained, save_pretrained and push_to_hub


def test_timm_and_from_pretrained_read_what_push_to_hub_writes(
    backbone: Backbone, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    backbone.push_to_hub("owner/pushed", private=True)
    repository = hub.repositories["owner/pushed"]
    assert len(repository.commits) == 2  # that of the hub, and one with all files
    assert repository.private
    assert set(repository.files) == {".gitattributes", "README.md", "config.json", "cribo.json", "model.safetensors"}
    assert b"hf-hub:owner/pushed" in repository.files["README.md"]
    again = Backbone.from_pretrained("owner/pushed")
    assert again.fingerprint() == backbone.fingerprint()
    assert not again.training
    model = timm.create_model("hf-hub:owner/pushed", pretrained=True)
    assert torch.equal(model.state_dict()["pos_embed"], backbone.model.pos_embed)
    with pytest.raises(
        InputError, match=r"contains an earlier export \(.*\): choose another repository, or set --overwrite"
    ):
        backbone.push_to_hub("owner/pushed")
    backbone.push_to_hub("owner/pushed", overwrite=True)


def test_overwriting_leaves_no_file_of_the_former_weights(
    backbone: Backbone, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    save_backbone(build_backbone("vit_tiny_patch16_224", args=TINY, image_size=32, seed=5), tmp_path / "run")
    others = {"evaluation/card.png": b"", "preprocessor_config.json": b"{}", "thesis.tex": b"years of work"}
    hub.add_folder("owner/run", tmp_path / "run").commit(others)
    backbone.push_to_hub("owner/run", overwrite=True)
    own = {".gitattributes", "README.md", "config.json", "cribo.json", "model.safetensors"}
    assert set(hub.repositories["owner/run"].files) == own | {"thesis.tex"}
    assert load_backbone("hf://owner/run").fingerprint() == backbone.fingerprint()


def test_the_repository_and_the_branch_are_checked_before_files_are_written(
    backbone: Backbone, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(InputError, match="requires repo_id, owner/name"):
        backbone.save_pretrained(tmp_path / "saved", push_to_hub=True)
    with pytest.raises(InputError, match=r"\(repo_id\) must be owner/name"):
        backbone.save_pretrained(tmp_path / "saved", push_to_hub=True, repo_id="tiny")
    assert not (tmp_path / "saved").exists()
    hub.add("owner/tiny", {})
    with pytest.raises(InputError, match="owner/tiny has no branch 'dev': create it at http"):
        backbone.push_to_hub("owner/tiny", branch="dev")
    backbone.save_pretrained(tmp_path / "saved", push_to_hub=True, repo_id="owner/tiny")
    assert "model.safetensors" in hub.repositories["owner/tiny"].files


def test_save_pretrained_replaces_nothing_of_the_user(backbone: Backbone, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/config.json").write_text("{}")
    with pytest.raises(FolderError, match="refusing to replace it"):
        backbone.save_pretrained(tmp_path / "mine", overwrite=True)
    backbone.save_pretrained(tmp_path / "saved")
    with pytest.raises(FolderError, match="replace it with overwrite=True"):
        backbone.save_pretrained(tmp_path / "saved")
    assert Backbone.from_pretrained(tmp_path / "saved").fingerprint() == backbone.fingerprint()


@pytest.mark.parametrize(
    ("name", "args", "numerics", "note"),
    [
        ("vit_tiny_patch16_224", TINY, Numerics(norm_eps=1e-2), "norm_eps 0.01"),
        ("vit_base_patch16_224", {**TINY, "global_pool": "avg"}, Numerics(), "model.fc_norm"),
        ("convnext_atto", {"depths": (1, 1, 1, 1), "dims": (8, 8, 8, 8)}, Numerics(), "model.head.norm"),
    ],
)
def test_a_card_says_what_timm_does_differently(
    name: str, args: dict[str, Any], numerics: Numerics, note: str, tmp_path: Path
) -> None:
    backbone = build_backbone(name, args=args, image_size=64).eval()
    backbone.set_numerics(numerics)
    norm = backbone.model.get_submodule(note.removeprefix("model.")) if "model" in note else backbone.model.norm
    norm.weight.data.uniform_(1, 2)
    backbone.save_pretrained(tmp_path / "saved")
    card = (tmp_path / "saved/README.md").read_text()
    assert note in card.partition("- Note: ")[2]
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))
    names: dict[str, Any] = {"picture": picture}
    code = card.partition("```python\n")[2].partition("```")[0]
    with torch.no_grad():
        exec(code.replace("local-dir:.", f"local-dir:{tmp_path / 'saved'}"), names)
        expected = backbone.encode(names["transform"](picture)[None]).tokens
    found = names["tokens"] if "tokens" in names else names["feature_map"].flatten(2).mT
    assert torch.allclose(found, expected, atol=1e-4) == (numerics == Numerics())


def test_backbones_can_be_copied_pickled_and_trained() -> None:
    backbone = build_backbone("vit_tiny_patch16_224", args=TINY, image_size=32).eval()
    images = torch.rand(1, 3, 32, 32)
    expected = backbone(images).tokens
    for other in (copy.deepcopy(backbone), pickle.loads(pickle.dumps(backbone))):
        assert other.fingerprint() == backbone.fingerprint()
        other.train()(images).tokens.sum().backward()
        assert other.model.norm.weight.grad is not None
        assert torch.equal(other.eval()(images).tokens, expected)


@pytest.mark.parametrize(
    ("repo", "token", "message"),
    [
        ("tiny", TOKEN, r"--repo \(repo_id\) must be owner/name"),
        ("owner/tiny@v1", TOKEN, r"--repo \(repo_id\) must be owner/name"),
        ("owner/new", None, "no token for the Hugging Face hub: create one .*`hf auth login`, or set HF_TOKEN"),
        ("owner/new", "hf_wrong", "does not accept your token"),
        ("owner/new", READ_TOKEN, "the token 'laptop' may only read"),
        ("other/new", TOKEN, "the token is of owner, who cannot write to other/new"),
        ("owner/thesis", TOKEN, r"owner/thesis contains other files \(README.md, thesis.tex\)"),
        ("owner/noted", TOKEN, r"owner/noted contains other files \(README.md\)"),
    ],
)
def test_repositories_are_checked_before_anything_is_written(
    repo: str, token: str | None, message: str, backbone: Backbone, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("owner/thesis", {"thesis.tex": b"years of work", "README.md": b""})
    hub.add("owner/noted", {"README.md": CARD})
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(InputError, match=message) as raised:
        backbone.push_to_hub(repo)
    assert "\n" not in str(raised.value)
    assert not any(request.startswith(("POST", "PUT")) for request in hub.requests)


def test_a_new_repository_with_the_files_of_the_hub_can_be_used(
    backbone: Backbone, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.add(f"{OWNER}/fresh", {"README.md": b"---\nlicense: mit\n---\n"})
    backbone.push_to_hub(f"{OWNER}/fresh")
    assert "model.safetensors" in hub.repositories[f"{OWNER}/fresh"].files
