"""Images with object boxes in Pascal VOC's layout, and its label maps for results."""

import copy
import os
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

import torch

from cribo.base.colours import class_colours
from cribo.base.errors import DataError, MissingData
from cribo.base.files import path_inside, read_lines, require, write_text, write_whole
from cribo.data.labelled.detection import Boxes
from cribo.data.labelled.label_maps import CLASSES_FILE, Labelling, write_labels
from cribo.data.labelled.regions import RegionImage, RegionSet
from cribo.data.labelled.writing import stems
from cribo.data.reading import EXTENSIONS
from cribo.data.sources.images import ImageFiles, PackedNames

_FOLDERS = ("Annotations", "ImageSets", "JPEGImages")


def is_voc(root: str | os.PathLike[str]) -> bool:
    """Whether a folder has the layout of Pascal VOC."""
    return all((Path(root).expanduser() / name).is_dir() for name in _FOLDERS)


class VocBoxes(ImageFiles):
    """The images of a split of Pascal VOC, with boxes of all objects.

    Boxes of difficult and truncated objects are included. VOC counts pixels from 1, and boxes include the last pixel;
    `boxes` returns corners between 0 and width or height. `classes` are sorted.

    Args:
        root: the folder with `Annotations`, `ImageSets/Main` and `JPEGImages`, such as VOCdevkit/VOC2007.
        split: name of the list in `ImageSets/Main`.

    Raises:
        MissingData: the list, or an image or annotation of the list, does not exist.
        DataError: the list is empty, or an annotation is invalid.
    """

    def __init__(self, root: str | os.PathLike[str], split: str) -> None:
        folder = Path(root).expanduser()
        listed = folder / "ImageSets" / "Main" / f"{split}.txt"
        require(listed)
        stems = [line.split()[0] for _, line in read_lines(listed, "a list of images")]
        if not stems:
            raise DataError(f"{listed} lists no images")
        images, annotations = folder / "JPEGImages", folder / "Annotations"
        for stem in stems:
            path_inside(images, stem, source=listed, follow_links=True)
        for place, ending in ((images, ".jpg"), (annotations, ".xml")):
            missing = [stem for stem in stems if not (place / f"{stem}{ending}").is_file()]
            if missing:
                raise MissingData(
                    f"{len(missing)} of the {len(stems)} images of {listed} have no {ending} file in {place}, the "
                    f"first is {missing[0]}: complete the set, or list the existing images in another file in "
                    f"{listed.parent} and use its name as the split"
                )
        super().__init__(images, (f"{stem}.jpg" for stem in stems))
        objects = [_read_objects(annotations / f"{stem}.xml") for stem in stems]
        self.classes = sorted({name for each in objects for name, _ in each})
        places = {name: place for place, name in enumerate(self.classes)}
        self._boxes = [_boxes([(places[name], corners) for name, corners in each]) for each in objects]

    def boxes(self, index: int) -> Boxes:
        """Return the objects of an image, possibly none."""
        return self._boxes[index]

    def subset(self, indices: Sequence[int]) -> "VocBoxes":
        """Return a subset of the images in the given order, with the same classes.

        Raises:
            IndexError: an index does not exist.
        """
        part = copy.copy(self)
        part.names = PackedNames(map(self.name, indices))
        part._boxes = [self._boxes[index] for index in indices]
        return part


def is_voc_annotation(root: ET.Element) -> bool:
    """Whether the root of an XML file is that of an annotation of Pascal VOC."""
    return root.tag == "annotation" and root.find("filename") is not None


def read_voc(source: Path, files: list[Path]) -> RegionSet:
    """Read annotations of Pascal VOC: boxes of objects, an XML file for each image.

    Raises:
        DataError: an annotation is invalid.
    """
    folder = source if source.is_dir() else source.parent
    found = RegionSet(source, [], [folder, folder / "JPEGImages", folder / "images"])
    for file in files:
        stated = (ET.parse(file).getroot().findtext("filename") or "").strip()
        names = tuple(filter(None, (stated, *(f"{file.stem}{ending}" for ending in EXTENSIONS))))
        regions = [
            region
            for number, (name, box) in enumerate(_read_objects(file), start=1)
            for region in found.boxed(name, (box[0], box[1], box[2], box[3]), name=f"object {number} of {file.name}")
        ]
        found.images.append(RegionImage(names, None, regions, file))
    return found


def write_voc(folder: Path, labelling: Labelling) -> int:
    """Write a palette PNG for each image to `SegmentationClass`, and the list of classes."""
    palette = class_colours(labelling.classes)
    for name, stem in stems(labelling.sizes).items():
        path = folder / "SegmentationClass" / f"{stem}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        labels = labelling.labels(name)
        write_whole(path, lambda part, labels=labels: write_labels(labels, palette, part))
    write_text(folder / CLASSES_FILE, "".join(f"{name}\n" for name in labelling.classes))
    return 0


def _read_objects(path: Path) -> list[tuple[str, tuple[float, ...]]]:
    """Return the name and corners of each object in an annotation."""
    try:
        objects = []
        for entry in ET.parse(path).getroot().findall("object"):
            left, top, right, bottom = (
                float(entry.findtext(f"bndbox/{side}", "")) for side in ("xmin", "ymin", "xmax", "ymax")
            )
            objects.append((entry.findtext("name", ""), (left - 1, top - 1, right, bottom)))
    except (ET.ParseError, ValueError) as error:
        raise DataError(f"{path} is not an annotation of Pascal VOC ({error})") from error
    return objects


def _boxes(objects: list[tuple[int, tuple[float, ...]]]) -> Boxes:
    corners = torch.tensor([corners for _, corners in objects], dtype=torch.float64).view(-1, 4)
    sides = corners[:, 2:] - corners[:, :2]
    labels = torch.tensor([label for label, _ in objects], dtype=torch.long)
    return Boxes(corners, labels, torch.zeros(len(objects), dtype=torch.bool), sides.prod(dim=1))
