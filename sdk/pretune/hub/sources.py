"""Where weights come from: what was asked for, the user's own, the cache, the wheel, and the hub last."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pretune import env
from pretune.errors import HubError, WeightsError
from pretune.hardware import Hardware
from pretune.hub import cache
from pretune.hub.cache import Cached
from pretune.hub.client import Hub, is_commit, is_named
from pretune.hub.coverage import Verdict, judge, judge_hardware, ways_on
from pretune.hub.integrity import Fault, read_manifest
from pretune.hub.lock import Lock, Pin, read_lock
from pretune.hub.pull import pull_weights
from pretune.messages import notice
from pretune.model.weights import (
    Config,
    Software,
    Weights,
    installed_software,
    load_weights,
    read_config,
    shipped_folder,
)

Source = Literal["own", "cache", "wheel", "hub"]
SOURCES: tuple[Source, ...] = ("own", "cache", "wheel", "hub")
"""Of two that cover a machine alike, the one that comes first here is used."""


@dataclass(frozen=True)
class Offer:
    """Weights that could be used.

    Attributes
    ----------
    source : str
        ``"own"``: fine-tuned on this machine. ``"cache"``: pulled before. ``"wheel"``: came with pretune.
        ``"hub"``: can be pulled.
    path : pathlib.Path
        Their folder; for those on the hub one that is gone.
    config : Config or None
        None if it cannot be read; `problem` then says why.
    repo, revision : str
        On the hub, if they come from there.
    size : int
        Bytes of all files.
    """

    source: Source
    name: str
    path: Path
    config: Config | None
    problem: str = ""
    repo: str = ""
    revision: str = ""
    size: int = 0


@dataclass(frozen=True)
class Considered:
    """Weights and what they are worth on a machine."""

    offer: Offer
    verdict: Verdict


def offer_in(folder: Path, source: Source, repo: str = "", revision: str = "") -> Offer:
    """The weights in a folder."""
    manifest = read_manifest(folder / "manifest.json")
    size = 0 if isinstance(manifest, Fault) else sum(info.size for info in manifest.files.values())
    try:
        config = read_config(folder)
    except WeightsError as error:
        problem = str(error).replace(str(folder), folder.name)
        return Offer(source, folder.name, folder, None, problem, repo, revision, size)
    return Offer(source, config.name, folder, config, "", repo, revision, size)


def offers_here() -> list[Offer]:
    """All weights on this machine: of each repository in the cache, the revision that was pulled last."""
    newest: dict[str, Cached] = {}
    for item in cache.cached():
        newest.setdefault(item.record.repo, item)
    return [
        *(offer_in(folder, "own") for folder in _folders(env.own_weights_dir())),
        *(_cached_offer(item) for item in newest.values()),
        *(offer_in(folder, "wheel") for folder in _folders(shipped_folder())),
    ]


def consider(
    hardware: Hardware, offers: Iterable[Offer], software: Software | None = None
) -> list[Considered]:
    """Judge weights for a machine, the best first."""
    software = software or installed_software()
    found = []
    for offer in offers:
        if offer.config is None:
            verdict = Verdict(offer.name, False, "uncovered", (offer.problem,))
        else:
            verdict = judge(hardware, offer.config, software)
        found.append(Considered(offer, verdict))
    return sorted(found, key=lambda c: (c.verdict.preference, SOURCES.index(c.offer.source), c.offer.name))


def find_weights(hardware: Hardware, explicit: Path | str | None = None, *, pull: bool = False) -> Weights:
    """The weights to use on a machine.

    Nothing is asked of the hub, unless `pull` allows it: then what is pinned or asked for but not in the
    cache is pulled, and without either the best that is published if nothing here covers the machine.

    Weights for a higher instruction set level rank worse, but the search corrects them with what it measures:
    they are used where no others cover the hardware. So are any that are given. Both have a `Weights.notice`.

    Parameters
    ----------
    explicit : Path or str, optional
        A folder, a repository as ``ORG/NAME``, or ``ORG/NAME@REVISION``.

    Raises
    ------
    WeightsError
        If what is given is unusable, or there is nothing for the kind and architecture of the hardware.
    HubError
        If what is needed is not here and cannot be pulled.
    """
    if explicit is not None:
        weights = _explicit(explicit, pull)
        return _with_notice(weights, judge(hardware, weights.config, installed_software()))
    lock = read_lock(env.lock_file())
    offers = offers_here()
    if lock is not None and (pinned := _pinned(lock, hardware, pull)):
        # What a project pins for this machine stands in for all that is not the user's own.
        offers = [o for o in offers if o.source == "own"] + [_cached_offer(item) for item in pinned]
    considered = consider(hardware, offers)
    if pull and not (considered and considered[0].verdict.coverage != "uncovered"):
        considered = _with_pulled(hardware, considered)
    if considered and considered[0].verdict.accepted:
        best = considered[0]
        return _with_notice(load_offer(best.offer, best.verdict.described), best.verdict)
    raise WeightsError(uncovered(hardware, considered))


def uncovered(hardware: Hardware, considered: Iterable[Considered]) -> str:
    """The message where no weights can be used: what was looked at, and the two ways on."""
    table = "; ".join(f"{c.verdict.name}: {c.verdict.reasons[0]}" for c in considered)
    return (
        f"no weights for {hardware.microarch} ({hardware.isa_level or hardware.arch}): "
        f"{table or 'none are installed'}; give weights for it with --weights; or {ways_on(hardware)}"
    )


def parse_repo(text: str) -> tuple[str, str | None]:
    """Repository and revision of ``TARGET``, ``ORG/NAME`` and either with ``@REVISION``."""
    repo, _, revision = text.partition("@")
    return (repo if "/" in repo else f"{env.hub_org()}/{repo}"), revision or None


def _explicit(explicit: Path | str, pull: bool) -> Weights:
    """Weights that were asked for by folder or repository."""
    text = str(explicit)
    if (
        isinstance(explicit, Path)
        or Path(text).is_dir()
        or not re.fullmatch(r"\w[\w.-]*/[\w.-]+(@\S+)?", text)
    ):
        return load_weights(explicit)
    repo, revision = parse_repo(text)
    pins = (read_lock(env.lock_file()) or Lock()).targets.values()
    pin = next((pin for pin in pins if pin.repo == repo), None)
    if pin is not None and revision is None:
        item = _pinned_item(pin, pull)
    else:
        item = cache.find(repo, revision)
        if pull and not (item and revision and is_commit(revision)):
            item = _pull_or_keep(repo, revision or "main", item)
        if item is None:
            raise WeightsError(
                f"{text} is no folder here, and not in the cache as a repository; "
                f"run: pretune hub pull {text}, or add --pull"
            )
    return cache.load(item, f"{repo}@{item.record.revision[:12]}")


def _pull_or_keep(repo: str, revision: str, item: Cached | None) -> Cached:
    """Pull a revision; if that fails, what the cache has of it will do."""
    try:
        return pull_weights(Hub(), repo, revision)
    except HubError as error:
        if item is None:
            raise
        notice(f"{error}; going on with {item.record.revision[:12]} from the cache")
        return item


def _pinned(lock: Lock, hardware: Hardware, pull: bool) -> list[Cached]:
    """What a lock file pins for a machine."""
    return [
        _pinned_item(pin, pull)
        for name, pin in lock.targets.items()
        if judge_hardware(hardware, name, pin.covers, ()).coverage != "uncovered"
    ]


def _pinned_item(pin: Pin, pull: bool) -> Cached:
    """The pinned revision in the cache; pulled, if that is allowed and it is not there."""
    item = cache.find(pin.repo, pin.revision)
    if item is None and pull:
        return pull_weights(Hub(), pin.repo, pin.revision, manifest=pin.manifest)
    file = env.lock_file()
    if item is None:
        raise WeightsError(
            f"{file} pins {pin.repo}@{pin.revision[:12]}, which is not in the cache; run: pretune hub pull"
        )
    if item.record.manifest != pin.manifest:
        raise WeightsError(
            f"{item.path}: not what {file} pins, its manifest is another; "
            f"run: pretune hub rm {pin.repo}, then pretune hub pull"
        )
    return item


def _with_pulled(hardware: Hardware, considered: list[Considered]) -> list[Considered]:
    """Weights here and, if it covers the machine better than they do, the best that is published, pulled."""
    hub = Hub()
    try:
        best = next(iter(consider(hardware, published(hub))), None)
        if best is None or best.verdict.coverage == "uncovered":
            return considered
        item = pull_weights(hub, best.offer.repo, best.offer.revision)
    except HubError as error:
        if not (considered and considered[0].verdict.accepted):
            raise
        notice(f"{error}; going on with {considered[0].offer.name}")
        return considered
    return consider(hardware, [*(c.offer for c in considered), _cached_offer(item)])


def published(hub: Hub) -> list[Offer]:
    """What `env.hub_org` publishes: two requests, and five for each of its targets.

    Raises
    ------
    HubError
        If the hub fails.
    """
    org, api = env.hub_org(), hub.api
    what = f"the weights of {org}"
    hub.reach(what)
    models = hub.ask(what, lambda: list(api.list_models(author=org, filter="pretune")))
    offers = []
    for model in models:
        commit = hub.commit_of(model.id, "main")
        with described(hub, model.id, commit) as folder:
            offers.append(offer_in(folder, "hub", repo=model.id, revision=commit))
    return offers


@contextlib.contextmanager
def described(hub: Hub, repo: str, commit: str) -> Iterator[Path]:
    """A folder with the configuration and the manifest of a repository, in so far as it holds them."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / repo.rpartition("/")[2]
        folder.mkdir()
        try:
            for name in ("config.json", "manifest.json"):
                hub.download(repo, commit, name, folder)
        except HubError as error:
            # One broken repository does not hide the others; a hub that fails altogether does.
            if not is_named(error.__cause__, "RemoteEntryNotFoundError"):
                raise
        yield folder


def load_offer(offer: Offer, why: str) -> Weights:
    """Load weights that are on this machine; see `pretune.model.weights.load_weights`."""
    item = cache.find(offer.repo, offer.revision) if offer.source == "cache" else None
    return cache.load(item, why) if item else load_weights(offer.path, why)


def _cached_offer(item: Cached) -> Offer:
    return offer_in(item.path, "cache", item.record.repo, item.record.revision)


def _folders(folder: Path | None) -> list[Path]:
    """Weights folders below a folder."""
    if folder is None or not folder.is_dir():
        return []
    return sorted(path.parent for path in folder.glob("*/config.json"))


def _with_notice(weights: Weights, verdict: Verdict) -> Weights:
    if verdict.coverage != "uncovered":
        return weights
    return replace(
        weights,
        notice=f"weights {verdict.name} do not cover this target ({verdict.reasons[0]}), so they rank worse "
        "here; what is measured corrects them",
    )
