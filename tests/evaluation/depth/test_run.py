"""Depth from the command line, in the layouts of NYU-Depth v2 and on a folder."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cribo.base.errors import DataError, MissingData
from cribo.cli import main
from cribo.data.labelled import depth as data
from cribo.data.labelled.depth import EIGEN_CROP, open_depth
from cribo.evaluation import compare, read_result

RUN = ("--cache", "none", "--devices", "cpu", "--runtime.workers", "0")
SIZE = 48, 64


def write_pair(image: Path, depth: Path, seed: int, size: tuple[int, int] = SIZE) -> None:
    """Write patches of 16 pixels whose red channel is the depth, 1 to 9 m; the upper left patch is not measured."""
    generator = np.random.default_rng(seed)
    metres = generator.integers(1, 10, (size[0] // 16, size[1] // 16)).repeat(16, 0).repeat(16, 1)
    pixels = np.stack((25 * metres, np.full(size, 90), 250 - 25 * metres), axis=-1).astype(np.uint8)
    for path in (image, depth):
        path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(image)
    metres[:16, :16] = 0
    Image.fromarray((1000 * metres).astype(np.uint16)).save(depth)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for split, count in (("train", 6), ("val", 2)):
        for number in range(count):
            name = f"{split}/{number}.png"
            seed = number + 10 * (split == "val")
            write_pair(tmp_path / "mine/images" / name, tmp_path / "mine/depth" / name, seed)
    return tmp_path / "mine"


def write_nyu(root: Path, folders: tuple[str, str], lists: tuple[str, str]) -> None:
    """Write two images for training and one for validation."""
    for folder, listed, count in zip(folders, lists, (2, 1), strict=True):
        lines = []
        for number in range(count):
            image, depth = f"kitchen_0028b/rgb_{number:05}.png", f"kitchen_0028b/sync_depth_{number:05}.png"
            write_pair(root / folder / image, root / folder / depth, number, (480, 640))
            lines.append(f"/{image} /{depth} 518.8579\n")
        (root / listed).write_text("".join(lines))


def words(*more: str) -> list[str]:
    given = ("--backbone", "mean-colour", "--data", "mine", "--neighbours", "3")
    return ["evaluate", "depth", *given, *RUN, *more]


def output(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().err.split())


def test_depth_encoded_by_colour_is_found(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All pixels of a patch have the same depth, so errors come only from upsampling between patches."""
    assert main(words("--out", "result")) == 0
    result = read_result("result")
    assert (result.metrics, result.varies, result.title) == (["delta1", "rmse", "abs_rel"], "method", "Depth on mine")
    exact = []
    for number in range(2):
        metres = np.array(Image.open(folder / f"depth/val/{number}.png")).astype(np.float32) / 1000
        patches = np.array(Image.open(folder / f"images/val/{number}.png"))[8::16, 8::16, 0].astype(np.float32) / 25
        upsampled = torch.nn.functional.interpolate(torch.from_numpy(patches)[None, None], SIZE, mode="bilinear")
        error = (upsampled[0, 0].numpy() - metres)[metres > 0]
        exact.append(np.sqrt(np.mean(error**2)))
    for row in result.results:
        assert row["rmse"] == pytest.approx(np.mean(exact), abs=0.01)
        assert row["images"] == 2
    assert (result.data["train_images"], result.data["val_images"], result.data["train_patches"]) == (6, 2, 6 * 12)
    assert sorted(path.name for path in Path("result").glob("*.png")) == ["delta1.png", "depth.png"]
    assert "RMSE [m]" in capsys.readouterr().out
    assert f"| mine | {result.results[0]['rmse']:.3f} |" in compare(["result"]).markdown().replace(
        "mean-colour", "mine"
    )


def test_one_method_and_fewer_images(folder: Path) -> None:
    assert main(words("--methods", "linear", "--limit", "1", "--pictures", "0", "--out", "result")) == 0
    result = read_result("result")
    assert [row["method"] for row in result.results] == ["linear"]
    assert (result.data["train_images"], result.data["val_images"]) == (1, 1)


@pytest.mark.parametrize(
    ("folders", "lists"),
    [
        (("", ""), ("nyu_train.txt", "nyu_test.txt")),
        (
            ("sync", "official_splits/test"),
            ("nyudepthv2_train_files_with_gt.txt", "nyudepthv2_test_files_with_gt.txt"),
        ),
    ],
)
def test_nyu_is_read_in_its_layouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folders: tuple[str, str], lists: tuple[str, str]
) -> None:
    root = tmp_path / "nyu"
    write_nyu(root, folders, lists)
    with pytest.raises(DataError, match="must list the 24,231 images of NYU-Depth v2, got 2: take BTS's list, or acc"):
        open_depth(root)
    train, val = open_depth(root, partial=True)
    assert (len(train), len(val), train.name(1)) == (2, 1, "kitchen_0028b/rgb_00001.png")
    assert val.window == EIGEN_CROP
    assert torch.equal(val.depth(0).unique(), torch.arange(10.0))
    monkeypatch.setattr(data, "NYU_SIZES", {"train": 2, "val": 1})
    out = tmp_path / "out"
    assert main([*words(), "--data", str(root), "--out", str(out)]) == 0
    result = read_result(out)
    assert (result.data["name"], result.title) == ("nyu", "Depth on NYU-Depth v2")
    (root / folders[0] / "kitchen_0028b/rgb_00001.png").unlink()
    with pytest.raises(MissingData, match=r"1 of the 2 images of .*txt or their depth maps are missing, the first is "):
        open_depth(root)
    assert len(open_depth(root, partial=True)[0]) == 1
    (root / lists[1]).unlink()
    with pytest.raises(MissingData, match=r"has no list of NYU-Depth v2 for val: nyu_test\.txt or"):
        open_depth(root, partial=True)
    (root / lists[1]).write_text("a.jpg\n")
    with pytest.raises(DataError, match=r"paths of an image and of its depth map, got 'a\.jpg' in line 1"):
        open_depth(root, partial=True)


def test_nyu_images_must_have_its_size(tmp_path: Path) -> None:
    write_nyu(tmp_path, ("", ""), ("nyu_train.txt", "nyu_test.txt"))
    write_pair(tmp_path / "kitchen_0028b/rgb_00000.png", tmp_path / "kitchen_0028b/sync_depth_00000.png", 0)
    with pytest.raises(DataError, match=r"must have 640 x 480 pixels, of which the crop of Eigen et al\. is scored"):
        open_depth(tmp_path, partial=True)


def test_depths_above_the_maximum_are_ignored(folder: Path) -> None:
    depth = open_depth(folder, max_depth=5.5)[1].depth(0)
    assert 0 < float(depth.max()) <= 5.5
    whole = open_depth(folder)[1].depth(0)
    assert torch.equal(depth, torch.where(whole > 5.5, 0, whole))


def rewrite(folder: Path, values: np.ndarray, split: str) -> None:
    for path in (folder / "depth" / split).iterdir():
        Image.fromarray(values).save(path)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (np.zeros(SIZE, np.uint16), "all pixels of 2 depth maps are 0, which is no measurement, such as"),
        (
            np.full(SIZE, 20_000, np.uint16),
            "must be 0.1 to 10 m, got 20 m: give the units per metre with --data.scale, now 1000",
        ),
        (np.full(SIZE, 3, np.uint16), "must be 0.1 to 10 m, got 0.003 m"),
        (np.full(SIZE, 30, np.uint8), "depth must be a grey PNG with 16 bits, got mode L"),
        (np.full((*SIZE, 3), 30, np.uint8), "depth must be a grey PNG with 16 bits, got mode RGB"),
        (
            np.full((30, 40), 3000, np.uint16),
            "depth must have the size of image images/val/0.png, 64 x 48, got 40 x",
        ),
    ],
)
def test_invalid_depth_maps_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], values: np.ndarray, reason: str
) -> None:
    rewrite(folder, values, "val")
    assert main(words()) == 2
    assert reason in output(capsys)


def test_another_unit_is_set_by_an_option(folder: Path) -> None:
    for split in ("train", "val"):
        rewrite(folder, np.full(SIZE, 256 * 30, np.uint16), split)
    assert main(words("--data.scale", "256", "--data.max_depth", "80", "--out", "result")) == 0
    assert read_result("result").results[0]["rmse"] == pytest.approx(0, abs=1e-5)


def test_images_without_measurements_are_excluded_from_the_mean(folder: Path) -> None:
    Image.fromarray(np.zeros(SIZE, np.uint16)).save(folder / "depth/val/1.png")
    assert main(words("--out", "result")) == 0
    assert {row["images"] for row in read_result("result").results} == {1}


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (("--methods", "linear,linear"), "methods must be distinct values of neighbours,linear"),
        (("--temperature", "0"), "temperature must be > 0"),
        (("--ridge", "0"), "ridge must be > 0"),
        (("--neighbours", "0"), "neighbours must be >= 1"),
        (("--size", "60"), "size must be a multiple of the patch size 16, got 60x60"),
        (("--data.scale", "0"), "data.scale must be > 0"),
        (("--data.limit", "0"), "data.limit must be >= 1"),
        (("--data", "."), "must contain nyu_train.txt and nyu_test.txt (NYU-Depth v2), or images/train"),
        (("--neighbours", "67"), "number of patches with a measurement, 66, got 67"),
    ],
)
def test_invalid_settings_are_refused_before_any_result(
    folder: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], reason: str
) -> None:
    assert main(words(*more)) == 2
    assert reason in output(capsys)
    assert sorted(path.name for path in Path().iterdir()) == ["mine"]


def test_an_incomplete_set_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "depth/train/2.png").unlink()
    assert main(words()) == 2
    assert "1 of the 6 images of mine/images/train or their depth maps are missing, the first is mine/depth/" in output(
        capsys
    )
    assert main(words("--data.partial", "--out", "result")) == 0
    assert read_result("result").data["train_images"] == 5
    for path in (folder / "depth/val").iterdir():
        path.unlink()
    (folder / "depth/val").rmdir()
    with pytest.raises(MissingData, match="there is no 'val'"):
        open_depth(folder, partial=True)
