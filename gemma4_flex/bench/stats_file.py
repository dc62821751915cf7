"""Where a result goes: a path tried before the run, and a file that is there whole or not at all."""
from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path


class StatsPathError(ValueError):
    """A place the result can't be written to, found out before the run."""


def check_writable(path: str | Path) -> Path:
    """The path, once a file was really made and removed beside it. Raises StatsPathError with what to do."""
    path = Path(path)
    if path.is_dir():
        raise StatsPathError(f"can't write {path}: it is a directory; name a file in it")
    if path.exists() and not path.is_file():      # a rename over /dev/null would put a file in the device's place
        raise StatsPathError(f"can't write {path}: it is a device or a pipe; name an ordinary file")
    try:
        handle, beside = _open_beside(path)
        os.close(handle)
        os.unlink(beside)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise StatsPathError(f"can't write {path}: {why}; name a file in an existing, writable directory") from None
    return path


def _open_beside(path: Path) -> tuple[int, str]:
    return tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")


def write_json(value: dict, path: str | Path) -> None:
    """Write `value` as JSON: all of it or, whatever happens, none (written beside the target, then renamed over it)."""
    path = Path(path)
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    handle, beside = _open_beside(path)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(beside, 0o644)      # mkstemp makes it private
        os.replace(beside, path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise
