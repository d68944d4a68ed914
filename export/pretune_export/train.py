"""Train the world model: multi-step rollouts against the encoder's own states, ranking per task."""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import pickle
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from pretune.bench.stats import spearman
from pretune.errors import OptionError
from pretune.features import State
from pretune.features.schema import SCHEMA_VERSION, STATE_BLOCK
from pretune.model.weights import ISA_LEVELS
from pretune_export.dataset import Group, TaskData, group_candidates, read_parquet
from pretune_export.nets import Sizes, WorldModelNet
from pretune_export.pretrain import load_pretrained
from pretune_export.trajectories import FINAL, Replayer, choose_steps


class TrainConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Everything a training run depends on. Files in ``configs/`` hold one each.

    Attributes
    ----------
    datasets : list of str
        Dataset folders: their training tasks are trained on, their validation tasks choose the epoch.
    test_datasets : list of str
        Dataset folders that only `evaluate` reads.
    isa_level : str
        The instruction set level that the weights are for; by default the lowest of the datasets. What was
        measured at other levels is trained on too, but chooses no epoch.
    epochs, tasks_per_batch, candidates_per_task : int
    learning_rate, weight_decay : float
    states_per_candidate : int
        Real intermediate states per trajectory, beside the final one.
    candidates_with_states : int
        Candidates per task whose real states are read.
    align, contrast, decode, true_rank : float
        Weights of the losses beside the ranking of predicted latents.
    regression : float
        Weight of the scale of the scores within the ranking loss; infinite for regression alone.
    pretrained : str
        ``pretrained.pt`` of ``pretune-export pretrain``: encoder and transition to start from, if any.
    average : float
        Decay per step of the moving average of the weights that is kept (Polyak and Juditsky, 1992).
    without : str
        One part to leave out, to see what it is worth (`ABLATIONS`).
    """

    datasets: list[str]
    test_datasets: list[str] = msgspec.field(default_factory=list)
    isa_level: str = ""
    epochs: int = 40
    tasks_per_batch: int = 8
    candidates_per_task: int = 48
    learning_rate: float = 2e-3
    weight_decay: float = 1e-4
    states_per_candidate: int = 2
    candidates_with_states: int = 16
    align: float = 1.0
    contrast: float = 0.1
    decode: float = 0.5
    true_rank: float = 0.5
    regression: float = 0.3
    pretrained: str = ""
    average: float = 0.995
    without: str = ""
    seed: int = 0
    threads: int = 2
    validate_every: int = 2
    sizes: dict[str, int] = msgspec.field(default_factory=dict)


ABLATIONS = {
    "transition": "no transition: the ranker sees the initial state",
    "actions": "no action features in the ranker",
    "state": "no program state in the ranker",
    "hardware": "no hardware vector",
    "ranking": "regression instead of ranking",
    "rollouts": "single steps instead of rollouts",
}
"""Parts that `TrainConfig.without` can leave out."""


@dataclass
class Machine:
    """A machine that measured: its hardware vector, cores and instruction set level."""

    vector: np.ndarray
    cores: int
    isa_level: str


@dataclass
class Data:
    """Encoded data: tasks by split, machines by name."""

    train: list[TaskData] = field(default_factory=list)
    validation: list[TaskData] = field(default_factory=list)
    test: list[TaskData] = field(default_factory=list)
    machines: dict[str, Machine] = field(default_factory=dict)


ENCODED_BY = ("seed", "states_per_candidate", "candidates_with_states")
"""What of a configuration the encoded data depends on, beside the datasets."""

NO_MATTER = ("threads", "datasets", "test_datasets")
"""What of a configuration the weights do not depend on: only the contents of the datasets count."""


def data_key(config: TrainConfig, datasets: Sequence[str]) -> str:
    """Hash of all that encoded datasets depend on: their files, and how real states are chosen."""
    settings = {name: getattr(config, name) for name in ENCODED_BY}
    digest = hashlib.sha256(json.dumps([settings, SCHEMA_VERSION]).encode())
    for folder in datasets:
        for file in sorted(Path(folder).glob("*.parquet")):
            digest.update(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}".encode())
    return digest.hexdigest()


def run_key(config: TrainConfig) -> str:
    """Hash of all that the weights of a training run depend on: its data and the other settings."""
    settings = {name: v for name, v in msgspec.to_builtins(config).items() if name not in NO_MATTER}
    if config.pretrained:
        settings["pretrained"] = hashlib.sha256(Path(config.pretrained).read_bytes()).hexdigest()
    text = json.dumps([data_key(config, config.datasets), settings], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _prepare(job: tuple[dict, list, dict[str, list[dict]], dict[str, dict], TrainConfig]) -> list[TaskData]:
    """Encode one task's candidates and read real states of some of them. Runs in a worker process."""
    task, spaces, by_machine, machines, config = job
    import tvm

    out = []
    for machine, rows in by_machine.items():
        target = tvm.target.Target(json.loads(machines[machine]["target"]))
        cores = int(machines[machine]["cores"])
        data = group_candidates(task, spaces, rows, machine, cores)
        rng = np.random.default_rng([config.seed, int(task["id"][:8], 16)])
        if config.candidates_with_states:
            replayer = Replayer(tvm.ir.load_json(task["mod"]), target, cores)
            everyone = [
                (g, i) for g in data.groups for i in range(len(g.latency)) if np.isfinite(g.latency[i])
            ]
            picked = rng.permutation(len(everyone))[: config.candidates_with_states]
            for g, i in (everyone[p] for p in picked):
                decisions = [d[i].tolist() for d in g.decisions]
                wanted = choose_steps(g.insts, config.states_per_candidate, rng)
                for step, state in replayer.states(spaces[g.space], decisions, g.insts, wanted).items():
                    g.states[(i, step)] = state
        out.append(data)
    return out


def load_data(config: TrainConfig, cache: Path | None = None, processes: int = 2) -> Data:
    """Read dataset folders and encode them.

    Parameters
    ----------
    config : TrainConfig
    cache : pathlib.Path, optional
        File that keeps what was encoded; made anew when the datasets or the configuration have changed.
    processes : int

    Raises
    ------
    InputError
        If a folder is no dataset.
    OptionError
        If a task of a test dataset is one of the others' too.
    """
    key = data_key(config, config.datasets) + data_key(config, config.test_datasets)
    data = None
    if cache is not None and cache.exists():
        with cache.open("rb") as file:
            if pickle.load(file) == key:  # our own cache, written below; never published
                data = pickle.load(file)
            else:
                print(f"{cache} is of other data: encoding anew", file=sys.stderr, flush=True)
    if data is None:
        data = _encode(config, processes)
        if cache is not None:
            partial = cache.with_name(cache.name + ".partial")
            with partial.open("wb") as file:
                pickle.dump(key, file)
                pickle.dump(data, file)
            partial.replace(cache)
    if config.isa_level:
        data.validation = [
            t for t in data.validation if data.machines[t.groups[0].machine].isa_level == config.isa_level
        ]
    return data


def _encode(config: TrainConfig, processes: int) -> Data:
    data = Data()
    jobs = []
    for task, spaces, by_machine, machines in _choose_tasks(config):
        for name in by_machine:
            machine = machines[name]
            data.machines[name] = Machine(
                np.array(json.loads(machine["vector"]), np.float32),
                int(machine["cores"]),
                machine["isa_level"],
            )
        jobs.append((task, spaces, by_machine, machines, config))
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for n, made in enumerate(pool.imap_unordered(_prepare, jobs, chunksize=4)):
            for task in made:
                if sum(int(np.isfinite(g.latency).sum()) for g in task.groups) < 2:
                    continue  # Nothing to rank.
                getattr(data, task.split).append(task)
            if n % 100 == 0:
                print(f"encoded {n}/{len(jobs)} tasks", flush=True)
    for split in (data.train, data.validation, data.test):
        split.sort(key=lambda t: (t.task, t.groups[0].machine))
    return data


def _choose_tasks(config: TrainConfig) -> list[tuple[dict, list, dict[str, list[dict]], dict[str, dict]]]:
    """Tasks of all datasets with design spaces, rows by machine, and machines; no task is in two splits."""
    found = []
    ids: dict[str, set[str]] = {"train": set(), "validation": set(), "test": set()}
    roles = {"datasets": config.datasets, "test_datasets": config.test_datasets}
    for role, folder in ((role, folder) for role, folders in roles.items() for folder in folders):
        tasks, spaces, rows, machines = read_parquet(Path(folder))
        by_task: dict[str, dict[str, list[dict]]] = defaultdict(lambda: defaultdict(list))
        for machine, members in rows.items():
            for row in members:
                by_task[row["task"]][machine].append(row)
        for name, by_machine in by_task.items():
            task = tasks.get(name)
            if task is None:
                continue
            if task["split"] not in (("test",) if role == "test_datasets" else ("train", "validation")):
                raise OptionError(
                    f"{folder} is in {role}, but its task {name} is of the {task['split']} split; "
                    "test tasks come from: pretune-export suite, all others from: pretune-export corpus"
                )
            ids[task["split"]].add(name)
            found.append((task, spaces[name], dict(by_machine), machines))
    if leaked := sorted(ids["test"] & (ids["train"] | ids["validation"])):
        raise OptionError(
            f"{len(leaked)} tasks of {', '.join(config.test_datasets)} are in a dataset to train on as well, "
            f"such as {leaked[0]}; write that one again: pretune-export dataset --exclude SUITE.py"
        )
    both = ids["train"] & ids["validation"]
    if both:
        print(
            f"{len(both)} training tasks are dropped: other datasets have them for validation",
            file=sys.stderr,
            flush=True,
        )
    return [job for job in found if job[0]["split"] != "train" or job[0]["id"] not in both]


# -- batches -------------------------------------------------------------------------------------------------


@dataclass
class Batch:
    """Candidates of several tasks, padded to the longest trajectory."""

    initial: tuple[Tensor, Tensor, Tensor]
    task: Tensor  # which initial state (and ranking group) each candidate has
    types: Tensor
    actions: Tensor
    mask: Tensor
    summary: Tensor
    hardware: Tensor
    target: Tensor  # negative log latency, minus the task's best; failures far below
    states: tuple[Tensor, Tensor, Tensor] | None
    state_at: Tensor  # [s, 2]: candidate, step


def pack_states(states: list[State]) -> tuple[Tensor, Tensor, Tensor]:
    """Pad programs to the same number of blocks: blocks, loops, mask."""
    most = max(len(s.blocks) for s in states)
    blocks = np.zeros((len(states), most, states[0].blocks.shape[1]), np.float32)
    depth = max(int((s.loops != 0).any(-1).any(0).sum()) for s in states) or 1
    loops = np.zeros((len(states), most, depth, states[0].loops.shape[2]), np.float32)
    mask = np.zeros((len(states), most), np.float32)
    for i, s in enumerate(states):
        n = len(s.blocks)
        blocks[i, :n], loops[i, :n], mask[i, :n] = s.blocks, s.loops[:, :depth], 1.0
    return torch.from_numpy(blocks), torch.from_numpy(loops), torch.from_numpy(mask)


FAILED = 6.0
"""A failed candidate is this far (natural log of latency) below the task's best."""


def make_batch(
    tasks: list[TaskData],
    machines: dict[str, Machine],
    per_task: int,
    rng: np.random.Generator,
    states: bool = True,
) -> Batch:
    """Draw up to `per_task` candidates of each task; the best is always among them."""
    parts: list[tuple[int, Group, np.ndarray, float]] = []
    for t, task in enumerate(tasks):
        sizes = [len(g.latency) for g in task.groups]
        latency = np.concatenate([g.latency for g in task.groups])
        best = float(latency.min())
        chosen = rng.permutation(len(latency))[:per_task]
        chosen = np.unique(np.append(chosen, latency.argmin()))
        offset = 0
        for g, size in zip(task.groups, sizes, strict=True):
            mine = chosen[(chosen >= offset) & (chosen < offset + size)] - offset
            offset += size
            if len(mine):
                parts.append((t, g, mine, best))
    n = sum(len(mine) for _t, _g, mine, _b in parts)
    steps = max(len(g.types) for _t, g, _m, _b in parts)
    width = parts[0][1].actions[0].shape[1]
    types = np.zeros((n, steps), np.int64)
    actions = np.zeros((n, steps, width), np.float32)
    mask = np.zeros((n, steps), bool)
    target = np.zeros(n, np.float32)
    owner = np.zeros(n, np.int64)
    hardware = np.zeros((n, 16), np.float32)
    summary = np.concatenate([g.summary[mine] for _t, g, mine, _b in parts])
    found: list[State] = []
    at: list[tuple[int, int]] = []
    row = 0
    for t, g, mine, best in parts:
        end, count = row + len(mine), len(g.types)
        types[row:end, :count], mask[row:end, :count], owner[row:end] = g.types, True, t
        for s, a in enumerate(g.actions):
            actions[row:end, s] = a if len(a) == 1 else a[mine]
        with np.errstate(divide="ignore"):
            target[row:end] = np.maximum(np.log(best / g.latency[mine]), -FAILED)
        hardware[row:end] = machines[g.machine].vector
        if states and g.states:
            where = {int(i): row + k for k, i in enumerate(mine)}
            for (i, step), state in g.states.items():
                if i in where:
                    found.append(state)
                    at.append((where[i], count - 1 if step == FINAL else step))
        row = end
    return Batch(
        pack_states([t.initial for t in tasks]), torch.from_numpy(owner), torch.from_numpy(types),
        torch.from_numpy(actions), torch.from_numpy(mask), torch.from_numpy(summary),
        torch.from_numpy(hardware), torch.from_numpy(target), pack_states(found) if found else None,
        torch.tensor(at, dtype=torch.int64).reshape(-1, 2),
    )  # fmt: skip


# -- losses --------------------------------------------------------------------------------------------------


def ranking_loss(score: Tensor, target: Tensor, task: Tensor, regression: float) -> Tensor:
    """Pairwise logistic loss within each task, a pair weighted by what choosing wrong costs at the good end.

    The weight of a pair is the difference of ``best / latency``, as the gain differences of LambdaRank
    (Burges, "From RankNet to LambdaRank to LambdaMART", 2010). `regression` adds a Huber loss on centred log
    latencies, so that scores keep the scale of log latency, which the search's posterior relies on; infinite,
    it is the whole loss.
    """
    same = task[:, None] == task[None]
    gain = target.exp()
    delta = gain[:, None] - gain[None]
    weight = torch.where(same & (delta > 0), delta, torch.zeros_like(delta)) + 0.05 * (
        same & (target[:, None] > target[None])
    )
    pair = F.softplus(-(score[:, None] - score[None]) * 2.0)
    loss = (weight * pair).sum() / weight.sum().clamp_min(1e-6)
    if regression > 0:
        groups = int(task.max()) + 1
        ones = torch.ones_like(score)
        count = torch.zeros(groups).index_add_(0, task, ones)
        capped = target.clamp_min(-3.0)
        centre_s = torch.zeros(groups).index_add_(0, task, score) / count
        centre_t = torch.zeros(groups).index_add_(0, task, capped) / count
        scale = F.smooth_l1_loss(score - centre_s[task], capped - centre_t[task], beta=0.3)
        loss = scale if math.isinf(regression) else loss + regression * scale
    return loss


class Decoder(torch.nn.Module):
    """Training only: reads the summary of the program's costliest block back from a latent."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(sizes.latent, 128), torch.nn.ReLU(), torch.nn.Linear(128, len(STATE_BLOCK))
        )

    def forward(self, z: Tensor) -> Tensor:
        return self.net(z)


def predict(net: WorldModelNet, batch: Batch, without: str = "") -> tuple[Tensor, list[Tensor]]:
    """Scores ``[n]`` of a batch, and the latents after each step, ``[n, latent]`` each."""
    z0 = net.encoder(*batch.initial)[batch.task]
    zs = net.rollout(z0, batch.types, batch.actions, batch.mask, truncate=without == "rollouts")
    final = z0 if without == "transition" else zs[-1]
    if without == "rollouts":  # The ranking must not teach the transition through many steps either.
        final = final.detach()
    return rank(net, final, batch, without=without), zs


def rank(
    net: WorldModelNet, z: Tensor, batch: Batch, rows: Tensor | slice = slice(None), without: str = ""
) -> Tensor:
    """Scores of final latents; `rows` says which candidates of the batch they are of."""
    summary, hardware = batch.summary[rows], batch.hardware[rows]
    score, _ = net.ranker(
        torch.zeros_like(z) if without == "state" else z,
        torch.zeros_like(summary) if without == "actions" else summary,
        torch.zeros_like(hardware) if without == "hardware" else hardware,
    )
    return score


def losses(net: WorldModelNet, decoder: Decoder, batch: Batch, config: TrainConfig) -> dict[str, Tensor]:
    """All loss terms of a batch, unweighted."""
    regression = math.inf if config.without == "ranking" else config.regression
    score, zs = predict(net, batch, config.without)
    out = {"rank": ranking_loss(score, batch.target, batch.task, regression)}
    if batch.states is not None:
        true = net.encoder(*batch.states)
        row, step = batch.state_at[:, 0], batch.state_at[:, 1]
        predicted = torch.stack(zs, dim=1)[row, step]
        # Both move: the prediction to the encoder's state, and, more slowly, the state to what can be
        # predicted.
        out["align"] = F.mse_loss(predicted, true.detach()) + 0.1 * F.mse_loss(predicted.detach(), true)
        # Other states of the same batch are negatives, those of the same task the hard ones.
        logits = F.normalize(predicted, dim=-1) @ F.normalize(true, dim=-1).T / 0.1
        out["contrast"] = F.cross_entropy(logits, torch.arange(len(logits)))
        blocks = batch.states[0]
        lead = blocks[..., STATE_BLOCK.index("work_share")].argmax(1)
        goal = blocks[torch.arange(len(blocks)), lead]
        out["decode"] = F.smooth_l1_loss(decoder(predicted), goal) + F.smooth_l1_loss(decoder(true), goal)
        final = step == batch.mask.sum(1)[row] - 1
        if int(final.sum()) > 8:
            rows = row[final]
            true_score = rank(net, true[final], batch, rows, config.without)
            out["true_rank"] = ranking_loss(true_score, batch.target[rows], batch.task[rows], regression)
    return out


# -- evaluation ----------------------------------------------------------------------------------------------


ENOUGH = 8
"""A task with fewer candidates says little about a ranking."""


def top_k(score: np.ndarray, latency: np.ndarray, k: int) -> float:
    """Best latency over the best latency among the `k` best-ranked candidates."""
    best = latency[np.argsort(-score, kind="stable")[:k]].min()
    return float(latency.min() / best)


@torch.no_grad()
def score_task(
    net: WorldModelNet, task: TaskData, machines: dict[str, Machine], without: str = ""
) -> tuple[np.ndarray, np.ndarray]:
    """Scores and latencies of all candidates of a task."""
    batch = make_batch([task], machines, 10**9, np.random.default_rng(0), states=False)
    score, _ = predict(net, batch, without)
    return score.numpy(), np.exp(-batch.target.numpy().astype(np.float64))


def validate(
    net: WorldModelNet, tasks: list[TaskData], machines: dict[str, Machine], without: str = ""
) -> dict[str, float]:
    """Mean top-1, top-5 and Spearman over tasks with at least `ENOUGH` candidates.

    Raises
    ------
    OptionError
        If there is no such task.
    """
    net.eval()
    rows = []
    for task in tasks:
        score, latency = score_task(net, task, machines, without)
        if len(score) >= ENOUGH:
            rows.append((top_k(score, latency, 1), top_k(score, latency, 5), spearman(score, -latency)))
    net.train()
    if not rows:
        raise OptionError(
            f"no validation task has {ENOUGH} measured schedules, so no epoch can be chosen; "
            "run: pretune-export collect, for networks of the validation split too"
        )
    mean = np.mean(rows, axis=0)
    return {
        "top1": float(mean[0]),
        "top5": float(mean[1]),
        "spearman": float(mean[2]),
        "tasks": float(len(rows)),
    }


def fit_inputs(net: WorldModelNet, data: Data) -> None:
    """Standardise the networks' inputs by the training tasks: actions, initial and real states, summaries."""
    groups = [g for task in data.train for g in task.groups]
    states = [task.initial for task in data.train] + [s for g in groups for s in g.states.values()]
    loops = np.concatenate([s.loops.reshape(-1, s.loops.shape[2]) for s in states])
    arrays = (
        np.concatenate([a[:2] for g in groups for a in g.actions]),
        np.concatenate([s.blocks for s in states]),
        loops[(loops != 0).any(1)],
        np.concatenate([g.summary for g in groups]),
    )
    net.fit_inputs(*(torch.from_numpy(a) for a in arrays))


# -- the loop ------------------------------------------------------------------------------------------------


def train(
    config: TrainConfig, out: Path, *, cache: Path | None = None, deadline: float = float("inf")
) -> dict[str, Any]:
    """Train and write ``best.pt`` and ``log.jsonl`` to `out`.

    Continues from ``last.pt`` if that is of the same configuration and data; else `out` starts anew.
    """
    torch.manual_seed(config.seed)
    torch.set_num_threads(config.threads)
    out.mkdir(parents=True, exist_ok=True)
    data = load_data(config, cache)
    sizes = Sizes(**config.sizes)
    net, decoder = WorldModelNet(sizes), Decoder(sizes)
    fit_inputs(net, data)
    if config.pretrained:
        load_pretrained(Path(config.pretrained), net)
    optimizer = torch.optim.AdamW(
        [*net.parameters(), *decoder.parameters()], lr=config.learning_rate, weight_decay=config.weight_decay
    )
    per_epoch = max(1, len(data.train) // config.tasks_per_batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, config.learning_rate, total_steps=config.epochs * per_epoch + 1, pct_start=0.1
    )
    average = torch.optim.swa_utils.AveragedModel(
        net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(config.average)
    )
    start, best = 0, {"value": -1.0}
    last, key = out / "last.pt", run_key(config)
    saved = torch.load(last, weights_only=True) if last.exists() else None
    if saved is not None and saved.get("key") != key:
        print(f"{out} is of another configuration or other data: training anew", file=sys.stderr, flush=True)
        saved = None
    if saved is None:
        for stale in (last, out / "best.pt", out / "log.jsonl"):
            stale.unlink(missing_ok=True)
    else:
        net.load_state_dict(saved["net"])
        average.load_state_dict(saved["average"])
        decoder.load_state_dict(saved["decoder"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        start, best = saved["epoch"], saved["best"]
    count = sum(len(g.latency) for t in data.train for g in t.groups)
    print(
        f"{len(data.train)} training tasks with {count} schedules, {len(data.validation)} validation tasks",
        flush=True,
    )
    for epoch in range(start, config.epochs):
        rng = np.random.default_rng([config.seed, epoch])
        order = rng.permutation(len(data.train))
        sums: dict[str, float] = defaultdict(float)
        began = time.time()
        for b in range(per_epoch):
            tasks = [
                data.train[i] for i in order[b * config.tasks_per_batch : (b + 1) * config.tasks_per_batch]
            ]
            batch = make_batch(tasks, data.machines, config.candidates_per_task, rng)
            terms = losses(net, decoder, batch, config)
            loss = sum(getattr(config, name, 1.0) * term for name, term in terms.items())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            average.update_parameters(net)
            for name, term in terms.items():
                sums[name] += float(term.detach()) / per_epoch
        line: dict[str, Any] = {
            "epoch": epoch + 1,
            "seconds": round(time.time() - began, 1),
            **{k: round(v, 4) for k, v in sums.items()},
        }
        done = epoch + 1 == config.epochs or time.time() > deadline
        if (epoch + 1) % config.validate_every == 0 or done:
            quality = validate(average.module, data.validation, data.machines, config.without)
            line |= {f"validation_{k}": round(v, 4) for k, v in quality.items()}
            value = quality["top1"] + quality["top5"] + 0.5 * quality["spearman"]
            if value > best["value"]:
                best = {"value": value, "epoch": epoch + 1, **quality}
                torch.save(
                    {"net": average.module.state_dict(), "sizes": sizes.to_dict(), "best": best, "key": key},
                    out / "best.pt",
                )
        with (out / "log.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(line, flush=True)
        torch.save(
            {
                "net": net.state_dict(), "average": average.state_dict(), "decoder": decoder.state_dict(),
                "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict(),
                "epoch": epoch + 1, "best": best, "key": key,
            },
            last,
        )  # fmt: skip
        if done:
            break
    return best


def load_best(run: Path, config: TrainConfig) -> WorldModelNet:
    """The networks of the best epoch of a training run.

    Raises
    ------
    OptionError
        If the run has no such epoch yet, or is of another configuration or other data.
    """
    path = run / "best.pt"
    if not path.is_file():
        raise OptionError(f"{path}: no weights; run: pretune-export train")
    saved = torch.load(path, weights_only=True)
    if saved.get("key") != run_key(config):
        raise OptionError(f"{path} is of another configuration or other data; run: pretune-export train")
    net = WorldModelNet(Sizes(**saved["sizes"]))
    net.load_state_dict(saved["net"])
    return net.eval()


@dataclass
class DataDescription:
    """What the datasets hold.

    Attributes
    ----------
    measured_on : list of dict
        One `pretune.model.weights.MeasuredOn` per machine.
    covers : dict
        `pretune.model.weights.Covers`: the lowest instruction set level among the machines.
    provenance : dict
        Counts for the manifest.
    """

    measured_on: list[dict[str, Any]]
    covers: dict[str, str]
    provenance: dict[str, Any]


def describe_data(config: TrainConfig) -> DataDescription:
    """Describe what a configuration trains on.

    Raises
    ------
    OptionError
        If machines of different kinds or architectures measured it.
    """
    from pretune_export.networks import NETWORKS

    measured_on, named = [], set()
    kinds, levels = set(), set()
    for folder in config.datasets:
        tasks, _spaces, rows, machines = read_parquet(Path(folder))
        named |= {n for t in tasks.values() if t["split"] == "train" for n in t["networks"]}
        for name, members in rows.items():
            machine = machines[name]
            kinds.add((machine["kind"], machine["arch"]))
            levels.add(machine["isa_level"])
            measured_on.append(
                {
                    "cpu": machine["cpu"],
                    "microarch": machine["microarch"],
                    "isa_level": machine["isa_level"],
                    "cores": int(machine["cores"]),
                    "schedules": len(members),
                    "tasks": len({m["task"] for m in members}),
                    "days": sorted({m["time"][:10] for m in members}),
                }
            )
    if len(kinds) != 1:
        raise OptionError(
            f"datasets of one weights folder are of one kind of machine, not of {sorted(kinds)}; "
            "give each its own configuration"
        )
    ((kind, arch),) = kinds
    known = ("", *ISA_LEVELS.get(arch, ()))
    level = config.isa_level or min(levels, key=lambda one: known.index(one) if one in known else 0)
    return DataDescription(
        measured_on,
        {"kind": kind, "arch": arch, "isa_level": level},
        {
            # The same network with another batch size is not another one.
            "train_networks": len({n.partition("@")[0] for n in named & NETWORKS.keys()}),
            "train_layer_kinds": len(named - NETWORKS.keys()),
            "datasets": config.datasets,
            "test_datasets": config.test_datasets,
        },
    )
