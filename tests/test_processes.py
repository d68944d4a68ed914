"""Work that processes share."""

from __future__ import annotations

import os
import signal

import pytest

pytest.importorskip("torch")


def square(x):
    return x * x


def die_at_nine(x):
    if x == 9:
        os.kill(os.getpid(), signal.SIGKILL)
    return x


def test_results_come_in_order():
    from pretune_export.processes import map_in_processes

    assert list(map_in_processes(square, range(30), 2)) == [x * x for x in range(30)]


def test_a_killed_process_ends_the_work():
    from pretune.errors import EnvironmentFaultError
    from pretune_export.processes import map_in_processes

    with pytest.raises(EnvironmentFaultError, match="was killed"):
        list(map_in_processes(die_at_nine, range(30), 2))
