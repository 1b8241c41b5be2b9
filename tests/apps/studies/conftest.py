"""A small study: networks that train in a second."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CHANGES = {
    "runtime.threads": 1,
    "data.workers": 0,
    "score.root": None,
    "data.scenes.count": 32,
    "data.scenes.size": 64,
    "views.size": 32,
    "optim.batch_size": 16,
    "objects.group_size": 16,
    "objects.bank_images": 16,
    "backbone.args": {"layers": [1, 1, 0, 0], "channels": [8, 8, 8, 8]},
    "head.hidden_dim": 16,
    "head.bottleneck_dim": 8,
    "head.prototypes": 16,
}
ROWS = {"image": {"losses.cross_view": 0, "losses.cross_image": 0}, "all": {}, "the same": {"losses.image": 1.0}}

Written = Callable[..., Path]


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Written:
    """Return a function that writes the file of a study into the current folder."""
    monkeypatch.chdir(tmp_path)

    def write(**changes: Any) -> Path:
        content = {
            "title": "A small study",
            "changes": CHANGES,
            "rows": ROWS,
            "seeds": [0, 1],
            "budget": {"epochs": 1},
            "scores": {"dense-nn": {"data": {"name": "scenes", "limit": 6}, "ratios": 1, "neighbours": 5}},
            "paper": {"dense-nn": {"image": 31.6, "all": 58.1}},
            **changes,
        }
        path = tmp_path / "mine.yaml"
        path.write_text(json.dumps(content), encoding="utf-8")  # JSON is YAML
        return path

    return write
