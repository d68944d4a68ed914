"""Every error pretune raises on purpose. Each also subclasses the builtin a caller would expect.

The message of each is one line (or a short table) that names the thing, what was expected and what
to run next; the command line prints it after ``error:`` and exits with `PretuneError.exit_code`.
"""

from __future__ import annotations

import re


class PretuneError(Exception):
    """Base of all errors raised on purpose."""

    exit_code = 1


class InputError(PretuneError, ValueError):
    """The program to tune cannot be read or imported: wrong file, shape, operator or dtype."""

    exit_code = 2


class OptionError(PretuneError, ValueError):
    """An argument is out of range or contradicts another one."""

    exit_code = 2


class TargetError(PretuneError, ValueError):
    """The target is unknown to TVM, or does not fit this machine."""

    exit_code = 2


class WeightsError(PretuneError, ValueError):
    """Weights are missing, damaged, or made for another format, feature schema or ONNX version."""

    exit_code = 3


class HubError(PretuneError, OSError):
    """The hub cannot be reached, refuses, or does not hold what was asked for."""

    exit_code = 8


class MissingExtraError(PretuneError, ImportError):
    """A command needs a package of an optional extra.

    Parameters
    ----------
    what : str
        What was asked for, as the start of a sentence.
    extra : str
        The extra of the distribution that brings it.
    """

    exit_code = 4

    def __init__(self, what: str, extra: str) -> None:
        # pip takes the extra of the pretune that is installed, be it from an index or from a checkout.
        super().__init__(f"{what} needs an optional package; run: pip install 'pretune[{extra}]'")
        self.extra = extra


class EnvironmentFaultError(PretuneError, RuntimeError):
    """The installation cannot work: TVM missing, out of range, or paired with an ffi that crashes."""

    exit_code = 4


class OutputError(PretuneError, OSError):
    """The output folder is read-only, full, or in use by another run."""

    exit_code = 5


class MeasureError(PretuneError, RuntimeError):
    """Measuring as a whole cannot go on; one bad candidate never raises this."""

    exit_code = 6


class NothingTunedError(PretuneError, RuntimeError):
    """No task could be tuned; the message carries the first failure."""

    exit_code = 7


def one_line(error: BaseException) -> str:
    """An exception as one line of at most 300 characters, without a stack that its message may hold.

    The first line of a message says most, save that a stack comes before what it is about, and that a line
    that ends in a colon goes on in the next (``"Compilation error:"``).
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    text = lines[0]
    if text.startswith("Traceback"):
        text = lines[-1]
    elif text.endswith(":") and len(lines) > 1 and not lines[1].startswith(("Traceback", "Stack trace")):
        text = f"{text} {lines[1]}"
    # Where in TVM's C++ it happened helps nobody here.
    return re.sub(r"^(\[[\d:]+\] )?\S+\.(cc|h):\d+: ", "", text)[:300]
