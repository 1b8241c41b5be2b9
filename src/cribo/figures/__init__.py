"""Figures of a run for print: matches, clusters over epochs, bootstrapping ratio, and principal components."""

from typing import TYPE_CHECKING

from cribo.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.figures.config import FIGURES as FIGURES
    from cribo.figures.run import WrittenFigures as WrittenFigures
    from cribo.figures.run import write_figures as write_figures
    from cribo.retrieval.pca import PCAColours as PCAColours
    from cribo.retrieval.pca import pca_colours as pca_colours
else:
    __getattr__, __all__ = lazy_names(__name__)
