"""Rank traces that already exist, without measuring: what ``pretune rank`` does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretune.errors import InputError, OptionError

if TYPE_CHECKING:
    from pretune.intake import Task

FORMS = (
    "a trace [instructions, decisions], a record of records.jsonl, or a line of MetaSchedule's "
    "database_tuning_record.json"
)


@dataclass(frozen=True)
class TraceLine:
    """One trace of a file.

    Attributes
    ----------
    number : int
        Its line, from 1.
    trace : list
        ``[instructions, decisions]``.
    task_id : str or None
        The task, where the line names it.
    latency : float or None
        Seconds, where the line holds a measurement.
    """

    number: int
    trace: list[Any]
    task_id: str | None = None
    latency: float | None = None


def read_traces(path: str | Path) -> list[TraceLine]:
    """Read a file of traces, one JSON value a line; lines without a trace (default schedules) are left out.

    Raises
    ------
    InputError
        If the file is missing or empty, holds no trace, or a line is none of the known forms.
    """
    from pretune.intake.files import check_file

    path = Path(path).expanduser()
    check_file(path)
    lines: list[TraceLine] = []
    for number, text in enumerate(path.read_text(errors="replace").splitlines(), start=1):
        if not text.strip():
            continue
        try:
            found = _read_line(number, json.loads(text))
        except (ValueError, TypeError, KeyError, IndexError):
            raise InputError(f"{path}, line {number}: expected {FORMS}") from None
        if found is not None:
            lines.append(found)
    if not lines:
        raise InputError(f"{path} holds no trace; each line is {FORMS}")
    return lines


def _read_line(number: int, value: Any) -> TraceLine | None:
    if isinstance(value, dict):  # ours
        if value["trace"] is None:
            return None
        latency = min(value["latencies"]) if value.get("ok") and value.get("latencies") else None
        return TraceLine(number, _trace(value["trace"]), value.get("task_id"), latency)
    if isinstance(value[0], int):  # MetaSchedule's: [workload, [trace, run_secs, target, arguments]]
        trace, seconds = value[1][0], value[1][1]
        latency = sum(seconds) / len(seconds) if seconds else None
        return TraceLine(number, _trace(trace), None, latency)
    return TraceLine(number, _trace(value))


def _trace(value: Any) -> list[Any]:
    insts, decisions = value
    for name, inputs, attrs, outputs in insts:
        if not isinstance(name, str) or not all(isinstance(x, list) for x in (inputs, attrs, outputs)):
            raise ValueError("not an instruction")
    for index, _decision in decisions:
        insts[index]
    return [insts, decisions]


def choose_tasks(
    tasks: Sequence[Task], lines: Sequence[TraceLine], op: str | None
) -> list[tuple[Task, list[TraceLine]]]:
    """Give each trace to its task: the one that the line names, else the only one that `op` leaves.

    Raises
    ------
    OptionError
        If several tasks could be meant, with their names.
    InputError
        If no line belongs to a task of the program.
    """
    from pretune.intake import select_tasks

    chosen = select_tasks(tasks, op)
    by_id = {task.task_id: task for task in chosen}
    unnamed = [line for line in lines if line.task_id is None]
    if unnamed and len(chosen) > 1:
        names = ", ".join(task.name for task in chosen[:12]) + (" ..." if len(chosen) > 12 else "")
        raise OptionError(
            f"line {unnamed[0].number} does not say which of {len(chosen)} tasks it belongs to; "
            f"choose one with --op: {names}"
        )
    groups: dict[str, list[TraceLine]] = {}
    for line in lines:
        task_id = line.task_id or next(iter(by_id))
        if task_id in by_id:
            groups.setdefault(task_id, []).append(line)
    if not groups:
        names = ", ".join(task.name for task in chosen[:12])
        raise InputError(f"no trace is for a task of this program ({names}); check INPUT, --shape and --op")
    return [(task, groups[task.task_id]) for task in chosen if task.task_id in groups]


def rank(
    source: Any,
    traces: str | Path,
    *,
    target: Any = "native",
    shapes: Mapping[str, Sequence[int]] | None = None,
    op: str | None = None,
    weights: str | Path | None = None,
) -> dict[str, Any]:
    """Score the traces of a file with the world model and order them, fastest first.

    Parameters
    ----------
    source, target, shapes, op, weights
        As in `pretune.tune`.
    traces : str or Path
        JSON lines, see `read_traces`.

    Returns
    -------
    dict
        ``program``, ``target``, ``weights``, and ``tasks``: for each its ``task_id``, ``name`` and
        ``ranking``, a list of ``line``, ``score`` (higher is faster, comparable within the task) and
        ``latency`` (seconds where the line holds a measurement).

    Raises
    ------
    InputError
        If a trace does not apply to its task, besides what `read_traces` and the intake raise.
    """
    from pretune import env
    from pretune.hardware import detect, hardware_for_target, make_target
    from pretune.hub.sources import find_weights
    from pretune.intake import load_program
    from pretune.messages import notice
    from pretune.model import WorldModel

    lines = read_traces(traces)
    machine = detect()
    made = make_target(target, machine)
    hardware = hardware_for_target(made, machine)
    chosen = find_weights(hardware, weights)
    if chosen.notice:
        notice(chosen.notice)
    program = load_program(source, target=made, shapes=shapes)
    groups = choose_tasks(program.tasks, lines, op)
    model = WorldModel(chosen, env.num_threads() or machine.cores)
    return {
        "program": program.name,
        "target": str(made),
        "weights": f"{chosen.config.name} ({chosen.why})",
        "tasks": [
            {"task_id": task.task_id, "name": task.name, "ranking": _rank_task(task, mine, model, hardware)}
            for task, mine in groups
        ],
    }


def _rank_task(task: Task, lines: Sequence[TraceLine], model: Any, hardware: Any) -> list[dict[str, Any]]:
    from pretune.model import TraceScorer
    from pretune.tuning import replay

    checked: set[str] = set()
    for line in lines:
        # Traces of one design space differ in decisions only: the first shows whether they are for this task.
        key = json.dumps(line.trace[0])
        if key in checked:
            continue
        checked.add(key)
        try:
            replay(task.mod, line.trace)
        except Exception as error:
            raise InputError(
                f"line {line.number}: the trace does not apply to {task.name}, or holds an instruction that "
                "this TVM does not know; check INPUT, --shape and --op"
            ) from error
    try:
        scores, _embedding = TraceScorer(task.mod, model, hardware).score([line.trace for line in lines])
    except ValueError as error:
        raise InputError(f"{task.name}: a trace is incomplete: {error}") from error
    order = sorted(range(len(lines)), key=lambda i: -float(scores[i]))
    return [{"line": lines[i].number, "score": float(scores[i]), "latency": lines[i].latency} for i in order]
