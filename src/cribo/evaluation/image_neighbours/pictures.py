"""Pictures of images next to their nearest training images."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure, SubFigure

from cribo.data.classification import ClassifiedFiles
from cribo.drawing import frame, hide_ticks, house_style
from cribo.evaluation.data import spread
from cribo.evaluation.image_neighbours.features import SquareCrop
from cribo.evaluation.image_neighbours.retrieval import ImageRetrieval, NeighbourScore, shown_score, vote_weights
from cribo.evaluation.pages import write_pages
from cribo.evaluation.pictures import RIGHT, WRONG, rgb

_NEIGHBOURS = 7  # maximum number of neighbours per image
_PANEL, _TITLE, _CAPTION = 1.45, 0.3, 0.5  # inches
_LETTERS = 20  # maximum characters per line of a caption


def write_neighbours(
    found: ImageRetrieval, train: ClassifiedFiles, asked: ClassifiedFiles, folder: Path, *, number: int
) -> None:
    """Draw images with their nearest training images, six per file: `neighbours.png`, `neighbours-2.png`, ...

    Args:
        found: result of `image_nn`.
        train: training images.
        asked: classified images.
        folder: output folder.
        number: number of images to draw.
    """
    score = shown_score(found.scores)
    chosen = chosen_images(score, number)
    write_pages(folder, "neighbours", chosen, lambda images: _draw(images, found, score, train, asked))


def chosen_images(score: NeighbourScore, number: int) -> list[int]:
    """Choose evenly spaced images to draw, half of them misclassified if there are enough.

    Example:
        >>> import torch
        >>> score = NeighbourScore(1, torch.zeros(6).long(), torch.tensor([0, 0, 0, 0, 1, 0]), torch.ones(6))
        >>> chosen_images(score, 4)
        [0, 1, 3, 4]
    """
    right, wrong = (score.place == 0).nonzero()[:, 0].tolist(), (score.place > 0).nonzero()[:, 0].tolist()
    of_wrong = min(len(wrong), max(number // 2, number - len(right)))
    chosen = [right[place] for place in spread(len(right), number - of_wrong)]
    return sorted(chosen + [wrong[place] for place in spread(len(wrong), of_wrong)])


def _draw(
    images: Sequence[int],
    found: ImageRetrieval,
    score: NeighbourScore,
    train: ClassifiedFiles,
    asked: ClassifiedFiles,
) -> Figure:
    columns = 1 + min(score.neighbours, _NEIGHBOURS, found.nearest.rows.shape[1])
    size = columns * (_PANEL + 0.12), len(images) * (_PANEL + _TITLE + _CAPTION) + 0.3
    with house_style():
        figure = Figure(figsize=size, layout="constrained")
        rows = figure.subfigures(len(images), 1, squeeze=False)[:, 0]
        for row, index in zip(rows, images, strict=True):
            _draw_row(row, index, columns, found, score, train, asked)
        figure.suptitle(
            "Images, up to half of them misclassified, and their nearest training images; "
            f"votes are relative to the sum over {score.neighbours} neighbours",
            fontsize=10,
        )
    return figure


def _draw_row(
    figure: SubFigure,
    index: int,
    columns: int,
    found: ImageRetrieval,
    score: NeighbourScore,
    train: ClassifiedFiles,
    asked: ClassifiedFiles,
) -> None:
    prepare = SquareCrop(found.settings.resize, found.settings.crop)
    label, predicted = (asked.classes[int(classes[index])] for classes in (asked.labels, score.predicted))
    verdict, colour = ("correct", RIGHT) if label == predicted else (f"classified as {predicted}", WRONG)
    title = f"{asked.name(index)}: {label}, {verdict}"
    figure.suptitle(title, fontsize=9, x=0.005, ha="left", color=rgb(colour))
    cells = figure.subplots(1, columns, squeeze=False)[0]
    cells[0].imshow(prepare(asked.load(index)).permute(1, 2, 0).numpy())
    cells[0].set_xlabel(_caption(label), fontsize=7, weight="bold")
    near, similarities = found.nearest.rows[index, : columns - 1], found.nearest.similarity[index, : columns - 1]
    shares = vote_weights(similarities[None], found.settings.temperature)[0] / score.votes[index]
    for axes, row, similarity, share in zip(
        cells[1:], near.tolist(), similarities.tolist(), shares.tolist(), strict=True
    ):
        name = train.classes[int(train.labels[row])]
        axes.imshow(prepare(train.load(row)).permute(1, 2, 0).numpy())
        axes.set_xlabel(f"{_caption(name)}\ncosine {similarity:.2f}, vote {100 * share:.0f} %", fontsize=7)
        frame(axes, rgb(RIGHT if name == label else WRONG))
    hide_ticks(cells)


def _caption(name: str) -> str:
    return textwrap.shorten(name, _LETTERS, placeholder="…") if " " in name else name[:_LETTERS]
