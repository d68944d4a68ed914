"""Publishing: what is not fit to be published is refused before anything is sent."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import onnx
import pytest
from hub_server import Fault
from spoil import REPO, edit, rehash

from pretune.errors import HubError, OptionError, WeightsError
from pretune.hub import cache
from pretune.hub.client import Hub
from pretune.hub.pull import pull_weights
from pretune.hub.push import push
from pretune.hub.validate import REFERENCE, check_networks, validate, write_reference
from pretune.model.weights import read_config


@pytest.fixture
def writer(server) -> Hub:
    return Hub(server.url, "writer")


def better(folder, by: float) -> None:
    """Weights whose figures, on the card too, are higher by this much."""
    quality = read_config(folder).quality
    edit(folder, quality={name: value + by for name, value in quality.items()})
    card = folder / "README.md"
    text = card.read_text()
    for name in ("top1", "top5", "spearman"):
        old, new = (
            f"{{type: {name}, value: {quality[name]:.3f}",
            f"{{type: {name}, value: {quality[name] + by:.3f}",
        )
        assert old in text
        text = text.replace(old, new)
    card.write_text(text)
    rehash(folder)


def no_torch(monkeypatch) -> None:
    """As on a machine where torch is not installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find(name))


def test_a_push_is_one_commit_and_one_tag(server, writer, folder):
    first = push(writer, folder, REPO)
    assert (first.tag, first.changed) == ("v1", True)
    commits = server.git(REPO, "log", "--format=%H %s", "main").decode().splitlines()
    assert len(commits) == 2 and commits[0] == f"{first.revision} cpu-x86-64-v4 v1"
    item = pull_weights(Hub(server.url), REPO, "v1")
    assert item.record.revision == first.revision and cache.check(item) == []

    again = push(writer, folder, REPO)
    assert (again.revision, again.tag, again.changed) == (first.revision, "v1", False)

    better(folder, 0.01)
    (folder / "evaluation.png").unlink()
    rehash(folder)
    second = push(writer, folder, REPO)
    assert second.tag == "v2" and second.changed
    assert "evaluation.png" not in server.files(REPO, second.revision)
    assert ".gitattributes" in server.files(REPO, second.revision)


def test_worse_figures_are_refused_unless_allowed(server, writer, folder):
    push(writer, folder, REPO)
    better(folder, -0.01)
    server.requests.clear()
    with pytest.raises(
        OptionError, match=r"worse than the version it replaces: top1 0\.\d+ after 0\.\d+, top5"
    ):
        push(writer, folder, REPO)
    assert not any("commit" in path for _method, path in server.requests)
    assert push(writer, folder, REPO, tag="worse", allow_regression=True).tag == "worse"
    with pytest.raises(OptionError, match=r"--tag v1: .* has this version already"):
        push(writer, folder, REPO, tag="v1", allow_regression=True)


@pytest.mark.parametrize("tag", ["", "two words", "..", "a..b", "-v1", "refs/x", "é"])
def test_a_tag_that_is_no_name_is_refused_before_anything_is_sent(server, writer, folder, tag):
    with pytest.raises(OptionError, match="not a plain name"):
        push(writer, folder, REPO, tag=tag)
    assert server.requests == []


def test_somebody_else_has_pushed_meanwhile(server, writer, folder, weights):
    push(writer, folder, REPO)
    head = server.resolve(REPO, "main")
    better(folder, 0.01)
    api = writer.api
    upload = api.preupload_lfs_files

    def meanwhile(*args, **kwargs):
        server.publish(REPO, weights.parent / "cpu-x86-64-v4" / "onnx")
        return upload(*args, **kwargs)

    api.preupload_lfs_files = meanwhile  # the moment between looking and committing
    with pytest.raises(HubError, match="somebody has changed the repository meanwhile"):
        push(writer, folder, REPO)
    assert server.resolve(REPO, "main~1") == head and server.resolve(REPO, "v2") is None


def test_a_tag_that_fails_is_made_up_for_by_another_push(server, writer, folder):
    server.faults.append(Fault("POST", "/tag/", status=403))
    with pytest.raises(HubError, match="only the tag is not: push again"):
        push(writer, folder, REPO)
    assert push(writer, folder, REPO).tag == "v1"
    assert server.resolve(REPO, "v1") == server.resolve(REPO, "main")


@pytest.mark.parametrize(
    ("method", "at"),
    [
        ("POST", "/api/repos/create"),
        ("POST", "/api/validate-yaml"),
        ("POST", "/preupload/"),
        ("POST", "/info/lfs/objects/batch"),
        ("PUT", "/lfs/"),
        ("POST", "/commit/"),
        ("POST", "/tag/"),
    ],
)
def test_a_hub_that_stalls_while_weights_are_sent(server, folder, monkeypatch, method, at):
    fault = Fault(method, at, times=99, stall=0)
    server.faults.append(fault)
    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.5)
        patch.setattr(time, "sleep", lambda _seconds: None)
        with pytest.raises(HubError, match=f"{server.url} stopped answering") as caught:
            push(Hub(server.url, "writer"), folder, REPO)
    assert fault.reached.is_set() and "\n" not in str(caught.value)
    server.faults.clear()
    pushed = push(Hub(server.url, "writer"), folder, REPO)
    assert pushed.tag == "v1" and server.resolve(REPO, "v1") == server.resolve(REPO, "main")


@pytest.mark.parametrize("at", ["/preupload/", "/lfs/objects/batch", "^/lfs/", "/commit/", "/tag/"])
def test_a_failure_that_passes(server, writer, folder, monkeypatch, at):
    monkeypatch.setattr(time, "sleep", lambda _seconds: None)
    fault = Fault("PUT" if at == "^/lfs/" else "POST", at, status=503)
    server.faults.append(fault)
    assert push(writer, folder, REPO).tag == "v1" and fault.reached.is_set()


@pytest.mark.parametrize(
    ("token", "said"), [("reader", "a token with write access"), (None, "hf auth login")]
)
def test_without_the_right_to_write(server, folder, token, said):
    with pytest.raises(HubError, match=said):
        push(Hub(server.url, token), folder, REPO)
    assert server.repos() == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("library_name: pretune", "library_name: other", "library_name is not pretune"),
        ("license: apache-2.0\n", "", "names no license"),
        ("onnx, cpu-x86-64-v4]", "onnx]", "tags lack cpu-x86-64-v4"),
        ("{type: top1, ", "{type: top9, ", "model-index has no top1"),
        ("{type: top1, value: 0.", "{type: top1, value: 0.0", "states top1 0.0"),
        ("---\nlibrary_name", "---\n[library_name", "write it anew: pretune-export card"),
    ],
)
def test_a_card_that_is_not_right(folder, old, new, said):
    card = folder / "README.md"
    assert old in card.read_text()
    card.write_text(card.read_text().replace(old, new))
    rehash(folder)
    with pytest.raises(WeightsError, match=said):
        validate(folder)


def test_the_hub_refuses_metadata_in_its_own_words(server, writer, folder):
    server.faults.append(Fault("POST", "/api/validate-yaml", status=400))
    with pytest.raises(HubError, match=r"Invalid metadata in README\.md"):
        push(writer, folder, REPO)


def test_figures_and_files_are_asked_for(folder):
    edit(folder, quality={"top1": 0.7, "top5": 0.9})
    with pytest.raises(WeightsError, match="quality has no spearman"):
        validate(folder)
    (folder / "onnx" / "ranker.onnx").unlink()
    (folder / "model.pkl").write_bytes(b"")
    with pytest.raises(WeightsError, match=r"onnx/ranker\.onnx: missing; model\.pkl: not in the manifest"):
        validate(folder)


def change_networks(folder, change) -> None:
    path = folder / "onnx" / "ranker.onnx"
    model = onnx.load(path)
    change(model)
    path.write_bytes(model.SerializeToString())
    rehash(folder)


def other_numbers(model) -> None:
    tensor = max(model.graph.initializer, key=lambda t: np.prod(t.dims))
    array = onnx.numpy_helper.to_array(tensor) * np.float32(1.01)
    tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))


def other_opset(model) -> None:
    model.opset_import[0].version = 17


def other_domain(model) -> None:
    model.opset_import.add(domain="com.example", version=1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (other_numbers, r"ranker\.onnx: score differs from model\.safetensors by .*, more than 1e-04"),
        (other_opset, r"ranker\.onnx: opset 17, IR 10; config\.json says 18 and 10"),
        (other_domain, r"ranker\.onnx: uses operators or data from elsewhere"),
    ],
)
def test_networks_that_are_not_those_of_the_safetensors(folder, change, said):
    change_networks(folder, change)
    with pytest.raises(WeightsError, match=said):
        check_networks(folder, read_config(folder))


def test_without_torch_the_stored_outputs_are_compared_with(folder, monkeypatch):
    (folder / REFERENCE).unlink(missing_ok=True)
    write_reference(folder)
    assert set(json.loads((folder / REFERENCE).read_text())) == {"encoder", "action", "transition", "ranker"}
    no_torch(monkeypatch)
    check_networks(folder, read_config(folder))
    change_networks(folder, other_numbers)
    with pytest.raises(WeightsError, match=r"differs from model\.safetensors"):
        check_networks(folder, read_config(folder))
    (folder / REFERENCE).unlink()
    with pytest.raises(WeightsError, match=r"no reference outputs .* pip install 'pretune\[export\]'"):
        check_networks(folder, read_config(folder))


def test_the_lowest_promised_onnx_runtime_loads_them(folder, tmp_path):
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (lowest,) = (d.split(">=")[1] for d in project["dependencies"] if d.startswith("onnxruntime>="))
    there = tmp_path / "lowest"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--timeout", "10", "--retries", "0"]
    got = subprocess.run(
        [*pip, "--target", there, f"onnxruntime=={lowest}.0"], capture_output=True, text=True
    )
    if got.returncode:
        pytest.skip(f"pip cannot get onnxruntime {lowest}: {got.stderr.strip().splitlines()[-1]}")
    code = (
        "import pathlib, onnxruntime; from pretune.hub.validate import validate; "
        f"assert onnxruntime.__version__ == '{lowest}.0'; validate(pathlib.Path({str(folder)!r}))"
    )
    paths = os.pathsep.join([str(there), *sys.path])
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}
    )
    assert ended.returncode == 0, ended.stderr
