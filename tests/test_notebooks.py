"""Every notebook runs from its first cell to its last, with small parameters."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient
from PIL import Image

from cribo.data.scenes import Scenes
from cribo.models import build_backbone, save_backbone

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"

# For each notebook, the parameters that make it small, and a text that it prints.
SMALL: Mapping[str, tuple[dict[str, Any], str]] = {
    "adapt": ({"IMAGES": "images", "BACKBONE": "network", "LABELLED": "labelled", "STEPS": 2}, "exported: "),
    "method": ({"BACKBONE": "network", "NUM_IMAGES": 12, "BATCH": 4, "SIZE": 64, "NUM_OBJECTS": 4}, "cycle-consistent"),
    "object_search": ({"BACKBONE": "network", "IMAGES": "images", "SIZE": 64, "NUM_OBJECTS": 4}, "12 new images"),
    "own_objective": ({"IMAGES": 32, "EPOCHS": 1}, "dense-simsiam"),
    "segmentation": ({"BACKBONE": "network", "EXAMPLES": "labelled", "IMAGES": "images", "SIZE": 64}, "8 examples of"),
}


@pytest.fixture(scope="module")
def kernel() -> Iterator[KernelManager]:
    """A kernel, in which the notebooks run one after another: its imports take longer than a notebook."""
    manager = KernelManager()
    manager.start_kernel()
    yield manager
    manager.shutdown_kernel(now=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an untrained network, images, and labelled images."""
    args = {"depth": 3, "embed_dim": 32, "num_heads": 2}
    save_backbone(build_backbone("vit_tiny_patch16_224", args=args), tmp_path / "network")
    scenes = Scenes(12, size=64)
    for name in ("images", "labelled/images", "labelled/labels"):
        (tmp_path / name).mkdir(parents=True)
    for number in range(len(scenes)):
        picture = Image.fromarray(scenes.load(number).permute(1, 2, 0).numpy())
        picture.save(tmp_path / f"images/{number:02}.png")
        picture.save(tmp_path / f"labelled/images/{number:02}.png")
        Image.fromarray(scenes.labels(number).numpy()).save(tmp_path / f"labelled/labels/{number:02}.png")
    (tmp_path / "labelled/classes.txt").write_text("\n".join(scenes.classes))
    return tmp_path


def test_every_notebook_is_tested() -> None:
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == set(SMALL)


@pytest.mark.parametrize("name", SMALL)
def test_a_notebook_runs(name: str, folder: Path, kernel: KernelManager) -> None:
    values, printed = SMALL[name]
    book = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    nbformat.validate(book)
    assert not any(cell.get("outputs") for cell in book.cells)  # outputs are not committed
    [place] = [number for number, cell in enumerate(book.cells) if "parameters" in cell.metadata.get("tags", [])]
    assert set(values) <= {line.split(" = ")[0] for line in book.cells[place].source.splitlines()}
    small = "\n".join(f"{name} = {value!r}" for name, value in values.items())
    book.cells.insert(place + 1, nbformat.v4.new_code_cell(small))
    book.cells.insert(0, nbformat.v4.new_code_cell(f"%reset -f\n%cd -q {folder}"))
    NotebookClient(book, km=kernel, timeout=600).execute()
    outputs = [output for cell in book.cells for output in cell.get("outputs", [])]
    assert printed in "".join(output.text for output in outputs if output.output_type == "stream")
    assert any("image/png" in output.get("data", {}) for output in outputs)
