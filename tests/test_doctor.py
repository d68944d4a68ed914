"""The doctor: what it says of this machine, and of installations that cannot work."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from pretune import doctor
from pretune.hardware import count_cores, detect, make_target

SDK = str(Path(__file__).parents[1] / "sdk")


def rendered(report: dict) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(doctor.render(report))
    return console.file.getvalue()


def test_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("PRETUNE_CACHE", str(tmp_path / "new" / "cache"))
    monkeypatch.setenv("PRETUNE_NUM_THREADS", "1")
    report = doctor.report()
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    hardware = detect()
    assert report["tvm"]["usable"]
    assert report["packages"]["apache-tvm"].startswith("0.")
    assert report["hardware"]["microarch"] == hardware.microarch
    assert report["cores"] == {
        "use": hardware.cores,
        "why": count_cores().why,
        "threads": 1,
        "threads_why": "PRETUNE_NUM_THREADS",
    }
    assert report["target"]["native"] == json.loads(str(make_target("native", hardware)))
    assert report["cache"] == {"folder": str(tmp_path / "new" / "cache"), "exists": False, "writable": True}
    # Either there are weights for this machine, or the report says that there are none.
    assert bool(report["weights"]["path"]) != bool(report["weights"]["error"])
    assert report["problems"] == [line for line in [report["weights"]["error"]] if line]
    text = rendered(report)
    for expected in (
        hardware.microarch,
        hardware.model_name,
        count_cores().why,
        "native target",
        "(not there yet)",
    ):
        assert expected in text


def test_a_cache_in_the_place_of_a_file(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PRETUNE_CACHE", str(tmp_path / "file"))
    report = doctor.report()
    assert not report["cache"]["writable"]
    assert not any("cache" in problem for problem in report["problems"])  # only a pull writes there
    assert "cannotbewritten" in "".join(rendered(report).split())  # the line is folded


def test_a_pair_of_versions_that_crashes_is_named_and_never_imported(tmp_path):
    metadata = tmp_path / "apache_tvm_ffi-0.1.15.post2.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: apache-tvm-ffi\nVersion: 0.1.15.post2\n")
    code = """
import json, sys
from pretune import doctor
report = doctor.report()
assert "tvm" not in sys.modules and "torch" not in sys.modules
from rich.console import Console
Console(stderr=True).print(doctor.render(report))
print(json.dumps(report))
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), SDK])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert not report["tvm"]["usable"]
    assert report["packages"]["apache-tvm-ffi"] == "0.1.15.post2"
    assert "apache-tvm-ffi 0.1.15.post2 crashes" in report["problems"][0]
    assert "pip install" in report["problems"][0]
    assert report["cores"]["use"] == count_cores().cores
    assert "problem: apache-tvm-ffi 0.1.15.post2" in " ".join(done.stderr.split())
