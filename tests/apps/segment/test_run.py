import csv
import io
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from threading import Thread

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tifffile
import torch
from faster_coco_eval.core import mask as coco_mask
from filelock import FileLock
from PIL import Image
from tests.features.memory.coded import blocks, save_image, save_labels

import cribo.apps.segment.run as run
from cribo.apps.segment import Labeller
from cribo.apps.segment.config import SegmentConfig
from cribo.apps.segment.results import Segmented
from cribo.apps.segment.run import segment_images
from cribo.base.errors import ConfigError, DataError, FolderError, InputError, MissingData
from cribo.base.job import ACCOUNTS, RECORD, read_record
from cribo.cli import main
from cribo.data.labelled.coco import CocoLabels
from cribo.data.labelled.regions import trace
from cribo.features import BackboneSource
from cribo.features.memory.memory import SegmentationMemory
from cribo.features.memory.settings import SegmentationSettings
from cribo.models import build_backbone, save_backbone

PATCH = 16  # of the mean-colour encoder
FIRST, SECOND = blocks([0, 1, 2], [2, 2, 0]), blocks([3, 3, 3], [1, 255, 3])
PALETTE = [10, 20, 30, 200, 0, 0, 0, 200, 0, 0, 0, 200]


def enlarged(labels: torch.Tensor) -> torch.Tensor:
    """One class per patch of the mean-colour encoder."""
    return labels.repeat_interleave(4, 0).repeat_interleave(4, 1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, labels in (("a", FIRST), ("b", SECOND)):
        save_image(tmp_path / "examples" / f"{name}.bmp", enlarged(labels))
        save_labels(tmp_path / "examples" / f"{name}_labels.png", enlarged(labels), PALETTE)
    (tmp_path / "examples" / "classes.txt").write_text("road\nsky\ncar\ntree\n")
    for name, labels in (("1", FIRST), ("sub/2", SECOND), ("sub/3", FIRST)):
        save_image(tmp_path / "images" / f"{name}.bmp", enlarged(labels))
    return tmp_path


def config(folder: Path, **changes) -> SegmentConfig:
    settings = {"scale": 1.0, "neighbours": 1, "head": "knn", "whiten": False, "refine": "none"}
    names = {field.name for field in fields(SegmentationSettings)}
    values = {
        "backbone": BackboneSource("mean-colour"),
        "images": str(folder / "images"),
        "examples": str(folder / "examples"),
        "settings": settings | {name: value for name, value in changes.items() if name in names},
        "workers": 1,
        "device": "cpu",
        **{name: value for name, value in changes.items() if name not in names},
    }
    return SegmentConfig(**values)


def segment(folder: Path, *, out: str = "out", pictures: int = 0, resume: bool = False, **changes) -> Segmented:
    return segment_images(config(folder, **changes), out=folder / out, pictures=pictures, resume=resume)


def summary(out: Path) -> list[dict[str, str]]:
    with (out / "summary.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def files(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


def test_written_files(folder: Path) -> None:
    done = segment(folder, pictures=2)
    out = folder / "out"
    assert (done.images, done.reused, done.skipped) == (3, 0, {})
    middles = (slice(8, None, 16), slice(8, None, 16))
    with Image.open(out / "labels" / "1.png") as labels:
        assert labels.mode == "P"
        assert (labels.getpalette() or [])[:12] == PALETTE
        np.testing.assert_array_equal(np.array(labels)[middles], enlarged(FIRST)[middles])
    with Image.open(out / "labels" / "sub" / "2.png") as labels:
        pixels = np.array(labels)
    with Image.open(out / "confidence" / "sub" / "2.png") as confidence:
        assert (confidence.mode, confidence.size) == ("L", (48, 32))
        measured = np.array(confidence).mean() / 255
    with Image.open(out / "overlays" / "sub" / "3.jpg") as overlay:
        assert overlay.size == (48, 32)
    with Image.open(out / "contact.png") as overview:
        assert overview.width > 600
    rows = summary(out)
    assert [row["image"] for row in rows] == ["1.bmp", "sub/2.bmp", "sub/3.bmp"]
    assert float(rows[1]["tree"]) == pytest.approx((pixels == 3).mean(), abs=1e-6)
    assert sum(float(rows[1][name]) for name in ("road", "sky", "car", "tree")) == pytest.approx(1, abs=1e-5)
    assert float(rows[1]["confidence"]) == pytest.approx(measured, abs=0.003)
    about = json.loads((out / "about.json").read_text())
    assert read_record(out, "segmentation").finished
    assert about["classes"] == ["road", "sky", "car", "tree"]
    assert about["memory"]["examples"] == ["a.bmp", "b.bmp"]
    assert about["settings"]["neighbours"] == 1
    counts = {"found": 3, "segmented": 3, "reused": 0, "earlier": 0, "skipped": 0}
    place = {"folder": str(folder / "images"), "part": "1/1"}
    assert about["images"] == {**place, **counts}
    assert about["confidence"] == "255 times the probability, 0 to 1, that the label is right"
    assert not list(out.rglob("*.part"))


def test_confidence_that_is_not_calibrated_is_marked_everywhere(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("b.bmp", "b_labels.png"):
        (folder / "examples" / name).unlink()
    with caplog.at_level("WARNING", logger="cribo"):
        segment(folder)
    reason = "there is only one example: label a second image"
    assert f"the confidence is not calibrated and may be far too high: {reason}" in caplog.messages
    about = json.loads((folder / "out" / "about.json").read_text())
    assert about["confidence"].endswith(f"not calibrated: {reason}")


def test_pixels_without_confidence_have_no_class_and_no_share(folder: Path) -> None:
    done = segment(folder, min_confidence=0.7)
    with (
        Image.open(folder / "out" / "labels" / "1.png") as image,
        Image.open(folder / "out" / "confidence" / "1.png") as grey,
    ):
        labels, confidence = np.array(image), np.array(grey) / 255
    unsure = labels == 255
    assert 0 < unsure.mean() < 1
    assert confidence[unsure].max() <= 0.7 + 1 / 255
    assert confidence[~unsure].min() >= 0.7 - 1 / 255
    row = summary(folder / "out")[0]
    shares = sum(float(row[name]) for name in ("road", "sky", "car", "tree"))
    assert shares == pytest.approx(1 - unsure.mean(), abs=1e-5)
    assert 0 < sum(done.shares.values()) < 0.99


def test_a_memory_is_written_used_and_extended(folder: Path) -> None:
    memory = folder / "m.safetensors"
    save_image(folder / "more" / "c.bmp", enlarged(blocks([0, 0])))
    save_labels(folder / "more" / "c_labels.png", enlarged(blocks([1, 1])), PALETTE)
    segment(folder, memory=str(memory))
    first = memory.read_bytes()
    segment(folder, out="again", memory=str(memory), examples=None)
    for kind in ("labels", "confidence"):
        assert files(folder / "again" / kind) == files(folder / "out" / kind)
    segment(folder, out="same", memory=str(memory))
    assert memory.read_bytes() == first
    segment(folder, out="more_of_it", memory=str(memory), examples=str(folder / "more"))
    about = json.loads((folder / "more_of_it" / "about.json").read_text())
    assert about["memory"]["examples"] == ["a.bmp", "b.bmp", "c.bmp"]
    assert memory.read_bytes() != first


def test_coco_labels_equal_the_label_maps(folder: Path) -> None:
    out = folder / "out"
    segment_images(config(folder, min_confidence=0.7), out=out, pictures=0, write=("coco",))
    labels = CocoLabels(out / "coco.json", folder / "images")
    assert labels.classes == ["background", "road", "sky", "car", "tree"]
    for number, name in enumerate(("1", "sub/2", "sub/3")):
        assert labels.name(number) == f"{name}.bmp"
        with Image.open(out / "labels" / f"{name}.png") as image:
            expected = np.array(image).astype(int) + 1
        expected[expected == 256] = 0  # unlabelled pixels have no annotation
        np.testing.assert_array_equal(labels.labels(number).numpy(), expected)
    content = json.loads((out / "coco.json").read_text())
    for annotation in content["annotations"]:
        mask = coco_mask.decode(annotation["segmentation"])
        rows, columns = np.nonzero(mask)
        x, y, width, height = annotation["bbox"]
        assert (x, y, x + width, y + height) == (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
        assert annotation["area"] == mask.sum()
    # --write also works when all images are labelled; the background has no annotation.
    (out / "coco.json").unlink()
    segment_images(config(folder, min_confidence=0.7), out=out, pictures=0, write=("coco",), resume=True)
    assert len(CocoLabels(out / "coco.json", folder / "images")) == 3
    (folder / "examples" / "classes.txt").write_text("background\nsky\ncar\ntree\n")
    segment_images(config(folder), out=folder / "second", pictures=0, write=("coco",))
    again = CocoLabels(folder / "second" / "coco.json", folder / "images")
    assert again.classes == ["background", "sky", "car", "tree"]


def test_small_regions_are_merged_in_the_files_of_other_tools_only(folder: Path) -> None:
    """The images have regions of one and two patches, and one of three."""
    common = ["segment", str(folder / "images"), "--backbone", "mean-colour", "--examples", str(folder / "examples")]
    common += ["--head", "knn", "--neighbours", "1", "--refine", "none", "--scale", "1", "--device", "cpu"]

    def regions(out: str, *words: str) -> tuple[int, dict[str, bytes]]:
        place = folder / out
        assert main([*common, "--out", str(place), "--pictures", "0", "--write", "coco,geojson", *words]) == 0
        read = [CocoLabels(place / "coco.json", folder / "images").labels(number).numpy() for number in range(3)]
        polygons = sum(len(json.loads(file.read_text())["features"]) for file in place.rglob("*.geojson"))
        assert polygons == sum(len(trace(labels, range(1, 5))) for labels in read)
        return polygons, {path.name: path.read_bytes() for path in (place / "labels").rglob("*.png")}

    exact, label_maps = regions("exact")
    fewer, same = regions("merged", "--write_min_area", str(2 * PATCH**2))
    assert fewer < exact
    assert label_maps == same
    # Complete results are written again.
    assert regions("exact", "--resume", "--write_min_area", str(2 * PATCH**2)) == (fewer, label_maps)


@pytest.mark.parametrize(
    ("options", "write", "area"), [({}, (), 9), ({}, ("coco",), -1), ({"instances": ("car",)}, ("coco",), 9)]
)
def test_small_regions_are_merged_in_written_regions_only(
    folder: Path, options: dict[str, object], write: tuple[str, ...], area: int
) -> None:
    with pytest.raises(ConfigError, match="write_min_area"):
        segment_images(config(folder, **options), out=folder / "out", write=write, write_min_area=area)
    assert not (folder / "out").exists()


def test_an_interrupted_command_resumes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    segment(folder, out="whole")
    written = []
    write = run.ResultWriter.write

    def interrupted(self, name, *found):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(name)
        return write(self, name, *found)

    monkeypatch.setattr(run.ResultWriter, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        segment(folder, batch_size=1)
    assert not read_record(folder / "out", "segmentation").finished
    assert not (folder / "out" / "summary.csv").exists()
    with pytest.raises(FolderError, match=r"out already exists: .* resume it with --resume"):
        segment(folder)
    (folder / "out" / "labels" / "1.png").unlink()  # a lost file is written again
    written.clear()
    monkeypatch.setattr(
        run.ResultWriter, "write", lambda self, name, *found: (written.append(name), write(self, name, *found))[1]
    )
    done = segment(folder, resume=True)
    assert written == ["1.bmp", "sub/3.bmp"]
    assert (done.images, done.reused) == (3, 1)
    whole, after = files(folder / "whole"), files(folder / "out")
    assert whole.keys() == after.keys()
    assert all(whole[name] == after[name] for name in whole if name not in ("about.json", RECORD, ACCOUNTS))


def test_changed_and_new_images_are_labelled_on_resume(folder: Path) -> None:
    segment(folder)
    save_image(folder / "images" / "1.bmp", enlarged(SECOND))
    save_image(folder / "images" / "new.bmp", enlarged(SECOND))
    done = segment(folder, resume=True)
    assert (done.images, done.reused) == (4, 2)
    rows = {row["image"]: row for row in summary(folder / "out")}
    assert rows["1.bmp"]["tree"] == rows["new.bmp"]["tree"] == rows["sub/2.bmp"]["tree"]
    assert segment(folder, resume=True).reused == 4


def test_results_of_images_that_were_removed_are_kept_on_resume(folder: Path) -> None:
    whole = segment(folder)
    before = {row["image"]: row for row in summary(folder / "out")}
    (folder / "images" / "1.bmp").unlink()
    (folder / "images" / "sub" / "2.bmp").rename(folder / "images" / "sub" / "3.png")
    (folder / "images" / "sub" / "3.bmp").unlink()
    done = segment(folder, resume=True)
    assert (done.images, done.reused, done.earlier) == (1, 0, 2)
    assert sum(done.shares.values()) == pytest.approx(sum(whole.shares.values()))
    rows = {row["image"]: row for row in summary(folder / "out")}
    assert [*rows] == ["sub/3.png", "1.bmp", "sub/2.bmp"]  # the results of sub/3.bmp were replaced
    assert {name: row for name, row in rows.items() if name != "sub/3.png"} == {
        name: row for name, row in before.items() if name != "sub/3.bmp"
    }
    assert sorted(path.stem for path in (folder / "out" / "labels").rglob("*.png")) == ["1", "2", "3"]
    assert json.loads((folder / "out" / "about.json").read_text())["images"]["earlier"] == 2


def test_pixels_without_data_have_no_labels_and_the_range_is_that_of_the_examples(folder: Path) -> None:
    """Elevations in metres, of which no file states the range; -9999 is no data."""
    examples, images = folder / "heights", folder / "maps"
    heights = np.kron(np.array([[0, 1], [1, 0]], dtype=np.float32), np.ones((64, 64), dtype=np.float32)) * 800 + 100
    lost = heights.copy()
    lost[:20, :30] = -9999
    nodata = [(42113, "s", 0, "-9999", True)]
    for place, values in ((examples / "0.tif", heights), (images / "1.tif", lost), (images / "2.tif", heights * 50)):
        place.parent.mkdir(exist_ok=True)
        tifffile.imwrite(place, values, extratags=nodata)
    Image.fromarray((heights > 500).astype(np.uint8)).save(examples / "0_labels.png")
    found = segment_images(config(folder, images=str(images), examples=str(examples)), out=folder / "out")
    identity = read_record(found.folder, run.KIND).identity
    assert identity is not None
    assert identity["settings"]["range"] == [100, 900]
    labels = np.array(Image.open(found.folder / "labels" / "1.png"))
    np.testing.assert_array_equal(labels[:20, :30], 255)
    assert (np.delete(labels, np.s_[:20], axis=0) == (heights > 500)[20:]).mean() > 0.95
    confidence = np.array(Image.open(found.folder / "confidence" / "1.png"))
    assert not confidence[:20, :30].any()
    # Brighter than white everywhere: the range is not that of each image.
    assert (np.array(Image.open(found.folder / "labels" / "2.png")) == 1).all()


def test_other_images_settings_or_examples_are_not_resumed(folder: Path) -> None:
    memory = folder / "memory.safetensors"
    segment(folder, memory=str(memory))
    before, kept = files(folder / "out"), memory.read_bytes()

    def refuse(named: str, **changes) -> None:
        with pytest.raises(FolderError, match=named):
            segment(folder, memory=str(memory), resume=True, **changes)

    refuse(r"images was .*/images, is .*/images/sub\. Choose another --out", images=str(folder / "images" / "sub"))
    refuse("neighbours was 1, is 2", neighbours=2)
    save_labels(folder / "examples" / "b_labels.png", enlarged(FIRST), PALETTE)
    refuse("the images or labels of the examples have changed")
    assert memory.read_bytes() == kept
    memory.unlink()
    for path in (folder / "examples").glob("b*"):
        path.unlink()
    refuse(r"the list of examples was a\.bmp, b\.bmp, is a\.bmp")
    assert files(folder / "out") == before
    (folder / "other").mkdir()
    (folder / "other" / "mine.txt").write_text("mine")
    refuse("other already exists", out="other")


def test_two_commands_that_add_examples_to_a_memory_lose_none(folder: Path) -> None:
    memory = folder / "m.safetensors"
    classes = (folder / "examples" / "classes.txt").read_text()
    for name in "ab":
        (folder / name).mkdir()
        (folder / name / "classes.txt").write_text(classes)
        for path in (folder / "examples").glob(f"{name}*"):
            shutil.copy(path, folder / name)
    with FileLock(folder / ".m.safetensors.lock"):  # held by another command
        second = Thread(target=segment, args=(folder,), kwargs={"memory": str(memory), "examples": str(folder / "b")})
        second.start()
        second.join(timeout=3)
        segment(folder, out="first", memory=str(folder / "first.safetensors"), examples=str(folder / "a"))
        shutil.copy(folder / "first.safetensors", memory)
    second.join(timeout=900)
    assert json.loads((folder / "out" / "about.json").read_text())["memory"]["examples"] == ["a.bmp", "b.bmp"]
    assert segment(folder, out="again", memory=str(memory), examples=None).images == 3


@pytest.mark.parametrize("name", ["images", "examples", "labels", "classes", "memory"])
def test_inputs_inside_the_output_folder_are_rejected(folder: Path, name: str) -> None:
    segment(folder)
    before = files(folder / "out")
    with pytest.raises(FolderError, match=r"the input .* is inside the results folder"):
        segment_images(config(folder, **{name: str(folder / "out" / "labels")}), out=folder / "out", overwrite=True)
    assert files(folder / "out") == before


def test_unreadable_images_are_skipped_and_named(folder: Path) -> None:
    (folder / "images" / "broken.jpg").write_bytes(b"nothing")
    done = segment(folder)
    assert (done.images, list(done.skipped)) == (3, ["broken.jpg"])
    assert done.skipped["broken.jpg"].startswith("not an image")
    row = next(row for row in summary(folder / "out") if row["image"] == "broken.jpg")
    assert row["error"].startswith("not an image")
    assert row["road"] == ""
    (folder / "bad").mkdir()
    for name in ("x.jpg", "y.jpg"):
        (folder / "bad" / name).write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"none of the 2 images of .*bad .*x\.jpg: not an image"):
        segment(folder, images=str(folder / "bad"), out="none")
    assert not (folder / "none").exists()


def test_invalid_input_leaves_no_files(folder: Path) -> None:
    refused: list[tuple[dict, type[Exception], str]] = [
        ({"window": 8}, ValueError, "window must be a multiple of .* 16"),
        ({"neighbours": 0}, ValueError, "neighbours must be >= 1, got 0"),
        ({"images": str(folder / "*.gif")}, DataError, "no images match"),
        ({"examples": str(folder / "nothing")}, MissingData, "no 'nothing'"),
        ({"memory": str(folder / "x" / "m")}, FolderError, "folder of --memory .*m does not exist"),
        ({"memory": str(folder)}, FolderError, "--memory .* is a folder"),
        ({"memory": "/proc/m"}, FolderError, "another --memory"),
        ({"memory": str(folder / "m"), "examples": None}, MissingData, "no 'm'"),
        ({"device": "cuda:99"}, ConfigError, "device: 'cuda:99'"),
        ({"examples": None}, ConfigError, "give --examples, .* or --memory"),
        ({"examples": None, "memory": "m", "labels": "l"}, ConfigError, "--labels requires --examples"),
    ]
    before = sorted(folder.rglob("*"))
    for changes, error, named in refused:
        with pytest.raises(error, match=named):
            segment(folder, **changes)
        assert sorted(folder.rglob("*")) == before


def test_examples_that_contradict_each_other_are_refused(folder: Path) -> None:
    labels = folder / "examples" / "b_labels.png"
    save_labels(labels, torch.full((32, 48), 4, dtype=torch.uint8), [*PALETTE, 9, 9, 9])
    with pytest.raises(DataError, match=r"b_labels\.png: labels must be in 0\.\.3 \(4 classes\) .* got 4 at"):
        segment(folder)
    save_labels(labels, enlarged(SECOND), [*PALETTE[:9], 9, 9, 9])
    save_labels(folder / "examples" / "a_labels.png", enlarged(FIRST).clamp(min=1) + 1, PALETTE)
    with pytest.raises(DataError, match=r"b\.bmp: class 3 has the colour \(9, 9, 9\) .*\(0, 0, 200\)"):
        segment(folder)
    assert not (folder / "out").exists()


def test_classes_other_than_those_of_the_memory_are_refused(folder: Path) -> None:
    memory = str(folder / "m.safetensors")
    segment(folder, memory=memory)
    (folder / "examples" / "classes.txt").write_text("road\nsky\ntree\ncar\n")
    with pytest.raises(DataError, match=r"classes road, sky, tree, car, but the memory .* has road, sky, car, tree"):
        segment(folder, out="again", memory=memory)


def test_masks_of_0_and_255_are_background_and_foreground(folder: Path) -> None:
    (folder / "examples" / "classes.txt").unlink()
    for name, labels in (("a", FIRST), ("b", SECOND)):
        mask = torch.where(labels == 3, 0, 255)
        mask[0, 0] = 0
        save_labels(folder / "examples" / f"{name}_labels.png", enlarged(mask.to(torch.uint8)))
    memory = str(folder / "m.safetensors")
    done = segment(folder, memory=memory)
    assert json.loads((folder / "out" / "about.json").read_text())["classes"] == ["background", "foreground"]
    assert min(done.shares.values()) > 0.2
    save_labels(folder / "examples" / "b_labels.png", enlarged((SECOND == 3) * 1))
    segment(folder, out="indices", memory=memory)  # the classes of the memory are those of masks
    segment(folder, out="masks", memory=memory, examples=str(_masks_only(folder)))


def test_masks_of_0_and_255_have_no_foreground_in_a_memory_of_more_classes(folder: Path) -> None:
    memory = str(folder / "m.safetensors")
    segment(folder, memory=memory)
    segment(folder, out="more", memory=memory, examples=str(_masks_only(folder)))
    added = SegmentationMemory.load(memory, None, device="cpu")
    assert (added.names[-1], added.classes_of(2)) == ("c.bmp", {"road": 1.0})


def _masks_only(folder: Path) -> Path:
    labels = blocks([0, 1, 0])
    save_image(folder / "of_masks" / "c.bmp", enlarged(labels))
    save_labels(folder / "of_masks" / "c.png", enlarged(labels * 255))
    return folder / "of_masks"


def test_examples_of_one_class_are_refused(folder: Path) -> None:
    for name, labels in (("a", FIRST), ("b", SECOND)):
        save_labels(folder / "examples" / f"{name}_labels.png", enlarged(torch.where(labels == 3, 255, 2)), PALETTE)
    with pytest.raises(DataError, match="the examples show only one class, car: label at least two"):
        segment(folder)
    (folder / "examples" / "classes.txt").unlink()
    with pytest.raises(DataError, match="only one class, class 2"):
        segment(folder)
    assert not (folder / "out").exists()


def test_coloured_labels_and_their_classes(folder: Path) -> None:
    for name, labels in (("a", FIRST), ("b", SECOND)):
        path = folder / "examples" / f"{name}_labels.png"
        with Image.open(path) as image:
            rgb = np.array(image.convert("RGB"))
        rgb[(enlarged(labels) == 255).numpy()] = (1, 2, 3)
        Image.fromarray(rgb).save(path)
    with pytest.raises(DataError, match=r"(?s)a_labels\.png: labels are colours.*\n  NAME #c80000\n"):
        segment(folder)
    (folder / "examples" / "classes.txt").write_text(
        "road 10 20 30\nsky 200 0 0\ncar #00c800\ntree 0 0 200\nignore 1 2 3\n"
    )
    segment(folder)
    with Image.open(folder / "out" / "labels" / "1.png") as image:
        assert (image.getpalette() or [])[:12] == PALETTE
        coloured = np.array(image)
    for name, labels in (("a", FIRST), ("b", SECOND)):
        save_labels(folder / "examples" / f"{name}_labels.png", enlarged(labels), PALETTE)
    (folder / "examples" / "classes.txt").write_text("road\nsky\ncar\ntree\n")
    segment(folder, out="indices")
    with Image.open(folder / "indices" / "labels" / "1.png") as image:
        np.testing.assert_array_equal(coloured, np.array(image))


@pytest.fixture
def printed(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """Runs the command on the images and examples of the folder, and returns its output."""

    def run() -> str:
        monkeypatch.setenv("COLUMNS", "200")
        places = (word for name in ("images", "examples", "out") for word in (f"--{name}", str(folder / name)))
        words = ["--backbone", "mean-colour", "--device", "cpu", "--pictures", "0", "--workers", "1"]
        assert main(["segment", *words, *places]) == 0
        return capsys.readouterr().out

    return run


def test_the_expected_score_says_which_share_of_the_classes_it_covers(printed: Callable[[], str]) -> None:
    both = {*FIRST.unique().tolist()} & {*SECOND.unique().tolist()} - {255}
    assert f"% mIoU over {len(both)} of 4 classes expected from 2 examples" in " ".join(printed().split())


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = {"patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 2}
    backbone = save_backbone(build_backbone("vit_tiny_patch16_224", args=args, image_size=32), folder / "mine").parent
    words = ["segment", "--backbone", str(backbone), "--images", str(folder / "images" / "**" / "*.bmp")]
    words += ["--device", "cpu", "--workers", "1", "--pictures", "0"]
    memory = ["--memory", str(folder / "m.safetensors")]
    more = ["--examples", str(folder / "examples"), "--out", str(folder / "out")]
    assert main([*words, *memory, *more, "--suggest", "4"]) == 2
    assert "--suggest must be from 0 to 3, the number of images, got 4" in capsys.readouterr().err
    status = main([*words, *memory, *more, "--suggest", "2"])
    said = capsys.readouterr()
    assert (status, said.err) == (0, "")
    for part in (
        "memory: 2 examples",
        "Share of each class",
        "3 images in",
        "images/s",
        "summary.csv",
        "suggested.txt",
    ):
        assert part in said.out
    assert re.search(
        r"reads blocks? [\d, ]+.* with .*: \d+% mIoU over \d of 4 classes expected from 2", " ".join(said.out.split())
    )
    suggested = (folder / "out" / "suggested.txt").read_text().splitlines()
    assert len(set(suggested)) == 2
    assert set(suggested) <= {"1.bmp", "sub/2.bmp", "sub/3.bmp"}
    with Image.open(folder / "out" / "suggested.png") as picture:
        assert picture.width > 600
    again = [*words, *memory, "--out", str(folder / "again"), "--window", "32"]
    assert main(again) == 2
    assert "window is None in the memory and cannot be changed to 32" in capsys.readouterr().err
    other = save_backbone(build_backbone("vit_tiny_patch16_224", args=args, image_size=32, seed=1), folder / "other")
    words[2] = str(other)
    assert main([*words, *memory, "--out", str(folder / "again")]) == 2
    assert f"created with another backbone, {backbone}" in capsys.readouterr().err
    assert not (folder / "again").exists()


def test_the_score_of_a_single_example_is_not_called_expected(folder: Path, printed: Callable[[], str]) -> None:
    for path in (folder / "examples").glob("b*"):
        path.unlink()
    said = " ".join(printed().split())
    assert "memory: 1 example, 24 patches, 4 classes" in said
    assert "between the halves of the single example" in said
    assert "expected from" not in said


def test_classes_without_names_are_numbered(folder: Path, printed: Callable[[], str]) -> None:
    (folder / "examples" / "classes.txt").unlink()
    said = " ".join(printed().split())
    assert "not measured (in a single example only): class 0, class 2, class 3" in said


def test_names_that_look_like_markup_are_printed_unchanged(folder: Path, printed: Callable[[], str]) -> None:
    (folder / "examples" / "classes.txt").write_text("road\n[unlabelled]\ncar\ntree\n")
    (folder / "images" / "x[" / "y[").mkdir(parents=True)
    for name in ("x[/b].jpg", "x[/y[/bold].jpg"):
        (folder / "images" / name).write_bytes(b"nothing")
    said = printed()
    assert re.search(r"\[unlabelled\] .* \d+\.\d%", said)
    assert "2 images could not be read:\n  x[/b].jpg: not an image" in said
    assert "  x[/y[/bold].jpg: not an image" in said


def test_street_scenes(camvid: Path, tmp_path: Path) -> None:
    """Mean colours and four examples label sky and road far better than chance."""
    done = segment(
        tmp_path,
        examples=str(_listed(camvid / "images" / "train", 92, tmp_path / "train")),
        labels=str(camvid / "labels" / "train"),
        classes=str(camvid / "classes.txt"),
        images=str(_listed(camvid / "images" / "val", 30, tmp_path / "val")),
        neighbours=20,
        head=None,
        whiten=None,
        prior=1.0,  # most pixels are correct
        refine="bilateral",
    )
    assert done.images == 4
    right = []
    for row in summary(tmp_path / "out"):
        name = Path(row["image"]).stem
        with (
            Image.open(tmp_path / "out" / "labels" / f"{name}.png") as labels,
            Image.open(camvid / "labels" / "val" / f"{name}.png") as truth,
        ):
            right.append((np.array(labels) == np.array(truth))[np.array(truth) != 255].mean())
    assert np.mean(right) > 0.35


def _listed(folder: Path, step: int, place: Path) -> Path:
    """Write a list of images, and links to them in the same folder."""
    place.mkdir(parents=True)
    chosen = sorted(folder.iterdir())[::step]
    for image in chosen:
        (place / image.name).symlink_to(image)
    (place / "list.txt").write_text("".join(f"{image.name}\n" for image in chosen))
    return place / "list.txt"


def test_a_labeller_for_other_processes_needs_files(folder: Path) -> None:
    segment(folder, memory=str(folder / "m.safetensors"))
    with pytest.raises(InputError, match=r"requires its backbone: give the one with which .* was created"):
        Labeller(folder / "m.safetensors")
    label = pickle.loads(pickle.dumps(Labeller(folder / "m.safetensors", "mean-colour", device="cpu")))
    rows = label({"image": np.array([str(folder / "images" / "1.bmp"), str(folder / "gone.bmp")])})
    with Image.open(folder / "out" / "labels" / "1.png") as labels, Image.open(io.BytesIO(rows["labels"][0])) as found:
        np.testing.assert_array_equal(np.array(labels), np.array(found))
    assert [*rows["error"]] == ["", "No such file or directory"]
    with pytest.raises(InputError, match="a memory stays in its process: save it"):
        pickle.dumps(Labeller(label.memory))


def test_results_of_images_elsewhere_stay_in_the_output_folder(folder: Path) -> None:
    (folder / "table").mkdir()
    paths = [str(folder / "images" / "1.bmp"), "../images/sub/2.bmp"]
    pyarrow.parquet.write_table(pyarrow.table({"path": paths}), folder / "table" / "images.parquet")
    before = files(folder / "images")
    done = segment(folder, images=str(folder / "table"))
    assert (done.images, done.skipped) == (2, {})
    assert files(folder / "images") == before
    labels = folder / "out" / "labels"
    names = {path.relative_to(labels).with_suffix("") for path in labels.rglob("*.png")}
    assert names == {(folder / "images" / "1").relative_to("/"), Path("images/sub/2")}


def test_names_that_cannot_be_written_end_no_command(folder: Path) -> None:
    long = folder / "images" / ("l" * 251 + ".bmp")
    save_image(long, enlarged(FIRST))
    limit, deep = os.pathconf(folder, "PC_PATH_MAX"), folder / "images"
    while len(str(deep)) < limit - 220:
        deep /= "d" * 200
    save_image(deep / "1.bmp", enlarged(FIRST))  # below the results, its path is longer
    for resume in (False, True):
        done = segment(folder, out="o" * 250, resume=resume, pictures=0 if resume else 2)
        assert done.images == 4
        assert [*done.skipped] == [str((deep / "1.bmp").relative_to(folder / "images"))]
    assert (folder / ("o" * 250) / "labels" / long.with_suffix(".png").name).is_file()
