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
    out = folder / "all"
    refused = [
        ([p1, p3], r"part 2/3 is missing: run the command with --part 2/3, or give its results"),
        ([p2], r"part 1/3, 3/3 are missing"),
        ([p1, p2, p2], r"p2 is given twice: give each part once"),
        ([p1, folder / "whole"], r"whole contains the results of all images"),
        ([p1, folder / "half"], r"half is part 2/2, but .*p1 is part 1/3"),
        ([p1, folder / "other"], r"other differs from .*p1 .*: precision was float32, is float16\. Run"),
    ]
    for parts, message in refused:
        with pytest.raises(ConfigError, match=message):
            merge_embeddings(parts, out=out)
    shutil.copytree(p2, folder / "copy")
    with pytest.raises(ConfigError, match=r"p2 and .*copy are both part 2/3"):
        merge_embeddings([p1, p2, folder / "copy"], out=out)
    with pytest.raises(MissingData, match="there is no 'p9'"):
        merge_embeddings([p1, folder / "p9"], out=out)
    Job(folder / "found", "search").create()
    with pytest.raises(FolderError, match="found contains search results, not embedding results"):
        merge_embeddings([p1, folder / "found"], out=out)
    with pytest.raises(FolderError, match="images contains no results of cribo"):
        merge_embeddings([p1, folder / "images"], out=out)
    Image.new("RGB", (32, 32)).save(folder / "images" / "0.png")
    embed(folder, "new", "2/3")
    with pytest.raises(ConfigError, match=r"images of .*images were added, removed or changed"):
        merge_embeddings([p1, folder / "new", p3], out=out)
    assert not out.exists()


def test_incomplete_parts_are_refused(folder: Path) -> None:
    parts = embed_shares(folder, 2)
    record = parts[1] / RECORD
    content = json.loads(record.read_text())
    record.write_text(json.dumps({**content, "finished": False}))
    with pytest.raises(FolderError, match=r"p2 is not finished: repeat its command with --resume"):
        merge_embeddings(parts, out=folder / "all")
    record.write_text(json.dumps({**content, "identity": "mine"}))
    with pytest.raises(FolderError, match=r"cribo\.json is damaged"):
        merge_embeddings(parts, out=folder / "all")
    record.write_text(json.dumps(content))
    first, second = sorted((parts[1] / "features").iterdir())
    foreign = parts[1] / "features" / "part-00000-00000000.npz"
    first.rename(foreign)
    with pytest.raises(DataError, match=r"p2 is part 2/2, but contains part-00000-00000000 of another part"):
        merge_embeddings(parts, out=folder / "all")
    foreign.rename(parts[1] / "features" / "part-00003-00000000.npz")
    with pytest.raises(DataError, match=r"p2 contains a part twice, part-00003-00000000 and part-00003"):
        merge_embeddings(parts, out=folder / "all")
    (parts[1] / "features" / "part-00003-00000000.npz").unlink()
    with pytest.raises(DataError, match=r"p2 lacks 1 file of features, such as part-00002-\*: repeat .* --resume"):
        merge_embeddings(parts, out=folder / "all")
    assert second.exists()
    assert not (folder / "all").exists()


def test_parts_are_not_replaced_by_what_is_merged_from_them(folder: Path) -> None:
    parts = embed_shares(folder, 2)
    for overwrite in (False, True):
        with pytest.raises(FolderError, match=r"the input .*p1 is inside the results folder .*: choose another --out"):
            merge_embeddings(parts, out=parts[0], overwrite=overwrite)


def test_more_shares_than_parts_are_refused(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"part 1/5: there are more shares than parts of 2 images, .* 4: use 1/4 to 4/4"
    ):
        embed(folder, "p1", "1/5")
    with pytest.raises(ConfigError, match=r"part must be i/n with i from 1 to n, got 4/3: use 1/3 to 3/3"):
        embed(folder, "p4", "4/3")
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
