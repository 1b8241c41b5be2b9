"""`cribo evaluate`: measure what a backbone has learned, on labelled images."""

import importlib
from functools import partial

from cribo.cli.running import dispatch, guarded

USAGE = """\
usage: cribo evaluate <evaluation> [options]

evaluations:
  dense-nn    dense nearest-neighbour retrieval: label patches by their nearest labelled patches
  detection   object detection: finetune as YOLOS on images with boxes
  compare     lay results side by side, with published ones where the setting is the same

`cribo evaluate <evaluation> --help` lists its options.
"""

EVALUATIONS = ("dense-nn", "detection", "compare")
"""Each in a file of its name, whose `run` does it."""


def main(words: list[str]) -> int:
    """Run an evaluation."""
    return dispatch(
        words, "cribo evaluate", "evaluation", USAGE, {name: partial(_evaluate, name) for name in EVALUATIONS}
    )


def _evaluate(name: str, words: list[str]) -> int:
    file = importlib.import_module(f"cribo.cli.evaluate.{name.replace('-', '_')}")
    return guarded(f"cribo evaluate {name}", file.run, words, less_memory=file.LESS_MEMORY)
