"""Work that processes share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

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


def test_a_script_needs_no_guard(tmp_path):
    """Processes that import the user's script would run it, and start processes of their own."""
    script = tmp_path / "script.py"
    script.write_text(
        "from pretune_export.processes import map_in_processes\n"
        "print(sum(map_in_processes(abs, range(-20, 0), 2)))\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "210\n"), done.stderr
