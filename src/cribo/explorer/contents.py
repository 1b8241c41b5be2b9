"""Open and check the contents of a page before the server starts."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cribo.allocator import keep_freed_memory
from cribo.console import Progress
from cribo.data.images import ImageFiles, ImageSource, open_images
from cribo.devices import resolve_devices
from cribo.explorer.collection import Collection
from cribo.explorer.config import ExploreConfig, Limits
from cribo.explorer.network import SharedEncoder
from cribo.explorer.objects import ObjectFinder
from cribo.explorer.training import require_run
from cribo.object_search import DatabaseInfo, ObjectDatabase, ObjectSettings, index_images
from cribo.retrieval import BackboneSource, backbone_encoder
from cribo.retrieval.encoders import blocks_encoder, open_network
from cribo.segmentation import probe_encoder

if TYPE_CHECKING:
    from cribo.explorer.view_pairs import PairSample

log = logging.getLogger("cribo")

_BACKBONE = "backbone.safetensors"


@dataclass(frozen=True)
class Contents:
    """Contents of a page.

    Attributes:
        title: title of the page.
        notes: sentences about missing contents.
        run: a run folder.
        pairs: view pairs of the run.
        encoder: the network.
        finder: search among the objects of a collection.
    """

    title: str
    notes: tuple[str, ...] = ()
    run: Path | None = None
    pairs: "PairSample | None" = None
    encoder: SharedEncoder | None = None
    finder: ObjectFinder | None = None


def open_contents(config: ExploreConfig, limits: Limits, workspace: Path, progress: Progress) -> Contents:
    """Open the contents of a page.

    Args:
        config: contents to open.
        limits: limits of pictures.
        workspace: an empty folder for temporary files, which must exist as long as the page.
        progress: called with the progress.

    Raises:
        ValueError: something does not exist, is damaged, or is inconsistent.
    """
    if config.run is not None:
        require_run(config.run)
    device = resolve_devices(None if config.device is None else [config.device], "device")[0]
    if device == "cpu":
        keep_freed_memory()
    database = None if config.db is None else ObjectDatabase.open(config.db, images=config.images)
    of_run = None if config.run is None else _network_of(config.run)
    source = config.backbone
    if source is None and database is not None:
        source = database.info.backbone_config
    if source is None and of_run is not None:
        source = BackboneSource(of_run)
    title = _title(config)
    pairs = None
    if config.run is not None and of_run is not None:
        from cribo.explorer.view_pairs import PairSample  # imports Lightning, which a database does not need

        pairs = PairSample(config.run, of_run, config.images, device)
    if source is None:
        note = "The run has no checkpoint yet: restart the page once it has one."
        return Contents(title, (note,), config.run)
    backbone, about = open_network(source)
    backbone.eval().to(device)
    blocks = None if database is None else database.info.blocks
    plain = blocks_encoder(backbone, blocks) if blocks else backbone_encoder(backbone, layers=source.layers)
    encoder = SharedEncoder(plain, device, probed=probe_encoder(backbone))
    notes: list[str] = []
    if database is not None:
        database.require_encoder(plain, str(about["name"]))
    else:
        builder = _TemporaryDatabase(workspace, config, limits, progress)
        database = builder.build(encoder, source, about, notes)
    finder = None
    if database is not None:
        finder = ObjectFinder(Collection(database, max_pixels=limits.pixels), encoder)
    return Contents(title, tuple(notes), config.run, pairs, encoder, finder)


def _network_of(run: Path) -> str | None:
    """Return the source of a run's network: its final backbone or its last checkpoint."""
    from cribo.training.checkpoints import checkpoint_files

    if (run / _BACKBONE).is_file():
        return str(run)
    newest = next(iter(checkpoint_files(run)), None)
    return None if newest is None else str(newest)


def _title(config: ExploreConfig) -> str:
    source = None if config.backbone is None else config.backbone.source
    names = [str(Path(str(given)).name or given) for given in (config.run, config.db, source) if given is not None]
    return " · ".join(dict.fromkeys(names))


@dataclass(frozen=True)
class _TemporaryDatabase:
    """Builder of a temporary database of some images at start-up."""

    folder: Path
    config: ExploreConfig
    limits: Limits
    progress: Progress

    def build(
        self, encoder: SharedEncoder, source: BackboneSource, about: dict[str, object], notes: list[str]
    ) -> ObjectDatabase | None:
        """Build a database of some images of the run or folder; return None and add a note if there are no images."""
        try:
            files, total = self._files()
        except (ValueError, OSError) as error:
            if self.config.images is not None:
                raise
            log.warning("no collection to search: %s", error)
            notes.append("No collection to search. Restart the page with --images DIR or --db DIR.")
            return None
        if files is None:
            return None
        notes.append(
            f"The collection contains {len(files)} of {total} images. For all images, use cribo index and --db."
        )
        root = str(Path(files.folder).absolute())
        info = DatabaseInfo.of(encoder.encoder, encoder.device, about, source, ObjectSettings(), root)
        database = ObjectDatabase.create(self.folder / "objects.db", info)
        index_images(database, encoder.encoder, files, device=encoder.device, progress=self.progress)
        return database

    def _files(self) -> tuple[ImageFiles | None, int]:
        """Return at most `limit` images, evenly spaced, and the total number of images."""
        if self.config.images is not None:
            source: ImageSource = open_images(self.config.images, max_pixels=self.limits.pixels)
        elif self.config.run is not None:
            from cribo.explorer.view_pairs import run_config
            from cribo.pretraining.session import open_source

            source = open_source(run_config(self.config.run, None))
        else:
            return None, 0
        chosen = range(0, len(source), -(-len(source) // self.config.limit))
        if isinstance(source, ImageFiles):
            names = (source.name(number) for number in chosen)
            return ImageFiles(source.folder, names, max_pixels=self.limits.pixels), len(source)
        return self._written(source, chosen), len(source)

    def _written(self, source: ImageSource, chosen: range) -> ImageFiles:
        """Write generated images to files."""
        from torchvision.transforms.v2.functional import to_pil_image

        folder = self.folder / "images"
        folder.mkdir()
        for done, number in enumerate(chosen, start=1):
            to_pil_image(source.load(number)).save(folder / f"{number:07d}.png")
            self.progress("images", done, len(chosen))
        return open_images(folder, max_pixels=self.limits.pixels)
