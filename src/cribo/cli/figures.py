"""`cribo figures`: draw the figures of a paper from a run."""

from pathlib import Path

from rich.console import Console

from cribo.base.console import Phases, importing
from cribo.base.wording import counted
from cribo.cli.running import print_places
from cribo.data.config import READING_SHORT

HELP = """\
Draw the figures of a paper from a run: vector text in embedded fonts, 300 dpi, two-column layout, no titles.

  cribo figures --run runs/camvid --images CAMVID
  cribo figures --run runs/camvid --features_of 'holiday/*.jpg' --only features
  cribo figures --run runs/a --label "K = 12" --run runs/b --label "K = 64" --only bootstrapping --out compared

  matches        objects of query views and, in the same colour, the nearest object of another image
  clusters       clusters of the same view pairs at several epochs, from the first to the last
  bootstrapping  bootstrapping ratio over the epochs; one curve per --run
  features       images and their dense features as colours (principal components)
  losses, schedules

Captions are written to captions.md.
"""

LESS_MEMORY = "lower --size or --pictures"


def run(words: list[str], console: Console) -> None:
    """Run the command."""
    from cribo.base.arguments import Parser
    from cribo.base.errors import ConfigError
    from cribo.pretraining.figures.config import FigureConfig

    parser = Parser(
        prog="cribo figures", description=HELP, usage="cribo figures --run RUN [options]", short=READING_SHORT
    )
    parser.add_argument("--run", nargs="+", type=Path, required=True, help="a run folder; repeat to compare runs")
    parser.add_argument("--label", nargs="+", type=str, help="name of a run, in the order of --run")
    parser.add_argument("--out", type=Path, help="output folder; by default RUN/figures")
    parser.add_argument("--overwrite", action="store_true", help="replace existing figures in --out")
    parser.add_class_arguments(FigureConfig)
    parser.add_argument("--device", type=str, help="such as cuda:0 or cpu; by default the first GPU, else the CPU")
    parsed = parser.parse_args(words)
    runs: list[Path] = parsed.run
    labels: list[str] = parsed.label or [run.name for run in runs]
    if len(labels) != len(runs) or len(set(labels)) != len(labels):
        raise ConfigError(
            f"each --run needs its own --label, got {counted(len(runs), 'run')} and {', '.join(labels)}: give one "
            "after each"
        )
    config = parser.build(FigureConfig, parsed)
    with importing(console):
        from cribo.base.devices import resolve_devices
        from cribo.pretraining.figures.run import write_figures

    device = resolve_devices([parsed.device] if parsed.device else None, "--device")[0]
    with Phases(console) as progress:
        written = write_figures(
            dict(zip(labels, runs, strict=True)),
            parsed.out or runs[0] / "figures",
            config,
            overwrite=parsed.overwrite,
            device=device,
            progress=progress,
        )
    for name, why in written.left_out.items():
        console.print(f"skipped {name}: {why}")
    places: dict[str, Path | str] = {name: written.folder / f"{name}.{config.format[0]}" for name in written.captions}
    print_places(console, {**places, "captions": written.folder / "captions.md"})
