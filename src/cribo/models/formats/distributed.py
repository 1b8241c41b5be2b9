"""Folders of `torch.distributed.checkpoint`, written by DINOv2, DINOv3 and CAPI during training."""

import io
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cribo.base.errors import InputError
from cribo.base.files import path_inside, require_regular
from cribo.models.formats.plain_pickle import PlainUnpickler

METADATA = ".metadata"

SHARD = (
    "contains one rank's part of a sharded network (FSDP): use the whole network, such as the "
    "eval/training_<step>/teacher_checkpoint.pth of DINOv2 and DINOv3, or a folder of torch.distributed.checkpoint"
)
"""The reason why a file of a sharded training cannot be loaded alone."""


def read_distributed(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a checkpoint, unsharded, under their paths in the saved state.

    Raises:
        ValueError: metadata and files do not match, or the files are compressed, lie outside the folder, or are pipes
            or devices.
        UnpicklingError: the metadata contains something other than data.
        OSError: a file is missing.
    """
    require_regular(folder / METADATA)
    with (folder / METADATA).open("rb") as file:
        metadata = PlainUnpickler(file).load()
    pieces: dict[tuple[str, tuple[int, ...]], Any] = {
        (index.fqn, tuple(index.offset)): info
        for index, info in metadata.storage_data.items()
        if getattr(index, "offset", None) is not None
    }
    paths = metadata.planner_data or {}
    found = {}
    for name, about in metadata.state_dict_metadata.items():
        if not hasattr(about, "chunks"):
            continue
        whole: Tensor | None = None
        for chunk in about.chunks:
            piece = _read_piece(folder, pieces[name, tuple(chunk.offsets)])
            if whole is None:
                whole = torch.empty(tuple(about.size), dtype=piece.dtype)
            places = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[places] = piece
        if whole is not None:
            found["/".join(map(str, paths.get(name, (name,))))] = whole
    return found


def _read_piece(folder: Path, info: Any) -> Tensor:
    if getattr(info, "transform_descriptors", None):
        raise InputError("the files are compressed: save the checkpoint without transforms")
    path = path_inside(folder, info.relative_path, source=METADATA)
    require_regular(path)
    with path.open("rb") as file:
        file.seek(info.offset)
        content = file.read(info.length)
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
