"""Settings and data of video label propagation. This module does not import torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from cribo.base.bounds import above, at_least
from cribo.evaluation.config import Settings
from cribo.evaluation.data import LabelledData, Splits, absolute, described
from cribo.features.config import FeaturePrecision
from cribo.method.config import Interpolation


@dataclass
class VideoData(LabelledData):
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

    @classmethod
    def recognises(cls, folder: Path) -> bool:
        """Whether a folder has videos."""
        from cribo.data.labelled.video import has_videos

        return has_videos(folder)

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
class VideoPropagationSettings(Settings):
    """Video label propagation on frozen features, as in DINO's `eval_video_segmentation.py`.

    Attributes:
        neighbours: k, number of most similar patches whose labels are averaged.
        radius: search radius in patches, in both directions.
        previous: number of previous frames to search, in addition to the first.
        temperature: temperature of the weights exp(cosine / temperature).
        side: shorter side of resized frames in pixels, rounded down to a multiple of the patch size; the longer side is
            rounded down to a multiple of 64 pixels, or of the patch size if it does not divide 64.
        interpolation: interpolation of resized frames.
        precision: precision of the stored features; float16 halves their size.

    Raises:
        InputError: a value is out of range.
    """

    name: ClassVar[str] = "video"
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

    neighbours: Annotated[int, at_least(1)] = 5
    radius: Annotated[int, at_least(1)] = 12
    previous: Annotated[int, at_least(0)] = 7
    temperature: Annotated[float, above(0)] = 0.1
    side: Annotated[int, at_least(1)] = 480
    interpolation: Interpolation = "bilinear"
    precision: FeaturePrecision = "float32"
