"""The tab of dense features: principal components as colours, and similarity between patches."""

from collections.abc import Callable
from typing import Any

import gradio as gr

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

    @show_errors
    def alike(sent: Any, row: Any, column: Any) -> tuple[Any, ...]:
        image = uploads.read(sent)
        found = patch_similarity(image, encoder.encode(image), whole_number(row), whole_number(column))
        return found.row, found.column, found.picture, found.sentence, *others(found.vector)

    @show_errors
    def dropped(sent: Any) -> tuple[Any, ...]:
        if sent is None:
            return None, 0, 0, None, _ADVICE, *(() if finder is None else ([],))
        dense = encoder.encode(uploads.read(sent))
        rows, columns = dense.grid
        return colour_picture(dense), *alike(sent, rows // 2, columns // 2)

    @show_errors
    def clicked(sent: Any, event: gr.SelectData) -> tuple[Any, ...]:
        return alike(sent, *encoder.encode(uploads.read(sent)).patch_at(*clicked_point(event)))

    def opened(by: int) -> Callable[..., tuple[Any, ...]]:
        @show_errors
        def open_image(number: Any) -> tuple[Any, ...]:
            assert images is not None
            place = min(max(whole_number(number) + by, 0), len(images) - 1)
            return place, as_picture(images[place].load(_LONGEST).numpy())

        return open_image

    def stepped(down: int, right: int) -> Callable[..., tuple[Any, ...]]:
        @show_errors
        def step(sent: Any, row: Any, column: Any) -> tuple[Any, ...]:
            return alike(sent, whole_number(row) + down, whole_number(column) + right)

        return step

    with gr.Row(equal_height=False):
        with gr.Column(min_width=280):
            picture = sent_picture(f"Your picture ({uploads.limits}): click on a patch", "The chosen picture")
            if images is not None:
                last = len(images) - 1
                with gr.Row():
                    number = gr.Number(None, label=f"Image of the collection (0 to {last})", precision=0, minimum=0)
                    before = gr.Button("← previous image", min_width=110, size="sm", visible=last > 0)
                    after = gr.Button("next image →", min_width=110, size="sm", visible=last > 0)
                # The picture is then handled like an uploaded one.
                number.submit(opened(0), number, [number, picture], api_name="open_image", **REQUEST)
                before.click(opened(-1), number, [number, picture], **HIDDEN)
                after.click(opened(1), number, [number, picture], **HIDDEN)
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
    inputs: list[Any] = [picture, row, column]
    place: list[Any] = [row, column, heat, text]
    if finder is not None:
        gr.Markdown("Nearest objects of the collection to this patch", elem_classes="caption")
        place.append(found_objects("nearest-to-patch"))
    picture.change(dropped, picture, [colours, *place], api_name="features", **REQUEST)
    picture.select(clicked, picture, place, **HIDDEN)
    gr.on([row.submit, row.blur, column.submit, column.blur], alike, inputs, place, api_name="likeness", **REQUEST)
    for arrow, (down, right) in zip(arrows, ((0, -1), (-1, 0), (1, 0), (0, 1)), strict=True):
        arrow.click(stepped(down, right), inputs, place, **HIDDEN)
