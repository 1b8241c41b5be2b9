"""The example embedder passes the conformance suite of `lightly-studio-serve`, over HTTP."""

import io
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.commands import Commands
from torchvision.transforms.v2.functional import to_pil_image

pytest.importorskip("lightly_studio_serve", reason="needs lightly-studio-serve (pip install lightly-studio-serve)")
from examples.tools.lightly_embedder import ImageEmbedder
from lightly_studio_serve.cli import main

from cribo.apps.embed import Embedder
from cribo.data.scenes import Scenes
from cribo.models import build_backbone, save_backbone

EXAMPLE = Path(__file__).parents[2] / "examples" / "tools" / "lightly_embedder.py"
PROGRAM = "import runpy; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
SCENES = Scenes(9)


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    image.save(file := io.BytesIO(), kind)
    return file.getvalue()


def pictures(count: int) -> list[bytes]:
    return [encoded(to_pil_image(SCENES.load(number)), ("PNG", "JPEG", "WEBP")[number % 3]) for number in range(count)]


@pytest.mark.parametrize("key", ["", "secret"])
def test_the_server_conforms(
    commands: Commands, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    environment = {"LIGHTLY_STUDIO_SERVE_API_KEY": key} if key else {}
    server = commands.fork_program(
        PROGRAM, EXAMPLE, "mean-colour", "--device", "cpu", "--port", 0, environment=environment
    )
    end = time.monotonic() + 60
    while not (found := re.search(r"http://127\.0\.0\.1:\d+", server.output)):
        assert server.wait(0.1) is None, server.output
        assert time.monotonic() < end, server.output
    monkeypatch.delenv("LIGHTLY_STUDIO_SERVE_API_KEY", raising=False)
    assert main(["conformance", found[0], *(["--api-key", key] if key else [])]) == 0
    assert re.search(r"image_bytes +passed", capsys.readouterr().out)
    if key:
        assert main(["conformance", found[0]]) == 1


def test_vectors_are_those_of_embed_and_other_files_are_left_out() -> None:
    embedder, readable = ImageEmbedder("mean-colour", device="cpu"), pictures(3)
    bomb = encoded(Image.new("1", (30_000, 30_000)))
    found = embedder.embed_image_bytes([readable[0], b"", readable[1], b"no image", bomb, readable[2]])
    assert found.kept_indices == [0, 2, 5]
    assert found.embeddings.dtype == np.float32
    contents = np.empty(3, dtype=object)
    contents[:] = readable
    expected = Embedder("mean-colour", device="cpu")({"image": np.array(["a", "b", "c"]), "bytes": contents})
    np.testing.assert_array_equal(found.embeddings, expected["embedding"])
    nothing = embedder.embed_image_bytes([b"no image"])
    assert (nothing.kept_indices, nothing.embeddings.shape) == ([], (0, embedder.spec.dimension))


def test_requests_may_come_at_the_same_time() -> None:
    embedder, images = ImageEmbedder("mean-colour", device="cpu"), pictures(6)
    embed: Callable[[bytes], np.ndarray] = lambda image: embedder.embed_image_bytes([image]).embeddings  # noqa: E731
    with ThreadPoolExecutor(4) as threads:
        found = [*threads.map(embed, 3 * images)]
    np.testing.assert_allclose(np.concatenate(found), np.tile(embedder.embed_image_bytes(images).embeddings, (3, 1)))


def test_other_weights_are_another_space(tmp_path: Path) -> None:
    args = {"patch_size": 8, "depth": 1, "embed_dim": 32, "num_heads": 2}
    spaces = []
    for seed in (0, 1):
        backbone = build_backbone("vit_tiny_patch16_224", args=args, image_size=32, seed=seed)
        path = save_backbone(backbone, tmp_path / f"{seed}")
        spaces += [ImageEmbedder(str(path), device="cpu").embedding_space_spec() for _ in range(2)]
    assert spaces[0] == spaces[1]
    assert spaces[1].space_key != spaces[2].space_key
    assert spaces[0].dimension == 32
