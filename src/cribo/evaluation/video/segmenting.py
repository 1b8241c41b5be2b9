"""Propagation of objects through videos, and their scores."""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from cribo.base.console import Progress, no_progress
from cribo.data.labelled.video import Video, VideoFrames, object_palette
from cribo.data.reading import image_size
from cribo.evaluation.video.propagation import object_map, propagate
from cribo.evaluation.video.scoring import score_frame
from cribo.evaluation.video.settings import VideoPropagationSettings
from cribo.features.extraction import EncodedView, PatchFeatures

_RECALLED = 0.5


@dataclass(frozen=True)
class Segmented:
    """A video with the predicted objects of its frames.

    Attributes:
        video: the video.
        maps: palette PNG of each frame with the object index of each pixel; the first is the annotation.
        regions: J of each object in each scored frame, all frames except the first and the last.
        boundaries: F of each object in each scored frame.
    """

    video: Video
    maps: Sequence[bytes]
    regions: Float[Tensor, "objects frames"]
    boundaries: Float[Tensor, "objects frames"]

    def objects(self, frame: int) -> UInt8[Tensor, "h w"]:
        """Return the object index of each pixel of a frame, given its 0-based index in the video."""
        with Image.open(io.BytesIO(self.maps[frame])) as image:
            return torch.from_numpy(np.array(image))


def videos_by_size(images: VideoFrames) -> dict[tuple[int, int], list[Video]]:
    """Return the videos grouped by height and width of their frames."""
    found: dict[tuple[int, int], list[Video]] = {}
    for video in images.videos:
        found.setdefault(image_size(images.path(video.frames[0])), []).append(video)
    return found


@torch.no_grad()
def segment_videos(
    features: PatchFeatures,
    images: VideoFrames,
    videos: Sequence[Video],
    settings: VideoPropagationSettings,
    *,
    patch_size: int,
    device: torch.device | str = "cpu",
    progress: Progress = no_progress,
) -> Iterator[Segmented]:
    """Propagate the objects of the first frame of each video, and score them.

    Args:
        features: patch features of all frames of these videos in order, of unit length.
        images: frames of all videos.
        videos: videos to segment.
        settings: settings of the protocol.
        patch_size: patch size in pixels.
        device: device of the propagation.
        progress: progress callback.

    Raises:
        UnreadableImage, DataError: an annotation is unusable.
    """
    start, frames = 0, sum(len(video.frames) for video in videos)
    for video in videos:
        views = [EncodedView(start + number) for number in range(len(video.frames))]
        size = image_size(images.path(video.frames[0]))
        first = images.objects(video.frames[0])
        maps, scores = [_png(first, video.objects)], []
        labelled = propagate((_patches(features, view, device) for view in views), first, video.objects, settings)
        for number, labels in enumerate(labelled, start=1):
            found = object_map(labels, patch_size, size).cpu()
            maps.append(_png(found, video.objects))
            if number < len(views) - 1:
                scores.append(score_frame(found, images.objects(video.frames[number]), video.objects))
            progress("objects of the frames", start + number + 1, frames)
        start += len(views)
        regions, boundaries = (torch.stack(parts, dim=1) for parts in zip(*scores, strict=True))
        yield Segmented(video, maps, regions, boundaries)


def row(neighbours: int, videos: Sequence[Segmented]) -> dict[str, Any]:
    """Return the row of `results.json`: means over all objects, and J&F of each video and object.

    Recall is the fraction of frames above 0.5. J&F is the mean of J and F.
    """
    regions, boundaries = ([getattr(part, name) for part in videos] for name in ("regions", "boundaries"))

    def mean(parts: Sequence[Tensor]) -> float:
        return float(torch.cat([part.double().mean(dim=1) for part in parts]).mean())

    j_mean, f_mean = mean(regions), mean(boundaries)
    return {
        "neighbours": neighbours,
        "j_and_f": (j_mean + f_mean) / 2,
        "j_mean": j_mean,
        "j_recall": mean([part > _RECALLED for part in regions]),
        "f_mean": f_mean,
        "f_recall": mean([part > _RECALLED for part in boundaries]),
        "objects": sum(map(len, regions)),
        "per_class": {part.video.name: float((part.regions + part.boundaries).mean() / 2) for part in videos},
        "per_object": {
            f"{part.video.name}_{number}": {"j": float(j), "f": float(f)}
            for part in videos
            for number, (j, f) in enumerate(
                zip(part.regions.mean(dim=1), part.boundaries.mean(dim=1), strict=True), start=1
            )
        },
    }


def _patches(features: PatchFeatures, view: EncodedView, device: torch.device | str) -> Float[Tensor, "rows columns d"]:
    return features.features(view).to(device).float().unflatten(0, features.grid(view))


def _png(objects: UInt8[Tensor, "h w"], count: int) -> bytes:
    image = Image.fromarray(objects.numpy())
    image.putpalette(bytes(np.array(object_palette(count), dtype=np.uint8)))
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()
