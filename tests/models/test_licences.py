import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from benchmarks.backbones import BEGIN, END, GATED, PAGE, row, table
from tests.hub_server import Hub

from cribo.base.errors import InputError
from cribo.cli import main
from cribo.cli.running import SUGGESTED
from cribo.models import Backbone, build_backbone, load_backbone, load_pretrained, save_backbone
from cribo.models.hub.download import source_name
from cribo.models.licences import Licence, describe_licences, licences_of, read_header, read_licence, with_teacher

TINY = {"embed_dim": 32, "depth": 1, "num_heads": 2}


def tiny(seed: int = 0) -> Backbone:
    return build_backbone("vit_tiny_patch16_224", args=TINY, image_size=32, seed=seed)


def test_the_table_of_public_backbones_is_current() -> None:
    written = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    assert written.strip() == table()


def test_the_suggested_backbone_is_public_and_for_commercial_use(capsys) -> None:
    about = row(SUGGESTED, SUGGESTED, gated=SUGGESTED in GATED)
    assert (about.parameters, about.licence, about.commercial, about.gated) == ("22 M", "apache-2.0", "yes", "no")
    assert main(["adapt", "images"]) == 2
    assert f"; --backbone: for a start, {SUGGESTED} (22 M parameters, licence apache-2.0" in capsys.readouterr().err


def test_the_licence_of_a_teacher_is_kept_apart() -> None:
    own, teacher = Licence("a", "mit"), Licence("b", "cc-by-nc-4.0")
    assert [each.role for each in with_teacher([own], [teacher, teacher])] == ["weights", "teacher"]
    assert licences_of({"licences": []}, Licence("run"), Path()) == ()


def test_a_licence_is_logged_once_for_the_weights_and_their_copies(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.save(tiny().model.state_dict(), tmp_path / "logged_once.pth")
    with caplog.at_level("INFO", "cribo"):
        save_backbone(load_backbone(tmp_path / "logged_once.pth", args={"num_heads": 2}), tmp_path / "copy")
        load_backbone(tmp_path / "copy")
        load_backbone(tmp_path / "copy")
    lines = [record.getMessage() for record in caplog.records if "licence not" in record.getMessage()]
    assert lines == ["logged_once.pth: licence not recorded, look it up at its source"]


@pytest.mark.parametrize("save", [save_backbone, Backbone.save_pretrained])
def test_a_licence_stated_by_the_publisher_is_added(
    save: Callable[[Backbone, Path], object], hub: Hub, tmp_path: Path
) -> None:
    save(tiny(), tmp_path / "scratch")
    hub.add_folder("owner/scratch", tmp_path / "scratch").commit({"README.md": b"---\nlicense: cc-by-nc-4.0\n---\n"})
    loaded, other = load_backbone("hf://owner/scratch"), tiny()
    load_pretrained(other, "hf://owner/scratch")
    assert [(each.source, each.name) for each in loaded.licences] == [("hf://owner/scratch", "cc-by-nc-4.0")]
    assert other.licences == loaded.licences
    loaded.licences += (Licence("mine", "mit"),)  # the header of its card names both as `see-model-card`
    loaded.save_pretrained(tmp_path / "again")
    assert load_backbone(tmp_path / "again").licences == loaded.licences


@pytest.mark.parametrize("name", ["resnet18.pth", "vit_small_patch16_224.mine"])
def test_the_name_of_a_file_is_not_an_origin(name: str, tmp_path: Path) -> None:
    torch.save(tiny().model.state_dict(), tmp_path / name)
    loaded = load_backbone(tmp_path / name, args={"num_heads": 2})
    loaded.save_pretrained(tmp_path / "saved")
    assert "base_model" not in (tmp_path / "saved/README.md").read_text()


def test_descriptions_without_an_origin_are_read() -> None:
    about = {"licences": [{"source": "vit", "name": "mit"}]}
    assert licences_of(about, Licence("run"), Path()) == (Licence("vit", "mit"),)


def test_the_repository_from_which_a_network_was_made_is_its_base_model(hub: Hub, tmp_path: Path) -> None:
    parent = tiny()
    parent.licences = (Licence("vit.dino", "apache-2.0", hub="timm/vit.dino"),)
    parent.save_pretrained(tmp_path / "parent")
    hub.add_folder("owner/parent", tmp_path / "parent")
    save_backbone(load_backbone("hf://owner/parent"), tmp_path / "run")
    load_backbone(tmp_path / "run").save_pretrained(tmp_path / "child")
    header = read_header(tmp_path / "child/README.md")
    assert header["base_model"] == ["owner/parent", "timm/vit.dino"]
    assert header["license"] == "apache-2.0"


@pytest.mark.parametrize("folder", ["", "run/"])
def test_a_link_to_a_licence_is_complete_elsewhere(folder: str, hub: Hub, tmp_path: Path) -> None:
    save_backbone(tiny(), tmp_path / "run")
    files = {f"{folder}{path.name}": path.read_bytes() for path in (tmp_path / "run").iterdir()}
    files[f"{folder}README.md"] = b"---\nlicense: other\nlicense_link: LICENSE.md\n---\n"
    commit = hub.add("owner/net", files).commit({})
    [licence] = load_backbone(f"hf://owner/net/{folder}").licences
    assert (licence.name, licence.link) == ("other", f"{hub.address}/owner/net/blob/{commit}/{folder}LICENSE.md")
    made = tiny()
    made.licences = (licence,)
    made.save_pretrained(tmp_path / "made")
    header = read_header(tmp_path / "made/README.md")
    assert (header["license"], header["license_link"]) == ("other", licence.link)
    assert "license_name" not in header


@pytest.mark.parametrize(
    ("header", "card", "commercial"),
    [
        ("license: MIT", {"license": "mit"}, "yes"),
        ("license: cc-by-nc-sa-3.0", {"license": "cc-by-nc-sa-3.0"}, "no"),
        ("license: llama3", {"license": "llama3"}, "own terms"),
        ("license: ecl-2.0", {"license": "ecl-2.0"}, "unknown"),
        ("license: other\nlicense_name: Lab", {"license": "other", "license_name": "lab"}, "unknown"),
    ],
)
def test_names_that_the_hub_lists_are_kept(
    header: str, card: dict[str, str], commercial: str, hub: Hub, tmp_path: Path
) -> None:
    (tmp_path / "README.md").write_text(f"---\n{header}\n---\n")
    licence = read_licence([tmp_path / "README.md"], "hf://owner/net")
    assert licence.commercial == commercial
    made = tiny()
    made.licences = licences_of({"licences": describe_licences([licence])}, Licence("run"), Path())
    made.save_pretrained(tmp_path / "made")
    written = read_header(tmp_path / "made/README.md")
    assert {key: written[key] for key in ("license", "license_name") if key in written} == card


def test_licences_of_later_versions_are_read_and_malformed_ones_refused(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path / "net")
    config = tmp_path / "net/config.json"
    about = json.loads(config.read_text())
    about["cribo"]["licences"] = [{"source": "a", "name": "mit", "added_later": 1}]
    config.write_text(json.dumps(about))
    assert load_backbone(tmp_path / "net").licences == (Licence("a", "mit"),)
    for malformed in ({"a": 1}, [{"name": "mit"}], [{"source": "a", "name": ["mit"]}], ["mit"]):
        about["cribo"]["licences"] = malformed
        config.write_text(json.dumps(about))
        with pytest.raises(InputError, match=r"config\.json has malformed licences"):
            load_backbone(tmp_path / "net")


@pytest.mark.parametrize("folder", ["/home/alice", "/Users/alice", "/", str(Path.home())])
def test_names_of_sources_are_not_those_of_users(folder: str) -> None:
    assert source_name(str(Path(folder) / "backbone.safetensors")) == "backbone.safetensors"
    assert source_name(str(Path(folder) / "camvid/backbone.safetensors")) == "camvid"


def test_a_published_network_without_a_licence_is_not_free(hub: Hub, tmp_path: Path) -> None:
    save_backbone(tiny(), tmp_path / "scratch")
    hub.add_folder("owner/scratch", tmp_path / "scratch")
    load_backbone("hf://owner/scratch").save_pretrained(tmp_path / "made")
    text = (tmp_path / "made/README.md").read_text()
    assert "`hf://owner/scratch`: licence not recorded" in text
    assert "chooses the licence" not in text
