"""The tab of in-context segmentation: paint examples, and segment other pictures from them."""

import secrets
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import gradio as gr

from cribo.explorer.network import SharedEncoder
from cribo.explorer.segmenting import BRUSHES, PaintedExamples, Visitors, example_of, memory_sentence, prepare, segment
from cribo.explorer.tabs.fields import HEIGHT, HIDDEN, REQUEST, sent_picture, show_errors, shown_picture
from cribo.explorer.uploads import Refused, Uploads

_LONGEST_NAME = 40
_ADVICE = (
    "1. Upload a picture and paint over parts of each object, with one colour per class. Unpainted pixels are "
    "ignored.\n2. Upload a picture to segment.\n3. Add the painting as an example: the other picture is segmented "
    "immediately. Correct the painting, or paint other pictures, and add it again."
)


def segmenting_tab(page: gr.Blocks, identity: gr.BrowserState, encoder: SharedEncoder, uploads: Uploads) -> None:
    """Add an image editor, the examples so far, and a field for the picture to segment.

    Args:
        page: the page that contains the tab.
        identity: identity of the visitor, defined outside the tab, since browsers restore visible components only.
        encoder: the network.
        uploads: folder and limits of uploaded pictures.
    """
    visitors = Visitors(encoder)

    def enter(known: Any) -> tuple[str, str]:
        if isinstance(known, str) and known in visitors:
            return known, memory_sentence(visitors.examples(known).memory)
        return secrets.token_urlsafe(16), memory_sentence(None)

    def examples_of(visitor: Any) -> PaintedExamples:
        if visitor is None:
            raise Refused("The page is still loading: try again in a moment.")
        if not isinstance(visitor, str) or not 16 <= len(visitor) <= 64:
            raise Refused("The visitor is unknown: reload the page.")
        return visitors.examples(visitor)

    @show_errors
    def add(sent: Any, visitor: Any) -> str:
        parts = sent if isinstance(sent, dict) else {}
        image = uploads.read(parts.get("background"), what="picture to paint on")
        layer = uploads.content(next(iter(parts.get("layers") or ()), None), what="painting")
        image, labels = example_of(image, layer, max_pixels=uploads.limits.pixels)
        examples = examples_of(visitor)
        examples.add(image, labels)
        return memory_sentence(examples.memory)

    @show_errors
    def look(sent: Any, visitor: Any) -> None:
        if isinstance(sent, dict) and sent.get("background"):
            image = uploads.read(sent["background"], what="picture to paint on")
            prepare(examples_of(visitor).memory, image)

    @show_errors
    def forget(visitor: Any) -> tuple[str, gr.File]:
        visitors.forget(str(visitor))
        return memory_sentence(None), gr.File(visible=False)

    @show_errors
    def label(visitor: Any, sent: Any, *given: Any) -> tuple[Any, ...]:
        if sent is None:
            return None, None, ""
        found = segment(examples_of(visitor).memory, uploads.read(sent), called(given))
        return found.overlay, found.confidence, found.sentence

    @show_errors
    def download(visitor: Any, *given: Any) -> gr.File:
        content = examples_of(visitor).zipped(called(given))
        folder = uploads.folder / sha256(visitor.encode()).hexdigest()[:32]  # one folder per visitor
        folder.mkdir(exist_ok=True)
        (folder / "examples.zip").write_bytes(content)
        return gr.File(str(folder / "examples.zip"), visible=True)

    def called(given: Sequence[Any]) -> list[str]:
        return [" ".join(str(name or "").split())[:_LONGEST_NAME] for name in given]

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
            examples = gr.Markdown(elem_id="examples-text")  # filled when the page is loaded
            added = gr.Button("Add as an example", variant="primary")
            packed = gr.Button("Download the examples")
            archive = gr.File(label="For cribo segment --examples", visible=False, interactive=False)
            cleared = gr.Button("Start over")
    with gr.Row(equal_height=False):
        with gr.Column(min_width=280):
            picture = sent_picture(f"The picture to segment ({uploads.limits})", "The picture to segment")
            again = gr.Button("Segment")
        with gr.Column(min_width=280):
            overlay = shown_picture("Its segmentation", "The picture, tinted by class")
            shares = gr.Markdown(elem_id="segmented-text")
            confidence = shown_picture("Confidence: bright is high", "Confidence of the segmentation")
    page.load(enter, identity, [identity, examples], **HIDDEN)
    cleared.click(forget, identity, [examples, archive], api_name="begin_anew", **REQUEST)
    packed.click(download, [identity, *names], archive, api_name="download_examples", **REQUEST)
    shown = [overlay, confidence, shares]
    editor.upload(look, [editor, identity], None, **HIDDEN)
    adding = added.click(add, [editor, identity], examples, api_name="add_example", **REQUEST)
    inputs = [identity, picture, *names]
    adding.success(label, inputs, shown, **HIDDEN)
    gr.on([picture.upload, picture.clear, again.click], label, inputs, shown, api_name="segment", **REQUEST)


def _editor(uploads: Uploads) -> gr.ImageEditor:
    gr.Markdown(f"Example ({uploads.limits}): paint on it", elem_classes="caption")
    brushes = [f"rgb{colour}" for colour in BRUSHES.values()]
    return gr.ImageEditor(
        label="Example to paint on",
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
