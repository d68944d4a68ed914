"""What pretune finds on this machine and would use, for ``pretune doctor``."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Group
from rich.table import Table
from rich.text import Text

from pretune import env
from pretune.compat import check_versions
from pretune.errors import PretuneError, one_line
from pretune.hardware import Hardware, count_cores, detect, hardware_for_target, make_target

_PACKAGES = ("pretune", "apache-tvm", "apache-tvm-ffi", "onnxruntime", "onnx", "numpy", "huggingface-hub")
# Only some commands need these; looked up, never imported.
_OPTIONAL = ("torch", "xgboost")


def report() -> dict[str, Any]:
    """Look at everything that decides what a run would do. Never raises: what is wrong is in the report.

    Returns
    -------
    report : dict
        JSON values only. ``python``, ``packages`` (versions; None for one that is not installed), ``tvm``
        (whether it is usable with its ffi), ``hardware`` (see `Hardware`), ``cores`` (and why), ``target``
        (what ``native`` means), ``compiler``, ``cache``, ``weights`` (chosen, why, and all considered) and
        ``problems``: one line for each thing that keeps pretune from working here.
    """
    problems: list[str] = []
    llvm: int | None = None
    try:
        check_versions()
        tvm_error = ""
    except PretuneError as error:
        tvm_error = str(error)
    if not tvm_error:  # else it is not imported: versions that do not fit may end this process
        try:
            import tvm.target.codegen as codegen

            llvm = int(codegen.llvm_version_major() or 0)
        except Exception as error:  # a broken installation fails in many ways
            tvm_error = f"import tvm fails: {one_line(error)}"
    if tvm_error:
        problems.append(tvm_error)

    cores = count_cores()
    # Without TVM there is no LLVM to name the CPU.
    hardware = detect(microarch="unknown" if tvm_error else None)
    target = None
    if not tvm_error:
        try:
            target = make_target("native", hardware)
        except PretuneError as error:
            problems.append(str(error))
    seen = hardware if target is None else hardware_for_target(target, hardware)
    weights = _weights(seen)
    if weights["error"]:
        problems.append(weights["error"])

    return {
        "python": {
            "version": platform.python_version(),
            "executable": sys.executable,
            "platform": platform.platform(),
        },
        "packages": {name: _version(name) for name in (*_PACKAGES, *_OPTIONAL)},
        "tvm": {"usable": not tvm_error, "llvm": llvm, "error": tvm_error},
        "hardware": json.loads(msgspec.json.encode(hardware)),
        "cores": {
            "use": cores.cores,
            "why": cores.why,
            "threads": env.num_threads() or cores.cores,
            "threads_why": "PRETUNE_NUM_THREADS" if env.num_threads() else "as many as cores",
        },
        "target": {
            "native": None if target is None else json.loads(str(target)),
            "isa_level": seen.isa_level,
            "vector_bits": seen.vector_bits,
        },
        "compiler": _compiler(tvm_error),
        "cache": _cache(),
        "weights": weights,
        "problems": problems,
    }


def render(report: Mapping[str, Any]) -> Group:
    """Lay a report out for a terminal: print it with a `rich.console.Console`."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")

    def row(name: str, value: object) -> None:
        table.add_row(name, Text(str(value)))

    packages, hardware = report["packages"], report["hardware"]
    cores, target, weights = report["cores"], report["target"], report["weights"]
    row("pretune", packages["pretune"] or "not installed (run from a source folder)")
    row("python", f"{report['python']['version']}  {report['python']['executable']}")
    usable = f"usable, LLVM {report['tvm']['llvm']}" if report["tvm"]["usable"] else "not usable, see below"
    row("tvm", f"{packages['apache-tvm']} with ffi {packages['apache-tvm-ffi']}: {usable}")
    row("onnxruntime", packages["onnxruntime"])
    for name in _OPTIONAL:
        row(name, packages[name] or "not installed (only some commands need it)")
    row("cpu", f"{hardware['model_name']} ({hardware['microarch']}, {hardware['isa_level']})")
    row("caches", ", ".join(_size(hardware[name]) for name in ("l1d_bytes", "l2_bytes", "l3_bytes")))
    row("memory", _size(hardware["memory_bytes"]))
    row("cores", f"{cores['use']} ({cores['why']})")
    row("threads", f"{cores['threads']} ({cores['threads_why']})")
    native = target["native"]
    if native is not None:
        shown = {name: value for name, value in native.items() if name not in ("tag", "keys")}
        row("native target", f"{json.dumps(shown)}, vectors of {target['vector_bits']} bits")
    row("c++ compiler", report["compiler"] or "none (writing model.so needs one; run: apt-get install g++)")
    row("cache folder", f"{report['cache']['folder']}{_state(report['cache'])}")
    row("weights", f"{weights['path']} ({weights['why']})" if weights["path"] else "none")
    for item in weights["considered"]:
        taken = "yes" if item["accepted"] else "no "
        row("", f"{taken}  {item['name']}: {item['described']}")
    if weights["notice"]:
        row("", f"notice: {weights['notice']}")
    if not report["problems"]:
        return Group(table, Text("\nEverything that pretune needs is here."))
    lines = "".join(f"\nproblem: {problem}" for problem in report["problems"])
    return Group(table, Text(lines, style="bold"))


def _weights(hardware: Hardware) -> dict[str, Any]:
    """Weights that a run on this hardware would use, and what became of the others."""
    found: dict[str, Any] = dict.fromkeys(("path", "name"))
    found |= {"why": "", "notice": "", "considered": [], "error": ""}
    try:
        from pretune.hub import sources

        found["considered"] = [
            {
                "name": offer.name,
                "source": offer.source,
                "path": str(offer.path),
                "accepted": verdict.accepted,
                "coverage": verdict.coverage,
                "reason": verdict.reasons[0],
                "described": verdict.described,
            }
            for offer, verdict in (
                (c.offer, c.verdict) for c in sources.consider(hardware, sources.offers_here())
            )
        ]
        chosen = sources.find_weights(hardware)
        found |= {"path": str(chosen.path), "name": chosen.config.name}
        found |= {"why": chosen.why, "notice": chosen.notice}
    except (PretuneError, OSError, ImportError) as error:
        found["error"] = str(error)
    return found


def _cache() -> dict[str, Any]:
    folder = env.cache_dir()
    exists = folder.is_dir()
    nearest = folder
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    return {
        "folder": str(folder),
        "exists": exists,
        "writable": nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK),
    }


def _state(cache: Mapping[str, Any]) -> str:
    """What to say of the cache folder. Only pulled weights are kept there: none of it is a problem."""
    if not cache["writable"]:
        return " (cannot be written; pretune hub pull needs another: PRETUNE_CACHE)"
    return "" if cache["exists"] else " (not there yet)"


def _compiler(tvm_error: str) -> str | None:
    """C++ compiler that TVM would link with."""
    if tvm_error:
        return None
    from tvm.support.cc import get_cc

    found = get_cc()
    return None if found is None else str(Path(found))


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _size(count: int) -> str:
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << shift:
            return f"{count / (1 << shift):.3g} {unit}"
    return "none"
