"""Results on stdout, as JSON or for people; everything else that a command prints on stderr."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console


@contextlib.contextmanager
def to_stderr() -> Iterator[None]:
    """Send whatever prints meanwhile to stderr, native code included: stdout is for the result."""
    sys.stdout.flush()
    try:
        saved = os.dup(1)
    except OSError:  # no stdout at all
        with contextlib.redirect_stdout(sys.stderr):
            yield
        return
    try:
        with contextlib.suppress(OSError):
            os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)


def print_result(value: dict[str, Any], as_json: bool, show: Callable[[Console], None]) -> None:
    """Print a result on stdout: as JSON, or as `show` lays it out."""
    if as_json:
        click.echo(json.dumps(value, indent=2, allow_nan=False))
        return
    from rich.console import Console

    console = Console(highlight=False)
    if console.is_terminal:
        show(console)
        return
    # A file or a pipe: names are not cut to 80 columns, and no line ends in the padding of its cells.
    console = Console(width=140, highlight=False)
    with console.capture() as capture:
        show(console)
    for line in capture.get().splitlines():
        click.echo(line.rstrip())
