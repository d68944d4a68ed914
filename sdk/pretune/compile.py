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
from pretune.intake.task import lower_passes
from pretune.messages import explain_os_errors
from pretune.native_log import quiet_native
from pretune.vector_math import vectorise

_CANNOT_START = (errno.ENOENT, errno.EACCES, errno.ENOEXEC)
"""Errors of starting a compiler that is none."""


def compile_program(program: Program, target: tvm.target.Target, database: Any = None) -> Any:
    """Compile a program with the best schedule of each task that a database knows.

    Without a database this is stock TVM. With one, elementary functions are vectorised, see
    `pretune.vector_math`, and all else is as ``compile_relax`` and ``compile_tir`` do it.

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

    if program.kind == "relax":
        with quiet_native():
            kind: Any = target.kind  # TVM annotates it as a string
            if database is not None and kind.name == "llvm":
                return _compile_relax(program.mod, target, database)
            database = ms.database.MemoryDatabase() if database is None else database
            return ms.relax_integration.compile_relax(database, program.mod, target, params=None)
    if database is None:
        return tvm.compile(program.mod, target=target)
    schedule = ms.tir_integration.compile_tir(database, program.mod, target)
    mod = program.mod if schedule is None else schedule.mod
    return tvm.compile(vectorise(mod, target), target=target)


def _compile_relax(mod: tvm.IRModule, target: tvm.target.Target, database: Any) -> Any:
    """``compile_relax`` for a CPU, with `vectorise` where functions are scheduled and not yet lowered."""
    from tvm import relax

    with target, database, tvm.transform.PassContext(opt_level=3):  # some passes read them when made
        passes = [
            *lower_passes(target),
            relax.transform.MetaScheduleApplyDatabase(enable_warning=False),
            tvm.transform.module_pass(lambda mod, _context: vectorise(mod, target), opt_level=0),
            relax.get_pipeline("default"),
        ]
        return tvm.compile(mod, target, relax_pipeline=tvm.transform.Sequential(passes))


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
