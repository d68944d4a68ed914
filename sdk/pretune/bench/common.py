"""What the benchmarks share: the machine, averages, and programs to try them on."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretune import env
from pretune.compat import setup_tvm
from pretune.hardware import Hardware, detect, hardware_for_target, make_target
from pretune.hardware.target import check_runs_here
from pretune.hub.sources import find_weights
from pretune.model import Weights, WorldModel

if TYPE_CHECKING:
    from rich.console import Console
    from tvm.target import Target

    from pretune.intake import Task

_PACKAGES = ("pretune", "apache-tvm", "apache-tvm-ffi", "onnxruntime", "numpy", "torch", "xgboost")


@dataclass(frozen=True)
class Bench:
    """The machine, its native target, and the weights."""

    machine: Hardware
    target: Target
    hardware: Hardware
    threads: int
    weights: Weights
    model: WorldModel


def prepare(weights: str | Path | None, target: Any = "native") -> Bench:
    """Detect the machine, and load the weights for it.

    Parameters
    ----------
    weights : str or Path, optional
        In place of the best on this machine.
    target : Target, mapping or str
        Runs on this machine.

    Raises
    ------
    TargetError
        If the target is none, or this machine cannot run it.
    WeightsError
        If there are none, or those given are unusable.
    """
    machine = detect()
    made = make_target(target, machine)
    check_runs_here(made, machine)
    hardware = hardware_for_target(made, machine)
    chosen = find_weights(hardware, weights)
    threads = env.num_threads() or machine.cores
    setup_tvm()
    return Bench(machine, made, hardware, threads, chosen, WorldModel(chosen, threads))


def environment(machine: Hardware) -> dict[str, Any]:
    """On what a benchmark ran: CPU, cores, versions, load, date."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "cpu": machine.model_name,
        "microarch": machine.microarch,
        "cores": machine.cores,
        "threads": env.num_threads() or machine.cores,
        "load": round(os.getloadavg()[0], 2),
        "versions": versions,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def show_environment(found: dict[str, Any], console: Console) -> None:
    """One line on the machine under a table."""
    named = {name: found["versions"].get(name, "from source") for name in ("pretune", "apache-tvm")}
    versions = ", ".join(f"{name} {version}" for name, version in named.items())
    console.print(
        f"{found['cpu']} ({found['microarch']}), {found['cores']} cores, load {found['load']:g}, {versions}, "
        f"{found['date']}",
        soft_wrap=True,
    )


@contextlib.contextmanager
def output_to(log: Path) -> Iterator[None]:
    """Send this process's stdout and stderr, native code included, to the end of a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    saved = [os.dup(fd) for fd in (1, 2)]
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for fd, old in zip((1, 2), saved, strict=True):
            os.dup2(old, fd)
            os.close(old)


# -- programs ------------------------------------------------------------------------------------------------


def matmul_relu(n: int = 512) -> Task:
    """``[n, n] x [n, n]``, then a ReLU."""
    from tvm import te

    a, b = _input("A", n, n), _input("B", n, n)
    k = te.reduce_axis((0, n), "k")
    c: Any = te.compute((n, n), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), "C")
    return _task("matmul_relu", a, b, te.compute((n, n), lambda i, j: _relu(c[i, j]), "D"))


def conv2d_relu(size: int = 56, channels: int = 64) -> Task:
    """3x3, padded, NCHW, as many channels out as in, then a ReLU."""
    from tvm import te

    x, w = _input("X", 1, channels, size, size), _input("W", channels, channels, 3, 3)
    padded = _pad(x, size, channels)
    c, i, j = (te.reduce_axis((0, extent), name) for extent, name in ((channels, "rc"), (3, "ry"), (3, "rx")))
    y: Any = te.compute(
        (1, channels, size, size),
        lambda n, f, h, v: te.sum(padded[n, c, h + i, v + j] * w[f, c, i, j], axis=[c, i, j]),
        "Y",
    )
    return _task("conv2d_relu", x, w, te.compute(y.shape, lambda *at: _relu(y[at]), "Z"))


def depthwise_relu(size: int = 56, channels: int = 144) -> Task:
    """3x3, padded, one filter a channel, then a ReLU."""
    from tvm import te

    x, w = _input("X", 1, channels, size, size), _input("W", channels, 3, 3)
    padded = _pad(x, size, channels)
    i, j = (te.reduce_axis((0, 3), name) for name in ("ry", "rx"))
    y: Any = te.compute(
        (1, channels, size, size),
        lambda n, c, h, v: te.sum(padded[n, c, h + i, v + j] * w[c, i, j], axis=[i, j]),
        "Y",
    )
    return _task("depthwise_relu", x, w, te.compute(y.shape, lambda *at: _relu(y[at]), "Z"))


def softmax(rows: int = 1024, columns: int = 128) -> Task:
    """Over the last dimension, in the usual four steps."""
    from tvm import te, tirx

    x = _input("X", rows, columns)
    k, r = te.reduce_axis((0, columns), "k"), te.reduce_axis((0, columns), "r")
    top: Any = te.compute((rows,), lambda i: te.max(x[i, k], axis=k), "top")
    exps: Any = te.compute((rows, columns), lambda i, j: tirx.exp(x[i, j] - top[i]), "exps")
    total: Any = te.compute((rows,), lambda i: te.sum(exps[i, r], axis=r), "total")
    return _task("softmax", x, te.compute((rows, columns), lambda i, j: exps[i, j] / total[i], "Y"))


def _input(name: str, *shape: int) -> Any:
    from tvm import te

    return te.placeholder(shape, "float32", name=name)


def _relu(value: Any) -> Any:
    from tvm import te, tirx

    return te.max(value, tirx.const(0, "float32"))


def _pad(x: Any, size: int, channels: int) -> Any:
    from tvm import te, tirx

    def value(n: Any, c: Any, h: Any, v: Any) -> Any:
        inside = tirx.all(h >= 1, h < size + 1, v >= 1, v < size + 1)
        return tirx.if_then_else(inside, x[n, c, h - 1, v - 1], tirx.const(0, "float32"))

    return te.compute((1, channels, size + 2, size + 2), value, "pad")


def _task(name: str, *tensors: Any) -> Task:
    from tvm import te

    from pretune.intake.task import make_task

    return make_task(name, te.create_prim_func(list(tensors)))
