"""``pretune bench farm``: measuring through TVM's RPC tracker, on servers that may be killed and stalled."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pretune.bench.common import conv2d_relu, depthwise_relu, environment, matmul_relu, show_environment
from pretune.bench.loopback import Chaos, LoopbackFarm
from pretune.bench.measure import sample
from pretune.compat import setup_tvm
from pretune.errors import OptionError
from pretune.hardware import detect, make_target
from pretune.measure import FarmPool

if TYPE_CHECKING:
    from rich.console import Console

    from pretune.measure import Measured

MISHAPS = 40
"""Steps of chaos in a run, unless that is more than one in 5 trials."""


def run(*, servers: int = 4, trials: int = 400, chaos: bool = False) -> dict[str, Any]:
    """Measure the same candidates of three tasks on one RPC server, and on several, all on this machine.

    They share its cores, with each other and with the workers that build: this shows what the farm costs and
    survives, not how it scales. For the same reason no server is set aside for its speed.

    Parameters
    ----------
    servers : int
    trials : int
        In all.
    chaos : bool
        Kill, stall, restart and resume the several servers in turn.

    Returns
    -------
    dict
        ``one_per_minute``, ``per_minute`` and their ``ratio``; how many trials were ``measured``, ``lost``
        and measured ``twice``; ``failed`` by kind; trials ``by_device``; what ``chaos`` did.

    Raises
    ------
    OptionError
        If chaos would leave no server.
    """
    if chaos and servers <= Chaos.MOST_OUT:
        raise OptionError(
            f"--chaos leaves none of {servers} servers; give --servers {Chaos.MOST_OUT + 1} or more"
        )
    setup_tvm()
    machine = detect()
    target = make_target("native", machine)
    tasks = [matmul_relu(), conv2d_relu(), depthwise_relu()]
    mods = [c.mod for task in tasks for c in sample(task, target, math.ceil(trials / len(tasks)))][:trials]
    one = _measure(target, mods, servers=1, mishaps=0)
    several = _measure(target, mods, servers=servers, mishaps=MISHAPS if chaos else 0)
    return {
        "benchmark": "farm",
        "servers": servers,
        "trials": len(mods),
        "one_per_minute": one["per_minute"],
        "ratio": several["per_minute"] / one["per_minute"],
        **several,
        **environment(machine),
    }


def render(found: Mapping[str, Any], console: Console) -> None:
    """Print it."""
    console.print(
        f"{found['servers']} servers {found['per_minute']:.0f} trials a minute, one server "
        f"{found['one_per_minute']:.0f}: {found['ratio']:.2f}x, on the same cores",
        soft_wrap=True,
    )
    console.print(
        f"of {found['trials']} trials {found['measured']} measured, {found['lost']} lost, "
        f"{found['twice']} twice; failed: {found['failed'] or 'none'}",
        soft_wrap=True,
    )
    for device, count in found["by_device"].items():
        console.print(f"  {device}: {count}")
    if found["chaos"]:
        console.print(", ".join(f"{count} x {act}" for act, count in found["chaos"].items()), soft_wrap=True)
    show_environment(dict(found), console)


def _measure(target: Any, mods: Sequence[Any], *, servers: int, mishaps: int) -> dict[str, Any]:
    seen: Counter[int] = Counter()
    with LoopbackFarm(servers) as farm, FarmPool(target, farm.address, tolerance=math.inf) as pool:
        chaos = Chaos(farm, servers, max(5, len(mods) // mishaps)) if mishaps else None
        pool.calibrate()  # its sessions are open when the clock starts

        def on_result(at: int, _measured: Measured) -> None:
            seen[at] += 1
            if chaos is not None:
                chaos.trial_done()

        start = time.perf_counter()
        results = pool.measure(mods, on_result=on_result)
        seconds = time.perf_counter() - start
    failed = Counter(result.error_kind for result in results if not result.ok)
    return {
        "per_minute": 60 * len(mods) / seconds,
        "seconds": seconds,
        "measured": len(seen),
        "lost": len(mods) - len(seen),
        "twice": sum(count > 1 for count in seen.values()),
        "failed": dict(failed),
        "by_device": dict(Counter(result.device for result in results if result.device)),
        "chaos": dict(Counter(line.split()[0] for line in chaos.log)) if chaos else {},
    }
