"""The output folder of a run: one run at a time, everything in it written so that a kill leaves it whole."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from filelock import FileLock, Timeout

from pretune.errors import OutputError
from pretune.messages import explain_os_errors
from pretune.records.log import RecordLog


class RunFolder:
    """An output folder, held by one run for as long as the ``with`` block lasts.

    Parameters
    ----------
    path : str or Path
        The folder; created if it is missing. One that holds an earlier run is resumed.

    Attributes
    ----------
    log : RecordLog
        ``records.jsonl``.
    database_dir : Path
        ``database/``, see `write_database`.
    result_path, library_path : Path
        ``result.json`` and ``model.so``.

    Raises
    ------
    OutputError
        On entering, at once: if the folder cannot be created or written, or another run holds it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.log = RecordLog(self.path / "records.jsonl")
        self.database_dir = self.path / "database"
        self.result_path = self.path / "result.json"
        self.library_path = self.path / "model.so"
        self._owner_path = self.path / ".owner.json"
        self._lock = FileLock(self.path / ".lock", thread_local=False)

    def __enter__(self) -> Self:
        with explain_os_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                self._lock.acquire(timeout=0)
            except Timeout:
                raise OutputError(
                    f"{self.path} is in use by another run{self._owner()}; wait for it, or choose another "
                    "folder with --out"
                ) from None
            try:  # also shows that files can be written
                write_atomic(self._owner_path, {"pid": os.getpid(), "host": socket.gethostname()})
            except BaseException:
                self._lock.release()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.log.sync()
        with contextlib.suppress(OSError):
            self._owner_path.unlink()
        self._lock.release()

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write ``result.json``, replacing an earlier one in one step.

        Raises
        ------
        OutputError
            If it cannot be written; an earlier result stays.
        """
        with explain_os_errors(self.path):
            write_atomic(self.result_path, result)

    def read_result(self) -> dict[str, Any]:
        """``result.json`` of an earlier run; empty if there is none, or none that can be read."""
        try:
            found = json.loads(self.result_path.read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _owner(self) -> str:
        try:
            owner = json.loads(self._owner_path.read_text())
            host = "" if owner["host"] == socket.gethostname() else f" on {owner['host']}"
            return f" (process {owner['pid']}{host})"
        except (OSError, ValueError, KeyError, TypeError):  # it has just started, or has just ended
            return ""


def write_atomic(path: Path, value: Mapping[str, Any]) -> None:
    """Write JSON to a file that other processes see either in its old or in its new state."""
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(fd)
        Path(temporary).chmod(0o644)  # mkstemp makes files that only their owner reads
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
