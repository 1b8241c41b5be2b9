"""How published sets of images and label maps lie on disk: finding their folders, and pairing their files."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from cribo.data.images import EXTENSIONS, DataError, list_files, require
from cribo.data.segmentation import by_stem


@dataclass(frozen=True)
class LabelMaps:
    """One kind of label maps.

    Attributes:
        ending: what follows the part of a map's name that it shares with its image.
        official: whether the values are those that the set was published with; else they are class indices.
    """

    ending: str = ".png"
    official: bool = True


@dataclass(frozen=True)
class FolderLayout:
    """One way in which a set lies on disk; paths are below its root, `{split}` is the split's own folder name.

    Attributes:
        splits: the name in paths of each split that lies this way.
        images: folders of which the first that is there holds the images, at any depth.
        labels: the same for the label maps.
        image_endings: what follows the part of an image's name that its label map shares.
        maps: kinds of label maps; of those in the folder the one with the most maps is read, the first of several.
        lists: text files of which the first that is there names the split's images; without any, all images count.
        original_labels: a folder whose label maps go before those in `labels`.
        class_file: a file that names the same classes in the same order, if it is there.
    """

    splits: Mapping[str, str]
    images: tuple[str, ...]
    labels: tuple[str, ...]
    image_endings: tuple[str, ...] = (".jpg",)
    maps: tuple[LabelMaps, ...] = (LabelMaps(),)
    lists: tuple[str, ...] = ()
    original_labels: str | None = None
    class_file: str | None = None

    def paths(self, templates: Iterable[str], split: str) -> list[str]:
        """Paths of a split below the root."""
        return [template.format(split=self.splits[split]) for template in templates]

    def describe(self, split: str) -> str:
        """What is looked for, in words.

        >>> layout = FolderLayout({"val": "validation"}, images=("images/{split}",), labels=("annotations/{split}",))
        >>> layout.describe("val")
        'images/validation (*.jpg) with annotations/validation (*.png)'
        """
        images = _folders(self.paths(self.images, split), self.image_endings)
        labels = _folders(self.paths(self.labels, split), [maps.ending for maps in self.maps])
        lists = self.paths(self.lists, split)
        return f"{images} with {labels}" + (f", listed in {' or '.join(lists)}" if lists else "")


def _folders(folders: Sequence[str], endings: Sequence[str]) -> str:
    return f"{' or '.join(folders)} ({' or '.join(f'*{ending}' for ending in endings)})"


@dataclass(frozen=True)
class SplitPlace:
    """Where a split lies.

    Attributes:
        layout: how it lies.
        base: the set's root.
        images: folder of the images.
        labels: folder of the label maps.
        list_file: text file that names the images, None if the layout has none.
        missing: which of these are not there, in words.
    """

    layout: FolderLayout
    base: Path
    images: Path
    labels: Path
    list_file: Path | None
    missing: tuple[str, ...]

    @classmethod
    def look(cls, layout: FolderLayout, base: Path, split: str) -> "SplitPlace":
        """Look for a split below a root; of alternatives that are all missing, the first is kept."""
        missing: list[str] = []

        def first(what: str, templates: Sequence[str]) -> Path:
            names = layout.paths(templates, split)
            there = next((base / name for name in names if (base / name).exists()), None)
            if there is None:
                missing.append(f"{what} ({' or '.join(names)})")
            return there or base / names[0]

        images, labels = first("images", layout.images), first("label maps", layout.labels)
        list_file = first("list", layout.lists) if layout.lists else None
        return cls(layout, base, images, labels, list_file, tuple(missing))


def locate(layouts: Sequence[FolderLayout], root: Path, folders: Iterable[str], split: str) -> SplitPlace:
    """The place where most of a split is: the root itself, one of `folders` below it, or a folder above it.

    Above it only if the root is one of the set's own folders. Raises MissingData if the root is not there.
    """
    require(root)
    bases = [root, *(root / folder for folder in folders), *_above(layouts, root.absolute(), split)]
    places = (SplitPlace.look(layout, base, split) for base in bases for layout in layouts)
    return min(places, key=lambda place: len(place.missing))


def _above(layouts: Iterable[FolderLayout], root: Path, split: str) -> list[Path]:
    return [
        root.parents[depth - 1]
        for layout in layouts
        for path in layout.paths((*layout.images, *layout.labels), split)
        for depth in range(1, len(PurePosixPath(path).parts) + 1)
        if root.parts[-depth:] == PurePosixPath(path).parts[:depth]
    ]


@dataclass(frozen=True)
class Pairs:
    """The files of a split, by the part of the name that an image shares with its label map.

    Attributes:
        place: where they lie.
        maps: the kind of label maps that is read.
        images: paths below the folder of the images.
        labels: paths below the set's root.
        stems: what belongs to the split: what its list names, or else whatever is there; in order.
    """

    place: SplitPlace
    maps: LabelMaps
    images: Mapping[str, str]
    labels: Mapping[str, str]
    stems: Sequence[str]

    def without(self, files: Mapping[str, str]) -> list[str]:
        """What belongs to the split but is not among the `images` or the `labels`."""
        return [stem for stem in self.stems if stem not in files]

    def image_path(self, stem: str) -> Path:
        """Where an image is, or should be."""
        return self.place.images / self.images.get(stem, f"{stem}{self.place.layout.image_endings[0]}")

    def label_path(self, stem: str) -> Path:
        """Where a label map is, or should be."""
        expected = f"{stem}{self.maps.ending}"
        return self.place.base / self.labels[stem] if stem in self.labels else self.place.labels / expected


def pair(place: SplitPlace) -> Pairs:
    """List the folders of a place in which nothing is missing; no file is read but the list of images.

    Raises DataError if two images share a name, or if the list cannot be read.
    """
    layout = place.layout
    images = by_stem(list_files(place.images, EXTENSIONS), layout.image_endings)
    kinds = _by_kind(layout.maps, place.base, place.labels)
    maps = max(layout.maps, key=lambda kind: len(kinds[kind]))
    labels = kinds[maps]
    original = place.base / layout.original_labels if layout.original_labels else None
    if original and original.is_dir():
        labels |= _by_kind((maps,), place.base, original)[maps]
    listed = read_stems(place.list_file) if place.list_file else images.keys() | labels.keys()
    # Sorted, since copies of a set list its images in different orders, and draws go by index.
    return Pairs(place, maps, images, labels, sorted(listed))


def _by_kind(kinds: Sequence[LabelMaps], base: Path, folder: Path) -> dict[LabelMaps, dict[str, str]]:
    """The label maps of each kind, as paths below `base`; a name belongs to the kind with the longest ending."""
    prefix = "" if folder == base else f"{folder.relative_to(base).as_posix()}/"
    names: dict[LabelMaps, list[str]] = {kind: [] for kind in kinds}
    longest_first = sorted(kinds, key=lambda kind: -len(kind.ending))
    for name in list_files(folder, [".png"]):
        kind = next((kind for kind in longest_first if name.endswith(kind.ending)), None)
        if kind:
            names[kind].append(name)
    return {kind: {stem: prefix + name for stem, name in by_stem(names[kind], [kind.ending]).items()} for kind in kinds}


def read_stems(path: Path) -> set[str]:
    """The images that a list of Pascal VOC's kind names.

    Each line is a name without folder and ending, or the paths of an image and its label map.

    Raises DataError if the file is no text, names nothing, or names two different files in a line.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no list of images: it is not UTF-8 text") from error
    stems: set[str] = set()
    for number, line in enumerate(lines, start=1):
        names = {PurePosixPath(part).stem for part in line.split()}
        if len(names) > 1:
            raise DataError(
                f"{path}, line {number}: must be a name, or the paths of an image and its label map, got {line!r}"
            )
        stems |= names
    if not stems:
        raise DataError(f"{path} names no image: put one name per line")
    return stems
