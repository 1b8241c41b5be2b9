"""Order of `cribo explore`: errors first, slow imports afterwards."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from rich.console import Console

pytest.importorskip("gradio")
from cribo.explorer import run
from cribo.explorer.config import ExploreConfig, Limits
from cribo.features.config import BackboneSource


def test_the_page_is_imported_while_loading_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    @contextmanager
    def watched(console: Console) -> Iterator[None]:
        seen.append("cribo.explorer.page" in sys.modules)
        yield
        seen.append("cribo.explorer.page" in sys.modules)

    monkeypatch.delitem(sys.modules, "cribo.explorer.page", raising=False)
    monkeypatch.setattr(run, "loading", watched)
    monkeypatch.setattr(run, "serve", lambda *given, **named: named["on_start"]())
    console = Console(record=True, width=200)
    config = ExploreConfig(backbone=BackboneSource("mean-colour"))
    run.explore(config, host="127.0.0.1", port=0, limits=Limits(), console=console)
    assert seen == [False, True]
    assert "Open http://127.0.0.1:" in console.export_text()
