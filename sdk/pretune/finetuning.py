"""Fine-tuning: weights of one's own for a machine, measured and trained on it.

The work is in `pretune_export.finetune`, which needs torch; this is the way in, for Python and for the
command line, and imports neither.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pretune.errors import MissingExtraError, OptionError
from pretune.messages import notice
from pretune.options import farm_options
from pretune.output import print_result, to_stderr
from pretune.progress import PLAIN_S, REFRESH_S

if TYPE_CHECKING:
    from rich.console import Console

    from pretune.measure import RPCAddress

DEFAULT_BUDGET = "30m"
NEEDED = (
    "torch", "pyarrow", "safetensors", "onnxscript", "jinja2", "matplotlib", "scipy", "xgboost",
)  # fmt: skip
"""Packages that fine-tuning imports, all of the extra ``export``."""


@dataclass(frozen=True)
class FineTuneProgress:
    """What a progress line shows.

    Attributes
    ----------
    phase : str
        ``"measuring"``, ``"training"`` ...
    done, total : int
        Tasks, epochs ... of the phase.
    text : str
        What else there is to say.
    seconds_left : float
        Of the phase; not finite while unknown.
    message : bool
        Said once, and worth keeping in sight.
    """

    phase: str
    done: int = 0
    total: int = 0
    text: str = ""
    seconds_left: float = math.nan
    message: bool = False


@dataclass
class FineTuneResult:
    """The outcome of a run.

    Attributes
    ----------
    kept : bool
        Whether the fine-tuned weights are better than those they started from, and are now registered.
    why : str
        What decided, in one line.
    weights : pathlib.Path
        The new weights, ready to publish.
    registered : pathlib.Path or None
        Where `pretune.tune` finds them; None if they were not kept.
    base, target : str
    before, after : dict
        Ranking of the held-out tasks by the base weights and by the new ones: ``top1``, ``top5``,
        ``spearman`` ...
    search : dict or None
        The short search: geometric means of the latencies that the base weights and MetaSchedule reached
        over that of the new weights; None if there was none.
    schedules : int
        Measured in all.
    tasks : dict of str to int
        By split: ``train``, ``validation`` (chooses the epoch), ``test`` (held out).
    seconds : dict of str to float
        By phase, over all runs into the folder.
    peak_memory_mb : dict of str to int
        Of this process, and of its largest child.
    notices : list of str
    used_by : str
        Which ``pretune tune`` uses the registered weights.
    """

    kept: bool
    why: str
    weights: Path
    registered: Path | None
    base: str
    target: str
    before: dict[str, float]
    after: dict[str, float]
    search: dict[str, Any] | None
    schedules: int
    tasks: dict[str, int]
    seconds: dict[str, float]
    peak_memory_mb: dict[str, int]
    notices: list[str] = field(default_factory=list)
    used_by: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        registered = str(self.registered) if self.registered else None
        return asdict(self) | {"weights": str(self.weights), "registered": registered}

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> FineTuneResult:
        """A result from its JSON values."""
        registered = Path(value["registered"]) if value["registered"] else None
        return cls(**value | {"weights": Path(value["weights"]), "registered": registered})


def finetune(
    tasks: Sequence[Any] = (),
    *,
    target: Any = "native",
    shapes: Mapping[str, Sequence[int]] | None = None,
    trials: int | None = None,
    budget: str | float | None = None,
    base: str | Path | None = None,
    out: str | Path = "pretune-finetuned",
    search: bool = True,
    seed: int = 0,
    rpc: RPCAddress | None = None,
    on_progress: Callable[[FineTuneProgress], None] | None = None,
) -> FineTuneResult:
    """Measure schedules on this machine, fine-tune weights on them, and use these here if they are better.

    Parameters
    ----------
    tasks : sequence
        Programs whose tasks are measured, as `pretune.tune` takes them; none: a spread of the tasks that the
        published weights were trained and tested on.
    target : str, dict or tvm.target.Target
        ``"native"`` is this machine.
    shapes : mapping, optional
        Shapes of inputs with dynamic dimensions, by name.
    trials : int, optional
        Schedules to measure, in all.
    budget : str or float, optional
        Time for everything, in place of `trials`: seconds, or as in ``"30m"`` or ``"1h30m"``; half an hour by
        default.
    base : str or Path, optional
        Weights to start from: a folder, a target, or a repository; by default the nearest on this machine.
    out : str or Path
        Folder of the run. An earlier one there is resumed: nothing is measured twice.
    search : bool
        Whether to compare short searches too: with the weights before and after, and MetaSchedule's. Without,
        fewer than four held-out tasks are too few for new weights to be kept.
    seed : int
    rpc : RPCAddress, optional
        Measure on the devices of a farm, which `target` describes, in place of this machine.
    on_progress : callable, optional

    Returns
    -------
    FineTuneResult

    Raises
    ------
    MissingExtraError
        Without torch, before anything is measured.
    InputError, TargetError, WeightsError, OutputError, OptionError
        For what was given.
    MeasureError
        If measuring cannot go on. What was measured is kept, here and with every other error.
    EnvironmentFaultError
        If memory runs out.
    """
    check_extra()
    if trials is not None and budget is not None:
        raise OptionError("trials and budget are both given; give one of them")
    if trials is not None and trials < 1:
        raise OptionError(f"--trials {trials} is not a number of schedules; give 1 or more")
    if seed < 0:
        raise OptionError(f"--seed {seed} is negative; give 0 or more")
    seconds = None if trials is not None else parse_duration(DEFAULT_BUDGET if budget is None else budget)
    from pretune_export.finetune import run

    return run(
        tasks,
        target=target,
        shapes=shapes,
        trials=trials,
        seconds=seconds,
        base=str(base or ""),
        out=Path(out).expanduser(),
        search=search,
        seed=seed,
        rpc=rpc,
        on_progress=on_progress or (lambda _progress: None),
    )


def check_extra() -> None:
    """Check that what trains is installed.

    Raises
    ------
    MissingExtraError
        Naming the first package that is not, with the line that installs it.
    """
    for name in NEEDED:
        if importlib.util.find_spec(name) is None:
            raise MissingExtraError(f"pretune finetune ({name})", "export")


def parse_duration(text: str | float) -> float:
    """Seconds of ``"30m"``, ``"1h30m"``, ``"90s"`` or a number.

    Raises
    ------
    OptionError
        If it is none of these, or not above 0.
    """
    if isinstance(text, str):
        found = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text.strip())
        hours, minutes, seconds = (int(part or 0) for part in found.groups()) if found else (0, 0, 0)
        value = 3600.0 * hours + 60.0 * minutes + seconds
    else:
        value = float(text)
    if not value > 0:
        raise OptionError(f"--budget {text} is no time; write it as in --budget 30m, 1h30m or 90s")
    return value


# -- the command line ----------------------------------------------------------------------------------------


@click.command("finetune")
@click.option("--target", default="native", show_default=True, help='Such as "llvm -mcpu=znver4".')
@click.option(
    "--tasks",
    multiple=True,
    metavar="INPUT",
    help="Program whose tasks are measured; may be repeated. [default: a spread of the shipped datasets]",
)
@click.option("--shape", "shapes", multiple=True, metavar="NAME=1x3x..", help="Shape of an input.")
@click.option("--budget", metavar="TIME", help=f"Time for all of it. [default: {DEFAULT_BUDGET}]")
@click.option("--trials", type=int, help="Schedules to measure in all, in place of --budget.")
@click.option("--base", metavar="TARGET|DIR", help="Weights to start from. [default: the nearest here]")
@click.option(
    "--out", metavar="DIR", default="pretune-finetuned", show_default=True, help="An earlier run is resumed."
)
@click.option(
    "--search/--no-search",
    default=True,
    show_default=True,
    help="Compare short searches too; without, fewer than 4 held-out tasks decide nothing.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of all sampling.")
@farm_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout, and nothing else there.")
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
def command(
    target: str,
    tasks: Sequence[str],
    shapes: Sequence[str],
    budget: str | None,
    trials: int | None,
    base: str | None,
    out: str,
    search: bool,
    seed: int,
    rpc: RPCAddress | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Fine-tune weights for this machine: measure, train, judge, and use them if they are better."""
    check_extra()
    with to_stderr(), show_phases(quiet) as on_progress:
        from pretune.intake import parse_shape_options

        result = finetune(
            tasks,
            target=target,
            shapes=parse_shape_options(shapes),
            trials=trials,
            budget=budget,
            base=base,
            out=out,
            search=search,
            seed=seed,
            rpc=rpc,
            on_progress=on_progress,
        )
    for text in result.notices:
        notice(text)
    print_result(result.to_dict(), as_json, lambda console: _show(result, console))


def progress_text(progress: FineTuneProgress) -> str:
    """One line: phase, count, details, time left."""
    parts = [progress.phase]
    if progress.total:
        parts.append(f"{progress.done}/{progress.total}")
    if progress.text:
        parts.append(progress.text)
    if math.isfinite(progress.seconds_left):
        minutes, seconds = divmod(max(0, round(progress.seconds_left)), 60)
        parts.append(f"{minutes}:{seconds:02d} left")
    return "  ".join(parts)


@contextlib.contextmanager
def show_phases(quiet: bool) -> Iterator[Callable[[FineTuneProgress], None] | None]:
    """Show a run on stderr: on a terminal a line that changes, elsewhere a line now and then."""
    if quiet:
        yield None
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    shown, phase = -math.inf, ""

    def due(progress: FineTuneProgress, interval: float) -> bool:
        nonlocal shown, phase
        now = time.monotonic()
        if progress.phase == phase and progress.done < progress.total and now - shown < interval:
            return False
        shown, phase = now, progress.phase
        return True

    def say(progress: FineTuneProgress) -> None:
        console.print(progress_text(progress), soft_wrap=True, markup=False)

    if not console.is_terminal:

        def plain(progress: FineTuneProgress) -> None:
            if progress.message or due(progress, PLAIN_S):
                say(progress)

        yield plain
        return
    # No thread that refreshes the line: it would run while candidates are timed.
    with Live(Text("planning"), console=console, auto_refresh=False, transient=True) as live:

        def update(progress: FineTuneProgress) -> None:
            if progress.message:
                say(progress)
            elif due(progress, REFRESH_S):
                live.update(Text(progress_text(progress), overflow="ellipsis", no_wrap=True), refresh=True)

        yield update


def _show(result: FineTuneResult, console: Console) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table("held-out tasks", "top-1", "top-5", "Spearman")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, figures in ((result.base, result.before), ("fine-tuned", result.after)):
        table.add_row(name, *(f"{figures[key]:.3f}" for key in ("top1", "top5", "spearman")))
    console.print(table)
    if result.search:
        found = result.search
        console.print(
            f"{found['trials']} trials on {found['tasks']} of them, latency over that with the fine-tuned "
            f"weights: base {found['base']:.2f}, MetaSchedule {found['metaschedule']:.2f}"
        )
    tasks = ", ".join(f"{count} {split}" for split, count in result.tasks.items())
    times = ", ".join(f"{phase} {seconds:.0f} s" for phase, seconds in result.seconds.items())
    console.print(f"{result.schedules} schedules measured; tasks: {tasks}; {times}")
    console.print(f"{'kept' if result.kept else 'not kept'}: {result.why}")
    if result.kept:
        console.print(escape(f"{result.used_by} uses {result.registered}"), soft_wrap=True)
        console.print(
            f"publish: pretune hub push {escape(str(result.weights))} --repo ORG/NAME", soft_wrap=True
        )
