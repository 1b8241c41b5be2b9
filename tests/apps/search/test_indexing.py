import dataclasses
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from tests.commands import Commands

from cribo.apps.search import IndexSummary, ObjectDatabase, index_images, index_lock
from cribo.apps.search.database import holds_database, require_free
from cribo.base.errors import DatabaseError, DataError, FolderError
from cribo.data import ImageFiles
from cribo.data.config import Reading
from cribo.features import Encoder, mean_colour_encoder

from .conftest import bring_up_to_date, held, info_of, write_picture

Index = Callable[..., tuple[ObjectDatabase, IndexSummary]]


def counts(summary: IndexSummary) -> tuple[int, int, int, int]:
    return summary.new, summary.changed, summary.unchanged, summary.removed


def test_unchanged_images_are_not_indexed_again(index: Index) -> None:
    database, summary = index()
    assert counts(summary) == (6, 0, 0, 0)
    assert summary.objects == len(database) == database.num_rows > 6
    before = database.images()
    database, summary = index()
    assert counts(summary) == (0, 0, 6, 0)
    assert database.images() == before


def test_new_changed_and_deleted_images(index: Index, pictures: Path) -> None:
    database, _ = index()
    before = {image.path: image for image in database.images()}
    write_picture(pictures / "c" / "6.png", 6)
    write_picture(pictures / "a" / "0.png", 9)
    (pictures / "b" / "3.png").unlink()
    database, summary = index()
    assert counts(summary) == (1, 1, 4, 1)
    after = {image.path: image for image in database.images()}
    assert after.keys() == {"a/0.png", "a/1.png", "a/2.png", "b/4.png", "b/5.png", "c/6.png"}
    assert [path for path in after if before.get(path) == after[path]] == ["a/1.png", "a/2.png", "b/4.png", "b/5.png"]
    assert database.num_rows == len(database) == sum(image.objects for image in after.values())


def test_deleted_images_can_be_kept(index: Index, pictures: Path) -> None:
    index()
    (pictures / "b" / "3.png").unlink()
    database, summary = index(prune=False)
    assert counts(summary) == (0, 0, 5, 0)
    assert len(database.objects_of("b/3.png")) > 0


def test_many_images_are_not_removed_without_prune(index: Index, pictures: Path) -> None:
    database, _ = index()
    shutil.move(pictures / "b", pictures.parent / "unmounted")
    before = held(database)
    with pytest.raises(DataError, match=r"no longer in .*: 3 of 6, such as b/3\.png, .*--prune"):
        index(prune=None)
    assert held(ObjectDatabase.open(database.uri)) == before
    shutil.move(pictures.parent / "unmounted", pictures / "b")
    for number in range(6, 20):
        write_picture(pictures / "c" / f"{number}.png", number)
    index(prune=None)
    (pictures / "b" / "3.png").unlink()
    database, summary = index(prune=None)
    assert counts(summary) == (0, 0, 19, 1)
    (pictures / "b" / "4.png").unlink()
    database, summary = index(prune=True)
    assert summary.removed == 1


def test_a_file_that_was_only_touched_keeps_its_objects(index: Index, pictures: Path) -> None:
    database, _ = index()
    before = database.image("a/1.png")
    os.utime(pictures / "a" / "1.png", ns=(1, 1))
    database, summary = index()
    assert counts(summary) == (0, 0, 6, 0)
    after = database.image("a/1.png")
    assert before is not None
    assert after == before._replace(mtime_ns=1)
    assert len(database.objects_of("a/1.png")) == before.objects


def test_unreadable_files_are_noted_and_not_tried_again_until_they_change(index: Index, pictures: Path) -> None:
    (pictures / "a" / "broken.png").write_bytes(b"no picture")
    database, summary = index()
    assert [path for path, _ in summary.unreadable] == ["a/broken.png"]
    row = database.image("a/broken.png")
    assert row is not None
    assert "not an image" in row.error
    assert (row.objects, database.objects_of("a/broken.png")) == (0, [])
    database, summary = index()
    assert [path for path, _ in summary.unreadable] == ["a/broken.png"]
    assert database.image("a/broken.png") == row
    write_picture(pictures / "a" / "broken.png", 4)
    database, summary = index()
    assert (counts(summary), summary.unreadable) == ((0, 1, 6, 0), [])
    assert len(database.objects_of("a/broken.png")) > 0


def test_files_that_cannot_be_read_now_are_tried_again(index: Index, pictures: Path) -> None:
    (pictures / "a" / "link.png").symlink_to(pictures / "later.png")
    _, summary = index()
    assert summary.unread == []  # broken links are not listed
    bad = os.fsencode(pictures / "a") + b"/\xff.png"
    with open(bad, "wb") as file:  # noqa: PTH123 - a name that is not valid UTF-8
        file.write((pictures / "a" / "0.png").read_bytes())
    _, summary = index()
    assert [reason for _, reason in summary.unread] == ["its name is not valid UTF-8: rename it"]
    assert counts(summary) == (0, 0, 6, 0)


def test_images_of_several_sizes_and_shapes(index: Index, pictures: Path) -> None:
    for number, size in enumerate([(40, 200), (200, 40), (8, 8), (65, 97)]):
        write_picture(pictures / "odd" / f"{number}.png", number)
        with Image.open(pictures / "odd" / f"{number}.png") as image:
            image.resize((size[1], size[0])).save(pictures / "odd" / f"{number}.png")
    database, _ = index()
    for path, size in (("odd/0.png", (40, 200)), ("odd/2.png", (8, 8)), ("odd/3.png", (65, 97))):
        row = database.image(path)
        assert row is not None
        assert (row.height, row.width) == size
        assert {each.mask.image for each in database.objects_of(path)} == {size}


WRITES = 8

KILLED = """
import os, signal, sys
import cribo.apps.search.database as database_module
from cribo.data import open_images
from cribo.apps.search import ObjectDatabase, index_images, index_lock
from cribo.features import mean_colour_encoder

write = database_module._writing

def ends_before(number):
    writes = iter(range(1, 100))
    def writing(place):
        if next(writes) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(place)
    return writing

# Lance is imported after the fork, because its threads do not survive it.
for number, folder in enumerate(sys.argv[1:], start=1):
    child = os.fork()
    if child == 0:
        with index_lock(folder + "/objects.db"):
            database = ObjectDatabase.open(folder + "/objects.db")
            database_module._writing = ends_before(number)
            index_images(database, mean_colour_encoder(8), open_images(folder + "/pictures"), prune=True)
        os._exit(3)
    print(number, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.slow  # each of the killed processes imports Lance
def test_a_killed_index_resumes_with_the_same_result(
    index: Index, pictures: Path, tmp_path: Path, commands: Commands
) -> None:
    """Processes are killed before each of their writes."""
    index()
    write_picture(pictures / "c" / "6.png", 6)
    write_picture(pictures / "a" / "0.png", 9)
    (pictures / "b" / "3.png").unlink()
    folders = [tmp_path / str(number) for number in range(WRITES)]
    for folder in folders:
        shutil.copytree(pictures.parent / "objects.db", folder / "objects.db")
        shutil.copytree(pictures, folder / "pictures")
    ended = commands.fork_program(KILLED, *folders)
    assert ended.wait(900) == 0, ended.output
    assert ended.output.splitlines() == [f"{n} {-signal.SIGKILL}" for n in range(1, WRITES + 1)]
    unharmed, _ = index()
    for folder in folders:
        database = ObjectDatabase.open(folder / "objects.db")
        for image in database.images():  # readers see a consistent state
            assert len(database.objects_of(image.path)) == image.objects
        database, _ = bring_up_to_date(folder, mean_colour_encoder(8))
        assert held(database) == held(unharmed)
        assert database.num_rows == len(database)
        _, summary = bring_up_to_date(folder, mean_colour_encoder(8))
        assert counts(summary) == (0, 0, 6, 0)


def test_images_and_objects_are_looked_up_by_indices(index: Index, pictures: Path) -> None:
    database, _ = index()
    assert {column for each in database._images.describe_indices() for column in each.field_names} == {"path", "entry"}
    assert [each.field_names for each in database._objects.describe_indices()] == [["entry"]]
    assert not database.has_index()
    write_picture(pictures / "c" / "6.png", 6)
    database, _ = index()
    assert len(database.objects_of("c/6.png")) > 0
    assert "ScalarIndexQuery" in database._images.scanner(filter="path = 'c/6.png'").explain_plan()


def test_two_concurrent_indexers_are_rejected(tmp_path: Path) -> None:
    with (
        index_lock(str(tmp_path / "objects.db")),
        pytest.raises(FolderError, match=r"objects\.db is in use by another process: wait .*, or use another --db"),
        index_lock(str(tmp_path / "objects.db")),
    ):
        pass
    with index_lock(str(tmp_path / "objects.db")):
        pass


def test_a_read_only_place_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FolderError, match="cannot write to"), index_lock(str(tmp_path / "file" / "db")):
        pass


def test_an_image_listed_twice_is_indexed_once(pictures: Path, encoder: Encoder) -> None:
    names = [path.relative_to(pictures).as_posix() for path in sorted(pictures.rglob("*.png"))]
    database = ObjectDatabase.create(pictures.parent / "twice.db", info_of(encoder, pictures))
    files = ImageFiles(pictures, [*names, names[0]])
    assert counts(index_images(database, encoder, files)) == (len(names), 0, 0, 0)
    summary = index_images(database, encoder, files)
    assert counts(summary) == (0, 0, len(names), 0)
    assert database.count_images() == len(names)


def test_an_image_beyond_a_limit_is_tried_again(pictures: Path, encoder: Encoder) -> None:
    names = [path.relative_to(pictures).as_posix() for path in sorted(pictures.rglob("*.png"))]
    database = ObjectDatabase.create(pictures.parent / "limit.db", info_of(encoder, pictures))
    summary = index_images(database, encoder, ImageFiles(pictures, names, reading=Reading(max_pixels=100)))
    assert (summary.new, len(summary.unread)) == (0, len(names))
    assert index_images(database, encoder, ImageFiles(pictures, names)).new == len(names)


@pytest.mark.parametrize("table", ["about", "images", "objects"])
def test_a_database_of_an_interrupted_create_is_created_again(pictures: Path, encoder: Encoder, table: str) -> None:
    place = pictures.parent / "short.db"
    ObjectDatabase.create(place, info_of(encoder, pictures))
    if table != "about":
        shutil.rmtree(place / "about.lance")
    shutil.rmtree(place / f"{table}.lance" / "_versions")
    assert not holds_database(place)
    require_free(place)
    assert len(ObjectDatabase.create(place, info_of(encoder, pictures))) == 0


def test_a_damaged_database_raises(index: Index) -> None:
    database, _ = index()
    for path in (Path(database.uri) / "objects.lance" / "data").iterdir():
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DatabaseError, match="cannot read"):
        ObjectDatabase.open(database.uri).objects_of("a/0.png")


def test_a_database_does_not_say_whom_to_trust(index: Index) -> None:
    database, _ = index()
    info = dataclasses.replace(database.info, config={"source": "evil.pth", "trust": True})
    assert not info.backbone_source().trust
