"""A page that is served as users serve it, of a collection whose nearest objects are known, and a browser."""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
from PIL import Image

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    from cribo.pretraining import PretrainConfig

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (40, 60, 220), "yellow": (230, 220, 40)}
SECRET = "nobody on the page may read this"
CHROMIUM = "/usr/bin/chromium"
_SWITCHES = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]


def draw_square(colour: tuple[int, int, int], corner: tuple[int, int]) -> Image.Image:
    """A square of 48 pixels on black ground of 96: 3 x 3 of 6 x 6 patches."""
    pixels = np.zeros((96, 96, 3), dtype=np.uint8)
    pixels[corner[0] : corner[0] + 48, corner[1] : corner[1] + 48] = colour
    return Image.fromarray(pixels)


@pytest.fixture(scope="session")
def squares(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two images of each colour, the second with its square elsewhere; 0-blue, 0-green, 0-red, 0-yellow, 1-blue, ..."""
    folder = tmp_path_factory.mktemp("squares")
    for name, colour in COLOURS.items():
        draw_square(colour, (0, 0)).save(folder / f"0-{name}.png")
        draw_square(colour, (48, 32)).save(folder / f"1-{name}.png")
    return folder


@pytest.fixture(scope="session")
def database(squares: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The objects of the squares, found by the mean colour of patches."""
    pytest.importorskip("lancedb")
    import dataclasses

    from cribo.data.images import open_images
    from cribo.object_search import DatabaseInfo, ObjectDatabase, ObjectSettings, index_images
    from cribo.retrieval import BackboneSource, open_encoder

    config = BackboneSource("mean-colour")
    encoder, about = open_encoder(config, "cpu")
    settings = ObjectSettings(num_objects=4, marginals="uniform", position_weight=0.0, size=96)
    info = DatabaseInfo(str(encoder.identity), about, dataclasses.asdict(config), 3, settings, str(squares))
    place = tmp_path_factory.mktemp("databases") / "squares.db"
    index_images(ObjectDatabase.create(place, info), encoder, open_images(squares))
    return place


@pytest.fixture(scope="session")
def run_folder(tiny: "Callable[..., PretrainConfig]", tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run of a few steps on made-up scenes leaves, written without training."""
    from cribo.models import build_backbone, save_backbone
    from cribo.pretraining.presets import dump_config

    folder = tmp_path_factory.mktemp("runs") / "streets"
    folder.mkdir()
    config = tiny()
    (folder / "config.yaml").write_text(dump_config(config))
    network = {"args": config.backbone.args, "image_size": config.views.size}
    save_backbone(build_backbone(config.backbone.name, **network), folder)
    write_metrics(folder, epochs=3)
    return folder


def write_metrics(folder: Path, *, epochs: int) -> None:
    """The metrics of a run after so many epochs of four steps."""
    rows = ["step,epoch,seconds,loss,loss_image,loss_cross_image,bootstrapping_ratio,dense_nn", "0,0,1,,,,,0.1"]
    rows += [
        f"{4 * n},{n},{60 * n},{9 - n},{5 - n},{0 if n == 1 else 3},{0.1 * n},{0.1 + 0.1 * n}" for n in _to(epochs)
    ]
    (folder / "metrics.csv").write_text("\n".join(rows) + "\n")


def _to(last: int) -> range:
    return range(1, last + 1)


@dataclass
class Served:
    """A page that is served by another process."""

    address: str
    process: "subprocess.Popen[str]"
    log: Path

    def stop(self) -> int:
        """Send Ctrl-C, as a terminal does, and give the exit status."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=60)


def serve(log: Path, *words: str, temporary: Path | None = None) -> Served:
    """Start `cribo explore` with a free port, and wait for its address.

    Args:
        log: where its output goes.
        *words: of the command.
        temporary: the folder of its temporary files.
    """
    place = {} if temporary is None else {"TMPDIR": str(temporary)}
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "cribo", "explore", *words, "--port", "0", "--device", "cpu"],
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **place},
            # As from a terminal: what a shell has started in the background is deaf to Ctrl-C, and so are its children.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    for _ in range(2400):
        said = log.read_text()
        if "Open http" in said:
            return Served(said.split("Open ")[1].split(" ")[0], process, log)
        try:
            process.wait(timeout=0.1)
        except subprocess.TimeoutExpired:
            continue
        break
    process.kill()
    raise AssertionError(f"the page was not served: {log.read_text()}")


@pytest.fixture(scope="session")
def served(database: Path, run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The page of the run and the database; it must end by Ctrl-C without a word."""
    pytest.importorskip("gradio")
    folder = tmp_path_factory.mktemp("served")
    served = serve(
        folder / "log.txt",
        "--run",
        str(run_folder),
        "--db",
        str(database),
        "--max_megabytes",
        "1",
        "--max_megapixels",
        "1",
    )
    try:
        yield served
    finally:
        status = served.stop()
    assert status == 130, served.log.read_text()
    assert "Traceback" not in served.log.read_text(), served.log.read_text()


class Visitor:
    """A session on the page, without a browser.

    Args:
        address: of the page.
        name: of the session.
    """

    def __init__(self, address: str, name: str) -> None:
        self.client = httpx.Client(base_url=address, timeout=60)
        self.name = name
        config = self.client.get("/config").json()
        self.functions = {each["api_name"]: each["id"] for each in config["dependencies"] if each["api_name"]}

    def send(self, image: Image.Image | bytes, file: str = "picture.png") -> dict[str, Any]:
        """Send a picture; gives what the field that holds it would send along with a question."""
        content = image if isinstance(image, bytes) else encoded(image)
        answer = self.client.post("/gradio_api/upload", files={"files": (file, content)})
        answer.raise_for_status()
        return {"path": answer.json()[0], "orig_name": file, "meta": {"_type": "gradio.FileData"}}

    def ask(self, what: str, *data: Any) -> list[Any]:
        """What a function of the page answers.

        Raises:
            Refusal: it shows an error.
        """
        question = {"data": list(data), "fn_index": self.functions[what], "session_hash": self.name}
        self.client.post("/gradio_api/queue/join", json=question).raise_for_status()
        with self.client.stream("GET", "/gradio_api/queue/data", params={"session_hash": self.name}) as events:
            for line in events.iter_lines():
                event = json.loads(line.removeprefix("data:")) if line.startswith("data:") else {}
                if event.get("msg") == "process_completed":
                    if not event["success"]:
                        raise Refusal(event["output"].get("error") or "")
                    return event["output"]["data"]
        raise AssertionError("no answer")

    def picture(self, shown: dict[str, Any]) -> Image.Image:
        """A picture that the page shows."""
        content = self.client.get("/gradio_api/file=" + shown["path"]).content
        return Image.open(io.BytesIO(content)).convert("RGB")


class Refusal(Exception):
    """The sentence of an error on the page."""


def encoded(image: Image.Image) -> bytes:
    """The bytes of a PNG."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def visitor(served: Served, request: pytest.FixtureRequest) -> Visitor:
    """A session of its own for each test."""
    return Visitor(served.address, f"visitor{abs(hash(request.node.name))}")


@pytest.fixture(scope="session")
def browser() -> "Iterator[Browser]":
    """Chromium, as Debian packages it."""
    playwright = pytest.importorskip("playwright.sync_api")
    if not Path(CHROMIUM).is_file():
        pytest.skip(f"needs a browser: {CHROMIUM} (apt-get install chromium)")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=_SWITCHES)
        yield browser
        browser.close()


@dataclass
class Watched:
    """A browser's page, and what must not happen on it.

    Attributes:
        page: to look at.
        elsewhere: addresses of requests that left this machine.
        errors: that the browser wrote down.
    """

    page: "Page"
    elsewhere: list[str]
    errors: list[str]

    def open(self, tab: str) -> None:
        """Open a tab of the page."""
        self.page.get_by_role("tab", name=tab, exact=True).first.click()

    @property
    def fits(self) -> bool:
        """Whether nothing is wider than the window."""
        return self.page.evaluate("document.scrollingElement.scrollWidth <= innerWidth")


@pytest.fixture
def watched(served: Served, browser: "Browser") -> Iterator[Watched]:
    """The page in a browser; nothing may leave the machine, and nothing may go wrong on it."""
    page = browser.new_page(viewport={"width": 1280, "height": 1000})
    page.set_default_timeout(20_000)
    watched = Watched(page, [], [])
    page.on("request", lambda request: _note_request(watched, served.address, request.url))
    page.on("console", lambda message: watched.errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: watched.errors.append(str(error)))
    page.goto(served.address)
    page.get_by_role("tab", name="Training").wait_for()
    yield watched
    page.close()
    assert watched.elsewhere == []
    assert watched.errors == []


def _note_request(watched: Watched, address: str, url: str) -> None:
    if not url.startswith((address, "data:", "blob:")):
        watched.elsewhere.append(url)
