import os
import pickle
import stat
from pathlib import Path

import pytest
from PIL import Image

from cribo.base.errors import ConfigError, DataError, MissingData, UnreadableImage
from cribo.data.config import Reading
from cribo.data.sources.images import (
    ImageFiles,
    PackedNames,
    ReducingSource,
    named_below_one_folder,
    open_images,
    require_readable,
)


def save(path: Path, colour: str = "red") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (6, 4), colour).save(path, format="PNG")


def names(files: ImageFiles) -> list[str]:
    return [files.name(i) for i in range(len(files))]


def test_images_are_sorted_by_class_folder_and_name(tmp_path):
    for name in ["n02/b.JPEG", "n02/a.JPEG", "n01/z.JPEG", "n01/deep/er/x.png", "top.jpg", "B.jpg", "a/1.jpg", "a.jpg"]:
        save(tmp_path / name)
    expected = ["B.jpg", "a/1.jpg", "a.jpg", "n01/deep/er/x.png", "n01/z.JPEG", "n02/a.JPEG", "n02/b.JPEG", "top.jpg"]
    assert names(open_images(tmp_path)) == expected


def test_load_returns_the_named_image(tmp_path):
    save(tmp_path / "train2017" / "b.png", "blue")
    save(tmp_path / "train2017" / "r.png", "red")
    save(tmp_path / "val2017" / "g.png", "lime")
    files = open_images(tmp_path, "train2017")
    assert names(files) == ["b.png", "r.png"]
    assert files.path(1) == str(tmp_path / "train2017" / "r.png")
    assert files.load(0).shape == (3, 4, 6)
    assert files.load(0)[:, 0, 0].tolist() == [0, 0, 255]
    assert files.load(1)[:, 0, 0].tolist() == [255, 0, 0]


def test_files_can_be_loaded_reduced(tmp_path):
    Image.new("RGB", (64, 48), "lime").save(tmp_path / "x.jpg")
    files = open_images(tmp_path)
    assert isinstance(files, ReducingSource)
    pixels, reduction = files.load_reduced(0, lambda height, width: 2 if (height, width) == (48, 64) else 1)
    assert (pixels.shape, reduction) == ((3, 24, 32), 2)
    limited = open_images(tmp_path, reading=Reading(max_pixels=48 * 64 - 1))
    with pytest.raises(UnreadableImage, match="more than max_pixels"):
        limited.load_reduced(0, lambda height, width: 2)


def test_hidden_and_other_files_are_skipped(tmp_path):
    for name in ["x.png", "._x.png", ".cache/y.png", "notes.png.txt"]:
        save(tmp_path / name)
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "gone.png").symlink_to(tmp_path / "nowhere.png")
    assert names(open_images(tmp_path)) == ["x.png"]


def test_links_are_followed_without_cycles(tmp_path):
    save(tmp_path / "elsewhere" / "x.png")
    save(tmp_path / "elsewhere" / "one.png")
    root = tmp_path / "root"
    save(root / "sub" / "y.png")
    (root / "linked").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (root / "z.png").symlink_to(tmp_path / "elsewhere" / "one.png")
    (root / "sub" / "back").symlink_to(root, target_is_directory=True)
    assert names(open_images(root)) == ["linked/one.png", "linked/x.png", "sub/y.png", "z.png"]


def test_names_that_are_not_utf8_are_escaped_and_their_images_unreadable(tmp_path):
    name = os.fsdecode(b"caf\xe9.png")
    try:
        save(tmp_path / name)
    except OSError:
        pytest.skip("this file system wants UTF-8 names")
    save(tmp_path / "straße 😀.png")
    files = open_images(tmp_path)
    assert names(files) == [r"caf\udce9.png", "straße 😀.png"]
    for read in (files.load, files.read, lambda index: files.load_reduced(index, lambda height, width: 2)):
        with pytest.raises(UnreadableImage, match=r"UTF-8.*rename") as caught:
            read(0)
        caught.value.path.encode()
    assert files.load(1).shape == (3, 4, 6)


def test_home_folder_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    save(tmp_path / "pictures" / "x.png")
    assert names(open_images("~/pictures")) == ["x.png"]


def test_list_file(tmp_path):
    save(tmp_path / "pictures" / "b.png", "blue")
    save(tmp_path / "pictures" / "a #1.png", "red")
    save(tmp_path / "other" / "c.dat", "lime")
    lists = tmp_path / "lists"
    lists.mkdir()
    absolute = tmp_path / "other" / "c.dat"
    text = f"\ufeff# mine\r\n\r\n../pictures/b.png\r\n  ../pictures/a #1.png  \r\n#{absolute}\r\n{absolute}\r\n"
    (lists / "train.txt").write_bytes(text.encode())
    for files in (open_images(lists / "train.txt"), open_images(lists, "train.txt")):
        assert names(files) == ["../pictures/b.png", "../pictures/a #1.png", str(absolute)]
        assert [files.load(i)[:, 0, 0].tolist() for i in range(3)] == [[0, 0, 255], [255, 0, 0], [0, 255, 0]]


@pytest.mark.parametrize("name", ["../secret.png", "a/../../secret.png", "{outside}", "link.png", "folder/secret.png"])
def test_inside_refuses_images_outside_the_folder(tmp_path, name):
    root, outside = tmp_path / "root", tmp_path / "secret.png"
    (root / "a").mkdir(parents=True)
    for path in (outside, root / "a" / "own.png"):
        Image.new("RGB", (4, 4)).save(path)
    (root / "list.txt").write_text("a/own.png\n")
    for images in (open_images(root, inside=True), open_images(root / "list.txt", inside=True)):
        assert len(images) == 1
    (root / "link.png").symlink_to(outside)
    (root / "folder").symlink_to(tmp_path, target_is_directory=True)
    (root / "list.txt").write_text(f"a/own.png\n{name.format(outside=outside)}\n")
    assert len(open_images(root / "list.txt")) == 2
    for given in (root / "list.txt", root):
        with pytest.raises(DataError, match=r"secret.png, outside .*root.*allow it with data.inside false"):
            open_images(given, inside=True)


def test_listed_images_are_named_below_the_folder_of_the_list_or_their_common_folder(tmp_path):
    for name in ("lists/a.png", "lists/sub/b.png", "other/a.png", "other/deep/c.png"):
        save(tmp_path / name)
    (tmp_path / "linked").symlink_to(tmp_path / "lists", target_is_directory=True)

    def named(*lines: object) -> tuple[str, list[str]]:
        (tmp_path / "lists" / "list.txt").write_text("".join(f"{line}\n" for line in lines))
        files = named_below_one_folder(open_images(tmp_path / "linked" / "list.txt"))
        assert all(Path(files.path(index)).is_file() for index in range(len(files)))
        return files.folder, names(files)

    own, other = tmp_path / "lists", tmp_path / "other"
    assert named("a.png", "sub/b.png") == (str(tmp_path / "linked"), ["a.png", "sub/b.png"])
    assert named(own / "sub/b.png", "a.png", "./a.png", "sub/../a.png") == (str(own), ["sub/b.png", "a.png"])
    assert named(other / "deep/c.png", "../other/a.png") == (str(other), ["deep/c.png", "a.png"])
    assert named("a.png", other / "a.png") == (str(tmp_path), ["lists/a.png", "other/a.png"])


def test_a_collection_without_readable_images_is_refused(tmp_path):
    for name in ("1.png", "2.png"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(
        DataError, match=r"none of the 2 images of x can be read; the first is .*1\.png: the file is empty"
    ):
        require_readable(open_images(tmp_path), "x")
    with pytest.raises(DataError, match=r"the only image of x cannot be read: .*2\.png: the file is empty"):
        require_readable(ImageFiles(tmp_path, ["2.png"]), "x")
    save(tmp_path / "3.png")
    require_readable(open_images(tmp_path), "x")
    with pytest.raises(DataError, match="none of the first 2 images of x can be read"):
        require_readable(open_images(tmp_path), "x", most=2)


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [
        (b"# nothing\n\n", DataError, "lists no images"),
        (b"\xff\xfe\x00\x81", DataError, "not UTF-8"),
        (b"a.png\nb.png\nc.png\n", MissingData, r"2 of the 3 .*list\.txt .*'b\.png'"),
    ],
)
def test_lists_without_their_images_are_refused(tmp_path, content, error, words):
    save(tmp_path / "a.png")
    (tmp_path / "list.txt").write_bytes(content)
    with pytest.raises(error, match=words):
        open_images(tmp_path / "list.txt")


@pytest.mark.parametrize(
    ("root", "split", "error", "words"),
    [
        ("", "images/trian", MissingData, "'trian' in .*images; did you mean 'train'"),
        ("image", "train", MissingData, "'image' in .*; did you mean 'images'"),
        ("", "photos", MissingData, "'photos' in .*: images, labels"),
        ("", "images/train/x.png/sub", MissingData, "'sub' in .*x.png.*, which is a file"),
        ("", "labels/../images/train/gone", MissingData, r"'gone' in .*images/train; .*x\.png"),
        ("images/train/*.png", "", MissingData, r"'\*\.png' in .*patterns are not expanded"),
        ("", "labels/val/gone", MissingData, "'gone' in .*labels/val, which is empty"),
        ("images/train/x.png", "", DataError, r"x\.png is a file"),
    ],
)
def test_a_missing_folder_suggests_the_nearest_name(tmp_path, root, split, error, words):
    save(tmp_path / "images" / "train" / "x.png")
    (tmp_path / "labels" / "val").mkdir(parents=True)
    with pytest.raises(error, match=words):
        open_images(tmp_path / root, *([split] if split else []))


def test_missing_data_is_a_data_error_and_a_file_not_found_error(tmp_path):
    for kind in (DataError, ValueError, FileNotFoundError):
        with pytest.raises(kind, match="there is no 'gone'"):
            open_images(tmp_path / "gone")


def test_an_empty_folder_reports_extensions_and_contents(tmp_path):
    with pytest.raises(DataError, match=r"looked for \.jpg .*, found no files at all"):
        open_images(tmp_path)
    for name in ["a.czi", "b/c.czi", "readme"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "x.jpg").symlink_to(tmp_path / "not-downloaded")
    with pytest.raises(DataError, match=r"found 2 \.czi, 1 .*1 of them broken links"):
        open_images(tmp_path)


def test_a_folder_without_permission_is_reported(tmp_path):
    locked = tmp_path / "locked"
    save(locked / "x.png")
    locked.chmod(0)
    try:
        if os.access(locked, os.R_OK):
            pytest.skip("this user may read everything")
        with pytest.raises(DataError, match=r"cannot list the folder .*locked"):
            open_images(tmp_path)
    finally:
        locked.chmod(stat.S_IRWXU)


def test_pixel_limit_is_passed_on_and_checked(tmp_path):
    save(tmp_path / "x.png")
    with pytest.raises(UnreadableImage, match="max_pixels = 23"):
        open_images(tmp_path, reading=Reading(max_pixels=23)).load(0)
    with pytest.raises(ConfigError, match="max_pixels must be >= 4, got 0"):
        open_images(tmp_path, reading=Reading(max_pixels=0))


def test_pickled_files_are_the_same_files(tmp_path):
    save(tmp_path / "a.png")
    save(tmp_path / "b.png")
    files = pickle.loads(pickle.dumps(open_images(tmp_path)))
    assert names(files) == ["a.png", "b.png"]
    assert files.load(1).shape == (3, 4, 6)


def test_packed_names_store_any_name_compactly():
    given = [f"n{i % 1000:08d}/n{i:08d}.JPEG" for i in range(20_000)] + ["", "é/ü.jpg"]
    packed = PackedNames(iter(given))
    assert len(packed) == len(given)
    assert [packed[i] for i in range(len(packed))] == given
    assert len(pickle.dumps(packed)) < sum(len(name.encode()) + 8 for name in given) + 1000
    for index in (-1, len(given)):
        with pytest.raises(IndexError, match="index must be in"):
            packed[index]


def test_camvid(camvid):
    files = open_images(camvid, "images/train")
    assert len(files) == 367
    assert names(files) == sorted(names(files))
    assert files.load(366).shape == (3, 360, 480)


def test_images_of_formats_that_cannot_be_read_are_counted(tmp_path, caplog):
    save(tmp_path / "a.png")
    for name in ("b.heic", "c.HEIC", "deep/d.czi", "notes.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    with caplog.at_level("WARNING", "cribo"):
        assert names(open_images(tmp_path)) == ["a.png"]
    [message] = caplog.messages
    assert "3 images" in message
    assert "2 .heic, 1 .czi" in message
