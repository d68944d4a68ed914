"""Command line of the training side: from networks to a weights folder.

    pretune-export corpus   networks -> tuning tasks
    pretune-export suite    an evaluation suite -> tuning tasks, for tests only
    pretune-export collect  tasks -> measured schedules, resumable
    pretune-export dataset  measured schedules -> parquet under hub_cards/datasets/
    pretune-export compact  shards that `dataset --append` added -> one file per machine
    pretune-export trajectories  tasks -> real states along random schedules, unmeasured
    pretune-export pretrain      trajectories -> encoder and transition
    pretune-export make     dataset -> trained, evaluated, exported weights with their card

``train``, ``evaluate``, ``onnx`` and ``card`` are the steps of ``make`` one by one. ``baselines`` and
``scaling`` train other models for comparison; ``evaluate`` and ``card`` take in what they leave in the run.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pretune.cli import _Commands as SDKCommands
from pretune.errors import MissingExtraError, OptionError, PretuneError
from pretune.options import farm_options

if TYPE_CHECKING:
    from pretune.measure import RPCAddress


class _NeedsExtra(click.Group):
    """A package that is not installed, but that the extra brings, is an error with its remedy."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            if error.name in EXTRA:
                raise MissingExtraError(f"pretune-export ({error.name})", "export") from error
            raise


class _Commands(SDKCommands, _NeedsExtra):
    """Errors as ``pretune`` reports them."""


EXTRA = (
    "torch", "transformers", "pyarrow", "safetensors", "jinja2", "matplotlib", "onnxscript", "scipy",
    "xgboost",
)  # fmt: skip
"""Packages of the extra, by the names they are imported under."""

FOLDER = click.Path(path_type=Path, file_okay=False)
FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
OUTPUT = click.Path(path_type=Path, dir_okay=False)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="pretune")
def main() -> None:
    """Collect measurements, train world models and publish their weights."""


def _target(spec: str, *, here: bool = True) -> tuple[Any, Any]:
    from pretune.hardware import detect, hardware_for_target, make_target

    machine = detect()
    target = make_target(spec, machine)
    return target, hardware_for_target(target, machine, here=here)


@main.command()
@click.argument("out", type=OUTPUT)
@click.option("--target", default="native", show_default=True)
@click.option("--exclude", type=FILE, help="Suite file whose subgraphs must not be trained on.")
@click.option("--only", metavar="NAME,NAME", help="Only these networks.")
@click.option("--per-network", type=click.IntRange(1), default=30, show_default=True, help="Most tasks.")
@click.option("--timeout", type=click.IntRange(1), default=600, show_default=True, help="CPU s of a network.")
def corpus(
    out: Path, target: str, exclude: Path | None, only: str | None, per_network: int,
    timeout: int,
) -> None:  # fmt: skip
    """Write the tuning tasks of the training networks to OUT (.jsonl.gz)."""
    from pretune_export.networks import build_corpus, forbidden_task_ids

    made, _hardware = _target(target)
    forbidden = forbidden_task_ids(exclude, made) if exclude else frozenset()
    count = build_corpus(
        out, made, _names(only) or None, forbidden=forbidden, per_network=per_network, timeout=timeout
    )
    if not count:
        raise PretuneError(f"{out}: no network gave a task; the warnings above say why")
    click.echo(count)


@main.command()
@click.argument("suite_file", metavar="SUITE.py", type=FILE)
@click.argument("out", type=OUTPUT)
@click.option("--target", default="native", show_default=True)
def suite(suite_file: Path, out: Path, target: str) -> None:
    """Write the tuning tasks of the subgraphs in SUITE.py to OUT (.jsonl.gz), for tests only.

    What is measured of them goes into a dataset of its own (test_datasets of a configuration).
    """
    from pretune_export.networks import build_suite

    made, _hardware = _target(target)
    click.echo(build_suite(suite_file, out, made))


@main.command()
@click.argument("corpus_file", metavar="CORPUS", type=FILE)
@click.argument("out", type=FOLDER)
@click.option("--target", default="native", show_default=True)
@click.option(
    "--minutes", type=float, default=60.0, show_default=True, help="Stop starting new tasks after this long."
)
@click.option(
    "--random", "random_", type=int, default=24, show_default=True, help="Random candidates per task."
)
@click.option("--mutated", type=int, default=12, show_default=True, help="Candidates in each later round.")
@click.option("--rounds", type=int, default=2, show_default=True, help="Rounds after the first.")
@click.option(
    "--model", type=FOLDER, help="Weights folder that proposes the candidates of every other round."
)
@click.option("--serial", is_flag=True, help="Time every candidate on one thread as well.")
@click.option("--limit", type=click.IntRange(1), help="Only so many tasks, chosen at random.")
@click.option("--min-space", type=float, help="Only tasks with so many schedules in their design spaces.")
@click.option("--seed", type=int, default=0, show_default=True)
@farm_options
def collect(
    corpus_file: Path, out: Path, target: str, minutes: float, random_: int, mutated: int, rounds: int,
    model: Path | None, serial: bool, limit: int | None, min_space: float | None, seed: int,
    rpc: RPCAddress | None,
) -> None:  # fmt: skip
    """Measure schedules of the tasks in CORPUS, here or on a farm; appends to OUT and resumes there."""
    import random

    from pretune.measure import open_pool
    from pretune_export.collect import PATIENCE_S, CollectOptions, Collector, model_proposals, with_choice
    from pretune_export.networks import load_corpus

    made, hardware = _target(target, here=rpc is None)
    tasks = list(load_corpus(corpus_file))
    random.Random(seed).shuffle(tasks)
    if limit or min_space:
        tasks = with_choice(tasks, made, min_space or 0, limit)
    propose = model_proposals(model, hardware) if model else None
    options = CollectOptions(random=random_, mutated=mutated, rounds=rounds, seed=seed, serial=serial)
    with open_pool(made, rpc, build_timeout=8.0, run_timeout=8.0, patience=PATIENCE_S) as pool:
        collector = Collector(made, out, options, pool, propose)
        click.echo(collector.run(tasks, time.time() + 60 * minutes))


@main.command()
@click.argument(
    "collected", type=click.Path(path_type=Path, exists=True, file_okay=False), nargs=-1, required=True
)
@click.option("--corpus", "corpus_file", type=FILE, required=True)
@click.option("--out", type=FOLDER, required=True, help="Such as hub_cards/datasets/cpu-x86-64-v4.")
@click.option("--machine", required=True, help="Short name of the machine that measured, for the file name.")
@click.option("--target", default="native", show_default=True, help="Target it measured for.")
@click.option("--exclude", type=FILE, help="Suite file whose subgraphs are left out.")
@click.option("--append", is_flag=True, help="Add to what MACHINE measured before instead of replacing it.")
def dataset(
    collected: tuple[Path, ...], corpus_file: Path, out: Path, machine: str, target: str,
    exclude: Path | None, append: bool,
) -> None:  # fmt: skip
    """Turn COLLECTED folders into parquet, beside what other machines have measured in the same dataset.

    Any number of machines may --append to a dataset at the same time; of a candidate measured again, the last
    measurement counts. What was timed on one thread as well becomes a machine of one core, "MACHINE-serial".
    Run it on the machine that measured, whose description goes in; what a farm measured has its target's.
    """
    from pretune_export.collect import read_collected, serial_rows
    from pretune_export.dataset import describe_machine, write_parquet
    from pretune_export.networks import forbidden_task_ids, load_corpus

    spaces, rows = read_collected(collected)
    here = not any(row.get("device") for row in rows)  # those of a farm name the device
    made, hardware = _target(target, here=here)
    forbidden = forbidden_task_ids(exclude, made) if exclude else frozenset()
    tasks = [t for t in load_corpus(corpus_file) if t.id not in forbidden]
    known = {t.id for t in tasks}
    rows = [r for r in rows if r["task"] in known]
    if not rows:
        raise OptionError(
            f"{collected[0]}: no measured schedules of tasks in {corpus_file}; run: pretune-export collect"
        )
    days = {r["time"][:10] for r in rows}
    described = describe_machine(hardware, name=machine, target=str(made), days=days)
    write_parquet(out, tasks, spaces, rows, described, append=append)
    click.echo(f"{len(rows)} schedules of {len({r['task'] for r in rows})} tasks")
    if serial := serial_rows(rows):
        made, hardware = _target(json.dumps({**json.loads(str(made)), "num-cores": 1}), here=here)
        described = describe_machine(hardware, name=f"{machine}-serial", target=str(made), days=days)
        write_parquet(out, tasks, spaces, serial, described, append=append)
        click.echo(f"{len(serial)} of them on one thread as well")


@main.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
def compact(folder: Path) -> None:
    """Merge the shards in the dataset FOLDER into one file per machine, each candidate once."""
    from pretune_export.dataset import compact as merge

    click.echo(json.dumps(merge(folder)))


@main.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("out", type=FOLDER)
@click.option("--exclude", type=FILE, help="Suite file whose subgraphs are left out.")
def convert(folder: Path, out: Path, exclude: Path | None) -> None:
    """Turn the first measurements (FOLDER with tasks.jsonl.gz and measurements.jsonl.gz) into parquet."""
    from pretune_export.dataset import (
        FIRST_MACHINE,
        FIRST_TARGET,
        describe_machine,
        read_shared,
        write_parquet,
    )
    from pretune_export.networks import forbidden_task_ids

    made, _hardware = _target(json.dumps(FIRST_TARGET))
    forbidden = forbidden_task_ids(exclude, made) if exclude else frozenset()
    tasks, spaces, rows = read_shared(folder)
    rows = [r for r in rows if r["task"] not in forbidden]
    machine = describe_machine(
        FIRST_MACHINE, name="znver4-first", target=json.dumps(FIRST_TARGET), days=["2026-11-30"]
    )
    write_parquet(out, tasks, spaces, rows, machine)
    click.echo(f"{len(rows)} schedules of {len({r['task'] for r in rows})} tasks")


@main.command()
@click.argument("corpus_file", metavar="CORPUS", type=FILE)
@click.argument("out", type=FOLDER)
@click.option(
    "--target", default="native", show_default=True, help="Such as nvidia/nvidia-a100; no GPU needed."
)
@click.option("--per-task", type=click.IntRange(1), default=80, show_default=True)
@click.option("--states", type=click.IntRange(0), default=1, show_default=True, help="Intermediate states.")
@click.option(
    "--stores",
    type=click.FloatRange(0, 1),
    default=0.25,
    show_default=True,
    help="Share of trajectories with per-store features.",
)
@click.option("--processes", type=click.IntRange(1), default=2, show_default=True)
@click.option("--minutes", type=float, help="Stop starting new tasks after this long.")
@click.option("--seed", type=int, default=0, show_default=True)
def trajectories(
    corpus_file: Path, out: Path, target: str, per_task: int, states: int, stores: float, processes: int,
    minutes: float | None, seed: int,
) -> None:  # fmt: skip
    """Replay random schedules of the tasks in CORPUS, unmeasured, to OUT for `pretrain`; resumes there."""
    from pretune_export.networks import load_corpus
    from pretune_export.trajectories import GenerateOptions, generate

    made, hardware = _target(target)
    options = GenerateOptions(per_task=per_task, states=states, stores=stores, seed=seed)
    deadline = time.time() + 60 * minutes if minutes else float("inf")
    tasks = list(load_corpus(corpus_file))
    # A GPU's cores run thread blocks, not parallel loops: there are none whose balance would depend on them.
    cores = hardware.cores if hardware.kind == "cpu" else 1
    click.echo(generate(tasks, made, hardware.kind, cores, out, options, processes, deadline))


@main.command()
@click.argument("config", type=FILE)
@click.argument("shards", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("run", type=FOLDER)
@click.option("--processes", type=click.IntRange(1), default=2, show_default=True, help="For loading.")
@click.option("--minutes", type=float, help="Stop with a checkpoint when this time is up.")
def pretrain(config: Path, shards: Path, run: Path, processes: int, minutes: float | None) -> None:
    """Pretrain encoder and transition on the trajectories in SHARDS as CONFIG says; resumes in RUN."""
    from pretune_export.pretrain import PretrainConfig
    from pretune_export.pretrain import pretrain as train

    deadline = time.time() + 60 * minutes if minutes else float("inf")
    settings = _config(config, PretrainConfig)
    click.echo(json.dumps(train(settings, shards, run, processes=processes, deadline=deadline)))


def _config(path: Path, type_: Any = None) -> Any:
    import msgspec

    from pretune_export.config import TrainConfig

    try:
        return msgspec.toml.decode(path.read_bytes(), type=type_ or TrainConfig)
    except msgspec.MsgspecError as error:
        raise OptionError(f"{path}: {error}; see export/pretune_export/configs for examples") from None


@main.command()
@click.argument("config", type=FILE)
@click.argument("out", type=FOLDER)
@click.option("--minutes", type=float, help="Stop after the epoch in which this time is up.")
def train(config: Path, out: Path, minutes: float | None) -> None:
    """Train a world model as CONFIG says; resumes in OUT.

    Several processes train it together, with the same result up to rounding, as in

        torchrun --nproc-per-node 2 -m pretune_export.cli train CONFIG OUT
    """
    from pretune_export.distributed import process_group, rank
    from pretune_export.train import train as run

    deadline = time.time() + 60 * minutes if minutes else float("inf")
    out.mkdir(parents=True, exist_ok=True)
    with process_group():
        best = run(_config(config), out, cache=out / "encoded.pickle", deadline=deadline)
        if rank() == 0:
            click.echo(json.dumps(best))


@main.command()
@click.argument("config", type=FILE)
@click.argument("run", type=FOLDER)
@click.option("--epochs", type=int, default=12, show_default=True, help="Of each training run.")
def ablate(config: Path, run: Path, epochs: int) -> None:
    """Train with each part of the model left out, for RUN/ablations.json."""
    from pretune_export.evidence.ablations import ablate as judge

    click.echo(json.dumps(judge(_config(config), run, epochs=epochs)))


@main.command()
@click.argument("config", type=FILE)
@click.argument("run", type=FOLDER)
@click.option("--out", type=FOLDER, help="Where evaluation.json and evaluation.png go; RUN by default.")
def evaluate(config: Path, run: Path, out: Path | None) -> None:
    """Rank the test and validation tasks with the weights of a training RUN.

    RUN may hold baselines.json, ablations.json (figures by name), scaling.json and search*.json (of pretune
    bench search): they become part of the evaluation.
    """
    from pretune_export.evaluate import evaluate as judge

    result = judge(_config(config), run, out or run)
    click.echo(json.dumps({result["main"]: result["mean"]}))


@main.command()
@click.argument("config", type=FILE)
@click.argument("run", type=FOLDER)
@click.option("--only", metavar="NAME,NAME", help="Only these; all by default.")
def baselines(config: Path, run: Path, only: str | None) -> None:
    """Train the cost models of the literature on the data of CONFIG; writes RUN/baselines.json.

    Those that are in there already are not trained again.
    """
    from pretune_export.evidence.baselines import BASELINES, compare

    names = _names(only) or list(BASELINES)
    if unknown := [name for name in names if name not in BASELINES]:
        raise OptionError(f"no baseline {unknown[0]!r}; there are: {', '.join(BASELINES)}")
    run.mkdir(parents=True, exist_ok=True)
    found = compare(_config(config), run, names)["baselines"]
    click.echo(json.dumps({n: (found[n].get("test") or found[n]["validation"])["mean"] for n in names}))


@main.command()
@click.argument("config", type=FILE)
@click.argument("run", type=FOLDER)
@click.option("--tasks", metavar="N,N", help="Numbers of training tasks, such as 50,100,200.")
@click.option("--schedules", metavar="N,N", help="Numbers of schedules of each, such as 4,8,16,32.")
def scaling(config: Path, run: Path, tasks: str | None, schedules: str | None) -> None:
    """Train as CONFIG says on parts of its data; writes RUN/scaling.json, and works in RUN/scaling."""
    from pretune_export.evidence.scaling import scaling as scale

    counts = {name: _counts(f"--{name}", text) for name, text in (("tasks", tasks), ("schedules", schedules))}
    if not any(counts.values()):
        raise OptionError("nothing to vary; give --tasks or --schedules")
    run.mkdir(parents=True, exist_ok=True)
    click.echo(json.dumps(scale(_config(config), run, **counts)))


@main.command()
@click.argument("config", type=FILE)
@click.argument("run", type=FOLDER)
@click.option("--base", type=FOLDER, required=True, help="Weights that were trained without the target.")
@click.option("--schedules", metavar="N,N", default="500,1000,2000", show_default=True, help="Of each model.")
def transfer(config: Path, run: Path, base: Path, schedules: str) -> None:
    """Fine-tune BASE on few schedules, and train others on the same from scratch, for RUN/transfer.json.

    The datasets of CONFIG hold what was measured on the target that BASE does not know. One more model is
    trained on ten times the schedules of the largest fine-tuned one.
    """
    from pretune_export.evidence.transfer import transfer as run_all

    run.mkdir(parents=True, exist_ok=True)
    counts = _counts("--schedules", schedules)
    click.echo(json.dumps(run_all(_config(config), run, base=base, schedules=counts)))


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _counts(option: str, text: str | None) -> list[int]:
    try:
        return [int(name) for name in _names(text)]
    except ValueError:
        raise OptionError(f"{option} {text}: expected numbers, as in {option} 50,100") from None


@main.command()
@click.argument("config", type=FILE)
@click.argument("run", type=FOLDER)
@click.argument("out", type=FOLDER)
def onnx(config: Path, run: Path, out: Path) -> None:
    """Export the weights of a training RUN to OUT, such as hub_cards/cpu-x86-64-v4."""
    from pretune_export.onnx import export_weights
    from pretune_export.train import describe_data, load_best

    settings = _config(config)
    found = describe_data(settings)
    evaluation = run / "evaluation.json"
    quality = json.loads(evaluation.read_text())["mean"] if evaluation.exists() else {}
    command = f"pretune-export make {config} RUN {out}"
    export_weights(
        load_best(run, settings), out, name=out.name, covers=found.covers, measured_on=found.measured_on,
        quality=quality, provenance={**found.provenance, "command": command, "config": config.read_text()},
    )  # fmt: skip
    click.echo(out)


@main.command()
@click.argument("weights", type=click.Path(path_type=Path, exists=True, file_okay=False))
def reexport(weights: Path) -> None:
    """Export the networks of a WEIGHTS folder to ONNX again, without the run that trained them."""
    from pretune.hub.validate import validate
    from pretune_export.onnx import export_again

    worst = export_again(weights)
    validate(weights)
    click.echo(f"{weights}: within {worst:.1e} of torch")


@main.command()
@click.argument("run", type=FOLDER)
@click.argument("out", type=FOLDER)
def card(run: Path, out: Path) -> None:
    """Write the card of the weights in OUT from the evaluation in RUN."""
    import shutil

    from pretune_export.card import write_card
    from pretune_export.onnx import write_manifest

    shutil.copyfile(run / "evaluation.png", out / "evaluation.png")
    write_card(out, json.loads((run / "evaluation.json").read_text()))
    provenance = json.loads((out / "manifest.json").read_text())["provenance"]
    write_manifest(out, provenance)
    click.echo(out / "README.md")


@main.command()
@click.argument("config", type=FILE)
@click.argument("run", type=FOLDER)
@click.argument("out", type=FOLDER)
@click.option("--minutes", type=float, help="Longest training time.")
@click.pass_context
def make(ctx: click.Context, config: Path, run: Path, out: Path, minutes: float | None) -> None:
    """Train, evaluate, export and write the card: from CONFIG to the weights folder OUT."""
    started = datetime.now(UTC)
    ctx.invoke(train, config=config, out=run, minutes=minutes)
    ctx.invoke(evaluate, config=config, run=run, out=None)
    ctx.invoke(onnx, config=config, run=run, out=out)
    ctx.invoke(card, run=run, out=out)
    click.echo(f"made in {(datetime.now(UTC) - started).total_seconds():.0f} s", err=True)


if __name__ == "__main__":
    sys.exit(main())
