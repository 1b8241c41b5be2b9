"""Values of the objectives' public loss code: every file of a kind in the folder that CRIBO_GOLDEN names."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

FOLDER = Path(os.environ.get("CRIBO_GOLDEN") or Path(__file__).parents[1] / "golden" / "objectives")


def cases(kind: str) -> list[Path]:
    """Return the files whose names begin with a kind, such as `neco_loss`; without any, one that cannot be opened."""
    return sorted(FOLDER.glob(f"{kind}*.npz")) or [FOLDER / f"{kind}.npz"]


def load(path: Path) -> dict[str, Any]:
    """Return the arrays as tensors, and numbers and strings as Python objects."""
    with np.load(path) as file:
        return {key: torch.from_numpy(value) if value.ndim else value.item() for key, value in file.items()}
