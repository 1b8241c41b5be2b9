import pytest

from cribo.arguments import ConfigError
from cribo.cluster.shares import Share


@pytest.mark.parametrize("count", [1, 3, 8, 20])
def test_shares_contain_each_item_once_and_are_equal(count: int) -> None:
    items = range(10)
    shares = [Share.parse(f"{number}/{count}").of(items) for number in range(1, count + 1)]
    assert sorted(item for share in shares for item in share) == [*items]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_no_share_is_the_whole() -> None:
    assert Share.parse(None).of(range(5)) == range(5)


@pytest.mark.parametrize("text", ["", "3", "1/2/3", "a/b", "-1/3", "1.5/3", "1/ 3"])
def test_malformed_shares(text: str) -> None:
    with pytest.raises(ConfigError, match="part must be i/n with i from 1 to n, such as 3/8, got"):
        Share.parse(text)


@pytest.mark.parametrize("text", ["0/3", "4/3", "1/0"])
def test_shares_out_of_range(text: str) -> None:
    with pytest.raises(ConfigError, match=f"got {text}"):
        Share.parse(text)
