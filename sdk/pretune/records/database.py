"""Stock MetaSchedule databases, written so that TVM alone can load and apply them at any moment."""

from __future__ import annotations

import errno
import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretune.errors import one_line
from pretune.messages import explain_os_errors, notice
from pretune.records.record import Record, target_key

if TYPE_CHECKING:
    from tvm.target import Target

    from pretune.intake import Task

WORKLOADS = "database_workload.json"
RECORDS = "database_tuning_record.json"


def best_records(records: Iterable[Record], task_id: str, key: str) -> list[Record]:
    """Rank what was measured of one task on one target.

    Where the finalists were timed in turns after the last trial, only they count, since timings of
    different moments do not compare. Traces that failed as finalists never count.

    Parameters
    ----------
    records : iterable of Record
        In the order they were written, of any tasks and targets.
    task_id : str
        The task.
    key : str
        The `target_key` of the target.

    Returns
    -------
    ranked : list of Record
        One per trace, fastest first. The default schedule, with trace None, is one of them.
    """
    mine = [record for record in records if record.task_id == task_id and record.target_key == key]
    wrong = {record.trace_key for record in mine if record.kind == "final" and not record.ok}
    finals = latest_finals(mine)
    by_trace: dict[str, Record] = {}
    for record in finals or mine:
        known = by_trace.get(record.trace_key)
        if not record.ok or record.trace_key in wrong:
            continue
        if (
            known is None
            or record.kind == "final"
            or (known.kind == "trial" and record.latency < known.latency)
        ):
            by_trace[record.trace_key] = record
    return sorted(by_trace.values(), key=lambda record: record.latency)


def latest_finals(records: Sequence[Record]) -> list[Record]:
    """Of the records of one task on one target, the finals after the last trial that are ok."""
    last_trial = max((at for at, record in enumerate(records) if record.kind == "trial"), default=-1)
    return [record for record in records[last_trial + 1 :] if record.ok]


UNMEASURED_S = 1e6
"""MetaSchedule has no record without a time: a choice that nobody measured comes after all that were."""


def write_database(
    records: Iterable[Record],
    tasks: Sequence[Task],
    target: Target,
    directory: str | Path,
    k: int = 8,
    unmeasured: Mapping[str, list[Any]] | None = None,
) -> int:
    """Write the best schedules as a JSON database that stock TVM loads, queries and applies.

    A query takes no notice of the target (it may return a schedule for another one), so a folder holds one
    target: records of another are replaced. Records of other tasks on this target stay. A task whose
    default schedule is the fastest is left out, which makes ``compile_relax`` leave it unscheduled:
    MetaSchedule has no other way to say it.

    Parameters
    ----------
    records : iterable of Record
        In the order they were written.
    tasks : sequence of Task
        The tasks to write; records of others are ignored.
    target : tvm.target.Target
        Records measured on other targets are ignored.
    directory : str or Path
        Created if missing. Its two files are replaced one after the other such that whatever moment a kill
        comes at, they load and agree.
    k : int
        Records per task, at most.
    unmeasured : mapping of str to list, optional
        Traces by task id, chosen without measuring; written with `UNMEASURED_S` as their time, and only
        for tasks without measured schedules.

    Returns
    -------
    count : int
        Tasks with a schedule.

    Raises
    ------
    OutputError
        If the folder cannot be written; the old database stays.
    """
    from pretune.compat import setup_tvm

    setup_tvm(target)
    from tvm.s_tir import meta_schedule as ms

    directory = Path(directory)
    key = target_key(target)
    records = list(records)
    with explain_os_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        for leftover in directory.glob(".new-*"):  # of a killed run
            shutil.rmtree(leftover, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=directory))
        try:
            for name in (WORKLOADS, RECORDS):
                (temporary / name).touch()
            kept = _copy_old(ms, directory, temporary, tasks, key)
            database = ms.database.JSONDatabase(work_dir=str(temporary))
            for record in kept:
                database.commit_tuning_record(record)
            count, written = 0, len(kept)
            for task in tasks:
                ranked = best_records(records, task.task_id, key)
                default = next((at for at, record in enumerate(ranked) if record.trace is None), len(ranked))
                traces = [(r.trace, r.latency, f"trial {r.trial}") for r in ranked[: min(default, k)]]
                if not ranked and unmeasured and task.task_id in unmeasured:
                    traces = [(unmeasured[task.task_id], UNMEASURED_S, "the model's choice")]
                faster = _replay(ms, database, task, target, traces)
                for record in faster:
                    database.commit_tuning_record(record)
                count += bool(faster)
                written += len(faster)
            # TVM does not notice a full disk, and loading what it leaves then ends the process.
            whole = _is_whole(temporary / WORKLOADS) and _is_whole(temporary / RECORDS)
            if not whole or len((temporary / RECORDS).read_bytes().splitlines()) != written:
                raise OSError(errno.ENOSPC, "")
            # The new workloads begin with the old ones, so the old records agree with them too.
            (temporary / WORKLOADS).replace(directory / WORKLOADS)
            (temporary / RECORDS).replace(directory / RECORDS)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return count


def _copy_old(ms: Any, old: Path, new: Path, tasks: Sequence[Task], key: str) -> list[Any]:
    """Copy the old workloads; return the old tuning records of other tasks on the same target."""
    if not (old / WORKLOADS).exists() or not (old / RECORDS).exists():
        return []
    if not _is_whole(old / WORKLOADS) or not _is_whole(old / RECORDS):
        notice(f"{old}: the database there is damaged; wrote it anew from the records")
        return []
    shutil.copyfile(old / WORKLOADS, new / WORKLOADS)
    database = ms.database.JSONDatabase(work_dir=str(old))
    # Looked up before committing: that would write to the old files.
    known = [database.commit_workload(task.mod) for task in tasks if database.has_workload(task.mod)]
    return [
        record
        for record in database.get_all_tuning_records()
        if record.target is not None
        and target_key(record.target) == key
        and not any(record.workload.same_as(workload) for workload in known)
    ]


def _replay(
    ms: Any, database: Any, task: Task, target: Target, traces: Sequence[tuple[Any, float, str]]
) -> list[Any]:
    """Tuning records of one task, as TVM has them, of (trace, seconds, name to report it under)."""
    if not traces:
        return []
    arguments = ms.arg_info.ArgInfo.from_prim_func(task.mod["main"])
    workload = database.commit_workload(task.mod)
    result = []
    for trace, seconds, name in traces:
        try:
            replayed = ms.database.TuningRecord.from_json([trace, None, None, None], workload)
        except Exception as error:  # of whatever type the instruction raises that this TVM does not know
            notice(f"{task.name}: {name} does not replay and is left out: {one_line(error)}")
            continue
        # One latency, the fastest repeat: MetaSchedule ranks by the mean.
        result.append(ms.database.TuningRecord(replayed.trace, workload, [seconds], target, arguments))
    return result


def _is_whole(path: Path) -> bool:
    """Whether every line is JSON: TVM segfaults on a blank line and fails on a torn one."""
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        return False
    try:
        for line in data.splitlines():
            json.loads(line)
    except ValueError:
        return False
    return True
