import torch

from cribo.base.versions import versions


def test_versions_are_the_installed_ones() -> None:
    found = versions()
    assert torch.__version__.startswith(found["torch"].partition("+")[0])
    assert found["hardware"].endswith(" cores")
