import argparse
import collections
import datetime
import io
import lzma
import os
import pathlib
import pickle
import struct
import sys
import tarfile
import types
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from cribo.base.errors import Damaged, InputError
from cribo.base.files import check_archive
from cribo.base.job import RECORD, result_kind
from cribo.models.formats.beside import read_yaml
from cribo.models.formats.reading import flatten, read_json, read_weights
from cribo.models.formats.torch_files import is_tar
from cribo.models.licences import read_header

STATE = {"norm.weight": torch.arange(4.0), "norm.bias": torch.ones(4, dtype=torch.float16)}


def save_numpy(state: dict[str, torch.Tensor], path: Path) -> None:
    arrays: dict[str, Any] = {key: value.numpy() for key, value in state.items()}
    with path.open("wb") as file:
        np.savez(file, **arrays)


def save_legacy(state: dict[str, torch.Tensor], path: Path) -> None:
    torch.save(state, path, _use_new_zipfile_serialization=False)


def save_flax(state: dict[str, torch.Tensor], path: Path) -> None:
    """As written by flax.serialization: arrays as extension 1, with shape, dtype and bytes."""
    msgpack = pytest.importorskip("msgpack")

    def pack(value: Any) -> Any:
        array = value.numpy()
        return msgpack.ExtType(1, msgpack.packb((array.shape, array.dtype.name, array.tobytes())))

    path.write_bytes(msgpack.packb(state, default=pack))


WRITERS = {
    "safetensors": safetensors.torch.save_file,
    "torch": torch.save,
    "legacy": save_legacy,
    "numpy": save_numpy,
    "flax": save_flax,
}


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
def test_files_are_recognised_by_content_and_not_by_name(tmp_path: Path, writer: Callable[..., Any]):
    path = tmp_path / "weights.jpg"
    writer(STATE, path)
    content = read_weights(path)
    assert content.keys() == STATE.keys()
    assert all(content[key].dtype == value.dtype and torch.equal(content[key], value) for key, value in STATE.items())


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize("keep", [0.97, 0.5])
def test_truncated_files_are_reported(tmp_path: Path, writer: Callable[..., Any], keep: float):
    path = tmp_path / "weights"
    writer({"weight": torch.randn(1000)}, path)
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content))])
    with pytest.raises(ValueError, match=r"is (damaged|truncated).*copy or download it again"):
        read_weights(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\n<!DOCTYPE html><html><body>404</body></html>", "is a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\n", "Git LFS pointer"),
        (b"no weights" * 99, "is a text file"),
        ("aucun réseau ici\n".encode() * 30 + b"x", "is a text file"),
        ("ñ".encode() * 400, "is a text file"),
        (b"x" + "ñ".encode() * 400, "is a text file"),  # truncated within a character
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "is a picture"),
        (b"\xff\xd8\xff\xe0\0\x10JFIF\0", "is a picture"),
        (b"II*\0\x08\0\0\0", "is a picture"),
        (bytes(range(255, 0, -1)), "is damaged or not a weight file"),
    ],
)
def test_errors_name_the_kind_of_other_files(tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "weights.pth"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_weights(path)


def save_compressed(path: Path, replaced: Mapping[str, bytes] | None = None) -> None:
    """Write the weights as a compressed archive, with other contents of some of its files."""
    stored = io.BytesIO()
    torch.save(STATE, stored)
    with zipfile.ZipFile(stored) as plain, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as compressed:
        for name in plain.namelist():
            compressed.writestr(name, (replaced or {}).get(Path(name).name, plain.read(name)))


def save_program(path: Path) -> None:
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)), path)


def save_export(path: Path) -> None:
    torch.export.save(torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),)), path.with_suffix(".pt2"))
    path.with_suffix(".pt2").rename(path)


def save_tar(path: Path) -> None:
    """As PyTorch 0.1, with a pipe in place of the storages, which must not be opened."""
    with tarfile.open(path, "w") as archive:
        for name, kind in (("storages", tarfile.FIFOTYPE), ("tensors", tarfile.REGTYPE), ("pickle", tarfile.REGTYPE)):
            member = tarfile.TarInfo(name)
            member.type = kind
            archive.addfile(member)


def save_onnx(path: Path, **options: Any) -> None:
    onnx = pytest.importorskip("onnx")
    value = onnx.helper.make_tensor_value_info("images", onnx.TensorProto.FLOAT, [1])
    node = onnx.helper.make_node("Identity", ["images"], ["features"])
    graph = onnx.helper.make_graph([node], "graph", [value], [value])
    onnx.save(onnx.helper.make_model(graph, **options), path)


OTHER_KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, r"no weights at .*weights\.pth"),
    "list": (lambda path: torch.save([torch.ones(1)], path), "contains a list"),
    "TorchScript": (save_program, "TorchScript program"),
    "export": (save_export, r"program of torch\.export"),
    "compressed": (save_compressed, "compressed archive"),
    "PyTorch 0.1": (save_tar, r"tar file of PyTorch 0\.1"),
    "ONNX": (save_onnx, "ONNX model"),
    "ONNX of PyTorch": (lambda path: save_onnx(path, producer_name="pytorch"), "ONNX model"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(("write", "words"), OTHER_KINDS.values(), ids=OTHER_KINDS)
def test_files_of_other_kinds_are_refused_by_their_kind(tmp_path: Path, write: Callable[[Path], object], words: str):
    write(tmp_path / "weights.pth")
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        read_weights(tmp_path / "weights.pth")


class Canary(torch.nn.Module):
    """Writes a file when it is loaded as a TorchScript program."""

    def __init__(self, path: str):
        super().__init__()
        self.path, self.kept = path, torch.zeros(3, dtype=torch.uint8)

    @torch.jit.export
    def __getstate__(self):  # pyright: ignore[reportIncompatibleMethodOverride]
        return (self.path, self.training)

    @torch.jit.export
    def __setstate__(self, state: tuple[str, bool]):
        self.path, self.training = state
        self.kept = torch.from_file(self.path, shared=True, size=3, dtype=torch.uint8)
        self.kept.fill_(65)

    def forward(self, images):
        return images


def with_another_directory(program: bytes, name: bytes) -> bytes:
    """Add a second list of files to a zip file. Python reads the last one, PyTorch the one at the recorded position."""
    end = program.rindex(b"PK\x05\x06")
    count, size, start = struct.unpack("<10xHIIH", program[end : end + 22])[:3]
    file = (
        struct.pack("<4sHHHHHIIIHH", b"PK\x03\x04", 20, 0, 0, 0, 0, zlib.crc32(b"N."), 2, 2, len(name), 0)
        + name
        + b"N."
    )
    place = start + size
    recorded = (place - (place + len(file) - start)) % 2**32  # Python adds the distance of the two directories
    values = (20, 20, 0, 0, 0, 0, zlib.crc32(b"N."), 2, 2, len(name), 0, size - 46 - len(name), 0, 0, 0, recorded)
    entry = struct.pack("<4sHHHHHHIIIHHHHHII", b"PK\x01\x02", *values) + name
    directory = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, count, count, size, start, 0)
    return program[:place] + file + entry.ljust(size, b" ") + directory


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_program_behind_a_second_list_of_files_does_not_run(tmp_path: Path):
    written, path = tmp_path / "canary", tmp_path / "weights.pth"
    program = io.BytesIO()
    torch.jit.save(torch.jit.script(Canary(str(written))), program)
    path.write_bytes(with_another_directory(program.getvalue(), b"archive/data.pkl"))
    assert zipfile.ZipFile(path).namelist() == ["archive/data.pkl"]
    with pytest.raises(ValueError, match="is a TorchScript program"):
        read_weights(path)
    assert not written.exists()
    torch.jit.load(path)  # the file runs as a program
    assert written.read_bytes() == b"AAA"


def test_tensors_beyond_their_storage_are_refused(tmp_path: Path):
    for is_zip in (True, False):
        path = tmp_path / f"{is_zip}.pth"
        torch.save({"weight": torch.ones(200)}, path, _use_new_zipfile_serialization=is_zip)
        content, size = path.read_bytes(), b"K\xc8\x85"  # a tuple of 200: the second one is the stride's or size's
        assert content.count(size) == 1
        path.write_bytes(content.replace(size, b"K\xc9\x85"))
        with pytest.raises(ValueError, match=r"size \(201,\) exceeds its storage of 200 numbers"):
            read_weights(path)


def test_compressed_files_are_not_unpacked(tmp_path: Path):
    # Headers of a tar file may have any size, here 16 MiB of zeros in 3 KB.
    header = tarfile.TarInfo("header")
    header.type, header.size = tarfile.XHDTYPE, 2**24
    (tmp_path / "tar").write_bytes(lzma.compress(header.tobuf() + bytes(2**24), format=lzma.FORMAT_ALONE))
    assert not is_tar(tmp_path / "tar")
    # PyTorch's reader unpacks its first record at once.
    save_compressed(tmp_path / "large.pth", {"version": bytes(2**24)})
    with pytest.raises(ValueError, match="is a compressed archive"):
        read_weights(tmp_path / "large.pth")
    with pytest.raises(Damaged, match="compressed"):  # a checkpoint of a run
        check_archive(tmp_path / "large.pth")


class Payload:
    def __reduce__(self):
        return (print, ("code in a checkpoint",))


@pytest.mark.parametrize("is_zip", [True, False])
def test_code_in_a_file_runs_only_with_trust(tmp_path: Path, capsys: pytest.CaptureFixture[str], is_zip: bool):
    path = tmp_path / "weights.pth"
    content = {"model": STATE, "folder": datetime.date(2024, 1, 1), "extra": Payload()}
    torch.save(content, path, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(ValueError, match=r"\(.*print\).*--trust"):
        read_weights(path)
    assert "code in a checkpoint" not in capsys.readouterr().out
    assert torch.equal(read_weights(path, trust=True)["model"]["norm.weight"], STATE["norm.weight"])
    assert "code in a checkpoint" in capsys.readouterr().out


def test_missing_packages_of_objects_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    module: Any = types.ModuleType("history")
    module.Buffer = type("Buffer", (), {"__module__": "history"})
    monkeypatch.setitem(sys.modules, "history", module)
    torch.save({"model": STATE, "history": module.Buffer()}, tmp_path / "weights.pth")
    with pytest.raises(ValueError, match=r"\(history\.Buffer\), and reading them could run code"):
        read_weights(tmp_path / "weights.pth")
    monkeypatch.delitem(sys.modules, "history")
    with pytest.raises(ValueError, match="contains objects of history, which is not installed"):
        read_weights(tmp_path / "weights.pth", trust=True)


def test_objects_in_numpy_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with (tmp_path / "weights.npz").open("wb") as file:
        np.savez(file, weight=np.array([Payload()], dtype=object))
    with pytest.raises(ValueError, match="is damaged or not a weight file"):
        read_weights(tmp_path / "weights.npz")
    assert "code in a checkpoint" not in capsys.readouterr().out


def test_tensors_are_found_at_any_depth():
    content = {"optimizer": {"state": {0: {"exp_avg": torch.ones(1)}}}, "list": [{"a": torch.ones(2)}], "epoch": 3}
    assert list(flatten(content)) == ["optimizer/state/0/exp_avg", "list/0/a"]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("is_zip", [True, False])
def test_plain_data_of_every_pickle_protocol_is_read(tmp_path: Path, protocol: int, is_zip: bool):
    beside = {"when": datetime.datetime(2024, 1, 1), "options": argparse.Namespace(a=1), "scores": np.ones(3)}
    counts: Any = collections.defaultdict(int)
    folders = [pathlib.Path("data"), pathlib.PureWindowsPath("C:/data")]
    content = {"model": STATE, **beside, "folders": folders, "best": np.float64(71.5), "counts": counts}
    options: dict[str, Any] = {"pickle_protocol": protocol, "_use_new_zipfile_serialization": is_zip}
    torch.save(content, tmp_path / "weights.pth", **options)
    read = read_weights(tmp_path / "weights.pth")
    assert torch.equal(read["model"]["norm.weight"], STATE["norm.weight"])
    assert (read["when"], read["options"].a, read["scores"].sum(), read["best"]) == (beside["when"], 1, 3, 71.5)
    assert [folder.as_posix() for folder in read["folders"]] == ["data", "C:/data"]
    arrays = {"model": {"norm.weight": np.arange(4.0)}, "__author__": "someone"}
    (tmp_path / "arrays.pkl").write_bytes(pickle.dumps(arrays, protocol))
    assert list(flatten(read_weights(tmp_path / "arrays.pkl"))) == ["model/norm.weight"]


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz"])
def test_archives_are_rejected_with_a_command_to_unpack_them(tmp_path: Path, kind: str):
    torch.save(STATE, tmp_path / "weights.pth")
    with tarfile.open(tmp_path / "packed", f"w:{kind}") as archive:  # pyright: ignore[reportCallIssue, reportArgumentType]
        archive.add(tmp_path / "weights.pth", "weights.pth")
    with pytest.raises(ValueError, match=r"packed is a \w+ archive: unpack it"):
        read_weights(tmp_path / "packed")
    with zipfile.ZipFile(tmp_path / "zipped", "w") as archive:
        archive.write(tmp_path / "weights.pth", "weights.pth")
    with pytest.raises(ValueError, match=r"zipped is an archive that contains weights\.pth: unpack it"):
        read_weights(tmp_path / "zipped")


def bombs() -> dict[str, str]:
    levels = "\n".join(f"v{n}: &v{n} [{', '.join([f'*v{n - 1}'] * 9)}]" for n in range(1, 30))
    merges = "\n".join(f"m{n}: &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 9)}]}}" for n in range(1, 30))
    return {
        "aliases": f"v0: &v0 x\n{levels}\nlicense: *v29",
        "merges": f"m0: &m0 {{x: 1}}\n{merges}\nlicense: *m29",
        "itself": "license: &v [*v]",
        "deep": "license: " + "[" * 100_000,
        "long": "license: [" + "1, " * 200_000 + "1]",
    }


@pytest.mark.parametrize("kind", bombs())
def test_text_from_strangers_is_bounded(tmp_path: Path, kind: str):
    text = bombs()[kind]
    (tmp_path / "README.md").write_text(f"---\n{text}\n---\n")
    assert read_header(tmp_path / "README.md") == {}
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(InputError, match=r"config\.yaml"):
        read_yaml(tmp_path / "config.yaml")


def test_json_from_strangers_is_bounded(tmp_path: Path):
    (tmp_path / "config.json").write_text("[" * 10**6)
    with pytest.raises(InputError, match=r"config\.json is not valid JSON"):
        read_json(tmp_path / "config.json")


@pytest.mark.skipif(sys.platform == "win32", reason="no pipes and devices among files")
def test_devices_and_pipes_are_not_read(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    for target in ("/dev/zero", "pipe"):
        for name, read in (("README.md", read_header), ("config.json", read_json), ("config.yaml", read_yaml)):
            path = tmp_path / name
            path.unlink(missing_ok=True)
            path.symlink_to(target)
            if name == "README.md":
                assert read(path) == {}
                continue
            with pytest.raises(InputError, match="not a regular file"):
                read(path)
    (tmp_path / RECORD).symlink_to("pipe")
    assert result_kind(tmp_path) is None
