"""Work that is shared by a few processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from pretune.errors import EnvironmentFaultError

CHUNK = 8
"""Items that a process gets at a time. It first spends seconds importing TVM, so none is started for no more
than these."""

Item, Found = TypeVar("Item"), TypeVar("Found")


def map_in_processes(
    function: Callable[[Item], Found], items: Sequence[Item], processes: int
) -> Iterator[Found]:
    """Call a function on each item; what it returns, in their order.

    Raises
    ------
    EnvironmentFaultError
        If one of the processes is killed.
    """
    if len(items) <= CHUNK:
        yield from map(function, items)
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        try:
            with _without_main():
                found = pool.map(function, items, chunksize=CHUNK)
            yield from found
        except BrokenProcessPool:
            raise EnvironmentFaultError(
                "a process that shared the work was killed; if memory is short, end other programs first"
            ) from None
        finally:  # what is left when nobody wants it
            pool.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Keep processes that start meanwhile from running the user's script, which may have no guard for it."""
    main = sys.modules["__main__"].__dict__
    kept = {name: main.pop(name) for name in ("__spec__", "__file__") if name in main}
    main["__spec__"] = None
    try:
        yield
    finally:
        main.update(kept)
