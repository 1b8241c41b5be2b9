from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.evaluation.coded import PERFECT, Coded, blocks, random_maps
from torchmetrics.classification import MulticlassJaccardIndex

from cribo.base.errors import InputError
from cribo.data import SEGMENTATION_SETS, open_segmentation
from cribo.data.scenes import Scenes
from cribo.evaluation import DenseNN, SegmentationData, dense_nn
from cribo.evaluation.dense_neighbours.protocol import draw_images, images_of
from cribo.features import Encoder, Machine, mean_colour_encoder
from cribo.features.extraction import EncodedView, Preparation
from cribo.features.patches import class_counts
from cribo.models import build_backbone

CLASSES = ["a", "b", "c", "d"]


def settings(**choices: Any) -> DenseNN:
    return DenseNN(**{"ratios": (1,), "neighbours": 5, **choices})


# Imperfect features of `Textured`: some patches look like another class.
COLOURS = Encoder.from_function(lambda images: F.avg_pool2d(images, 4).flatten(2).mT - 0.4, 4)


class Textured(Coded):
    """Classes that mean colours distinguish only for most patches."""

    def load(self, index: int) -> torch.Tensor:
        labels = self.maps[index]
        label = torch.where(labels == 255, 1, labels)
        noise = torch.randint(0, 140, (3, *labels.shape), generator=torch.Generator().manual_seed(index + len(self)))
        return (torch.stack((label * 30, (3 - label) * 30, label % 2 * 30)) + noise).to(torch.uint8)


def pixel_maps(count: int, seed: int) -> list[torch.Tensor]:
    """Return label maps with borders inside patches, of sizes that are not multiples of the patch size."""
    generator = torch.Generator().manual_seed(seed)
    maps = []
    for number in range(count):
        coarse = torch.randint(0, 5, (4, 5), generator=generator).float()
        size = (21 + number % 2, 27)
        labels = F.interpolate(coarse[None, None], size=size, mode="nearest")[0, 0].long()
        maps.append(torch.where(labels == 4, 255, labels))
    return maps


# ------------------------------------------------------------------ known answers


def test_perfect_features_score_100_percent() -> None:
    result = dense_nn(PERFECT, Coded(random_maps(6, 0)), Coded(random_maps(4, 1)), settings())
    assert result.rows[0]["miou"] == 1
    assert [*result.rows[0]["per_class"].values()] == [1, 1, 1, 1]


@pytest.mark.parametrize("variant", DenseNN.variants())
def test_perfect_features_by_variant(variant) -> None:
    # Crops mix labels within patches, so hummingbird's memory is not augmented.
    choices: dict[str, Any] = {"ratios": (1, 2), "draws": 2, "neighbours": 3, "size": (20, 24), "augmentations": 0}
    chosen = DenseNN(variant=variant, **choices)
    maps = [blocks(*torch.arange(30).view(5, 6).fmod(4).roll(n, 1).tolist()) for n in range(4)]
    result = dense_nn(PERFECT, Coded(maps), Coded(maps), chosen)
    assert [score["miou"] for score in result.rows] == [1, 1]


def test_shuffled_labels_score_chance() -> None:
    """Four equally frequent classes that are independent of the features: IoU = (1/16) / (1/4 + 1/4 - 1/16) = 1/7."""
    maps = random_maps(60, 0, ignored=0)

    class Shuffled(Textured):
        def labels(self, index: int) -> torch.Tensor:
            return super().labels((index + 1) % len(self))

    queries = Textured(random_maps(60, 2, ignored=0))
    assert dense_nn(COLOURS, Textured(maps), queries, settings(neighbours=1)).rows[0]["miou"] > 0.4
    result = dense_nn(COLOURS, Shuffled(maps), queries, settings(neighbours=1))
    assert result.rows[0]["miou"] == pytest.approx(1 / 7, abs=0.03)


# ------------------------------------------------------------------ against a plain version


def plain(encoder: Encoder, memory: Coded, queries: Coded, chosen: DenseNN) -> np.ndarray:
    """Compute the protocol in loops over patches, with all images as memory; return labels and predictions."""
    preparation = Preparation(4, chosen.size, chosen.interpolation, chosen.seed)
    classes = len(memory.classes)
    keys, targets = [], []
    for index in range(len(memory)):
        for number in range(chosen.augmentations) if chosen.augmentations else [None]:
            view = EncodedView(index, number)
            pixels, labels = preparation.image(memory, view), preparation.labels(memory, view)
            features = F.normalize(encoder.tokens(pixels[None].float() / 255)[0], dim=-1)
            for feature, counts in zip(features.numpy(), class_counts(labels, 4, classes, 255).numpy(), strict=True):
                shares = counts.astype(float)
                if chosen.unlabelled == "first":
                    shares[0] += shares[-1]
                if chosen.unlabelled != "class":
                    if chosen.unlabelled == "drop" and shares[-1] > shares[:-1].max():
                        continue
                    shares = shares[:-1]
                    if shares.sum() == 0:
                        continue
                if chosen.patch_labels == "hard":
                    shares = (np.arange(len(shares)) == shares.argmax()).astype(float)
                keys.append(feature)
                targets.append(shares / shares.sum())
    keys, targets = np.array(keys), np.array(targets)
    confusion = np.zeros((classes, targets.shape[1]), int)
    for index in range(len(queries)):
        pixels = preparation.image(queries, EncodedView(index))
        labels = preparation.labels(queries, EncodedView(index))
        features = F.normalize(encoder.tokens(pixels[None].float() / 255)[0], dim=-1).numpy()
        votes = []
        for feature in features:
            similarity = keys @ feature
            near = np.argsort(-similarity)[: chosen.neighbours]
            weight = {
                "majority": np.ones(len(near)),
                "similarity": np.maximum(similarity[near], 0),
                "attention": np.exp((similarity[near] - similarity[near].max()) / chosen.temperature),
            }[chosen.vote]
            votes.append((weight[:, None] / weight.sum() * targets[near]).sum(axis=0))
        votes = np.array(votes)
        if chosen.score == "patch":
            for vote, counts in zip(votes, class_counts(labels, 4, classes, 255).numpy(), strict=True):
                known = counts[:-1].max() >= counts[-1] if chosen.unlabelled != "outvote" else counts[:-1].sum() > 0
                if known:
                    confusion[counts[:-1].argmax(), vote.argmax()] += 1
            continue
        scored = queries.labels(index) if chosen.score == "pixel" else labels
        grid = torch.from_numpy(votes).float().T.view(1, -1, labels.shape[0] // 4, labels.shape[1] // 4)
        predicted = F.interpolate(grid, size=tuple(scored.shape), mode="bilinear")[0].argmax(dim=0)
        for label, prediction in zip(scored.flatten().tolist(), predicted.flatten().tolist(), strict=True):
            if label != 255:
                confusion[label, prediction] += 1
    return confusion


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"unlabelled": "outvote"},
        {"unlabelled": "class"},
        {"vote": "similarity"},
        {"vote": "attention", "temperature": 0.1},
        {"patch_labels": "soft"},
        {"score": "pixel", "interpolation": "bilinear"},
        {"score": "resized", "size": (16, 24)},
        {"score": "resized", "size": (16, 24), "patch_labels": "soft", "vote": "attention", "unlabelled": "class"},
        {"score": "resized", "size": (16, 24), "patch_labels": "soft", "vote": "attention", "augmentations": 2},
        {"unlabelled": "first", "patch_labels": "soft"},
    ],
    ids=str,
)
def test_every_setting_against_a_plain_version(choices: dict[str, Any]) -> None:
    names = ("background", "b", "c", "d")
    memory, queries = Textured(pixel_maps(5, 0), names), Textured(pixel_maps(4, 1), names)
    chosen = settings(neighbours=6, **choices).for_data(4, names)
    result = dense_nn(COLOURS, memory, queries, chosen)
    expected = plain(COLOURS, memory, queries, chosen)
    found = result.rows[0]["confusion"].numpy()
    assert found.shape == expected.shape
    assert found.sum() == expected.sum()
    # Nearly equal votes may be decided differently.
    assert np.abs(found - expected).sum() <= 0.02 * expected.sum()
    assert 0.2 < result.rows[0]["miou"] < 0.98


def test_iou_of_each_class_equals_torchmetrics() -> None:
    memory, queries = Textured(random_maps(8, 4)), Textured(random_maps(8, 5))
    score = dense_nn(COLOURS, memory, queries, settings(neighbours=3)).rows[0]
    labels, predictions = [], []
    for label in range(4):
        for prediction in range(4):
            count = int(score["confusion"][label, prediction])
            labels += [label] * count
            predictions += [prediction] * count
    metric = MulticlassJaccardIndex(4, average="none")
    expected = metric(torch.tensor(predictions), torch.tensor(labels))
    assert [*score["per_class"].values()] == pytest.approx(expected.tolist(), abs=1e-6)
    assert score["miou"] == pytest.approx(float(expected.mean()), abs=1e-6)
    assert 0.1 < score["miou"] < 0.95


def test_patches_without_class_are_ignored() -> None:
    memory, queries = Coded(random_maps(6, 0)), Coded(random_maps(4, 1))
    confusion = dense_nn(PERFECT, memory, queries, settings()).rows[0]["confusion"]
    assert int(confusion.sum()) == sum(int((labels != 255).sum()) // 16 for labels in queries.maps)
    # All patches have the same feature, but only one has a class: only this one may vote.
    lonely = Coded([blocks([2, 255, 255, 255])])
    alike = Encoder.from_function(lambda images: torch.ones(len(images), 4, 1), 4)
    confusion = dense_nn(alike, lonely, Coded([blocks([2, 2, 0, 2])]), settings(neighbours=1)).rows[0]["confusion"]
    assert confusion[:, 2].sum() == 4


def test_absent_classes_are_excluded_from_the_mean() -> None:
    score = dense_nn(PERFECT, Coded([blocks([0, 1])]), Coded([blocks([0, 1])]), settings(neighbours=1)).rows[0]
    assert score["miou"] == 1
    assert np.isnan([score["per_class"][name] for name in "cd"]).all()


def test_neighbours_with_negative_similarity_vote() -> None:
    signs = iter([1.0, -1.0])  # of the memory, then of the queries
    opposed = Encoder.from_function(lambda images: next(signs) * torch.ones(len(images), 4, 1), 4)
    memory, queries = Coded([blocks([2, 2, 1, 2])]), Coded([blocks([2, 2, 0, 2])])
    chosen = settings(neighbours=4, vote="similarity", score="pixel").for_data(4, CLASSES)
    assert dense_nn(opposed, memory, queries, chosen).rows[0]["confusion"][:, 2].sum() == 4 * 16


def test_predictions_of_no_class_are_never_correct() -> None:
    """As a separate class, it lowers the recall of the true class and no other IoU."""
    memory, queries = Coded([blocks([0, 255, 255, 255])]), Coded([blocks([0, 1, 1, 1])])
    same = Encoder.from_function(lambda images: torch.eye(4)[[0, 1, 1, 1]].expand(len(images), -1, -1), 4)
    score = dense_nn(same, memory, queries, settings(neighbours=1, unlabelled="class")).rows[0]
    assert score["confusion"][1].tolist() == [0, 0, 0, 0, 3]
    assert (score["per_class"]["a"], score["per_class"]["b"]) == (1, 0)


# ------------------------------------------------------------------ invariance


def tiny_budget(**options: Any) -> Machine:
    """Limit memory so that queries and keys are searched in several parts."""
    return Machine(memory_gib=2e-3, **options)


@pytest.mark.parametrize("choices", [{}, {"score": "pixel"}], ids=str)
def test_score_is_independent_of_memory_batches_and_devices(choices: dict[str, Any]) -> None:
    memory, queries = Textured(pixel_maps(16, 0)), Textured(pixel_maps(12, 1))
    chosen = settings(ratios=(1, 4), draws=2, **choices)

    def score(machine: Machine | None) -> list[torch.Tensor]:
        result = dense_nn(COLOURS, memory, queries, chosen, machine=machine)
        return [score["confusion"] for score in result.rows]

    expected = score(None)
    for machine in (tiny_budget(), Machine(batch_size=3), Machine(devices=("cpu", "cpu")), Machine(workers=2)):
        for found, wanted in zip(score(machine), expected, strict=True):
            assert (found - wanted).abs().sum() <= 2  # of nearly equal votes


def test_half_precision_changes_the_score_little() -> None:
    memory, queries = Textured(pixel_maps(10, 0)), Textured(pixel_maps(10, 1))
    full, half = (
        dense_nn(COLOURS, memory, queries, settings(precision=precision)).rows[0]["confusion"]
        for precision in ("float32", "float16")
    )
    assert (full - half).abs().sum() <= 0.02 * full.sum()


def test_approximate_search_reports_its_recall() -> None:
    pytest.importorskip("faiss")
    memory, queries = Textured(pixel_maps(30, 0)), Textured(pixel_maps(5, 1))
    exact, all_lists, one_list = (
        dense_nn(COLOURS, memory, queries, settings(**choices)).rows[0]
        for choices in ({}, {"search": "faiss", "probes": 10_000}, {"search": "faiss", "probes": 1})
    )
    assert "recall" not in exact
    assert all_lists["recall"] == 1
    assert torch.equal(all_lists["confusion"], exact["confusion"])
    assert 0.2 < one_list["recall"] < 1


# ------------------------------------------------------------------ draws


def test_draws_of_the_memory() -> None:
    # Values reported by Balazevic et al. 2023 for Pascal VOC's trainaug and ADE20K.
    assert [len(draw_images(10582, ratio, 0, 0)) for ratio in (1, 8, 64, 128)] == [10582, 1323, 165, 83]
    assert [len(draw_images(20210, ratio, 0, 0)) for ratio in (1, 8, 64, 128)] == [20210, 2526, 316, 158]
    assert len(draw_images(10, 100, 0, 0)) == 1
    first = draw_images(100, 8, 0, 0)
    assert first == sorted(set(first))
    assert first == draw_images(100, 8, 0, 0)
    assert len({tuple(draw_images(100, 8, seed, draw)) for seed in range(3) for draw in range(3)}) == 9
    times = torch.zeros(50)
    for draw in range(400):
        times[draw_images(50, 8, 0, draw)] += 1
    assert (times - 400 * 6 / 50).abs().max() < 30


def test_mean_and_deviation_of_the_draws() -> None:
    memory, queries = Textured(pixel_maps(16, 0)), Textured(pixel_maps(5, 1))
    result = dense_nn(COLOURS, memory, queries, settings(ratios=(1, 8), draws=4))
    whole, part = result.rows
    assert (whole["ratio"], len(whole["draws"]), whole["miou_std"]) == (1, 1, None)
    assert (part["ratio"], len(part["draws"])) == (8, 4)
    assert part["miou"] == pytest.approx(np.mean(part["draws"]))
    assert part["miou_std"] == pytest.approx(np.std(part["draws"], ddof=1))
    assert part["miou_std"]
    assert part["memory_patches"] < whole["memory_patches"] / 4
    assert int(part["confusion"].sum()) == 4 * int(whole["confusion"].sum())


def test_only_drawn_images_are_read() -> None:
    seen: set[int] = set()

    class Watched(Coded):
        def load(self, index: int) -> torch.Tensor:
            seen.add(index)
            return super().load(index)

    dense_nn(PERFECT, Watched(random_maps(40, 0)), Coded(random_maps(2, 1)), settings(ratios=(20,), draws=3))
    assert 2 <= len(seen) <= 6


def test_a_bounded_memory_is_divided_evenly() -> None:
    memory, queries = Coded(random_maps(10, 0)), Coded(random_maps(3, 1))
    result = dense_nn(PERFECT, memory, queries, settings(memory_patches=55, neighbours=2))
    assert result.rows[0]["memory_patches"] == 50
    # Every class keeps some patches, and with perfect features some are enough.
    assert result.rows[0]["miou"] > 0.9


def test_predictions_for_pictures() -> None:
    maps = random_maps(9, 1)
    result = dense_nn(PERFECT, Coded(random_maps(6, 0)), Coded(maps), settings(), pictures=3)
    assert [panel.name for panel in result.panels] == ["0", "4", "8"]
    for panel in result.panels:
        assert torch.equal(panel.prediction, maps[int(panel.name)])


# ------------------------------------------------------------------ settings


HUMMINGBIRD = {
    "neighbours": 30,
    "vote": "attention",
    "temperature": 0.02,
    "patch_labels": "soft",
    "unlabelled": "first",
    "score": "resized",
    "mean": "matched",
    "size": (504, 504),
    "interpolation": "bilinear",
    "augmentations": 2,
    "memory_patches": 10_240_000,
}


@pytest.mark.parametrize(
    ("variant", "differences"),
    [
        ("hummingbird", {}),
        ("hummingbird-strict", {"unlabelled": "class", "mean": "present"}),
        ("dip", {"temperature": 0.07, "mean": "present"}),
        ("franca", {"size": (518, 518), "memory_patches": 0}),
    ],
)
def test_settings_of_variants(variant: Any, differences: dict[str, Any]) -> None:
    decided = DenseNN(variant=variant).for_data(14, ["road", "sky"])
    assert {name: getattr(decided, name) for name in HUMMINGBIRD} == HUMMINGBIRD | differences


def test_explicit_settings_override_the_variant() -> None:
    own = DenseNN(variant="hummingbird", neighbours=7, size=(64, 96), memory_patches=0).for_data(16, ["road"])
    assert (own.neighbours, own.size, own.memory_patches, own.vote) == (7, (64, 96), 0, "attention")
    assert DenseNN().for_data(16, ["road"]).size is None


def test_pixels_without_class_are_the_first_class_except_in_ade20k() -> None:
    def unlabelled(variant: Any, classes: list[str]) -> str:
        return DenseNN(variant=variant).for_data(16, classes).unlabelled

    ade20k, cityscapes, voc = (SEGMENTATION_SETS[name].classes for name in ("ade20k", "cityscapes", "voc"))
    assert [unlabelled("hummingbird", classes) for classes in (ade20k, cityscapes, voc)] == ["class", "first", "first"]
    strict = [unlabelled("hummingbird-strict", classes) for classes in (ade20k, cityscapes, voc)]
    assert strict == ["class", "class", "first"]


# ------------------------------------------------------------------ rules of variants


# Four patches of one feature each: those of the first kind are of class 0 or 1, those of the second of class 2.
TWO_KINDS = Encoder.from_function(lambda images: torch.eye(2)[[0, 0, 1, 1]].expand(len(images), -1, -1), 4)


def score_of(variant: Any, memory: list[int], queries: list[int], **choices: Any) -> dict[str, Any]:
    """Return the score of one image of four patches, with a memory of one image without augmentation."""
    given = {"ratios": (1,), "size": (4, 16), "augmentations": 0, "neighbours": 2, "score": "patch", **choices}
    known, asked = (Coded([blocks(labels)]) for labels in (memory, queries))
    return dense_nn(TWO_KINDS, known, asked, DenseNN(variant=variant, **given)).rows[0]


def test_void_is_the_first_class_or_separate_by_strict_rules() -> None:
    void, scored = [255, 255, 2, 2], [0, 0, 2, 2]
    assert score_of("hummingbird-strict", void, scored)["per_class"]["a"] == 0
    assert score_of("hummingbird", void, scored)["per_class"]["a"] == 1
    assert score_of("dip", void, scored)["per_class"]["a"] == 1


def test_absent_classes_count_as_0_by_toolkit_rules() -> None:
    labels = [0, 0, 2, 2]  # two of four classes
    assert score_of("hummingbird-strict", labels, labels)["miou"] == 1
    assert score_of("dip", labels, labels)["miou"] == 1
    assert score_of("hummingbird", labels, labels)["miou"] == 0.5
    assert score_of("franca", labels, labels)["miou"] == 0.5


def test_the_toolkit_matches_predictions_to_classes() -> None:
    memory, queries = [0, 0, 2, 2], [2, 2, 0, 0]  # everything is wrong, but consistently
    assert score_of("hummingbird-strict", memory, queries)["miou"] == 0
    assert score_of("hummingbird", memory, queries)["per_class"] == {"a": 1, "b": 0, "c": 1, "d": 0}


def test_no_class_counts_in_the_toolkit_mean_if_it_is_a_class() -> None:
    """As for ADE20K: 151 classes in the mean, one of which is never correct."""
    labels = [0, 0, 2, 2]
    assert score_of("hummingbird", labels, labels, unlabelled="class")["miou"] == pytest.approx(2 / 5)


def test_lower_temperatures_give_the_nearest_more_weight() -> None:
    """Of three neighbours with cosines 1, 0.9 and 0.9, the last two win at 0.2 and lose at 0.07 and below."""
    features = torch.tensor([[1.0, 0.0], [0.9, 0.19**0.5], [0.9, 0.19**0.5], [0.0, 1.0]])
    encoder = Encoder.from_function(lambda images: features.expand(len(images), -1, -1), 4)
    memory, queries = Coded([blocks([0, 1, 1, 2])]), Coded([blocks([0, 255, 255, 255])])

    def right(variant: Any, **choices: Any) -> bool:
        given = {"ratios": (1,), "size": (4, 16), "augmentations": 0, "neighbours": 3, "score": "patch", **choices}
        return dense_nn(encoder, memory, queries, DenseNN(variant=variant, **given)).rows[0]["per_class"]["a"] == 1

    # exp(-0.1 / 0.02) = 0.007 and exp(-0.1 / 0.07) = 0.24, twice each; exp(-0.1 / 0.2) = 0.61.
    assert right("hummingbird")
    assert right("dip")
    assert not right("dip", temperature=0.2)


def test_lists_of_the_memory(tmp_path: Path) -> None:
    (tmp_path / "1_div_2").mkdir()
    for name, listed in (("a", "1\n0\n"), ("b", "3\n")):
        (tmp_path / "1_div_2" / f"{name}.txt").write_text(listed)

    class Named(Coded):
        def name(self, index: int) -> str:
            return f"images/{index}.jpg"

    memory = Named(random_maps(4, 0))
    chosen = settings(ratios=(1, 2), lists=str(tmp_path))
    assert images_of(memory, 2, chosen) == [[0, 1], [3]]
    whole, part = dense_nn(PERFECT, memory, Coded(random_maps(2, 1)), chosen).rows
    assert (len(whole["draws"]), len(part["draws"])) == (1, 2)
    assert part["memory_patches"] < whole["memory_patches"]
    assert "draws" not in chosen.effective()
    with pytest.raises(InputError, match=r"1_div_8 has no lists \(\*\.txt\) for ratio 8: omit the ratio"):
        images_of(memory, 8, chosen)
    (tmp_path / "1_div_2" / "c.txt").write_text("7")
    with pytest.raises(InputError, match=r"c\.txt lists 7, which is not among the 4 images of the memory"):
        images_of(memory, 2, chosen)
    (tmp_path / "1_div_2" / "c.txt").write_text("")
    with pytest.raises(InputError, match=r"c\.txt is empty"):
        images_of(memory, 2, chosen)


def test_unused_settings_are_not_listed() -> None:
    used = settings().for_data(4, CLASSES).effective()
    assert "temperature" not in used
    assert "probes" not in used
    assert "draws" not in used
    assert {"vote", "unlabelled", "score", "patch_labels", "interpolation", "seed"} <= set(used)
    assert settings(vote="attention", ratios=(1, 8)).for_data(4, CLASSES).effective()["temperature"] == 0.02


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"neighbours": 0}, "neighbours must be >= 1, got 0"),
        ({"draws": 0}, "draws must be >= 1, got 0"),
        ({"augmentations": -1}, "augmentations must be >= 0, got -1"),
        ({"ratios": ()}, "ratios .* got none"),
        ({"ratios": (1, 0)}, r"ratios must be >= 1, got \(1, 0\)"),
        ({"ratios": (8, 8)}, "ratios must be distinct"),
        ({"temperature": 0.0}, "temperature must be > 0"),
        ({"size": (10, 12)}, "size .* 4, got 10x12"),
        ({"neighbours": 1000}, "neighbours .* got 1000 with 45"),
    ],
    ids=str,
)
def test_invalid_settings(choices: dict[str, Any], message: str) -> None:
    good = Coded(random_maps(2, 0))
    with pytest.raises(ValueError, match=message):
        dense_nn(PERFECT, good, good, settings(**choices))


def test_invalid_sets() -> None:
    good = Coded(random_maps(2, 0))
    with pytest.raises(ValueError, match="different classes"):
        dense_nn(PERFECT, good, Coded(good.maps, classes=("a", "b")), settings())
    with pytest.raises(ValueError, match="no labelled patch at ratio 1"):
        dense_nn(PERFECT, Coded([torch.full((8, 8), 255)]), good, settings())
    with pytest.raises(ValueError, match="the queries must hold at least one image, got 0"):
        dense_nn(PERFECT, good, Coded([]), settings())
    wrong = torch.zeros(8, 8, dtype=torch.long)
    wrong[0, 0] = 4
    with pytest.raises(ValueError, match=r"labels must be in 0\.\.3 or 255 \(ignored\), got 4"):
        dense_nn(PERFECT, Coded([wrong]), good, settings())


@pytest.mark.parametrize("score", ["patch", "pixel", "resized"])
def test_queries_without_labels_are_refused(score: Any) -> None:
    queries = Coded([torch.full((8, 8), 255)])
    with pytest.raises(ValueError, match="the queries cannot be scored"):
        dense_nn(PERFECT, Coded(random_maps(2, 0)), queries, settings(score=score))


def test_a_bound_below_one_patch_for_each_image_is_refused_before_any_work() -> None:
    memory = Coded(random_maps(4, 0))
    never = Encoder.from_function(lambda images: pytest.fail("encoded"), 4)
    with pytest.raises(ValueError, match=r"memory_patches must be at least .*, 8, got 7"):
        dense_nn(never, memory, memory, settings(memory_patches=7, augmentations=2, size=(20, 24)))


@pytest.mark.parametrize("score", ["patch", "pixel"])
def test_every_progress_phase_ends_once(score: Any) -> None:
    reports = []
    images = Coded(random_maps(3, 0))
    dense_nn(
        PERFECT,
        images,
        images,
        settings(score=score, ratios=(1, 3), draws=2),
        progress=lambda what, done, total: reports.append((what, done == total)),
    )
    assert [what for what, ended in reports if ended] == [
        "features of the memory",
        "features of the queries",
        "labels of the memory",
        "search [%]",
    ]
    assert [ended for what, ended in reports if what == "search [%]"][-1]


def test_labels_are_read_once_for_all_memories(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, queries = Coded(random_maps(3, 0)), Coded(random_maps(3, 1))
    chosen = settings(score="pixel", ratios=(1, 3), draws=2)
    together = dense_nn(PERFECT, memory, queries, chosen).rows
    read = []
    labels = queries.labels
    monkeypatch.setattr(queries, "labels", lambda index: read.append(index) or labels(index))
    monkeypatch.setattr("cribo.features.extraction.available_memory", lambda device: 1)
    one_by_one = dense_nn(PERFECT, memory, queries, chosen).rows
    assert [score["draws"] for score in one_by_one] == [score["draws"] for score in together]
    assert sorted(read) == [0, 0, 1, 1, 2, 2]  # for the counts, and for the score


# ------------------------------------------------------------------ real images


def test_scenes_can_be_scored() -> None:
    memory, queries = Scenes(6, size=32), Scenes(3, size=32, first=6)
    result = dense_nn(mean_colour_encoder(8), memory, queries, settings())
    assert int(result.rows[0]["confusion"].sum()) == 3 * 16
    assert 0 <= result.rows[0]["miou"] < 0.6


@pytest.mark.slow
def test_mean_colour_on_camvid(camvid: Path) -> None:
    """An eighth of the training images as memory: the baseline is 15.5 %, and a draw changes it by a point."""
    memory, queries = (open_segmentation("camvid", camvid, split) for split in ("train", "val"))
    result = dense_nn(mean_colour_encoder(16), memory, queries, DenseNN(ratios=(8,), draws=1))
    assert 100 * result.rows[0]["miou"] == pytest.approx(15.5, abs=1.5)


@pytest.mark.slow
def test_an_untrained_backbone_is_better_than_chance(camvid: Path) -> None:
    splits = SegmentationData("camvid", str(camvid), limit=16).open()
    args = {"depth": 2, "embed_dim": 64, "num_heads": 1}
    encoder = Encoder(build_backbone("vit_tiny_patch16_224", args=args))
    result = dense_nn(encoder, splits.train, splits.val, DenseNN(ratios=(1,)))
    assert 0.05 < result.rows[0]["miou"] < 0.2
