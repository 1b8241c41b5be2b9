import itertools

import torch

from cribo.data.randomness import keyed_generator


def draw(*key: int) -> tuple[float, ...]:
    return tuple(torch.rand(4, generator=keyed_generator(*key)).tolist())


def test_draws_depend_on_the_key_only() -> None:
    first = draw(0, 3, 17)
    torch.manual_seed(5)
    torch.rand(100)
    draw(9)
    assert draw(0, 3, 17) == first


def test_global_state_is_not_changed() -> None:
    before = torch.get_rng_state()
    draw(1, 2, 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_draws_depend_on_every_part_of_the_key_and_its_position() -> None:
    keys = list(itertools.product(range(-2, 8), repeat=3))
    keys += [key[:2] for key in keys[:20]] + [(2**63, 1), (2**64 - 1,), (0,), (), (0, 0, 0, 0)]
    keys = list(dict.fromkeys(keys))
    assert len({draw(*key) for key in keys}) == len(keys)


def test_neighbouring_keys_are_unrelated() -> None:
    draws = torch.tensor([draw(0, image) for image in range(4000)]).flatten()
    assert abs(float(draws.mean()) - 0.5) < 5 * (1 / 12) ** 0.5 / len(draws) ** 0.5
    following = torch.corrcoef(torch.stack((draws[:-4], draws[4:])))[0, 1]
    assert abs(float(following)) < 5 / len(draws) ** 0.5
