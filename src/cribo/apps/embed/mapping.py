"""The map of `cribo embed`: two coordinates for each row of the features, by PCA or UMAP."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from cribo.apps.embed.config import Format, MapMethod
from cribo.apps.embed.writing import part_files, read_parts
from cribo.base.console import Progress, no_progress
from cribo.base.errors import DataError
from cribo.base.files import write_whole
from cribo.base.packages import require_packages
from cribo.features.pca import PrincipalComponents

MAP = "map.parquet"
"""The file of the map in the folder of the results."""

_LEAST = 3  # rows, for UMAP
_NEIGHBOURS = 15  # UMAP's default


def require_mappable(method: MapMethod, rows: int | None = None) -> None:
    """Check that a map can be computed.

    Args:
        method: of the map.
        rows: number of rows; None if it is not known yet.

    Raises:
        MissingPackage: umap-learn is not installed.
        DataError: there are too few rows.
    """
    if method == "umap":
        require_packages("--map umap", "umap", extra="map", otherwise=", or use --map pca")
        if rows is not None and rows < _LEAST:
            raise DataError(f"--map umap needs at least {_LEAST} rows of features, got {rows}: use --map pca")


def write_map(
    folder: Path, kind: Format, method: MapMethod, *, seed: int = 0, progress: Progress = no_progress
) -> Path:
    """Write a Parquet file with two coordinates for each row of complete results, in their order.

    The columns are those of the features without `embedding`, and `x` and `y`. Features are scaled to unit length
    first, as in retrieval. PCA reads one part at a time, UMAP holds all rows in memory. Equal features and seeds give
    equal maps.

    Args:
        folder: of the results.
        kind: format of the features.
        method: pca, the first two principal components, or umap (McInnes et al. 2018, arXiv:1802.03426).
        seed: of UMAP.
        progress: called with the number of written parts.

    Raises:
        DataError: features are not finite, or too few for UMAP; an existing map is kept.
        InputError: a part is damaged.
        MissingPackage: umap-learn is not installed.
        OSError: a file cannot be read or written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    parts = len(part_files(folder, kind))
    progress("map", 0, parts)
    points = _principal(folder, kind) if method == "pca" else _umap(folder, kind, seed)

    def write(path: Path) -> None:
        start, writer = 0, None
        try:
            for done, part in enumerate(read_parts(folder, kind), start=1):
                own = points[start : (start := start + len(part))]
                table = part.drop_columns("embedding")
                for name, values in zip("xy", own.T, strict=True):
                    table = table.append_column(name, pa.array(np.ascontiguousarray(values)))
                table = table.replace_schema_metadata({"map": method if method == "pca" else f"umap, seed {seed}"})
                writer = writer or pq.ParquetWriter(path, table.schema)
                writer.write_table(table)
                progress("map", done, parts)
        finally:
            if writer is not None:
                writer.close()

    write_whole(folder / MAP, write)
    return folder / MAP


def _principal(folder: Path, kind: Format) -> Float[np.ndarray, "n 2"]:
    """Return the first two principal components of all rows; y is 0 if the features have one channel."""
    components = PrincipalComponents.fit(_directions(folder, kind), 2)
    points = torch.cat([components.project(rows) for rows in _directions(folder, kind)])
    return F.pad(points, (0, 2 - points.shape[1])).float().numpy()


def _umap(folder: Path, kind: Format, seed: int) -> Float[np.ndarray, "n 2"]:
    """Return the places of all rows by UMAP."""
    rows = torch.cat([rows.float() for rows in _directions(folder, kind)]).numpy()
    require_mappable("umap", len(rows))
    from umap import UMAP

    if not np.ptp(rows, axis=0).any():  # equal rows, which UMAP would place at NaN
        return np.zeros((len(rows), 2), dtype=np.float32)
    neighbours = min(_NEIGHBOURS, len(rows) - 1)
    # By PCA, the start exists for any number of rows; a seed gives equal maps with one thread only.
    reducer: Any = UMAP(n_neighbors=neighbours, init="pca", random_state=seed, n_jobs=1)
    return reducer.fit_transform(rows)


def _directions(folder: Path, kind: Format) -> Iterator[Float[Tensor, "n d"]]:
    """Yield the rows of each part, scaled to unit length, in double precision; raises DataError for NaN."""
    for part in read_parts(folder, kind):
        column = part["embedding"].combine_chunks()
        rows = torch.from_numpy(column.flatten().to_numpy().astype(np.float64)).reshape(-1, column.type.list_size)
        if len(wrong := (~rows.isfinite().all(dim=1)).nonzero()):
            name = part["image"][int(wrong[0])].as_py()
            raise DataError(
                f"the features of {name} are not finite, so that there is no map: check the backbone's weights, and "
                "with --precision float16, use float32"
            )
        yield F.normalize(rows, dim=-1)
