"""Figures of a run for print: matches, clusters over epochs, bootstrapping ratio, and principal components."""

from typing import TYPE_CHECKING

from cribo.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.figures.config import FIGURES
    from cribo.figures.run import WrittenFigures, write_figures
    from cribo.retrieval.pca import PCAColours, pca_colours

__getattr__, __all__ = lazy_names(__name__)
