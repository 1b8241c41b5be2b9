"""The command `cribo`: one file per command, which parses, calls the library, and prints."""

import os
import sys
from collections.abc import Sequence

# Everything else is imported by `main`, which handles Ctrl-C.

GROUPS = {
    "learn": {
        "pretrain": "learn dense representations from unlabelled images",
        "adapt": "adapt a pretrained backbone to your images, and measure the gain",
        "distill": "train a small network to predict a larger one's dense features",
        "study": "train a table of configurations with several seeds; compare scores",
    },
    "measure": {
        "evaluate": "evaluate a backbone on labelled images",
        "benchmark": "evaluate a backbone by all protocols on a folder of datasets",
        "profile": "measure the cost of each part of a training step on this machine",
    },
    "use": {
        "segment": "label images given a few labelled examples, without training",
        "index": "find the objects of a collection and store them in a database",
        "search": "find the objects in a database most similar to a given one",
        "embed": "write the features of many images to files (Parquet, NumPy, ...)",
        "serve": "label images over HTTP, by a memory of segment",
        "explore": "open a web page to inspect a run and a collection's objects",
        "export": "write a backbone for timm, transformers, ONNX or torch.export",
        "figures": "draw the figures of a paper from a run",
    },
    "files and machines": {
        "shard": "pack images into a few large files, for network or object storage",
        "merge": "join results of embed, index or segment on shares of the images",
        "doctor": "show versions, devices, limits and problems of this machine",
    },
}
"""What each command does, in groups. A command is `COMMAND` of the module of its name."""

COMMANDS = tuple(name for group in GROUPS.values() for name in group)


def usage() -> str:
    """Return the help of `cribo`."""
    groups = (
        f"{group}:\n" + "".join(f"  {name:<10} {what}\n" for name, what in commands.items())
        for group, commands in GROUPS.items()
    )
    return _USAGE.format(groups="\n".join(groups))


_USAGE = """\
usage: cribo <command> [options]

{groups}
examples:
  cribo pretrain                    about a minute on synthetic scenes
  cribo adapt PHOTOGRAPHS --backbone BACKBONE
  cribo segment PHOTOGRAPHS --backbone BACKBONE --examples EXAMPLES

A BACKBONE for a start is vit_small_patch14_dinov2.lvd142m.

`cribo <command> --help` lists the options of a command, with examples;
`cribo --version` prints the version. With `--debug`, every command shows the
traceback of an error. `python -m cribo` is the same command, for environments
whose scripts are not on PATH.

Documentation: the folder docs/ of the clone, with a page for each command; it
begins with docs/start.md.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    0 is success, 1 a failure, 2 invalid arguments or input, 130 an interruption.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        # Idle OpenMP threads spin before they sleep, which doubles the training time on a busy machine.
        os.environ["GOMP_SPINCOUNT"] = "10000"
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:  # before the command has started
        print("cribo: interrupted; nothing was written", file=sys.stderr)
        return 130


def _run(words: list[str]) -> int:
    from functools import partial

    from cribo.cli.running import dispatch

    if "_ARGCOMPLETE" in os.environ:  # the shell asks for completions (docs/start.md)
        from cribo.cli.completion import words_to_complete

        words = words_to_complete(COMMANDS)
    if words[:1] == ["--version"]:
        import cribo

        print(cribo.__version__)
        return 0
    return dispatch(words, "cribo", "command", usage(), {name: partial(_command, name) for name in COMMANDS})


def _command(name: str, words: list[str]) -> int:
    """Run a command; its module is imported on demand, so that `cribo --help` does not import torch."""
    from importlib import import_module

    from cribo.cli.running import run_command

    module = import_module(f"cribo.cli.{name}")
    if name == "evaluate":  # has commands of its own
        return module.main(words)
    return run_command(name, module.COMMAND, words)
