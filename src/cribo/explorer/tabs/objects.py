"""The tab of objects: an object of an image and its nearest objects in other images."""

from typing import Any

import gradio as gr

from cribo.explorer.objects import PAGE, ObjectFinder, QueryImage, query_picture, query_sentence
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
from cribo.explorer.uploads import Refused, Uploads

_MATCHES = 12  # as in the paper's figures
_MOST_MATCHES = 48
_SCROLL_UP = """() => {
    const picture = document.getElementById("object-picture");
    if (picture.getBoundingClientRect().top < 0) picture.scrollIntoView();
}"""


def objects_tab(tab: gr.Tab, finder: ObjectFinder, uploads: Uploads) -> None:
    """Add pages of collection images, the selected image, and the objects most similar to its selected object."""
    last = len(finder.collection) - 1

    def query(sent: Any, number: Any) -> QueryImage:
        return finder.of_collection(whole_number(number)) if sent is None else finder.of_picture(uploads.read(sent))

    def answer(target: QueryImage, chosen: Any, count: Any) -> tuple[Any, ...]:
        place = target.object(whole_number(chosen)).number
        drawn, found = finder.matches(target, place, min(max(whole_number(count), 1), _MOST_MATCHES))
        return place, query_picture(target, place), query_sentence(target, place, found), drawn

    @show_errors
    def ask(sent: Any, number: Any, chosen: Any, count: Any) -> tuple[Any, ...]:
        return answer(query(sent, number), chosen, count)

    @show_errors
    def anew(sent: Any, number: Any, count: Any) -> tuple[Any, ...]:
        return answer(query(sent, number), 0, count)

    @show_errors
    def clicked(sent: Any, number: Any, count: Any, event: gr.SelectData) -> tuple[Any, ...]:
        target = query(sent, number)
        return answer(target, target.object_at(*clicked_point(event)), count)

    def moved(by: int) -> Any:
        return show_errors(lambda sent, number, chosen, count: ask(sent, number, whole_number(chosen) + by, count))

    @show_errors
    def turned(page: Any) -> tuple[Any, ...]:
        place = min(max(whole_number(page), 0), finder.pages - 1)
        return place, finder.thumbnails(place)

    @show_errors
    def picked(page: Any, event: gr.SelectData) -> tuple[Any, ...]:
        if not isinstance(event.index, int):
            raise Refused("No image was selected: click again.")
        return None, whole_number(page) * PAGE + event.index

    with gr.Row(equal_height=False):
        with gr.Column(scale=2, min_width=280):
            picture = shown_picture(
                "The image: click on an object",
                "The image with the outline of the selected object",
                elem_id="object-picture",
            )
        with gr.Column(scale=1, min_width=280):
            text = gr.Markdown("The search starts when this tab is opened.", elem_id="objects-text")
            with gr.Row():
                number = gr.Number(0, label=f"Image (0 to {last})", precision=0, minimum=0, maximum=last, min_width=110)
                chosen = gr.Number(0, label="Object (0 is the largest)", precision=0, minimum=0, min_width=110)
            with gr.Row():
                smaller = gr.Button("← larger object", min_width=110, size="sm")
                larger = gr.Button("smaller object →", min_width=110, size="sm")
            count = gr.Slider(1, _MOST_MATCHES, _MATCHES, step=1, label="Number of nearest objects")
            with gr.Accordion("Search with your own picture", open=False):
                sent = sent_picture(f"Your picture ({uploads.limits})", "The uploaded picture")
    gr.Markdown("Nearest objects in other images, with their cosine similarity", elem_classes="caption")
    nearest = found_objects("nearest")
    gr.Markdown("The collection: choose an image", elem_classes="caption")
    thumbnails = gr.Gallery(
        label="The collection",
        show_label=False,
        height="auto",
        allow_preview=False,
        interactive=False,
        object_fit="contain",
        format="jpeg",
        buttons=[],
        elem_id="collection",
        elem_classes="tiles",
    )
    with gr.Row(visible=finder.pages > 1):
        page = gr.Number(0, label=f"Page (0 to {finder.pages - 1})", precision=0, minimum=0, min_width=110)
        before = gr.Button("← previous page", min_width=110)
        after = gr.Button("next page →", min_width=110)

    inputs, shown = [sent, number, chosen, count], [chosen, picture, text, nearest]
    first = [sent, number, count]
    opened = tab.select(turned, page, [page, thumbnails], **HIDDEN)
    first_search = opened.then(ask, inputs, shown, **HIDDEN)
    gr.on([page.submit, page.blur], turned, page, [page, thumbnails], api_name="page", **REQUEST)
    before.click(show_errors(lambda place: turned(whole_number(place) - 1)), page, [page, thumbnails], **HIDDEN)
    after.click(show_errors(lambda place: turned(whole_number(place) + 1)), page, [page, thumbnails], **HIDDEN)
    chosen_image = thumbnails.select(picked, page, [sent, number], **HIDDEN).success(anew, first, shown, **HIDDEN)
    chosen_image.success(None, js=_SCROLL_UP)  # on a narrow page, the thumbnails are far below the picture
    number.submit(anew, first, shown, **HIDDEN)
    number.blur(ask, inputs, shown, **HIDDEN)
    gr.on([sent.upload, sent.clear], anew, first, shown, **HIDDEN)
    gr.on([chosen.submit, chosen.blur, count.release], ask, inputs, shown, api_name="nearest", **REQUEST)
    picture.select(clicked, first, shown, **HIDDEN)
    smaller.click(moved(-1), inputs, shown, **HIDDEN)
    larger.click(moved(1), inputs, shown, **HIDDEN)
    # Otherwise, the search on opening could end after a later search and replace its result.
    later_searches = [
        *(thumbnails.select, picture.select, number.submit, number.blur, chosen.submit, chosen.blur),
        *(sent.upload, sent.clear, count.release, smaller.click, larger.click),
    ]
    gr.on(later_searches, None, cancels=first_search)
