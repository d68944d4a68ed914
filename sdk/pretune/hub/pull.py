"""Bring weights from a hub into the cache: complete and checked, or not at all."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from filelock import FileLock

from pretune.errors import HubError, WeightsError
from pretune.hub import cache
from pretune.hub.cache import Cached
from pretune.hub.client import DISK_FULL, Hub, explain, is_commit
from pretune.hub.integrity import Fault, check_folder, faults_of_manifest, read_manifest, sha256_of
from pretune.model.weights import load_weights

AT_ONCE = 4
"""Files that are downloaded side by side."""


def pull_weights(hub: Hub, repo: str, revision: str = "main", *, manifest: str | None = None) -> Cached:
    """Bring a revision of a repository into the cache.

    A commit that is there already costs no request. Anything else costs one, to see which commit a branch or
    tag is, or that the hub answers, and two for each file. What the cache held before is kept, whatever
    happens.

    Parameters
    ----------
    revision : str
        Branch, tag or commit.
    manifest : str, optional
        sha256 that the manifest must have, from a lock file.

    Raises
    ------
    HubError
        If the hub fails, or does not hold weights that are whole and that this pretune reads.
    """
    commit = revision if is_commit(revision) else hub.commit_of(repo, revision)
    name = f"{repo}@{commit[:12]}"
    found = cache.find(repo, commit)
    if found is None:
        if commit == revision:
            hub.reach(name)
        folder = cache.revision_folder(repo, commit)
        with _disk_errors(hub, name):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(folder.with_name(".lock")):
                if not folder.is_dir():
                    _download(hub, repo, commit, folder)
                elif faults := check_folder(folder):  # a pull that was killed, and then something happened
                    shutil.rmtree(folder)
                    raise HubError(f"{name}: {faults[0]}; it is removed from the cache, pull it again")
                found = cache.remember(repo, commit, [revision], hub.endpoint)
    else:
        with contextlib.suppress(OSError):  # a read-only cache holds what was asked for all the same
            found = cache.asked_for(found, revision)
    if manifest is not None and found.record.manifest != manifest:
        raise HubError(f"{name}: its manifest is not the one that the lock file pins; see: pretune hub lock")
    return found


def _download(hub: Hub, repo: str, commit: str, folder: Path) -> None:
    name = f"{repo}@{commit[:12]}"
    staging = folder.with_name(f"{folder.name}.part")
    try:
        listed = read_manifest(hub.download(repo, commit, "manifest.json", staging))
        faults = [listed] if isinstance(listed, Fault) else faults_of_manifest(listed)
        if isinstance(listed, Fault) or faults:
            raise WeightsError(f"{staging}: {faults[0]}; tell its owner, or pull another version")
        with ThreadPoolExecutor(AT_ONCE) as threads:
            jobs = [threads.submit(hub.download, repo, commit, file, staging) for file in listed.files]
            try:
                for job in jobs:
                    job.result()
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise
        shutil.rmtree(staging / ".cache")
        if faults := check_folder(staging):
            raise WeightsError(f"{staging}: {faults[0]}; nothing was kept of it, pull it again")
        load_weights(staging)
    except WeightsError as error:
        shutil.rmtree(staging)
        # Their folder is gone: they are named by where they came from.
        raise HubError(str(error).replace(str(staging), name)) from error
    except HubError as error:
        # What came whole stays for the next attempt, unless its space is needed.
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in DISK_FULL:
            shutil.rmtree(staging, ignore_errors=True)
        raise
    staging.replace(folder)


def repair(hub: Hub, item: Cached) -> list[str]:
    """Replace the bad files of a revision in the cache, and only these, with those of the hub.

    Returns
    -------
    names : list of str
        Files that were replaced, or removed because they are no part of the weights.

    Raises
    ------
    HubError
        If the hub fails, or what it sends is not what was pulled before.
    """
    record = item.record
    staging = item.path.with_name(f"{item.path.name}.part")
    repaired = []
    name = f"{record.repo}@{record.revision[:12]}"
    with _disk_errors(hub, name), FileLock(item.path.with_name(".lock")):
        try:
            # While the manifest is bad, it is not known which other files are: twice at most.
            while faults := cache.check(item):
                hub.reach(name)
                for fault in faults:
                    _replace(hub, item, fault.name, staging)
                    repaired.append(fault.name)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        cache.remember(record.repo, record.revision, record.refs, record.endpoint)
    return repaired


def _replace(hub: Hub, item: Cached, bad: str, staging: Path) -> None:
    """Put what the hub has in the place of a bad file, after a look at its hash."""
    record = item.record
    file = item.path / bad
    if bad == "manifest.json":
        expected = record.manifest
    else:
        manifest = read_manifest(item.path / "manifest.json")
        assert not isinstance(manifest, Fault)  # it would be the only fault
        if bad not in manifest.files:
            # It may have made way for what belongs there by now.
            if file.is_symlink() or (file.exists() and not file.is_dir()):
                file.unlink()
            return
        expected = manifest.files[bad].sha256
    fresh = hub.download(record.repo, record.revision, bad, staging)
    if sha256_of(fresh) != expected:
        name = f"{record.repo}@{record.revision[:12]}"
        raise HubError(f"{name}: {bad} is bad on {hub.endpoint} too; tell its owner, or pull another version")
    for path in (file.parent, file):  # a link in the place of either would lead elsewhere
        if path.is_symlink():
            path.unlink()
    if file.is_dir():
        shutil.rmtree(file)
    file.parent.mkdir(exist_ok=True)
    fresh.replace(file)


@contextlib.contextmanager
def _disk_errors(hub: Hub, what: str) -> Iterator[None]:
    """What the operating system refuses while the cache is written, in one line."""
    try:
        yield
    except HubError:
        raise
    except OSError as error:
        raise HubError(explain(error, what, hub.endpoint)) from error
