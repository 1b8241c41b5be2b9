"""Pictures and segmentation maps of videos."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor

from cribo.base.colours import rgb
from cribo.base.drawing import marker_handle, panel_grid, title_row
from cribo.base.files import write_whole
from cribo.base.painting import tint
from cribo.data.labelled.video import VideoFrames, object_palette
from cribo.data.reading import image_size
from cribo.evaluation.pages import write_pages
from cribo.evaluation.results import percent
from cribo.evaluation.video.scoring import boundary
from cribo.evaluation.video.segmenting import Segmented

_SHOWN_AT = (0, 0.25, 0.5, 0.75, 1)  # of the frames of a video, without the last, which is not scored
_OUTLINE = 255  # white


def write_videos(found: Sequence[Segmented], images: VideoFrames, folder: Path, *, number: int) -> None:
    """Write `segmentations/<video>/<frame>.png`, and pictures of six videos each (`videos.png`, ...).

    The maps have the format of DAVIS and can be read by its own evaluation.

    Args:
        found: segmented videos.
        images: frames of the videos.
        folder: output folder.
        number: number of videos to draw.
    """
    for part in found:
        place = folder / "segmentations" / part.video.name
        place.mkdir(parents=True)
        for frame, content in zip(part.video.frames, part.maps, strict=True):
            name = f"{Path(images.name(frame)).stem}.png"
            write_whole(place / name, lambda file, content=content: file.write_bytes(content))
    write_pages(folder, "videos", found, lambda part: draw_videos(part, images), number=number)


def draw_videos(found: Sequence[Segmented], images: VideoFrames) -> Figure:
    """Draw frames of each video with the predicted objects, and the outlines of the annotated ones in white.

    Args:
        found: segmented videos, at least one.
        images: frames of the videos.
    """

    objects = object_palette(max(part.video.objects for part in found))[1:]
    figure, rows = panel_grid(
        [image_size(images.path(part.video.frames[0])) for part in found],
        ("first frame, given", *(f"at {share:.0%}" for share in _SHOWN_AT[1:])),
        row_titles=True,
        handles=[
            *(Patch(facecolor=rgb(colour), label=f"object {number}") for number, colour in enumerate(objects, start=1)),
            marker_handle("annotated", "white", "0.4", marker="s"),
        ],
    )
    for row, part in zip(rows, found, strict=True):
        regions, boundaries = (float(each.mean()) for each in (part.regions, part.boundaries))
        title_row(row, part.video.name, f"J {percent(regions)} %, F {percent(boundaries)} %")
        for share, axes in zip(_SHOWN_AT, row, strict=True):
            frame = round(share * (len(part.video.frames) - 2))
            index = part.video.frames[frame]
            axes.imshow(_paint(images.load(index), part.objects(frame), images.objects(index)))
    return figure


def _paint(
    image: UInt8[Tensor, "3 h w"], found: UInt8[Tensor, "h w"], true: UInt8[Tensor, "h w"]
) -> UInt8[np.ndarray, "h w 3"]:
    painted = image.permute(1, 2, 0).numpy().copy()
    colours = np.array(object_palette(max(int(found.max()), int(true.max()))))
    inside = found.numpy() > 0
    painted[inside] = tint(painted[inside], colours[found.numpy()[inside]])
    for number in range(1, len(colours)):
        painted[boundary(true == number).numpy()] = _OUTLINE
    return painted
