"""Where weights come from, in which order, and what that costs."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import huggingface_hub.constants
import msgspec
import pytest
from spoil import REPO, edit
from test_coverage import machine

from pretune import env
from pretune.errors import HubError, OptionError, WeightsError
from pretune.hub import cache
from pretune.hub.lock import Lock, pin_of, read_lock, write_lock
from pretune.hub.pull import pull_weights
from pretune.hub.sources import find_weights, offers_here, parse_repo, published
from pretune.model.weights import load_weights

ZEN4 = machine("Zen 4")


@pytest.fixture
def endpoint(server, monkeypatch) -> str:
    """The server as the hub that is used where none is named."""
    addresses = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", addresses)
    return server.url


def pin(item) -> None:
    write_lock(env.lock_file(), Lock(targets=dict([pin_of(item)])))


def test_names_of_repositories(monkeypatch):
    assert parse_repo("cpu-x86-64-v4") == ("pretune/cpu-x86-64-v4", None)
    assert parse_repo("me/mine@v2") == ("me/mine", "v2")
    monkeypatch.setenv("PRETUNE_HUB_ORG", "ours")
    assert parse_repo("cpu-x86-64-v4@abc") == ("ours/cpu-x86-64-v4", "abc")


def test_the_order(server, hub, folder, weights, wheel):
    """The wheel; before it what was pulled, and before that the user's own; what is asked for comes first."""
    assert find_weights(ZEN4).path == wheel / weights.name
    server.publish(REPO, weights)
    item = pull_weights(hub, REPO)
    server.requests.clear()
    assert find_weights(ZEN4).path == item.path
    own = env.own_weights_dir() / "mine"
    shutil.copytree(folder, own)
    assert find_weights(ZEN4).path == own
    assert find_weights(ZEN4, folder).path == folder
    assert find_weights(ZEN4, REPO).path == item.path
    assert find_weights(ZEN4, f"{REPO}@{item.record.revision}").path == item.path
    assert find_weights(ZEN4, f"{REPO}@main").why == f"{REPO}@{item.record.revision[:12]}"
    assert server.requests == []
    # What covers the machine better comes first, wherever it lies.
    edit(own, measured_on=[])
    assert find_weights(ZEN4).path == item.path


def test_nothing_is_downloaded_unless_that_is_allowed(server, endpoint, weights):
    server.publish(REPO, weights)
    with pytest.raises(
        WeightsError, match=rf"{REPO} is no folder here.* pretune hub pull {REPO}, or add --pull"
    ):
        find_weights(ZEN4, REPO)
    with pytest.raises(WeightsError, match="v7 is no folder here"):
        find_weights(ZEN4, f"{REPO}@v7")
    find_weights(ZEN4)
    assert server.requests == []
    found = find_weights(ZEN4, REPO, pull=True)
    assert found.path == cache.find(REPO).path
    server.requests.clear()
    find_weights(ZEN4, pull=True)  # what is here covers the machine
    assert server.requests == []


def test_the_hub_comes_last(server, endpoint, folder):
    """Where nothing here covers the machine, --pull takes what the hub has for it."""
    covers = {"kind": "cpu", "arch": "aarch64", "isa_level": "aarch64"}
    edit(folder, name="cpu-aarch64", covers=covers, measured_on=[])
    server.publish("pretune/cpu-aarch64", folder)
    m2 = machine("Apple M2")
    with pytest.raises(WeightsError, match="no weights for apple-m2"):
        find_weights(m2)
    assert server.requests == []
    assert find_weights(m2, pull=True).why == "compatible: same instruction set level aarch64"
    assert find_weights(m2).config.name == "cpu-aarch64"
    # Of those for a machine that nobody covers, the hub's are not pulled.
    with pytest.raises(WeightsError, match="no weights for sm_90"):
        find_weights(machine("H100"), pull=True)


def test_a_failed_pull_never_loses_what_works(server, endpoint, hub, weights, capsys):
    server.publish(REPO, weights)
    item = pull_weights(hub, REPO)
    server.stop()
    assert find_weights(ZEN4, REPO, pull=True).path == item.path
    assert "cannot reach" in capsys.readouterr().err
    # A machine that is not covered goes on with what there is, too.
    assert find_weights(machine("Zen 2"), pull=True).notice
    assert "going on with cpu-x86-64-v4" in capsys.readouterr().err
    with pytest.raises(HubError, match="cannot reach"):
        find_weights(ZEN4, "pretune/other", pull=True)


def test_a_pinned_load_asks_nothing_and_is_quick(server, hub, weights):
    server.publish(REPO, weights)
    item = pull_weights(hub, REPO)
    pin(item)
    server.requests.clear()
    find_weights(ZEN4)
    taken = []
    for _ in range(5):
        start = time.thread_time()
        assert find_weights(ZEN4).path == item.path
        taken.append(time.thread_time() - start)
    assert min(taken) < 0.05 and server.requests == []


def test_the_lock_file_decides_which_revision(server, endpoint, hub, weights, folder):
    server.publish(REPO, weights)
    old = pull_weights(hub, REPO)
    pin(old)
    edit(folder, sizes={"latent": 96})
    server.publish(REPO, folder)
    new = pull_weights(hub, REPO)
    assert find_weights(ZEN4).path == old.path
    assert find_weights(ZEN4, REPO).path == old.path
    assert find_weights(ZEN4, f"{REPO}@{new.record.revision}").path == new.path
    # Elsewhere, where the pinned revision is missing, neither the wheel nor a newer one stands in for it.
    cache.remove(old)
    with pytest.raises(WeightsError, match=r"pretune\.lock pins .* not in the cache; run: pretune hub pull"):
        find_weights(ZEN4)
    server.requests.clear()
    assert find_weights(ZEN4, pull=True).path == old.path
    assert not any(path.startswith("/api/") for _method, path in server.requests)
    # Pins for other machines are not needed here.
    cache.remove(cache.find(REPO, old.record.revision))
    assert find_weights(machine("Zen 2")).config.name == "cpu-x86-64-v4"


def test_a_manifest_that_is_not_the_pinned_one(server, endpoint, hub, weights):
    server.publish(REPO, weights)
    item = pull_weights(hub, REPO)
    name, pinned = pin_of(item)
    write_lock(env.lock_file(), Lock(targets={name: msgspec.structs.replace(pinned, manifest="0" * 64)}))
    with pytest.raises(WeightsError, match=r"not what pretune\.lock pins"):
        find_weights(ZEN4)
    cache.remove(item)
    with pytest.raises(HubError, match="its manifest is not the one that the lock file pins"):
        find_weights(ZEN4, pull=True)


def test_a_lock_file_that_cannot_be_read(monkeypatch, tmp_path):
    assert read_lock(env.lock_file()) is None
    env.lock_file().write_text("{")
    with pytest.raises(OptionError, match=r"pretune\.lock: cannot be read"):
        find_weights(ZEN4)
    monkeypatch.setenv("PRETUNE_LOCK", str(tmp_path / "other.lock"))
    (tmp_path / "other.lock").write_text(json.dumps({"version": 9}))
    with pytest.raises(OptionError, match=r"other\.lock: lock format 9.*pip install -U pretune"):
        find_weights(ZEN4)


def test_what_is_published(server, hub, weights, folder, tmp_path):
    server.publish(REPO, weights)
    edit(folder, format_version=2)
    server.publish("pretune/new", folder)
    other = tmp_path / "other"
    other.mkdir()
    (other / "README.md").write_text("---\nlibrary_name: pretune\n---\n")
    server.publish("pretune/empty", other)
    server.publish("somebody/cpu-x86-64-v4", weights)
    found = {offer.repo: offer for offer in published(hub)}
    assert set(found) == {REPO, "pretune/new", "pretune/empty"}
    assert found[REPO].config.name == "cpu-x86-64-v4" and found[REPO].size > 1e6
    assert "weights format 2" in found["pretune/new"].problem
    assert "config.json: missing" in found["pretune/empty"].problem


def test_a_record_that_cannot_be_read_counts_as_not_pulled(server, hub, weights):
    commit = server.publish(REPO, weights)
    item = pull_weights(hub, REPO)
    Path(f"{item.path}.json").write_text("{")
    assert [offer.source for offer in offers_here()] == ["wheel"]
    server.requests.clear()
    assert pull_weights(hub, REPO, commit).path == item.path  # the folder is whole: only the record is new
    assert {path for _method, path in server.requests} <= {"/"}  # at most whether the hub answers
    load_weights(item.path)


def test_what_a_killed_pull_left_is_checked(server, hub, weights):
    commit = server.publish(REPO, weights)
    item = pull_weights(hub, REPO)
    Path(f"{item.path}.json").unlink()
    (item.path / "onnx" / "ranker.onnx").write_bytes(b"")
    with pytest.raises(HubError, match=r"0 bytes, the manifest says.*removed from the cache, pull it again"):
        pull_weights(hub, REPO, commit)
    assert cache.check(pull_weights(hub, REPO, commit)) == []
