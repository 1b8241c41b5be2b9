"""Writing of the figures of one or several runs to a folder."""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from jaxtyping import UInt8
from matplotlib.figure import Figure
from torch import Tensor

from cribo.base.drawing import paper_style, write_figure
from cribo.base.errors import ConfigError, DataError, Untrusted
from cribo.base.files import matching_files, require, write_json, write_text
from cribo.base.job import Job
from cribo.base.painting import as_picture
from cribo.data import ImageSource
from cribo.data.randomness import keyed_generator
from cribo.data.reading import read_image
from cribo.features import Encoder, PCAColours
from cribo.features.patches import resize_image
from cribo.models import Backbone, load_backbone
from cribo.objectives.cluster_record import read_clusters
from cribo.objectives.pictures import CYCLE_CONSISTENT, draw_bootstrapping
from cribo.objectives.sampling import sample_objects
from cribo.pretraining import PretrainConfig
from cribo.pretraining.figures.config import FigureConfig
from cribo.pretraining.figures.layout import (
    COLUMN_WIDTH,
    TEXT_WIDTH,
    lay_out_clusters,
    lay_out_features,
    lay_out_matches,
)
from cribo.pretraining.files import CONFIG, METRICS
from cribo.pretraining.monitoring import read_metrics
from cribo.pretraining.recorded import check_run_config, open_run_images, read_run_config
from cribo.pretraining.report import draw_curves, draw_losses

log = logging.getLogger("cribo")

ABOUT = "figures.json"
_DPI = 300
_SCHEDULES = ("lr", "weight_decay", "momentum", "teacher_temperature")
_GALLERY = 256


@dataclass(frozen=True)
class WrittenFigures:
    """The result of `write_figures`.

    Attributes:
        folder: folder of the figures.
        captions: caption of each figure that was drawn.
        left_out: reason for each figure that was skipped.
    """

    folder: Path
    captions: Mapping[str, str]
    left_out: Mapping[str, str]


class _Skipped(Exception):
    """A figure cannot be drawn; the message gives the reason."""


def write_figures(
    runs: Mapping[str, Path],
    out: str | Path,
    config: FigureConfig | None = None,
    *,
    overwrite: bool = False,
    device: str = "cpu",
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> WrittenFigures:
    """Draw the figures of a run for print: text in embedded TrueType fonts, 300 dpi, no titles.

    The folder, which also contains `captions.md`, is created once all figures are drawn.

    Args:
        runs: run folders by display name. The figure of the bootstrapping ratio shows all runs, the others the first.
        out: the folder to write.
        config: options of the figures.
        overwrite: replace existing figures.
        device: device of the network.
        progress: called with the phase, the number of processed items and their total.

    Raises:
        ConfigError: a value is out of range, or there are no runs.
        FileNotFoundError: a folder is not a run, or no image matches the pattern.
        DataError: the data of the run cannot be opened.
        FolderError: the folder already exists.
    """
    config = config or FigureConfig()
    out = Path(out)
    if not runs:
        raise ConfigError("figures need at least one run, got none")
    for folder in runs.values():
        require(folder)
        if not (folder / CONFIG).is_file():
            raise FileNotFoundError(f"{folder} is not a run (no {CONFIG}): give the folder that cribo pretrain printed")
    target = Job(out, "figures", overwrite=overwrite, inputs=[*runs.values(), config.images])
    drawer = _Drawer(runs, config, device)
    captions: dict[str, str] = {}
    left_out: dict[str, str] = {}

    def write(folder: Path) -> None:
        for number, name in enumerate(config.only):
            progress("drawing", number, len(config.only))
            try:
                with paper_style():  # also while writing, when matplotlib looks up colours and fonts
                    figure, captions[name] = drawer.draw(name)
                    for kind in config.format:
                        write_figure(folder / f"{name}.{kind}", figure, dpi=_DPI)
            except _Skipped as error:
                left_out[name] = str(error)
        progress("drawing", len(config.only), len(config.only))
        if not captions:
            reasons = "; ".join(f"{name}: {why}" for name, why in left_out.items())
            raise ConfigError(f"no figure can be drawn: {reasons}")
        text = "".join(f"**{name}**: {caption}\n\n" for name, caption in captions.items())
        write_text(folder / "captions.md", text.rstrip("\n") + "\n")
        write_json(
            folder / ABOUT,
            {
                "runs": {name: str(run) for name, run in runs.items()},
                "wanted": dataclasses.asdict(config),
                "figures": captions,
                "left_out": left_out,
            },
        )

    target.create(write)
    return WrittenFigures(out, captions, left_out)


class _Drawer:
    """Draws figures one by one; the constructor raises an error if an input cannot be read."""

    def __init__(self, runs: Mapping[str, Path], options: FigureConfig, device: str) -> None:
        self.runs = runs
        self.options = options
        self.folder = next(iter(runs.values()))
        self.config = read_run_config(self.folder)
        self.device = device
        self._source: ImageSource | None = None
        self._files: list[str] = []
        if options.features_of is not None and "features" in options.only:
            pattern = Path(options.features_of).expanduser()
            found = [pattern] if pattern.is_file() else matching_files(pattern)[1]
            self._files = [str(path) for path in found[: options.pictures]]
            if not self._files:
                raise FileNotFoundError(f"no files match --features_of {options.features_of!r}")
        needs_matches = "matches" in options.only and self.config.needs_objects
        if needs_matches or ("features" in options.only and not self._files):
            self._source = _open_data(self.config, self.folder, options)

    @cached_property
    def backbone(self) -> Backbone:
        return load_backbone(self.folder, trust=self.options.trust).eval().to(self.device)

    def draw(self, name: str) -> tuple[Figure, str]:
        return getattr(self, f"_{name}")()

    def _matches(self) -> tuple[Figure, str]:
        if not self.config.needs_objects:
            raise _Skipped("the run was trained without objects")
        try:
            check_run_config(self.config, self.folder, trust=self.options.trust, names=("objects",))
        except Untrusted as error:
            raise _Skipped(str(error)) from error
        assert self._source is not None
        objects = dataclasses.replace(self.config.objects, num_objects=self.options.num_objects)
        config = dataclasses.replace(self.config, objects=objects)
        side = config.views.size // self.backbone.patch_size
        if self.options.num_objects > 2 * side * side:
            raise ConfigError(
                f"num_objects must be at most {2 * side * side}, the number of patches of both views, "
                f"got {self.options.num_objects}"
            )
        sample = sample_objects(self.backbone, self._source, config, count=_GALLERY)
        queries = min(self.options.queries, len(sample.pairs) // 2)
        if not queries:
            raise _Skipped("the data has only one image")
        others = len(sample.pairs) - queries
        return lay_out_matches(sample, queries=queries, objects=self.options.num_objects), (
            f"Cross-image object-level matches: the objects of each query view (K = "
            f"{self.options.num_objects}; objects in both views only) and, with the same number and colour, the "
            f"nearest neighbour of each among the objects of {others} other images. Solid frames: cycle-consistent "
            f"({CYCLE_CONSISTENT}). Dashed frames: not cycle-consistent."
        )

    def _clusters(self) -> tuple[Figure, str]:
        try:
            history = read_clusters(self.folder)
        except FileNotFoundError as error:
            raise _Skipped(str(error)) from error
        return lay_out_clusters(history, pairs=3), (
            "Clusters of view pairs over the epochs of pretraining, with two rows for the two views of an image. Each "
            "number and colour is one object of the pair; grey clusters occur in one view only."
        )

    def _bootstrapping(self) -> tuple[Figure, str]:
        rows = {name: _rows(folder) for name, folder in self.runs.items()}
        with_ratio = {name: of for name, of in rows.items() if any("bootstrapping_ratio" in row for row in of)}
        if not with_ratio:
            raise _Skipped("no run was trained with the cross-image loss")
        return _small(draw_bootstrapping(with_ratio)), (
            "Bootstrapping ratio over the epochs: the fraction of objects whose nearest neighbour is cycle-consistent."
        )

    def _losses(self) -> tuple[Figure, str]:
        rows = _rows(self.folder)
        if not any("loss" in row for row in rows):
            raise _Skipped("the run has not logged a loss yet")
        return _small(draw_losses(rows)), "Losses over the epochs of pretraining."

    def _schedules(self) -> tuple[Figure, str]:
        rows = [row for row in _rows(self.folder) if "lr" in row]
        if not rows:
            raise _Skipped("the run has not logged a step yet")
        figure = draw_curves({name: [(r["epoch"], r[name]) for r in rows] for name in _SCHEDULES if name in rows[0]})
        figure.set_size_inches(TEXT_WIDTH, 0.5 * TEXT_WIDTH)
        return figure, "Learning rate, weight decay, and momentum and temperature of the teacher over the epochs."

    @torch.no_grad()
    def _features(self) -> tuple[Figure, str]:
        images = [self._reduced(image) for image in self._images()]
        encoder = Encoder(self.backbone)
        grids = [encoder.grids(encoder.resized(image)[None])[0].cpu() for image in images]
        colours = PCAColours(grids)
        painted = [colours(grid, (image.shape[1], image.shape[2])) for grid, image in zip(grids, images, strict=True)]
        pictures = [as_picture(image.numpy()) / 255 for image in images]
        return lay_out_features(pictures, [picture.numpy() for picture in painted]), (
            "Images and their dense features: the first three principal components over the patches of all shown "
            "images, as red, green and blue."
        )

    def _images(self) -> list[UInt8[Tensor, "c h w"]]:
        if self._files:
            return [read_image(Path(file), reading=self.options.reading) for file in self._files]
        assert self._source is not None
        order = torch.randperm(len(self._source), generator=keyed_generator(self.config.seed)).tolist()
        return [self._source.load(index) for index in order[: self.options.pictures]]

    def _reduced(self, image: UInt8[Tensor, "c h w"]) -> UInt8[Tensor, "c new_h new_w"]:
        height, width = image.shape[1:]
        scale = min(1.0, self.options.size / min(height, width))
        return resize_image(image, (round(scale * height), round(scale * width)), "bicubic")


def _open_data(config: PretrainConfig, folder: Path, options: FigureConfig) -> ImageSource:
    otherwise = "draw figures that do not need them with --features_of FILES --only features,clusters,bootstrapping"
    try:
        return open_run_images(
            config, folder, options.images, reading=options.reading, command="cribo figures --run", trust=options.trust
        )
    except Untrusted as error:
        raise Untrusted(f"{error}; or {otherwise}") from error
    except (DataError, OSError) as error:
        raise DataError(
            f"cannot open the images {options.images} ({error}): give their folder with --images, or {otherwise}"
        ) from error


def _rows(folder: Path) -> Sequence[dict[str, float]]:
    path = folder / METRICS
    return read_metrics(path) if path.is_file() else []


def _small(figure: Figure) -> Figure:
    """Resize a figure to one column."""
    figure.set_size_inches(COLUMN_WIDTH, 0.62 * COLUMN_WIDTH)
    return figure
