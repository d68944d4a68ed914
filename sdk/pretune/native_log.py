"""Keep the warnings of TVM's C++ side off the terminal where they say nothing a user can act on."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from pretune import env


@contextlib.contextmanager
def quiet_native() -> Iterator[None]:
    """Drop what native code writes to stderr meanwhile (``PRETUNE_DEBUG=1`` keeps it).

    TVM logs through file descriptor 2 and has no switch for it. The descriptor belongs to the process: use
    this around short calls, and not while another thread prints. A crash of the process inside is silent
    too, so nothing that is known to crash belongs in it.
    """
    if env.debug():
        yield
        return
    with contextlib.suppress(Exception):  # stderr may be closed or replaced
        sys.stderr.flush()
    try:
        saved = os.dup(2)
    except OSError:  # no stderr at all
        yield
        return
    with open(os.devnull, "wb") as sink:  # noqa: PTH123 (os.devnull is no Path)
        os.dup2(sink.fileno(), 2)
    try:
        yield
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os.dup2(saved, 2)
        os.close(saved)
