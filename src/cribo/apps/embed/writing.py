"""Writing and reading of feature files in Parquet, Lance, NumPy or safetensors format."""

import base64
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
import safetensors
import safetensors.numpy

from cribo.apps.embed.config import Format
from cribo.apps.embed.embedder import Features
from cribo.base.errors import InputError
from cribo.base.files import path_inside, write_text, write_whole
from cribo.base.packages import load_lance, require_packages

PARTS, DATASET = "features", "features.lance"


def _table(rows: Features) -> Any:
    """Return the features as an Arrow table."""
    import pyarrow as pa

    flat = pa.array(np.ascontiguousarray(rows.embedding).reshape(-1))
    return pa.table(
        {
            "image": pa.array([rows.names[place] for place in rows.columns["image"]], pa.string()),
            **{name: pa.array(values) for name, values in rows.columns.items() if name != "image"},
            "embedding": pa.FixedSizeListArray.from_arrays(flat, rows.embedding.shape[1]),
        }
    )


def _read_parquet(path: Path) -> Any:
    import pyarrow.parquet as pq

    return pq.read_table(path)


def _write_parquet(path: Path, rows: Features) -> None:
    import pyarrow.parquet as pq

    write_whole(path, lambda part: pq.write_table(_table(rows), part))


def _write_fragment(path: Path, rows: Features) -> None:
    """Write rows to files of the dataset without committing them, and their description to `path`."""
    load_lance("--format lance")
    from lance.fragment import write_fragments

    table = _table(rows)
    written = write_fragments(table, str(path.parents[1] / DATASET), schema=table.schema)
    schema = base64.b64encode(table.schema.serialize().to_pybytes()).decode()
    write_text(path, json.dumps({"schema": schema, "fragments": [fragment.to_json() for fragment in written]}))


def _commit_fragments(folder: Path) -> None:
    """Make the rows of all parts, in their order, the rows of the dataset."""
    lance = load_lance("--format lance")
    import pyarrow as pa

    paths = sorted((folder / PARTS).glob("part-*.json"))
    for path in paths:
        _fragment_files(folder, path)
    parts = [json.loads(path.read_text()) for path in paths]
    schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(parts[0]["schema"])))
    fragments = [lance.FragmentMetadata.from_json(json.dumps(each)) for part in parts for each in part["fragments"]]
    lance.LanceDataset.commit(str(folder / DATASET), lance.LanceOperation.Overwrite(schema, fragments))


def _fragment_files(folder: Path, path: Path) -> list[Path]:
    """Return the files of the dataset with the rows of a part; raises InputError if the part is damaged."""
    try:
        fragments = json.loads(path.read_text(encoding="utf-8"))["fragments"]
        names = [file["path"] for fragment in fragments for file in fragment["files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is damaged: repeat the command of {folder} with --overwrite") from error
    return [path_inside(folder / DATASET / "data", name, source=path) for name in names]


def _read_fragment(path: Path) -> Any:
    """Return the rows of a part of the committed dataset."""
    folder = path.parents[1]
    files = {file.name for file in _fragment_files(folder, path)}
    dataset = load_lance("--format lance").dataset(str(folder / DATASET))
    fragments = [each for each in dataset.get_fragments() if {file.path for file in each.data_files()} <= files]
    return dataset.scanner(fragments=fragments).to_table()


def _write_numpy(path: Path, rows: Features) -> None:
    def write(part: Path) -> None:
        with part.open("wb") as file:  # for a path, NumPy would append .npz
            arrays: dict[str, Any] = {"names": np.array(rows.names, dtype=np.str_), **rows.columns}
            np.savez(file, embedding=rows.embedding, **arrays)

    write_whole(path, write)


def _read_numpy(path: Path) -> Any:
    with np.load(path) as part:
        return _read_table(part["names"], {name: part[name] for name in part.files if name != "names"})


def _write_safetensors(path: Path, rows: Features) -> None:
    tensors = {**rows.columns, "embedding": rows.embedding}
    write_whole(
        path,
        lambda part: safetensors.numpy.save_file(
            {name: np.ascontiguousarray(values) for name, values in tensors.items()},
            part,
            metadata={"names": json.dumps(rows.names)},
        ),
    )


def _read_safetensors(path: Path) -> Any:
    with safetensors.safe_open(path, "np") as file:
        names = json.loads(file.metadata()["names"])
        return _read_table(names, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118


def _read_table(names: Sequence[str], arrays: Mapping[str, np.ndarray]) -> Any:
    columns = {name: values for name, values in arrays.items() if name != "embedding"}
    return _table(Features([*map(str, names)], {}, columns, arrays["embedding"], content=""))


class _Format(NamedTuple):
    """A format: the suffix of a part, and the functions that write and read it; what completes the parts.

    `others` returns the further files of a part, given the folder of the results and the file of the part.
    """

    suffix: str
    write: Callable[[Path, Features], None]
    read: Callable[[Path], Any]
    complete: Callable[[Path], None] = lambda folder: None
    result: str = PARTS
    others: Callable[[Path, Path], list[Path]] = lambda folder, path: []


_FORMATS: Mapping[Format, _Format] = {
    "parquet": _Format(".parquet", _write_parquet, _read_parquet),
    "lance": _Format(".json", _write_fragment, _read_fragment, _commit_fragments, DATASET, _fragment_files),
    "numpy": _Format(".npz", _write_numpy, _read_numpy),
    "safetensors": _Format(".safetensors", _write_safetensors, _read_safetensors),
}


def part_files(folder: Path, kind: Format) -> dict[str, list[Path]]:
    """Return the files of each part in the folder of the results, by the name of the part, in order.

    Raises:
        InputError: a part is damaged, or refers to a file outside the folder.
        OSError: a file cannot be read.
    """
    suffix = _FORMATS[kind].suffix
    return {
        path.name.removesuffix(suffix): [path, *_FORMATS[kind].others(folder, path)]
        for path in sorted((folder / PARTS).glob(f"part-*{suffix}"))
    }


def read_parts(folder: Path, kind: Format) -> Iterator[Any]:
    """Yield the rows of each part of complete results as an Arrow table, in order, one part in memory at a time.

    Raises:
        InputError: a part is damaged.
        OSError: a file cannot be read.
    """
    for path in sorted((folder / PARTS).glob(f"part-*{_FORMATS[kind].suffix}")):
        try:
            yield _FORMATS[kind].read(path)
        except (ValueError, KeyError, EOFError, BadZipFile, safetensors.SafetensorError) as error:
            raise InputError(f"{path} is damaged: repeat the command of {folder} with --overwrite") from error


def require_writer(kind: Format) -> None:
    """Raise MissingPackage if the library of a format is not installed."""
    if kind == "lance":
        require_packages("--format lance", "lance", extra="search", otherwise=", or use --format parquet")


def part_path(folder: Path, name: str, kind: Format) -> Path:
    """Return the path of a part in the folder of the results."""
    return folder / PARTS / f"{name}{_FORMATS[kind].suffix}"


def write_part(folder: Path, name: str, kind: Format, rows: Features) -> None:
    """Write a part atomically.

    Raises:
        OSError: the file cannot be written.
    """
    _FORMATS[kind].write(part_path(folder, name, kind), rows)


def complete_parts(folder: Path, kind: Format) -> Path:
    """Complete the results once all parts are written, and return where the features are.

    Raises:
        OSError: the results cannot be written.
    """
    _FORMATS[kind].complete(folder)
    return folder / _FORMATS[kind].result
