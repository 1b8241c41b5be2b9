import dataclasses
import pickle
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest

import cribo.apps.search.database as database_module
from cribo.apps.search import (
    GridMask,
    ImageObject,
    IndexedImage,
    ObjectDatabase,
    ObjectSettings,
    ObjectWriter,
    index_vectors,
)
from cribo.apps.search.database import new_entry
from cribo.base.errors import ConfigError, DatabaseError, DataError
from cribo.features import Encoder, mean_colour_encoder

from .conftest import info_of, storage

DIM = 3


def an_image(path: str, objects: int, entry: int | None = None) -> IndexedImage:
    return IndexedImage(path, new_entry() if entry is None else entry, 10, 20, "ab", 32, 48, objects, "")


def objects_of(vectors: np.ndarray) -> list[ImageObject]:
    mask = GridMask((2, 3), b"06", (32, 48))
    vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return [ImageObject(n, vector, mask, (0, 0, 48, 32), 1536) for n, vector in enumerate(vectors.astype(np.float32))]


@pytest.fixture
def database(tmp_path: Path, encoder: Encoder) -> ObjectDatabase:
    return ObjectDatabase.create(tmp_path / "some.db", info_of(encoder, tmp_path))


def filled(database: ObjectDatabase, images: int = 20, objects: int = 5) -> np.ndarray:
    """Return random vectors of unit length, (images, objects, D)."""
    vectors = np.random.default_rng(0).standard_normal((images, objects, DIM))
    vectors /= np.linalg.norm(vectors, axis=2, keepdims=True)
    database.put([(an_image(f"{n}.png", objects), objects_of(own)) for n, own in enumerate(vectors)], replaced=())
    return vectors


def test_put_objects_are_found(database: ObjectDatabase) -> None:
    vectors = filled(database)
    again = ObjectDatabase.open(database.uri)
    assert len(again) == 100
    assert again.count_images() == 20
    assert [image.path for image in again.images()] == sorted(f"{n}.png" for n in range(20))
    found = again.objects_of("7.png")
    assert [each.number for each in found] == list(range(5))
    np.testing.assert_allclose([each.vector for each in found], vectors[7], atol=1e-6)
    assert found[2].mask == GridMask((2, 3), b"06", (32, 48))
    assert (found[2].box, found[2].area, found[2].share) == ((0, 0, 48, 32), 1536, 1.0)
    assert again.info == database.info
    assert again.objects_of("no.png") == []


@pytest.fixture(params=["folder", "url"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the place of a new database: a folder, or a URL."""
    if request.param == "folder":
        yield str(tmp_path / "some.db")
        return
    with storage(tmp_path, monkeypatch) as (url, _):
        yield url


Written = tuple[list[IndexedImage], list[str]]


def write_images(writer: ObjectWriter, number: int) -> Written:
    """Write two images with three objects each."""
    vectors = np.random.default_rng(number).standard_normal((2, 3, DIM))
    images = [(an_image(f"{number}/{n}.png", 3), objects_of(own)) for n, own in enumerate(vectors)]
    return [image for image, _ in images], writer.write(images)


def test_processes_write_for_one_commit(database: ObjectDatabase) -> None:
    before = database._objects.version
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        there = [pool.submit(write_images, database.writer(), number) for number in range(2)]
        here = [write_images(database.writer(), number) for number in (2, 3)]
        written = [*(each.result() for each in there), *here]
    assert database.num_rows == 0
    images = [image for several, _ in written for image in several]
    database.commit([each for _, several in written for each in several], images)
    assert database._objects.version == before + 1
    assert (len(database), database.num_rows, database.count_images()) == (24, 24, 8)
    vectors = np.random.default_rng(1).standard_normal((2, 3, DIM))
    [found] = database.search(vectors[1, 2:], 1)
    assert (found[0].image, found[0].object.number) == ("1/1.png", 2)


def test_a_repeated_commit_adds_no_objects(place: str, encoder: Encoder, tmp_path: Path) -> None:
    database = ObjectDatabase.create(place, info_of(encoder, tmp_path))
    (first, fragments), (others, more) = (write_images(database.writer(), number) for number in range(2))
    database.commit([*fragments, *fragments], first)
    database.commit(fragments, first)
    database.commit([*fragments, *more], [*first, *others])
    database.compact(drop_versions=True)  # the committed objects move to another file
    database.commit([*fragments, *more], [*first, *others])
    assert (len(database), database.num_rows) == (12, 12)


@pytest.mark.parametrize("repairs", [False, True])
def test_a_commit_is_repeated_after_a_crash_in_it(
    database: ObjectDatabase, monkeypatch: pytest.MonkeyPatch, repairs: bool
) -> None:
    """The objects are committed before the rows of their images; the next writer may remove them first."""
    images, fragments = write_images(database.writer(), 0)
    with monkeypatch.context() as patch:
        patch.setattr(database_module, "_images_table", lambda _: pytest.fail("crash"))
        with pytest.raises(pytest.fail.Exception, match="crash"):
            database.commit(fragments, images)
    assert (len(database), database.num_rows) == (0, 6)
    if repairs:
        database.repair()
        assert database.num_rows == 0
    database.commit(fragments, images)
    assert (len(database), database.num_rows) == (6, 6)


def test_files_that_were_never_committed_are_removed(database: ObjectDatabase) -> None:
    filled(database, images=2)
    images, fragments = write_images(database.writer(), 0)
    files = lambda: len(list((Path(database.uri) / "objects.lance" / "data").iterdir()))  # noqa: E731
    assert files() == 2
    database.compact()
    assert files() == 2  # their writer may be running
    database.compact(drop_versions=True)
    assert files() == 1
    before = database._images.version
    with pytest.raises(DatabaseError, match=r"1 of 1 files to commit to .* no longer exist, such as .*index their"):
        database.commit(fragments, images)
    assert database._images.version == before
    assert len(database) == database.num_rows == 10


def test_commits_of_other_processes_are_kept(database: ObjectDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process commits after this one has opened the table."""
    images, fragments = write_images(database.writer(), 0)
    old = database._objects
    filled(ObjectDatabase.open(database.uri), images=4)
    monkeypatch.setattr(ObjectDatabase, "_objects", property(lambda _: old))
    database.commit(fragments, images)
    monkeypatch.undo()
    assert len(database) == database.num_rows == 26


def test_invalid_commits_are_rejected(database: ObjectDatabase, tmp_path: Path) -> None:
    images, fragments = write_images(database.writer(), 0)
    with pytest.raises(ValueError, match="objects of 1 images that are not committed with them"):
        database.commit(fragments, images[:1])
    with pytest.raises(ValueError, match=r"must have the shape \(4,\), got \(3,\)"):
        write_images(ObjectWriter(database.uri, 4), 0)
    with pytest.raises(DatabaseError, match=r"no\.db contains no database"):
        write_images(ObjectWriter(str(tmp_path / "no.db"), 3), 0)
    assert not (tmp_path / "no.db").exists()
    assert database.num_rows == 0
    assert database.writer().write([(images[0], ())]) == []
    database.commit([], [])


def test_a_writer_can_be_pickled(database: ObjectDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes to the same folder in a process with another working directory."""
    monkeypatch.chdir(tmp_path)
    text = pickle.dumps(ObjectDatabase.open("some.db").writer())
    monkeypatch.chdir("/")
    assert pickle.loads(text) == database.writer()


def test_nearest_objects_have_the_greatest_cosine(database: ObjectDatabase) -> None:
    vectors = filled(database)
    queries = np.random.default_rng(1).standard_normal((3, DIM)) * [[1], [100], [0.01]]
    flat = vectors.reshape(-1, DIM)
    similarity = (queries / np.linalg.norm(queries, axis=1, keepdims=True)) @ flat.T
    for several, expected in zip(database.search(queries, 7), similarity, strict=True):
        best = np.argsort(-expected)[:7]
        assert [(each.image, each.object.number) for each in several] == [(f"{n // 5}.png", n % 5) for n in best]
        np.testing.assert_allclose([each.similarity for each in several], expected[best], atol=1e-6)
    assert len(database.search(queries[:1], 1000)[0]) == 100


def test_the_objects_of_one_image_can_be_left_out(database: ObjectDatabase) -> None:
    vectors = filled(database)
    [found] = database.search(vectors[3, :1], 100, exclude_image="3.png")
    assert len(found) == 95
    assert "3.png" not in {each.image for each in found}
    [found] = database.search(vectors[3, :1], 3, exclude_image="no.png")
    assert (found[0].image, found[0].object.number) == ("3.png", 0)


def test_objects_without_the_row_of_their_image_are_nowhere(database: ObjectDatabase) -> None:
    vectors = filled(database)
    query = vectors[4, :1]
    # Left by a writer killed after writing objects: of a new image, and of a new state of an old image.
    copies = objects_of(np.repeat(query, 5, axis=0))
    row = database.image("4.png")
    assert row is not None
    database.put([(an_image("new.png", 5), copies), (an_image("4.png", 5), copies)], replaced=())
    database.put([(row, ())])
    database._images.delete("path = 'new.png'")
    [found] = database.search(query, 12)
    assert len({(each.image, each.object.number) for each in found}) == 12
    assert found[0].similarity == pytest.approx(1)
    assert found[1].similarity < 1 - 1e-6
    assert len(database) == 100
    assert database.num_rows == 110
    database.repair()
    assert database.num_rows == 100
    assert len(database.objects_of("4.png")) == 5


def test_readers_see_later_commits(database: ObjectDatabase) -> None:
    reader = ObjectDatabase.open(database.uri)
    vectors = filled(database)
    assert len(reader) == 100
    assert reader.search(vectors[0, :1], 1)[0][0].image == "0.png"
    row = database.image("0.png")
    assert row is not None
    database.drop_images([row])
    database.compact(drop_versions=True)
    assert reader.search(vectors[0, :1], 1)[0][0].image != "0.png"


def test_an_image_name_may_hold_quotes(database: ObjectDatabase) -> None:
    vectors = np.eye(3)
    database.put([(an_image('it\'s "mine".png', 3), objects_of(vectors))], replaced=())
    assert len(database.objects_of('it\'s "mine".png')) == 3
    [found] = database.search(vectors[:1], 1)
    assert found[0].indexed == database.image('it\'s "mine".png')


def test_objects_that_were_added_after_the_index_are_found(database: ObjectDatabase) -> None:
    vectors = filled(database, images=300)
    database.build_index()
    assert database.has_index()
    late = np.array([[[0.3, -0.5, 0.81]]]) / np.linalg.norm([0.3, -0.5, 0.81])
    database.put([(an_image("late.png", 1), objects_of(late[0]))], replaced=())
    [found] = database.search(late[0], 3)
    assert (found[0].image, len(found)) == ("late.png", 3)
    database.compact(drop_versions=True)
    [found] = database.search(late[0], 3)
    assert found[0].image == "late.png"
    exact = database.search(vectors[5, :1], 5, exact=True)[0]
    assert (exact[0].image, exact[0].object.number) == ("5.png", 0)


def large(place: str, encoder: Encoder, folder: Path, dim: int = 32, images: int = 1000) -> ObjectDatabase:
    """Return a database of three objects per image, in 100 clusters."""
    database = ObjectDatabase.create(place, dataclasses.replace(info_of(encoder, folder), dim=dim))
    generator = np.random.default_rng(0)
    centres = generator.standard_normal((100, dim))
    vectors = centres[generator.integers(0, 100, (images, 3))] + 0.5 * generator.standard_normal((images, 3, dim))
    database.put([(an_image(f"{n}.png", 3), objects_of(own)) for n, own in enumerate(vectors)])
    return database


def sizes_of_indices(database: ObjectDatabase) -> int:
    indices = Path(database.uri) / "objects.lance" / "_indices"
    return sum(path.stat().st_size for path in indices.rglob("*") if path.is_file())


def kind_of_index(database: ObjectDatabase) -> str:
    [index] = database._objects.describe_indices()
    return index.index_type


def test_the_index_is_small_and_finds_the_nearest_objects(encoder: Encoder, tmp_path: Path) -> None:
    database = large(str(tmp_path / "some.db"), encoder, tmp_path, dim=256)
    seen: list[tuple[str, int, int]] = []
    database.build_index(lambda *each: seen.append(each))
    assert kind_of_index(database) == "IVF_RQ"
    assert sizes_of_indices(database) < 3000 * 256 * 4 / 8
    assert ("vector index: objects", 3000, 3000) in seen
    assert all(0 <= done <= total for _, done, total in seen)
    quality = index_vectors(database, least=1, queries=30)
    assert quality is not None
    assert (quality.queries, quality.k) == (30, 10)
    assert quality.recall > 0.95
    assert min(quality.milliseconds, quality.exact_milliseconds) > 0
    query = database.objects_of("7.png")[1].vector[None]
    [found], [exact] = (database.search(query, 5, exact=each) for each in (False, True))
    assert found[0].similarity == pytest.approx(1, abs=1e-6)  # not the approximation of the index
    assert (found[0].image, found[0].object.number) == (exact[0].image, exact[0].object.number) == ("7.png", 1)


def test_the_similarity_of_the_kth_object(encoder: Encoder, tmp_path: Path) -> None:
    database = large(str(tmp_path / "some.db"), encoder, tmp_path, images=100)
    sample = database.sample_objects(5)
    images, vectors = zip(*sample, strict=True)
    last = database.kth_similarities(np.stack(vectors), 4, exclude=[image.entry for image in images])
    for (image, vector), similarity in zip(sample, last, strict=True):
        [found] = database.search(vector[None], 4, exclude_image=image.path)
        assert found[-1].similarity == pytest.approx(similarity, abs=1e-6)
        assert vector.tolist() in [each.vector.tolist() for each in database.objects_of(image.path)]


def test_the_recall_of_an_index_leaves_out_the_image_of_the_query(
    encoder: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = large(str(tmp_path / "some.db"), encoder, tmp_path)
    for name, value in {"_PARTITION": 64, "_PROBES": 1, "_REFINE": 1}.items():
        monkeypatch.setattr(database_module, name, value)
    database.build_index()
    quality = index_vectors(database, least=1, queries=20, k=5)
    assert quality is not None
    shares = []
    for image, vector in database.sample_objects(20):
        names = [
            {(one.image, one.object.number) for one in found}
            for exact in (False, True)
            for found in database.search(vector[None], 5, exclude_image=image.path, exact=exact)
        ]
        assert image.path not in {path for path, _ in names[1]}
        shares.append(len(names[0] & names[1]) / 5)
    assert 0.1 < quality.recall < 0.99
    assert quality.recall == pytest.approx(np.mean(shares))


def test_the_former_index_is_used(encoder: Encoder, tmp_path: Path) -> None:
    database = large(str(tmp_path / "some.db"), encoder, tmp_path)
    database._objects.create_index("vector", "IVF_FLAT", "vector_idx", metric="cosine", target_partition_size=512)
    assert database.has_index()
    late = np.eye(32)[:1]
    database.put([(an_image("late.png", 1), objects_of(late))])
    database.compact(drop_versions=True)
    quality = index_vectors(database, least=1, queries=20)
    assert quality is not None
    assert quality.recall > 0.95
    assert database.search(late, 1)[0][0].image == "late.png"
    [kind] = [each.index_type for each in database._objects.describe_indices() if each.name == "vector_idx"]
    assert kind == "IVF_FLAT"


def test_objects_are_added_to_the_index(encoder: Encoder, tmp_path: Path) -> None:
    database = large(str(tmp_path / "some.db"), encoder, tmp_path)
    database.build_index()
    late = np.eye(32)[:2]
    database.put([(an_image("late.png", 2), objects_of(late))])
    assert database.search(late, 1)[1][0].image == "late.png"
    database.compact(drop_versions=True)
    assert database._objects.stats.index_stats("vector_idx")["num_unindexed_rows"] == 0
    assert database.search(late, 1)[1][0].image == "late.png"
    row = database.image("late.png")
    assert row is not None
    database.drop_images([row])
    assert database.search(late, 1)[1][0].image != "late.png"


def test_other_dimensions_have_an_exact_index(database: ObjectDatabase) -> None:
    filled(database, images=300)
    database.build_index()
    assert kind_of_index(database) == "IVF_FLAT"


def test_a_search_does_not_download_the_database(
    encoder: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with storage(tmp_path, monkeypatch) as (url, traffic):
        database = large(url, encoder, tmp_path, dim=256, images=4000)
        database.compact(drop_versions=True)
        database.build_index()
        query = database.objects_of("7.png")[1].vector[None]
        traffic.requests = traffic.sent = 0
        [found] = ObjectDatabase.open(url).search(query, 10)
        searched = traffic.sent
        assert found[0].image == "7.png"
        ObjectDatabase.open(url).search(query, 10, exact=True)
        vectors = 3 * 4000 * 256 * 4
        assert traffic.sent - searched > vectors
        assert searched < vectors / 4


@pytest.mark.parametrize(
    ("vectors", "k", "named"),
    [
        (np.ones((1, DIM)), 0, "k must be >= 1, got 0"),
        (np.ones((1, 4)), 1, r"shape \(Q, 3\), got \(1, 4\)"),
        (np.zeros((1, DIM)), 1, "non-zero length"),
        (np.full((1, DIM), np.nan), 1, "finite"),
        (np.ones((1, DIM)), 3, "index images with cribo index"),  # the database is empty
    ],
)
def test_invalid_queries_are_rejected(database: ObjectDatabase, vectors: np.ndarray, k: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        database.search(vectors, k)


def test_another_backbone_and_other_settings_are_rejected_by_name(database: ObjectDatabase) -> None:
    database.require_encoder(mean_colour_encoder(8), "mean-colour")
    with pytest.raises(ConfigError, match=r"was built with the backbone mean-colour .* not with another"):
        database.require_encoder(mean_colour_encoder(16), "another")
    database.require_settings(ObjectSettings(num_objects=4, size=None))
    settings = dataclasses.replace(database.info.settings, num_objects=7, size=32)
    with pytest.raises(ConfigError, match=r"num_objects 4 \(requested: 7\), size None \(requested: 32\)"):
        database.require_settings(settings)


def test_places_that_hold_no_database(tmp_path: Path, encoder: Encoder) -> None:
    info = info_of(encoder, tmp_path)
    with pytest.raises(DataError, match=r"there is no 'some\.db'"):
        ObjectDatabase.open(tmp_path / "some.db")
    assert not (tmp_path / "some.db").exists()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "mine.png").touch()
    with pytest.raises(DatabaseError, match="contains no database of objects: create one with cribo index"):
        ObjectDatabase.open(tmp_path / "photos")
    with pytest.raises(DatabaseError, match=r"contains 'mine.png' and was not created by cribo"):
        ObjectDatabase.create(tmp_path / "photos", info)
    assert [path.name for path in (tmp_path / "photos").iterdir()] == ["mine.png"]
    # Tables of other programs are unchanged.
    theirs = lance.write_dataset(pa.table({"name": ["chair"]}), tmp_path / "theirs" / "objects.lance")
    with pytest.raises(DatabaseError, match="contains a table 'objects', but no database"):
        ObjectDatabase.create(tmp_path / "theirs", info)
    assert lance.dataset(theirs.uri).count_rows() == 1
    lance.write_dataset(pa.table({"name": ["chair"]}), tmp_path / "other" / "about.lance")
    with pytest.raises(DatabaseError, match="'about' that cribo did not create"):
        ObjectDatabase.open(tmp_path / "other")


def test_an_incomplete_database_is_created_again(tmp_path: Path, encoder: Encoder) -> None:
    database = ObjectDatabase.create(tmp_path / "some.db", info_of(encoder, tmp_path))
    with pytest.raises(DatabaseError, match="already contains a database"):
        ObjectDatabase.create(tmp_path / "some.db", info_of(encoder, tmp_path))
    shutil.rmtree(Path(database.uri) / "about.lance")
    with pytest.raises(DatabaseError, match="no database"):
        ObjectDatabase.open(database.uri)
    ObjectDatabase.create(tmp_path / "some.db", info_of(encoder, tmp_path))
    assert len(ObjectDatabase.open(database.uri)) == 0


def test_a_later_format_is_rejected(database: ObjectDatabase) -> None:
    about = Path(database.uri) / "about.lance"
    text = lance.dataset(about).to_table()["json"][0].as_py().replace('"format": 1', '"format": 2')
    lance.write_dataset(pa.table({"json": [text]}), about, mode="overwrite")
    with pytest.raises(DatabaseError, match="has format 2, but this version of cribo reads format 1"):
        ObjectDatabase.open(database.uri)


def test_missing_lance_error_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lance", None)
    with pytest.raises(ImportError, match=r"object search needs Lance: .*pip install .*\[search\]"):
        ObjectDatabase.open(tmp_path)
