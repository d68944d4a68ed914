"""Weights pulled from a hub: one folder of plain files for each repository and revision.

::

    <cache>/weights/ORG--NAME/REVISION/       the files, complete and checked
    <cache>/weights/ORG--NAME/REVISION.json   where they came from, and their size and time stamp
    <cache>/weights/ORG--NAME/REVISION.part/  a download that goes on, or was broken off

A folder without its record is a pull that was killed at the last moment: the next pull finishes it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from pretune import env
from pretune.errors import OutputError, WeightsError
from pretune.hub.integrity import Fault, check_folder, sha256_of
from pretune.model.weights import Weights, load_weights


class Record(msgspec.Struct, frozen=True):
    """Where a revision in the cache came from.

    Attributes
    ----------
    revision : str
        Commit, 40 hex digits.
    refs : tuple of str
        Branches and tags that it was pulled by.
    manifest : str
        sha256 of ``manifest.json``.
    stamps : dict
        Size in bytes and time stamp in nanoseconds of each file when all were checked.
    pulled : str
        Time of the last pull, ISO 8601.
    """

    repo: str
    revision: str
    refs: tuple[str, ...]
    endpoint: str
    manifest: str
    stamps: dict[str, tuple[int, int]]
    pulled: str


@dataclass(frozen=True)
class Cached:
    """A revision in the cache."""

    path: Path
    record: Record


def repo_folder(repo: str) -> Path:
    """Folder of all revisions of a repository."""
    return env.cache_dir() / "weights" / repo.replace("/", "--")


def revision_folder(repo: str, revision: str) -> Path:
    """Folder of the files of a revision, whether they are there or not."""
    return repo_folder(repo) / revision


def cached(repo: str | None = None) -> list[Cached]:
    """Revisions in the cache, of one repository or of all, the last pulled first."""
    found = []
    for file in (env.cache_dir() / "weights").glob("*/*.json"):
        folder = file.with_suffix("")
        if not folder.is_dir():
            continue
        try:
            record = msgspec.json.decode(file.read_bytes(), type=Record)
        except (msgspec.MsgspecError, OSError):
            continue  # as good as not pulled
        if repo in (None, record.repo) and folder == revision_folder(record.repo, record.revision):
            found.append(Cached(folder, record))
    return sorted(found, key=lambda c: c.record.pulled, reverse=True)


def find(repo: str, revision: str | None = None) -> Cached | None:
    """A revision in the cache by commit, branch or tag; without one, the last pulled."""
    for item in cached(repo):
        if revision is None or revision == item.record.revision or revision in item.record.refs:
            return item
    return None


def remember(repo: str, revision: str, refs: Collection[str], endpoint: str) -> Cached:
    """Note that the files in the folder of a revision are whole, and where they came from just now."""
    folder = revision_folder(repo, revision)
    files = [path for path in folder.rglob("*") if path.is_file()]
    stats = {path.relative_to(folder).as_posix(): path.stat() for path in files}
    record = Record(
        repo=repo,
        revision=revision,
        refs=tuple(sorted({*refs} - {revision})),
        endpoint=endpoint,
        manifest=sha256_of(folder / "manifest.json"),
        stamps={name: (stat.st_size, stat.st_mtime_ns) for name, stat in sorted(stats.items())},
        pulled=_now(),
    )
    return _write(Cached(folder, record))


def asked_for(item: Cached, ref: str) -> Cached:
    """Note that a revision which is here was asked for once more, by a branch, a tag, or its commit."""
    refs = tuple(sorted({*item.record.refs, ref} - {item.record.revision}))
    return _write(Cached(item.path, msgspec.structs.replace(item.record, refs=refs, pulled=_now())))


def _write(item: Cached) -> Cached:
    file = item.path.with_name(f"{item.path.name}.json")
    draft = file.with_name(f"{file.name}.{os.getpid()}")
    draft.write_bytes(msgspec.json.format(msgspec.json.encode(item.record), indent=2))
    draft.replace(file)
    return item


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


def check(item: Cached) -> list[Fault]:
    """What is wrong with a revision in the cache; empty if nothing is."""
    manifest = item.path / "manifest.json"
    if manifest.is_file() and not manifest.is_symlink() and sha256_of(manifest) != item.record.manifest:
        return [Fault("manifest.json", "not the one that was pulled")]
    return check_folder(item.path)


def load(item: Cached, why: str) -> Weights:
    """The weights of a revision, after a look at its manifest, and at what has changed since it was checked.

    Raises
    ------
    WeightsError
        As `load_weights`.
    """
    manifest = item.path / "manifest.json"
    if not manifest.is_file() or sha256_of(manifest) != item.record.manifest:
        raise WeightsError(
            f"{manifest}: not the one that was pulled; run: pretune hub verify --repair {item.path}"
        )
    return load_weights(item.path, why, item.record.stamps)


def size_of(folder: Path) -> int:
    """Bytes of all files of a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def remove(item: Cached) -> int:
    """Delete a revision from the cache, and broken off downloads; returns the bytes that it held.

    Raises
    ------
    OutputError
        If the operating system refuses.
    """
    size = size_of(item.path)
    try:
        item.path.with_name(f"{item.path.name}.json").unlink(missing_ok=True)  # first: now it is not there
        shutil.rmtree(item.path)
    except OSError as error:
        raise OutputError(
            f"cannot delete {item.path}: {error.strerror}; make it writable, and run this again"
        ) from error
    for staging in item.path.parent.glob("*.part"):
        shutil.rmtree(staging, ignore_errors=True)
    return size
