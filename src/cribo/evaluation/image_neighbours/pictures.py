"""The pictures of image-level nearest neighbours: images beside their nearest training images."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from matplotlib.figure import Figure, SubFigure
from torch import Tensor

from cribo.data.classification import ClassifiedFiles
from cribo.drawing import frame, hide_ticks, house_style, write_figure
from cribo.evaluation.data import spread
from cribo.evaluation.image_neighbours.features import SquareCrop
from cribo.evaluation.image_neighbours.retrieval import PUBLISHED, ImageRetrieval, NeighbourScore, vote_weights
from cribo.evaluation.pictures import RIGHT, WRONG, write_pictures
from cribo.evaluation.results import EvaluationResult

_NEIGHBOURS = 7  # beside each image
_ROWS_PER_PICTURE = 6
_PANEL, _TITLE, _CAPTION = 1.45, 0.3, 0.5  # inch
_LETTERS = 20  # of a caption's line


@dataclass(frozen=True)
class NeighbourPanel:
    """One image and its nearest training images, as the backbone has seen them.

    Attributes:
        name: of the image.
        label: its class.
        predicted: the class that it is given.
        image: RGB.
        classes: of the nearest images, the most similar first.
        similarities: their cosines.
        shares: of the whole vote, which more images have than are drawn.
        images: they themselves.
    """

    name: str
    label: str
    predicted: str
    image: UInt8[Tensor, "3 h w"]
    classes: list[str]
    similarities: list[float]
    shares: list[float]
    images: list[UInt8[Tensor, "3 h w"]]


def write_image_pictures(
    result: EvaluationResult,
    found: ImageRetrieval,
    train: ClassifiedFiles,
    asked: ClassifiedFiles,
    folder: Path,
    *,
    pictures: int,
) -> list[Path]:
    """Write what there is to see of a result as PNG files into a folder, and return them.

    Beside what `write_pictures` draws: `neighbours.png`, `neighbours-2.png`, ... of six images each.

    Args:
        result: of the evaluation.
        found: what it is made of.
        train: images whose classes are known.
        asked: those that were classified.
        folder: it is there already.
        pictures: how many images to draw with the nearest ones.
    """
    paths = write_pictures(result, [], [], folder)
    score = shown_score(found.scores)
    panels = neighbour_panels(found, score, train, asked, chosen_images(score, pictures))
    for number, start in enumerate(range(0, len(panels), _ROWS_PER_PICTURE), start=1):
        name = "neighbours" if number == 1 else f"neighbours-{number}"
        figure = draw_neighbours(panels[start : start + _ROWS_PER_PICTURE], score.neighbours)
        paths.append(write_figure(folder / f"{name}.png", figure))
    return paths


def shown_score(scores: Sequence[NeighbourScore]) -> NeighbourScore:
    """The score that is looked at more closely: of k = 20, which is published, or else of the smallest k."""
    return next((score for score in scores if score.neighbours == PUBLISHED), scores[0])


def chosen_images(score: NeighbourScore, number: int) -> list[int]:
    """Images to look at: half of them classified wrong, as far as there are, all evenly spread.

    Example:
        >>> score = NeighbourScore(1, torch.zeros(6).long(), torch.tensor([0, 0, 0, 0, 1, 0]), torch.ones(6))
        >>> chosen_images(score, 4)
        [0, 1, 3, 4]
    """
    right, wrong = (score.place == 0).nonzero()[:, 0].tolist(), (score.place > 0).nonzero()[:, 0].tolist()
    of_wrong = min(len(wrong), max(number // 2, number - len(right)))
    of_right = min(len(right), number - of_wrong)
    return sorted(
        [right[place] for place in spread(len(right), of_right)]
        + [wrong[place] for place in spread(len(wrong), of_wrong)]
    )


def neighbour_panels(
    found: ImageRetrieval,
    score: NeighbourScore,
    train: ClassifiedFiles,
    asked: ClassifiedFiles,
    images: Sequence[int],
) -> list[NeighbourPanel]:
    """What is drawn of some images."""
    prepare = SquareCrop(found.settings.resize, found.settings.crop)
    panels = []
    for index in images:
        near = found.nearest.rows[index, : min(score.neighbours, _NEIGHBOURS)].tolist()
        similarities = found.nearest.similarity[index, : len(near)]
        shares = vote_weights(similarities[None], found.settings.temperature)[0] / score.votes[index]
        panels.append(
            NeighbourPanel(
                asked.name(index),
                asked.classes[int(asked.labels[index])],
                asked.classes[int(score.predicted[index])],
                prepare(asked.load(index)),
                [train.classes[int(train.labels[row])] for row in near],
                similarities.tolist(),
                shares.tolist(),
                [prepare(train.load(row)) for row in near],
            )
        )
    return panels


def draw_neighbours(panels: Sequence[NeighbourPanel], k: int) -> Figure:
    """Images, each with its nearest training images beside it, framed by whether they are of its class.

    Args:
        panels: at least one.
        k: how many neighbours have voted.

    Raises:
        ValueError: no panel.
    """
    if not panels:
        raise ValueError("panels must hold at least one image, got 0")
    columns = 1 + max(len(panel.images) for panel in panels)
    with house_style():
        figure = Figure(
            figsize=(columns * (_PANEL + 0.12), len(panels) * (_PANEL + _TITLE + _CAPTION) + 0.3), layout="constrained"
        )
        rows = figure.subfigures(len(panels), 1, squeeze=False)[:, 0]
        for row, panel in zip(rows, panels, strict=True):
            _draw_panel(row, panel, columns)
        figure.suptitle(
            "Images, half of them classified wrong where so many are, and their nearest training images; "
            f"votes are shares of those of {k}",
            fontsize=10,
        )
    return figure


def _draw_panel(figure: SubFigure, panel: NeighbourPanel, columns: int) -> None:
    right = panel.label == panel.predicted
    verdict = "right" if right else f"taken for {panel.predicted}"
    figure.suptitle(
        f"{panel.name}: {panel.label}, {verdict}", fontsize=9, x=0.005, ha="left", color=_rgb(RIGHT if right else WRONG)
    )
    cells = figure.subplots(1, columns, squeeze=False)[0]
    cells[0].imshow(panel.image.permute(1, 2, 0).numpy())
    cells[0].set_xlabel(_caption(panel.label), fontsize=7, weight="bold")
    nearest = zip(cells[1:], panel.images, panel.classes, panel.similarities, panel.shares, strict=False)
    for axes, image, name, similarity, share in nearest:
        axes.imshow(image.permute(1, 2, 0).numpy())
        axes.set_xlabel(f"{_caption(name)}\ncosine {similarity:.2f}, vote {100 * share:.0f} %", fontsize=7)
        frame(axes, _rgb(RIGHT if name == panel.label else WRONG))
    hide_ticks(np.array(cells))


def _caption(name: str) -> str:
    return textwrap.shorten(name, _LETTERS, placeholder="…") if " " in name else name[:_LETTERS]


def _rgb(colour: tuple[int, int, int]) -> tuple[float, float, float]:
    red, green, blue = torch.tensor(colour).div(255).tolist()
    return red, green, blue
