"""Pulls from a real server: what they cost, and that nothing is lost whatever goes wrong."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import huggingface_hub.constants
import pytest
from hub_server import Fault
from hub_server import Hub as Server
from spoil import REPO, edit, flip, rehash

from pretune.errors import HubError, OptionError, WeightsError
from pretune.hub import cache
from pretune.hub.client import Hub
from pretune.hub.pull import pull_weights, repair
from pretune.model.weights import ONNX_FILES, load_weights

ENCODER = f"{REPO}/resolve/.*/onnx/encoder.onnx"
BLOB = "/lfs/"


@pytest.fixture
def published(server, weights) -> str:
    """Commit of the shipped weights on the server."""
    return server.publish(REPO, weights)


def pulled(item: cache.Cached) -> None:
    assert cache.check(item) == []
    cache.load(item, "")


def test_a_cold_pull_costs_two_requests_a_file_and_a_warm_one_none(server, hub, published):
    item = pull_weights(hub, REPO)
    files = len(item.record.stamps)
    assert len(server.requests) <= 2 + 2 * files and item.record.refs == ("main",)
    pulled(item)
    assert not any(path.is_symlink() for path in item.path.rglob("*"))

    server.requests.clear()
    assert pull_weights(hub, REPO, published).path == item.path
    assert server.requests == []
    assert pull_weights(hub, REPO).path == item.path
    assert len(server.requests) == 1


def test_a_new_version_comes_beside_the_old_one(server, hub, published, folder):
    old = pull_weights(hub, REPO)
    edit(folder, quality={"top1": 0.9, "top5": 0.9, "spearman": 0.9})
    new = pull_weights(hub, REPO, server.publish(REPO, folder))
    assert [item.path for item in cache.cached(REPO)] == [new.path, old.path]
    pulled(old)
    pull_weights(hub, REPO, published)  # asked for again: it is the one that is used now
    assert cache.find(REPO).path == old.path


@pytest.mark.parametrize("status", [500, 503])
@pytest.mark.parametrize("path", ["/api/models/", "manifest.json", BLOB])
def test_a_failure_that_passes(server, hub, published, monkeypatch, status, path):
    monkeypatch.setattr(time, "sleep", lambda _seconds: None)
    fault = Fault("GET", path, status=status)
    server.faults.append(fault)
    pulled(pull_weights(hub, REPO))
    assert fault.reached.is_set()


@pytest.mark.parametrize("path", ["/api/models/", "manifest.json", BLOB])
def test_too_many_requests(server, hub, published, monkeypatch, path):
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    server.faults.append(Fault("GET", path, status=429, headers={"Retry-After": "3600"}))
    with pytest.raises(HubError, match=r"takes no more requests for now \(429\); run it again in 3600 s"):
        pull_weights(hub, REPO)
    assert slept == []  # the client by itself would wait for as long as it is told to
    server.faults.append(Fault("GET", path, status=429, headers={"Retry-After": "7"}))
    pulled(pull_weights(hub, REPO))
    assert slept == [7.0]


def test_a_body_cut_short_or_stalled_goes_on_where_it_ended(server, hub, published, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1)
    server.faults += [Fault("GET", BLOB, cut=1000), Fault("GET", BLOB, stall=2000, stall_s=3)]
    pulled(pull_weights(hub, REPO))
    assert all(not fault.times for fault in server.faults)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault("GET", "/api/", status=401), "has no such repository, or it is private"),
        (
            Fault("GET", "/api/", status=403, headers={"X-Error-Message": "not you"}),
            r"refuses \(not you",
        ),
        (Fault("GET", "/api/", status=404, headers={"X-Error-Code": "RepoNotFound"}), "no such repository"),
        (Fault("GET", "/api/", status=404, headers={"X-Error-Code": "RevisionNotFound"}), "no such revision"),
        (
            Fault("GET", "/api/", status=403, headers={"X-Error-Code": "GatedRepo"}),
            "access must be asked for",
        ),
        (
            Fault("HEAD", ENCODER, status=404, headers={"X-Error-Code": "EntryNotFound"}),
            "encoder.onnx: the rep",
        ),
    ],
)
def test_a_refusal_is_one_line_and_what_was_there_stays(server, hub, published, folder, fault, said):
    old = pull_weights(hub, REPO)
    edit(folder, sizes={"latent": 96})
    server.publish(REPO, folder)
    server.faults.append(fault)
    with pytest.raises(HubError, match=said) as caught:
        pull_weights(hub, REPO)
    assert "\n" not in str(caught.value) and REPO in str(caught.value)
    assert cache.find(REPO) == old
    pulled(old)


def test_a_server_that_is_down(hub, server, published):
    server.stop()
    with pytest.raises(HubError, match=rf"{REPO}@main: cannot reach http://127.*--endpoint"):
        pull_weights(hub, REPO)


def test_an_expired_token(server, published):
    server.tokens["old"] = "expired"
    with pytest.raises(HubError, match=r"not valid, or has expired.*hf auth login"):
        pull_weights(Hub(server.url, "old"), REPO)
    server.private.add(REPO)
    with pytest.raises(HubError, match="no such repository, or it is private"):
        pull_weights(Hub(server.url), REPO)
    pulled(pull_weights(Hub(server.url, "reader"), REPO))


@pytest.mark.parametrize("token", ["", "two words", "line\n", "schlüssel"])
def test_a_token_that_is_none_is_not_shown(server, token):
    with pytest.raises(OptionError, match="--token is none") as caught:
        Hub(server.url, token)
    assert not token or token not in str(caught.value)


def test_a_proxy_is_used(server, published, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", server.url)
    huggingface_hub.close_session()  # the client looks at proxies when it opens one
    try:
        pulled(pull_weights(Hub("http://hub.example"), REPO))
    finally:
        monkeypatch.delenv("HTTP_PROXY")
        huggingface_hub.close_session()


def test_a_repository_that_was_renamed(server, hub, published):
    server.renamed["pretune/old"] = REPO
    item = pull_weights(hub, "pretune/old")
    assert item.record.revision == published
    pulled(item)


@pytest.mark.parametrize("end", ["", "/"])
def test_an_endpoint_below_a_path(server, published, end):
    server.prefix = "/mirror/hub"
    pulled(pull_weights(Hub(server.url + end), REPO))


def test_a_tag_that_was_moved(server, hub, published, folder):
    server.git(REPO, "update-ref", "refs/tags/v1", published)
    pull_weights(hub, REPO, "v1")
    edit(folder, min_sdk_version="0.0.1")
    commit = server.publish(REPO, folder)
    server.git(REPO, "update-ref", "refs/tags/v1", commit)
    assert cache.find(REPO, "v1").record.revision == published
    assert pull_weights(hub, REPO, "v1").record.revision == commit
    assert cache.find(REPO, "v1").record.revision == commit


def test_a_proxy_that_refuses(server, monkeypatch):
    # Asked to connect to a host in TLS, the server answers as proxies do that forbid it.
    server.faults.append(Fault("CONNECT", "", status=403))
    monkeypatch.setenv("HTTPS_PROXY", server.url)
    huggingface_hub.close_session()  # the client looks at proxies when it opens one
    try:
        with pytest.raises(HubError, match=r"the proxy refuses .*check HTTPS_PROXY"):
            pull_weights(Hub("https://hub.example"), REPO)
    finally:
        monkeypatch.undo()
        huggingface_hub.close_session()


def test_a_wrong_hash_is_named_and_nothing_is_kept(server, hub, published):
    server.faults.append(Fault("GET", BLOB, change=lambda data: data[:-1] + bytes([data[-1] ^ 1])))
    with pytest.raises(HubError, match=rf"{REPO}@{published[:12]}: .*damaged.*pull it again"):
        pull_weights(hub, REPO)
    assert cache.cached() == [] and not list(cache.repo_folder(REPO).glob("*.part"))
    pulled(pull_weights(hub, REPO))


@pytest.mark.parametrize(
    "name",
    [
        "../outside.json",
        "/etc/x.json",
        "a/../b.json",
        "onnx\\x.onnx",
        "onnx/deep/x.onnx",
        ".cache/x.json",
        "-rf.json",
        "é.json",
        "two\nlines.json",
        "\x1b[31mred.json",
        "\0.json",
        f"{'long' * 99}.json",
        "model.pkl",
        "run.sh",
        "manifest.json",
        "",
    ],
)
def test_a_manifest_that_lists_what_it_must_not(server, hub, folder, name):
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = manifest["files"]["config.json"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    server.publish(REPO, folder)
    with pytest.raises(HubError, match=r"not a plain name|not among the kinds of files") as caught:
        pull_weights(hub, REPO)
    assert str(caught.value).isprintable()
    assert not any("resolve" in path and "manifest" not in path for _method, path in server.requests)


@pytest.mark.parametrize("name", ["manifest.json", "config.json"])
@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '"x"', "\xff", '{"files": {"config.json": {"size": "1"}}}', None]
)
def test_json_that_is_not_what_it_should_be(server, hub, folder, name, text):
    if text is None:  # deeper than a reader can follow
        text = json.dumps(json.loads((folder / name).read_text()) | {"provenance": {"a": 0}, "b": 0})
        text = text.replace('"a": 0', f'"a": {"[" * 10_000}{"]" * 10_000}')
    (folder / name).write_text(text, "latin-1")
    if name == "config.json":
        rehash(folder)
    server.publish(REPO, folder)
    with pytest.raises(HubError, match=rf"{REPO}@.*(cannot be read|weights format None|not in the manifest)"):
        pull_weights(hub, REPO)
    assert cache.cached() == []


def test_a_commit_that_is_no_commit(server, hub, published):
    change = lambda data: data.replace(published.encode(), b"../../../x")  # noqa: E731
    server.faults.append(Fault("GET", "/api/models/", change=change))
    with pytest.raises(HubError, match="names no commit"):
        pull_weights(hub, REPO)
    assert not cache.repo_folder(REPO).exists()


def test_a_repository_without_weights(server, hub, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "README.md").write_text("nothing")
    server.publish(REPO, tmp_path / "other")
    with pytest.raises(HubError, match=r"manifest.json: the repository lacks this file"):
        pull_weights(hub, REPO)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"min_sdk_version": "99.0"}, r"weights need pretune 99\.0 or newer.*pip install -U pretune"),
        ({"format_version": 99}, r"weights format 99.*pip install -U pretune"),
        ({"feature_schema": 0}, r"weights for feature schema 0, this pretune computes.*newer weights"),
    ],
)
def test_weights_newer_or_older_than_this_pretune(server, hub, published, folder, changes, said):
    old = pull_weights(hub, REPO)
    edit(folder, **changes)
    server.publish(REPO, folder)
    with pytest.raises(HubError, match=rf"^{REPO}@\w+: {said}"):
        pull_weights(hub, REPO)
    assert cache.find(REPO) == old
    pulled(old)


def test_offline(server, hub, published, monkeypatch):
    item = pull_weights(hub, REPO)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    server.requests.clear()
    assert pull_weights(hub, REPO, published).path == item.path
    with pytest.raises(HubError, match="HF_HUB_OFFLINE forbids"):
        pull_weights(hub, REPO, "main")
    shutil.rmtree(item.path)
    with pytest.raises(HubError, match="HF_HUB_OFFLINE forbids"):
        pull_weights(hub, REPO, published)
    assert server.requests == []


# -- the cache -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["onnx/ranker.onnx", "manifest.json", "config.json"])
def test_a_flipped_byte_is_named_and_only_that_file_replaced(server, hub, published, name):
    item = pull_weights(hub, REPO)
    flip(item.path / name)
    with pytest.raises(
        WeightsError, match=r"not the one that was pulled|pretune hub verify --repair|cannot be read"
    ):
        cache.load(item, "")
    assert [fault.name for fault in cache.check(item)] == [name]
    pull_weights(hub, REPO, published)  # it is there: nothing is looked at, nor said to be whole
    assert [fault.name for fault in cache.check(cache.find(REPO))] == [name]
    before = {path: path.stat().st_ino for path in item.path.rglob("*") if path.is_file()}
    server.requests.clear()
    assert repair(hub, item) == [name]
    assert {path.name for path, inode in before.items() if path.stat().st_ino != inode} == {
        name.split("/")[-1]
    }
    assert len(server.requests) <= 3
    pulled(cache.find(REPO))


def test_a_truncated_missing_and_foreign_file(hub, server, published):
    item = pull_weights(hub, REPO)
    encoder = item.path / ONNX_FILES[0]
    encoder.write_bytes(encoder.read_bytes()[:100])
    (item.path / "model.safetensors").unlink()
    (item.path / "model.pkl").write_bytes(b"")
    (item.path / "evaluation.png").unlink()
    (item.path / "evaluation.png").symlink_to(encoder)
    found = {fault.name: fault.problem for fault in cache.check(item)}
    assert found["onnx/encoder.onnx"].startswith("100 bytes, the manifest says")
    assert found["model.safetensors"] == "missing" and found["model.pkl"] == "not in the manifest"
    assert found["evaluation.png"].startswith("a link") and len(found) == 4
    assert sorted(repair(hub, item)) == sorted(found)
    pulled(cache.find(REPO))


def test_folders_and_pipes_in_the_place_of_files(hub, server, published):
    item = pull_weights(hub, REPO)
    for name in ("config.json", "onnx/ranker.onnx"):
        (item.path / name).unlink()
        (item.path / name).mkdir()
        (item.path / name / "x.json").write_text("{}")
    (item.path / "evaluation.png").unlink()
    os.mkfifo(item.path / "evaluation.png")
    (item.path / "two\nlines").write_text("")
    assert all(str(fault).isprintable() for fault in cache.check(item))
    repair(hub, item)
    pulled(cache.find(REPO))
    for make in (os.mkdir, os.mkfifo):
        (item.path / "manifest.json").unlink()
        make(item.path / "manifest.json")
        assert [fault.name for fault in cache.check(item)] == ["manifest.json"]
        repair(hub, item)
        pulled(cache.find(REPO))


def test_a_repair_while_the_hub_is_down_loses_nothing(hub, server, published):
    item = pull_weights(hub, REPO)
    flip(item.path / "onnx" / "ranker.onnx")
    before = {path: path.stat() for path in item.path.rglob("*")}
    server.stop()
    with pytest.raises(HubError, match=rf"{REPO}@{published[:12]}: cannot reach"):
        repair(hub, item)
    assert {path: path.stat() for path in item.path.rglob("*")} == before


def test_a_folder_that_is_a_link_is_refused(hub, server, published, tmp_path):
    item = pull_weights(hub, REPO)
    shutil.move(item.path / "onnx", tmp_path / "elsewhere")
    (item.path / "onnx").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(WeightsError, match="missing, or not a plain file"):
        cache.load(item, "")
    repair(hub, item)
    assert not (item.path / "onnx").is_symlink()
    pulled(cache.find(REPO))


def test_a_file_is_not_hashed_again_unless_its_time_or_size_changed(hub, server, published):
    item = pull_weights(hub, REPO)
    ranker = item.path / "onnx" / "ranker.onnx"
    stat = ranker.stat()
    flip(ranker)
    os.utime(ranker, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    cache.load(item, "")  # what a look at the stamp cannot see
    assert [fault.name for fault in cache.check(item)] == ["onnx/ranker.onnx"]
    with pytest.raises(WeightsError, match="damaged"):
        load_weights(item.path)


def in_namespace(script: str) -> subprocess.CompletedProcess:
    """Run a shell script as root of a namespace of its own, where it may mount."""
    if (
        not shutil.which("unshare")
        or subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode
    ):
        pytest.skip("this system lets nobody mount in a namespace of their own")
    return subprocess.run(
        ["unshare", "-rm", "sh", "-ec", script], capture_output=True, text=True, timeout=120
    )


PULL, RM = (
    f"{sys.executable} -c 'from pretune.cli import main; main()' hub {verb} {REPO}" for verb in ("pull", "rm")
)


def test_a_full_disk(server, published, tmp_path, monkeypatch):
    disk = tmp_path / "disk"
    disk.mkdir()
    ended = in_namespace(
        f"mount -t tmpfs -o size=700k tmpfs {disk}; export PRETUNE_CACHE={disk} HF_ENDPOINT={server.url}; "
        f"{PULL} && exit 1; ls -A {disk}/weights/*"
    )
    assert ended.returncode == 0, ended.stderr
    lines = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "the disk is full; free some space" in lines[0]
    assert ended.stdout.split() == [".lock"]


def test_a_read_only_cache(server, hub, published, tmp_path):
    item = pull_weights(hub, REPO)
    root = tmp_path / "cache"
    ended = in_namespace(
        f"mount --bind {root} {root}; mount -o remount,bind,ro {root}; export HF_ENDPOINT={server.url}; "
        f"{PULL}@{published} --json"
    )
    assert ended.returncode == 0, ended.stderr
    assert str(item.path) in ended.stdout
    ended = in_namespace(f"mount --bind {root} {root}; mount -o remount,bind,ro {root}; {RM}")
    assert ended.returncode == 5 and ended.stderr.startswith(f"error: cannot delete {item.path}: Read-only")
    pulled(item)
    new = f"PRETUNE_CACHE={root}/new"
    ended = in_namespace(
        f"mount --bind {root} {root}; mount -o remount,bind,ro {root}; "
        f"export HF_ENDPOINT={server.url} {new}; {PULL}"
    )
    assert ended.returncode == 8 and "set PRETUNE_CACHE to a folder that can be written" in ended.stderr


def test_a_cache_that_is_a_file(hub, published, tmp_path):
    (tmp_path / "cache").write_text("")
    with pytest.raises(HubError, match=r"cannot write .*; set PRETUNE_CACHE to a folder"):
        pull_weights(hub, REPO)


def test_two_processes_that_pull_at_once_download_once(server, published):
    server.faults.append(
        Fault("GET", "manifest.json", stall=10, stall_s=3)
    )  # the first is slow: both are at it
    code = (
        "from pretune.hub.client import Hub; from pretune.hub.pull import pull_weights; "
        f"print(pull_weights(Hub({server.url!r}), {REPO!r}).path)"
    )
    command = [sys.executable, "-c", code]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=120)[0].strip() for process in both]
    found = cache.find(REPO)
    assert said == [str(found.path)] * 2 and not any(process.returncode for process in both)
    pulled(found)
    assert len([r for r in server.requests if r[0] == "GET" and r[1].startswith(BLOB)]) == len(ONNX_FILES) + 1


def test_a_pull_that_is_killed_is_finished_by_the_next(server, hub, published, folder):
    old = pull_weights(hub, REPO)
    edit(folder, min_sdk_version="0.0.1")
    commit = server.publish(REPO, folder)
    fault = Fault("GET", f"{BLOB}.*", stall=1000, stall_s=20)
    server.faults.append(fault)
    code = f"from pretune.cli import main; main(['hub', 'pull', '{REPO}', '--endpoint', '{server.url}'])"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE)
    assert fault.reached.wait(60)
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert cache.find(REPO) == old
    pulled(old)
    new = pull_weights(hub, REPO)
    assert new.record.revision == commit
    pulled(new)
    assert not list(cache.repo_folder(REPO).glob("*.part"))


def test_with_xet(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", False)
    with Server(tmp_path / "xet", xet=True).running() as server:
        from pretune.hub.push import push

        pushed = push(Hub(server.url, "writer"), folder, REPO)
        assert not list((tmp_path / "xet" / "lfs").iterdir()) and len(server.xet_hashes()) == 6
        item = pull_weights(Hub(server.url), REPO, "v1")
        assert item.record.revision == pushed.revision
        pulled(item)
        assert not any(path.startswith(BLOB) for _method, path in server.requests)
        # A client without Xet gets the same files in the old way.
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        cache.remove(item)
        pulled(pull_weights(Hub(server.url), REPO, "v1"))
        assert any(path.startswith(BLOB) for _method, path in server.requests)
