"""Fixtures: a served page of a collection with known nearest objects, and a browser."""

import html
import io
import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
from PIL import Image
from tests.commands import Commands, RunningCommand

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    from cribo.pretraining import PretrainConfig

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (40, 60, 220), "yellow": (230, 220, 40)}
SECRET = "nobody on the page may read this"
CHROMIUM = "/usr/bin/chromium"
SWITCHES = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]


def draw_square(colour: tuple[int, int, int], corner: tuple[int, int]) -> Image.Image:
    """Return a square of 48 pixels on a black image of 96: 3 x 3 of 6 x 6 patches."""
    pixels = np.zeros((96, 96, 3), dtype=np.uint8)
    pixels[corner[0] : corner[0] + 48, corner[1] : corner[1] + 48] = colour
    return Image.fromarray(pixels)


@pytest.fixture(scope="session")
def squares(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write two images of each colour with squares at different positions: 0-blue, 0-green, 0-red, ..., 1-blue, ..."""
    folder = tmp_path_factory.mktemp("squares")
    for name, colour in COLOURS.items():
        draw_square(colour, (0, 0)).save(folder / f"0-{name}.png")
        draw_square(colour, (48, 32)).save(folder / f"1-{name}.png")
    return folder


@pytest.fixture(scope="session")
def database(squares: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Index the squares with the mean-colour baseline."""
    pytest.importorskip("lance")

    from cribo.apps.search import DatabaseInfo, ObjectDatabase, ObjectSettings, index_images
    from cribo.data.sources.images import open_images
    from cribo.features import BackboneSource, Encoder

    config = BackboneSource("mean-colour")
    encoder = Encoder(config, device="cpu")
    settings = ObjectSettings(num_objects=4, marginals="uniform", position_weight=0.0, size=96)
    info = DatabaseInfo.of(encoder, config, settings, str(squares))
    place = tmp_path_factory.mktemp("databases") / "squares.db"
    index_images(ObjectDatabase.create(place, info), encoder, open_images(squares))
    return place


@pytest.fixture(scope="session")
def run_folder(tiny: "Callable[..., PretrainConfig]", tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the folder of a short run on synthetic scenes, without training."""
    from cribo.models import build_backbone, save_backbone
    from cribo.pretraining.loading import dump_config

    folder = tmp_path_factory.mktemp("runs") / "streets"
    folder.mkdir()
    config = tiny()
    (folder / "config.yaml").write_text(dump_config(config))
    network = {"args": config.backbone.args, "image_size": config.views.size}
    save_backbone(build_backbone(config.backbone.name, **network), folder)
    return folder


@dataclass
class Served:
    """A page served by another process, and the folder to which its visitors save examples."""

    address: str
    command: RunningCommand
    examples: Path | None = None

    def stop(self, number: signal.Signals = signal.SIGINT) -> int | None:
        """Send a signal, by default as Ctrl-C does, and return the exit status."""
        os.kill(self.command.pid, number)
        return self.command.wait(900)


def serve(commands: Commands, *words: object, prelude: str = "") -> Served:
    """Start `cribo explore` on a free port and wait for its address.

    Args:
        commands: starts it.
        *words: arguments of the command.
        prelude: Python code to run first.
    """
    address = ("--port", 0, "--device", "cpu")
    command = commands.fork("explore", *words, *address, environment={"COLUMNS": "200"}, prelude=prelude)
    while "Open http" not in command.output:
        assert command.wait(0.1) is None, f"the page was not served: {command.output}"
    return Served(command.output.split("Open ")[1].split(" ")[0], command)


@pytest.fixture(scope="session")
def served(database: Path, run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve the page of the run and the database; Ctrl-C must stop it and print where examples were saved."""
    pytest.importorskip("gradio")
    folder = tmp_path_factory.mktemp("served").resolve()
    commands, examples = Commands(folder), folder / "examples"
    content = ("--run", run_folder, "--db", database, "--examples", examples)
    served = serve(commands, *content, "--max_megabytes", 1, "--max_megapixels", 1)
    served.examples = examples
    try:
        yield served
        status = served.stop()
    finally:
        commands.end()
    assert status == 130, served.command.output
    assert "Traceback" not in served.command.output, served.command.output
    assert f"the server has stopped; examples that the page saved are in {examples}" in served.command.output


class Visitor:
    """A session of the page without a browser.

    Args:
        address: address of the page.
        name: name of the session.
    """

    def __init__(self, address: str, name: str) -> None:
        self.client = httpx.Client(base_url=address, timeout=300)
        self.name = name
        config = self.client.get("/config").json()
        self.functions = {each["api_name"]: each["id"] for each in config["dependencies"] if each["api_name"]}

    def send(self, image: Image.Image | bytes, file: str = "picture.png") -> dict[str, Any]:
        """Upload a picture and return the value of its field in later requests."""
        content = image if isinstance(image, bytes) else encoded(image)
        answer = self.client.post("/gradio_api/upload", files={"files": (file, content)})
        answer.raise_for_status()
        return {"path": answer.json()[0], "orig_name": file, "meta": {"_type": "gradio.FileData"}}

    def ask(self, what: str, *data: Any, event: dict[str, Any] | None = None) -> list[Any]:
        """Call a function of the page, with the data of an event, and return its result, with texts as they are shown.

        Raises:
            Refusal: the page shows an error.
        """
        question = {"data": list(data), "fn_index": self.functions[what], "session_hash": self.name}
        question["event_data"] = event
        self.client.post("/gradio_api/queue/join", json=question).raise_for_status()
        with self.client.stream("GET", "/gradio_api/queue/data", params={"session_hash": self.name}) as events:
            for line in events.iter_lines():
                message = json.loads(line.removeprefix("data:")) if line.startswith("data:") else {}
                if message.get("msg") == "process_completed":
                    if not message["success"]:
                        raise Refusal(html.unescape(message["output"].get("error") or ""))
                    data = message["output"]["data"]
                    return [html.unescape(each) if isinstance(each, str) else each for each in data]
        raise AssertionError("no answer")

    def picture(self, shown: dict[str, Any]) -> Image.Image:
        """Download a picture shown by the page."""
        content = self.client.get("/gradio_api/file=" + shown["path"]).content
        return Image.open(io.BytesIO(content)).convert("RGB")


class Refusal(Exception):
    """An error message on the page."""


def encoded(image: Image.Image) -> bytes:
    """Return the bytes of a PNG."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def visitor(served: Served, request: pytest.FixtureRequest) -> Visitor:
    """Return a separate session for each test."""
    return Visitor(served.address, f"visitor{abs(hash(request.node.name))}")


@pytest.fixture(scope="module")  # docs/pictures.py, which is tested too, starts a browser of its own
def browser() -> "Iterator[Browser]":
    """Start Chromium as packaged by Debian."""
    playwright = pytest.importorskip("playwright.sync_api")
    if not Path(CHROMIUM).is_file():
        pytest.skip(f"needs a browser: {CHROMIUM} (apt-get install chromium)")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=SWITCHES)
        yield browser
        browser.close()


@dataclass
class Watched:
    """A browser page, with a record of external requests and errors.

    Attributes:
        page: the browser page.
        examples: folder to which examples are saved.
        elsewhere: addresses of requests to other machines.
        errors: errors logged by the browser.
    """

    page: "Page"
    examples: Path
    elsewhere: list[str]
    errors: list[str]

    def open(self, tab: str) -> None:
        """Open a tab of the page."""
        button = self.page.get_by_role("tab", name=tab, exact=True).and_(self.page.locator(":visible"))
        if not button.count():  # tabs that do not fit are in a menu
            self.page.locator(".overflow-menu > button").click()
            button = self.page.locator(".overflow-dropdown button", has_text=tab)
        button.first.click()

    def resize(self, width: int, height: int) -> None:
        """Load the page again in a window of another size."""
        self.page.set_viewport_size({"width": width, "height": height})
        self.reload()

    def reload(self) -> None:
        """Load the page again. Leaving a page interrupts its requests; the errors of that are not counted."""
        before = len(self.errors)
        self.page.reload(wait_until="commit")
        del self.errors[before:]
        self.page.get_by_role("tab", name="View pairs").first.wait_for()

    @property
    def fits(self) -> bool:
        """Whether no element is wider than the window."""
        return self.page.evaluate("document.scrollingElement.scrollWidth <= innerWidth")


@pytest.fixture
def watched(served: Served, browser: "Browser") -> Iterator[Watched]:
    """Open the page in a browser; external requests and errors fail the test."""
    page = browser.new_page(viewport={"width": 1280, "height": 1000})
    page.set_default_timeout(60_000)
    assert served.examples is not None
    watched = Watched(page, served.examples, [], [])
    page.on("request", lambda request: _note_request(watched, served.address, request.url))
    page.on("console", lambda message: watched.errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: watched.errors.append(str(error)))
    page.goto(served.address)
    page.get_by_role("tab", name="View pairs").wait_for()
    yield watched
    assert watched.elsewhere == []
    assert watched.errors == []
    page.close()


def _note_request(watched: Watched, address: str, url: str) -> None:
    if not url.startswith((address, "data:", "blob:")):
        watched.elsewhere.append(url)
