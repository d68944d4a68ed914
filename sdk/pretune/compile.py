"""From a program and a tuning database to something that runs."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from pretune.compat import setup_tvm
from pretune.errors import EnvironmentFaultError, one_line
from pretune.intake import Program
from pretune.messages import explain_os_errors
from pretune.native_log import quiet_native

_CANNOT_START = (errno.ENOENT, errno.EACCES, errno.ENOEXEC)
"""Errors of starting a compiler that is none."""


def compile_program(program: Program, target: tvm.target.Target, database: Any = None) -> Any:
    """Compile a program as stock TVM does, with the best schedule of each task that a database knows.

    Parameters
    ----------
    program : Program
        What to compile.
    target : tvm.target.Target
        The target the database was made for.
    database : tvm.s_tir.meta_schedule.Database, optional
        Tuning records; without it, everything keeps TVM's default schedule.

    Returns
    -------
    tvm.relax.VMExecutable or tvm.runtime.Executable
        For a whole network, what `run_program` and ``relax.VirtualMachine`` take, with entry ``main``. For a
        PrimFunc, a module with the function under its own name.
    """
    setup_tvm(target)
    from tvm.s_tir import meta_schedule as ms

    database = ms.database.MemoryDatabase() if database is None else database
    if program.kind == "relax":
        with quiet_native():
            return ms.relax_integration.compile_relax(database, program.mod, target, params=None)
    schedule = ms.tir_integration.compile_tir(database, program.mod, target)
    return tvm.compile(program.mod if schedule is None else schedule.mod, target=target)


def export_library(executable: Any, path: str | Path) -> Path:
    """Link a compiled program into a shared library that ``tvm.runtime.load_module`` reads.

    Raises
    ------
    EnvironmentFaultError
        If there is no C++ compiler to link with, or it fails: it is broken, or for another target.
    OutputError
        If the disk is full or read-only.
    """
    from tvm.support.cc import get_cc

    path = Path(path)
    if get_cc() is None:
        raise EnvironmentFaultError(
            f"writing {path} needs a C++ compiler to link with, and none is on PATH; run: apt-get install g++"
        )
    try:
        executable.export_library(str(path))
    except (OSError, RuntimeError) as error:
        if isinstance(error, OSError) and error.errno not in _CANNOT_START:
            with explain_os_errors(path.parent):
                raise
        raise EnvironmentFaultError(
            f"there is no {path}, since linking it fails: {one_line(error)}; apply the tuning database "
            "where a C++ compiler for the target works"
        ) from error
    return path


def run_program(executable: Any, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Run a compiled network once on the CPU.

    Parameters
    ----------
    executable : tvm.relax.VMExecutable, str or Path
        A result of `compile_program`, or a library written by `export_library`.
    inputs : sequence of np.ndarray
        The inputs in the order of `Program.inputs`, with their shapes and dtypes.

    Returns
    -------
    list of np.ndarray
        The outputs in order.
    """
    from tvm import relax

    device: Any = tvm.cpu()
    with quiet_native():  # "Scope Loaded:", once for every weight
        if isinstance(executable, str | Path):
            executable = tvm.runtime.load_module(str(executable))
        machine = relax.VirtualMachine(executable, device)
    outputs = machine["main"](*(tvm.runtime.tensor(np.ascontiguousarray(array)) for array in inputs))
    outputs = [outputs] if isinstance(outputs, tvm.runtime.Tensor) else list(outputs)
    return [output.numpy() for output in outputs]
