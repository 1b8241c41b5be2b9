"""The host of Label Studio: keys, and addresses that are not fetched."""

import pytest
from tests.explorer.serving.label_studio.conftest import KEY, PERSONAL, Studio

from cribo.base.errors import ConfigError, DataError
from cribo.explorer.serving.label_studio.host import Host


@pytest.mark.parametrize("key", [KEY, PERSONAL])
def test_the_key_is_legacy_or_personal(studio: Studio, key: str) -> None:
    host, address = studio.opened(key), studio.upload(1)
    assert host.image(address) == host.image(f"{studio.url}{address}") == studio.files[address]
    studio.access = "second"  # the first one has expired
    assert host.image(address) == studio.files[address]
    assert host.tasks(1) == []


@pytest.mark.parametrize("key", [None, "wrong", "a.b.c"])
def test_a_missing_key_is_named(studio: Studio, key: str | None) -> None:
    with pytest.raises(DataError, match="token"):
        studio.opened(key).image(studio.upload(1))


def test_a_host_that_does_not_run_is_named() -> None:
    with pytest.raises(DataError, match=r"/data/a\.png"):
        Host("http://127.0.0.1:9", KEY, max_bytes=50_000, timeout=5).image("/data/a.png")


@pytest.mark.parametrize("url", ["", "127.0.0.1:8080", "ftp://host", "http://me:secret@host", "file:///", "http://"])
def test_invalid_addresses_are_errors(url: str) -> None:
    with pytest.raises(ConfigError, match="--label_studio") as caught:
        Host(url, KEY, max_bytes=50_000, timeout=5)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("prefix", ["http://127.0.0.1.evil.example", "https://127.0.0.1", "http://evil.example"])
def test_the_key_goes_to_no_other_host(studio: Studio, prefix: str) -> None:
    host = studio.opened()
    with pytest.raises(DataError, match="--label_studio"):
        host.image(f"{prefix}:{studio.server.server_port}/data/a.png")
    assert studio.paths == []
