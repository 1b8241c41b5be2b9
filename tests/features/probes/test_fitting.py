"""The choice of a probe, its calibration, and its predictions."""

import dataclasses
import json
from typing import Any

import pytest
import torch
from torch.nn.functional import normalize, one_hot

from cribo.features.config import Head
from cribo.features.probes.fitting import (
    Choice,
    FittedProbe,
    LabelledPatches,
    Probe,
    candidate_probes,
    choose,
    concatenate,
    default_probe,
    thinned,
)
from cribo.features.scores import calibration_error

BLOCKS = (6, 8, 9, 10, 11, 12)
CLASSES, WIDTH = 4, 16


def example(seed: int, *, informative: tuple[int, ...] = (), noise: float = 0.6, count: int = 80) -> LabelledPatches:
    """Return an example in which only the features of the informative blocks depend on the class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    centres = torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(99))
    features = torch.randn(count, len(BLOCKS), WIDTH, generator=generator)
    for block in informative:
        place = BLOCKS.index(block)
        features[:, place] = centres[labels] + noise * features[:, place]
    halves = torch.randint(0, 2, (count,), generator=generator)
    return LabelledPatches(normalize(features, dim=-1), one_hot(labels, CLASSES).float(), halves)


def examples(number: int, **options) -> list[LabelledPatches]:
    return [example(seed, **options) for seed in range(number)]


def chosen(parts: list[LabelledPatches], candidates: list[Probe] | None = None) -> Choice:
    everything = candidate_probes(BLOCKS)
    return choose(parts, candidates or everything, BLOCKS, neighbours=5, temperature=0.07)


def labelled(fitted: FittedProbe, part: LabelledPatches) -> torch.Tensor:
    """Return the class probabilities of each patch of an example with features of all `BLOCKS`."""
    return fitted(fitted.rows(part.features[:, [BLOCKS.index(block) for block in fitted.choice.probe.blocks]]))


def test_the_informative_block_is_chosen() -> None:
    choice = chosen(examples(9, informative=(9,), noise=1.0))
    assert 9 in choice.probe.blocks
    assert choice.expected is not None
    assert choice.last_block is not None
    assert choice.expected > choice.last_block + 0.3
    assert set(choice.per_class) == set(range(CLASSES))
    assert choice.left_out == "one image at a time"
    assert chosen(examples(11, informative=(9,))).left_out == "a tenth of the images at a time"


def test_a_clear_lead_of_the_last_block_is_followed() -> None:
    choice = chosen(examples(9, informative=(12,), noise=1.0))
    assert 12 in choice.probe.blocks


def test_without_a_clear_lead_the_default_stays() -> None:
    candidates = candidate_probes(BLOCKS)
    default = default_probe(candidates, BLOCKS)
    assert default == Probe((6, 8, 9, 10), False, "ridge")
    for count in (2, 8):
        assert chosen(examples(count, count=800)).probe == default  # no block is informative
    assert chosen(examples(8, informative=BLOCKS, noise=0.1)).probe == default


def test_the_default_stays_with_a_single_example_even_if_another_probe_leads_clearly() -> None:
    parts = examples(9, informative=(12,), noise=1.0)
    assert 12 in chosen(parts).probe.blocks
    assert chosen(parts[:1]).probe == Probe((6, 8, 9, 10), False, "ridge")


def test_fixed_values_are_not_chosen() -> None:
    fixed: dict[str, Any] = {"whiten": False, "head": "knn", "penalty": 0.1, "prior": 0.7}
    candidates = candidate_probes(BLOCKS, blocks=(8,), **fixed)
    assert candidates == [Probe((8,), False, "knn", 0.1, 0.7)]
    assert chosen(examples(5, informative=(12,)), candidates).probe == candidates[0]
    candidates = candidate_probes(BLOCKS, whiten=True, head="ridge", penalty=0.1)
    assert {(probe.whiten, probe.head, probe.penalty) for probe in candidates} == {(True, "ridge", 0.1)}
    assert candidate_probes((10,), **fixed) == [Probe((10,), False, "knn", 0.1, 0.7)]


def test_a_clear_lead_of_a_prior_is_followed() -> None:
    def imbalanced(seed: int) -> LabelledPatches:
        """Return an example with few patches of all classes but the first."""
        part = example(seed, informative=BLOCKS, noise=3.0, count=800)
        kept = (part.shares[:, 0] > 0) | (torch.arange(800) % 20 == 0)
        return LabelledPatches(*(values[kept] for values in part))

    parts = [imbalanced(seed) for seed in range(9)]
    first, better = candidates = [Probe((12,), False, "ridge", prior=prior) for prior in (1.0, 0.5)]
    assert default_probe(candidates, BLOCKS) == first
    assert chosen(parts, candidates).probe == better
    assert chosen(parts[:1], candidates).probe == first


def test_a_single_example_is_scored_by_halves_if_both_have_labels() -> None:
    part = example(0, informative=BLOCKS)
    choice = chosen([part])
    assert choice.left_out == "each half of the image"
    assert choice.expected is not None
    assert choice.expected > 0.8
    half = LabelledPatches(*(values[part.halves == 0] for values in part))
    choice = chosen([half])
    assert (choice.expected, choice.last_block) == (None, None)
    assert choice.left_out == ""


@pytest.mark.parametrize("head", ["knn", "ridge", "both"])
def test_confidence_is_the_share_of_correct_labels(head: Head) -> None:
    parts = examples(8, informative=(12,), noise=2.0, count=400)
    new = example(100, informative=(12,), noise=2.0, count=4000)
    fit: dict[str, Any] = {"neighbours": 20, "temperature": 0.3}
    choice = choose(parts, candidate_probes(BLOCKS, blocks=(12,), whiten=False, head=head), BLOCKS, **fit)

    def predicted(choice: Choice) -> tuple[torch.Tensor, torch.Tensor]:
        fitted = FittedProbe(parts, choice, BLOCKS, **fit, device=torch.device("cpu"))
        confidence, label = labelled(fitted, new).max(dim=1)
        return confidence, (label == new.shares.argmax(dim=1)).float()

    confidence, right = predicted(choice)
    assert 0.5 < right.mean() < 0.95
    error = calibration_error(confidence, right)
    assert error < 0.06
    assert error < 0.6 * calibration_error(*predicted(dataclasses.replace(choice, sharpness=1.0)))
    order = confidence.argsort()
    assert right[order[:1000]].mean() < right[order[-1000:]].mean() - 0.1


def test_calibration_error_is_the_mean_gap_of_confidence_and_accuracy() -> None:
    confidence = torch.tensor([0.95, 0.95, 0.95, 0.95, 0.55, 0.55, 1.0])
    right = torch.tensor([1.0, 1, 1, 0, 0, 1, 1])
    expected = (5 * abs((4 * 0.95 + 1) / 5 - 4 / 5) + 2 * abs(0.55 - 0.5)) / 7
    assert calibration_error(confidence, right) == pytest.approx(expected, abs=1e-6)


def test_a_fitted_probe_recovers_labels_from_informative_features() -> None:
    parts = examples(3, informative=(6, 8, 9, 10), noise=0.2)
    new = example(50, informative=(6, 8, 9, 10), noise=0.2)
    for probe in candidate_probes(BLOCKS, blocks=(6, 8, 9, 10)):
        choice = Choice(probe, 1.0, None, None, {}, "")
        fitted = FittedProbe(parts, choice, BLOCKS, neighbours=5, temperature=0.07, device=torch.device("cpu"))
        found = labelled(fitted, new)
        assert (found.argmax(dim=1) == new.shares.argmax(dim=1)).float().mean() > 0.97
        torch.testing.assert_close(found.sum(dim=1), torch.ones(len(found)))


def test_rows_have_unit_length_and_blocks_have_equal_weight() -> None:
    features = example(0).features * torch.tensor([1.0, 5, 1, 1, 1, 1])[:, None]
    rows = concatenate(features, [0, 1], None)
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(len(rows)))
    torch.testing.assert_close(rows[:, :WIDTH].norm(dim=1), rows[:, WIDTH:].norm(dim=1))


def test_large_examples_lose_patches_before_small_ones() -> None:
    parts = [example(0, count=100), example(1, count=10), example(2, count=60)]
    assert [len(part.shares) for part in thinned(parts, 90)] == [40, 10, 40]
    assert [len(part.shares) for part in thinned(parts, 1000)] == [100, 10, 60]
    torch.testing.assert_close(thinned(parts, 90)[0].features, parts[0].features[:40])


def test_a_choice_round_trips_through_json() -> None:
    choice = chosen(examples(3, informative=(9,)))
    again = Choice.from_json(json.loads(json.dumps(choice.as_json())))
    assert again == choice


def test_a_class_of_a_single_example_is_not_measured() -> None:
    parts = examples(3, informative=BLOCKS, noise=0.1)
    for number in (1, 2):
        kept = parts[number].shares[:, 3] == 0
        parts[number] = LabelledPatches(*(values[kept] for values in parts[number]))
    choice = chosen(parts)
    assert set(choice.per_class) == {0, 1, 2}
    assert sum(choice.per_class.values()) / 3 == pytest.approx(choice.expected)
    assert all(score > 0.9 for score in choice.per_class.values())


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_equal_features_get_the_most_frequent_class(value: float) -> None:
    shares = one_hot(torch.tensor([0, 1, 1, 1]), 2).float()
    part = LabelledPatches(torch.full((4, 6, WIDTH), value), shares, torch.tensor([0, 1, 0, 1]))
    for probe in candidate_probes(BLOCKS, blocks=(12,), penalty=0.01, prior=0.25):
        assert choose([part] * 4, [probe], BLOCKS, neighbours=4, temperature=0.07).expected is not None
        choice = Choice(probe, 1.0, None, None, {}, "")
        fitted = FittedProbe([part] * 4, choice, BLOCKS, neighbours=16, temperature=0.07, device=torch.device("cpu"))
        found = labelled(fitted, part)
        assert found.argmax(dim=1).tolist() == [1, 1, 1, 1]


def test_few_patches_are_not_whitened() -> None:
    def disturbed(count: int) -> list[LabelledPatches]:
        """Return examples whose features vary most in directions independent of the classes."""
        parts = examples(8, informative=BLOCKS, noise=0.3, count=count)
        generator = torch.Generator().manual_seed(0)
        directions = torch.randn(4, WIDTH, generator=generator)
        amounts = [torch.randn(count, 1, 4, generator=generator) for _ in parts]
        return [
            part._replace(features=normalize(part.features + amount @ directions, dim=-1))
            for part, amount in zip(parts, amounts, strict=True)
        ]

    candidates = candidate_probes(BLOCKS, blocks=(12,), whiten=None, head="knn")
    assert chosen(disturbed(9), candidates).probe.whiten
    assert not chosen(disturbed(7), candidates).probe.whiten  # 56 patches of 16 channels
    only = candidate_probes(BLOCKS, blocks=None, whiten=True, head=None)
    assert chosen(disturbed(7), only).probe.whiten


def test_a_network_with_one_feature_map_is_read_by_both_heads() -> None:
    candidates = candidate_probes((1,))
    assert {probe.blocks for probe in candidates} == {(1,)}
    assert default_probe(candidates, (1,)) == Probe((1,), False, "both")
