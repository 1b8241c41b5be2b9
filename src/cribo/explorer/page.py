"""Layout of the page: title, notes and tabs."""

import logging
from typing import Any

import gradio as gr
from gradio import themes

from cribo.explorer.contents import Contents
from cribo.explorer.tabs.features import features_tab
from cribo.explorer.tabs.objects import objects_tab
from cribo.explorer.tabs.segmenting import segmenting_tab
from cribo.explorer.tabs.view_pairs import view_pairs_tab
from cribo.explorer.text import as_text
from cribo.explorer.uploads import Uploads

log = logging.getLogger("cribo")

_KEPT_SECONDS = 3600  # lifetime of uploaded and shown pictures
_CLEANED_SECONDS = 300
_FONTS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif")
_MONOSPACE = ("ui-monospace", "Consolas", "monospace")
_STYLE = """
:focus-visible { outline: 3px solid #d6336c !important; outline-offset: 2px !important; }
.gradio-container { width: 100% !important; max-width: min(1280px, 100vw) !important; margin: 0 auto !important; }
.gradio-container .wrap, .gradio-container main, .gradio-container main :not(button) { min-width: 0; }
.gradio-container main { width: 100% !important; }
.gradio-container .main.fillable { max-width: 100% !important; padding: clamp(8px, 2.5vw, 32px) !important; }
.caption p { font-weight: 600; }
.tiles .grid-wrap { max-height: none !important; height: auto !important; min-height: 120px; }
.tiles .grid-container { grid-template-columns: repeat(auto-fill, minmax(var(--tile), 1fr)) !important; }
.tiles .thumbnail-lg { display: flex; flex-direction: column; height: auto; aspect-ratio: auto; }
.tiles .thumbnail-lg > img { height: auto; aspect-ratio: 4 / 3; }
.tiles .caption-label { position: static; max-width: 100%; border: 0; font-size: 12px; }
#nearest, #nearest-to-patch { --tile: 135px; }
#collection { --tile: 100px; }
#painter .html-container { padding: 0; }
#upcoming, #painted { --tile: 140px; }
:is(#upcoming, #painted) .caption-label { white-space: normal; overflow-wrap: anywhere; }
.shown img { width: 100%; max-height: 560px; object-fit: contain; }
"""


class _Page(gr.Blocks):
    """A page that reports malformed data of a request in one line, as `show_errors` does for errors of functions."""

    async def process_api(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            return await super().process_api(*args, **kwargs)
        except gr.Error:
            raise
        except Exception as error:
            log.info("invalid request: %s", type(error).__name__)
            raise gr.Error("Invalid request.", print_exception=False) from error


def look() -> dict[str, Any]:
    """Return the theme and style of the page, with system fonts only, since nothing is downloaded."""
    theme = themes.Default(primary_hue="indigo", font=list(_FONTS), font_mono=list(_MONOSPACE))
    return {"theme": theme, "css": _STYLE}


def build_page(contents: Contents, uploads: Uploads) -> gr.Blocks:
    """Build the page.

    Args:
        contents: contents to show.
        uploads: folder and limits of uploaded pictures.
    """
    with _Page(
        title=f"{contents.title} - cribo", analytics_enabled=False, delete_cache=(_CLEANED_SECONDS, _KEPT_SECONDS)
    ) as page:
        identity = gr.BrowserState(storage_key="cribo-visitor")  # persists across reloads, unlike Gradio's session
        gr.Markdown(f"# {as_text(contents.title)}")
        for note in contents.notes:
            gr.Markdown(as_text(note))
        with gr.Tabs():
            if contents.pairs is not None:
                with gr.Tab("View pairs") as tab:
                    view_pairs_tab(tab, contents.pairs)
            if contents.finder is not None:
                with gr.Tab("Objects") as tab:
                    objects_tab(tab, contents.finder, uploads)
            with gr.Tab("Features"):
                features_tab(contents.encoder, uploads, contents.finder, contents.visitors.images)
            with gr.Tab("Segment") as tab:
                segmenting_tab(tab, identity, contents.visitors, uploads)
    return page
