"""Serve a backbone to LightlyStudio as its embedder, with `lightly-studio-serve`.

    python examples/tools/lightly_embedder.py runs/mine
    lightly-studio-serve conformance http://127.0.0.1:8080

LightlyStudio sends the content of image files and receives a vector for each. Files that are no images, or that have
more pixels than cribo's limit, get no vector. If the variable LIGHTLY_STUDIO_SERVE_API_KEY is set, clients must send
its value as a token.
"""

import argparse
import os
import threading

import numpy as np
from lightly_studio_serve import EmbeddingResult, EmbeddingSpaceSpec, ImageBytesEmbedder, serve

from cribo.apps.embed import Embedder


class ImageEmbedder(ImageBytesEmbedder):
    """Embeds images as global features of a backbone, like `cribo embed`.

    Args:
        backbone: a run folder, checkpoint, timm name or repository on the hub.
        device: such as cuda:0. [the first GPU, else the CPU]
    """

    def __init__(self, backbone: str, device: str | None = None) -> None:
        self.embedder = Embedder(backbone, device=device)
        self.embedder.open()
        # Vectors are comparable if weights and size are equal.
        size = self.embedder.settings.size or "own"
        self.spec = EmbeddingSpaceSpec(f"cribo/{self.embedder.encoder.global_identity}@{size}", self.embedder.dim)
        self._lock = threading.Lock()

    def embedding_space_spec(self) -> EmbeddingSpaceSpec:
        """Return the name of the weights and the dimension of the vectors."""
        return self.spec

    def embed_image_bytes(self, images: list[bytes]) -> EmbeddingResult:
        """Embed the contents of image files, except those that cannot be read."""
        contents = np.empty(len(images), dtype=object)
        contents[:] = images
        with self._lock:  # called in a thread for each request
            rows = self.embedder({"image": np.arange(len(images)).astype(str), "bytes": contents})
        readable = rows["error"] == ""
        return EmbeddingResult(rows["embedding"][readable], np.flatnonzero(readable).tolist())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backbone", help="a run folder, checkpoint, timm name or repository on the hub")
    parser.add_argument("--device", help="such as cuda:0. [the first GPU, else the CPU]")
    parser.add_argument("--port", type=int, default=8080)
    given = parser.parse_args()
    serve(
        ImageEmbedder(given.backbone, given.device),
        port=given.port,
        api_key=os.environ.get("LIGHTLY_STUDIO_SERVE_API_KEY"),
    )
