"""Writing of feature files in Parquet, NumPy or safetensors format."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy
from jaxtyping import Float, Int

from cribo.checks import require_packages
from cribo.embedding.config import Format
from cribo.files import write_whole


class Rows(NamedTuple):
    """Features of a part, with index columns; the column `image` contains indices into `names`."""

    names: list[str]
    columns: Mapping[str, Int[np.ndarray, " n"]]
    embedding: Float[np.ndarray, "n d"]


def _write_parquet(path: Path, rows: Rows) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    flat = pa.array(np.ascontiguousarray(rows.embedding).reshape(-1))
    table = {
        "image": pa.array([rows.names[place] for place in rows.columns["image"]], pa.string()),
        **{name: pa.array(values) for name, values in rows.columns.items() if name != "image"},
        "embedding": pa.FixedSizeListArray.from_arrays(flat, rows.embedding.shape[1]),
    }
    pq.write_table(pa.table(table), path)


def _write_numpy(path: Path, rows: Rows) -> None:
    with path.open("wb") as file:  # for a path, NumPy would append .npz
        arrays: dict[str, Any] = {"names": np.array(rows.names, dtype=np.str_), **rows.columns}
        np.savez(file, embedding=rows.embedding, **arrays)


def _write_safetensors(path: Path, rows: Rows) -> None:
    tensors = {**rows.columns, "embedding": rows.embedding}
    safetensors.numpy.save_file(
        {name: np.ascontiguousarray(values) for name, values in tensors.items()},
        path,
        metadata={"names": json.dumps(rows.names)},
    )


_WRITERS: Mapping[Format, tuple[str, Callable[[Path, Rows], Any]]] = {
    "parquet": (".parquet", _write_parquet),
    "numpy": (".npz", _write_numpy),
    "safetensors": (".safetensors", _write_safetensors),
}


def require_writer(kind: Format) -> None:
    """Raise MissingPackage if the library of a format is not installed."""
    if kind == "parquet":
        require_packages("--format parquet", "pyarrow", extra="search", otherwise=", or use --format numpy")


def part_path(folder: Path, number: int, kind: Format) -> Path:
    """Return the path of a part."""
    return folder / f"part-{number:05d}{_WRITERS[kind][0]}"


def write_part(folder: Path, number: int, kind: Format, rows: Rows) -> None:
    """Write a part atomically.

    Raises:
        OSError: the file cannot be written.
    """
    write_whole(part_path(folder, number, kind), lambda part: _WRITERS[kind][1](part, rows))
