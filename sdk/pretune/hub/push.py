"""Publish weights: all that can be checked is checked before anything is sent."""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pretune.errors import HubError, OptionError, WeightsError
from pretune.hub.client import Hub, is_named
from pretune.hub.integrity import Fault, read_manifest
from pretune.hub.validate import QUALITY, validate
from pretune.model.weights import Config, read_config

SLACK = 1e-6
"""A figure that is this much lower than before is no regression."""


@dataclass(frozen=True)
class Pushed:
    """What a push has made.

    Attributes
    ----------
    revision : str
        Commit, 40 hex digits.
    tag : str
        The version.
    changed : bool
        False if the repository held just this before.
    """

    repo: str
    revision: str
    tag: str
    changed: bool


def push(
    hub: Hub, folder: Path, repo: str, *, tag: str | None = None, allow_regression: bool = False
) -> Pushed:
    """Publish a weights folder as one commit and one tag; the repository is made if it does not exist.

    Parameters
    ----------
    tag : str, optional
        By default the next of ``v1``, ``v2`` ...
    allow_regression : bool
        Whether figures may be worse than those of the version that is replaced.

    Raises
    ------
    WeightsError
        If the folder is not fit to be published.
    OptionError
        If the tag is no name or exists, or a figure is worse than before.
    HubError
        If the hub fails, or somebody has pushed meanwhile.
    """
    if tag is not None and (".." in tag or not re.fullmatch(r"\w[\w.-]*", tag, re.ASCII)):
        raise OptionError(f"--tag {tag}: not a plain name, such as v2; leave --tag out for the next")
    config = validate(folder)
    names = ["manifest.json", *_manifest_names(folder)]
    head = _head(hub, repo)
    there: list[str] = []
    tags: dict[str, str] = {}
    if head is None:
        hub.ask(repo, hub.api.create_repo, repo)
        head = hub.commit_of(repo, "main")
    else:
        refs = hub.ask(repo, hub.api.list_repo_refs, repo)
        tags = {ref.name: ref.target_commit for ref in refs.tags}
        there = hub.ask(repo, hub.api.list_repo_files, repo, revision=head)
        if "config.json" in there and not allow_regression:
            _refuse_regression(hub, repo, head, config)
    version = tag or _next_version(tags)
    if tags.get(version, head) != head:
        raise OptionError(f"--tag {version}: {repo} has this version already; leave --tag out for the next")

    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    gone = [name for name in there if name not in names and not name.startswith(".")]
    operations = [
        *(CommitOperationAdd(name, folder / name) for name in names),
        *(CommitOperationDelete(name) for name in gone),
    ]
    commit = hub.ask(
        repo,
        hub.api.create_commit,
        repo,
        operations,
        commit_message=f"{config.name} {version}",
        parent_commit=head,
    ).oid
    if commit == head and tag is None and (known := [t for t, target in tags.items() if target == head]):
        return Pushed(repo, commit, known[-1], changed=False)
    if version not in tags:
        try:
            hub.ask(f"{repo}@{commit[:12]}", hub.api.create_tag, repo, tag=version, revision=commit)
        except HubError as error:
            raise HubError(f"{error}; the weights are there, only the tag is not: push again") from error
    return Pushed(repo, commit, version, changed=commit != head)


def _head(hub: Hub, repo: str) -> str | None:
    """Commit of the main branch; None if there is no such repository."""
    try:
        return hub.commit_of(repo, "main")
    except HubError as error:
        if is_named(error.__cause__, "GatedRepoError") or not is_named(
            error.__cause__, "RepositoryNotFoundError"
        ):
            raise
        return None


def _refuse_regression(hub: Hub, repo: str, head: str, config: Config) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        hub.download(repo, head, "config.json", Path(scratch))
        try:
            before = read_config(Path(scratch)).quality
        except WeightsError:
            return  # of another format: nothing to compare with
    worse = [
        f"{name} {config.quality[name]:.3f} after {before[name]:.3f}"
        for name in QUALITY
        if name in before and config.quality[name] < before[name] - SLACK
    ]
    if worse:
        raise OptionError(
            f"{repo}: worse than the version it replaces: {', '.join(worse)}; "
            "publish the better one, or add --allow-regression"
        )


def _next_version(tags: dict[str, str]) -> str:
    numbers = [int(match[1]) for name in tags if (match := re.fullmatch(r"v(\d+)", name))]
    return f"v{max(numbers, default=0) + 1}"


def _manifest_names(folder: Path) -> list[str]:
    manifest = read_manifest(folder / "manifest.json")
    assert not isinstance(manifest, Fault)  # it was validated
    return list(manifest.files)
