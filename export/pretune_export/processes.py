"""Work that is shared by a few processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

CHUNK = 8
"""Items that a process gets at a time. It first spends seconds importing TVM, so none is started for no more
than these."""

Item, Found = TypeVar("Item"), TypeVar("Found")


def map_in_processes(
    function: Callable[[Item], Found], items: Sequence[Item], processes: int
) -> Iterator[Found]:
    """Call a function on each item; what it returns, in their order."""
    if len(items) <= CHUNK:
        yield from map(function, items)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap(function, items, chunksize=CHUNK)
