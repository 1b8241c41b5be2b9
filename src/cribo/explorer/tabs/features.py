"""The tab of dense features: principal components as colours, and similarity between patches."""

from collections.abc import Callable
from typing import Any

import gradio as gr
from jaxtyping import UInt8
from torch import Tensor

from cribo.base.painting import as_picture
from cribo.explorer.features import colour_picture, patch_similarity
from cribo.explorer.images import FolderImages
from cribo.explorer.network import SharedNetwork
from cribo.explorer.objects import ObjectFinder
from cribo.explorer.tabs.fields import (
    HIDDEN,
    REQUEST,
    clicked_point,
    found_objects,
    sent_picture,
    show_errors,
    shown_picture,
    whole_number,
)
from cribo.explorer.uploads import Uploads

_ADVICE = "Drop a picture on the field, or choose a file. Uploaded pictures are deleted when the server stops."
_MATCHES = 6
_LONGEST = 1024  # longer side of an image of the collection in pixels; the network sees at most 4,096 patches


def features_tab(
    encoder: SharedNetwork, uploads: Uploads, finder: ObjectFinder | None, images: FolderImages | None
) -> None:
    """Add a field for a picture, its features as colours, and the similarity to a selected patch.

    The picture is uploaded, or one of the images of a collection. The similarity is shown as a heat map and, with a
    collection of objects, by the nearest objects.
    """

    def others(vector: Any) -> tuple[Any, ...]:
        return () if finder is None else (finder.like(vector, _MATCHES)[0],)

    def read(sent: Any, opened: int | None) -> UInt8[Tensor, "c h w"]:
        """Read the opened image of the collection, of which the browser has a picture; or else what was uploaded."""
        return uploads.read(sent) if images is None or opened is None else images[opened].load(_LONGEST)

    @show_errors
    def alike(sent: Any, opened: int | None, row: Any, column: Any) -> tuple[Any, ...]:
        image = read(sent, opened)
        found = patch_similarity(image, encoder.encode(image), whole_number(row), whole_number(column))
        return found.row, found.column, found.picture, found.sentence, *others(found.vector)

    @show_errors
    def shown(sent: Any, opened: int | None) -> tuple[Any, ...]:
        if sent is None and opened is None:
            return None, 0, 0, None, _ADVICE, *(() if finder is None else ([],))
        dense = encoder.encode(read(sent, opened))
        rows, columns = dense.grid
        return colour_picture(dense), *alike(sent, opened, rows // 2, columns // 2)

    @show_errors
    def clicked(sent: Any, opened: int | None, event: gr.SelectData) -> tuple[Any, ...]:
        return alike(sent, opened, *encoder.encode(read(sent, opened)).patch_at(*clicked_point(event)))

    def turned(by: int) -> Callable[..., tuple[Any, ...]]:
        @show_errors
        def open_image(number: Any) -> tuple[Any, ...]:
            assert images is not None
            place = min(max(whole_number(number) + by, 0), len(images) - 1)
            return place, place, as_picture(images[place].load(_LONGEST).numpy())

        return open_image

    def stepped(down: int, right: int) -> Callable[..., tuple[Any, ...]]:
        @show_errors
        def step(sent: Any, opened: int | None, row: Any, column: Any) -> tuple[Any, ...]:
            return alike(sent, opened, whole_number(row) + down, whole_number(column) + right)

        return step

    opened, turns = gr.State(None), []
    with gr.Row(equal_height=False):
        with gr.Column(min_width=280):
            picture = sent_picture(f"Your picture ({uploads.limits}): click on a patch", "The chosen picture")
            if images is not None:
                last = len(images) - 1
                with gr.Row():
                    number = gr.Number(None, label=f"Image of the collection (0 to {last})", precision=0, minimum=0)
                    before = gr.Button("← previous image", min_width=110, size="sm", visible=last > 0)
                    after = gr.Button("next image →", min_width=110, size="sm", visible=last > 0)
                place = [number, opened, picture]
                turns = [
                    number.submit(turned(0), number, place, api_name="open_image", **REQUEST),
                    before.click(turned(-1), number, place, **HIDDEN),
                    after.click(turned(1), number, place, **HIDDEN),
                ]
        with gr.Column(min_width=280):
            colours = shown_picture(
                "Its features: three principal components as red, green and blue", "Principal components as colours"
            )
    with gr.Row(equal_height=False):
        with gr.Column(min_width=280):
            text = gr.Markdown(_ADVICE, elem_id="features-text")
            with gr.Row():
                row = gr.Number(0, label="Row of the patch", precision=0, minimum=0, min_width=110)
                column = gr.Number(0, label="Column of the patch", precision=0, minimum=0, min_width=110)
            with gr.Row():
                arrows = [gr.Button(name, min_width=60, size="sm") for name in ("← left", "↑ up", "↓ down", "right →")]
        with gr.Column(min_width=280):
            heat = shown_picture("Similarity of all patches to the selected one", "Heat map of the similarity")
    source = [picture, opened]
    inputs: list[Any] = [*source, row, column]
    found: list[Any] = [row, column, heat, text]
    if finder is not None:
        gr.Markdown("Nearest objects of the collection to this patch", elem_classes="caption")
        found.append(found_objects("nearest-to-patch"))
    picture.input(lambda: None, None, opened, **HIDDEN).then(
        shown, source, [colours, *found], api_name="features", **REQUEST
    )
    for turn in turns:
        turn.then(shown, source, [colours, *found], **HIDDEN)
    picture.select(clicked, source, found, **HIDDEN)
    gr.on([row.submit, row.blur, column.submit, column.blur], alike, inputs, found, api_name="likeness", **REQUEST)
    for arrow, (down, right) in zip(arrows, ((0, -1), (-1, 0), (1, 0), (0, 1)), strict=True):
        arrow.click(stepped(down, right), inputs, found, **HIDDEN)
