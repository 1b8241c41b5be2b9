"""Figures of a run for print: matches, clusters over epochs, bootstrapping ratio, and principal components."""

from typing import TYPE_CHECKING

from cribo.base.lazy import lazy_names

if TYPE_CHECKING:
    from cribo.features.pca import PCAColours as PCAColours
    from cribo.features.pca import pca_colours as pca_colours
    from cribo.pretraining.figures.config import FIGURES as FIGURES
    from cribo.pretraining.figures.run import WrittenFigures as WrittenFigures
    from cribo.pretraining.figures.run import write_figures as write_figures
else:
    __getattr__, __all__ = lazy_names(__name__)
