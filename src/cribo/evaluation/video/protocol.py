"""Video label propagation protocol: data and measurement."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from cribo.base.bounds import at_least, check_bounds
from cribo.evaluation.data import Splits, absolute, described
from cribo.evaluation.protocol import Outcome, PatchProtocol
from cribo.evaluation.settings import square
from cribo.evaluation.video.settings import VideoPropagationSettings

if TYPE_CHECKING:
    from cribo.evaluation.run import Run

_MULTIPLE = 64  # pixels, of the longer side in DINO


@dataclass
class VideoData:
    """Videos whose frames have annotated objects: DAVIS 2017, or a folder of the same layout.

    Attributes:
        root: folder with JPEGImages, Annotations and ImageSets of DAVIS 2017 (480p); without ImageSets, all videos of
            your own folder are used.
        split: name of a list in ImageSets/2017. [val]
        partial: accept fewer videos than in DAVIS. The scores are not comparable with published
            ones.
        limit: maximum number of videos, evenly spaced, for a quick trial.
    """

    layout: ClassVar[str] = "JPEGImages and Annotations with a folder per video, as in DAVIS 2017"

    root: str
    split: str = "val"
    partial: bool = False
    limit: Annotated[int, at_least(1)] | None = None

    def __post_init__(self) -> None:
        check_bounds(self, "data.")

    @classmethod
    def find(cls, folder: Path) -> Self | None:
        """Return the videos in a folder, None if there are none."""
        from cribo.data.labelled.video import has_videos

        return cls(str(folder)) if has_videos(folder) else None

    def open(self) -> Splits:
        """Open the videos.

        Raises:
            MissingData: a folder, list, frame or annotation does not exist.
            DataError: a video cannot be scored, as in `cribo.data.labelled.video.open_videos`.
        """
        from cribo.data.labelled.video import open_videos

        images = open_videos(self.root, self.split, partial=self.partial, limit=self.limit)
        root = absolute(self.root)
        name = "davis2017" if (root / "ImageSets" / "2017").is_dir() else root.name
        objects = sum(video.objects for video in images.videos)
        about = described(self, root, name=name, videos=len(images.videos), frames=len(images), objects=objects)
        return Splits(images, images, name, about)


@dataclass(frozen=True, kw_only=True)
class VideoPropagation(VideoPropagationSettings, PatchProtocol):
    """Video label propagation on frozen features, as in DINO's `eval_video_segmentation.py`."""

    title: ClassVar[str] = "Video label propagation"
    metrics: ClassVar[tuple[str, ...]] = ("j_and_f", "j_mean", "j_recall", "f_mean", "f_recall")
    varies: ClassVar[str] = "neighbours"
    class_metric: ClassVar[str] = "J&F"
    data_type: ClassVar[type[Any]] = VideoData
    pictures: ClassVar[str] = "videos for which the objects are drawn"
    less_memory: ClassVar[str] = "lower --runtime.batch_size or --side"
    description: ClassVar[str] = """\
Video label propagation: the objects of the first frame are tracked through the video by the most similar patches of
previous frames, and scored by region and boundary (J&F). Nothing is trained.

  cribo evaluate video --backbone vit_small_patch16_224.dino --data DAVIS
  cribo evaluate video --backbone runs/mine --data MINE

Features are cached on disk. For a quick trial: --limit 2 --side 240
"""

    def prepare(self, run: "Run") -> Self:
        """Use the fixed input size of the network, if it has one."""
        backbone = run.backbone
        return self if backbone.takes_any_size else dataclasses.replace(self, side=backbone.image_size)

    def measure(self, run: "Run") -> Outcome:
        """Propagate and score the objects of all videos."""
        from cribo.base.console import Phases
        from cribo.data.labelled.segmentation import LabelledSubset
        from cribo.evaluation.video.pictures import write_videos
        from cribo.evaluation.video.segmenting import row, segment_videos, videos_by_size

        images, backbone = run.data.val, run.backbone
        found = []
        for size, videos in videos_by_size(images).items():
            encoded = square(self.side, backbone.patch_size)
            if backbone.takes_any_size:
                encoded = encoded_size(size, self.side, backbone.patch_size)
            features = run.patches(
                LabelledSubset(images, (frame for video in videos for frame in video.frames)),
                size=encoded,
                interpolation=self.interpolation,
                precision=self.precision,
            )
            with Phases(run.console) as progress:
                found += segment_videos(
                    features,
                    images,
                    videos,
                    self,
                    patch_size=backbone.patch_size,
                    device=run.devices[0],
                    progress=progress,
                )
        found.sort(key=lambda part: part.video.frames.start)
        return Outcome(
            rows=[row(self.neighbours, found)],
            classes=[part.video.name for part in found],
            write=lambda result, folder: write_videos(found, images, folder, number=run.num_pictures),
        )

    def places(self, folder: Path) -> dict[str, Any]:
        """Return the path of the segmentation maps."""
        return {"segmentations": folder / "segmentations"}


def encoded_size(size: tuple[int, int], side: int, patch_size: int) -> tuple[int, int]:
    """Return the (height, width) in pixels at which frames are encoded, as in DINO.

    Args:
        size: height and width of the frames.
        side: shorter side in pixels.
        patch_size: patch size of the backbone in pixels.

    Example:
        >>> encoded_size((480, 854), 480, 16), encoded_size((854, 480), 480, 14)
        ((480, 832), (854, 476))
    """
    multiple = _MULTIPLE if _MULTIPLE % patch_size == 0 else patch_size
    shorter = max(1, side // patch_size) * patch_size
    longer = max(shorter, side * max(size) // min(size) // multiple * multiple)
    return (shorter, longer) if size[0] <= size[1] else (longer, shorter)
