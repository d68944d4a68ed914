"""Whether a weights folder is what its manifest says.

Only ONNX, safetensors, JSON and Markdown are ever opened, and the plots of a card may lie beside them.
"""

from __future__ import annotations

import hashlib
import re
import stat
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pretune.model.weights import ONNX_FILES, Manifest

SUFFIXES = (".onnx", ".safetensors", ".json", ".md", ".png")
LONGEST_NAME = 100
REQUIRED = ("README.md", "config.json", *ONNX_FILES, "model.safetensors")
"""Files that published weights hold beside their manifest."""


@dataclass(frozen=True)
class Fault:
    """A file of a weights folder that is not as it should be."""

    name: str
    problem: str

    def __str__(self) -> str:
        name = self.name if self.name.isprintable() else ascii(self.name)  # of whatever lies there
        return f"{name}: {self.problem}"


def sha256_of(file: Path) -> str:
    """Hash of a file, 64 hex digits."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def problem_of_name(name: str) -> str:
    """What forbids a file of this name in a weights folder; empty if nothing does."""
    # One folder deep at most, and in characters that every file system and terminal takes as they are.
    if not re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", name, re.ASCII) or len(name) > LONGEST_NAME:
        return "not a plain name, such as onnx/encoder.onnx"
    if not name.endswith(SUFFIXES) or name == "manifest.json":
        return f"not among the kinds of files that weights hold ({', '.join(SUFFIXES)})"
    return ""


def faults_of_manifest(manifest: Manifest) -> list[Fault]:
    """What a manifest lists that it should not, or lacks."""
    faults = [Fault(name, problem) for name in manifest.files if (problem := problem_of_name(name))]
    faults += [Fault(name, "not in the manifest") for name in REQUIRED if name not in manifest.files]
    return faults


def read_manifest(file: Path) -> Manifest | Fault:
    """The manifest in a file, or why there is none."""
    try:
        if not stat.S_ISREG(file.lstat().st_mode):
            return Fault(file.name, "a link, or no plain file")
        return msgspec.json.decode(file.read_bytes(), type=Manifest)
    except FileNotFoundError:
        return Fault(file.name, "missing")
    except (msgspec.MsgspecError, RecursionError, OSError) as error:
        return Fault(file.name, f"cannot be read ({error})")


def check_folder(folder: Path) -> list[Fault]:
    """Compare every file of a folder with the manifest there: kind, size and sha256.

    Files and folders whose names begin with a dot are the hub's or git's, and are never opened.

    Returns
    -------
    faults : list of Fault
        One for each file that is bad, missing or too many; empty if all is well.
    """
    manifest = read_manifest(folder / "manifest.json")
    if isinstance(manifest, Fault):
        return [manifest]
    faults = faults_of_manifest(manifest)
    suspect = {fault.name for fault in faults}
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        mode = path.lstat().st_mode
        if not name.startswith(".") and not stat.S_ISDIR(mode):
            found[name] = mode
    for name, info in manifest.files.items():
        if name in suspect:
            continue
        file = folder / name
        if name not in found:
            faults.append(Fault(name, "missing"))
        elif not stat.S_ISREG(found[name]):
            faults.append(Fault(name, "a link, or no plain file"))
        elif (size := file.stat().st_size) != info.size:
            faults.append(Fault(name, f"{size} bytes, the manifest says {info.size}"))
        elif sha256_of(file) != info.sha256:
            faults.append(Fault(name, "damaged, its sha256 is not the manifest's"))
    extra = [name for name in found if name not in manifest.files and name != "manifest.json"]
    return faults + [Fault(name, "not in the manifest") for name in extra]
