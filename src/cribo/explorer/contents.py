"""Open and check the contents of a page before the server starts."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import tifffile
from jaxtyping import UInt8
from PIL import Image

from cribo.apps.search import DatabaseInfo, ObjectDatabase, ObjectSettings, index_images
from cribo.base.console import Progress
from cribo.base.devices import resolve_devices
from cribo.base.errors import InputError, Untrusted
from cribo.base.files import require
from cribo.base.machine import keep_freed_memory
from cribo.base.redaction import without_secrets
from cribo.data.config import Reading, spread
from cribo.data.sources.images import EncodedImages, ImageFiles, ImageSource, open_images, require_readable
from cribo.data.survey import surveyed
from cribo.explorer.collection import Collection
from cribo.explorer.config import ExploreConfig
from cribo.explorer.example_folder import ExampleFolder
from cribo.explorer.images import FolderImages
from cribo.explorer.network import SharedNetwork
from cribo.explorer.objects import ObjectFinder
from cribo.explorer.segmenting import Visitors
from cribo.features import BackboneSource, Encoder
from cribo.features.memory import probe_encoder
from cribo.features.probes.fitting import default_blocks
from cribo.features.reading import completed_for
from cribo.pretraining.files import CONFIG

if TYPE_CHECKING:
    from cribo.explorer.view_pairs import PairSample

log = logging.getLogger("cribo")

_BACKBONE = "backbone.safetensors"
_GENERATED = 100  # number of images of a run without image files


@dataclass(frozen=True)
class Contents:
    """Contents of a page.

    Attributes:
        title: title of the page.
        encoder: the network.
        reading: how uploaded pictures are read: as the images are.
        notes: sentences about missing contents.
        visitors: sessions of the Segment tab, with all images of the collection.
        pairs: view pairs of the run.
        finder: search among the objects of a collection.
    """

    title: str
    encoder: SharedNetwork
    reading: Reading
    visitors: Visitors
    notes: tuple[str, ...] = ()
    pairs: "PairSample | None" = None
    finder: ObjectFinder | None = None


def open_contents(config: ExploreConfig, workspace: Path, progress: Progress) -> Contents:
    """Open the contents of a page.

    Args:
        config: contents to open.
        workspace: an empty folder for temporary files, which must exist as long as the page.
        progress: called with the progress.

    Raises:
        ValueError: something does not exist, is damaged, or is inconsistent.
    """
    of_run = None if config.run is None else _network_of(config.run)
    device = resolve_devices(None if config.device is None else [config.device], "device")[0]
    if device == "cpu":
        keep_freed_memory()
    database = None if config.db is None else ObjectDatabase.open(config.db, images=config.images, trust=config.trust)
    source = config.backbone
    if source is None and database is not None:
        source = database.info.backbone_source(trust=config.trust)
    if source is None and of_run is not None:
        source = BackboneSource(of_run, trust=config.trust)
    if source is None:
        raise InputError(f"{config.run} has no checkpoint yet: wait for its first one, or give --backbone")
    if database is None:
        config = replace(config, reading=completed_for(source, config.reading))
    reading = config.reading if database is None else database.reading(config.reading)
    pairs = None
    if config.run is not None and of_run is not None:
        from cribo.explorer.view_pairs import PairSample  # imports Lightning, which a database does not need

        pairs = PairSample(config.run, of_run, config.images, device, reading=config.reading, trust=config.trust)
    blocks = None if database is None else database.info.blocks
    plain = Encoder(source, blocks=blocks, device=device, in_chans=reading.in_chans)
    probed = probe_encoder(plain.backbone)
    encoder = SharedNetwork(plain, probed=probe_encoder(plain.backbone, default_blocks(probed.blocks)))
    if database is not None:
        database.require_encoder(plain, str(plain.about["name"]))
    notes: list[str] = []
    if database is not None:
        files = _files_of(database, reading)
    else:
        files, reading = _images(config, workspace, notes, progress)
    in_folder = reading if files is None else files.reading
    folder = None if config.examples is None else _example_folder(config.examples, files, in_folder)
    visitors = Visitors(encoder, None if files is None else FolderImages(files), folder)
    visitors.warm(progress)
    if database is None and files is not None and config.limit:
        root = str(Path(files.folder).absolute())
        info = replace(DatabaseInfo.of(plain, source, ObjectSettings(), root), pixels=files.reading.given)
        database = ObjectDatabase.create(workspace / "objects.db", info)
        chosen = spread(len(files), config.limit)
        some = ImageFiles(files.folder, (files.name(number) for number in chosen), reading=files.reading)
        index_images(database, encoder.encoder, some, progress=progress)
        if len(chosen) < len(files):
            notes.append(
                f"Objects are those of {len(chosen)} of {len(files)} images: for all, use cribo index and --db."
            )
    finder = None
    if database is not None:
        finder = ObjectFinder(Collection(database, reading=in_folder), encoder)
    return Contents(_title(config), encoder, reading, visitors, tuple(notes), pairs, finder)


def _network_of(run: Path) -> str | None:
    """Return the source of a run's network: its final backbone or its last checkpoint; None if it has none yet."""
    from cribo.training.checkpoints import checkpoint_files

    require(run)
    if not (run / CONFIG).is_file():
        raise InputError(f"{run} is not a run (no {CONFIG}): use the folder printed by `cribo pretrain`")
    if (run / _BACKBONE).is_file():
        return str(run)
    newest = next(iter(checkpoint_files(run)), None)
    return None if newest is None else str(newest)


def _title(config: ExploreConfig) -> str:
    source = None if config.backbone is None else config.backbone.source
    given = (without_secrets(str(one)) for one in (config.run, config.db, source) if one is not None)
    names = [Path(one).name or one for one in given]
    return " · ".join(dict.fromkeys(names))


def _files_of(database: ObjectDatabase, reading: Reading) -> ImageFiles:
    """Return the readable images of a database."""
    if not database.info.files:
        raise InputError(
            f"{database.uri} contains images of {database.info.images}, which are not files in a folder: cribo explore "
            "shows files only, so use cribo search"
        )
    names = [image.path for image in database.images() if not image.error]
    return ImageFiles(database.root, names, reading=reading)


def _images(
    config: ExploreConfig, workspace: Path, notes: list[str], progress: Progress
) -> tuple[ImageFiles | None, Reading]:
    """Return the images of the folder or run, and how its pictures are read; without images, append a note to `notes`.

    Generated and packed images are decoded into `workspace`, whose files are not read with the returned options.
    """
    source: ImageSource
    try:
        if config.run is not None:
            from cribo.explorer.view_pairs import COMMAND, run_config
            from cribo.pretraining.recorded import open_run_images

            source = open_run_images(
                run_config(config.run),
                config.run,
                config.images,
                reading=config.reading,
                command=COMMAND,
                trust=config.trust,
            )
        elif config.images is not None:
            source = open_images(config.images, reading=config.reading)
            source.reading = surveyed(source)
        else:
            return None, config.reading
        reading = source.reading if isinstance(source, EncodedImages) else config.reading
        if isinstance(source, ImageFiles):
            files = ImageFiles(source.folder, source.names, reading=reading)
            require_readable(files, str(config.images or config.run))
            return files, reading
    except (ValueError, OSError) as error:
        if config.images is not None or isinstance(error, Untrusted):
            raise
        log.warning("no collection: %s", error)
        notes.append("No collection. Restart the page with --images DIR or --db DIR.")
        return None, config.reading
    folder = workspace / "images"
    folder.mkdir()
    chosen = spread(len(source), config.limit or _GENERATED)
    for done, number in enumerate(chosen, start=1):  # images that are generated, or packed in shards
        _save(source.load(number).permute(1, 2, 0).numpy(), folder / f"{number:07d}")
        progress("images", done, len(chosen))
    in_chans = reading.in_chans
    decoded = Reading(channels=None if in_chans == 3 else tuple(range(in_chans)))
    return open_images(folder, reading=decoded), reading


def _save(pixels: UInt8[np.ndarray, "h w c"], stem: Path) -> None:
    """Save decoded pixels without loss: as PNG, or with other channels than RGB as TIFF."""
    if pixels.shape[2] == 3:
        Image.fromarray(pixels).save(stem.with_suffix(".png"))
    else:
        tifffile.imwrite(stem.with_suffix(".tif"), pixels, photometric="minisblack", planarconfig="contig")


def _example_folder(path: Path, files: ImageFiles | None, reading: Reading) -> ExampleFolder:
    """Open the folder of the examples, which must be outside the collection."""
    if files is not None and path.expanduser().resolve().is_relative_to(Path(files.folder).resolve()):
        raise InputError(
            f"--examples {path} is inside the folder of the images, {files.folder}, where its images would be listed "
            "too: choose another folder"
        )
    return ExampleFolder(path, reading)
