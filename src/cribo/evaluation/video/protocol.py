"""Video label propagation by nearest features, as in DINO's `eval_video_segmentation.py`, scored as in DAVIS 2017."""

import dataclasses
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, UInt8
from matplotlib.patches import Patch
from PIL import Image
from torch import Tensor

from cribo.base.colours import rgb
from cribo.base.console import Phases, Progress, no_progress
from cribo.base.drawing import marker_handle
from cribo.base.files import write_whole
from cribo.base.painting import as_picture, tint
from cribo.data.labelled.segmentation import LabelledSubset
from cribo.data.labelled.video import Video, VideoFrames, object_palette
from cribo.data.reading import image_size
from cribo.evaluation.config import square
from cribo.evaluation.pictures import Page, Picture, Row, write_pages
from cribo.evaluation.protocol import Outcome, PatchProtocol
from cribo.evaluation.results import EvaluationResult, percent
from cribo.evaluation.run import Run
from cribo.evaluation.video.config import VideoPropagationSettings
from cribo.features.extraction import EncodedView, PatchFeatures
from cribo.features.propagation import encoded_size, frame_labels, propagate, soft_labels

SEGMENTATIONS = "segmentations"
"""Folder of the segmentation maps."""

_SHOWN_AT = (0, 0.25, 0.5, 0.75, 1)  # of the frames of a video, without the last, which is not scored
_OUTLINE = 255  # white

_RECALLED = 0.5
TOLERANCE = 0.008
"""Maximum distance of matching boundary pixels relative to the image diagonal, rounded up to pixels."""


@dataclass(frozen=True, kw_only=True)
class VideoPropagation(VideoPropagationSettings, PatchProtocol):
    """Video label propagation on frozen features, as in DINO's `eval_video_segmentation.py`."""

    def prepare(self, run: Run) -> Self:
        """Use the fixed input size of the network, if it has one."""
        backbone = run.backbone
        return self if backbone.takes_any_size else dataclasses.replace(self, side=backbone.image_size)

    def measure(self, run: Run) -> Outcome:
        """Propagate and score the objects of all videos."""
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

        def write(result: EvaluationResult, folder: Path) -> None:
            for part in found:
                _write_maps(folder / SEGMENTATIONS / part.video.name, part, images)
            write_pages(folder, "videos", found, partial(videos_page, images=images), number=run.num_pictures)

        return Outcome(
            rows=[row(self.neighbours, found)],
            classes=[part.video.name for part in found],
            write=write,
        )

    def places(self, folder: Path) -> dict[str, Any]:
        """Return the path of the segmentation maps."""
        return {"segmentations": folder / SEGMENTATIONS}


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
        given = soft_labels(first, features.grid(views[0]), video.objects + 1)
        labelled = propagate((_patches(features, view, device) for view in views), given, settings)
        for number, labels in enumerate(labelled, start=1):
            found = frame_labels(labels, patch_size, size).labels
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


def _write_maps(folder: Path, part: Segmented, images: VideoFrames) -> None:
    """Write `<frame>.png` of a video in the format of DAVIS, which its own evaluation reads."""
    folder.mkdir(parents=True)
    for frame, content in zip(part.video.frames, part.maps, strict=True):
        path = folder / f"{Path(images.name(frame)).stem}.png"
        write_whole(path, lambda file, content=content: file.write_bytes(content))


def _png(objects: UInt8[Tensor, "h w"], count: int) -> bytes:
    image = Image.fromarray(objects.numpy())
    image.putpalette(bytes(np.array(object_palette(count), dtype=np.uint8)))
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


def score_frame(
    found: UInt8[Tensor, "h w"], true: UInt8[Tensor, "h w"], objects: int
) -> tuple[Float[Tensor, " objects"], Float[Tensor, " objects"]]:
    """Return J and F of the objects 1 to `objects` in a frame."""
    pairs = [(found == number, true == number) for number in range(1, objects + 1)]
    return (
        torch.tensor([region_similarity(*pair) for pair in pairs], dtype=torch.float64),
        torch.tensor([boundary_accuracy(*pair) for pair in pairs], dtype=torch.float64),
    )


def region_similarity(found: Bool[Tensor, "h w"], true: Bool[Tensor, "h w"]) -> float:
    """Return J, the IoU of two regions; 1 if both are empty."""
    union = int((found | true).sum())
    return int((found & true).sum()) / union if union else 1.0


def boundary_accuracy(found: Bool[Tensor, "h w"], true: Bool[Tensor, "h w"]) -> float:
    """Return F, the harmonic mean of precision and recall of boundary pixels.

    A boundary pixel is matched if the other boundary has a pixel within the tolerance.
    """
    boundaries = torch.stack([boundary(found), boundary(true)])
    counts = boundaries.sum(dim=(1, 2)).tolist()
    if not all(counts):
        return 1.0 if not any(counts) else 0.0
    radius = math.ceil(TOLERANCE * math.hypot(*found.shape))
    matched = boundaries & dilate(boundaries, radius).flip(0)
    precision, recall = (int(part.sum()) / count for part, count in zip(matched, counts, strict=True))
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def boundary(region: Bool[Tensor, "h w"]) -> Bool[Tensor, "h w"]:
    """Return the mask of pixels that differ from their right, lower or lower right neighbour."""
    padded = F.pad(region[None].byte(), (0, 1, 0, 1), mode="replicate")[0].bool()
    return (region ^ padded[:-1, 1:]) | (region ^ padded[1:, :-1]) | (region ^ padded[1:, 1:])


def dilate(regions: Bool[Tensor, "n h w"], radius: int) -> Bool[Tensor, "n h w"]:
    """Return the regions dilated by a disk of `radius` pixels."""
    height, width = regions.shape[1:]
    sums = F.pad(regions.int(), (radius + 1, radius, radius, radius)).cumsum(dim=2, dtype=torch.int32)
    grown = torch.zeros_like(regions)
    for down in range(2 * radius + 1):  # rows of the disk, counted by differences of cumulative sums
        half, rows = math.isqrt(radius**2 - (down - radius) ** 2), sums[:, down : down + height]
        right, left = radius + half + 1, radius - half
        grown |= rows[..., right : right + width] > rows[..., left : left + width]
    return grown


def videos_page(found: Sequence[Segmented], images: VideoFrames) -> Page:
    """Return a page with frames of each video: the predicted objects, and white outlines of the annotated ones.

    Args:
        found: segmented videos, at least one.
        images: frames of the videos.
    """

    def row_of(part: Segmented) -> Row:
        regions, boundaries = (float(each.mean()) for each in (part.regions, part.boundaries))
        pictures = []
        for share in _SHOWN_AT:
            frame = round(share * (len(part.video.frames) - 2))
            index = part.video.frames[frame]
            pictures.append(Picture(_painted(images.load(index), part.objects(frame), images.objects(index))))
        return Row(part.video.name, f"J {percent(regions)} %, F {percent(boundaries)} %", pictures)

    objects = object_palette(max(part.video.objects for part in found))[1:]
    handles = [
        *(Patch(facecolor=rgb(colour), label=f"object {number}") for number, colour in enumerate(objects, start=1)),
        marker_handle("annotated", "white", "0.4", marker="s"),
    ]
    headings = "first frame, given", *(f"at {share:.0%}" for share in _SHOWN_AT[1:])
    return Page(headings, list(map(row_of, found)), handles)


def _painted(
    image: UInt8[Tensor, "c h w"], found: UInt8[Tensor, "h w"], true: UInt8[Tensor, "h w"]
) -> UInt8[np.ndarray, "h w 3"]:
    painted = as_picture(image.numpy()).copy()
    colours = np.array(object_palette(max(int(found.max()), int(true.max()))))
    inside = found.numpy() > 0
    painted[inside] = tint(painted[inside], colours[found.numpy()[inside]])
    for number in range(1, len(colours)):
        painted[boundary(true == number).numpy()] = _OUTLINE
    return painted
