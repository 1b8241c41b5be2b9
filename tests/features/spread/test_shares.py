import pytest

from cribo.base.errors import ConfigError
from cribo.base.shares import Share, order_shares


@pytest.mark.parametrize("count", [1, 3, 8, 10])
def test_shares_contain_each_item_once_and_are_equal(count: int) -> None:
    items = range(10)
    shares = [Share.parse(f"{number}/{count}").of(items) for number in range(1, count + 1)]
    assert sorted(item for share in shares for item in share) == [*items]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_no_share_is_the_whole() -> None:
    assert Share.parse(None).of(range(5)) == range(5)


def test_empty_shares_are_refused_in_every_job() -> None:
    for part in ("1/6", "6/6"):
        with pytest.raises(ConfigError, match=f"part {part}: .*1/5 to 5/5"):
            Share.parse(part).of(range(5))


@pytest.mark.parametrize("text", ["", "3", "1/2/3", "a/b", "-1/3", "1.5/3", "1/ 3", "0/3", "4/3", "1/0"])
def test_malformed_shares_and_those_out_of_range(text: str) -> None:
    with pytest.raises(ConfigError, match=f"part must be i/n .*got {text}"):
        Share.parse(text)


def test_shares_are_ordered_by_their_numbers() -> None:
    parts = [f"{number}/12" for number in (10, 2, 12, 1, 11, 9, 3, 4, 8, 7, 6, 5)]
    order = order_shares(parts, parts)
    assert [parts[index] for index in order] == [f"{number}/12" for number in range(1, 13)]


def test_missing_shares_are_named() -> None:
    with pytest.raises(ConfigError, match=r"3/8, 5/8 .*--part 3/8"):
        order_shares([*"abcdef"], ["1/8", "2/8", "4/8", "6/8", "7/8", "8/8"])
