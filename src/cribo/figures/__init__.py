"""The figures of a paper from a run: matches, clusters over epochs, bootstrapping ratio, colours of features."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cribo.figures.config import FIGURES
    from cribo.figures.run import WrittenFigures, write_figures
    from cribo.retrieval.pca import PCAColours, pca_colours

__all__ = ["FIGURES", "PCAColours", "WrittenFigures", "pca_colours", "write_figures"]

_PLACES = {
    "cribo.figures.config": ("FIGURES",),
    "cribo.figures.run": ("WrittenFigures", "write_figures"),
    "cribo.retrieval.pca": ("PCAColours", "pca_colours"),
}


def __getattr__(name: str) -> Any:
    # Imported when first used: a configuration must not wait for torch.
    for module, names in _PLACES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
