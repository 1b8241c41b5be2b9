"""Shared by all commands: dispatch, errors and exit status, options of a backbone."""

import logging
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cribo.base.errors import InputError, MissingPackage, Stopped, full_disk, is_out_of_memory
from cribo.base.machine import is_first_process
from cribo.base.redaction import mask_messages, without_secrets
from cribo.base.wording import counted, nearest, printable

if TYPE_CHECKING:
    from jsonargparse import Namespace
    from rich.console import Console

    from cribo.base.arguments import Parser
    from cribo.cli.command import Command
    from cribo.features.config import BackboneSource

DEBUG = "--debug"
"""Option of all commands to print the traceback of every error."""

# Short options for the fields of a `BackboneSource`.
BACKBONE_SHORT = {
    "--backbone": "--backbone.source",
    "--pretrained": "--backbone.pretrained",
    "--trust": "--backbone.trust",
    "--layers": "--backbone.layers",
}

NETWORK = (
    "a run folder or backbone.safetensors of cribo; a timm name (vit_small_patch16_224.dino); a checkpoint of "
    "another project (CrOC, DINO, iBOT, MAE, MoCo v3, DINOv2, TimeT, SlotCon, ...); or weights on the Hugging Face hub "
    "(hf://owner/name, hf://owner/name@revision, hf://owner/name/file)"
)
"""Help of `--backbone` for commands that refuse the baseline mean-colour."""

SUGGESTED = "vit_small_patch14_dinov2.lvd142m"
"""Backbone for a start: small, with good dense features, public, and with a licence for commercial use."""

SUGGESTION = f"for a start, {SUGGESTED} (22 M parameters, licence apache-2.0; docs/backbones.md lists others)"
"""What to pass as a missing `--backbone`."""

_FULL_DISK = "free space there and repeat the command (with --resume if it has that option), or write to another disk"

_LISTED = 5  # unreadable images


def dispatch(
    words: list[str], name: str, kind: str, usage: str, commands: Mapping[str, Callable[[list[str]], int]]
) -> int:
    """Run the command named by the first word with the remaining words."""
    if not words or words[0] in ("-h", "--help"):
        print(usage, end="")
        return 0 if words else 2
    word, *rest = words
    if word not in commands:
        print(f"{name}: unknown {kind} {word!r}: {nearest(word, commands)}", file=sys.stderr)
        return 2
    return commands[word](rest)


def run_command(name: str, command: "Command", words: list[str]) -> int:
    """Run a command, and print interruptions and errors that the user can fix as one line.

    These are errors of files and connections, full disks, lack of memory, `InputError` and `MissingPackage`. Other
    errors are raised with their traceback. With `--debug` among the arguments, the traceback of every error is printed.
    Only rank 0 prints.

    Args:
        name: name of the command, without `cribo`.
        command: the command.
        words: arguments of the command.

    Returns:
        The exit status.
    """
    from cribo.base.console import command_console, log_to

    name = f"cribo {name}"
    mask_messages()
    console = command_console(quiet=not is_first_process())
    log_to(console)
    try:
        command.call([word for word in words if word != DEBUG], console, name=name)
    except KeyboardInterrupt as error:  # its message says what is left (see `if_interrupted`)
        what = str(error) or "nothing was written"
        return _failed(name, f"interrupted; {what}", 130) if is_first_process() else 130
    except Exception as error:
        if DEBUG in words:
            print(without_secrets(traceback.format_exc()), end="", file=sys.stderr)
        if isinstance(error, Stopped):
            # Other ranks exit 0; otherwise the launcher would report a crash.
            return 0 if error.everywhere and not is_first_process() else _failed(name, error, error.status)
        if is_out_of_memory(error):
            reason = str(error).partition(". ")[0] if isinstance(error, RuntimeError) else ""
            return _failed(name, f"{reason or 'out of memory'}: {command.less_memory}", 1)
        if not isinstance(error, InputError) and (full := full_disk(error)) is not None:
            where = "" if full.filename is None else f" while writing {full.filename}"
            what = str(error) if isinstance(error, OSError) and error.errno is None else f"{full.strerror}{where}"
            return _failed(name, f"{what}: {_FULL_DISK}", 1)
        if isinstance(error, OSError):  # for example, a missing file or a full disk
            return _failed(name, error, 2 if isinstance(error, FileNotFoundError | ConnectionError) else 1)
        if isinstance(error, InputError | MissingPackage):
            return _failed(name, error, 2)
        error.add_note(f"{name}: {_request_for_report(name)}")
        raise
    finally:
        _report_dim_images()
    return 0


def _report_dim_images() -> None:
    """Log the number of images of 16 bits that look dark, if images were read."""
    channels = sys.modules.get("cribo.data.channels")
    if channels is not None and (message := channels.DIM_IMAGES.message()):
        logging.getLogger("cribo").warning(message)


def _request_for_report(name: str) -> str:
    """Return the request to report an error that is not the user's."""
    from cribo.base.versions import project_url

    address = project_url("Issues")
    where = "" if address is None else f" at {address}"
    and_output = "" if name == "cribo doctor" else " and the output of cribo doctor"
    return f"this is a bug in cribo or one of its libraries: please report it{where} with the lines above{and_output}"


def _failed(name: str, error: object, status: int) -> int:
    print(printable(without_secrets(f"{name}: {error}")), file=sys.stderr)
    return status


def add_optional_backbone(parser: "Parser", explanation: str) -> None:
    """Add the options of a `BackboneSource` that may be omitted, with the explanation of `--backbone`."""
    from cribo.features.config import BackboneSource

    parser.add_class_arguments(BackboneSource, "backbone", skip={"source"})
    parser.add_argument("--backbone.source", type=str, help=explanation)


def optional_backbone(parsed: "Namespace") -> "BackboneSource | None":
    """Return the backbone of `add_optional_backbone`, or None if it was omitted."""
    from cribo.features.config import BackboneSource

    return None if parsed.backbone.source is None else BackboneSource(**vars(parsed.backbone))


def add_named_results(parser: "Parser", kind: str, out: str, network: str) -> None:
    """Add the options of a results folder: its parent `out`, its name, and whether to resume or replace it."""
    parser.add_argument("--out", type=Path, default=Path(out), help="parent folder of the results")
    parser.add_argument("--name", type=str, help=f"name of the output folder; by default, that of the {network}")
    parser.add_argument("--resume", action="store_true", help=f"continue the interrupted {kind} --name")
    parser.add_argument("--overwrite", action="store_true", help=f"replace the {kind} --name")


def add_results_folder(parser: "Parser", default: str) -> None:
    """Add the options of a results folder that is numbered by default, and whether to resume or replace it."""
    parser.add_argument(
        "--out", type=Path, help=f"folder for the results; it must be new. By default {default}, numbered"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue the interrupted command that wrote to --out, or without --out to the last folder of that name",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace existing results in --out")


def print_unreadable(console: "Console", files: Sequence[tuple[str, str]], where: str | None = None) -> None:
    """Print how many images could not be read, with the first names and reasons; `where` is the file with all."""
    if files:
        console.print(f"{counted(len(files), 'image')} could not be read:")
    for name, reason in files[:_LISTED]:
        console.print(f"  {name}: {reason}")
    if len(files) > _LISTED:
        console.print(f"  and {len(files) - _LISTED} more" + (f": see {where}" if where else ""))


def print_places(console: "Console", places: Mapping[str, Path | str]) -> None:
    """Print the path of each result on its own line."""
    width = max(13, *(len(label) + 1 for label in places))
    for label, place in places.items():
        console.print(f"  {label:<{width}}{place}")
