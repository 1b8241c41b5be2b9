import shutil
from pathlib import Path
from typing import Any

import pytest

from cribo.apps.search import ObjectDatabase
from cribo.apps.search.config import IndexConfig
from cribo.apps.search.database import new_entry
from cribo.apps.search.indexing import IndexSummary
from cribo.apps.search.merging import merge_databases
from cribo.apps.search.run import index_collection
from cribo.base.errors import ConfigError, DatabaseError, MissingData
from cribo.base.job import Job
from cribo.cli import main
from cribo.data.config import Reading
from cribo.features import BackboneSource

from .conftest import held, write_picture

OPTIONS: dict[str, Any] = {"num_objects": 4, "device": "cpu", "workers": 1}


def index(pictures: Path, name: str, part: str | None = None, **changes: Any) -> IndexSummary:
    config = IndexConfig(
        **{
            "db": str(pictures.parent / name),
            "images": str(pictures),
            "backbone": BackboneSource("mean-colour"),
            "part": part,
            **OPTIONS,
            **changes,
        }
    )
    return index_collection(config).summary


def index_shares(pictures: Path, shares: int, **changes: Any) -> list[Path]:
    for number in range(1, shares + 1):
        index(pictures, f"p{number}.db", f"{number}/{shares}", **changes)
    return [pictures.parent / f"p{number}.db" for number in range(1, shares + 1)]


def test_a_merged_database_equals_that_of_one_command(pictures: Path) -> None:
    (pictures / "b" / "4.png").write_bytes(b"nothing")
    index(pictures, "whole.db")
    parts = index_shares(pictures, 3)
    # Stale objects, as a killed writer leaves them, are not copied.
    database = ObjectDatabase.open(parts[0])
    [image] = [image for image in database.images() if image.path == "a/1.png"]
    stale = image._replace(entry=new_entry())
    database.put([(stale, database.objects_of("a/1.png"))])
    out = pictures.parent / "all.db"
    done = merge_databases([*reversed(parts)], out=out)
    merged, whole = ObjectDatabase.open(out), ObjectDatabase.open(pictures.parent / "whole.db")
    assert held(merged) == held(whole)
    assert len(held(merged)) == 6
    assert (done.unreadable, done.unread, done.quality) == (1, (0, ""), None)
    assert merged.info == whole.info
    assert merged.num_rows == len(whole)
    query = whole.objects_of("b/3.png")[0].vector[None]
    [one], [other] = merged.search(query, 3), whole.search(query, 3)
    assert [(found.image, found.object.number) for found in one] == [
        (found.image, found.object.number) for found in other
    ]
    write_picture(pictures / "b" / "6.png", 6)
    again = index(pictures, "all.db")
    assert (again.new, again.changed, again.unchanged, again.removed) == (1, 0, 5, 0)


def test_a_database_is_merged_at_a_url_and_its_description_comes_last(
    pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = index_shares(pictures, 2)
    out = f"file-object-store://{pictures.parent}/all.db"
    with monkeypatch.context() as patch:
        patch.setattr("cribo.apps.search.merging.index_vectors", killed)
        with pytest.raises(KeyboardInterrupt):
            merge_databases(parts, out=out)
    with pytest.raises(DatabaseError, match="contains no database"):
        ObjectDatabase.open(out)
    with pytest.raises(DatabaseError, match=r"all\.db contains a table 'objects', but no database: an interrupted"):
        merge_databases(parts, out=out)
    shutil.rmtree(pictures.parent / "all.db")
    merge_databases([f"file-object-store://{part}" for part in parts], out=out)
    assert ObjectDatabase.open(out).count_images() == 6
    with pytest.raises(DatabaseError, match="already contains a database: choose another --out"):
        merge_databases(parts, out=out)


def killed(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_an_interruption_leaves_nothing(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = index_shares(pictures, 2)
    before = sorted(path.name for path in pictures.parent.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr("cribo.apps.search.merging.index_vectors", killed)
        with pytest.raises(KeyboardInterrupt):
            merge_databases(parts, out=pictures.parent / "all.db")
    assert sorted(path.name for path in pictures.parent.iterdir()) == before
    assert merge_databases(parts, out=pictures.parent / "all.db").database.count_images() == 6


def test_parts_that_do_not_belong_together_are_refused(pictures: Path) -> None:
    folder = pictures.parent
    p1, p2 = index_shares(pictures, 2)
    index(pictures, "other.db", "2/2", num_objects=5)
    index(pictures, "place.db", "2/2", images=str(pictures / "b"))
    Job(folder / "found", "embedding").create()
    out = folder / "all.db"
    refused: list[tuple[list[Path], str]] = [
        ([p1], r"part 2/2 is missing: run the command with --part 2/2, or give its results"),
        ([p1, p1, p2], r"p1\.db is given twice"),
        ([p1, folder / "other.db"], r"other\.db differs from .*p1\.db .*: num_objects was 4, is 5\. Run"),
        ([p1, folder / "place.db"], r"place\.db differs .*: images was .*/pictures, is .*/pictures/b\. Run"),
    ]
    for parts, message in refused:
        with pytest.raises(ConfigError, match=message):
            merge_databases(parts, out=out)
    with pytest.raises(DatabaseError, match="found contains embedding results, not a database of objects"):
        merge_databases([p1, folder / "found"], out=out)
    with pytest.raises(MissingData, match=r"there is no 'p3\.db'"):
        merge_databases([p1, folder / "p3.db"], out=out)
    for existing in (p1, folder / "found"):
        with pytest.raises(DatabaseError, match="already exists: choose another --out"):
            merge_databases([p1, p2], out=existing)
    write_picture(pictures / "a" / "9.png", 9)
    index(pictures, "new.db", "2/2")
    with pytest.raises(ConfigError, match=r"the collection had 6 images, has 7\. Run"):
        merge_databases([p1, folder / "new.db"], out=out)
    assert not out.exists()


def test_incomplete_databases_are_refused(pictures: Path) -> None:
    parts = index_shares(pictures, 2)
    out = pictures.parent / "all.db"
    second = ObjectDatabase.open(parts[1])
    taken = ObjectDatabase.open(parts[0]).images()[0]
    second.put([(taken._replace(entry=new_entry(), objects=0), [])])
    with pytest.raises(DatabaseError, match=r"the image a/0\.png is in .*p1\.db and in .*p2\.db: remove .* --prune"):
        merge_databases(parts, out=out)
    second.drop_images([second.images()[0], second.images()[-1]])
    with pytest.raises(
        DatabaseError, match=r"p2\.db lacks 1 of its 3 images: repeat cribo index --db .*p2\.db --part 2/2"
    ):
        merge_databases(parts, out=out)
    second.describe(unread=None)
    with pytest.raises(DatabaseError, match=r"p2\.db is not finished: repeat cribo index"):
        merge_databases(parts, out=out)
    assert index(pictures, "p2.db", "2/2").new == 1
    [image, *_] = second.images()
    second._drop("objects", [image.entry])
    with pytest.raises(DatabaseError, match=r"p2\.db contains \d+ of the \d+ objects of its images: rebuild it"):
        merge_databases(parts, out=out)
    assert not out.exists()


def test_an_interrupted_index_is_not_finished(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = index_shares(pictures, 2)
    write_picture(pictures / "b" / "6.png", 6)
    with monkeypatch.context() as patch:
        patch.setattr("cribo.apps.search.run.index_images", killed)
        with pytest.raises(KeyboardInterrupt):
            index(pictures, "p2.db", "2/2")
    with pytest.raises(ConfigError, match=r"the collection had 6 images, has 7"):
        merge_databases(parts, out=pictures.parent / "all.db")
    index(pictures, "p1.db", "1/2")
    with pytest.raises(DatabaseError, match=r"p2\.db is not finished"):
        merge_databases(parts, out=pictures.parent / "all.db")


def test_images_that_could_not_be_read_are_a_warning(
    pictures: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(pictures.parent)
    write_picture(pictures / "b" / "5.png", 5, (128, 96))
    listed = pictures / "list.txt"
    listed.write_text("".join(f"{folder}/{number}.png\n" for number, folder in enumerate("aaabbb")) + "a/0.png\n")
    parts = index_shares(pictures, 3, images=str(listed), reading=Reading(max_pixels=64 * 96))
    assert main(["merge", *(part.name for part in parts), "--out", "all.db"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "18 objects of 5 images of 3 parts" in said
    assert "1 image could not be read by the jobs and may be missing, such as b/5.png: cribo index --db all.db" in said
    assert main(["merge", *(part.name for part in parts), "--out", "all.db", "--overwrite"]) == 2
    assert "--overwrite cannot replace a database: delete all.db" in capsys.readouterr().err
    done = index(pictures, "all.db", images=str(listed))
    assert (done.new, done.unchanged) == (1, 5)


def test_more_shares_than_images_are_refused(pictures: Path) -> None:
    with pytest.raises(ConfigError, match=r"part 1/7: there are more shares than images, of .* are 6: use 1/6 to 6/6"):
        index(pictures, "p1.db", "1/7")
    assert not (pictures.parent / "p1.db").exists()
