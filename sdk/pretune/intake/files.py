"""What every input file is checked for before its format matters."""

from __future__ import annotations

from pathlib import Path

from pretune.errors import InputError

_LFS = b"version https://git-lfs.github.com/spec/"


def check_file(path: Path) -> None:
    """Check that a file is there, has contents, and is not a git-LFS pointer to them.

    Raises
    ------
    InputError
        If not, with the next step.
    """
    if not path.exists():
        raise InputError(f"{path} does not exist; check the path")
    if path.is_dir():
        raise InputError(f"{path} is a folder; give the model file in it")
    try:
        with path.open("rb") as file:
            head = file.read(len(_LFS))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}; check its permissions") from error
    if not head:
        raise InputError(f"{path} is empty; download or export it again")
    if head == _LFS:
        raise InputError(
            f"{path} is a git-LFS pointer, not the file itself; run: git lfs pull --include {path.name}"
        )
