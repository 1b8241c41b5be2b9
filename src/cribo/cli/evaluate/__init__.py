"""`cribo evaluate`: evaluate a backbone on labelled images."""

import importlib
from functools import partial

from cribo.cli.running import dispatch, guarded

USAGE = """\
usage: cribo evaluate <evaluation> [options]

evaluations:
  dense-nn    dense nearest-neighbour retrieval: label patches by their nearest labelled patches
  linear      linear segmentation: train one linear layer on the frozen features
  segmenter   finetuning with Segmenter: train the backbone and a mask transformer end to end
  detection   object detection with YOLOS: train a detector initialised with the backbone's weights
  image-nn    image-level nearest neighbours: classify images by their nearest training images
  compare     compare results, also with published ones if the settings are the same

`cribo evaluate <evaluation> --help` lists its options.
"""

EVALUATIONS = ("dense-nn", "linear", "segmenter", "detection", "image-nn", "compare")
"""Each evaluation is the function `run` of the module of its name."""


def main(words: list[str]) -> int:
    """Run an evaluation."""
    return dispatch(
        words, "cribo evaluate", "evaluation", USAGE, {name: partial(_evaluate, name) for name in EVALUATIONS}
    )


def _evaluate(name: str, words: list[str]) -> int:
    file = importlib.import_module(f"cribo.cli.evaluate.{name.replace('-', '_')}")
    return guarded(f"cribo evaluate {name}", file.run, words, less_memory=file.LESS_MEMORY)
