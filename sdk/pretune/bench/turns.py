"""What the sides of a comparison chose, built as each builds it and timed in turns."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from pretune.bench.found import Found

if TYPE_CHECKING:
    from tvm.target import Target

    from pretune.measure import Pool

ROUNDS = 9
"""Turns; the fastest of each program counts, since a busy machine only slows them."""

Program = TypeVar("Program", bound=Hashable)


def chosen(found: Found, mod: Any, target: Target, *, ours: bool) -> Any:
    """The program that a side chose.

    Parameters
    ----------
    found : Found
    mod : tvm.IRModule
        The task's program.
    target : tvm.target.Target
    ours : bool
        Whether pretune chose it, which compiles with its vector math.
    """
    from pretune.tuning import replay
    from pretune.vector_math import vectorise

    if found.trace is None:
        return mod
    tuned = replay(mod, found.trace)
    return vectorise(tuned, target) if ours else tuned


def time_in_turns(pool: Pool, mods: Mapping[Program, Any]) -> dict[Program, float | None]:
    """Fastest turn of each program in seconds; None if it failed. What several share is timed once."""
    from tvm_ffi import structural_hash

    keys = {program: structural_hash(mod) for program, mod in mods.items()}
    distinct = {keys[program]: mod for program, mod in mods.items()}
    timed = pool.interleave(list(distinct.values()), rounds=ROUNDS)
    fastest = {key: one.latency if one.ok else None for key, one in zip(distinct, timed, strict=True)}
    return {program: fastest[key] for program, key in keys.items()}
