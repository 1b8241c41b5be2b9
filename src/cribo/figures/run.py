"""Write the figures of one or several runs into a folder."""

import dataclasses
import glob
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import UInt8
from matplotlib.figure import Figure
from torch import Tensor

from cribo.arguments import ConfigError
from cribo.data import DataError, ImageSource
from cribo.data.randomness import keyed_generator
from cribo.data.reading import read_image
from cribo.drawing import paper_style, write_figure
from cribo.figures.config import FigureName, Wanted
from cribo.figures.layout import COLUMN_WIDTH, TEXT_WIDTH, lay_out_clusters, lay_out_features, lay_out_matches
from cribo.files import write_json, write_text
from cribo.folders import ResultFolder
from cribo.models import Backbone, load_backbone
from cribo.objectives.cluster_record import read_clusters
from cribo.objectives.pictures import draw_bootstrapping
from cribo.objectives.sampling import sample_objects
from cribo.pretraining import PretrainConfig, load_config
from cribo.pretraining.files import CONFIG, METRICS
from cribo.pretraining.monitoring import read_metrics
from cribo.pretraining.report import draw_curves, draw_losses
from cribo.pretraining.session import open_source
from cribo.retrieval import PCAColours, backbone_encoder
from cribo.retrieval.patches import resize_image

log = logging.getLogger("cribo")

ABOUT = "figures.json"
_DPI = 300
_SCHEDULES = ("lr", "weight_decay", "momentum", "teacher_temperature")
_GALLERY = 256


@dataclass(frozen=True)
class WrittenFigures:
    """What has been drawn.

    Attributes:
        folder: where.
        captions: of each figure that was drawn.
        left_out: the others, and why.
    """

    folder: Path
    captions: Mapping[FigureName, str]
    left_out: Mapping[FigureName, str]


class _LeftOut(Exception):
    """Why a figure is not drawn."""


def write_figures(
    runs: Mapping[str, Path],
    out: str | Path,
    wanted: Wanted | None = None,
    *,
    overwrite: bool = False,
    device: str = "cpu",
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> WrittenFigures:
    """Draw the figures of a run for print: vector text in embedded TrueType fonts, 300 dpi, no titles.

    The folder appears when all are drawn, with `captions.md` beside them.

    Args:
        runs: run folders by what they are called. All are in the figure of the bootstrapping ratio; the others are of
            the first.
        out: the folder to write.
        wanted: what to draw.
        overwrite: replace figures that stand there.
        device: where the network runs.
        progress: told (what is being done, how much of it is done, how much there is).

    Raises:
        ConfigError: a value out of range, or no run.
        FileNotFoundError: a folder that is no run, no image under the pattern.
        DataError: the data of the run is no longer where it was.
        FolderError: the folder is there.
    """
    wanted = wanted or Wanted()
    out = Path(out)
    if not runs:
        raise ConfigError("figures need one run at least, got none")
    for folder in runs.values():
        if not (folder / CONFIG).is_file():
            raise FileNotFoundError(f"{folder} is not a run: it has no {CONFIG}")
    target = ResultFolder(out, "figures", overwrite=overwrite, inputs=[*runs.values(), wanted.root])
    drawer = _Drawer(runs, wanted, device)
    captions: dict[FigureName, str] = {}
    left_out: dict[FigureName, str] = {}

    def write(folder: Path) -> None:
        for number, name in enumerate(wanted.only):
            progress("drawing", number, len(wanted.only))
            try:
                with paper_style():  # colours and fonts are looked up when a figure is written
                    figure, captions[name] = drawer.draw(name)
                    for kind in wanted.formats:
                        write_figure(folder / f"{name}.{kind}", figure, dpi=_DPI)
            except _LeftOut as error:
                left_out[name] = str(error)
        progress("drawing", len(wanted.only), len(wanted.only))
        if not captions:
            reasons = "; ".join(f"{name}: {why}" for name, why in left_out.items())
            raise ConfigError(f"there is nothing to draw: {reasons}")
        text = "".join(f"**{name}**: {caption}\n\n" for name, caption in captions.items())
        write_text(folder / "captions.md", text.rstrip("\n") + "\n")
        write_json(
            folder / ABOUT,
            {
                "runs": {name: str(run) for name, run in runs.items()},
                "wanted": dataclasses.asdict(wanted),
                "figures": captions,
                "left_out": left_out,
            },
        )

    target.create(write)
    return WrittenFigures(out, captions, left_out)


class _Drawer:
    """One figure after the other; what cannot be read is found when it is made."""

    def __init__(self, runs: Mapping[str, Path], wanted: Wanted, device: str) -> None:
        self.runs = runs
        self.wanted = wanted
        self.folder = next(iter(runs.values()))
        self.config = load_config(self.folder / CONFIG)
        self.device = device
        self._backbone: Backbone | None = None
        self._source: ImageSource | None = None
        self._files: list[str] = []
        if wanted.images is not None and "features" in wanted.only:
            found = glob.glob(wanted.images, recursive=True)  # noqa: PTH207 (a pattern may begin anywhere)
            self._files = sorted(found)[: wanted.count]
            if not self._files:
                raise FileNotFoundError(f"no file is like --images {wanted.images!r}")
        if ("matches" in wanted.only and self.config.needs_objects) or ("features" in wanted.only and not self._files):
            self._source = _open_data(self.config, self.folder, wanted)

    @property
    def backbone(self) -> Backbone:
        if self._backbone is None:
            self._backbone = load_backbone(self.folder).eval().to(self.device)
        return self._backbone

    def draw(self, name: FigureName) -> tuple[Figure, str]:
        return getattr(self, f"_{name}")()

    def _matches(self) -> tuple[Figure, str]:
        if not self.config.needs_objects:
            raise _LeftOut("the run was trained without objects")
        assert self._source is not None
        objects = dataclasses.replace(self.config.objects, num_objects=self.wanted.objects)
        config = dataclasses.replace(self.config, objects=objects)
        side = config.views.size // self.backbone.patch_size
        if self.wanted.objects > 2 * side * side:
            raise ConfigError(f"objects must be at most {2 * side * side}, the patches of both views of this run")
        sample = sample_objects(self.backbone, self._source, config, count=_GALLERY)
        queries = min(self.wanted.queries, len(sample.pairs) // 2)
        if not queries:
            raise _LeftOut("the data has one image only")
        others = len(sample.pairs) - queries
        return lay_out_matches(sample, queries=queries, objects=self.wanted.objects), (
            f"Cross-image object-level matches. Of each query view, its objects in unique colours (K = "
            f"{self.wanted.objects}; those in both views) and, in the same colour, the nearest neighbour of each among "
            f"the objects of {others} other images. Dashed: not cycle-consistent."
        )

    def _clusters(self) -> tuple[Figure, str]:
        try:
            history = read_clusters(self.folder)
        except FileNotFoundError as error:
            raise _LeftOut(str(error)) from error
        return lay_out_clusters(history, pairs=3), (
            "Clusters of view pairs over the epochs of pretraining, two rows for an image's two views. A colour is "
            "one object of the pair; grey is seen in one view only."
        )

    def _bootstrapping(self) -> tuple[Figure, str]:
        rows = {name: _rows(folder) for name, folder in self.runs.items()}
        with_ratio = {name: of for name, of in rows.items() if any("bootstrapping_ratio" in row for row in of)}
        if not with_ratio:
            raise _LeftOut("no run was trained with the cross-image loss")
        return _small(draw_bootstrapping(with_ratio)), (
            "Bootstrapping ratio over the epochs: the share of objects whose nearest neighbour is cycle-consistent."
        )

    def _losses(self) -> tuple[Figure, str]:
        rows = _rows(self.folder)
        if not any("loss" in row for row in rows):
            raise _LeftOut("the run has not logged a loss yet")
        return _small(draw_losses(rows)), "Losses over the epochs of pretraining."

    def _schedules(self) -> tuple[Figure, str]:
        rows = [row for row in _rows(self.folder) if "lr" in row]
        if not rows:
            raise _LeftOut("the run has not logged a step yet")
        figure = draw_curves({name: [(r["epoch"], r[name]) for r in rows] for name in _SCHEDULES if name in rows[0]})
        figure.set_size_inches(TEXT_WIDTH, 0.5 * TEXT_WIDTH)
        return figure, "Learning rate, weight decay, momentum and temperature of the teacher over the epochs."

    @torch.no_grad()
    def _features(self) -> tuple[Figure, str]:
        images = [self._reduced(image) for image in self._images()]
        encoder = backbone_encoder(self.backbone)
        grids = []
        for image in images:
            size = encoder.size(image.shape[1], image.shape[2])
            grids.append(encoder.grids(resize_image(image, size, "bicubic")[None], self.device)[0].cpu())
        colours = PCAColours(grids)
        painted = [colours(grid, (image.shape[1], image.shape[2])) for grid, image in zip(grids, images, strict=True)]
        pictures = [image.permute(1, 2, 0).numpy() / 255 for image in images]
        return lay_out_features(pictures, [picture.numpy() for picture in painted]), (
            "Images and their dense features: the first three principal components over the patches of all images "
            "shown, as red, green and blue."
        )

    def _images(self) -> list[UInt8[Tensor, "3 h w"]]:
        if self._files:
            return [read_image(Path(file)) for file in self._files]
        assert self._source is not None
        order = torch.randperm(len(self._source), generator=keyed_generator(self.config.seed)).tolist()
        return [self._source.load(index) for index in order[: self.wanted.count]]

    def _reduced(self, image: UInt8[Tensor, "3 h w"]) -> UInt8[Tensor, "3 new_h new_w"]:
        height, width = image.shape[1:]
        scale = min(1.0, self.wanted.size / min(height, width))
        return resize_image(image, (round(scale * height), round(scale * width)), "bicubic")


def _open_data(config: PretrainConfig, folder: Path, wanted: Wanted) -> ImageSource:
    root = wanted.root or config.data.root
    try:
        return open_source(dataclasses.replace(config, data=dataclasses.replace(config.data, root=root)))
    except (DataError, OSError) as error:
        raise DataError(
            f"the images of {folder}, {root}, cannot be opened ({error}): say by --root where they are now, or draw "
            "without them, by --images FILES and --only features,clusters,bootstrapping"
        ) from error


def _rows(folder: Path) -> Sequence[dict[str, float]]:
    path = folder / METRICS
    return read_metrics(path) if path.is_file() else []


def _small(figure: Figure) -> Figure:
    """A curve for one column."""
    figure.set_size_inches(COLUMN_WIDTH, 0.62 * COLUMN_WIDTH)
    return figure
