"""The pictures of a run: curves, schedules, clusters on view pairs, matches across images."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from cribo.data.pairs import ViewPairDataset, ViewPairs, collate
from cribo.data.randomness import keyed_generator
from cribo.drawing import hide_ticks, house_style, paint_regions, region_colour, write_figure
from cribo.method import NO_MATCH, MemoryBank, normalise
from cribo.pretraining.config import PretrainConfig
from cribo.pretraining.files import REPORT
from cribo.pretraining.network import Network
from cribo.pretraining.objective import Objects, find_objects, label_tokens
from cribo.pretraining.schedules import Schedules

_CLUSTER_PAIRS = 6
_QUERIES, _NEIGHBOURS, _GALLERY = 4, 6, 256


def write_report(
    folder: Path,
    config: PretrainConfig,
    rows: Sequence[dict[str, float]],
    schedules: Schedules,
    teacher: Network,
    dataset: ViewPairDataset,
    *,
    baselines: dict[str, float],
) -> list[Path]:
    """Write the report of a run as PNG files into `report/`, and return them.

    Args:
        folder: the run folder.
        config: of the run.
        rows: of `metrics.csv`.
        schedules: of the run.
        teacher: the trained teacher, on the device to use.
        dataset: the view pairs that were trained on.
        baselines: mIoU by name, drawn beside the run's score.
    """
    (folder / REPORT).mkdir(exist_ok=True)
    pictures: dict[str, Callable[[], Figure]] = {
        "losses": lambda: draw_losses(rows),
        "schedules": lambda: draw_schedules(schedules),
    }
    if any("dense_nn" in row for row in rows):
        pictures["dense_nn"] = lambda: draw_score(rows, baselines)
    if config.losses.cross_image:
        pictures["bootstrapping_ratio"] = lambda: draw_bootstrapping(rows)
    if config.needs_objects:
        sample = sample_objects(teacher, dataset, config, count=_GALLERY)
        pictures["clusters"] = lambda: draw_clusters(sample)
        pictures["matches"] = lambda: draw_matches(sample, config)
    written = []
    for name, draw in pictures.items():
        with house_style():
            figure = draw()
        written.append(write_figure(folder / REPORT / f"{name}.png", figure))
    return written


# ---------------------------------------------------------------------- curves


def draw_losses(rows: Sequence[dict[str, float]]) -> Figure:
    """The three losses over the epochs; a loss that is off is left out."""
    figure, axes = _figure(6.4, 3.8)
    for name, label, colour in (
        ("loss_image", r"image level $\mathcal{L}_{cv}^{g}$", "C0"),
        ("loss_cross_view", r"cross-view objects $\mathcal{L}_{cv}^{o}$", "C1"),
        ("loss_cross_image", r"cross-image objects $\mathcal{L}_{ci}^{o}$", "C2"),
    ):
        points = [(row["epoch"], row[name]) for row in rows if row.get(name)]
        if points:
            marker = "o" if len(points) == 1 else None
            axes.plot(*zip(*points, strict=True), label=label, color=colour, linewidth=1.2, marker=marker)
    axes.set(xlabel="epoch", ylabel="cross-entropy [nats]", title="Losses")
    _legend(axes)
    return figure


def draw_bootstrapping(rows: Sequence[dict[str, float]]) -> Figure:
    """Mean bootstrapping ratio of each epoch (the paper's figure)."""
    figure, axes = _figure(6.4, 3.8)
    epochs: dict[int, list[float]] = {}
    for row in rows:
        if "bootstrapping_ratio" in row:
            # A row that closes an epoch has that epoch's whole number plus one.
            epochs.setdefault(max(0, int(np.ceil(row["epoch"])) - 1), []).append(row["bootstrapping_ratio"])
    if epochs:
        numbers = sorted(epochs)
        marker = "o" if len(numbers) < 40 else None
        axes.plot(numbers, [100 * np.mean(epochs[n]) for n in numbers], marker=marker, markersize=3)
    axes.set(xlabel="epoch", ylabel="objects with a valid match [%]", title="Bootstrapping ratio")
    _from_zero(axes)
    return figure


def draw_score(rows: Sequence[dict[str, float]], baselines: dict[str, float]) -> Figure:
    """Dense retrieval over the epochs, beside the baselines."""
    figure, axes = _figure(6.4, 3.8)
    points = [(row["epoch"], 100 * row["dense_nn"]) for row in rows if "dense_nn" in row]
    axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label="teacher")
    for number, (name, value) in enumerate(baselines.items()):
        axes.axhline(100 * value, color=f"C{number + 1}", linestyle="--", linewidth=1, label=name)
    axes.set(xlabel="epoch", ylabel="mIoU [%]", title="Dense nearest-neighbour retrieval")
    _from_zero(axes)
    _legend(axes)
    return figure


def draw_schedules(schedules: Schedules) -> Figure:
    """Learning rate, weight decay, teacher momentum and teacher temperature over the epochs."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    steps = np.unique(np.linspace(0, schedules.total_steps - 1, 400).astype(int))
    values = [schedules.at(int(step)) for step in steps]
    panels = figure.subplots(2, 2, sharex=True)
    for axes, (name, label) in zip(
        panels.flat,
        (
            ("lr", "learning rate"),
            ("weight_decay", "weight decay"),
            ("momentum", "teacher momentum"),
            ("teacher_temperature", r"teacher temperature $\tau_t$"),
        ),
        strict=True,
    ):
        axes.plot(steps / schedules.steps_per_epoch, [getattr(value, name) for value in values])
        axes.set_title(label)
        axes.ticklabel_format(axis="y", useOffset=False)
    for axes in panels[1]:
        axes.set_xlabel("epoch")
    return figure


# -------------------------------------------------------------------- pictures


@dataclass
class ObjectSample:
    """Some images as the trained teacher sees them: `pairs` and their `objects`, as in a training step."""

    pairs: ViewPairs
    objects: Objects
    grid: tuple[int, int]

    def view(self, image: int, view: int) -> np.ndarray:
        """One view, (H, W, 3) in 0-1, without photometric changes."""
        return self.pairs.views[image, view].permute(1, 2, 0).numpy() / 255

    def label_map(self, image: int, view: int) -> Int[Tensor, "h w"]:
        """The cluster of every pixel of one view."""
        cells = self.objects.labels[image, view].view(1, 1, *self.grid).float()
        size = self.pairs.views.shape[-2:]
        return F.interpolate(cells, size=tuple(size), mode="nearest")[0, 0].long()


@torch.no_grad()
def sample_objects(
    teacher: Network, dataset: ViewPairDataset, config: PretrainConfig, *, count: int, batch_size: int = 32
) -> ObjectSample:
    """Cluster the view pairs of up to `count` images drawn from the data."""
    device = next(teacher.parameters()).device
    order = torch.randperm(len(dataset), generator=keyed_generator(config.seed)).tolist()[:count]
    # An epoch that training never sees: these views are nobody's memory of a step.
    pairs = collate([dataset[config.optim.epochs, image] for image in order])
    backbone = teacher.backbone
    training = backbone.training
    backbone.eval()
    found: list[Objects] = []
    try:
        for start in range(0, len(order), batch_size):
            part = pairs.narrow(start, min(start + batch_size, len(order))).to(device)
            images = normalise(part.views.flatten(0, 1).float() / 255, mean=backbone.mean, std=backbone.std)
            tokens = backbone.encode(images).tokens.unflatten(0, (len(part), 2)).float()
            labels = label_tokens(tokens, part, config.objects)
            objects = find_objects(tokens, labels, part, config.objects.num_objects)
            found.append(
                Objects(
                    teacher=objects.teacher.cpu(),
                    labels=objects.labels.cpu(),
                    rows=objects.rows.cpu() + start,
                    clusters=objects.clusters.cpu(),
                    images=objects.images.cpu(),
                    counts=objects.counts,
                )
            )
    finally:
        backbone.train(training)
    merged = Objects(
        teacher=torch.cat([part.teacher for part in found], dim=1),
        labels=torch.cat([part.labels for part in found]),
        rows=torch.cat([part.rows for part in found]),
        clusters=torch.cat([part.clusters for part in found]),
        images=torch.cat([part.images for part in found]),
        counts=[count for part in found for count in part.counts],
    )
    return ObjectSample(pairs, merged, dataset.grid)


def draw_clusters(sample: ObjectSample) -> Figure:
    """View pairs beside their clusters; a colour is one cluster of the pair, grey is in one view only."""
    pairs = min(_CLUSTER_PAIRS, len(sample.pairs))
    figure = Figure(figsize=(1.9 * pairs, 7.4), layout="constrained")
    figure.suptitle("Joint-space clusters of view pairs; one colour is one object, grey is seen in one view only")
    panels = figure.subplots(4, pairs, squeeze=False)
    for image in range(pairs):
        kept = sample.objects.clusters[sample.objects.rows == image].tolist()
        colours = {cluster: region_colour(number, len(kept)) for number, cluster in enumerate(kept)}
        for view in (0, 1):
            picture = sample.view(image, view)
            panels[2 * view, image].imshow(picture)
            panels[2 * view + 1, image].imshow(paint_regions(picture, sample.label_map(image, view), colours, tint=0.5))
    for row, label in enumerate(("view 1", "its clusters", "view 2", "its clusters")):
        panels[row, 0].set_ylabel(label)
    hide_ticks(panels)
    return figure


def draw_matches(sample: ObjectSample, config: PretrainConfig) -> Figure:
    """Objects of some views and the nearest objects of other images (the paper's matching figures)."""
    images = len(sample.pairs)
    queries = min(_QUERIES, images // 2)
    figure = Figure(figsize=(1.9 * (_NEIGHBOURS + 2), 2.1 * max(queries, 1)), layout="constrained")
    figure.suptitle("Objects of a view and, in the same colour, their nearest objects in other images")
    if queries == 0:
        return figure
    objects = sample.objects
    bank = MemoryBank(num_images=images, num_objects=config.objects.num_objects, dim=objects.teacher.shape[2])
    in_gallery = objects.rows >= queries
    bank.push(objects.teacher[:, in_gallery], objects.images[in_gallery], objects.counts[queries:])
    gallery = in_gallery.nonzero().flatten()  # the ring has not wrapped, so slots count these rows
    asked = (~in_gallery).nonzero().flatten()
    matches = bank.match(objects.teacher[:, asked], objects.images[asked])
    panels = figure.subplots(queries, _NEIGHBOURS + 2, squeeze=False)
    for image in range(queries):
        labels = sample.label_map(image, 0)
        own = (objects.rows[asked] == image).nonzero().flatten()
        clusters = objects.clusters[asked[own]].tolist()
        sizes = torch.tensor([int((labels == cluster).sum()) for cluster in clusters])
        shown = sizes.argsort(descending=True)[:_NEIGHBOURS].tolist()
        colours = {clusters[place]: region_colour(number, len(shown)) for number, place in enumerate(shown)}
        view = sample.view(image, 0)
        panels[image, 0].imshow(view)
        panels[image, 1].imshow(paint_regions(view, labels, colours, tint=0.5))
        for axes, place in zip(panels[image, 2:], shown, strict=False):
            query = int(own[place])
            slot = int(matches.nearest[0, query])
            if slot == NO_MATCH:
                continue
            found = int(gallery[slot])
            other = int(objects.rows[found])
            colour = colours[clusters[place]]
            axes.imshow(
                paint_regions(
                    sample.view(other, 0), sample.label_map(other, 0), {int(objects.clusters[found]): colour}, tint=0.15
                )
            )
            if bool(matches.valid[0, query]):
                axes.set_xlabel("cycle-consistent", color="black", fontsize=8)
            for spine in axes.spines.values():
                spine.set(visible=True, color=colour, linewidth=2)
    panels[0, 0].set_title("query")
    panels[0, 1].set_title("its largest objects")
    panels[0, 2].set_title("their neighbours", loc="left")
    hide_ticks(panels)
    return figure


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _from_zero(axes: Axes) -> None:
    axes.set_ylim(0, max(1.0, 1.05 * axes.dataLim.y1))


def _legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
