import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import cribo.apps.embed.run as run
from cribo.apps.embed.config import EmbedConfig
from cribo.apps.embed.merging import merge_embeddings
from cribo.apps.embed.run import Embedded, embed_images
from cribo.base.errors import ConfigError, DataError, FolderError, MissingData
from cribo.base.job import RECORD, Job
from cribo.cli import main
from cribo.features import BackboneSource

NAMES = [f"{number}.png" for number in range(7)]
BROKEN = ("4.png", "5.png")  # all images of a part


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(run, "_MOST_IMAGES", 2)
    (tmp_path / "images").mkdir()
    for number, name in enumerate(NAMES):
        pixels = np.random.default_rng(number).integers(0, 256, (32, 48, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / name)
    for name in BROKEN:
        (tmp_path / "images" / name).write_bytes(b"nothing")
    return tmp_path


def embed(folder: Path, out: str, part: str | None = None, *, resume: bool = False, **changes: Any) -> Embedded:
    options: dict[str, Any] = {"device": "cpu", "workers": 1, "batch_size": 2, "format": "numpy", **changes}
    config = EmbedConfig(str(folder / "images"), BackboneSource("mean-colour"), part=part, **options)
    return embed_images(config, out=folder / out, resume=resume)


def embed_shares(folder: Path, shares: int, **changes: Any) -> list[Path]:
    for number in range(1, shares + 1):
        embed(folder, f"p{number}", f"{number}/{shares}", **changes)
    return [folder / f"p{number}" for number in range(1, shares + 1)]


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in (RECORD, "about.json")
    }


@pytest.mark.parametrize("kind", ["numpy", "parquet", "safetensors"])
def test_merged_features_equal_those_of_one_command(folder: Path, kind: str) -> None:
    embed(folder, "whole", features="patches", format=kind)
    parts = embed_shares(folder, 4, features="patches", format=kind)
    done = merge_embeddings([*reversed(parts)], out=folder / "all")
    assert (done.images, [*done.skipped], done.features) == (5, [*BROKEN], folder / "all" / "features")
    assert contents(folder / "all") == contents(folder / "whole")
    merged, whole = (json.loads((folder / out / "about.json").read_text()) for out in ("all", "whole"))
    assert merged == whole
    [one] = (folder / "p1" / "features").iterdir()
    assert one.samefile(folder / "all" / "features" / one.name)
    assert embed(folder, "all", resume=True, features="patches", format=kind).reused == 5
    assert contents(folder / "p1")  # the parts are independent of the merged results
    shutil.rmtree(folder / "p1")
    assert contents(folder / "all") == contents(folder / "whole")


def test_merged_lance_datasets_equal_that_of_one_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lance = pytest.importorskip("lance")
    embed(folder, "whole", features="patches", format="lance")
    parts = embed_shares(folder, 2, features="patches", format="lance")

    def refused(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refused)  # copies
    done = merge_embeddings(parts, out=folder / "all")
    for part in parts:
        shutil.rmtree(part)
    whole = lance.dataset(folder / "whole" / "features.lance").to_table()
    assert done.features == folder / "all" / "features.lance"
    assert len(whole) > 5
    assert lance.dataset(done.features).to_table().equals(whole)
    assert lance.dataset(done.features).version == 1


def test_parts_that_do_not_belong_together_are_refused(folder: Path) -> None:
    p1, p2, p3 = embed_shares(folder, 3)
    embed(folder, "whole")
    embed(folder, "half", "2/2")
    embed(folder, "other", "2/3", precision="float16")
    shutil.copytree(p2, folder / "copy")
    Job(folder / "found", "search").create()
    Image.new("RGB", (32, 32)).save(folder / "images" / "0.png")
    embed(folder, "new", "2/3")
    refused: list[tuple[list[str], type[Exception], str]] = [
        (["p1", "p3"], ConfigError, r"part 2/3 is missing: run the command with --part 2/3, or give its results"),
        (["p2"], ConfigError, r"part 1/3, 3/3 are missing"),
        (["p1", "p2", "p2"], ConfigError, r"p2 is given twice"),
        (["p1", "whole"], ConfigError, r"whole contains the results of all images"),
        (["p1", "half"], ConfigError, r"half is part 2/2, but .*p1 is part 1/3"),
        (["p1", "other"], ConfigError, r"precision was float32, is float16\. Run"),
        (["p1", "p2", "copy"], ConfigError, r"p2 and .*copy are both part 2/3"),
        (["p1", "p9"], MissingData, "there is no 'p9'"),
        (["p1", "found"], FolderError, "found contains search results, not embedding results"),
        (["p1", "images"], FolderError, "images contains no results of cribo"),
        (["p1", "new", "p3"], ConfigError, r"images of .*images were added, removed or changed"),
    ]
    for parts, error, named in refused:
        with pytest.raises(error, match=named):
            merge_embeddings([folder / part for part in parts], out=folder / "all")
    for overwrite in (False, True):  # parts are not replaced by what is merged from them
        with pytest.raises(FolderError, match=r"the input .*p1 is inside the results folder .*: choose another --out"):
            merge_embeddings([p1, p2, p3], out=p1, overwrite=overwrite)
    assert not (folder / "all").exists()


def test_incomplete_parts_are_refused(folder: Path) -> None:
    parts = embed_shares(folder, 2)
    record, features = parts[1] / RECORD, parts[1] / "features"
    content = json.loads(record.read_text())

    def refuse(error: type[Exception], named: str) -> None:
        with pytest.raises(error, match=named):
            merge_embeddings(parts, out=folder / "all")

    record.write_text(json.dumps({**content, "finished": False}))
    refuse(FolderError, r"p2 is not finished: repeat its command with --resume")
    record.write_text(json.dumps({**content, "identity": "mine"}))
    refuse(FolderError, r"cribo\.json is damaged")
    lacking = {name: value for name, value in content["identity"].items() if name != "files"}
    record.write_text(json.dumps({**content, "identity": lacking}))
    refuse(ConfigError, r"p2 differs from .*p1")
    record.write_text(json.dumps(content))
    records = [part / RECORD for part in parts]
    before = [path.read_text() for path in records]
    for path, text in zip(records, before, strict=True):
        path.write_text(text.replace('"parts"', '"pieces"'))
    refuse(DataError, r"the record of .* is damaged")
    for path, text in zip(records, before, strict=True):
        path.write_text(text)
    first, second = sorted(features.iterdir())
    foreign, twice = features / "part-00000-00000000.npz", features / "part-00003-00000000.npz"
    first.rename(foreign)
    refuse(DataError, r"p2 is part 2/2, but contains part-00000-00000000 of another part")
    foreign.rename(twice)
    refuse(DataError, r"p2 contains a part twice, part-00003-00000000 and part-00003")
    twice.unlink()
    refuse(DataError, r"p2 lacks 1 file of features, such as part-00002-\*: repeat .* --resume")
    assert second.exists()
    assert not (folder / "all").exists()


def test_more_shares_than_parts_are_refused(folder: Path) -> None:
    for part, named in (("1/5", r"more shares than parts .*: use 1/4 to 4/4"), ("4/3", r"use 1/3 to 3/3")):
        with pytest.raises(ConfigError, match=named):
            embed(folder, "p1", part)
    assert not (folder / "p1").exists()


def test_the_command(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(folder)
    embed_shares(folder, 2)
    assert main(["merge", "p1", "p2", "--out", "all"]) == 0
    said = capsys.readouterr().out
    assert "5 images of 2 parts" in said
    assert "2 images could not be read:\n  4.png: not an image" in said
    assert "all/features" in said
    assert json.loads((folder / "all" / "about.json").read_text())["command"] == "cribo merge p1 p2 --out all"
    assert main(["merge", "p1", "--out", "half"]) == 2
    assert "cribo merge: part 2/2 is missing" in capsys.readouterr().err
    assert main(["merge", "images", "p1", "--out", "half"]) == 2
    assert "images contains no results of cribo embed, index or segment" in capsys.readouterr().err
    assert not (folder / "half").exists()
