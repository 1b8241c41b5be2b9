"""The command `cribo`: one file here per job. Each parses, calls, prints; the work is elsewhere."""

import sys
from collections.abc import Sequence
from importlib import import_module

from cribo.cli.running import dispatch

USAGE = """\
usage: cribo <command> [options]

commands:
  pretrain    learn dense representations from unlabelled images
  profile     what a training step of a configuration costs on this machine, part by part
  evaluate    measure what a backbone has learned, on labelled images
  segment     label the pixels of many images by a few labelled examples, without training
  index       find the objects of a folder of images and keep them in a database
  search      find the objects in such a database that are most like one
  explore     open a page to look at a run and at a collection's objects
  figures     draw the figures of a paper from a run: matches, clusters, bootstrapping ratio, features
  export      write a backbone for timm, transformers, ONNX or torch.export, checked after writing
  shard       pack images into few large files, to train from a network or from object storage

`cribo pretrain` with no options trains on made-up scenes, a few minutes on a laptop.
`cribo <command> --help` lists its options; `cribo --version` says which version this is.
"""

COMMANDS = ("pretrain", "profile", "evaluate", "segment", "index", "search", "explore", "figures", "export", "shard")
"""Each in a file of its name, whose `main` runs it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; exit status 0 done, 1 failed on the way, 2 refused, 130 interrupted."""
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:
        return 130


def _run(words: list[str]) -> int:
    if words[:1] == ["--version"]:
        import cribo

        print(cribo.__version__)
        return 0
    # A command's file is read when it is asked for: `cribo --help` must not wait for torch.
    commands = {name: lambda rest, name=name: import_module(f"cribo.cli.{name}").main(rest) for name in COMMANDS}
    return dispatch(words, "cribo", "command", USAGE, commands)
