"""The figures of a paper from a run: matches, clusters over epochs, bootstrapping ratio, colours of features."""

from cribo.figures.run import FIGURES, WrittenFigures, write_figures
from cribo.retrieval.pca import PCAColours, pca_colours

__all__ = ["FIGURES", "PCAColours", "WrittenFigures", "pca_colours", "write_figures"]
