"""From networks to the file of unique tasks that `collect` measures."""

from __future__ import annotations

import functools
import gzip
import hashlib
import importlib.metadata
import importlib.util
import multiprocessing
import operator
import os
import re
import resource
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from .blocks import Network

PER_NETWORK = 30
"""Most tasks a network gives, so that no family outweighs the others."""

MIN_WORK = 4096
"""Fewest operations or elements of a task: below, a call's overhead is all that a clock sees."""


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
        "train" if any of the networks is for training, else "validation".
    name : str
        Name of the task's function.
    weight : int
        Sum of `weights`.
    shapes : tuple of (shape, dtype)
        The function's buffers, inputs first.
    flops : float
        Operations of one call.
    decisions : int
        Sampling decisions in all its design spaces; 0 if there is nothing to tune, -1 if TVM
        fails to make them.
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


def make_target(target: Any) -> Any:
    """A `tvm.target.Target` of itself, a dict or JSON."""
    import tvm

    if isinstance(target, str) and target.lstrip().startswith("{"):
        target = msgspec.json.decode(target)
    return target if isinstance(target, tvm.target.Target) else tvm.target.Target(target)


def tasks_of_module(module: Any, inputs: tuple, target: Any, name: str = "program") -> tuple[Any, ...]:
    """Tasks of a PyTorch module, through ``torch.export`` and the product's intake."""
    import torch

    from pretune.intake import program_from_exported

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        exported = torch.export.export(module.eval(), inputs, strict=False)
        return program_from_exported(exported, target=make_target(target), name=name).tasks


def tasks_of(network: Network, target: Any) -> tuple[Any, ...]:
    """Tasks of a network, heaviest first.

    Parameters
    ----------
    network : Network
        One of `NETWORKS`.
    target : tvm.target.Target, dict or str
        What the program would be compiled for.

    Returns
    -------
    tuple of pretune.intake.Task

    Raises
    ------
    pretune.errors.InputError
        If TVM cannot import it.
    """
    import torch

    torch.manual_seed(0)
    module, inputs = network.build()
    return tasks_of_module(module, inputs, target, network.name)


def forbidden_task_ids(eval_file: Path, target: Any) -> frozenset[str]:
    """Identities of every task of an evaluation suite, which training must not see.

    Parameters
    ----------
    eval_file : Path
        Python file that defines ``SUBGRAPHS``: name to an object whose ``build()`` gives a module and inputs.
    target : tvm.target.Target, dict or str
        As for `tasks_of`; an identity depends on it only as far as the intake's passes do.
    """
    ids: set[str] = set()
    for name, subgraph in load_subgraphs(Path(eval_file)).items():
        module, inputs = subgraph.build()
        ids.update(task.task_id for task in tasks_of_module(module, inputs, target, name))
    return frozenset(ids)


def load_subgraphs(path: Path) -> Mapping[str, Any]:
    """``SUBGRAPHS`` of a suite file."""
    name = f"pretune_suite_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module.SUBGRAPHS


def count_decisions(task: Any, target: Any) -> int:
    """Sampling decisions in all design spaces of a task: 0 for a single candidate, -1 if TVM fails."""
    from tvm.s_tir import meta_schedule as ms

    context = ms.TuneContext(
        mod=task.mod, target=make_target(target), space_generator="post-order-apply", task_name=task.name
    )
    try:
        return sum(len(space.trace.decisions) for space in context.generate_design_space())
    except Exception as error:  # a schedule rule that does not fit; the type varies with TVM's version
        print(f"no design space for {task.name}: {error}", file=sys.stderr)
        return -1


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
    """At most `limit` tasks, in turn from each kind, those of a kind spread evenly over their size."""
    kinds: dict[str, list[CorpusTask]] = {}
    for task in sorted(tasks, key=lambda task: (task.flops, task.id)):
        kinds.setdefault(kind_of(task), []).append(task)
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
        step = (len(members) - 1) / (count - 1) if count > 1 else 0.0
        # A single member of many stands in the middle, several reach from the smallest to the largest.
        places = [round(i * step) for i in range(count)] if count > 1 else [len(members) // 2]
        chosen += [members[place] for place in places]
    return chosen


def build_corpus(
    out: Path,
    target: Any,
    networks: Iterable[str] | None = None,
    *,
    forbidden: frozenset[str] = frozenset(),
    keep_all: bool = False,
    per_network: int = PER_NETWORK,
    timeout: int = 120,
) -> int:
    """Write the unique tasks of many networks, one JSON line each (`CorpusTask`), gzipped.

    Each network is exported in a process of its own with a limit of CPU time, and what it gave is kept in the
    folder ``<out>.parts``: running again exports only the networks that are missing there, so empty it when
    a network's definition or the intake has changed. A network that fails is skipped with one warning line.

    Parameters
    ----------
    out : Path
        File to write; replaced at once, when complete, unless no task was found.
    target : tvm.target.Target, dict or str
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
    """
    from .registry import NETWORKS, SPLITS

    names = list(networks) if networks is not None else list(NETWORKS)
    unknown = [name for name in names if name not in NETWORKS]
    if unknown:
        raise KeyError(f"unknown network {unknown[0]!r}; the names are: {', '.join(NETWORKS)}")
    out = Path(out)
    parts = out.with_name(out.name + ".parts")
    parts.mkdir(parents=True, exist_ok=True)
    target = make_target(target)
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
            merged[task.id] = _join(merged.get(task.id), task, name, SPLITS[name])
    if merged:
        # In the order of the identities, which is a random one: any part of the file is a fair sample.
        _write(out, [merged[key] for key in sorted(merged)])
    return len(merged)


def load_corpus(path: Path) -> Iterator[CorpusTask]:
    """Read a corpus file line by line."""
    decoder = msgspec.json.Decoder(CorpusTask)
    with gzip.open(path, "rb") as lines:
        for line in lines:
            yield decoder.decode(line)


def _tunable(task: CorpusTask) -> bool:
    elements = max(functools.reduce(operator.mul, shape, 1) for shape, _ in task.shapes)
    return task.decisions > 0 and max(task.flops, elements) >= MIN_WORK


def _join(known: CorpusTask | None, task: CorpusTask, network: str, split: str) -> CorpusTask:
    if known is None:
        return msgspec.structs.replace(task, networks=(network,), split=split)
    return msgspec.structs.replace(
        known,
        networks=(*known.networks, network),
        weights=(*known.weights, task.weight),
        weight=known.weight + task.weight,
        # What a training network has too cannot validate anything.
        split="train" if "train" in (known.split, split) else "validation",
    )


def _write(path: Path, tasks: Iterable[CorpusTask]) -> None:
    encoder = msgspec.json.Encoder()
    partial = path.with_name(path.name + ".partial")
    # Without a time stamp, the same tasks give the same bytes.
    with partial.open("wb") as file, gzip.GzipFile("", "wb", 6, file, mtime=0) as lines:
        for task in tasks:
            lines.write(encoder.encode(task) + b"\n")
    partial.replace(path)


def _export_in_child(network: Network, target: Any, part: Path, timeout: int) -> str | None:
    """Export in a forked process, whose imports are then paid once; return what went wrong, in one line."""
    import torch  # noqa: F401
    import tvm  # noqa: F401

    from pretune.compat import setup_tvm

    setup_tvm(str(target.kind.name))
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


def _export(network: Network, target: Any, part: Path, timeout: int, sender: Any) -> None:
    import torch
    import tvm

    # TVM's C++ side writes many warnings to the standard error; they are kept beside the result.
    with part.with_name(part.name + ".log").open("wb") as log:
        os.dup2(log.fileno(), 2)
    resource.setrlimit(resource.RLIMIT_CPU, (timeout, timeout + 5))
    torch.set_num_threads(1)
    try:
        rows = []
        for task in tasks_of(network, target):
            rows.append(
                CorpusTask(
                    id=task.task_id,
                    networks=(network.name,),
                    weights=(task.weight,),
                    split="",
                    name=str(task.name),
                    weight=task.weight,
                    shapes=task.args,
                    flops=task.flops,
                    decisions=count_decisions(task, target),
                    mod=str(tvm.ir.save_json(task.mod)),
                )
            )
        _write(part, rows)
        sender.send(None)
    except Exception as error:
        text = " ".join(str(error).split())
        traceback.print_exc()
        sender.send(f"{type(error).__name__}: {text[:300]}")


def main(argv: list[str] | None = None) -> int:
    """Command line of `build_corpus`."""
    import argparse

    parser = argparse.ArgumentParser(prog="pretune_export.networks", description="Write the corpus of tasks.")
    parser.add_argument("out", type=Path, help="file to write, .jsonl.gz")
    parser.add_argument("--target", required=True, help="TVM target as JSON")
    parser.add_argument("--only", help="names of networks, with commas between")
    parser.add_argument("--exclude", type=Path, help="suite file whose subgraphs are left out")
    parser.add_argument("--all", action="store_true", help="keep tasks with nothing to tune")
    parser.add_argument("--per-network", type=int, default=PER_NETWORK)
    parser.add_argument("--timeout", type=int, default=120, help="CPU seconds for each network")
    options = parser.parse_args(argv)
    forbidden = forbidden_task_ids(options.exclude, options.target) if options.exclude else frozenset()
    count = build_corpus(
        options.out,
        options.target,
        options.only.split(",") if options.only else None,
        forbidden=forbidden,
        keep_all=options.all,
        per_network=options.per_network,
        timeout=options.timeout,
    )
    print(count)
    return 0 if count else 1
