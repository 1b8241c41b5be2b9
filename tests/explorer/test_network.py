import threading

import pytest
import torch

from cribo.explorer.network import Dense, SharedNetwork
from cribo.features import Encoder
from cribo.models import build_backbone


class Counting:
    """An encoder that returns patch means and records the number of concurrent calls."""

    def __init__(self) -> None:
        self.inside = self.most = self.calls = 0

    def encoder(self) -> Encoder:
        def encode(images: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.inside += 1
            self.most = max(self.most, self.inside)
            threading.Event().wait(0.005)
            self.inside -= 1
            return torch.nn.functional.avg_pool2d(images, 8).flatten(2).mT

        return Encoder.from_function(encode, 8, identity="means")


def image(value: int, side: int = 32) -> torch.Tensor:
    return torch.full((3, side, side), value, dtype=torch.uint8)


def test_concurrent_requests_are_serialised_and_get_their_own_features() -> None:
    counting = Counting()
    shared = SharedNetwork(counting.encoder())
    found: dict[int, float] = {}

    def ask(value: int) -> None:
        found[value] = float(shared.encode(image(value)).tokens.mean())

    threads = [threading.Thread(target=ask, args=(10 * n,)) for n in range(20)]
    threads += [threading.Thread(target=lambda: shared.encoder.tokens(torch.zeros(1, 3, 8, 8))) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counting.most == 1
    assert found == pytest.approx({10 * n: 10 * n / 255 for n in range(20)}, abs=1e-6)


def test_the_cache_is_bounded() -> None:
    counting = Counting()
    shared = SharedNetwork(counting.encoder(), cache_bytes=3 * 4 * 4 * 3 * 4)
    for value in (1, 2, 3, 1, 2, 3):
        shared.encode(image(value))
    assert counting.calls == 3
    for value in range(4, 30):
        shared.encode(image(value))
    assert shared.kept_bytes <= shared.cache_bytes
    shared.encode(image(1))
    assert counting.calls == 3 + 26 + 1


def test_features_of_probes_are_kept_in_half_precision_unless_they_overflow() -> None:
    shared = SharedNetwork(Counting().encoder())
    for scale, nbytes in ((1.0, 2), (1e6, 4)):
        before = shared.kept_bytes
        images = torch.full((1, 3, 32, 32), scale)
        for features in (shared.probed.tokens(images), shared.probed.tokens(images)):
            assert features.dtype == torch.float32
            assert torch.equal(features, torch.full((1, 16, 3), scale))
        assert shared.kept_bytes - before == 16 * 3 * nbytes


def test_large_images_are_encoded_at_a_limited_size() -> None:
    shared = SharedNetwork(Counting().encoder(), max_patches=50)
    dense = shared.encode(torch.zeros(3, 400, 100, dtype=torch.uint8))
    assert dense.grid[0] * dense.grid[1] <= 50
    assert dense.grid[0] == 4 * dense.grid[1] or abs(dense.grid[0] - 4 * dense.grid[1]) <= 2
    assert dense.size == (400, 100)


def test_points_are_mapped_to_patches() -> None:
    dense = Dense(torch.zeros(4, 6, 2), (80, 60))
    assert dense.patch_at(0, 0) == (0, 0)
    assert dense.patch_at(59.9, 20) == (1, 5)
    assert dense.patch_at(-5, 1000) == (3, 0)


def test_a_network_with_a_fixed_size_encodes_images_at_that_size() -> None:
    args = {"depth": 4, "embed_dim": 32, "num_heads": 2}
    encoder = Encoder(build_backbone("beit_base_patch16_224", args=args, image_size=64))
    side = 64 // encoder.patch_size
    assert SharedNetwork(encoder).encode(torch.zeros(3, 70, 100, dtype=torch.uint8)).grid == (side, side)
