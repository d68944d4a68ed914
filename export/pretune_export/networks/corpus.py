"""From networks to the file of unique tasks that `collect` measures."""

from __future__ import annotations

import functools
import gzip
import hashlib
import importlib.metadata
import multiprocessing
import operator
import os
import re
import resource
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pretune.errors import InputError, OptionError
from pretune.intake import load_program
from pretune.space import TaskSpace
from pretune_export.suite import load_suite, program_of_module, tasks_of_module

from .blocks import Network

if TYPE_CHECKING:
    from tvm.target import Target

    from pretune.intake import Task

GZIP = b"\x1f\x8b"
"""How a compressed file begins."""

PER_NETWORK = 30
"""Most tasks a network gives, so that no family outweighs the others."""

TIMEOUT = 600
"""CPU seconds for one network: making the design spaces of all its tasks takes most of them."""

MIN_WORK = 4096
"""Fewest operations or elements of a task: below, a call's overhead is all that a clock sees."""

LEAST_CHOICE = 16
"""Schedules of a task, at least: the order of fewer says little."""


class CorpusTask(msgspec.Struct, frozen=True):
    """One line of a corpus file.

    Attributes
    ----------
    id : str
        `pretune.intake.Task.task_id`.
    networks : tuple of str
        Networks that have the task.
    weights : tuple of int
        How often each of them calls it, in the same order.
    split : str
        "train" if any of the networks is for training, else "validation"; "test" for the tasks of a suite.
    name : str
        Name of the task's function.
    weight : int
        Sum of `weights`.
    shapes : tuple of (shape, dtype)
        The function's buffers, inputs first.
    flops : float
        Operations of one call.
    decisions : int
        Sampling decisions in all its design spaces; 0 if they hold fewer schedules than `LEAST_CHOICE`, -1 if
        TVM fails to make them.
    mod : str
        The module as `tvm.ir.save_json` writes it.
    """

    id: str
    networks: tuple[str, ...]
    weights: tuple[int, ...]
    split: str
    name: str
    weight: int
    shapes: tuple[tuple[tuple[int, ...], str], ...]
    flops: float
    decisions: int
    mod: str


def tasks_of(network: Network, target: Target) -> tuple[Task, ...]:
    """Tasks of a network, heaviest first.

    Parameters
    ----------
    network : Network
        One of `NETWORKS`.
    target : tvm.target.Target
        What the program would be compiled for.

    Raises
    ------
    pretune.errors.InputError
        If TVM cannot import it.
    """
    import torch

    from .precision import half, quantise

    torch.manual_seed(0)
    built = network.build()
    if network.dtype in ("float16", "bfloat16"):
        built = half(built, getattr(torch, network.dtype))
    program = program_of_module(*built, target=target, name=network.name)
    if network.dtype == "int8":
        program = load_program(quantise(program.mod), target=target)
    return program.tasks


def suite_tasks(suite: Path, target: Target) -> Iterator[tuple[str, Task]]:
    """Name of the subgraph and task, for every task of a suite file (`pretune_export.suite.load_suite`)."""
    for name, subgraph in load_suite(suite).items():
        module, inputs = subgraph.build()
        for task in tasks_of_module(module, inputs, target=target, name=name):
            yield name, task


def forbidden_task_ids(suite: Path, target: Target) -> frozenset[str]:
    """Identities of every task of an evaluation suite, which training must not see.

    Parameters
    ----------
    suite : Path
        Python file that defines ``SUBGRAPHS``: name to an object whose ``build()`` gives a module and inputs.
    target : tvm.target.Target
        As for `tasks_of`; an identity depends on it only as far as the intake's passes do.

    Raises
    ------
    InputError
        If the file is no suite.
    """
    return frozenset(task.task_id for _name, task in suite_tasks(suite, target))


def build_suite(suite: Path, out: Path, target: Target) -> int:
    """Write the unique tasks of an evaluation suite as a corpus file, for tests only.

    Their split is ``"test"``, their networks are the suite's subgraphs.

    Returns
    -------
    int
        Number of tasks written, those with nothing to decide included.
    """
    merged: dict[str, CorpusTask] = {}
    for name, task in suite_tasks(suite, target):
        line = corpus_task(task, name, "test", target)
        merged[line.id] = join(merged.get(line.id), line, name, "test")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_corpus(out, merged.values())
    return len(merged)


def corpus_task(task: Task, network: str, split: str, target: Target) -> CorpusTask:
    """A task as a line of a corpus file; its design spaces for `target` are made to count decisions."""
    import tvm

    try:
        whole = TaskSpace.generate(task.mod, target)
        decisions = sum(len(space.slots) for space in whole.spaces) if whole.size >= LEAST_CHOICE else 0
    except Exception as error:  # a schedule rule that does not fit; the type varies with TVM's version
        print(f"no design space for {task.name}: {error}", file=sys.stderr)
        decisions = -1
    return CorpusTask(
        id=task.task_id,
        networks=(network,),
        weights=(task.weight,),
        split=split,
        name=str(task.name),
        weight=task.weight,
        shapes=task.args,
        flops=task.flops,
        decisions=decisions,
        mod=str(tvm.ir.save_json(task.mod)),
    )


_ANCHORS = ("matmul", "softmax", "layer_norm", "group_norm", "instance_norm", "max_pool", "avg_pool", "argm")


def kind_of(task: CorpusTask) -> str:
    """What a task computes, so that a choice of tasks can be a mixed one: ``conv2d 1x1``, ``matmul row``."""
    name = task.name
    inputs = [shape for shape, _ in task.shapes[:-1]]
    convolution = re.search(r"conv(\d)d\d*(_transpose)?", name)
    if convolution:
        rank = int(convolution[1]) + 2
        data, weight = ([shape for shape in inputs if len(shape) == rank] + [(), ()])[:2]
        kind = f"conv{convolution[1]}d{convolution[2] or ''}"
        if not weight or convolution[2]:
            return kind
        if weight[1] < data[1]:
            return f"{kind} {'depthwise' if weight[1] == 1 else 'grouped'}"
        return f"{kind} 1x1" if set(weight[2:]) == {1} else kind
    kind = next((anchor for anchor in _ANCHORS if anchor in name), None)
    if kind == "matmul":
        left = next((shape for shape in inputs if len(shape) > 1), ())
        # A row against a matrix is bound by memory, and products without weights are batched.
        if left and functools.reduce(operator.mul, left[:-1]) == 1:
            return "matmul row"
        return "matmul batched" if sum(len(shape) > 2 for shape in inputs) > 1 else "matmul"
    if kind:
        return kind
    return "reduction" if re.search(r"mean|sum|max|min|variance", name) else "other"


def pick(tasks: Iterable[CorpusTask], limit: int) -> list[CorpusTask]:
    """At most `limit` tasks, in turn from each kind, those of a kind spread evenly over their size.

    Kinds that work most come first: where there are more of them than `limit`, the others give none.
    """
    members_of: dict[str, list[CorpusTask]] = {}
    for task in sorted(tasks, key=lambda task: (task.flops, task.id)):
        members_of.setdefault(kind_of(task), []).append(task)
    work = {kind: sum(task.flops for task in members) for kind, members in members_of.items()}
    kinds = {kind: members_of[kind] for kind in sorted(members_of, key=lambda kind: -work[kind])}
    share = dict.fromkeys(kinds, 0)
    left = min(limit, sum(map(len, kinds.values())))
    while left:
        for kind, members in kinds.items():
            if left and share[kind] < len(members):
                share[kind] += 1
                left -= 1
    chosen: list[CorpusTask] = []
    for kind, members in kinds.items():
        count = share[kind]
        if not count:
            continue  # there are more kinds than tasks to pick
        step = (len(members) - 1) / (count - 1) if count > 1 else 0.0
        # A single member of many stands in the middle, several reach from the smallest to the largest.
        places = [round(i * step) for i in range(count)] if count > 1 else [len(members) // 2]
        chosen += [members[place] for place in places]
    return chosen


def build_corpus(
    out: Path,
    target: Target,
    networks: Iterable[str] | None = None,
    *,
    forbidden: frozenset[str] = frozenset(),
    keep_all: bool = False,
    per_network: int = PER_NETWORK,
    timeout: int = TIMEOUT,
) -> int:
    """Write the unique tasks of many networks, one JSON line each (`CorpusTask`), gzipped.

    Each network is exported in a process of its own with a limit of CPU time, and what it gave is kept in the
    folder ``<out>.parts``: running again exports only the networks that are missing there, so empty it when
    a network's definition or the intake has changed. A network that fails is skipped with one warning line.

    Parameters
    ----------
    out : Path
        File to write; replaced at once, when complete, unless no task was found.
    target : tvm.target.Target
        Target of the design spaces.
    networks : iterable of str, optional
        Names; all of `NETWORKS` if absent.
    forbidden : frozenset of str
        Task identities to leave out (`forbidden_task_ids`).
    keep_all : bool
        Keep the tasks whose design space has a single candidate as well.
    per_network : int
        Most tasks of one network.
    timeout : int
        CPU seconds for one network.

    Returns
    -------
    int
        Number of tasks written.

    Raises
    ------
    OptionError
        If a name is none of `NETWORKS`.
    """
    from .registry import NETWORKS, SPLITS

    names = list(networks) if networks is not None else list(NETWORKS)
    unknown = [name for name in names if name not in NETWORKS]
    if unknown:
        raise OptionError(f"unknown network {unknown[0]!r}; the names are: {', '.join(NETWORKS)}")
    parts = out.with_name(out.name + ".parts")
    parts.mkdir(parents=True, exist_ok=True)
    # What one target or TVM version gave is not taken for another's.
    key = hashlib.sha256(f"{target} {importlib.metadata.version('apache-tvm')}".encode()).hexdigest()[:8]
    merged: dict[str, CorpusTask] = {}
    for name in names:
        part = parts / f"{name}.{key}.jsonl.gz"
        if not part.exists():
            error = _export_in_child(NETWORKS[name], target, part, timeout)
            if error:
                print(f"warning: network {name} is skipped: {error}", file=sys.stderr, flush=True)
                continue
        found = [
            task for task in load_corpus(part) if task.id not in forbidden and (keep_all or _tunable(task))
        ]
        chosen = pick(found, per_network)
        print(f"{name}: {len(chosen)} of {len(found)} tasks", file=sys.stderr, flush=True)
        for task in chosen:
            merged[task.id] = join(merged.get(task.id), task, name, SPLITS[name])
    if merged:
        # In the order of the identities, which is a random one: any part of the file is a fair sample.
        write_corpus(out, [merged[key] for key in sorted(merged)])
    return len(merged)


def load_corpus(path: Path) -> Iterator[CorpusTask]:
    """Read a corpus file line by line, whether it is compressed or not.

    Raises
    ------
    InputError
        If a line is no task.
    """
    decoder = msgspec.json.Decoder(CorpusTask)
    with path.open("rb") as file:
        packed = file.read(2) == GZIP
        file.seek(0)
        for number, line in enumerate(gzip.GzipFile(fileobj=file) if packed else file, 1):
            try:
                yield decoder.decode(line)
            except msgspec.MsgspecError as error:
                raise InputError(
                    f"{path}: line {number} is no task ({error}); run: pretune-export corpus {path}"
                ) from None


def _tunable(task: CorpusTask) -> bool:
    elements = max(functools.reduce(operator.mul, shape, 1) for shape, _ in task.shapes)
    return task.decisions > 0 and max(task.flops, elements) >= MIN_WORK


def join(known: CorpusTask | None, task: CorpusTask, network: str, split: str) -> CorpusTask:
    """A task as `network` of `split` has it too; `known` is what other networks have made of it."""
    if known is None:
        return msgspec.structs.replace(task, networks=(network,), split=split)
    return msgspec.structs.replace(
        known,
        networks=(*known.networks, network),
        weights=(*known.weights, task.weight),
        weight=known.weight + task.weight,
        # What a training network has too cannot validate anything.
        split="train" if "train" in (known.split, split) else split,
    )


def write_corpus(path: Path, tasks: Iterable[CorpusTask]) -> None:
    """Write a corpus file, gzipped; it appears when it is complete."""
    encoder = msgspec.json.Encoder()
    partial = path.with_name(path.name + ".partial")
    # Without a time stamp, the same tasks give the same bytes.
    with partial.open("wb") as file, gzip.GzipFile("", "wb", 6, file, mtime=0) as lines:
        for task in tasks:
            lines.write(encoder.encode(task) + b"\n")
    partial.replace(path)


def _export_in_child(network: Network, target: Target, part: Path, timeout: int) -> str | None:
    """Export in a forked process, whose imports are then paid once; return what went wrong, in one line."""
    import torch  # noqa: F401
    import tvm  # noqa: F401

    from pretune.compat import setup_tvm

    setup_tvm(target)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(False)
    child = context.Process(target=_export, args=(network, target, part, timeout, sender), daemon=True)
    child.start()
    sender.close()
    try:
        error = receiver.recv()
    except EOFError:
        error = None
    child.join()
    if child.exitcode == -24:  # SIGXCPU
        return f"not exported within {timeout} s of CPU time"
    if child.exitcode and not error:
        return f"its process ended with {child.exitcode}"
    return error


def _export(network: Network, target: Target, part: Path, timeout: int, sender: Any) -> None:
    import torch

    # TVM's C++ side writes many warnings to the standard error; they are kept beside the result.
    with part.with_name(part.name + ".log").open("wb") as log:
        os.dup2(log.fileno(), 2)
    resource.setrlimit(resource.RLIMIT_CPU, (timeout, timeout + 5))
    torch.set_num_threads(1)
    try:
        write_corpus(
            part, [corpus_task(task, network.name, "", target) for task in tasks_of(network, target)]
        )
        sender.send(None)
    except Exception as error:
        text = " ".join(str(error).split())
        traceback.print_exc()
        sender.send(f"{type(error).__name__}: {text[:300]}")
