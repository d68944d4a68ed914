"""Programs written in TVM: TVMScript files, TVM's JSON, and IR objects."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tvm

from pretune.errors import InputError, one_line
from pretune.intake.files import check_file
from pretune.intake.program import (
    Program,
    Shapes,
    check_shapes,
    program_from_prim_func,
    program_from_relax,
)
from pretune.intake.task import parameter_buffers

_PREFERRED = ("main", "Module")


def program_from_ir(
    obj: Any,
    *,
    target: tvm.target.Target,
    name: str | None = None,
    shapes: Shapes | None = None,
    source: Path | None = None,
) -> Program:
    """Make a program of a PrimFunc, a Relax function, or a module that holds one of them.

    Raises
    ------
    InputError
        If a module holds several PrimFuncs and no Relax function, or the program cannot be tuned.
    """
    from tvm import relax, tirx

    if isinstance(obj, relax.Function):
        obj = tvm.IRModule({"main": obj})
    if isinstance(obj, tvm.IRModule):
        functions = {var.name_hint: obj[var] for var in obj.get_global_vars()}
        if any(isinstance(func, relax.Function) for func in functions.values()):
            return program_from_relax(obj, target=target, name=name or "main", shapes=shapes, source=source)
        funcs = {key: func for key, func in functions.items() if isinstance(func, tirx.PrimFunc)}
        key, obj = _only(funcs, name or "the module")
        name = name or key
    declared = {
        buffer.name: [int(dim) if isinstance(dim, tirx.IntImm) else str(dim) for dim in buffer.shape]
        for buffer in parameter_buffers(obj)
        if buffer is not None
    }
    if shapes:
        check_shapes(declared, shapes)
    return program_from_prim_func(obj, name=name, source=source)


def load_script(path: Path) -> Any:
    """Run a user's Python file and return the one PrimFunc, Relax function or IRModule that it defines.

    Raises
    ------
    InputError
        If the file fails, defines none, or several without one called ``main`` or ``Module``.
    """
    from tvm import relax, tirx

    check_file(path)
    sys.path.insert(0, str(path.parent.resolve()))  # as python does: the file may import its neighbours
    try:
        values = runpy.run_path(str(path), run_name="pretune_input")
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        lines = [
            frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)
        ]
        where = f" in line {lines[-1]}" if lines else ""
        raise InputError(f"{path} fails{where}: {type(error).__name__}: {one_line(error)}") from error
    finally:
        sys.path.pop(0)
    kinds = (tirx.PrimFunc, relax.Function, tvm.IRModule)
    found = {key: value for key, value in values.items() if isinstance(value, kinds)}
    # One function under two names is one function.
    unique: dict[str, Any] = {}
    for key, value in found.items():
        if key in _PREFERRED or not any(value.same_as(other) for other in unique.values()):
            unique[key] = value
    return _only(unique, str(path))[1]


def load_json(path: Path) -> Any:
    """Read what ``tvm.ir.save_json`` wrote.

    Raises
    ------
    InputError
        If the file is no TVM JSON of this version, or holds something that is no program.
    """
    from tvm import relax, tirx

    check_file(path)
    advice = "write it again with tvm.ir.save_json of this TVM"
    try:
        obj = tvm.ir.load_json(path.read_text(encoding="utf-8"))
    except Exception as error:  # decoding, JSON and type errors, without a common class
        raise InputError(f"{path} is not TVM JSON, or is truncated: {one_line(error)}; {advice}") from error
    if not isinstance(obj, tirx.PrimFunc | relax.Function | tvm.IRModule):
        raise InputError(
            f"{path} holds a {type(obj).__name__}, not a PrimFunc, Relax function or IRModule; {advice}"
        )
    return obj


def _only(found: Mapping[str, Any], where: str) -> tuple[str, Any]:
    """The only entry, or else the one that is called main or Module."""
    if len(found) == 1:
        return next(iter(found.items()))
    for name in _PREFERRED:
        if name in found:
            return name, found[name]
    if not found:
        raise InputError(
            f"{where} defines no PrimFunc, Relax function or IRModule; define one with TVMScript"
        )
    names = ", ".join(sorted(found))
    raise InputError(
        f"{where} defines several programs ({names}); call the one to tune main, or keep only one"
    )
