from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cribo.method import blocks, cluster_tokens, cluster_tokens_kmeans, draw_initial_tokens, reference

BOTH = [partial(cluster_tokens, position_weight=1.0), cluster_tokens_kmeans]


def scene(seed: int, *, batch: int = 3, tokens: int = 60, dim: int = 12, objects: int = 6):
    """Random tokens with some structure, coordinates that overlap between the views, and initial tokens."""
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randint(4, (batch, tokens), generator=generator)
    means = torch.randn(batch, 4, dim, generator=generator)
    noise = torch.randn(batch, tokens, dim, generator=generator)
    features = means.gather(1, parts[..., None].expand(-1, -1, dim)) + noise
    coordinates = 224 * torch.rand(batch, tokens, 2, generator=generator)
    initial = torch.stack([torch.randperm(tokens, generator=generator)[:objects] for _ in range(batch)])
    return features, coordinates, initial


def quarters(seed: int, *, batch: int = 4, side: int = 6, objects: int = 4):
    """Two views of images with four distinct quarters and one initial token in each, so labels are unambiguous."""
    generator = torch.Generator().manual_seed(seed)
    place = (torch.arange(side) + 0.5) * (224 / side)
    grid = torch.stack(torch.meshgrid(place, place, indexing="xy"), dim=-1).flatten(0, 1)
    coordinates = torch.cat((grid, grid + 3)).expand(batch, -1, -1).contiguous()
    quarter = (grid[:, 0] > 112).long() + 2 * (grid[:, 1] > 112).long()
    quarter = torch.cat((quarter, quarter)).expand(batch, -1)
    tokens = 3 * F.one_hot(quarter, 16).float()
    tokens += 0.1 * torch.randn(tokens.shape, generator=generator)
    initial = torch.stack([(quarter[0] == q).nonzero()[0, 0] for q in range(objects)]).expand(batch, -1)
    return tokens, coordinates, initial, quarter


def literal_labels(tokens: Tensor, coordinates: Tensor, initial: Tensor, **options) -> Tensor:
    """Return the reference's labels (B, T) in float64, image by image."""
    images = zip(tokens.double(), coordinates.double(), initial, strict=True)
    return torch.stack([reference.cluster(*image, **options) for image in images])


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("marginals", ["adaptive", "uniform"])
@pytest.mark.parametrize("position_weight", [0.0, 1.0, 4.0])
@pytest.mark.parametrize("spacing", [None, 16])
def test_labels_match_the_reference(seed: int, marginals, position_weight: float, spacing: int | None) -> None:
    tokens, coordinates, initial = scene(seed)
    if spacing is not None:  # tokens at equal positions: distances of exactly 0 are ignored
        coordinates = (coordinates / spacing).round() * spacing
    options = {"position_weight": position_weight, "marginals": marginals}
    labels = cluster_tokens(tokens, coordinates, num_objects=6, initial_tokens=initial, **options)
    assert (labels == literal_labels(tokens, coordinates, initial, **options)).float().mean() >= 0.999
    assert len(labels.unique()) > 1


@pytest.mark.parametrize(
    "options",
    [
        {"iterations": 1},
        {"iterations": 2, "sinkhorn_iterations": 1},
        {"iterations": 9, "sharpness": 5.0},
        {"sinkhorn_iterations": 20, "sharpness": 50.0},
    ],
)
def test_every_option_matches_the_reference(options: dict) -> None:
    tokens, coordinates, initial = scene(11)
    labels = cluster_tokens(tokens, coordinates, num_objects=6, position_weight=2.0, initial_tokens=initial, **options)
    assert (
        labels == literal_labels(tokens, coordinates, initial, position_weight=2.0, **options)
    ).float().mean() >= 0.999


def test_coordinates_far_from_the_origin() -> None:
    """With a matrix product, a token's distance to itself would be slightly above 0 and not be ignored."""
    tokens, coordinates, initial = scene(3)
    coordinates = coordinates.round()
    far = coordinates + 2.0**20
    labels = cluster_tokens(tokens, far, num_objects=6, position_weight=4.0, initial_tokens=initial)
    assert (labels == literal_labels(tokens, coordinates, initial, position_weight=4.0)).float().mean() >= 0.999


@pytest.mark.parametrize("marginals", ["adaptive", "uniform"])
def test_labels_do_not_depend_on_the_order_of_the_tokens(marginals) -> None:
    tokens, coordinates, initial, _ = quarters(1)
    order = torch.randperm(tokens.shape[1], generator=torch.Generator().manual_seed(3))
    place = order.argsort()
    options = {"num_objects": 4, "position_weight": 1.0, "marginals": marginals}
    labels = cluster_tokens(tokens, coordinates, initial_tokens=initial, **options)
    shuffled = cluster_tokens(tokens[:, order], coordinates[:, order], initial_tokens=place[initial], **options)
    assert torch.equal(shuffled, labels[:, order])


def test_order_of_random_tokens_changes_few_labels() -> None:
    """Sums in another order round differently, which can change tokens between two clusters."""
    tokens, coordinates, initial = scene(2, batch=8)
    order = torch.randperm(tokens.shape[1], generator=torch.Generator().manual_seed(3))
    options = {"num_objects": 6, "position_weight": 1.0}
    labels = cluster_tokens(tokens, coordinates, initial_tokens=initial, **options)
    shuffled = cluster_tokens(
        tokens[:, order], coordinates[:, order], initial_tokens=order.argsort()[initial], **options
    )
    assert (shuffled == labels[:, order]).float().mean() >= 0.99


@pytest.mark.parametrize("cluster", BOTH)
def test_labels_do_not_depend_on_batch_mates(cluster) -> None:
    """Matrix products of another batch size may round differently; with clear margins, no label may change."""
    tokens, coordinates, initial, _ = quarters(2)
    tokens[1] *= 1000  # would affect a scaling over the batch
    coordinates[2] *= 50
    together = cluster(tokens, coordinates, num_objects=4, initial_tokens=initial)
    for image in range(len(tokens)):
        one = slice(image, image + 1)
        alone = cluster(tokens[one], coordinates[one], num_objects=4, initial_tokens=initial[one])
        assert torch.equal(alone[0], together[image])


def test_labels_of_random_images_do_not_depend_on_batch_mates() -> None:
    tokens, coordinates, initial = scene(9, batch=8)
    options = {"num_objects": 6, "position_weight": 1.0}
    together = cluster_tokens(tokens, coordinates, initial_tokens=initial, **options)
    mates = torch.cat((tokens[:1], 100 * torch.randn(7, *tokens.shape[1:])))
    others = cluster_tokens(mates, coordinates * 3, initial_tokens=initial, **options)
    assert (others[0] == together[0]).float().mean() >= 0.99


def test_clear_parts_are_found() -> None:
    tokens, coordinates, initial, quarter = quarters(3)
    for cluster in (*BOTH, partial(cluster_tokens, position_weight=0.0)):
        labels = cluster(tokens, coordinates, num_objects=4, initial_tokens=initial)
        assert torch.equal(labels, quarter)


def test_position_separates_equal_tokens() -> None:
    """Two distant groups of equal tokens, which only the positional cue can separate."""
    generator = torch.Generator().manual_seed(0)
    left, right = 20 * torch.rand(1, 30, 2, generator=generator), 20 * torch.rand(1, 30, 2, generator=generator)
    coordinates = torch.cat((left, right + 200), dim=1)
    tokens = 1 + 0.01 * torch.randn(1, 60, 8, generator=generator)
    labels = cluster_tokens(
        tokens,
        coordinates,
        num_objects=2,
        position_weight=4.0,
        initial_tokens=torch.tensor([[0, 30]]),
    )
    assert torch.equal(labels[0], (torch.arange(60) >= 30).long())


def test_equal_coordinates_give_no_cue() -> None:
    tokens, _, initial = scene(4)
    coordinates = torch.full((3, 60, 2), 17.0)
    options = {"num_objects": 6, "initial_tokens": initial}
    with_position = cluster_tokens(tokens, coordinates, position_weight=2.0, **options)
    without = cluster_tokens(tokens, coordinates, position_weight=0.0, **options)
    assert torch.equal(with_position, without)


@pytest.mark.parametrize("cluster", BOTH)
@pytest.mark.parametrize(
    ("tokens", "coordinates"),
    [(torch.ones(2, 10, 3), torch.zeros(2, 10, 2)), (torch.zeros(2, 10, 3), torch.rand(2, 10, 2))],
    ids=["equal", "zero"],
)
def test_equal_and_zero_tokens_do_not_break(cluster, tokens: Tensor, coordinates: Tensor) -> None:
    labels = cluster(tokens, coordinates, num_objects=3, initial_tokens=torch.arange(3).expand(2, -1))
    assert ((labels >= 0) & (labels < 3)).all()


@pytest.mark.parametrize("cluster", BOTH)
def test_as_many_clusters_as_tokens(cluster) -> None:
    tokens, start = 5 * torch.eye(8)[None], torch.randperm(8)[None]
    labels = cluster(tokens, torch.rand(1, 8, 2), num_objects=8, initial_tokens=start)
    assert labels[0].unique().numel() == 8


@pytest.mark.parametrize("cluster", BOTH)
def test_one_cluster_takes_all(cluster) -> None:
    tokens, coordinates, initial = scene(0)
    assert (cluster(tokens, coordinates, num_objects=1, initial_tokens=initial[:, :1]) == 0).all()


@pytest.mark.parametrize("cluster", BOTH)
def test_an_empty_batch_gives_no_labels(cluster) -> None:
    start = torch.zeros(0, 2, dtype=torch.long)
    labels = cluster(torch.zeros(0, 8, 4), torch.zeros(0, 8, 2), num_objects=2, initial_tokens=start)
    assert labels.shape == (0, 8)


@pytest.mark.parametrize("seed", range(3))
def test_kmeans_against_a_loop(seed: int) -> None:
    tokens, coordinates, initial = scene(seed)
    labels = cluster_tokens_kmeans(tokens, coordinates, num_objects=6, initial_tokens=initial)
    for image in range(len(tokens)):
        unit = [row / row.norm() for row in tokens[image].double()]
        centroids = [unit[first] for first in initial[image]]
        nearest: list[int] = []
        for _ in range(5):
            nearest = [int(torch.stack([row @ c for c in centroids]).argmax()) for row in unit]
            members = [[row for row, label in zip(unit, nearest, strict=True) if label == k] for k in range(6)]
            sums = [torch.stack(rows).sum(dim=0) if rows else torch.zeros(12).double() for rows in members]
            centroids = [s / s.norm() if s.any() else s for s in sums]
        assert labels[image].tolist() == nearest


def test_draws_depend_on_the_generator_only() -> None:
    def draw(seed: int) -> Tensor:
        return draw_initial_tokens(60, 6, generator=torch.Generator().manual_seed(seed))

    before = torch.get_rng_state()
    first = draw(1)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(draw(1), first)
    assert not torch.equal(draw(2), first)


def test_initial_tokens_are_drawn_without_replacement_and_uniformly() -> None:
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack([draw_initial_tokens(8, 3, generator=generator) for _ in range(4000)])
    assert all(len(set(draw)) == 3 for draw in draws.tolist())
    counts = draws.flatten().bincount(minlength=8)
    assert (counts - 1500).abs().max() < 150  # 5 standard deviations


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_no_label(dtype: torch.dtype) -> None:
    tokens, coordinates, initial = scene(8)
    options = {"num_objects": 6, "initial_tokens": initial}
    labels = cluster_tokens(tokens, coordinates, position_weight=1.0, **options)
    means = cluster_tokens_kmeans(tokens, coordinates, **options)
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(cluster_tokens(tokens, coordinates, position_weight=1.0, **options), labels)
        assert torch.equal(cluster_tokens_kmeans(tokens, coordinates, **options), means)


def test_half_precision_tokens_are_clustered_in_float32() -> None:
    tokens, coordinates, initial = scene(8)
    half = tokens.bfloat16()
    options = {"num_objects": 6, "position_weight": 1.0, "initial_tokens": initial}
    assert torch.equal(
        cluster_tokens(half, coordinates, **options), cluster_tokens(half.float(), coordinates, **options)
    )


def test_inputs_are_not_modified() -> None:
    tokens, coordinates, initial = scene(8)
    copies = tokens.clone(), coordinates.clone(), initial.clone()
    cluster_tokens(tokens.requires_grad_(), coordinates, num_objects=6, position_weight=1.0, initial_tokens=initial)
    for tensor, copy in zip((tokens, coordinates, initial), copies, strict=True):
        assert torch.equal(tensor.detach(), copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"position_weight": -1.0}, "position_weight must be >= 0, got -1"),
        ({"marginals": "even"}, "marginals .* got 'even'"),
        ({"sharpness": 0.0}, "sharpness must be > 0 .* got 0"),
        ({"sinkhorn_iterations": 0}, "sinkhorn_iterations must be >= 1, got 0"),
        ({"iterations": 0}, "^iterations must be >= 1, got 0"),
        ({"num_objects": 0}, r"num_objects .* \(60\), got 0"),
        ({"num_objects": 61}, r"num_objects .* \(60\), got 61"),
        ({"tokens": torch.zeros(60, 12)}, r"tokens .* \(B, T, D\), got \(60, 12\)"),
        ({"coordinates": torch.zeros(3, 30, 2)}, r"coordinates .* \(3, 60, 2\), got"),
        ({"initial_tokens": torch.zeros(3, 5).long()}, r"initial_tokens .* \(3, 6\), got \(3, 5\)"),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_errors(change: dict, message: str) -> None:
    tokens, coordinates, initial = scene(0)
    arguments: dict[str, Any] = {"tokens": tokens, "coordinates": coordinates, "initial_tokens": initial}
    with pytest.raises(ValueError, match=message):
        cluster_tokens(**{**arguments, "num_objects": 6, "position_weight": 1.0, **change})


def test_kmeans_rejects_more_clusters_than_tokens() -> None:
    tokens, coordinates, initial = scene(0)
    with pytest.raises(ValueError, match=r"\(60\), got 99"):
        cluster_tokens_kmeans(tokens, coordinates, num_objects=99, initial_tokens=initial)
    with pytest.raises(ValueError, match=r"\(4\), got 5"):
        draw_initial_tokens(4, 5)


def test_blocks_of_images_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, coordinates, initial = scene(6, batch=5)
    options = {"num_objects": 6, "position_weight": 1.0, "initial_tokens": initial}
    together = cluster_tokens(tokens, coordinates, **options)
    monkeypatch.setitem(blocks._NUMBERS, "cpu", 2 * 4 * 60**2)
    assert torch.equal(cluster_tokens(tokens, coordinates, **options), together)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("marginals", ["adaptive", "uniform"])
def test_gpu_gives_the_labels_of_the_cpu(marginals) -> None:
    tokens, coordinates, initial = scene(1, batch=8)
    options = {"num_objects": 6, "position_weight": 1.0, "marginals": marginals}
    expected = cluster_tokens(tokens, coordinates, initial_tokens=initial, **options)
    labels = cluster_tokens(tokens.cuda(), coordinates.cuda(), initial_tokens=initial.cuda(), **options)
    assert (labels.cpu() == expected).float().mean() >= 0.99
