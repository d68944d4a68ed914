"""Training on several processes, as ``torchrun`` starts them, with the result of one up to rounding.

Every process draws the same batch and computes the same losses of all of it. Only what costs is shared: of
the programs to encode and the trajectories to roll out, each process takes its rows and then gets those of
the others (`shared`). What a process computes of its rows it then counts once for each process, and what all
compute is counted by each, so that the mean of their gradients (`average_gradients`) is that of one process.
Random numbers are only drawn in what all compute, so all draw the same.

Without ``torchrun`` there is one process, and nothing here does anything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

PATIENCE = timedelta(days=1)
"""How long processes wait for each other, as for the first to encode the data; torchrun ends the dead."""


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """Join the other processes if ``torchrun`` started this one."""
    if not dist.is_torchelastic_launched():
        yield
        return
    dist.init_process_group("gloo", timeout=PATIENCE)
    try:
        yield
    finally:
        dist.destroy_process_group()


def rank() -> int:
    """Which process this is; 0 writes files and speaks."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def wait_for_all() -> None:
    """Go on when all processes are here."""
    if world_size() > 1:
        dist.barrier()


@contextlib.contextmanager
def first_alone() -> Iterator[None]:
    """Process 0 does what is in the block before the others, who find the files that it wrote."""
    if rank() > 0:
        dist.barrier()
    yield
    if rank() == 0:
        wait_for_all()


def any_of(flag: bool) -> bool:
    """Whether `flag` is true in any process; all must ask."""
    if world_size() == 1:
        return flag
    found = torch.tensor(int(flag))
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found)


class _Gather(torch.autograd.Function):
    """Rows ``rank, rank + world_size, ...`` of each process -> all `n` rows, in every process."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, n: int) -> Tensor:
        rows = own.new_zeros(n, *own.shape[1:])
        rows[rank() :: world_size()] = own
        dist.all_reduce(rows)
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # All processes have the same loss, and so the same gradients of all rows.
        return grads[0][rank() :: world_size()] * world_size(), None


def shared(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """``function(*inputs)``, of which each process computes a part.

    Parameters
    ----------
    function : callable
        Of ``[n, .]`` each, to ``[n, .]``; must treat rows alone and draw no random numbers.
    inputs : Tensor
        The same in all processes.
    """
    if world_size() == 1:
        return function(*inputs)
    own = function(*(x[rank() :: world_size()] for x in inputs))
    return _Gather.apply(own, len(inputs[0]))  # type: ignore[return-value]


def average_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Replace gradients by their mean over the processes."""
    if world_size() == 1:
        return
    grads = [p.grad for p in parameters if p.grad is not None]
    flat = parameters_to_vector(grads)
    dist.all_reduce(flat)
    vector_to_parameters(flat / world_size(), grads)
