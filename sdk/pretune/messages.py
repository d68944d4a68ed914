"""What pretune says on stderr that is no error, and what it makes of errors of the operating system."""

from __future__ import annotations

import contextlib
import errno
import sys
from collections.abc import Iterator
from pathlib import Path

from pretune.errors import OutputError


def notice(text: str) -> None:
    """Say something on stderr that is not an error."""
    print(f"notice: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def explain_os_errors(folder: Path, verb: str = "write to") -> Iterator[None]:
    """Turn what the operating system refuses into an OutputError that names the folder and the way out."""
    try:
        yield
    except OutputError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason, advice = "the disk is full", "free some space and run again to resume"
        elif error.errno == errno.EROFS:
            reason, advice = "it is on a read-only file system", "choose another folder with --out"
        elif error.errno in (errno.EACCES, errno.EPERM):
            reason, advice = "permission denied", "choose another folder with --out, or change its owner"
        elif error.errno in (errno.EEXIST, errno.ENOTDIR):
            reason, advice = "there is a file of that name, not a folder", "choose another folder with --out"
        else:
            reason, advice = error.strerror or str(error), "choose another folder with --out"
        raise OutputError(f"cannot {verb} {folder}: {reason}; {advice}") from error
