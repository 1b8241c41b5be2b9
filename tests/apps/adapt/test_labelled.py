"""Dense retrieval for the verdict, on images whose classes are colours."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cribo.apps.adapt.labelled import fit_segmentation, gain, mean_iou, open_labelled, score_images
from cribo.apps.adapt.verdict import choose_network
from cribo.models import build_backbone

COLOURS = np.array([[250, 20, 20], [20, 250, 20], [20, 20, 250]], np.uint8)


def write(folder: Path, split: str, count: int, *, seed: int) -> None:
    generator = np.random.default_rng(seed)
    for kind in ("images", "labels"):
        (folder / kind / split).mkdir(parents=True, exist_ok=True)
    for number in range(count):
        labels = generator.integers(0, 3, (4, 6)).repeat(16, 0).repeat(16, 1).astype(np.uint8)
        Image.fromarray(COLOURS[labels]).save(folder / "images" / split / f"{number:02d}.png")
        Image.fromarray(labels).save(folder / "labels" / split / f"{number:02d}.png")


@pytest.fixture
def network() -> torch.nn.Module:
    return build_backbone("resnet18", args={"layers": (1, 1, 0, 0), "channels": (8, 8, 8, 8)}, seed=3).eval()


def test_images_without_splits_are_scored_by_cross_validation(tmp_path: Path, network) -> None:
    write(tmp_path, "", 12, seed=0)
    labelled = open_labelled(tmp_path)
    assert sorted(image for _, scored in labelled.folds for image in scored) == list(range(12))
    for voting, scored in labelled.folds:
        assert not set(voting) & set(scored)
        assert len(voting) + len(scored) == 12
    tallies = score_images(network, labelled)
    assert tallies.shape == (12, 3, 3)
    assert mean_iou(tallies) > 0.8  # a random convolution separates three colours


def test_val_is_scored_by_train(tmp_path: Path, network) -> None:
    write(tmp_path, "train", 3, seed=0)
    write(tmp_path, "val", 10, seed=1)
    (tmp_path / "classes.txt").write_text("red\ngreen\nblue\n")
    labelled = open_labelled(tmp_path)
    assert [(len(voting), len(scored)) for voting, scored in labelled.folds] == [(3, 10)]
    seen: list[tuple[int, int]] = []
    tallies = score_images(network, labelled, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (13, 13)
    assert mean_iou(tallies) > 0.8
    labels = np.asarray(Image.open(tmp_path / "labels" / "val" / "00.png"))
    red = tallies[0, 0].sum() / tallies[0].sum()
    assert abs(float(red) - (labels == 0).mean()) < 0.1


def test_the_interval_contains_the_gain_and_shrinks_with_more_images() -> None:
    generator = torch.Generator().manual_seed(0)

    def confusions(count: int, right: float) -> torch.Tensor:
        hits = torch.rand(count, 2, generator=generator) * 0.2 + right
        own = torch.stack(
            [torch.stack([hits[:, 0], 1 - hits[:, 0]], 1), torch.stack([1 - hits[:, 1], hits[:, 1]], 1)], 1
        )
        return (1000 * own).long()

    widths = []
    for count in (10, 160):
        before, after = confusions(count, 0.5), confusions(count, 0.6)
        found = gain(before, after)
        assert found.low < found.mean < found.high
        assert found.low > 0
        assert abs(found.mean - (mean_iou(after) - mean_iou(before))) < 1e-9
        widths.append(found.high - found.low)
    assert widths[1] < widths[0] / 2
    nothing = gain(before, before)
    assert (nothing.low, nothing.mean, nothing.high) == (0, 0, 0)


def test_a_rare_class_does_not_bias_the_interval() -> None:
    """If a resample has no image of a class, predictions of this class must not count as IoU 0."""
    shown = torch.tensor([[90, 0, 10], [0, 90, 10], [0, 0, 100]])  # rows are labels
    common = torch.tensor([[90, 10, 0], [10, 90, 0], [0, 0, 0]])
    before = torch.stack([shown, *[common] * 19])
    after = before.clone()
    after[1:, 0] += torch.tensor([0, -1, 1])  # one pixel of each other image is predicted as the rare class
    found = gain(before, after)
    assert found.high - found.low < 0.1
    assert mean_iou(after[1:]) > 0.8


def test_segmentation_is_fitted_to_the_scored_images_and_scored_on_held_out_ones(tmp_path: Path, network) -> None:
    write(tmp_path, "train", 2, seed=0)
    write(tmp_path, "val", 12, seed=1)
    (tmp_path / "classes.txt").write_text("red\ngreen\nblue\n")
    Image.fromarray(np.full((64, 96), 255, np.uint8)).save(tmp_path / "labels" / "val" / "03.png")
    labelled = open_labelled(tmp_path)
    fit = fit_segmentation(network, labelled)
    assert fit is not None
    assert fit.probe == "block 1 with ridge and nearest neighbours"
    assert fit.tallies.shape == (11, 3, 3)  # an image without labels is not an example
    assert mean_iou(fit.tallies) > 0.8
    for number in ("05", "07"):
        Image.fromarray(np.full((64, 96), 255, np.uint8)).save(tmp_path / "labels" / "val" / f"{number}.png")
    assert fit_segmentation(network, labelled) is None


def test_images_of_one_class_do_not_score_a_segmentation(tmp_path: Path, network) -> None:
    write(tmp_path, "", 10, seed=0)
    for path in (tmp_path / "labels").glob("*.png"):
        Image.new("L", (96, 64), 1).save(path)
    assert fit_segmentation(network, open_labelled(tmp_path)) is None


def test_a_network_is_kept_if_one_measure_improves_and_none_degrades() -> None:
    good, fair, bad = (torch.tensor([[[right, 100 - right], [100 - right, right]]] * 12) for right in (90, 80, 60))
    names = ("before", "after")

    def chosen(agreement: tuple[float, float], *measures: tuple[torch.Tensor, torch.Tensor]) -> str:
        tallies: list[dict[str, torch.Tensor]] = [dict(zip(names, each, strict=True)) for each in measures]
        return choose_network(dict(zip(names, agreement, strict=True)), tallies)

    assert chosen((0.4, 0.2), (fair, fair), (fair, good)) == "after"
    assert chosen((0.2, 0.4), (fair, good), (fair, bad)) == "before"
    assert chosen((0.2, 0.4), (fair, bad), (fair, good)) == "before"
    assert chosen((0.2, 0.4), (fair, fair), (good, good)) == chosen((0.2, 0.4)) == "after"
    assert chosen((0.4, 0.2), (fair, fair)) == chosen((0.4, 0.2)) == "before"
    # A third network is compared with the best one so far.
    measure: dict[str, torch.Tensor] = {"before": fair, "after": good, "last": fair}
    assert choose_network(dict.fromkeys(measure, 0.3), [measure]) == "after"
