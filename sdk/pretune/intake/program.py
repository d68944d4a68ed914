"""Programs: what a user asks to tune, with the tasks found in it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tvm

from pretune.errors import InputError, OptionError, one_line
from pretune.intake.relax_prepare import prepare_relax
from pretune.intake.task import Task, make_task, parameter_buffers, tasks_of_relax

Shapes = Mapping[str, Sequence[int]]
"""Shape of each input by its name; only inputs with dynamic dimensions need one."""


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and dtype of one input."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, eq=False)
class Program:
    """A program to tune.

    Parameters
    ----------
    name : str
        File stem or function name.
    kind : {"relax", "tir"}
        A whole network, or one PrimFunc.
    mod : tvm.IRModule
        relax: imported, parameters bound and folded, not yet legalised or fused, entry ``main``; give it to
        ``compile_relax`` with the database. tir: the module of the PrimFunc, for ``compile_tir``.
    tasks : tuple of Task
        Without duplicates, heaviest (weight times flops) first.
    inputs : tuple of TensorSpec
        relax: the inputs in order, under the names they have in the source. tir: the PrimFunc's arguments.
    outputs : tuple of str
        Names of the outputs where the source has them.
    source : Path or None
        The file it came from.
    """

    name: str
    kind: Literal["relax", "tir"]
    mod: tvm.IRModule
    tasks: tuple[Task, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[str, ...] = ()
    source: Path | None = None


def parse_shape_options(options: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Read ``--shape`` options: ``["x=1x3x48x192", "mask=1x8"]`` to a shape by input name.

    Raises
    ------
    OptionError
        If one is malformed, not positive, or given twice. A scalar is written ``x=``.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for option in options:
        name, equals, dims = option.rpartition("=")
        if not equals or not name or not re.fullmatch(r"(\d+([x,]\d+)*)?", dims):
            raise OptionError(f"--shape {option!r} is not NAME=DIMxDIMx..., as in --shape x=1x3x48x192")
        shape = tuple(int(dim) for dim in re.split("[x,]", dims)) if dims else ()
        if 0 in shape:
            raise OptionError(f"--shape {option!r} has a dimension of 0; every dimension must be at least 1")
        if shapes.setdefault(name, shape) != shape:
            raise OptionError(f"--shape gives {name!r} two shapes; give it once")
    return shapes


def shape_text(shape: Sequence[Any]) -> str:
    """Write a shape as ``--shape`` takes it: ``1x3x48x192``."""
    return "x".join(str(dim) for dim in shape)


def check_shapes(declared: Mapping[str, Sequence[int | str]], shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Shape of every input, all dimensions known.

    Parameters
    ----------
    declared : mapping of str to sequence of int or str
        Inputs as the program declares them; a dynamic dimension is its name.
    shapes : mapping of str to sequence of int
        What the user gave.

    Raises
    ------
    InputError
        For an unknown name, a wrong rank, a fixed dimension that differs, or a dynamic one without value.
    """
    for name, shape in shapes.items():
        if name not in declared:
            known = ", ".join(f"{key} ({shape_text(dims)})" for key, dims in declared.items())
            raise InputError(
                f"--shape names the input {name!r}, which does not exist; the inputs are: {known}"
            )
        dims = declared[name]
        if len(shape) != len(dims):
            raise InputError(
                f"--shape {name}={shape_text(shape)} has {len(shape)} dimensions, but input {name!r} has "
                f"{len(dims)}: {shape_text(dims)}"
            )
        for axis, (given, dim) in enumerate(zip(shape, dims, strict=True)):
            if isinstance(dim, int) and dim != given:
                raise InputError(
                    f"--shape {name}={shape_text(shape)} sets dimension {axis} to {given}, but input "
                    f"{name!r} fixes it at {dim}: {shape_text(dims)}"
                )
    result: dict[str, tuple[int, ...]] = {}
    for name, dims in declared.items():
        if name in shapes:
            result[name] = tuple(int(dim) for dim in shapes[name])
            continue
        dynamic = [f"{axis} ({dim})" for axis, dim in enumerate(dims) if isinstance(dim, str)]
        if dynamic:
            # A batch of one is the usual wish; other sizes only the user knows.
            example = [d if isinstance(d, int) else "N" if axis else 1 for axis, d in enumerate(dims)]
            what = "dimension" if len(dynamic) == 1 else "dimensions"
            hint = ", with numbers for N" if "N" in example else ""
            raise InputError(
                f"input {name!r} has the dynamic {what} {', '.join(dynamic)}; give its shape, as in: "
                f"--shape {name}={shape_text(example)}{hint}"
            )
        result[name] = tuple(int(dim) for dim in dims)
    return result


def program_from_relax(
    mod: tvm.IRModule,
    *,
    target: tvm.target.Target,
    name: str,
    shapes: Shapes | None = None,
    input_names: Sequence[str] | None = None,
    outputs: Sequence[str] = (),
    source: Path | None = None,
) -> Program:
    """Prepare a Relax module and find its tasks.

    Parameters
    ----------
    mod : tvm.IRModule
        Module with one public Relax function, or one called ``main``.
    target : tvm.target.Target
        What it will be compiled for.
    name : str
        Name of the program.
    shapes : mapping of str to sequence of int, optional
        Values for dynamic inputs.
    input_names : sequence of str, optional
        Names of the inputs in the source, where TVM had to change them.
    outputs : sequence of str
        Names of the outputs.
    source : Path, optional
        The file it came from.

    Raises
    ------
    InputError
        If the module has no entry, inputs that are no tensors or dynamic, nothing to tune, or an operator
        that TVM has no program for.
    """
    mod = _with_main(mod, name)
    params = list(mod["main"].params)
    names = list(input_names or [_name(param) for param in params])
    declared = {}
    for param, input_name in zip(params, names, strict=True):
        shape = _dims(param)
        if shape is None:
            raise InputError(f"{name}: input {input_name!r} is not a tensor with a shape, which tuning needs")
        declared[input_name] = shape
    fixed = check_shapes(declared, shapes or {})
    mod = _bind_dims(mod, params, list(fixed.values()), name)
    try:
        mod = prepare_relax(mod)
        tasks = tasks_of_relax(mod, target)
    except RuntimeError as error:  # of TVM's passes: operators that have no program for these types
        raise InputError(f"{name}: TVM cannot compile this program: {one_line(error)}") from error
    inputs = tuple(
        TensorSpec(input_name, fixed[input_name], str(_type(param).dtype))
        for input_name, param in zip(names, params, strict=True)
    )
    if not tasks:
        raise InputError(
            f"{name}: nothing to tune: the program has no function with a block and static shapes"
        )
    return Program(name, "relax", mod, tasks, inputs, tuple(outputs), source)


def program_from_prim_func(func: Any, *, name: str | None = None, source: Path | None = None) -> Program:
    """Make a program of a single PrimFunc.

    Raises
    ------
    InputError
        If it has dynamic shapes, scalar arguments, or no block to tune.
    """
    symbol = str(func.attrs["global_symbol"]) if func.attrs and "global_symbol" in func.attrs else None
    task = make_task(symbol or name or "main", func)
    inputs = tuple(
        TensorSpec(buffer.name, shape, dtype)
        for buffer, (shape, dtype) in zip(parameter_buffers(func), task.args, strict=True)
    )
    return Program(name or task.name, "tir", task.mod, (task,), inputs, (), source)


def _name(param: Any) -> str:
    """Name of a Relax variable; called ``name_hint`` before TVM 0.27."""
    return str(param.name if hasattr(param, "name") else param.name_hint)


def _type(param: Any) -> Any:
    """Type annotation of a Relax variable; called ``struct_info`` before TVM 0.26."""
    return param.ty if hasattr(param, "ty") else param.struct_info


def _dims(param: Any) -> list[int | str] | None:
    shape = getattr(_type(param), "shape", None)
    if shape is None:
        return None
    return [int(dim) if isinstance(dim, tvm.tirx.IntImm) else str(dim) for dim in shape]


def _with_main(mod: Any, name: str) -> Any:
    """Module whose entry is called ``main``."""
    from tvm import relax

    entries = [var for var, func in mod.functions.items() if isinstance(func, relax.Function)]
    public = [var for var in entries if "global_symbol" in (mod[var].attrs or {})] or entries
    if any(var.name_hint == "main" for var in entries):
        return mod
    if len(public) != 1:
        found = ", ".join(sorted(var.name_hint for var in public)) or "none"
        raise InputError(f"{name}: expected a Relax function called main; found: {found}")
    entry = public[0]
    functions = {var: func for var, func in mod.functions.items() if not var.same_as(entry)}
    functions[tvm.ir.GlobalVar("main")] = mod[entry].with_attr("global_symbol", "main")
    return tvm.IRModule(functions, attrs=mod.attrs)


def _bind_dims(
    mod: tvm.IRModule, params: Sequence[Any], shapes: Sequence[Sequence[int]], name: str
) -> tvm.IRModule:
    """Put numbers in the place of the symbolic dimensions of the inputs."""
    from tvm import relax

    values: dict[Any, Any] = {}
    for param, shape in zip(params, shapes, strict=True):
        for dim, value in zip(_type(param).shape, shape, strict=True):
            if isinstance(dim, tvm.tirx.Var) and int(values.setdefault(dim, value)) != value:
                raise InputError(f"{name}: --shape gives dimension {dim} both {values[dim]} and {value}")
    if values:
        mod = relax.transform.BindSymbolicVars(values, "main")(mod)
    for param, shape in zip(mod["main"].params, shapes, strict=True):
        if _dims(param) != list(shape):  # a dimension such as 2*n that does not follow the others
            raise InputError(
                f"{name}: --shape {_name(param)}={shape_text(shape)} contradicts the other dimensions, which "
                f"make it {shape_text(_dims(param) or ())}"
            )
    return mod
