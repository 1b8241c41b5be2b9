from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cribo.base.errors import ConfigError
from cribo.data.labelled.detection import open_detection
from cribo.evaluation.config import TrainingRuntime
from cribo.evaluation.detection import detector
from cribo.evaluation.detection.config import DetectionData
from cribo.evaluation.detection.detector import Detector, optimiser
from cribo.evaluation.detection.model import build_yolos
from cribo.evaluation.detection.protocol import Detection
from cribo.features.config import BackboneSource
from cribo.models import Backbone


def test_the_paper_schedule_is_that_of_yolos_s_with_the_batch_of_cribo() -> None:
    paper = Detection().scheduled()
    assert (paper.epochs, paper.batch_size, paper.learning_rate, paper.size, paper.tokens) == (
        150,
        32,
        2.5e-5,
        800,
        100,
    )
    run: Any = SimpleNamespace(runtime=TrainingRuntime())
    assert paper.used(run).items() >= {"final_learning_rate": 1e-7, "weight_decay": 1e-4, "clip": 0.1}.items()


def test_the_learning_rate_follows_half_a_cosine(
    rectangles: Path, tiny_vit: Callable[..., Backbone], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detector, "FINAL_LEARNING_RATE", 0.2)
    model, images = build_yolos(tiny_vit(), ["red", "green"], positions=(32, 32)), open_detection(rectangles).val
    made = Detector(model, 1.0, steps=6, images=images, mean=(0.5,) * 3, std=(0.5,) * 3).configure_optimizers()
    rates = []
    for _ in range(7):
        rates.append(made["optimizer"].param_groups[0]["lr"])
        made["optimizer"].step()
        made["lr_scheduler"]["scheduler"].step()
    assert [rates[step] for step in (0, 2, 3, 4, 6)] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_parameters_with_weight_decay(tiny_vit: Callable[..., Backbone]) -> None:
    model = build_yolos(tiny_vit(), ["a"], positions=(32, 32))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decaying, others = (
        {names[id(parameter)] for parameter in group["params"]} for group in optimiser(model, 1e-4).param_groups
    )
    assert decaying | others == set(names.values())
    assert {name for name in others if ".bias" not in name and "layernorm" not in name} == {
        "vit.embeddings.cls_token",
        "vit.embeddings.detection_tokens",
        "vit.embeddings.position_embeddings",
    }
    assert "class_labels_classifier.layers.0.bias" in decaying
    assert any(name.endswith("mid_position_embeddings") for name in decaying)
    assert "vit.encoder.layer.0.attention.attention.query.bias" in others


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epochs": 0}, "epochs must be >= 1, got 0"),
        ({"batch_size": 0}, "batch_size must be >= 1, got 0"),
        ({"tokens": 0}, "tokens must be >= 1, got 0"),
        ({"learning_rate": 0.0}, "learning_rate must be > 0, got 0.0"),
        ({"learning_rate": float("nan")}, "learning_rate must be > 0, got nan"),
    ],
)
def test_invalid_values(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Detection(**values)


def test_several_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="layers must be 1 for detection, got 4"):
        Detection().check_backbone(BackboneSource("x", layers=4))


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.limit must be >= 1, got 0"):
        DetectionData(limit=0)


def test_explicit_values_override_the_schedule() -> None:
    made = Detection(schedule="short", epochs=3, size=96).scheduled()
    assert (made.epochs, made.batch_size, made.learning_rate, made.size, made.tokens) == (3, 8, 2e-4, 96, 100)
