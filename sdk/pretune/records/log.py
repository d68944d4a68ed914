"""The append-only log: one JSON line per record, which survives kills, full disks and two writers."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import msgspec
from filelock import FileLock

from pretune.messages import explain_os_errors, notice
from pretune.records.record import RECORD_VERSION, Record

# Writing a line reaches the kernel at once, so a killed process loses nothing. Only a power cut can take
# the last seconds of records; syncing after each would cost more than measuring some kernels.
_SYNC_SECONDS = 5.0

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Record)


class _Head(msgspec.Struct):
    version: int


_head_decoder = msgspec.json.Decoder(_Head)


class RecordLog:
    """Records in a file, one JSON line each, only ever added to.

    Parameters
    ----------
    path : str or Path
        The file; created by the first `append`. Any number of threads and processes may append to it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._synced = time.monotonic()

    def append(self, *records: Record) -> None:
        """Write records; when this returns, a killed process no longer loses them.

        A kill meanwhile leaves the first of them, or none.

        Raises
        ------
        OutputError
            If the disk is full, read-only or not permitted. None is written then, and what was there stays.
        """
        lines = b"".join(_encoder.encode(record) + b"\n" for record in records)
        with explain_os_errors(self.path.parent), self._lock():
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                self._repair(fd)  # else these would continue what a killed run left of a line
                end = os.fstat(fd).st_size
                try:
                    rest = memoryview(lines)
                    while rest:
                        rest = rest[os.write(fd, rest) :]
                except BaseException:  # a full disk takes a part of them; Ctrl-C comes at any moment
                    os.ftruncate(fd, end)
                    raise
                if time.monotonic() - self._synced > _SYNC_SECONDS:
                    os.fsync(fd)
                    self._synced = time.monotonic()
            finally:
                os.close(fd)

    def load(self) -> list[Record]:
        """Read all records in the order they were written; none if there is no file.

        A last line that a killed run left unfinished is moved to ``<name>.torn``. Lines that are broken or
        of an unknown version are skipped, and stay in the file. Each of these is said on stderr.

        Raises
        ------
        OutputError
            If the file exists and cannot be read.
        """
        if not self.path.exists():
            return []
        # In a folder that cannot be written, a torn line is only skipped.
        with contextlib.suppress(OSError), self._lock():
            fd = os.open(self.path, os.O_RDWR | os.O_APPEND)
            try:
                self._repair(fd)
            finally:
                os.close(fd)
        with explain_os_errors(self.path.parent, "read"):
            data = self.path.read_bytes()

        if not data:
            return []
        records: list[Record] = []
        broken: list[int] = []
        unknown: list[int] = []
        for number, line in enumerate(data.removesuffix(b"\n").split(b"\n"), start=1):
            try:
                if _head_decoder.decode(line).version != RECORD_VERSION:
                    unknown.append(number)
                else:
                    records.append(_decoder.decode(line))
            except msgspec.MsgspecError:
                broken.append(number)
        if broken:
            notice(f"{self.path}: skipped {_lines(broken)} that cannot be read")
        if unknown:
            notice(f"{self.path}: skipped {_lines(unknown)} of a version other than {RECORD_VERSION}")
        return records

    def sync(self) -> None:
        """Make sure that everything written is on the disk, as far as that can be told."""
        with contextlib.suppress(OSError):
            fd = os.open(self.path, os.O_RDWR)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def _lock(self) -> FileLock:
        return FileLock(self.path.with_name(f".{self.path.name}.lock"))

    def _repair(self, fd: int) -> None:
        """Finish or remove a last line without an end. Under the lock, so nobody is still writing it."""
        size = os.fstat(fd).st_size
        start, tail = size, b""
        while start > 0 and b"\n" not in tail:
            step = min(start, 1 << 16)
            start -= step
            os.lseek(fd, start, os.SEEK_SET)
            tail = os.read(fd, step) + tail
            if tail.endswith(b"\n"):
                return
        torn = tail[tail.rfind(b"\n") + 1 :]
        if not torn:
            return
        try:
            _head_decoder.decode(torn)
        except msgspec.MsgspecError:
            pass
        else:  # only the end of the line was missing
            os.write(fd, b"\n")
            return
        keep = self.path.with_name(f"{self.path.name}.torn")
        with keep.open("ab") as file:
            file.write(torn + b"\n")
        os.ftruncate(fd, size - len(torn))
        notice(f"{self.path}: the last line was unfinished, as a kill leaves it; moved it to {keep.name}")


def _lines(numbers: list[int]) -> str:
    shown = ", ".join(str(number) for number in numbers[:5])
    more = f" and {len(numbers) - 5} more" if len(numbers) > 5 else ""
    return f"line {shown}" if len(numbers) == 1 else f"{len(numbers)} lines ({shown}{more})"
