"""Pictures of images next to their nearest training images."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from cribo.base.colours import rgb
from cribo.base.drawing import frame, line_handle, panel_grid, title_row
from cribo.data.config import spread
from cribo.data.labelled.classification import ClassifiedFiles
from cribo.evaluation.image_neighbours.retrieval import ImageRetrieval, Predictions, vote_weights
from cribo.evaluation.pages import write_pages
from cribo.evaluation.pictures import RIGHT, WRONG
from cribo.features.image_features import SquareCrop

_NEIGHBOURS = 5  # maximum number of neighbours per image
_CAPTION = 0.32  # height of a caption of two lines in inches
_LETTERS = 20  # maximum characters per line of a caption


def write_neighbours(
    found: ImageRetrieval, train: ClassifiedFiles, queries: ClassifiedFiles, folder: Path, *, number: int
) -> None:
    """Draw images with their nearest training images, six per file: `neighbours.png`, `neighbours-2.png`, ...

    Args:
        found: result of `image_nn`.
        train: training images.
        queries: classified images.
        folder: output folder.
        number: number of images to draw.
    """
    chosen = chosen_images(found.predictions[found.shown], number)
    write_pages(folder, "neighbours", chosen, lambda images: _draw(images, found, train, queries))


def chosen_images(found: Predictions, number: int) -> list[int]:
    """Choose evenly spaced images to draw, half of them misclassified if there are enough.

    Example:
        >>> import torch
        >>> found = Predictions(torch.zeros(6).long(), torch.tensor([0, 0, 0, 0, 1, 0]), torch.ones(6))
        >>> chosen_images(found, 4)
        [0, 1, 3, 4]
    """
    right, wrong = (found.place == 0).nonzero()[:, 0].tolist(), (found.place > 0).nonzero()[:, 0].tolist()
    of_wrong = min(len(wrong), max(number // 2, number - len(right)))
    chosen = [right[place] for place in spread(len(right), number - of_wrong)]
    return sorted(chosen + [wrong[place] for place in spread(len(wrong), of_wrong)])


def _draw(images: Sequence[int], found: ImageRetrieval, train: ClassifiedFiles, queries: ClassifiedFiles) -> Figure:
    prepare = SquareCrop(found.settings.resize, found.settings.crop)
    predictions, shown = found.predictions[found.shown], min(found.shown, _NEIGHBOURS)
    figure, rows = panel_grid(
        [(1, 1)] * len(images),
        ("image", *(f"neighbour {place}" for place in range(1, shown + 1))),
        title="Images, up to half of them misclassified, and their nearest training images.\nNumbers below them: "
        f"cosine similarity, and share of the votes of {found.shown} neighbours",
        row_titles=True,
        text=_CAPTION,
        handles=[line_handle("same class", rgb(RIGHT)), line_handle("another class", rgb(WRONG), dashed=True)],
    )
    for axes, index in zip(rows, images, strict=True):
        label, predicted = (queries.classes[int(classes[index])] for classes in (queries.labels, predictions.classes))
        verdict = "correct" if label == predicted else f"classified as {predicted}"
        title_row(axes, queries.name(index), f"{label}, {verdict}")
        axes[0].imshow(prepare(queries.load(index)).permute(1, 2, 0).numpy())
        axes[0].set_xlabel(_caption(label), fontsize=8, weight="bold")
        near, similarities = found.nearest.rows[index, :shown], found.nearest.similarity[index, :shown]
        shares = vote_weights(similarities[None], found.settings.temperature)[0] / predictions.votes[index]
        neighbours = zip(axes[1:], near.tolist(), similarities.tolist(), shares.tolist(), strict=True)
        for part, row, similarity, share in neighbours:
            name = train.classes[int(train.labels[row])]
            part.imshow(prepare(train.load(row)).permute(1, 2, 0).numpy())
            part.set_xlabel(f"{_caption(name)}\n{similarity:.2f}, {100 * share:.0f} %", fontsize=8)
            frame(part, RIGHT if name == label else WRONG, dashed=name != label)
    return figure


def _caption(name: str) -> str:
    return textwrap.shorten(name, _LETTERS, placeholder="…") if " " in name else name[:_LETTERS]
