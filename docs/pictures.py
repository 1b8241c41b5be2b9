"""Make the pictures of the documentation: `python -m docs.pictures [NAME ...]`.

Every picture of docs/images is the output of a command, or a screenshot of the page of `cribo explore`. Its inputs are
data and weights in ../shared, and two runs of minutes on a CPU. Runs and results are kept in --work, where another call
finds them. With --quick, the same commands run on tiny synthetic inputs, to test that each picture can be made; the
results are not for the documentation.
"""

import argparse
import io
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image
from torchvision.transforms.v2.functional import to_pil_image

from cribo.base.painting import region_places
from cribo.cli import main as cribo
from cribo.data.scenes import Scenes
from cribo.models import build_backbone, save_backbone

if TYPE_CHECKING:
    from playwright.sync_api import Page

REPOSITORY = Path(__file__).parents[1]
IMAGES = REPOSITORY / "docs" / "images"
SHARED = REPOSITORY.parent / "shared"

_WIDTH = 1000  # limit on the width of a picture, in pixels
_DPI = 145  # limit on the pixels per inch of a figure
_COLOURS = 256  # of the palette of a picture
_SHORT = "--data folder --schedule short --pictures 2 --resume"
_TINY_STEPS = "--iterations 1 --batch_size 2 --crop 32 --limit 4 --runtime.workers 0 --runtime.threads 1"
_TINY = {"args": {"patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 2}, "image_size": 32}


class Unavailable(Exception):
    """An input of a picture is missing; the message gives the reason and the way out."""


class Inputs:
    """Inputs of the pictures, made on first use.

    Args:
        work: folder for data, runs and results; what it already contains is used.
        quick: make tiny inputs.

    Attributes:
        stack: closed at the end; holds the server and the browser.
    """

    def __init__(self, work: Path, *, quick: bool) -> None:
        self.work = work.resolve()
        self.quick = quick
        self.stack = ExitStack()

    def run(self, name: str, *words: str | Path, full: str = "", quick: str = "") -> Path:
        """Run a command whose `--out` is a folder of this name, unless the folder is complete, and return the folder.

        Args:
            name: name of the folder.
            *words: the command.
            full: further words without --quick.
            quick: further words with --quick.
        """
        folder = self.work / name
        if not any((folder / result).is_file() for result in ("results.json", "summary.csv", "figures.json")):
            _call(*words, quick if self.quick else full, "--out", folder)
        return folder

    def _trained(self, name: str, *words: str | Path, full: str = "", quick: str = "") -> Path:
        tiny = "--optim.epochs 1 --optim.batch_size 4 --objects.group_size 4 --data.workers 0"
        settings = f"{tiny} --losses.cross_image_from_epoch 0 {quick}" if self.quick else full
        _call("pretrain", *words, settings, "--out", self.work / "runs", f"--name {name} --continue")
        return self.work / "runs" / name

    @cached_property
    def synthetic_run(self) -> Path:
        """The run of the quickstart, on synthetic scenes."""
        return self._trained("quickstart", quick="--data.scenes.count 8 --score.images 4,2")

    @cached_property
    def street_run(self) -> Path:
        """A short run on street scenes, from random weights."""
        words = ("--config camvid --score.root null --data.root", self.streets)
        # Larger views than those of the preset have more objects in common.
        return self._trained("camvid", *words, full="--optim.epochs 12 --views.area 0.3,0.8", quick="--views.size 64")

    @cached_property
    def streets(self) -> Path:
        """Street scenes with labels: CamVid."""
        return _scenes(self.work / "streets") if self.quick else _shared("data/camvid")

    @property
    def street_images(self) -> Path:
        """The images of the run on street scenes."""
        return self.streets / "images" / "train"

    @cached_property
    def examples(self) -> Path:
        """Eight of the street scenes, as examples of `cribo segment`."""
        return self._part("examples", "train", 2 if self.quick else 8, labels=True)

    @cached_property
    def strokes(self) -> Path:
        """Two street scenes of which a stroke of each large class is labelled."""
        folder = self._part("strokes", "train", 2, labels=True)
        for file in (folder / "labels").iterdir():
            labels = torch.from_numpy(np.array(Image.open(file)))
            painted = torch.full_like(labels, 255)
            for label, (x, y, radius) in region_places(labels.numpy()).items():
                if radius > 0.04 * labels.shape[1]:
                    rows, columns = (
                        slice(max(0, round(c - r)), round(c + r)) for c, r in ((y, radius / 3), (x, radius))
                    )
                    own = labels[rows, columns]
                    painted[rows, columns] = torch.where(own == label, own, 255)
            to_pil_image(painted).save(file)
        return folder

    @cached_property
    def new_streets(self) -> Path:
        """Three street scenes of other drives."""
        return self._part("new", "val", 2 if self.quick else 3)

    @cached_property
    def some_streets(self) -> Path:
        """A third of the street scenes, without labels."""
        return self._part("some", "train", 4 if self.quick else 122)

    def _part(self, name: str, split: str, count: int, *, labels: bool = False) -> Path:
        """Copy evenly spaced images of a split, and their labels."""
        files = sorted((self.streets / "images" / split).iterdir())
        for place in np.linspace(0, len(files) - 1, count).astype(int):
            file, folder = files[place], self.work / name
            _copy(file, folder / "images" / file.name if labels else folder / file.name)
            if labels:
                _copy(self.streets / "labels" / split / f"{file.stem}.png", folder / "labels" / f"{file.stem}.png")
                _copy(self.streets / "classes.txt", folder / "classes.txt")
        return self.work / name

    @cached_property
    def places(self) -> Path:
        """Photographs of kinds of places, as folders of classes in train/ and val/."""
        folder = self.work / "places"
        if self.quick:
            kinds = dict.fromkeys(("one", "other"), self.streets / "images/train")
        else:
            found = sorted(_shared("data/scenes/images").iterdir())
            kinds = {kind.name.rpartition("_")[0].replace("_", " "): kind for kind in found}  # desert_co, desert_yo
        for name, kind in kinds.items():
            for place, file in enumerate(sorted(kind.iterdir())[:35]):
                _copy(file, folder / ("val" if place % 7 == 0 else "train") / name / file.name)
        return folder

    @cached_property
    def rectangles(self) -> Path:
        """Coloured rectangles with boxes in COCO's format, the same images for training and validation."""
        return _rectangles(self.work / "rectangles")

    @cached_property
    def tiny_network(self) -> Path:
        """An untrained vision transformer of two blocks."""
        folder = self.work / "tiny"
        save_backbone(build_backbone("vit_tiny_patch16_224", **_TINY), folder)
        return folder

    @cached_property
    def network(self) -> Path:
        """A pretrained vision transformer: ViT-S/14, a DINOv2 descendant."""
        return self.tiny_network if self.quick else _shared("weights/vits14_dinov2_descendant.safetensors")

    @cached_property
    def database(self) -> Path:
        """The objects of some street scenes."""
        database = self.work / "streets.db"
        size = "--size 64" if self.quick else "--size 336 --blocks 9"
        _call("index --backbone", self.network, "--images", self.some_streets, "--db", database, size)
        return database

    @cached_property
    def page(self) -> "Page":
        """The page of the run on street scenes, in a browser."""
        return self.stack.enter_context(_browsed(self))


def _call(*words: str | Path) -> None:
    """Run a command; texts are split into words, paths are not."""
    command = [word for part in words for word in (part.split() if isinstance(part, str) else [str(part)])]
    print(f"\n$ cribo {' '.join(command)}", flush=True)
    if cribo(command):
        raise RuntimeError(f"cribo {' '.join(command)} failed")


def _shared(path: str) -> Path:
    if not (SHARED / path).exists():
        raise Unavailable(f"needs {SHARED / path} (see {SHARED / 'data/README.md'}); --quick needs no data")
    return SHARED / path


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def _scenes(folder: Path) -> Path:
    """Write synthetic scenes in the layout of labelled sets."""
    scenes = Scenes(count=12, size=64)
    for index in range(len(scenes)):
        split = "val" if index >= 8 else "train"
        for kind in ("images", "labels"):
            (folder / kind / split).mkdir(parents=True, exist_ok=True)
        to_pil_image(scenes.load(index)).save(folder / "images" / split / f"{index:02d}.png")
        to_pil_image(scenes.labels(index)).save(folder / "labels" / split / f"{index:02d}.png")
    (folder / "classes.txt").write_text("\n".join(scenes.classes))
    return folder


def _rectangles(folder: Path) -> Path:
    """Write four images of rectangles, and their boxes."""
    ink = {"red": (210, 40, 40), "green": (40, 190, 60)}
    images = [
        [("red", 4, 6, 20, 16), ("green", 34, 20, 24, 22)],
        [("green", 8, 22, 30, 18)],
        [("green", 30, 4, 26, 18)],
        [("red", 36, 4, 22, 30), ("red", 4, 28, 16, 16)],
    ]
    names = [f"{number}.png" for number in range(len(images))]
    content = {
        "images": [{"id": n, "file_name": name, "width": 64, "height": 48} for n, name in enumerate(names)],
        "annotations": [
            {"id": 10 * number + place, "image_id": number, "category_id": list(ink).index(colour), "bbox": box}
            for number, drawn in enumerate(images)
            for place, (colour, *box) in enumerate(drawn, start=1)
        ],
        "categories": [{"id": number, "name": name} for number, name in enumerate(ink)],
    }
    for split in ("train", "val"):
        (folder / "images" / split).mkdir(parents=True, exist_ok=True)
        for name, drawn in zip(names, images, strict=True):
            pixels = np.full((48, 64, 3), 128, dtype=np.uint8)
            for colour, left, top, width, height in drawn:
                pixels[top : top + height, left : left + width] = ink[colour]
            Image.fromarray(pixels).save(folder / "images" / split / name)
        (folder / f"instances_{split}.json").write_text(json.dumps(content))
    return folder


# ------------------------------------------------------------------------------------------------------ pictures


def matches(inputs: Inputs) -> Path:
    """The matches in the report of the quickstart."""
    return inputs.synthetic_run / "report" / "matches.png"


def profile(inputs: Inputs) -> Path:
    """The profile of a step of the quickstart."""
    out = inputs.work / "profiles"
    tiny = "--data.scenes.count 8 --optim.batch_size 4 --objects.group_size 4 --steps 1 --warmup 2 --data.workers 0"
    _call("profile --kept 4,8,16", tiny if inputs.quick else "", "--out", out)
    return max(out.rglob("profile.png"), key=lambda path: path.stat().st_mtime)


def predictions(inputs: Inputs) -> Path:
    """Dense retrieval by the network of the quickstart."""
    words = ("evaluate dense-nn --data scenes --pictures 3 --backbone", inputs.synthetic_run)
    return inputs.run("dense-nn", *words, quick="--limit 4 --draws 1") / "predictions.png"


def linear(inputs: Inputs) -> Path:
    """A linear head on a pretrained network."""
    words = ("evaluate linear --backbone", inputs.network, "--data.root", inputs.streets, _SHORT)
    return inputs.run("linear", *words, full="--iterations 150 --limit 100", quick=_TINY_STEPS) / "predictions.png"


def segmenter(inputs: Inputs) -> Path:
    """A Segmenter from the short run on street scenes."""
    words = ("evaluate segmenter --backbone", inputs.street_run, "--data.root", inputs.streets, _SHORT)
    full = "--iterations 200 --learning_rates 1e-3"
    return inputs.run("segmenter", *words, full=full, quick=f"{_TINY_STEPS} --learning_rates 1e-3") / "predictions.png"


def detection(inputs: Inputs) -> Path:
    """A tiny detector on the images that it was trained on."""
    words = ("evaluate detection --backbone", inputs.tiny_network, "--data", inputs.rectangles)
    more = "--schedule short --batch_size 4 --size 48 --tokens 6 --pictures 2 --runtime.workers 0 --resume"
    full = "--epochs 2000 --learning_rate 1e-3"
    return inputs.run("detection", *words, more, full=full, quick="--epochs 1") / "predictions.png"


def neighbours(inputs: Inputs) -> Path:
    """Photographs of places and their nearest neighbours."""
    words = ("evaluate image-nn --pictures 4 --backbone", inputs.network, "--data", inputs.places)
    cache = ("--cache", inputs.work / "cache")
    quick = "--neighbours 2 --resize 32 --crop 32"
    return inputs.run("image-nn", *words, *cache, quick=quick) / "neighbours.png"


def segmentation(inputs: Inputs) -> Path:
    """Street scenes, labelled from eight examples."""
    words = ("segment --backbone", inputs.network, "--examples", inputs.examples, "--images", inputs.new_streets)
    return inputs.run("segmented", *words, quick="--size 64") / "contact.png"


def objects_banner(inputs: Inputs) -> Path:
    """The search for a banner."""
    return _search(inputs, "banner", "train", "0006R0_f02040.jpg", "185,190")


def objects_road(inputs: Inputs) -> Path:
    """The search for the road in front of the car."""
    return _search(inputs, "road", "val", "0016E5_08019.jpg", "240,300")


def figures_matches(inputs: Inputs) -> Path:
    """The matches of a run for print."""
    return _figure(inputs, "matches")


def figures_clusters(inputs: Inputs) -> Path:
    """The clusters of a run for print."""
    return _figure(inputs, "clusters")


def figures_bootstrapping(inputs: Inputs) -> Path:
    """The bootstrapping ratio of two runs for print."""
    return _figure(inputs, "bootstrapping", "--label streets --run", inputs.synthetic_run, "--label synthetic")


def figures_features(inputs: Inputs) -> Path:
    """The features of a run for print."""
    return _figure(inputs, "features")


def explorer_objects(inputs: Inputs) -> Image.Image:
    """The tab of objects."""
    page = _opened(inputs.page, "Objects")
    page.locator("#nearest img").first.wait_for()
    if not inputs.quick:
        for label, value in (("Image (0 to", 20), ("Object (0 is", 7)):
            field = page.get_by_label(label).first
            field.fill(str(value))
            field.press("Enter")
            page.wait_for_timeout(3000)
    return _screenshot(page, below="#nearest")


def explorer_features(inputs: Inputs) -> Image.Image:
    """The tab of features, with one selected patch."""
    page = _opened(inputs.page, "Features")
    page.locator("[role=tabpanel]:visible input[type=file]").first.set_input_files(_new_street(inputs))
    page.get_by_role("img", name="Heat map of the similarity").wait_for()
    page.locator("#nearest-to-patch img").first.wait_for()
    return _screenshot(page, below="#nearest-to-patch")


def explorer_segment(inputs: Inputs) -> Image.Image:
    """The tab of segmentation, with an example open."""
    page = _opened(inputs.page, "Segment")
    page.locator("#painted button").nth(1).click()
    first = min(inputs.strokes.joinpath("images").iterdir()).name
    page.locator(".painter-caption", has_text=first).wait_for()
    page.locator("#upcoming img").first.wait_for()
    page.wait_for_timeout(5000)  # labels of the next pictures arrive one by one
    return _screenshot(page)


PICTURES: dict[str, Callable[[Inputs], Path | Image.Image]] = {
    "matches": matches,
    "predictions": predictions,
    "profile": profile,
    "linear": linear,
    "segmenter": segmenter,
    "detection": detection,
    "neighbours": neighbours,
    "segmentation": segmentation,
    "objects-banner": objects_banner,
    "objects-road": objects_road,
    "figures_matches": figures_matches,
    "figures_clusters": figures_clusters,
    "figures_bootstrapping": figures_bootstrapping,
    "figures_features": figures_features,
    "explorer-objects": explorer_objects,
    "explorer-features": explorer_features,
    "explorer-segment": explorer_segment,
}
"""The function that makes each picture of docs/images, by name."""


def _search(inputs: Inputs, name: str, split: str, image: str, point: str) -> Path:
    folder = inputs.some_streets if split == "train" else inputs.streets / "images" / split
    file = folder / image
    if inputs.quick:
        file, point = min(folder.iterdir()), "20,20"
    words = ("search --k 8 --db", inputs.database, "--image", file, "--point", point)
    return inputs.run(name, *words) / "sheet.png"


def _figure(inputs: Inputs, name: str, *more: str | Path) -> Path:
    images = ("--images", inputs.street_images) if name in ("matches", "features") else ()
    words = ("figures --run", inputs.street_run, *more, *images, "--only", name)
    return inputs.run(f"figures-{name}", *words, quick="--num_objects 4" if name == "matches" else "") / f"{name}.png"


# ------------------------------------------------------------------------------------------------------- browser


@contextmanager
def _browsed(inputs: Inputs) -> "Iterator[Page]":
    """Serve the page and open it in Chromium, as its tests do."""
    try:
        from playwright.sync_api import sync_playwright
        from tests.commands import Commands
        from tests.explorer.conftest import CHROMIUM, SWITCHES, serve
    except ImportError as error:
        raise Unavailable(f"needs the package {error.name}: uv sync") from error
    if not Path(CHROMIUM).is_file():
        raise Unavailable(f"needs a browser: {CHROMIUM} (apt-get install chromium)")
    limit = "4" if inputs.quick else "92"
    images = ("--images", inputs.street_images, "--limit", limit)
    words = ("--run", inputs.street_run, *images, "--backbone", inputs.network, "--examples", inputs.strokes)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        commands = Commands(Path(folder).resolve())
        stack.callback(commands.end)
        served = serve(commands, *words)
        stack.callback(served.stop)
        driver = stack.enter_context(sync_playwright())
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=SWITCHES)
        page = browser.new_page(viewport={"width": 900, "height": 900})
        page.set_default_timeout(120_000)
        page.goto(served.address)
        yield page
        browser.close()


def _opened(page: "Page", tab: str) -> "Page":
    page.get_by_role("tab", name=tab, exact=True).first.click()
    return page


def _screenshot(page: "Page", *, below: str | None = None) -> Image.Image:
    """Return a picture of the page, down to an element."""
    page.wait_for_timeout(1000)  # pictures fade in
    page.mouse.move(2, 2)
    picture = Image.open(io.BytesIO(page.screenshot(full_page=True)))
    box = None if below is None else page.locator(below).bounding_box()
    bottom = picture.height if box is None else min(picture.height, round(box["y"] + box["height"]) + 16)
    return picture.crop((0, 0, picture.width, bottom))


def _new_street(inputs: Inputs) -> Path:
    return min(inputs.new_streets.iterdir())


# ------------------------------------------------------------------------------------------------------ command


def publish(picture: Path | Image.Image, target: Path) -> None:
    """Write a picture as a PNG of at most 1000 pixels in width, 145 pixels per inch and 256 colours."""
    image = picture if isinstance(picture, Image.Image) else Image.open(picture)
    inches = image.width / image.info.get("dpi", (_DPI,))[0]
    width = min(image.width, _WIDTH, round(_DPI * inches))
    image = image.convert("RGB").resize((width, round(image.height * width / image.width)), Image.Resampling.LANCZOS)
    # Median cut loses the colours of small areas, such as those of a legend.
    palette = image.quantize(_COLOURS, Image.Quantize.MAXCOVERAGE, kmeans=2)
    # Without dithering, smooth colours such as those of features would have steps.
    dithered = image.quantize(palette=palette, dither=Image.Dither.FLOYDSTEINBERG)
    # Pillow's search for the nearest colour is approximate, and would make white backgrounds grey.
    colours = np.array(dithered.getpalette()).reshape(-1, 3)
    brightest = colours.sum(axis=1).argmax()
    colours[brightest] = 255
    exact = np.where((np.asarray(image) == 255).all(axis=-1), brightest, np.asarray(dithered)).astype(np.uint8)
    written = Image.fromarray(exact)
    written.putpalette(colours.flatten().tolist())
    written.save(target, optimize=True)


def make(names: Sequence[str], out: Path, work: Path, *, quick: bool) -> dict[str, str]:
    """Make pictures; return the reason for each that was skipped."""
    inputs, skipped = Inputs(work, quick=quick), {}
    with inputs.stack:
        for name in names:
            try:
                publish(PICTURES[name](inputs), out / f"{name}.png")
            except Unavailable as error:
                skipped[name] = str(error)
    return skipped


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 1 if a picture was skipped."""
    parser = argparse.ArgumentParser(prog="python -m docs.pictures", description="Make the pictures of docs/images.")
    listed = ", ".join(PICTURES)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"pictures to make: {listed} (default: all)")
    parser.add_argument("--quick", action="store_true", help="tiny inputs, to test that every picture can be made")
    parser.add_argument("--work", type=Path, help="folder of runs and results to reuse (default: a temporary one)")
    parser.add_argument("--out", type=Path, help="folder of the pictures (default: docs/images, except with --quick)")
    given = parser.parse_args(arguments)
    if unknown := sorted(set(given.names) - set(PICTURES)):
        parser.error(f"no picture is called {', '.join(unknown)}: choose from {listed}")
    if given.quick and given.out is None:
        parser.error("--quick requires --out: its pictures are not for the documentation")
    out = given.out or IMAGES
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        skipped = make(given.names or list(PICTURES), out, given.work or Path(temporary), quick=given.quick)
    for name, reason in skipped.items():
        print(f"skipped {name}: {reason}", file=sys.stderr)
    return 1 if skipped else 0


if __name__ == "__main__":
    sys.exit(main())
