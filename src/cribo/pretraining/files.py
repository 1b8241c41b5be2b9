"""The run folder: claiming it without harm to anything in it, and writing files whole or not at all."""

import errno
import itertools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from cribo.files import write_whole

CONFIG, SUMMARY, METRICS, SKIPPED = "config.yaml", "summary.json", "metrics.csv", "skipped.csv"
CHECKPOINTS, REPORT = "checkpoints", "report"


_NO_ROOM = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}  # Windows knows no quotas


class RunFolderError(ValueError):
    """A run folder that cannot be used, with what to do instead."""


def claim_run_folder(out: Path, name: str | None, default_name: str, *, overwrite: bool) -> Path:
    """Make the folder of a new run, `out/name`.

    Without a name, the first of `default_name`, `default_name-2`, ... that does not exist.

    Raises:
        RunFolderError: the folder exists and `overwrite` is not set, holds something that is no run, is a file,
            or cannot be written to.
    """
    _require_folder(out)
    try:
        if name is None:
            folder = _make_numbered(out, default_name)
        else:
            folder = out / name
            if folder.exists():
                _make_way(folder, overwrite=overwrite)
            folder.mkdir(parents=True, exist_ok=True)
        (folder / CHECKPOINTS).mkdir()
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RunFolderError(f"cannot write to {out}: {error.strerror}; choose another --out") from error
    return folder


def _make_numbered(out: Path, default_name: str) -> Path:
    """Make the first folder of `default_name`, `default_name-2`, ... that is not there; safe beside other runs."""
    for number in itertools.count(1):
        folder = out / (default_name if number == 1 else f"{default_name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise AssertionError("numbers do not end")


def _make_way(folder: Path, *, overwrite: bool) -> None:
    if not folder.is_dir():
        raise RunFolderError(f"{folder} is a file, not a run folder: choose another --name or --out")
    if not any(folder.iterdir()):
        return
    if not overwrite:
        raise RunFolderError(
            f"{folder} exists already: choose another --name, continue it with --resume {folder}, "
            "or replace it with --overwrite"
        )
    if not (folder / CONFIG).is_file():
        raise RunFolderError(f"{folder} holds no {CONFIG}, so it is no run and is left alone")
    shutil.rmtree(folder)


def _require_folder(out: Path) -> None:
    for part in (out, *out.parents):
        if part.is_dir():
            return
        if part.exists():
            raise RunFolderError(f"{part} is a file, not a folder: choose another --out")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a dictionary as indented JSON, whole or not at all."""
    write_whole(path, lambda part: _write_text(part, json.dumps(content, indent=2) + "\n"))


def write_text(path: Path, text: str) -> None:
    """Write a text, whole or not at all."""
    write_whole(path, lambda part: _write_text(part, text))


def is_disk_full(error: BaseException) -> bool:
    """Whether an error says that there is no room: no space, or a quota."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in _NO_ROOM:
            return True
        # torch's writer hides the cause behind its own message.
        if isinstance(seen, RuntimeError) and any(
            sign in str(seen) for sign in ("file write failed", "unexpected pos", "No space left")
        ):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
