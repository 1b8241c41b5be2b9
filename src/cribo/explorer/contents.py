"""What a page is to show, opened and checked before the server starts."""

from dataclasses import dataclass
from pathlib import Path

from cribo.arguments import ConfigError
from cribo.devices import resolve_devices
from cribo.explorer.network import SharedEncoder
from cribo.explorer.training import require_run
from cribo.retrieval import BackboneConfig, open_encoder

BACKBONE = "backbone.safetensors"


@dataclass(frozen=True)
class Asked:
    """What a user wants to look at.

    Attributes:
        run: a run folder.
        db: a database of objects.
        backbone: whose features are shown; that of the database or of the run when not given.
        images: where the images are; where the database or the run says when not given.
        limit: of images, where objects are found at the start because there is no database.
        device: of the network; a GPU if there is one when not given.
    """

    run: Path | None = None
    db: str | None = None
    backbone: BackboneConfig | None = None
    images: Path | None = None
    limit: int = 100
    device: str | None = None


@dataclass(frozen=True)
class Contents:
    """What there is to show.

    Attributes:
        title: of the page.
        run: a run folder.
        encoder: the network; None while a run has not left one.
        missing: why there is no network; empty if there is one.
    """

    title: str
    run: Path | None
    encoder: SharedEncoder | None
    missing: str = ""


def open_contents(asked: Asked) -> Contents:
    """Open everything that a page shows.

    Raises:
        ValueError: nothing was asked for, or something that is not there, is damaged, or does not go together.
    """
    if asked.run is None and asked.db is None and asked.backbone is None:
        raise ConfigError("there is nothing to look at: give --run DIR, --db DIR or --backbone SOURCE")
    if asked.limit < 1:
        raise ConfigError(f"limit must be >= 1, got {asked.limit}")
    if asked.run is not None:
        require_run(asked.run)
    [device] = resolve_devices(None if asked.device is None else [asked.device], "device")[:1]
    config = asked.backbone
    if config is None and asked.run is not None and (asked.run / BACKBONE).is_file():
        config = BackboneConfig(str(asked.run))
    if config is None:
        missing = (
            f"The run has not left a network yet ({BACKBONE}): start the page again when it has ended, or give "
            "another one by --backbone."
        )
        return Contents(_title(asked), asked.run, None, missing)
    encoder, _ = open_encoder(config, device)
    return Contents(_title(asked), asked.run, SharedEncoder(encoder, device))


def _title(asked: Asked) -> str:
    source = None if asked.backbone is None else asked.backbone.source
    names = [str(Path(str(given)).name or given) for given in (asked.run, asked.db, source) if given is not None]
    return " · ".join(dict.fromkeys(names))
