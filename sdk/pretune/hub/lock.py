"""The lock file: which revision of which repository a project uses. It is meant to be committed."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pretune.errors import OptionError, OutputError
from pretune.hub.cache import Cached
from pretune.model.weights import Covers, read_config

VERSION = 1


class Pin(msgspec.Struct, frozen=True):
    """One target of a lock file.

    Attributes
    ----------
    revision : str
        Commit, 40 hex digits.
    manifest : str
        sha256 of ``manifest.json``, which holds those of all other files.
    covers : Covers
        What it is for, so that a machine knows which pins it needs before it has any.
    """

    repo: str
    revision: str
    manifest: str
    covers: Covers


class Lock(msgspec.Struct, frozen=True):
    """Contents of a lock file: a pin for each target."""

    version: int = VERSION
    targets: dict[str, Pin] = msgspec.field(default_factory=dict)


def read_lock(file: Path) -> Lock | None:
    """Read a lock file; None if there is none.

    Raises
    ------
    OptionError
        If it cannot be read as one.
    """
    try:
        lock = msgspec.json.decode(file.read_bytes(), type=Lock)
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, OSError) as error:
        raise OptionError(
            f"{file}: cannot be read ({error}); restore it, or delete it and run: pretune hub lock"
        ) from None
    if lock.version != VERSION:
        raise OptionError(
            f"{file}: lock format {lock.version}, this pretune reads {VERSION}; run: pip install -U pretune"
        )
    return lock


def write_lock(file: Path, lock: Lock) -> None:
    """Write a lock file, in one step.

    Raises
    ------
    OutputError
        If the operating system refuses.
    """
    draft = file.with_name(f"{file.name}.new")
    try:
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(lock, order="sorted"), indent=2) + b"\n")
        draft.replace(file)
    except OSError as error:
        raise OutputError(
            f"cannot write {file}: {error.strerror}; name another file: --file or PRETUNE_LOCK"
        ) from error


def pin_of(item: Cached) -> tuple[str, Pin]:
    """Target and pin of a revision in the cache."""
    config = read_config(item.path)
    record = item.record
    return config.name, Pin(record.repo, record.revision, record.manifest, config.covers)
