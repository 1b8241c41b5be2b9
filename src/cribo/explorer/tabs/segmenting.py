"""The tab of in-context segmentation: paint examples, and label new pictures by them."""

from typing import Any

import gradio as gr

from cribo.explorer.network import SharedEncoder
from cribo.explorer.segmenting import BRUSHES, Visitors, add_example, example_of, memory_sentence, prepare, segment
from cribo.explorer.tabs.fields import ASKING, HEIGHT, HIDDEN, sent_picture, sentence, shown_picture
from cribo.explorer.uploads import Refused, Uploads

_LONGEST_NAME = 40
_ADVICE = (
    "1. Upload a picture and paint over parts of each thing, with one colour per class. Unpainted pixels have no "
    "class.\n2. Upload a picture to segment.\n3. Add the painting as an example: the other picture is segmented at "
    "once. Correct the painting, or add other pictures, and add again."
)


def segmenting_tab(encoder: SharedEncoder, uploads: Uploads) -> None:
    """A field to paint in, the examples so far, and a field for the picture to label."""
    visitors = Visitors(encoder)

    def visitor(request: gr.Request) -> str:
        if not request.session_hash:
            raise Refused("The session is unknown: reload the page.")
        return request.session_hash

    @sentence
    def add(sent: Any, request: gr.Request) -> str:
        parts = sent if isinstance(sent, dict) else {}
        image = uploads.read(parts.get("background"), what="picture to paint on")
        layer = uploads.content(next(iter(parts.get("layers") or ()), None), what="painting")
        image, labels = example_of(image, layer, max_pixels=uploads.limits.pixels)
        memory = visitors.memory(visitor(request))
        add_example(memory, image, labels)
        return memory_sentence(memory)

    @sentence
    def look(sent: Any, request: gr.Request) -> None:
        if isinstance(sent, dict) and sent.get("background"):
            image = uploads.read(sent["background"], what="picture to paint on")
            prepare(visitors.memory(visitor(request)), image)

    @sentence
    def forget(request: gr.Request) -> str:
        visitors.forget(visitor(request))
        return "No examples yet."

    @sentence
    def label(request: gr.Request, sent: Any, *said: Any) -> tuple[Any, ...]:
        if sent is None:
            return None, None, ""
        called = [str(name or "")[:_LONGEST_NAME] for name in said]
        found = segment(visitors.memory(visitor(request)), uploads.read(sent), called)
        return found.overlay, found.confidence, found.sentence

    gr.Markdown(_ADVICE)
    with gr.Row(equal_height=False):
        with gr.Column(scale=2, min_width=280):
            editor = _editor(uploads)
        with gr.Column(scale=1, min_width=280):
            with gr.Accordion("Names of the colours", open=False):
                names = [
                    gr.Textbox(label=colour, placeholder=colour, max_length=_LONGEST_NAME, lines=1)
                    for colour in BRUSHES
                ]
            examples = gr.Markdown("No examples yet.", elem_id="examples-said")
            added = gr.Button("Add as an example", variant="primary")
            cleared = gr.Button("Start over")
    with gr.Row(equal_height=False):
        with gr.Column(min_width=280):
            picture = sent_picture(f"The picture to segment ({uploads.limits})", "The picture to segment")
            again = gr.Button("Segment")
        with gr.Column(min_width=280):
            overlay = shown_picture("Its segmentation", "The picture in the colours of its classes")
            shares = gr.Markdown(elem_id="segmented-said")
            confidence = shown_picture("Confidence: bright is high", "Confidence of the segmentation")
    cleared.click(forget, None, examples, api_name="begin_anew", **ASKING)
    shown = [overlay, confidence, shares]
    editor.upload(look, editor, None, **HIDDEN)
    adding = added.click(add, editor, examples, api_name="add_example", **ASKING)
    adding.success(label, [picture, *names], shown, **HIDDEN)
    gr.on([picture.upload, picture.clear, again.click], label, [picture, *names], shown, api_name="segment", **ASKING)


def _editor(uploads: Uploads) -> gr.ImageEditor:
    gr.Markdown(f"An example ({uploads.limits}): paint on it", elem_classes="caption")
    brushes = [f"rgb{colour}" for colour in BRUSHES.values()]
    return gr.ImageEditor(
        label="An example to paint on",
        show_label=False,
        sources=["upload", "clipboard"],
        brush=gr.Brush(default_size=16, colors=list(brushes), default_color=brushes[0], color_mode="fixed"),
        eraser=gr.Eraser(default_size=16),
        layers=False,
        transforms=(),
        buttons=["fullscreen"],
        height=HEIGHT + 60,
        canvas_size=(640, 480),
    )
