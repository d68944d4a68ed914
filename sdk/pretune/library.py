"""The library of a whole model: compiled when something changed, and timed against the untuned build.

It is timed in a process of its own: as a whole its code has never run, so that a crash costs a figure and not
the run, and TVM's threads there are as many as candidates had.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from pretune import env
from pretune.errors import MeasureError, one_line

if TYPE_CHECKING:
    from tvm.target import Target

    from pretune.intake import Program
    from pretune.intake.program import TensorSpec

TURN_S = 0.2
"""How long one turn of one system lasts."""

PAUSE_S = 0.1
"""Between turns: threads of the last system spin for a while before they sleep."""

ROUNDS, ROUNDS_S = 5, 4.0
"""Turns of the library and of the untuned build; none begins later than that many seconds."""

TIMEOUT_S = 60.0
"""What takes longer is not timed: seconds to start the process, to load both and to time them."""

_BOOT = """\
import sys
sys.path[:] = {path!r}
sys.modules["torch"] = None
from pretune.library import main
main({folder!r}, {library!r})
"""


@dataclass(frozen=True)
class ModelLatency:
    """Seconds of one call of a whole model, medians of turns: its untuned build, and its library."""

    untuned: float
    tuned: float

    @property
    def speedup(self) -> float:
        """Untuned over tuned."""
        return self.untuned / self.tuned


def library_key(program: Program, target: Target, database: Path) -> str:
    """Hash of all that a library is made of: the same key, the same library.

    Parameters
    ----------
    program : Program
        Its parameters count too.
    target : tvm.target.Target
    database : Path
        Folder of a MetaSchedule database.
    """
    from tvm_ffi import structural_hash

    tvm = importlib.metadata.version("apache-tvm")
    parts = [structural_hash(program.mod), str(target), tvm, env.exact_math()]
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=16)
    for file in sorted(database.glob("*.json")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def random_inputs(specs: Sequence[TensorSpec]) -> dict[str, np.ndarray]:
    """Seeded random inputs by name: floats in [0, 1), integers 0 or 1."""
    import ml_dtypes

    rng = np.random.default_rng(0)
    made: dict[str, np.ndarray] = {}
    for spec in specs:
        kind = np.dtype(getattr(ml_dtypes, spec.dtype, spec.dtype))
        values = rng.integers(0, 2, spec.shape) if kind.kind in "biu" else rng.random(spec.shape)
        made[spec.name] = np.ascontiguousarray(np.asarray(values).astype(kind))
    return made


def in_turns(
    systems: Mapping[str, Callable[[], Any]], rounds: int, seconds: float = float("inf")
) -> dict[str, list[float]]:
    """Seconds a call, for each system one value a turn; no round but the first begins after `seconds`."""
    calls: dict[str, int] = {}
    turns: dict[str, list[float]] = {name: [] for name in systems}
    begun = time.perf_counter()
    for round_ in range(rounds):
        if round_ and time.perf_counter() - begun > seconds:
            break
        for name, call in systems.items():
            time.sleep(PAUSE_S)
            call()
            start = time.perf_counter()
            if name not in calls:
                call()
                calls[name] = max(1, round(TURN_S / (time.perf_counter() - start)))
                start = time.perf_counter()
            for _ in range(calls[name]):
                call()
            turns[name].append((time.perf_counter() - start) / calls[name])
    return turns


def time_library(program: Program, target: Target, library: Path, num_threads: int) -> ModelLatency:
    """Time a library of a program in turns with an untuned build of it, on random inputs.

    Raises
    ------
    MeasureError
        If inputs cannot be made, or the process fails or takes longer than `TIMEOUT_S`.
    EnvironmentFaultError, OutputError
        If the untuned build cannot be linked or written.
    """
    from pretune.compile import compile_program, export_library

    try:
        random_inputs(program.inputs)
    except TypeError as error:  # a dtype that numpy does not have
        raise MeasureError(f"inputs cannot be made: {one_line(error)}") from None
    with tempfile.TemporaryDirectory(prefix="pretune-") as name:
        folder = Path(name)
        export_library(compile_program(program, target), folder / "untuned.so")
        (folder / "inputs.json").write_bytes(msgspec.json.encode(program.inputs))
        # As in a worker, the process looks for modules where this one does.
        path = [os.path.abspath(entry) for entry in sys.path]  # noqa: PTH100  ("" is the working folder)
        boot = _BOOT.format(path=path, folder=name, library=str(library.resolve()))
        # Unpinned, since TVM pins all threads but the one that calls, which now and then shares a core.
        threads = {"TVM_NUM_THREADS": str(num_threads), "TVM_BIND_THREADS": "0"}
        try:
            done = subprocess.run(
                [sys.executable, "-c", boot],
                env=os.environ | threads,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            raise MeasureError(f"it takes longer than {TIMEOUT_S:.0f} s") from None
        if done.returncode:
            died = f"died of {Signals(-done.returncode).name}" if done.returncode < 0 else ""
            last = (done.stderr.strip().splitlines() or [""])[-1]
            raise MeasureError(died or last[:300] or f"exit status {done.returncode}")
        turns = msgspec.json.decode((folder / "turns.json").read_bytes(), type=dict[str, list[float]])
    return ModelLatency(*(statistics.median(turns[system]) for system in ("untuned", "tuned")))


def main(folder: str, library: str) -> None:
    """What the process of `time_library` does: ``untuned.so`` and ``inputs.json`` in, ``turns.json`` out."""
    import tvm
    from tvm import relax

    from pretune.intake.program import TensorSpec

    specs = msgspec.json.decode((Path(folder) / "inputs.json").read_bytes(), type=list[TensorSpec])
    arguments = [tvm.runtime.tensor(array) for array in random_inputs(specs).values()]

    def system(path: str | Path) -> Callable[[], Any]:
        loaded: Any = tvm.runtime.load_module(str(path))
        device: Any = tvm.cpu()
        machine = relax.VirtualMachine(loaded, device)
        return lambda: machine["main"](*arguments)

    systems = {"untuned": system(Path(folder) / "untuned.so"), "tuned": system(library)}
    turns = in_turns(systems, ROUNDS, ROUNDS_S)
    (Path(folder) / "turns.json").write_bytes(msgspec.json.encode(turns))
