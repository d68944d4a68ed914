"""TVM's traces as plain JSON values: ``[instructions, decisions]``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tvm.s_tir.schedule import Trace


def trace_to_json(trace: Trace | Sequence[Any] | None) -> list[Any]:
    """``[instructions, decisions]`` of a trace in plain Python values.

    None is no trace: TVM annotates what has one as if it might have none.

    ``Trace.as_json`` leaves TVM's IntImm in it, which no JSON encoder takes.
    """
    assert trace is not None
    return plain(trace if isinstance(trace, list | tuple) else trace.as_json())  # pyright: ignore


def plain(value: Any) -> Any:
    """Turn TVM's and numpy's values into Python's own, which any encoder takes."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # TVM's strings are a subclass, which encoders refuse
    if isinstance(value, Mapping) or hasattr(value, "items"):
        return {plain(key): plain(item) for key, item in value.items()}
    if hasattr(value, "value"):  # IntImm, FloatImm
        return value.value
    if hasattr(value, "item") and not hasattr(value, "__len__"):  # numpy scalar
        return value.item()
    return [plain(item) for item in value]


def serial(trace: Sequence[Any]) -> list[Any]:
    """A trace as `trace_to_json` makes it without the postprocessing that makes loops parallel."""
    insts, decisions = trace
    end = next((i for i, inst in enumerate(insts) if inst[0] == "EnterPostproc"), len(insts))
    return [[inst for i, inst in enumerate(insts) if i < end or inst[0] != "Parallel"], decisions]


def sampling_indices(insts: Sequence[Sequence[Any]]) -> list[int]:
    """Positions of the instructions that take a decision."""
    return [i for i, inst in enumerate(insts) if inst[0].startswith("Sample")]


def split_trace(insts: Sequence[Any], decisions: Sequence[Any]) -> tuple[list[Any], list[list[int]]]:
    """Separate what is scheduled from what is decided, and drop the postprocessing.

    Parameters
    ----------
    insts : sequence of [name, inputs, attrs, outputs]
    decisions : sequence of [index of an instruction, decision]

    Returns
    -------
    insts : list
        Instructions before ``EnterPostproc``.
    decisions : list of list of int
        One for each of their `sampling_indices`, in that order.

    Raises
    ------
    ValueError
        If a decision is missing.
    """
    end = next((i for i, inst in enumerate(insts) if inst[0] == "EnterPostproc"), len(insts))
    body = list(insts[:end])
    by_inst = {int(i): list(d) if isinstance(d, list | tuple) else [d] for i, d in decisions}
    sampling = sampling_indices(body)
    if missing := [i for i in sampling if i not in by_inst]:
        raise ValueError(f"instruction {missing[0]} ({body[missing[0]][0]}) has no decision")
    return body, [by_inst[i] for i in sampling]
