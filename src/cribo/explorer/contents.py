"""Open and check the contents of a page before the server starts."""

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cribo.allocator import keep_freed_memory
from cribo.console import Progress
from cribo.data.images import ImageFiles, ImageSource, open_images
from cribo.devices import resolve_devices
from cribo.explorer.collection import Collection
from cribo.explorer.config import Asked, Limits
from cribo.explorer.network import SharedEncoder
from cribo.explorer.objects import ObjectFinder
from cribo.explorer.training import require_run
from cribo.object_search import DatabaseInfo, ObjectDatabase, ObjectSettings, index_images
from cribo.retrieval import BackboneSource, PatchEncoder, backbone_encoder
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
        title: of the page.
        notes: sentences about missing contents.
        run: a run folder.
        pairs: view pairs of the run.
        encoder: the network.
        finder: objects of a collection.
    """

    title: str
    notes: tuple[str, ...] = ()
    run: Path | None = None
    pairs: "PairSample | None" = None
    encoder: SharedEncoder | None = None
    finder: ObjectFinder | None = None


def open_contents(asked: Asked, limits: Limits, workspace: Path, progress: Progress) -> Contents:
    """Open the contents of a page.

    Args:
        asked: what to show.
        limits: of pictures.
        workspace: an empty folder that exists as long as the page.
        progress: called with the progress.

    Raises:
        ValueError: something does not exist, is damaged, or does not fit together.
    """
    if asked.run is not None:
        require_run(asked.run)
    device = resolve_devices(None if asked.device is None else [asked.device], "device")[0]
    if device == "cpu":
        keep_freed_memory()
    database = None if asked.db is None else ObjectDatabase.open(asked.db, images=asked.images)
    of_run = None if asked.run is None else _network_of(asked.run)
    config = asked.backbone
    if config is None and database is not None:
        config = database.info.backbone_config
    if config is None and of_run is not None:
        config = BackboneSource(of_run)
    title = _title(asked)
    pairs = None
    if asked.run is not None and of_run is not None:
        from cribo.explorer.view_pairs import PairSample  # imports Lightning, which a database does not need

        pairs = PairSample(asked.run, of_run, asked.images, device)
    if config is None:
        note = "The run has no network yet: restart the page after its first checkpoint."
        return Contents(title, (note,), asked.run)
    backbone, about = open_network(config)
    backbone.eval().to(device)
    blocks = None if database is None else database.info.blocks
    plain = blocks_encoder(backbone, blocks) if blocks else backbone_encoder(backbone, layers=config.layers)
    encoder = SharedEncoder(plain, device, probed=probe_encoder(backbone))
    notes: list[str] = []
    if database is not None:
        database.require_encoder(plain, str(about["name"]))
    else:
        place = _Workplace(workspace, asked, limits, progress)
        database = place.build(encoder, config, about, notes)
    finder = None
    if database is not None:
        finder = ObjectFinder(Collection(database, max_pixels=limits.pixels), encoder)
    return Contents(title, tuple(notes), asked.run, pairs, encoder, finder)


def _network_of(run: Path) -> str | None:
    """Source of a run's network: its final backbone or its last checkpoint."""
    from cribo.training.checkpoints import checkpoint_files

    if (run / _BACKBONE).is_file():
        return str(run)
    newest = next(iter(checkpoint_files(run)), None)
    return None if newest is None else str(newest)


def _title(asked: Asked) -> str:
    source = None if asked.backbone is None else asked.backbone.source
    names = [str(Path(str(given)).name or given) for given in (asked.run, asked.db, source) if given is not None]
    return " · ".join(dict.fromkeys(names))


@dataclass(frozen=True)
class _Workplace:
    """Builds a temporary database of some images at start-up."""

    folder: Path
    asked: Asked
    limits: Limits
    progress: Progress

    def build(
        self, encoder: SharedEncoder, config: BackboneSource, about: dict[str, object], notes: list[str]
    ) -> ObjectDatabase | None:
        """Build a database of some images of the run or folder; None, and a note, if there are no images."""
        try:
            files, total = self._files()
        except (ValueError, OSError) as error:
            if self.asked.images is not None:
                raise
            log.warning("no collection to search: %s", error)
            notes.append("No collection to search. Restart the page with --images DIR or --db DIR.")
            return None
        if files is None:
            return None
        notes.append(
            f"The objects are those of {len(files)} of {total} images. For all images, use cribo index and --db."
        )
        database = ObjectDatabase.create(
            self.folder / "objects.db", _info(encoder.encoder, encoder.device, config, about, files.folder)
        )
        index_images(database, encoder.encoder, files, device=encoder.device, progress=self.progress)
        return database

    def _files(self) -> tuple[ImageFiles | None, int]:
        """Return some of the images, evenly spread, and the number of all."""
        if self.asked.images is not None:
            source: ImageSource = open_images(self.asked.images, max_pixels=self.limits.pixels)
        elif self.asked.run is not None:
            from cribo.explorer.view_pairs import run_config
            from cribo.pretraining.session import open_source

            source = open_source(run_config(self.asked.run, None))
        else:
            return None, 0
        chosen = range(0, len(source), -(-len(source) // self.asked.limit))
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


def _info(
    encoder: PatchEncoder, device: str, config: BackboneSource, about: dict[str, object], root: str
) -> DatabaseInfo:
    return DatabaseInfo(
        identity=str(encoder.identity),
        backbone=about,
        config=dataclasses.asdict(config),
        dim=encoder.dim(device),
        settings=ObjectSettings(),
        root=str(Path(root).absolute()),
    )
