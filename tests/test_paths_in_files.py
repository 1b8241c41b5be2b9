"""Names and paths in files never lead outside their folder."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cribo.apps.embed.config import EmbedConfig
from cribo.apps.embed.merging import merge_embeddings
from cribo.apps.embed.run import embed_images
from cribo.apps.export.publishing import _pictures
from cribo.apps.studies.comparison import compare_studies
from cribo.base.errors import InputError
from cribo.base.files import link_or_copy, path_inside
from cribo.data.labelled.coco import CocoFile
from cribo.data.labelled.depth import _listed as nyu_pairs
from cribo.data.labelled.video import open_videos
from cribo.data.labelled.voc import VocBoxes
from cribo.data.sources.collection import read_named
from cribo.features import BackboneSource

OUTSIDE = ["../secret.png", "a/../../secret.png", "..", ".", "", "/etc/hostname", "link/secret.png", "a\0b", None, 3]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with a file that nothing may read or replace, and `inner`, with a link that leads to it."""
    Image.new("RGB", (16, 16)).save(tmp_path / "secret.png")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "link").symlink_to(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", OUTSIDE)
def test_names_must_stay_inside(home: Path, name: Any) -> None:
    with pytest.raises(InputError, match="file refers to"):
        path_inside(home / "inner", name, source="file")


def test_names_inside_and_links_of_image_folders(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = home / "inner"
    monkeypatch.chdir(home)
    for folder in (inner, Path("inner"), Path("inner/../inner")):
        for name in ("a.png", "a/b.png", "a/../b.png", "..png"):
            assert path_inside(folder, name, source="file") == folder / name
    assert path_inside(inner, "link/secret.png", source="file", follow_links=True).is_file()
    with pytest.raises(InputError):
        path_inside(inner, "link/../../secret.png", source="file", follow_links=True)


def test_links_and_copies_replace_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "new").write_text("new")
    before = (home / "secret.png").read_bytes()
    with pytest.raises(FileExistsError):
        link_or_copy(home / "new", home / "secret.png")

    def refused(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refused)
    with pytest.raises(FileExistsError):
        link_or_copy(home / "new", home / "secret.png")
    assert (home / "secret.png").read_bytes() == before
    link_or_copy(home / "new", home / "copy")
    assert (home / "copy").read_text() == "new"


def embed_shares(home: Path, kind: Any, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setattr("cribo.apps.embed.run._MOST_IMAGES", 1)
    (home / "images").mkdir()
    for number in range(2):
        pixels = np.random.default_rng(number).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(home / "images" / f"{number}.png")
    for number in (1, 2):
        embed_images(
            EmbedConfig(
                str(home / "images"),
                BackboneSource("mean-colour"),
                part=f"{number}/2",
                device="cpu",
                workers=1,
                format=kind,
            ),
            out=home / f"p{number}",
        )
    return [home / "p1", home / "p2"]


def test_a_share_of_features_cannot_write_outside(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lance")
    parts = embed_shares(home, "lance", monkeypatch)
    [part] = (parts[0] / "features").glob("part-*.json")
    content = json.loads(part.read_text())
    file = content["fragments"][0]["files"][0]
    data = parts[0] / "features.lance" / "data"
    for path in ("../../../../secret.png", str(home / "secret.png")):
        (data / file["path"]).rename(data / "kept")
        (home / "secret.png").write_bytes(b"mine")
        # Beside the share is a file for the same path, which would replace the one beside the results.
        part.write_text(
            json.dumps({**content, "fragments": [{**content["fragments"][0], "files": [{**file, "path": path}]}]})
        )
        with pytest.raises(InputError, match="part-"):
            merge_embeddings(parts, out=home / "deep" / "out")
        assert (home / "secret.png").read_bytes() == b"mine"
        (data / "kept").rename(data / file["path"])
    part.write_text("{}")
    with pytest.raises(InputError, match="damaged"):
        merge_embeddings(parts, out=home / "deep" / "out")
    assert not (home / "deep").exists()


def test_links_of_a_share_of_features_are_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = embed_shares(home, "numpy", monkeypatch)
    [part] = (parts[0] / "features").iterdir()
    part.unlink()
    part.symlink_to(home / "secret.png")
    with pytest.raises(InputError, match="not inside"):
        merge_embeddings(parts, out=home / "out")
    assert not (home / "out").exists()


@pytest.mark.parametrize("name", ["../secret.png", "/etc/hostname", "file:///etc/hostname"])
def test_a_database_does_not_name_images_outside(home: Path, name: str) -> None:
    with pytest.raises(InputError):
        read_named(home / "inner", name)
    with pytest.raises(InputError):
        read_named(home / "inner" / "0.tar", name)


def test_lists_may_name_images_anywhere(home: Path) -> None:
    (home / "inner" / "list.txt").write_text(f"{home / 'secret.png'}\n../secret.png\n")
    for name in (str(home / "secret.png"), "../secret.png"):
        assert read_named(home / "inner" / "list.txt", name).content == (home / "secret.png").read_bytes()
    with pytest.raises(InputError):
        read_named(home / "inner" / "list.txt", "../inner/../secret.png")


def test_lists_of_labelled_sets_stay_in_their_folder(home: Path) -> None:
    inner = home / "inner"
    for folder in ("JPEGImages", "Annotations", "ImageSets/2017", "ImageSets/Main"):
        (inner / folder).mkdir(parents=True)
    coco = {
        "images": [{"id": 1, "file_name": "../secret.png"}],
        "annotations": [],
        "categories": [{"id": 1, "name": "a"}],
    }
    (inner / "coco.json").write_text(json.dumps(coco))
    with pytest.raises(InputError, match=r"coco\.json refers to"):
        CocoFile(inner / "coco.json").image_files(None)
    (inner / "ImageSets" / "2017" / "val.txt").write_text("../..\n")
    with pytest.raises(InputError, match=r"val\.txt refers to"):
        open_videos(inner, "val", partial=True)
    (inner / "ImageSets" / "Main" / "test.txt").write_text("../../secret\n")
    with pytest.raises(InputError, match=r"test\.txt refers to"):
        VocBoxes(inner, "test")
    (inner / "nyu_test.txt").write_text("../secret.png ../secret.png 1\n")
    with pytest.raises(InputError, match="refers to"):
        nyu_pairs(inner, "val", partial=True)


def test_results_of_others_name_no_file_outside(home: Path) -> None:
    inner = home / "inner"
    record = {"rows": [{"evaluation": "../secret", "set": "x"}, {"evaluation": "link/secret", "set": "x"}]}
    with pytest.raises(InputError, match=r"results\.json refers to"):
        _pictures(record, inner)
    score = {
        "metric": "miou",
        "varied": "k",
        "settings": {},
        "rows": {"a": {"seeds": {"0": 1}, "folders": {"0": "../"}}},
    }
    for study in ("one", "two"):
        (inner / study).mkdir()
        (inner / study / "results.json").write_text(json.dumps({"kind": "study", "scores": {"s": score}}))
    with pytest.raises(InputError, match=r"results\.json refers to"):
        compare_studies(inner / "one", inner / "two")
