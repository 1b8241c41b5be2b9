"""The command `cribo`: one sub-command per job. Parses, calls, prints; the work is elsewhere."""

import difflib
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from cribo.console import Phases, duration, log_to
from cribo.errors import Stopped
from cribo.processes import is_first_process

if TYPE_CHECKING:
    from cribo.pretraining.run import Run

_USAGE = """\
usage: cribo <command> [options]

commands:
  pretrain    learn dense representations from unlabelled images
  profile     what a training step of a configuration costs on this machine, part by part
  evaluate    measure what a backbone has learned, on labelled images
  shard       pack images into few large files, to train from a network or from object storage

`cribo pretrain` with no options trains on made-up scenes, a few minutes on a laptop.
`cribo <command> --help` lists its options; `cribo --version` says which version this is.
"""

_EVALUATE_USAGE = """\
usage: cribo evaluate <evaluation> [options]

evaluations:
  dense-nn    dense nearest-neighbour retrieval: label patches by their nearest labelled patches
  compare     lay results side by side, with published ones where the setting is the same

`cribo evaluate <evaluation> --help` lists its options.
"""

_DENSE_NN_HELP = """\
Dense nearest-neighbour retrieval: every patch of a new image takes its label from the most similar patches of
labelled images, nothing is trained, and the labels are scored (mIoU).

  cribo evaluate dense-nn --backbone runs/camvid --data camvid --data.root CAMVID
  cribo evaluate dense-nn --backbone checkpoint.pth --data voc --data.root VOCdevkit/VOC2012
  cribo evaluate dense-nn --backbone vit_small_patch16_224.dino --data folder --data.root MINE

With --protocol hummingbird as in "Towards in-context scene understanding". Features are kept on disk: the next
evaluation of the same backbone and images begins with the search. A first try: --data.limit 50 --ratios 1
"""

_COMPARE_HELP = """\
Lay results side by side: their settings where they differ, the classes that differ most, and the published
figures of the paper where the setting is the same.

  cribo evaluate compare evaluations/dense-nn-voc-mine evaluations/dense-nn-voc-dino
"""

_LESS_MEMORY = {
    "evaluate": "lower --runtime.batch_size or --runtime.memory_gib",
    "pretrain": "raise --optim.micro_batches, or set --backbone.checkpointing selective",
    "shard": "lower --threads",
    "profile": "raise --optim.micro_batches, lower --optim.batch_size, or set --backbone.checkpointing selective",
}

# Long names that may be said shortly.
_SHORT = {
    "--backbone": "--backbone.source",
    "--pretrained": "--backbone.pretrained",
    "--trust": "--backbone.trust",
    "--layers": "--backbone.layers",
    "--data": "--data.name",
    "--cache": "--runtime.cache",
    "--devices": "--runtime.devices",
}
_SWITCHES = ("--backbone.trust", "--data.partial")
_LISTS = ("--ratios", "--size", "--runtime.devices")

_PRETRAIN_HELP = """\
Learn dense representations from unlabelled images.

With no options: a few minutes on made-up scenes, to see that everything works. On your own images:

  cribo pretrain --config adapt --data.root IMAGES         continue pretrained weights
  cribo pretrain --config coco_vits16 --data.root COCO     from scratch, as published

IMAGES is a folder, nested or not, a text file that lists images, or a folder or URL of
tar shards, such as `cribo shard` writes. Every value below
can be put in a YAML file, too; the defaults shown hold where the preset says nothing,
and --print_config shows what would run.
"""


_PROFILE_HELP = """\
What a training step costs on this machine, part by part: the paper's profiling table for your own configuration, with
memory by what holds it, and how well the processor is used.

  cribo profile --config coco_vits16 --data.root COCO --kept 8,16,32
  cribo profile --config imagenet_vitb16 --data.root scenes --data.scenes.size 224 --optim.batch_size 128

Steps of the real training are taken on a full memory bank; nothing is kept of them. Of a run over several devices, one
device's part is profiled. Without --kept, as many objects count as a random network finds.
"""

_SHARD_HELP = """\
Pack images into few large tar files, which are read fast where single files are slow: from network file systems and
from object storage.

  cribo shard IMAGES OUT                 the files as they are
  cribo shard PHOTOGRAPHS OUT --size 512 the shorter side no longer than 512 pixels
  cribo pretrain --data.root OUT         or --data.root s3://bucket/prefix, where OUT has been copied

Crops are mostly smaller than photographs: with --size, what is decoded and fetched becomes less. OUT appears when it
is complete; unreadable images are left out and listed in OUT/skipped.csv.
"""


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
    commands = {
        "pretrain": partial(_guarded, "cribo pretrain", _pretrain),
        "profile": partial(_guarded, "cribo profile", _profile),
        "evaluate": _evaluate,
        "shard": partial(_guarded, "cribo shard", _shard),
    }
    return _dispatch(words, "cribo", "command", _USAGE, commands)


def _evaluate(words: list[str]) -> int:
    evaluations = {
        name: partial(_guarded, f"cribo evaluate {name}", run)
        for name, run in (("dense-nn", _dense_nn), ("compare", _compare))
    }
    return _dispatch(words, "cribo evaluate", "evaluation", _EVALUATE_USAGE, evaluations)


def _dispatch(
    words: list[str], name: str, kind: str, usage: str, commands: Mapping[str, Callable[[list[str]], int]]
) -> int:
    """Run what the first word says with the others."""
    if not words or words[0] in ("-h", "--help"):
        print(usage, end="")
        return 0 if words else 2
    word, *rest = words
    if word not in commands:
        print(f"{name}: unknown {kind} {word!r}{_nearest(word, commands)}", file=sys.stderr)
        return 2
    return commands[word](rest)


def _nearest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f": did you mean {near[0]}?" if near else f": there are {', '.join(known)}"


def _guarded(name: str, command: Callable[[list[str]], None], words: list[str]) -> int:
    """Run a command; what a user can mend becomes one line."""
    try:
        command(words)
    except Stopped as error:
        # A process beside the first ends in peace: whoever started it may take any other end for a crash.
        return 0 if error.everywhere and not is_first_process() else _failed(name, error, error.status)
    except (ValueError, FileNotFoundError, ConnectionError, ImportError) as error:  # to mend before any work
        return _failed(name, error, 2)
    except OSError as error:  # no room for what is written, say
        return _failed(name, error, 1)
    except Exception as error:
        if not _out_of_memory(error):
            raise
        reason = str(error).partition(". ")[0]
        return _failed(name, f"{reason}: {_LESS_MEMORY[name.split()[1]]}", 1)
    return 0


def _failed(name: str, error: object, status: int) -> int:
    print(f"{name}: {error}", file=sys.stderr)
    return status


def _out_of_memory(error: Exception) -> bool:
    torch = sys.modules.get("torch")  # an error of one that was never imported cannot be
    return torch is not None and isinstance(error, torch.OutOfMemoryError)


def _dense_nn(words: list[str]) -> None:
    from cribo.arguments import Parser
    from cribo.evaluation.config import DenseNNConfig
    from cribo.evaluation.results import result_tables
    from cribo.evaluation.run import evaluate_dense_nn

    console = Console(soft_wrap=True)
    log_to(console)
    parser = Parser(
        prog="cribo evaluate dense-nn",
        description=_DENSE_NN_HELP,
        usage="cribo evaluate dense-nn --backbone SOURCE --data NAME --data.root DIR [options]",
        short=_SHORT,
        switches=_SWITCHES,
        lists=_LISTS,
    )
    parser.add_argument(
        "--out", type=Path, help="folder for results and pictures; evaluations/dense-nn-..., numbered, by default"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace results that stand in --out")
    parser.add_argument("--pictures", type=int, default=6, help="of how many images the prediction is drawn")
    parser.add_argument("--config", action="config", help="a YAML file with options, which the others override")
    parser.add_class_arguments(DenseNNConfig)
    parsed = parser.parse_args(words)
    made = parser.instantiate(parsed)
    config = DenseNNConfig(**{name: made[name] for name in DenseNNConfig.__dataclass_fields__})
    result, folder = evaluate_dense_nn(
        config,
        out=parsed.out,
        overwrite=parsed.overwrite,
        pictures=parsed.pictures,
        command=shlex.join(["cribo", "evaluate", "dense-nn", *words]),
        console=console,
    )
    for table in result_tables(result):
        console.print(table)
    _print_places(console, {"numbers": folder / "results.json", "pictures": folder / "*.png"})


def _compare(words: list[str]) -> None:
    from cribo.arguments import Parser
    from cribo.evaluation.compare import compare

    parser = Parser(prog="cribo evaluate compare", description=_COMPARE_HELP)
    parser.add_argument("results", nargs="+", type=Path, help="folders of evaluations, or their results.json")
    parser.add_argument("--out", type=Path, help="folder for compare.md, compare.json and compare.png")
    parsed = parser.parse_args(words)
    comparison = compare(parsed.results)
    console = Console(soft_wrap=True)
    console.print(comparison.table())
    if parsed.out is not None:
        for path in comparison.write(parsed.out):
            console.print(f"  {path}", highlight=False)


def _pretrain(words: list[str]) -> None:
    # Imported here, so that `cribo --help` does not wait for torch, nor a wrong word for Lightning.
    from cribo.pretraining.presets import (
        ConfigParser,
        add_config_arguments,
        config_from,
        config_name,
        with_preset,
    )

    # The processes of further devices run this command too, and have nothing to add to what the first one says.
    console = Console(soft_wrap=True, quiet=not is_first_process())
    log_to(console)
    parser = ConfigParser(
        prog="cribo pretrain",
        description=_PRETRAIN_HELP,
        usage="cribo pretrain [options]",
        short={"--on_nonfinite": "--runtime.on_nonfinite"},
    )
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder of run folders")
    parser.add_argument("--name", type=str, help="of this run; the preset's, numbered, by default")
    parser.add_argument(
        "--minutes", type=float, help="about how long to train here: sets optim.epochs by a short timing"
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const="latest",
        metavar="RUN",
        help="continue the run in this folder from its last checkpoint (without a folder: the latest run); "
        "only runtime.* and where and how images are read can be changed",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a run of the same --name")
    parser.add_argument(
        "--continue",
        action="store_true",
        help="go on with the run of this --name if there is one: for a scheduler that starts the same command again",
    )
    add_config_arguments(parser)
    parsed = parser.parse_args(with_preset(words))
    if parsed.resume is not None:
        for option in ("name", "minutes", "config", "overwrite", "continue"):
            if parsed[option]:
                raise ValueError(f"--{option} does not go with --resume: the run knows its own")
        from cribo.pretraining.run import latest_run, overrides_in, resume

        folder = latest_run(parsed.out) if parsed.resume == "latest" else Path(parsed.resume)
        run = resume(folder, overrides=overrides_in(parser.written_out(words)), console=console)
    else:
        config = config_from(parsed)
        from cribo.pretraining.run import pretrain

        run = pretrain(
            config,
            out=parsed.out,
            name=parsed.name,
            default_name=config_name(parsed.config[-1]),
            minutes=parsed.minutes,
            overwrite=parsed.overwrite,
            continue_run=parsed["continue"],
            console=console,
        )
    _print_summary(run, console)


def _profile(words: list[str]) -> None:
    from cribo.files import make_numbered_folder
    from cribo.pretraining.presets import ConfigParser, add_config_arguments, config_from, config_name, with_preset

    console = Console(soft_wrap=True)
    log_to(console)
    parser = ConfigParser(
        prog="cribo profile",
        description=_PROFILE_HELP,
        usage="cribo profile [--config PRESET] [options]",
        lists=("--kept",),
    )
    parser.add_argument("--out", type=Path, default=Path("profiles"), help="folder of the folders of profiles")
    parser.add_argument(
        "--kept",
        type=list[int],
        default=[],
        help="objects that every image is given, such as 8,16,32: cost follows them; as found when not given",
    )
    parser.add_argument(
        "--bootstrapping_ratio", type=float, default=0.5, help="share of the objects that are given a valid match"
    )
    parser.add_argument("--steps", type=int, default=10, help="that are timed, after --warmup others")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the timed ones")
    add_config_arguments(parser)
    words = with_preset(words)
    parsed = parser.parse_args(words)
    config = config_from(parsed)
    from cribo.pretraining.profile_report import profile_tables, write_profile
    from cribo.pretraining.profiling import profile

    with Phases(console) as progress:
        measured = profile(
            config,
            kept=parsed.kept,
            bootstrapping_ratio=parsed.bootstrapping_ratio,
            steps=parsed.steps,
            warmup=parsed.warmup,
            progress=progress,
        )
    folder = make_numbered_folder(parsed.out, config_name(parsed.config[-1]))
    paths = write_profile(measured, folder, command=shlex.join(["cribo", "profile", *words]))
    for table in profile_tables(measured):
        console.print(table)
    _print_places(console, {"numbers": paths[0], "picture": paths[1]})


def _shard(words: list[str]) -> None:
    from cribo.arguments import Parser
    from cribo.data.images import open_images
    from cribo.data.reading import MAX_PIXELS
    from cribo.data.shard_writing import write_shards

    console = Console(soft_wrap=True)
    log_to(console)
    parser = Parser(prog="cribo shard", description=_SHARD_HELP, usage="cribo shard IMAGES OUT [options]")
    parser.add_argument("images", metavar="IMAGES", type=str, help="a folder, or a text file that lists images")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder of the shards; it must not exist")
    parser.add_argument("--size", type=int, help="of the shorter side, at most, in pixels; as it is when not given")
    parser.add_argument("--shard_mb", type=float, default=64.0, help="about how large a shard is, in MB")
    parser.add_argument(
        "--max_unreadable", type=float, default=0.01, help="share of the images that may be unreadable and left out"
    )
    parser.add_argument("--max_pixels", type=int, default=MAX_PIXELS, help="larger images are unreadable")
    parser.add_argument("--threads", type=int, help="that read and decode; as many as there are cores when not given")
    parsed = parser.parse_args(words)
    source = open_images(parsed.images, max_pixels=parsed.max_pixels)
    with Phases(console) as progress:
        written = write_shards(
            source,
            parsed.out,
            size=parsed.size,
            shard_bytes=round(parsed.shard_mb * 1e6),
            max_unreadable=parsed.max_unreadable,
            threads=parsed.threads,
            progress=progress,
        )
    console.print(
        f"{written.images} images in {written.shards} shards, {written.size_bytes / 1e6:.1f} MB; "
        f"{len(written.skipped)} were unreadable",
        highlight=False,
    )
    _print_places(console, {"shards": written.folder, "to train": f"cribo pretrain --data.root {written.folder}"})


def _print_summary(run: "Run", console: Console) -> None:
    summary = run.summary
    if "dense_nn" in summary:
        score = summary["dense_nn"]
        table = Table(title="Dense nearest-neighbour retrieval on held-out images")
        table.add_column("features")
        table.add_column("mIoU", justify="right")
        for label, key in (
            ("mean colour of the patch", "mean_color"),
            ("this network before training", "before"),
            ("this network after training", "after"),
        ):
            said = "not known" if score[key] is None else f"{100 * score[key]:.1f} %"
            table.add_row(label, said, style="bold" if key == "after" else None)
        console.print(table)
    console.print(
        f"{summary['steps']} steps in {duration(summary['seconds'])}, "
        f"{summary['images_per_second']:.0f} images/s, "
        f"peak memory {summary['peak_rss_bytes'] / 2**30:.1f} GiB, "
        f"bootstrapping ratio {summary['bootstrapping_ratio']:.0%}",
        highlight=False,
    )
    _print_places(
        console,
        {
            "backbone": run.folder / "backbone.safetensors",
            "pictures": run.folder / "report",
            "numbers": run.folder / "summary.json",
            "metrics": run.folder / "metrics.csv",
            "to repeat it": f"cribo pretrain --config {run.folder / 'config.yaml'}",
        },
    )


def _print_places(console: Console, places: Mapping[str, Path | str]) -> None:
    for label, place in places.items():
        console.print(f"  {label:<13}{place}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
