"""Interface of export targets: writing, loading, and instructions for the user."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from cribo.apps.export.config import ExportOptions
from cribo.models import Backbone

Encode = Callable[[Float[Tensor, "b c h w"]], tuple[Float[Tensor, "b n d"], Float[Tensor, "b d"]]]
"""Computes tokens and global token of float32 RGB images in 0-1 with the target's library only."""

Step = Callable[[str], AbstractContextManager[object]]
"""Shows the progress of a step of unknown length, with its name, until the end of a `with` statement."""


def no_step(name: str) -> AbstractContextManager[object]:
    """Show no progress."""
    return contextlib.nullcontext()


@dataclass(frozen=True)
class Written:
    """The result of writing an export.

    Attributes:
        how_to_load: Python code that loads the export, with the placeholder `{folder}`.
        notes: notes for the user.
    """

    how_to_load: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Exporter:
    """An export target.

    Attributes:
        write: writes a float32 backbone on the host to an empty folder, in the precision of the options, and shows its
            steps.
        load: loads an export of these options from its folder.
        unsupported_reason: returns the reason if a backbone is not supported, otherwise None.
    """

    write: Callable[[Backbone, Path, ExportOptions, Step], Written]
    load: Callable[[Path, ExportOptions], Encode]
    unsupported_reason: Callable[[Backbone, ExportOptions], str | None]


def data_type(options: ExportOptions) -> torch.dtype:
    """Return the data type of the exported weights and features."""
    return getattr(torch, options.precision)


def in_precision(code: str, options: ExportOptions) -> str:
    """Return Python code whose placeholder `{half}` converts a network or images to the precision."""
    return code.replace("{half}", ".half()" if options.precision == "float16" else "")
