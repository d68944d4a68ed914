"""Tensor programs to tune, and how they are found in a Relax module."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi

from pretune.errors import InputError, OptionError
from pretune.native_log import quiet_native

_STRUCTURAL_HASH_BITS = (1 << 64) - 1


@dataclass(frozen=True, eq=False)
class Task:
    """One tensor program to tune.

    Parameters
    ----------
    name : str
        Name of the function in its program, such as ``fused_conv2d_add_relu``.
    mod : tvm.IRModule
        The program: one PrimFunc called ``main`` with static shapes, normalised as MetaSchedule does it, so
        that a stock database keyed by it is found by ``compile_relax`` and ``compile_tir``.
    weight : int
        How often the whole program calls it.
    task_id : str
        16 hex digits: the structural hash, which ignores tensor data and the function's name. The same in
        every process.
    flops : float
        Arithmetic operations of one call; 0 when TVM cannot tell.
    """

    name: str
    mod: tvm.IRModule
    weight: int
    task_id: str
    flops: float

    @functools.cached_property
    def args(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        """Shape and dtype of the function's buffers, inputs first, in the order of its parameters."""
        buffers = parameter_buffers(self.mod["main"])
        return tuple((tuple(int(dim) for dim in buffer.shape), str(buffer.dtype)) for buffer in buffers)

    def __repr__(self) -> str:
        return f"Task({self.name!r}, id={self.task_id}, weight={self.weight}, flops={self.flops:.4g})"


def task_id(mod: tvm.IRModule) -> str:
    """Identity of a normalised task module: 16 hex digits, whatever the function's name and tensor data."""
    func = mod["main"]
    if func.attrs and "global_symbol" in func.attrs:
        func = func.with_attr("global_symbol", "main")
    value = tvm_ffi.structural_hash(func, map_free_vars=False, skip_tensor_content=True)
    return f"{value & _STRUCTURAL_HASH_BITS:016x}"


def make_task(name: str, func: Any, weight: int = 1) -> Task:
    """Make a task of a PrimFunc.

    Parameters
    ----------
    name : str
        Name to report it under.
    func : tvm.tirx.PrimFunc
        The function; not yet scheduled.
    weight : int
        Number of calls in the program.

    Raises
    ------
    InputError
        If the function has dynamic shapes, scalar arguments, or no block to tune.
    """
    from tvm.s_tir.analysis import estimate_tir_flops
    from tvm.s_tir.meta_schedule.tune_context import _normalize_mod

    problem = untunable(func)
    if problem:
        raise InputError(f"{name}: {problem}")
    mod = _normalize_mod(func)
    try:
        flops = float(estimate_tir_flops(mod))
    except Exception:  # TVM raises plain and typed errors for what it cannot count, e.g. a while loop
        flops = 0.0
    return Task(name=name, mod=mod, weight=weight, task_id=task_id(mod), flops=flops)


def parameter_buffers(func: Any) -> list[Any]:
    """Buffers of a PrimFunc's parameters, in order; None for a parameter that is a scalar."""
    if hasattr(func, "buffer_map"):  # TVM 0.25 and 0.26: parameters are handles
        return [func.buffer_map.get(param) for param in func.params]
    # TVM 0.27: a parameter that is a buffer carries a buffer's type, and answers for it
    return [param if type(param.ty).__name__ == "BufferType" else None for param in func.params]


def untunable(func: Any) -> str | None:
    """Say in one line why a PrimFunc cannot be a task, or return None if it can be."""
    from tvm import s_tir, tirx

    if func.attrs and func.attrs.get("tirx.is_scheduled", False):
        return "it is scheduled already (attribute tirx.is_scheduled); pass the program before scheduling"
    for param, buffer in zip(func.params, parameter_buffers(func), strict=True):
        if buffer is None:
            return (
                f"argument {param.name} is a scalar; only functions of buffers can be tuned: "
                "make it a constant with PrimFunc.specialize"
            )
        for axis, dim in enumerate(buffer.shape):
            if not isinstance(dim, tirx.IntImm):
                return (
                    f"dimension {axis} of buffer {buffer.name} is dynamic ({dim}); give it a value with "
                    "PrimFunc.specialize before tuning"
                )
    # A schedule rather than a visitor: its interface is the same in every TVM version that is supported.
    try:
        schedule = s_tir.Schedule(func.with_attr("global_symbol", "main"))
        blocks = schedule.get_child_blocks(schedule.get_sblock("root"))
    except Exception:  # a body that is not one root block: TVM's error has no stable type
        blocks = []
    if not blocks:
        return "it has no block to tune; write its computation in T.sblock blocks, as TVMScript and TE do"
    return None


def lower_passes(target: tvm.target.Target) -> list[Any]:
    """Passes that ``compile_relax`` runs before it looks functions up in a tuning database."""
    from tvm import relax
    from tvm.relax import pipeline

    try:
        dispatch = list(pipeline.library_dispatch_passes(target))
    except (ValueError, AttributeError):
        dispatch = []
    return [
        *dispatch,
        relax.transform.LegalizeOps(enable_warning=False),
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.FoldConstant(),
        relax.transform.FuseOps(),
        relax.transform.FuseTIR(),
    ]


def tasks_of_relax(mod: tvm.IRModule, target: tvm.target.Target) -> tuple[Task, ...]:
    """Tasks of a Relax module, deduplicated, heaviest (weight times flops) first.

    Functions that cannot be tuned (dynamic shapes inside the network, no block) stay as they are in the
    compiled program and are left out here. So are plain reshapes: TVM compiles them to views, which take no
    time, but only as long as no schedule was applied to them.

    Parameters
    ----------
    mod : tvm.IRModule
        Relax module before legalising and fusing, with its parameters bound.
    target : tvm.target.Target
        What it will be compiled for.
    """
    from tvm import relax
    from tvm.s_tir.meta_schedule.relax_integration import extract_tasks

    # As compile_relax runs them: under the target, with every optional pass of level 3.
    with quiet_native(), target, tvm.transform.PassContext(opt_level=3):
        lowered = tvm.transform.Sequential(lower_passes(target))(mod)
    tasks: dict[str, Task] = {}
    for extracted in extract_tasks(lowered, target, module_equality="ignore-tensor"):
        func = extracted.mod["main"]
        if untunable(func) or relax.analysis.has_reshape_pattern(func):
            continue
        task = make_task(extracted.task_name, func, int(extracted.weight))
        twin = tasks.get(task.task_id)
        if twin is not None:
            task = Task(twin.name, twin.mod, twin.weight + task.weight, twin.task_id, twin.flops)
        tasks[task.task_id] = task
    return sort_tasks(tasks.values())


def sort_tasks(tasks: Iterable[Task]) -> tuple[Task, ...]:
    """Order tasks by weight times flops, largest first; ties by name, so that the order never varies."""
    return tuple(sorted(tasks, key=lambda task: (-task.weight * task.flops, task.name, task.task_id)))


def select_tasks(tasks: Sequence[Task], pattern: str | None) -> tuple[Task, ...]:
    """Tasks whose name matches a shell pattern such as ``*conv2d*``; all of them for None.

    Raises
    ------
    OptionError
        If none matches.
    """
    if pattern is None:
        return tuple(tasks)
    chosen = tuple(task for task in tasks if fnmatch.fnmatchcase(task.name, pattern))
    if not chosen:
        names = sorted({task.name for task in tasks})
        shown = ", ".join(names[:8])
        if len(names) > 8:
            shown += f" and {len(names) - 8} more; pretune tune INPUT --trials 0 --out DIR lists all"
        raise OptionError(f"no task matches {pattern!r}; tasks are: {shown}")
    return chosen
