"""The command line. Every command imports what it needs when it runs: ``pretune --help`` loads no TVM.

Results go to stdout, everything else to stderr. A `PretuneError` becomes one line and its exit status.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import pretune
from pretune import env
from pretune.errors import InputError, OptionError, PretuneError, one_line
from pretune.finetuning import command as finetune
from pretune.hub.cli import hub
from pretune.messages import notice
from pretune.options import farm_options
from pretune.output import print_result as _print
from pretune.output import to_stderr as _to_stderr

if TYPE_CHECKING:
    from rich.console import Console

    from pretune.measure import RPCAddress
    from pretune.tuning import TuneResult

DEMO = Path(__file__).parent / "demo" / "digits.onnx"
DEMO_TRIALS, DEFAULT_TRIALS = 12, 64
INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""


class _Commands(click.Group):
    """Turns errors into one line on stderr, and an exit status."""

    def main(self, *args: Any, standalone_mode: bool = True, **kwargs: Any) -> Any:
        if not standalone_mode:
            return super().main(*args, standalone_mode=False, **kwargs)
        try:
            status = super().main(*args, standalone_mode=False, **kwargs)
        except getattr(click.exceptions, "NoArgsIsHelpError", ()) as error:  # since click 8.2
            error.show()
            status = error.exit_code
        except click.ClickException as error:
            context = getattr(error, "ctx", None)
            command = context.command_path if context else "pretune"
            _complain(f"{error.format_message()} (see: {command} --help)")
            status = error.exit_code
        except click.Abort:
            status = INTERRUPTED
        sys.exit(status if isinstance(status, int) else 0)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PretuneError as error:
            if env.debug():
                raise
            _complain(str(error))
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            _complain("interrupted")
            ctx.exit(INTERRUPTED)
        except BrokenPipeError:  # ``pretune ... | head``
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            ctx.exit(1)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            if env.debug():
                raise
            _complain(f"unexpected {type(error).__name__}: {one_line(error)} (PRETUNE_DEBUG=1 shows where)")
            ctx.exit(1)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(pretune.__version__, prog_name="pretune")
def main() -> None:
    """Auto-tuning of tensor programs with pretrained world models, on top of TVM."""


main.add_command(finetune)
main.add_command(hub)


def _only_once(_ctx: click.Context, parameter: click.Parameter, values: Sequence[str]) -> str | None:
    """An option whose repetition would silently win over what came first."""
    if len(values) > 1:
        raise OptionError(
            f"--{parameter.name} is given {len(values)} times; one pattern may match several names"
        )
    return values[0] if values else None


_shape = click.option("--shape", "shapes", multiple=True, metavar="NAME=1x3x..", help="Shape of an input.")
_target = click.option("--target", default="native", show_default=True, help='Such as "llvm -mcpu=znver4".')
_weights = click.option(
    "--weights", metavar="DIR|ORG/NAME[@REVISION]", help="Weights, in place of the best on this machine."
)
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout, and nothing else there.")


@main.command()
@click.argument("source", metavar="[INPUT]", required=False)
@click.option("--demo", is_flag=True, help="Tune the small network that comes with pretune.")
@_shape
@_target
@click.option("--trials", type=int, help=f"Measured per task; 0: none. [default: {DEFAULT_TRIALS}]")
@click.option(
    "--op",
    metavar="GLOB",
    multiple=True,
    callback=_only_once,
    help="Tune only tasks with such names, as in '*conv2d*'.",
)
@click.option("--out", metavar="DIR", help="Results; an earlier run there is resumed [default: pretune-out].")
@_weights
@click.option("--pull", is_flag=True, help="Download weights that are needed but not here.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of all sampling.")
@farm_options
@_json
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
def tune(
    source: str | None,
    demo: bool,
    shapes: Sequence[str],
    target: str,
    trials: int | None,
    op: str | None,
    out: str | None,
    weights: str | None,
    pull: bool,
    seed: int,
    rpc: RPCAddress | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Tune a program: INPUT is an .onnx, .pt2, .py (TVMScript) or .json (TVM) file."""
    if demo and source:
        raise OptionError("--demo tunes the network that comes with pretune; leave out INPUT, or --demo")
    if not demo and not source:
        raise OptionError("nothing to tune; give an INPUT file, or --demo")
    if trials is None:
        trials = DEMO_TRIALS if demo else DEFAULT_TRIALS
    if trials < 0:
        raise OptionError(f"--trials {trials} is not a number of trials; give 0 or more, as in --trials 64")
    if seed < 0:
        raise OptionError(f"--seed {seed} is negative; give 0 or more")
    folder = Path(out or ("pretune-demo" if demo else "pretune-out"))
    if demo and not DEMO.is_file():
        raise InputError(f"{DEMO} is missing; reinstall: pip install --force-reinstall --no-deps pretune")

    with _to_stderr():
        from pretune import tuning
        from pretune.intake import parse_shape_options
        from pretune.progress import show_progress

        try:
            with show_progress(quiet) as on_progress:
                result = tuning.tune(
                    DEMO if demo else source,
                    target=target,
                    shapes=parse_shape_options(shapes),
                    trials=trials,
                    op=op,
                    out=folder,
                    weights=weights,
                    pull=pull,
                    seed=seed,
                    rpc=rpc,
                    on_progress=on_progress,
                )
        except KeyboardInterrupt:
            _complain(f"interrupted; {_kept(folder / 'records.jsonl')}")
            raise click.exceptions.Exit(INTERRUPTED) from None
    for text in result.notices:
        notice(text)
    _print(result.to_dict(), as_json, lambda console: _show_result(result, console))


@main.command()
@click.argument("source", metavar="INPUT")
@click.option("--traces", required=True, metavar="FILE", help="A trace a line; records.jsonl will do.")
@_shape
@_target
@click.option("--op", metavar="GLOB", help="The task that the traces are for.")
@_weights
@_json
def rank(
    source: str,
    traces: str,
    shapes: Sequence[str],
    target: str,
    op: str | None,
    weights: str | None,
    as_json: bool,
) -> None:
    """Order traces of a task of INPUT by predicted speed, without measuring."""
    with _to_stderr():
        from pretune.intake import parse_shape_options
        from pretune.rank import rank as rank_traces

        found = rank_traces(
            source, traces, target=target, shapes=parse_shape_options(shapes), op=op, weights=weights
        )
    _print(found, as_json, lambda console: _show_ranking(found, console))


@main.command()
@_json
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """What pretune finds on this machine and would use; exit status 1 if something is wrong."""
    with _to_stderr():
        from pretune import doctor as examination

        found = examination.report()
    _print(found, as_json, lambda console: console.print(examination.render(found)))
    ctx.exit(1 if found["problems"] else 0)


@main.group()
def bench() -> None:
    """Measure pretune against stock MetaSchedule on this machine."""


@bench.command("search")
@click.option("--suite", required=True, metavar="FILE.py", help="Defines SUBGRAPHS: objects with build().")
@click.option("--only", metavar="NAME,NAME", help="Only these subgraphs.")
@click.option(
    "--trials",
    metavar="N,N",
    default="0,64",
    show_default=True,
    help="Of pretune, per task; 0: the unmeasured first choice.",
)
@click.option(
    "--baseline-trials", metavar="N,N", default="64", show_default=True, help="Of MetaSchedule, per task."
)
@click.option("--seeds", type=int, default=1, show_default=True, help="Runs of each, with seeds 0, 1 ...")
@_weights
@click.option("--target", default="native", show_default=True, help="What both sides tune for.")
@click.option("--out", metavar="DIR", help="Rows as they come, and logs; the same command resumes.")
@_json
@click.option("-q", "--quiet", is_flag=True, help="No line per subgraph.")
def bench_search(
    suite: str,
    only: str | None,
    trials: str,
    baseline_trials: str,
    seeds: int,
    weights: str | None,
    target: str,
    out: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Quality of what the search finds: pretune against MetaSchedule's evolutionary search with XGBoost."""
    if seeds < 1:
        raise OptionError(f"--seeds {seeds} is not a number of runs; give 1 or more")
    budgets = _budgets("--trials", trials, 0), _budgets("--baseline-trials", baseline_trials, 1)
    with _to_stderr():
        from pretune.bench import search

        found = search.run(
            suite,
            only=[name.strip() for name in only.split(",") if name.strip()] if only else None,
            trials=budgets[0],
            baseline_trials=budgets[1],
            seeds=seeds,
            weights=weights,
            target=target,
            out=out,
            say=_nothing if quiet else _say,
        )
    _print(found, as_json, lambda console: search.render(found, console))


@bench.command("startup")
@click.option("--baseline", is_flag=True, help="Start MetaSchedule too.")
@click.option("--repeat", type=click.IntRange(1), default=5, show_default=True)
@_weights
@_json
def bench_startup(baseline: bool, repeat: int, weights: str | None, as_json: bool) -> None:
    """Seconds from the start of a process to its first ranked batch of candidates."""
    with _to_stderr():
        from pretune.bench import startup

        found = startup.run(baseline=baseline, repeat=repeat, weights=weights)
    _print(found, as_json, lambda console: startup.render(found, console))


@bench.command("ranking")
@click.option("--rounds", type=click.IntRange(1), default=2, show_default=True, help="Turns of each.")
@_weights
@_json
def bench_ranking(rounds: int, weights: str | None, as_json: bool) -> None:
    """Candidates ranked a second, against those scored inside MetaSchedule's evolutionary search."""
    with _to_stderr():
        from pretune.bench import ranking

        found = ranking.run(rounds=rounds, weights=weights)
    _print(found, as_json, lambda console: ranking.render(found, console))


@bench.command("measure")
@click.option("--candidates", type=click.IntRange(4), default=48, show_default=True)
@_json
def bench_measure(candidates: int, as_json: bool) -> None:
    """Trials a minute, against MetaSchedule's LocalBuilder and LocalRunner on the same candidates."""
    with _to_stderr():
        from pretune.bench import measure

        found = measure.run(candidates=candidates)
    _print(found, as_json, lambda console: measure.render(found, console))


@bench.command("farm")
@click.option("--servers", type=click.IntRange(1), default=4, show_default=True, help="RPC servers.")
@click.option("--trials", type=click.IntRange(4), default=400, show_default=True)
@click.option("--chaos", is_flag=True, help="Kill, stall and restart servers all along.")
@_json
def bench_farm(servers: int, trials: int, chaos: bool, as_json: bool) -> None:
    """Trials a minute on RPC servers on this machine, against one of them; none lost, none measured twice."""
    with _to_stderr():
        from pretune.bench import farm

        found = farm.run(servers=servers, trials=trials, chaos=chaos)
    _print(found, as_json, lambda console: farm.render(found, console))


@bench.command("model")
@click.argument("source", metavar="INPUT.onnx")
@_shape
@click.option("--trials", type=int, default=16, show_default=True, help="Per task.")
@click.option("--rounds", type=click.IntRange(1), default=15, show_default=True, help="Turns of each.")
@click.option("--out", metavar="DIR", help="Folder of the tuning run; an earlier one there is reused.")
@_weights
@_json
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
def bench_model(
    source: str,
    shapes: Sequence[str],
    trials: int,
    rounds: int,
    out: str | None,
    weights: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Latency of a whole model: untuned TVM, tuned, and ONNX Runtime on the same threads."""
    if trials < 0:
        raise OptionError(f"--trials {trials} is not a number of trials; give 0 or more")
    with _to_stderr():
        from pretune.bench import model
        from pretune.intake import parse_shape_options
        from pretune.progress import show_progress

        with show_progress(quiet) as on_progress:
            found = model.run(
                source,
                shapes=parse_shape_options(shapes),
                trials=trials,
                rounds=rounds,
                out=out,
                weights=weights,
                on_progress=on_progress,
            )
    _print(found, as_json, lambda console: model.render(found, console))


# -- output --------------------------------------------------------------------------------------------------


def _complain(text: str) -> None:
    click.echo(f"error: {text}", err=True)


def _kept(records: Path) -> str:
    """What a run that was stopped leaves."""
    count = len(records.read_bytes().splitlines()) if records.is_file() else 0
    if not count:
        return "nothing was measured yet"
    return f"{records} keeps what was measured ({count} records); the same command resumes"


def _say(text: str) -> None:
    click.echo(text, err=True)


def _nothing(_text: str) -> None:
    pass


def _budgets(option: str, text: str, least: int) -> list[int]:
    """Numbers of trials, of an option that takes several."""
    try:
        budgets = [int(number) for number in text.split(",")]
    except ValueError:
        budgets = []
    if not budgets or min(budgets) < least:
        raise OptionError(f"{option} {text}: expected numbers of {least} or more, as in {option} 16,64")
    return budgets


def _show_result(result: TuneResult, console: Console) -> None:
    from rich.markup import escape
    from rich.table import Table

    from pretune.progress import outcome_text, seconds_text

    table = Table("task", "weight", "default", "best", "speed-up", "chosen by")
    for column in table.columns[1:5]:
        column.justify = "right"
    for task in result.tasks:
        speedup = f"{task.speedup:.2f}x" if task.speedup else "-"
        times = (seconds_text(task.default), seconds_text(task.best), speedup)
        table.add_row(*map(escape, (task.name, str(task.weight), *times, outcome_text(task))))
    console.print(table)
    changes: dict[str, str] = {}
    if result.model:
        changes["whole model"] = _change(result.model.untuned, result.model.tuned)
    if both := [task for task in result.tasks if task.default and task.best]:
        before = sum(task.weight * (task.default or 0) for task in both)
        after = sum(task.weight * (task.best or 0) for task in both)
        changes["tasks timed one by one, by weight"] = _change(before, after)
    for what, change in changes.items():
        console.print(f"{what}: {change}")
    if changes:
        console.print(f"tuned in {result.seconds:.0f} s")
    names = ["result.json", "records.jsonl", "database/"] + (["model.so"] if result.library else [])
    files = [name for name in names if (result.out / name).exists()]
    console.print(f"results: {escape(str(result.out))}/ ({', '.join(files)})", soft_wrap=True)
    if result.library:
        use = f'tvm.relax.VirtualMachine(tvm.runtime.load_module("{result.library}"), tvm.cpu())["main"](x)'
    else:
        use = (
            "tvm.s_tir.meta_schedule.tir_integration.compile_tir(ms.database.JSONDatabase(work_dir="
            f'"{result.out}/database"), mod, target); compile_relax for a network'
        )
    console.print(f"to use them: {escape(use)}", soft_wrap=True)


def _change(before: float, after: float) -> str:
    from pretune.progress import seconds_text

    return f"{seconds_text(before)} -> {seconds_text(after)} ({before / after:.2f}x)"


def _show_ranking(found: dict[str, Any], console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    from pretune.progress import seconds_text

    for task in found["tasks"]:
        table = Table("rank", "line", "score", "measured", title=Text(task["name"]), title_justify="left")
        for column in table.columns:
            column.justify = "right"
        for place, row in enumerate(task["ranking"], start=1):
            table.add_row(str(place), str(row["line"]), f"{row['score']:.4f}", seconds_text(row["latency"]))
        console.print(table)


if __name__ == "__main__":
    main()
