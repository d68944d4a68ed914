"""``pretune hub``: published weights, seen from this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pretune import env
from pretune.errors import HubError, OptionError, WeightsError
from pretune.messages import notice
from pretune.output import print_result, to_stderr

if TYPE_CHECKING:
    from pretune.hardware import Hardware
    from pretune.hub.client import Hub
    from pretune.hub.sources import Considered

BAD = 3
"""Exit status of ``verify`` where a file is bad, that of `WeightsError`."""


@click.group("hub")
def hub() -> None:
    """Find, pull, verify, pin and publish weights."""


def _options(command: Callable[..., None]) -> Callable[..., None]:
    """What every command of the group takes."""
    for option in (
        click.option("--token", help="Access token. [default: HF_TOKEN, or that of: hf auth login]"),
        click.option("--endpoint", metavar="URL", help="The hub, or a mirror. [default: HF_ENDPOINT]"),
        click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout, and nothing else there."),
    ):
        command = option(command)
    return command


def _on_a_machine(command: Callable[..., None]) -> Callable[..., None]:
    """What commands take that look at a machine."""
    described = "Another machine: JSON, as 'hardware' in: pretune doctor --json."
    for option in (
        click.option("--hardware", "description", metavar="FILE", help=described),
        click.option("--target", default="native", show_default=True, help='Such as "llvm -mcpu=znver4".'),
    ):
        command = option(command)
    return command


@hub.command()
@_on_a_machine
@_options
def ls(target: str, description: str | None, as_json: bool, endpoint: str | None, token: str | None) -> None:
    """List weights here and on the hub, and how they cover this machine."""
    from pretune.hub import show

    found = _look(target, description, endpoint, token)
    print_result(found, as_json, lambda console: show.targets(found, console))


@hub.command()
@_on_a_machine
@_options
def explain(
    target: str, description: str | None, as_json: bool, endpoint: str | None, token: str | None
) -> None:
    """Say which weights a machine would use, and why not the others."""
    from pretune.hub import show

    found = _look(target, description, endpoint, token)
    print_result(found, as_json, lambda console: show.reasons(found, console))


@hub.command()
@click.argument("what", metavar="TARGET|ORG/NAME[@REVISION]|DIR")
@_options
def info(what: str, as_json: bool, endpoint: str | None, token: str | None) -> None:
    """Describe weights: what they cover, on what they were measured, their quality and versions."""
    from pretune.hub import show

    with to_stderr():
        found = _describe(what, endpoint, token)
    print_result(found, as_json, lambda console: show.info(found, console))


@hub.command()
@click.argument("what", metavar="[TARGET|ORG/NAME[@REVISION]]", required=False)
@click.option("--revision", help="Version: a tag, branch or commit. [default: main]")
@_options
def pull(
    what: str | None, revision: str | None, as_json: bool, endpoint: str | None, token: str | None
) -> None:
    """Download weights; without TARGET those of the lock file, or else the best for this machine."""
    from pretune.hub import show
    from pretune.hub.pull import pull_weights
    from pretune.hub.sources import parse_repo

    with to_stderr():
        client = _client(endpoint, token)
        if what is None:
            items = _pull_what_fits(client, revision)
        else:
            repo, given = parse_repo(what)
            if given and revision:
                raise OptionError(f"{what} names a revision, and so does --revision; leave one out")
            items = [pull_weights(client, repo, given or revision or "main")]
    pulled = [
        {"repo": item.record.repo, "revision": item.record.revision, "path": str(item.path)} for item in items
    ]
    print_result({"pulled": pulled}, as_json, lambda console: show.paths(pulled, console))


@hub.command()
@click.argument("what", metavar="[TARGET|ORG/NAME|DIR]...", nargs=-1)
@click.option("--repair", is_flag=True, help="Replace bad files, and only these.")
@_options
@click.pass_context
def verify(
    ctx: click.Context,
    what: Sequence[str],
    repair: bool,
    as_json: bool,
    endpoint: str | None,
    token: str | None,
) -> None:
    """Compare every file with its manifest; without arguments, of all weights on this machine."""
    from pretune.hub import show
    from pretune.hub.integrity import Fault

    with to_stderr():
        found = {"checked": [_verify(*item, repair, endpoint, token) for item in _to_verify(what)]}
    print_result(found, as_json, lambda console: show.checked(found["checked"], console))
    for checked in found["checked"]:
        for fault in checked["bad"]:
            bad = Fault(fault["file"], fault["problem"])
            click.echo(f"error: {checked['path']}/{bad}; {checked['remedy']}", err=True)
    if any(checked["bad"] for checked in found["checked"]):
        ctx.exit(BAD)


@hub.command()
@click.argument("what", metavar="[TARGET|ORG/NAME[@REVISION]]...", nargs=-1)
@click.option("--file", metavar="FILE", help="[default: PRETUNE_LOCK, or pretune.lock]")
@_options
def lock(
    what: Sequence[str], file: str | None, as_json: bool, endpoint: str | None, token: str | None
) -> None:
    """Pin weights to the revisions in the cache, in a file to commit; what is not there is pulled."""
    import msgspec

    from pretune.hub import cache, show
    from pretune.hub.lock import Lock, pin_of, read_lock, write_lock
    from pretune.hub.pull import pull_weights
    from pretune.hub.sources import parse_repo

    path = Path(file) if file else env.lock_file()
    with to_stderr():
        if what:
            items = []
            for repo, revision in map(parse_repo, what):
                item = cache.find(repo, revision)
                items.append(item or pull_weights(_client(endpoint, token), repo, revision or "main"))
        else:
            items = list({item.record.repo: item for item in reversed(cache.cached())}.values())
        if not items:
            raise OptionError("nothing to pin: the cache is empty; run: pretune hub pull, or name a TARGET")
        before = read_lock(path) or Lock()
        written = Lock(targets={**before.targets, **dict(map(pin_of, items))})
        write_lock(path, written)
    found = {"file": str(path), **msgspec.to_builtins(written)}
    print_result(found, as_json, lambda console: show.pins(found, console))


@hub.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--repo", required=True, metavar="ORG/NAME", help="Where to; made if it does not exist.")
@click.option("--tag", help="Name of the version. [default: the next of v1, v2 ...]")
@click.option("--allow-regression", is_flag=True, help="Even if figures are worse than before.")
@_options
def push(
    folder: Path,
    repo: str,
    tag: str | None,
    allow_regression: bool,
    as_json: bool,
    endpoint: str | None,
    token: str | None,
) -> None:
    """Publish the weights in DIR, once all of it is checked: one commit, and a tag."""
    from pretune.hub.push import push as push_weights

    with to_stderr():
        pushed = push_weights(
            _client(endpoint, token), folder, repo, tag=tag, allow_regression=allow_regression
        )
    found = {"repo": pushed.repo, "revision": pushed.revision, "tag": pushed.tag, "changed": pushed.changed}
    done = "pushed" if pushed.changed else "nothing has changed"
    print_result(found, as_json, lambda c: c.print(f"{done}: {repo}@{pushed.tag} ({pushed.revision})"))


@hub.command()
@click.argument("what", metavar="TARGET|ORG/NAME[@REVISION]", nargs=-1, required=True)
@_options
def rm(what: Sequence[str], as_json: bool, endpoint: str | None, token: str | None) -> None:
    """Delete weights from the cache: one revision, or all."""
    from pretune.hub import cache, show
    from pretune.hub.sources import parse_repo

    removed = []
    for repo, revision in map(parse_repo, what):
        if revision is None:
            items = cache.cached(repo)
        else:
            items = [item] if (item := cache.find(repo, revision)) else []
        if not items:
            raise OptionError(f"{repo}: not in the cache; see: pretune hub ls")
        for item in items:
            row = {"repo": repo, "revision": item.record.revision, "path": str(item.path)}
            removed.append({**row, "bytes": cache.remove(item)})
    print_result({"removed": removed}, as_json, lambda console: show.paths(removed, console))


# -- work ----------------------------------------------------------------------------------------------------


def _client(endpoint: str | None, token: str | None) -> Hub:
    from pretune.hub.client import Hub

    return Hub(endpoint, token)


def _hardware(target: str, description: str | None) -> Hardware:
    """The machine that is asked about."""
    import msgspec

    from pretune.hardware import Hardware, detect, hardware_for_target, make_target

    if description is None:
        machine = detect()
        return hardware_for_target(make_target(target, machine), machine)
    try:
        return msgspec.json.decode(Path(description).read_bytes(), type=Hardware)
    except (OSError, msgspec.MsgspecError) as error:
        raise OptionError(
            f"--hardware {description}: describes no machine ({error}); for an example, "
            "see 'hardware' in: pretune doctor --json"
        ) from None


def _look(target: str, description: str | None, endpoint: str | None, token: str | None) -> dict[str, Any]:
    """All weights, here and on the hub, and what they are worth on a machine."""
    from pretune.hub import sources
    from pretune.hub.coverage import ways_on

    with to_stderr():
        hardware = _hardware(target, description)
        client = _client(endpoint, token)
        offers = sources.offers_here()
        error = ""
        try:
            here = {offer.revision for offer in offers if offer.revision}
            offers += [offer for offer in sources.published(client) if offer.revision not in here]
        except HubError as failure:
            error = str(failure)
            notice(f"{error}; only what is on this machine is listed")
        considered = sources.consider(hardware, offers)
    best = considered[0] if considered and considered[0].verdict.coverage != "uncovered" else None
    advice = "" if best else f"no weights cover {hardware.microarch}; {ways_on(hardware)}"
    if not best and considered and considered[0].verdict.accepted:
        advice += f"; until then pretune tune uses {considered[0].offer.name}, which rank worse here"
    return {
        "hardware": {name: getattr(hardware, name) for name in ("model_name", "microarch", "isa_level")},
        "hub": {"endpoint": client.endpoint, "error": error},
        "targets": [_row(item) for item in considered],
        "best": _row(best) if best else None,
        "advice": advice,
    }


def _row(item: Considered) -> dict[str, Any]:
    offer, verdict = item.offer, item.verdict
    return {
        "name": offer.name,
        "source": offer.source,
        "repo": offer.repo,
        "revision": offer.revision,
        "accepted": verdict.accepted,
        "coverage": verdict.coverage,
        "reasons": list(verdict.reasons),
        "bytes": offer.size,
        "quality": dict(offer.config.quality) if offer.config else {},
    }


def _describe(what: str, endpoint: str | None, token: str | None) -> dict[str, Any]:
    """What `info` says: from this machine if the weights are here, else from the hub."""
    from pretune.hub import cache, sources

    if Path(what).is_dir():
        return _about(Path(what))
    repo, revision = sources.parse_repo(what)
    if item := cache.find(repo, revision):
        return _about(item.path, item.record.repo, item.record.revision)
    for offer in sources.offers_here():
        if (offer.source, offer.name) == ("wheel", what):
            return _about(offer.path)
    client = _client(endpoint, token)
    commit = client.commit_of(repo, revision or "main")
    refs = client.ask(repo, client.api.list_repo_refs, repo)
    versions = {ref.name: ref.target_commit for ref in refs.tags}
    with sources.described(client, repo, commit) as folder:
        return {**_about(folder, repo, commit), "versions": versions, "path": None}


def _about(folder: Path, repo: str = "", revision: str = "") -> dict[str, Any]:
    """What a weights folder says of itself."""
    import msgspec

    from pretune.hub.integrity import Fault, read_manifest
    from pretune.hub.sources import offer_in

    offer = offer_in(folder, "cache" if repo else "own")
    manifest = read_manifest(folder / "manifest.json")
    if offer.config is None:
        raise WeightsError(offer.problem)
    if isinstance(manifest, Fault):
        raise WeightsError(f"{folder.name}/{manifest}; see: pretune hub verify")
    return {
        "name": offer.name,
        "repo": repo,
        "revision": revision,
        "versions": {},
        "path": str(folder),
        "bytes": offer.size,
        "config": msgspec.to_builtins(offer.config),
        "files": msgspec.to_builtins(manifest.files),
        "provenance": manifest.provenance,
    }


def _pull_what_fits(client: Hub, revision: str | None) -> list[Any]:
    """Pull what the lock file pins, or the best that is published for this machine."""
    from pretune.hub import sources
    from pretune.hub.lock import read_lock
    from pretune.hub.pull import pull_weights

    lock = read_lock(env.lock_file())
    if lock is not None:
        if revision is not None:
            raise OptionError(f"--revision needs a TARGET: {env.lock_file()} says what is pulled without one")
        pins = lock.targets.values()
        return [pull_weights(client, pin.repo, pin.revision, manifest=pin.manifest) for pin in pins]
    hardware = _hardware("native", None)
    considered = sources.consider(hardware, sources.published(client))
    if not considered or considered[0].verdict.coverage == "uncovered":
        raise WeightsError(sources.uncovered(hardware, considered))
    return [pull_weights(client, considered[0].offer.repo, revision or "main")]


def _to_verify(what: Sequence[str]) -> list[tuple[Path, Any]]:
    """Folders to check, each with its entry in the cache if it is there."""
    from pretune.hub import cache, sources

    items = {item.path.resolve(): item for item in cache.cached()}
    if not what:
        folders = [offer.path for offer in sources.offers_here() if offer.source != "cache"]
        return [*((item.path, item) for item in items.values()), *((folder, None) for folder in folders)]
    found = []
    for text in what:
        if Path(text).is_dir():
            found.append((Path(text), items.get(Path(text).resolve())))
            continue
        repo, revision = sources.parse_repo(text)
        item = cache.find(repo, revision)
        if item is None:
            raise OptionError(f"{text}: no folder, and not in the cache; see: pretune hub ls")
        found.append((item.path, item))
    return found


def _verify(path: Path, item: Any, repair: bool, endpoint: str | None, token: str | None) -> dict[str, Any]:
    from pretune.hub import cache
    from pretune.hub.integrity import check_folder
    from pretune.hub.pull import repair as repair_files
    from pretune.model.weights import shipped_folder

    faults = check_folder(path) if item is None else cache.check(item)
    repaired: list[str] = []
    if item is not None:
        remedy = f"run: pretune hub verify --repair {path}"
        if faults and repair:
            repaired = repair_files(_client(endpoint or item.record.endpoint, token), item)
            faults = []
    elif (shipped := shipped_folder()) and path.resolve().is_relative_to(shipped):
        remedy = "run: pip install --force-reinstall --no-deps pretune"
    else:
        remedy = "it was not pulled from a hub: restore it from where it came"
    return {
        "path": str(path),
        "bad": [{"file": fault.name, "problem": fault.problem} for fault in faults],
        "repaired": repaired,
        "remedy": remedy if faults else "",
    }
