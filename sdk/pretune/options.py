"""Command-line options that commands of both packages share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click


def farm_options(command: Callable[..., None]) -> Callable[..., None]:
    """``--rpc-tracker`` and ``--rpc-key``: the command gets an `RPCAddress` or None as `rpc`."""

    @click.option("--rpc-tracker", metavar="HOST:PORT", help="Measure on a farm: its TVM RPC tracker.")
    @click.option("--rpc-key", metavar="KEY", help="Key of the farm's devices, which --target describes.")
    @functools.wraps(command)
    def with_farm(*args: Any, rpc_tracker: str | None, rpc_key: str | None, **kwargs: Any) -> None:
        from pretune.measure import RPCAddress

        command(*args, rpc=RPCAddress.parse(rpc_tracker, rpc_key), **kwargs)

    return with_farm
