import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from faster_coco_eval.core import mask as coco_mask
from faster_coco_eval.core.coco import COCO
from PIL import Image

from cribo.apps.search import ObjectDatabase, extract_objects, index_vectors
from cribo.base.job import Job
from cribo.cli import main
from cribo.data.labelled.coco import CocoFile
from cribo.data.reading import read_image
from cribo.features.encoder import Encoder, mean_colour_encoder
from cribo.models import build_backbone, load_backbone, save_backbone

from .conftest import held, info_of, storage, write_picture

Run = Callable[..., str]


@pytest.fixture
def cribo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in the folder of the test and returns its output, or its error if it fails."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words: object, status: int = 0) -> str:
        ended = main([str(word) for word in words])
        said = capsys.readouterr()
        assert ended == status, said.err
        return said.err if status else said.out

    return run


@pytest.fixture
def backbone(tmp_path: Path) -> Path:
    args = {"patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 2}
    return save_backbone(build_backbone("vit_tiny_patch16_224", args=args, image_size=32), tmp_path / "backbone")


@pytest.fixture
def indexed(cribo: Run, pictures: Path, backbone: Path) -> Path:
    said = cribo(
        *("index", "--backbone", backbone, "--images", pictures, "--db", "objects.db"),
        *("--num_objects", 4, "--size", 0, "--min_share", 0, "--device", "cpu", "--workers", 2),
    )
    assert "6 new images, 0 changed, 0 unchanged, 0 removed" in said
    return pictures.parent / "objects.db"


def results(folder: Path) -> list[dict]:
    return json.loads((folder / "results.json").read_text())["results"]


def test_index_and_search(cribo: Run, indexed: Path, pictures: Path, tmp_path: Path) -> None:
    query = pictures / "a" / "1.png"
    said = cribo("search", "--db", indexed, "--image", query, "--point", "20,20", "--k", 4, "--coco", "--out", "found")
    [result] = results(tmp_path / "found")
    assert result["query"] in said
    assert len(result["found"]) == 4
    assert "a/1.png" not in {each["image"] for each in result["found"]}
    similarities = [each["similarity"] for each in result["found"]]
    assert similarities == sorted(similarities, reverse=True)
    for each in result["found"]:
        mask = coco_mask.decode(each["mask"])
        assert mask.shape == (64, 96)
        assert each["area"] == mask.sum()
        assert each["image_state"] == "as indexed"
        assert each["image"] in said
    sheet = read_image(tmp_path / "found" / "sheet.png")
    assert len(np.unique(sheet.flatten(1).numpy(), axis=1).T) > 100
    assert "found/coco.json" in said
    coco = COCO(str(tmp_path / "found" / "coco.json"))
    names = {entry["id"]: entry["file_name"] for entry in coco.imgs.values()}
    categories = {entry["id"]: entry["name"] for entry in coco.cats.values()}
    written = [
        (categories[each["category_id"]], names[each["image_id"]], each["score"], each["area"], each["segmentation"])
        for each in coco.anns.values()
    ]
    assert written == [
        (result["query"], each["image"], each["similarity"], each["area"], each["mask"]) for each in result["found"]
    ]
    assert len(CocoFile(tmp_path / "found" / "coco.json").image_files(pictures)) == len(names)


def test_a_search_can_be_limited_to_some_images_one_object_each_and_a_similarity(
    cribo: Run, indexed: Path, pictures: Path, tmp_path: Path
) -> None:
    words = ("search", "--db", indexed, "--image", pictures / "a" / "1.png", "--point", "20,20")

    def found(name: str, *more: object) -> list[tuple[str, int, float]]:
        cribo(*words, "--k", 100, *more, "--out", name)
        [result] = results(tmp_path / name)
        return [(each["image"], each["object"], each["similarity"]) for each in result["found"]]

    everything = found("all")
    assert {image for image, *_ in everything} == {"a/0.png", "a/2.png", "b/3.png", "b/4.png", "b/5.png"}
    for pattern, images in (("b/*", "b/"), ("*/[45].png", ("b/4.png", "b/5.png")), ("a/?.png", "a/"), ("a_*", "x")):
        limited = found(f"path {images}", "--path", pattern)
        assert limited == [each for each in everything if each[0].startswith(images)]
    first = {}
    for each in everything:
        first.setdefault(each[0], each)
    assert found("one", "--one_per_image") == list(first.values())
    least = everything[4][2]
    assert found("least", "--min_similarity", least) == [each for each in everything if each[2] >= least]
    assert found("nothing", "--min_similarity", 1, "--path", "none/*") == []
    nothing = cribo(*words, "--path", "none/*", "--out", "nothing else")
    assert "no objects of other images were found with --path none/*" in nothing
    assert read_image(tmp_path / "nothing" / "sheet.png").numel()


def test_pairs_of_images_that_are_alike(cribo: Run, pictures: Path, tmp_path: Path) -> None:
    write_picture(pictures / "b" / "copy.png", 1)
    cribo(
        *("index", "--backbone", "mean-colour", "--images", pictures, "--db", "objects.db", "--size", 0),
        *("--num_objects", 4, "--min_share", 0, "--device", "cpu"),
    )
    database = ObjectDatabase.open("objects.db")
    vectors = {}
    for image in database.images():  # formula of the documentation, in NumPy
        objects = database.objects_of(image.path)
        mean = np.average([each.vector for each in objects], axis=0, weights=[each.area for each in objects])
        vectors[image.path] = mean / np.linalg.norm(mean)
    expected = {
        (first, second): float(vectors[first] @ vectors[second])
        for first, second in itertools.combinations(sorted(vectors), 2)
    }
    least = float(np.mean(sorted(expected.values())[10:12]))  # between two of them
    said = cribo("search", "--db", "objects.db", "--duplicates", "--min_similarity", least, "--out", "all")
    pairs = json.loads((tmp_path / "all" / "results.json").read_text())["pairs"]
    assert pairs[0]["images"] == ["a/1.png", "b/copy.png"]
    assert pairs[0]["similarity"] == pytest.approx(1)
    assert f"{len(pairs)} pairs of similar images" in said
    similarities = [each["similarity"] for each in pairs]
    assert similarities == sorted(similarities, reverse=True)
    assert {tuple(each["images"]): pytest.approx(each["similarity"], abs=1e-5) for each in pairs} == {
        pair: similarity for pair, similarity in expected.items() if similarity >= least
    }
    assert read_image(tmp_path / "all" / "sheet.png").numel()
    cribo("search", "--db", "objects.db", "--duplicates", "--path", "a/*", "--min_similarity", 0.9999999, "--out", "a")
    assert json.loads((tmp_path / "a" / "results.json").read_text())["pairs"] == []


def test_own_objects_and_every_object_of_an_image(cribo: Run, indexed: Path, tmp_path: Path) -> None:
    cribo("search", "--db", indexed, "--image", "a/1.png", "--object", 0, "--include_own", "--out", "found")
    [result] = results(tmp_path / "found")
    assert (result["found"][0]["image"], result["found"][0]["object"]) == ("a/1.png", 0)
    assert result["found"][0]["similarity"] == pytest.approx(1, abs=1e-5)
    said = cribo("search", "--db", indexed, "--image", "b/4.png", "--k", 2)
    found = results(tmp_path / "searches" / "4")
    assert len(found) == len(ObjectDatabase.open(indexed).objects_of("b/4.png")) > 1
    assert all(result["query"] in said for result in found)


def test_an_update_uses_the_stored_options(cribo: Run, indexed: Path, pictures: Path) -> None:
    write_picture(pictures / "c" / "6.png", 7)
    (pictures / "a" / "broken.png").write_bytes(b"")
    said = cribo("index", "--db", indexed)
    assert "1 new image, 0 changed, 6 unchanged, 0 removed;" in said
    assert "1 image could not be read:\n  a/broken.png: the file is empty" in said
    assert "objects of 7 images" in said


def test_changed_and_deleted_images_are_reported(cribo: Run, indexed: Path, pictures: Path, tmp_path: Path) -> None:
    for path in (pictures / "b").iterdir():
        path.unlink()
    write_picture(pictures / "a" / "0.png", 3, (20, 30))
    (pictures / "a" / "2.png").write_bytes(b"no picture")
    said = cribo("search", "--db", indexed, "--image", "a/1.png", "--object", 0, "--k", 30, "--out", "found")
    states = {each["image"]: each["image_state"] for each in results(tmp_path / "found")[0]["found"]}
    gone = dict.fromkeys(("b/3.png", "b/4.png", "b/5.png"), "missing")
    assert states == {"a/0.png": "changed", "a/2.png": "changed", **gone}
    assert "5 of the images were changed or deleted since they were indexed" in said
    assert (tmp_path / "found" / "sheet.png").stat().st_size > 0


def test_names_that_look_like_markup_or_formulas(cribo: Run, indexed: Path, pictures: Path, tmp_path: Path) -> None:
    name = r"[b] $\frac{$ it's [red].png"
    write_picture(pictures / "a" / name, 1)
    cribo("index", "--db", indexed)
    said = cribo("search", "--db", indexed, "--image", pictures / "a" / "1.png", "--object", 0, "--k", 1, "--out", "x")
    assert f"a/{name}" in said
    said = cribo("search", "--db", indexed, "--image", f"a/{name}", "--object", 0, "--k", 1, "--out", "y")
    assert name in said
    assert results(tmp_path / "y")[0]["found"][0]["image"] == "a/1.png"


def test_object_storage(cribo: Run, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with storage(tmp_path, monkeypatch) as (url, _):
        said = cribo("index", "--db", url, "--backbone", "mean-colour", "--images", pictures, "--size", 0)
        assert "6 new images" in said
        (pictures / "b" / "3.png").unlink()
        assert "0 new images, 0 changed, 5 unchanged, 1 removed" in cribo("index", "--db", url, "--prune")
        cribo("search", "--db", url, "--image", "a/1.png", "--object", 0, "--out", "found")
        assert "b/3.png" not in {each["image"] for each in results(tmp_path / "found")[0]["found"]}
        said = cribo("search", "--db", "s3://nobody/objects", "--image", "a/1.png", status=2)
        assert "cannot open s3://nobody/objects: The specified bucket does not exist" in said


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("index --images pictures --backbone mean-colour", r"with the backbone backbone \(.*not with mean-colour"),
        ("search --image a/1.png --box 0,0,8,8 --backbone mean-colour", r"with the backbone backbone \("),
        ("index --num_objects 9", r"num_objects 4 \(requested: 9\)"),
    ],
)
def test_other_backbones_and_settings_are_rejected(cribo: Run, indexed: Path, words: str, named: str) -> None:
    assert re.search(named, cribo(*words.split(), "--db", indexed, status=2), re.DOTALL)


def test_a_backbone_that_was_moved_is_found_again(cribo: Run, indexed: Path, backbone: Path, tmp_path: Path) -> None:
    moved = backbone.parent.rename(tmp_path / "elsewhere") if backbone.is_file() else backbone.rename(tmp_path / "else")
    words = ("search", "--db", indexed, "--image", "a/1.png", "--box", "0,0,32,32")
    assert "backbone" in cribo(*words, status=2)
    cribo(*words, "--backbone", moved, "--out", "found")
    cribo("search", "--db", indexed, "--image", "a/1.png", "--point", "3,3", "--out", "point")  # no backbone needed


def test_images_that_were_moved(cribo: Run, indexed: Path, pictures: Path, tmp_path: Path) -> None:
    moved = pictures.rename(tmp_path / "archive")
    said = cribo("index", "--db", indexed, "--images", moved, status=2)
    assert "add --moved if the same images were moved there" in said
    cribo("search", "--db", indexed, "--images", moved, "--image", "a/1.png", "--object", 0, "--out", "found")
    assert "0 new images, 0 changed, 6 unchanged" in cribo("index", "--db", indexed, "--images", moved, "--moved")
    assert ObjectDatabase.open(indexed).root == moved
    assert "6 unchanged" in cribo("index", "--db", indexed)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("index --db new.db", "IMAGES is required to create the database new.db"),
        ("index --db new.db --images pictures", "--backbone is required to create a database"),
        ("index --db new.db --images nowhere --backbone mean-colour", "there is no 'nowhere'"),
        ("index --db new.db --images pictures --backbone mean-colour --num_objects 0", "num_objects must be >= 1"),
        ("index --db pictures/a/1.png --images pictures --backbone mean-colour", "is a file"),
        ("index --db pictures --images pictures --backbone mean-colour", "not created by cribo"),
        ("search --db pictures --image x.png", "contains no database of objects"),
        ("search --db pictures/a/0.png --image x.png", "is a file, not a database"),
        ("search --db nowhere --image x.png", "there is no 'nowhere'"),
        ("search --db nowhere", "give --image"),
        ("search --db nowhere --duplicates --image x.png", "--duplicates and --image exclude"),
        ("search --db nowhere --image x.png --k 0", "k must be >= 1, got 0"),
        ("search --db nowhere --image x.png --min_similarity 2", "min_similarity must be >= -1 and <= 1"),
        ("search --db nowhere --image x.png --point 1,1 --object 1", "give at most one of --point"),
        ("search --db nowhere --image x.png --pint 1,1", "did you mean point?"),
    ],
)
def test_invalid_input_is_rejected_before_anything_is_written(
    cribo: Run, pictures: Path, tmp_path: Path, words: str, named: str
) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert named in cribo(*words.split(), status=2)
    assert sorted(tmp_path.rglob("*")) == before


def test_unreadable_images_only_leave_no_database(cribo: Run, indexed: Path, pictures: Path, tmp_path: Path) -> None:
    for path in pictures.rglob("*.png"):
        path.write_bytes(b"no picture")
    before = held(ObjectDatabase.open(indexed))
    said = cribo("index", "--db", indexed, "--prune", status=2)
    assert "none of the 6 images of" in said
    assert "the first is" in said
    assert "a/0.png: not an image" in said
    assert held(ObjectDatabase.open(indexed)) == before
    cribo("index", "--backbone", "mean-colour", "--images", pictures, "--db", "new.db", status=2)
    assert not (tmp_path / "new.db").exists()


def test_a_search_in_an_empty_database_is_rejected(cribo: Run, pictures: Path, tmp_path: Path) -> None:
    ObjectDatabase.create(tmp_path / "objects.db", info_of(mean_colour_encoder(8), pictures))
    said = cribo("search", "--db", "objects.db", "--image", pictures / "a" / "1.png", status=2)
    assert "contains no objects: index images with cribo index" in said


def test_results_are_not_overwritten_by_default(cribo: Run, indexed: Path) -> None:
    words = ("search", "--db", indexed, "--image", "a/1.png", "--object", 0, "--out", "found")
    cribo(*words)
    assert "already exists" in cribo(*words, status=2)
    cribo(*words, "--overwrite")
    trained = Job(Path("segmenter"), "trained evaluation").create(lambda part: (part / "results.json").write_text("{}"))
    assert "contains trained evaluation results" in cribo(*words[:-1], trained, "--overwrite", status=2)
    assert (trained / "results.json").read_text() == "{}"


def test_a_large_database_gets_an_index_whose_recall_is_measured(indexed: Path) -> None:
    database = ObjectDatabase.open(indexed)
    assert index_vectors(database) is None
    assert not database.has_index()
    quality = index_vectors(database, least=1, queries=8, k=3)
    assert quality is not None
    assert quality.recall == pytest.approx(1)
    assert database.has_index()
    vector = database.objects_of("a/1.png")[0].vector
    assert database.search(vector[None], 1)[0][0].image == "a/1.png"


def test_the_same_class_is_found_on_camvid(camvid: Path, tmp_path: Path, cribo: Run) -> None:
    """The nearest object by mean colour in other images has the same class more often than a random object."""
    folder = tmp_path / "some"
    folder.mkdir()
    for path in sorted((camvid / "images" / "val").iterdir())[::9]:
        (folder / path.name).symlink_to(path)
    cribo("index", "--backbone", "mean-colour", "--images", folder, "--db", "camvid.db")
    database = ObjectDatabase.open("camvid.db")
    classes: dict[tuple[str, int], int] = {}
    nearest: dict[tuple[str, int], tuple[str, int]] = {}
    for image in database.images():
        with Image.open((camvid / "labels" / "val" / image.path).with_suffix(".png")) as file:
            labels = np.array(file)
        objects = database.objects_of(image.path)
        vectors = np.stack([each.vector for each in objects])
        for each, [found] in zip(objects, database.search(vectors, 1, exclude_image=image.path), strict=True):
            own = (image.path, each.number)
            classes[own] = int(np.bincount(labels[each.mask.pixels()], minlength=256)[:255].argmax())
            nearest[own] = (found.image, found.object.number)
    right = np.mean([classes[own] == classes[other] for own, other in nearest.items()])
    frequency = np.bincount(list(classes.values())) / len(classes)
    assert len(classes) > 60
    assert right > 2 * (frequency**2).sum()


def test_an_index_stores_its_blocks(cribo: Run, backbone: Path, pictures: Path, tmp_path: Path) -> None:
    words = ("--images", pictures, "--size", 0, "--device", "cpu")
    cribo("index", "--db", "blocks.db", "--backbone", backbone, "--blocks", "1,2", *words)
    database = ObjectDatabase.open(tmp_path / "blocks.db")
    assert database.info.blocks == (1, 2)
    write_picture(tmp_path / "new.png", 3)
    cribo("search", "--db", "blocks.db", "--image", "new.png", "--object", 0, "--k", 1, "--out", "found")
    encoder = Encoder(load_backbone(backbone), blocks=(1, 2))
    [new] = extract_objects(encoder, [read_image(tmp_path / "new.png")], database.info.settings)
    [[nearest]] = database.search(new.objects[0].vector[None], 1)
    assert results(tmp_path / "found")[0]["found"][0]["similarity"] == pytest.approx(nearest.similarity, abs=1e-5)
    assert "6 unchanged" in cribo("index", "--db", "blocks.db")
    cribo("index", "--db", "last.db", "--backbone", backbone, *words)
    new = ("--db", "other.db", *words)
    for given, named in (
        (("--db", "blocks.db", "--blocks", "2"), "blocks: 1,2), not with backbone ("),
        (("--db", "blocks.db", "--blocks", "2"), "Omit --blocks"),
        (("--db", "blocks.db", "--layers", 2), "--layers 2 and --blocks exclude each other: omit one of them"),
        (("--db", "last.db", "--blocks", "1"), "blocks: the last), not with backbone ("),
        ((*new, "--blocks", "3"), "blocks must be 1 to 2"),
        ((*new, "--blocks", "1", "--layers", 2), "--layers 2 and --blocks exclude each other"),
    ):
        assert named in cribo("index", "--backbone", backbone, *given, status=2)
    assert not (tmp_path / "other.db").exists()


def test_an_index_uses_the_blocks_of_an_adapted_backbone(
    cribo: Run, pictures: Path, backbone: Path, tmp_path: Path
) -> None:
    """An adapted backbone ends at its best block with a linear layer, which --blocks ignores."""
    adapted = load_backbone(backbone)
    weight = torch.randn(5, adapted.embed_dim, generator=torch.Generator().manual_seed(0))
    adapted.set_readout(weight, torch.zeros(5))
    save_backbone(adapted, tmp_path / "adapted")
    words = ("--backbone", tmp_path / "adapted", "--images", pictures, "--size", 0, "--device", "cpu")
    cribo("index", "--db", "adapted.db", *words)
    database = ObjectDatabase.open(tmp_path / "adapted.db")
    [expected] = extract_objects(
        Encoder(load_backbone(tmp_path / "adapted")),
        [read_image(pictures / "a" / "1.png")],
        database.info.settings,
    )
    found = database.objects_of("a/1.png")[0].vector
    assert found.shape == (5,)
    np.testing.assert_allclose(found, expected.objects[0].vector, atol=1e-5)
    cribo("index", "--db", "blocks.db", "--blocks", "1,2", *words)
    vector = ObjectDatabase.open(tmp_path / "blocks.db").objects_of("a/1.png")[0].vector
    assert vector.shape == (64,)


def test_an_update_reads_the_same_column_of_parquet_files(pictures: Path, tmp_path: Path, cribo: Run) -> None:
    images = [path.read_bytes() for path in sorted(pictures.rglob("*.png"))]
    table = pyarrow.table({"thumbnail": images[::-1], "photograph": images})
    pyarrow.parquet.write_table(table, tmp_path / "images.parquet")
    words = ("--images", "images.parquet", "--column", "photograph")
    cribo("index", "--backbone", "mean-colour", *words, "--db", "columns.db")
    assert "6 unchanged" in cribo("index", "--db", "columns.db")
    assert ObjectDatabase.open("columns.db").info.column == "photograph"
