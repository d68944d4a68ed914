"""``pretune hub`` and ``pretune tune`` with weights from a hub, as they are run."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import huggingface_hub.constants
import msgspec
import numpy as np
import pytest
import tvm
from click.testing import CliRunner
from hub_server import Fault
from spoil import REPO, edit, flip
from test_coverage import DATA, config, machine

from pretune.cli import main
from pretune.features.schema import SUMMARY
from pretune.hardware.hardware import VECTOR_SIZE
from pretune.hub import cache
from pretune.model import WorldModel, load_weights
from programs import matmul


def run(*arguments: str, endpoint: str | None = None, status: int = 0):
    """A command in this process, with its output as JSON where that is asked for."""
    command = ["hub", *arguments, *(["--endpoint", endpoint] if endpoint else [])]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == status, result.stderr
    return (json.loads(result.stdout) if "--json" in arguments else result.stdout), result.stderr


def describe(name: str) -> str:
    """File that describes a machine, as ``pretune doctor --json`` does."""
    file = Path(f"{name}.json")
    file.write_bytes(msgspec.json.encode(machine(name)))
    return str(file)


@pytest.fixture
def published(server, weights) -> str:
    return server.publish(REPO, weights)


def test_explain(server, tmp_path):
    """Every described machine: the level and the reasons of each published target, and what to do."""
    for target in DATA["targets"]:
        folder = tmp_path / "published" / target["name"]
        folder.mkdir(parents=True)
        (folder / "config.json").write_bytes(msgspec.json.encode(config(**target)))
        (folder / "manifest.json").write_text('{"files": {}}')
        (folder / "README.md").write_text("---\nlibrary_name: pretune\n---\n")
        server.publish(f"pretune/{target['name']}", folder)
    for described in DATA["machines"]:
        command = ("explain", "--hardware", describe(described["name"]))
        found, said = run(*command, "--json", endpoint=server.url)
        rows = {row["name"]: row for row in found["targets"] if row["source"] == "hub"}
        assert said == "" and rows.keys() == {target["name"] for target in DATA["targets"]}
        for target, expected in described["expect"].items():
            assert {key: rows[target][key] for key in expected} == expected, described["name"]
        assert (found["best"] or {}).get("name") == described["best"]
        if described["name"] in ("Zen 4", "H100"):
            shown, _ = run(*command, endpoint=server.url)
            if described["best"] is None:
                assert "pretune finetune" in shown and "ms.tune_relax" in shown and "rejected" in shown
            else:
                assert f"best: {described['best']}" in shown


def test_ls_shows_what_is_here_when_the_hub_is_not(server, published):
    found, _ = run("ls", "--hardware", describe("Zen 4"), "--json", endpoint=server.url)
    assert [(row["source"], row["coverage"]) for row in found["targets"]] == [
        ("wheel", "measured"),
        ("hub", "measured"),
    ]
    assert found["targets"][1]["revision"] == published and found["targets"][1]["quality"]["top1"] > 0
    server.stop()
    shown, said = run("ls", "--hardware", describe("Zen 4"), endpoint=server.url)
    assert "cpu-x86-64-v4" in shown and "measured" in shown
    assert said.startswith("notice: the weights of pretune: cannot reach") and said.count("\n") == 1


def test_info(server, published, weights):
    server.git(REPO, "update-ref", "refs/tags/v1", published)
    found, _ = run("info", f"{REPO}@v1", "--json", endpoint=server.url)
    assert found["revision"] == published and found["versions"] == {"v1": published}
    assert found["config"]["covers"]["isa_level"] == "x86-64-v4" and found["path"] is None
    server.requests.clear()
    shown, _ = run("info", str(weights))
    assert "x86-64-v4" in shown and "znver4" in shown and server.requests == []
    _, said = run("info", "absent", endpoint=server.url, status=8)
    assert said.startswith("error: pretune/absent@main: ") and "no such repository" in said


def test_pull_lock_rm_and_pull_what_is_locked(server, published, folder):
    found, _ = run("pull", REPO, "--json", endpoint=server.url)
    assert found["pulled"] == [{"repo": REPO, "revision": published, "path": str(cache.find(REPO).path)}]
    found, _ = run("lock", "--json")
    pin = found["targets"]["cpu-x86-64-v4"]
    assert (pin["repo"], pin["revision"]) == (REPO, published) and len(pin["manifest"]) == 64
    assert json.loads(Path("pretune.lock").read_text())["targets"]["cpu-x86-64-v4"] == pin
    edit(folder, sizes={"latent": 96})
    server.publish(REPO, folder)
    found, _ = run("rm", REPO, "--json")
    assert len(found["removed"]) == 1 and found["removed"][0]["bytes"] > 1e6 and cache.cached() == []
    found, _ = run("pull", "--json", endpoint=server.url)
    assert found["pulled"][0]["revision"] == published
    # A target that is named moves on to what is pulled for it.
    run("rm", REPO)
    found, _ = run("lock", REPO, "--json", endpoint=server.url)
    assert found["targets"]["cpu-x86-64-v4"]["revision"] == server.resolve(REPO, "main") != published


def test_what_is_asked_for_wrongly(server):
    assert "error: pretune/none: not in the cache" in run("rm", "none", status=2)[1]
    assert "nothing to pin" in run("lock", status=2)[1]
    assert (
        "names a revision, and so does --revision"
        in run("pull", f"{REPO}@v1", "--revision", "v2", status=2)[1]
    )
    assert "describes no machine" in run("explain", "--hardware", "absent.json", status=2)[1]
    assert "no folder, and not in the cache" in run("verify", "absent", status=2)[1]


def test_names_from_the_hub_steer_no_terminal(server, folder):
    edit(folder, name="[/red]\x1b[31m\nx", measured_on=[])
    server.publish(REPO, folder)
    zen4 = describe("Zen 4")
    for command in (
        ("pull", REPO),
        ("ls", "--hardware", zen4),
        ("explain", "--hardware", zen4),
        ("info", REPO),
    ):
        shown, _ = run(*command, endpoint=server.url)
        assert "\x1b" not in shown
    assert "[/red]" in shown
    assert "[/red]" in run("lock")[0]


def test_a_name_is_no_pattern(server, published):
    run("pull", REPO, endpoint=server.url)
    assert "not in the cache" in run("rm", "*", status=2)[1]
    assert cache.find(REPO)


def test_a_lock_file_edited_to_nonsense_can_be_written_anew(server, published):
    run("pull", REPO, endpoint=server.url)
    file = Path("pretune.lock")
    for text in ("{", "[]", '{"version": 1, "targets": {"x": 1}}', '{"version": "1"}', "\0"):
        file.write_text(text)
        for command in (("lock",), ("pull",)):
            _, said = run(*command, endpoint=server.url, status=2)
            assert "pretune.lock: cannot be read" in said and "delete it and run: pretune hub lock" in said
        assert file.read_text() == text
    file.unlink()
    said = run("lock", "--file", "absent/x.lock", status=5)[1]
    assert said.startswith("error: cannot write absent/x.lock: No such file") and "--file" in said
    run("lock")
    assert run("pull", "--json", endpoint=server.url)[0]["pulled"][0]["revision"] == published


def test_verify(server, published, folder):
    shown, _ = run("verify", str(folder))
    assert "all files are as they should be" in shown
    flip(folder / "onnx" / "encoder.onnx")
    (folder / "two\nlines.json").write_text("{}")
    assert len(run("verify", str(folder), status=3)[1].splitlines()) == 2
    (folder / "two\nlines.json").unlink()
    (folder / "model.safetensors").unlink()
    _, said = run("verify", str(folder), status=3)
    lines = said.splitlines()
    assert (
        lines[0].startswith(f"error: {folder}/model.safetensors: missing") and "encoder.onnx: damaged" in said
    )
    assert len(lines) == 2 and all("not pulled from a hub" in line for line in lines)

    run("pull", REPO, endpoint=server.url)
    item = cache.find(REPO)
    flip(item.path / "onnx" / "encoder.onnx")
    found, said = run("verify", "--json", status=3)
    bad = [row for row in found["checked"] if row["bad"]]
    assert [row["path"] for row in bad] == [str(item.path)]
    assert f"run: pretune hub verify --repair {item.path}" in said
    found, _ = run("verify", "--repair", str(item.path), "--json")  # the hub that it came from
    assert found["checked"][0]["repaired"] == ["onnx/encoder.onnx"]
    run("verify")


def pretune(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", "from pretune.cli import main; main()", *arguments]
    variables = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=variables)


def test_the_environment_is_honoured(server, published):
    """A new process, since the client reads these when it is imported."""
    ended = pretune("hub", "pull", REPO, "--json", HF_ENDPOINT=server.url, HF_HUB_OFFLINE="1")
    assert ended.returncode == 8 and ended.stdout == ""
    assert ended.stderr == (
        f"error: {REPO}@main: HF_HUB_OFFLINE forbids asking the hub; "
        "unset it, or use what is here: pretune hub ls\n"
    )
    server.private.add(REPO)
    ended = pretune("hub", "pull", REPO, "--json", HF_ENDPOINT=server.url, HF_TOKEN="reader")
    assert ended.returncode == 0 and ended.stderr == ""
    assert json.loads(ended.stdout)["pulled"][0]["revision"] == published


def test_from_training_to_tuning_on_another_machine(server, folder):
    """What is pushed here, and pulled there into an empty cache, ranks bit for bit alike."""
    run("push", str(folder), "--repo", REPO, "--token", "writer", "--json", endpoint=server.url)
    Path("task.json").write_text(tvm.ir.save_json(matmul()))
    target = "llvm -mcpu=x86-64-v4 -num-cores 2"
    tune = ("tune", "task.json", "--trials", "0", "--target", target, "-q", "--json")
    here = CliRunner().invoke(main, [*tune, "--weights", str(folder), "--out", "here"])
    assert here.exit_code == 0, here.stderr
    server.requests.clear()
    there = pretune(*tune, "--weights", f"{REPO}@v1", "--pull", "--out", "there", HF_ENDPOINT=server.url)
    assert there.returncode == 0, there.stderr
    assert server.requests
    found = [json.loads(ended.stdout)["tasks"][0]["trace"] for ended in (here, there)]
    assert found[0] is not None and found[0] == found[1]

    mine, theirs = (WorldModel(load_weights(path), 1) for path in (folder, cache.find(REPO).path))
    rng = np.random.default_rng(0)
    latent = mine.weights.config.sizes["latent"]
    z, summary = (rng.random((50, n), dtype=np.float32) for n in (latent, len(SUMMARY)))
    hardware = rng.random(VECTOR_SIZE, dtype=np.float32)
    for a, b in zip(mine.rank(z, summary, hardware), theirs.rank(z, summary, hardware), strict=True):
        assert np.array_equal(a, b)


@pytest.fixture
def impatient(monkeypatch):
    """Gives up after a moment, and tries again at once."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    monkeypatch.setattr(time, "sleep", lambda _seconds: None)


@pytest.mark.parametrize("command", ["pull", "info", "explain", "ls", "push", "lock", "pull a commit"])
def test_a_hub_that_accepts_and_says_nothing(impatient, weights, command):
    arguments = {
        "pull a commit": ("pull", f"{REPO}@{'0' * 40}"),
        "push": ("push", str(weights), "--repo", REPO),
        "ls": ("ls", "--hardware", describe("Zen 4")),
        "explain": ("explain", "--hardware", describe("Zen 4")),
    }.get(command, (command, REPO))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        shown, said = run(*arguments, endpoint=url, status=0 if command in ("ls", "explain") else 8)
    assert f"{url} stopped answering" in said and said.count("\n") == 1
    assert ("cpu-x86-64-v4" in shown) == (command in ("ls", "explain"))  # what is here is listed


@pytest.mark.parametrize(
    "at", ["/api/models$", "/revision/", "/resolve/.*/config.json", "/resolve/.*/manifest"]
)
def test_ls_of_a_hub_that_stalls_later(server, published, impatient, at):
    for method in ("GET", "HEAD"):
        server.faults.append(Fault(method, at, times=99, stall=0))
    shown, said = run("ls", "--hardware", describe("Zen 4"), endpoint=server.url)
    assert "cpu-x86-64-v4" in shown
    assert f"{server.url} stopped answering" in said.splitlines()[-1]
