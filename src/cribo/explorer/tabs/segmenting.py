"""The tab of segmentation by example: paint on pictures, and see the next ones labelled."""

import secrets
from collections.abc import Callable
from hashlib import sha256
from importlib.resources import files
from typing import Any

import gradio as gr

from cribo.explorer.segmenting import Session, Tile, Visitors
from cribo.explorer.tabs.fields import HIDDEN, REQUEST, show_errors, whole_number
from cribo.explorer.uploads import Refused, Uploads

_UPCOMING = 8  # pictures


def segmenting_tab(tab: gr.Tab, identity: gr.BrowserState, visitors: Visitors, uploads: Uploads) -> None:
    """Add the editor, the pictures to label next, and the examples.

    Args:
        tab: the tab, which is filled when it is opened.
        identity: identity of the visitor, defined outside the tab, since browsers restore visible components only.
        visitors: the sessions.
        uploads: folder and limits of uploaded pictures.
    """

    def enter(known: Any) -> str:
        return known if isinstance(known, str) and known in visitors else secrets.token_urlsafe(16)

    def identified(visitor: Any) -> str:
        if visitor is None:
            raise Refused("The page is still loading: try again in a moment.")
        if not isinstance(visitor, str) or not 16 <= len(visitor) <= 64:
            raise Refused("The visitor is unknown: reload the page.")
        return visitor

    def changed(visitor: Any, change: Callable[[Session], object]) -> tuple[Any, ...]:
        """Change the session of a visitor, and return the contents of the editor and of the texts."""
        with visitors.working(identified(visitor)) as session:
            change(session)
            return session.canvas(), session.advice, session.saved, gr.Button(visible=bool(session.unsaved))

    @show_errors
    def begin(visitor: Any) -> tuple[Any, ...]:
        return changed(visitor, lambda session: session.begin())

    @show_errors
    def draw(visitor: Any, event: gr.EventData) -> None:
        visitors.session(identified(visitor)).draw(*_painting(event))

    @show_errors
    def propose(visitor: Any, event: gr.EventData) -> dict[str, Any]:
        with visitors.working(identified(visitor)) as session:
            key, corners, number = _marked(event)
            return {"key": key, "number": number, "proposed": session.propose(key, corners)}

    @show_errors
    def confirm(visitor: Any, event: gr.EventData) -> tuple[Any, ...]:
        def change(session: Session) -> None:
            session.draw(*_painting(event))
            session.confirm(str(event.key))

        return changed(visitor, change)

    @show_errors
    def proceed(visitor: Any, event: gr.EventData) -> tuple[Any, ...]:
        def change(session: Session) -> None:
            if event.key is not None:
                session.draw(*_painting(event))
                session.confirm(str(event.key))
            session.open(None)

        return changed(visitor, change)

    @show_errors
    def name_classes(visitor: Any, event: gr.EventData) -> tuple[Any, ...]:
        names = event.names if isinstance(event.names, list) else []
        return changed(visitor, lambda session: session.name_classes([str(name) for name in names]))

    @show_errors
    def open_upcoming(visitor: Any, event: gr.SelectData) -> tuple[Any, ...]:
        return changed(visitor, lambda session: session.open_upcoming(whole_number(event.index)))

    @show_errors
    def open_example(visitor: Any, event: gr.SelectData) -> tuple[Any, ...]:
        return changed(visitor, lambda session: session.open_example(whole_number(event.index)))

    @show_errors
    def open_number(visitor: Any, number: Any) -> tuple[Any, ...]:
        return changed(visitor, lambda session: session.open(f"c{whole_number(number)}"))

    @show_errors
    def upload(visitor: Any, sent: Any) -> tuple[Any, ...]:
        content = uploads.content(sent)
        name = str(sent.get("orig_name") or "picture")
        return changed(visitor, lambda session: session.upload(name, content, reading=uploads.reading))

    @show_errors
    def replace(visitor: Any) -> tuple[Any, ...]:
        return changed(visitor, Session.replace)

    @show_errors
    def show_upcoming(visitor: Any) -> list[Tile]:
        with visitors.working(identified(visitor)) as session:
            return session.upcoming(_UPCOMING)

    @show_errors
    def show_painted(visitor: Any) -> list[Tile]:
        with visitors.working(identified(visitor)) as session:
            return session.painted()

    @show_errors
    def score(visitor: Any) -> str:
        with visitors.working(identified(visitor)) as session:
            session.score()
            return session.advice

    @show_errors
    def download(visitor: Any) -> gr.File:
        content = visitors.session(identified(visitor)).zipped()
        folder = uploads.folder / sha256(visitor.encode()).hexdigest()[:32]  # one folder per visitor
        folder.mkdir(exist_ok=True)
        (folder / "examples.zip").write_bytes(content)
        return gr.File(str(folder / "examples.zip"), visible=True)

    advice = gr.Markdown(elem_id="advice")
    with gr.Row(equal_height=False):
        with gr.Column(scale=5, min_width=300):
            painter = _painter()
        with gr.Column(scale=2, min_width=240):
            saved = gr.Markdown(elem_id="saved")
            replacing = gr.Button("Save and replace", visible=False, variant="stop", size="sm")
            number = None
            if visitors.images is not None:
                last = len(visitors.images) - 1
                number = gr.Number(None, label=f"Open a picture by its number (0 to {last})", precision=0, minimum=0)
            sent = gr.UploadButton(f"Upload a picture ({uploads.limits})", file_types=["image"], size="sm")
            packed = gr.Button("Download the examples", size="sm")
            archive = gr.File(label="For cribo segment --examples", visible=False, interactive=False)
    gr.Markdown("Pictures to label next: choose one", elem_classes="caption")
    upcoming = _gallery("Pictures to label next", "upcoming")
    gr.Markdown("Your examples: choose one to correct it", elem_classes="caption")
    painted = _gallery("Your examples", "painted")

    def act(listen: Callable[..., Any], handler: Callable[..., Any], inputs: Any = None, *, name: str) -> Any:
        """Call a handler on an event; then update the galleries."""
        done = listen(handler, [identity, *(inputs or [])], state, api_name=name, **REQUEST)
        shown = done.success(show_upcoming, identity, upcoming, **quiet)
        return shown.success(show_painted, identity, painted, **quiet)

    quiet = {**HIDDEN, "show_progress": "hidden"}
    state = [painter, advice, saved, replacing]
    act(tab.select(enter, identity, identity, **HIDDEN).success, begin, name="begin")
    painter.draw(draw, identity, None, api_name="draw", **{**REQUEST, "concurrency_id": "painting"})
    painter.propose(propose, identity, painter, api_name="propose", **REQUEST)
    for listen, handler, name in ((painter.confirm, confirm, "confirm"), (painter.next, proceed, "next")):
        act(listen, handler, name=name).success(score, identity, advice, **quiet)
    painter.classes(name_classes, identity, state, api_name="classes", **REQUEST)
    act(upcoming.select, open_upcoming, name="open_upcoming")
    act(painted.select, open_example, name="open_example")
    if number is not None:
        act(number.submit, open_number, [number], name="open_number")
    act(sent.upload, upload, [sent], name="upload")
    replacing.click(replace, identity, state, api_name="replace", **REQUEST)
    packed.click(download, identity, archive, api_name="download_examples", **REQUEST)


def _painting(event: gr.EventData) -> tuple[str, float, Any]:
    try:
        return str(event.key), float(event.time), event.runs
    except (AttributeError, TypeError, ValueError) as error:
        raise Refused("The painting is invalid: reload the page.") from error


def _marked(event: gr.EventData) -> tuple[str, Any, float]:
    try:
        return str(event.key), event.corners, float(event.number)
    except (AttributeError, TypeError, ValueError) as error:
        raise Refused("The marked place is invalid: mark it again.") from error


def _painter() -> gr.HTML:
    folder = files("cribo.explorer") / "painter"
    html, css, js = ((folder / f"painter.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js"))
    return gr.HTML(
        {"key": None, "classes": []},
        html_template=html,
        css_template=css,
        js_on_load=js,
        apply_default_css=False,
        elem_id="painter",
    )


def _gallery(label: str, elem_id: str) -> gr.Gallery:
    return gr.Gallery(
        label=label,
        show_label=False,
        height="auto",
        allow_preview=False,
        interactive=False,
        object_fit="contain",
        format="jpeg",
        buttons=[],
        elem_id=elem_id,
        elem_classes="tiles",
    )
