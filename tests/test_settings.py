"""Properties of all dataclasses of settings."""

import dataclasses
import importlib
import pkgutil
import re

import cribo
from cribo.base.bounds import find_bounds
from cribo.evaluation.config import PROTOCOLS
from cribo.evaluation.protocol import find_protocol

SETTINGS = r"^cribo\..*(config|settings)$"
"""Names of the modules of settings."""

WITHOUT_BOUNDS = {
    *("BackboneSource.seed", "DenseNNSettings.seed", "DetectionSettings.seed", "SegmentationTrainingSettings.seed"),
    # Checked with the network, the image or the packages.
    *("BackboneSource.heads", "BackboneSource.layers", "ExportOptions.layers", "ExportOptions.opset"),
    *("ExportOptions.fixed_size", "SearchConfig.point", "SearchConfig.box", "SearchConfig.object"),
    # Checked with other settings, by PretrainConfig, or with an error that advises.
    *("PixelOptions.range", "PixelOptions.channels", "DataConfig.range", "DataConfig.channels"),
    *("AdaptConfig.steps", "RuntimeConfig.devices", "TrainingRuntime.devices"),
    *("EmbedConfig.blocks", "IndexConfig.blocks", "ProbeSettings.blocks", "AnomalySettings.blocks"),
    *("StudyConfig.seeds", "StudyConfig.paper"),  # any numbers; published scores
}
"""Numbers that no bounds limit."""


def test_every_number_has_bounds() -> None:
    names = [module.name for module in pkgutil.walk_packages(cribo.__path__, "cribo.")]
    modules = [importlib.import_module(name) for name in names if re.search(SETTINGS, name)]
    kinds = [each for module in modules for each in vars(module).values() if isinstance(each, type)]
    classes = {kind for kind in kinds if dataclasses.is_dataclass(kind) and re.search(SETTINGS, kind.__module__)}
    classes |= {find_protocol(name).data_type for name in PROTOCOLS}
    found = {
        f"{kind.__name__}.{field.name}"
        for kind in classes
        for field in dataclasses.fields(kind)
        if field.name in vars(kind).get("__annotations__", {})  # not inherited
        and re.search(r"\b(int|float)\b", f"{field.type}")
        and find_bounds(field.type) is None
    }
    assert found == WITHOUT_BOUNDS
