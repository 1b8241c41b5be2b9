"""What each target of an export gives: how it is written, how it is loaded back, how a user loads it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jaxtyping import Float
from torch import Tensor

from cribo.errors import MissingPackage
from cribo.export.options import Options
from cribo.models import Backbone

Encode = Callable[[Float[Tensor, "b 3 h w"]], tuple[Float[Tensor, "b n d"], Float[Tensor, "b d"]]]
"""Tokens and global token of RGB images in 0-1, by the target's library alone."""


@dataclass(frozen=True)
class Written:
    """What has been written into a folder.

    Attributes:
        how_to_load: lines of Python that load it; `{folder}` stands for the folder.
        notes: what a user should know.
    """

    how_to_load: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Exporter:
    """One target.

    Attributes:
        write: writes a backbone, on the host and in float32, into an empty folder.
        load: loads it back from the folder alone.
        refusal: why a backbone cannot be held; None where it can.
    """

    write: Callable[[Backbone, Path, Options], Written]
    load: Callable[[Path], Encode]
    refusal: Callable[[Backbone, Options], str | None]


class MissingExtra(MissingPackage):
    """A library of the extra `export` is not installed."""

    def __init__(self, target: str, error: ImportError) -> None:
        super().__init__(f'--to {target} needs {error.name}: pip install "cribo-ssl[export]"')
