"""Settings and data of video label propagation. This module does not import torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from cribo.base.bounds import at_least
from cribo.evaluation.config import Settings
from cribo.evaluation.data import LabelledData, Splits, absolute, described
from cribo.features.config import FeaturePrecision, PropagationSettings


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
class VideoPropagationSettings(Settings, PropagationSettings):
    """Video label propagation on frozen features, as in DINO's `eval_video_segmentation.py`.

    Attributes:
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

    precision: FeaturePrecision = "float32"
