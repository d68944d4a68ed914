"""Weights folders: reading and checking one. Which one to use is `pretune.hub`'s to say.

A folder holds what a hub repository of one target holds::

    README.md  config.json  manifest.json  model.safetensors
    onnx/encoder.onnx  onnx/action.onnx  onnx/transition.onnx  onnx/ranker.onnx

``config.json`` is read first, to see whether this pretune knows the format. The networks are opened only
after they and ``config.json`` agree with the hashes of the manifest; ``model.safetensors`` is for training.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from pretune.errors import WeightsError
from pretune.features.schema import SCHEMA_VERSION

FORMAT_VERSION = 1
MAX_OPSET, MAX_IR = 18, 10
"""Highest ONNX operator set and IR version that are accepted. ONNX Runtime 1.22, the lowest that pretune
installs with, loads both."""

ONNX_FILES = ("onnx/encoder.onnx", "onnx/action.onnx", "onnx/transition.onnx", "onnx/ranker.onnx")
ISA_LEVELS = {
    "x86_64": ("x86-64", "x86-64-v2", "x86-64-v3", "x86-64-v4"),
    "aarch64": ("aarch64", "aarch64-sve", "aarch64-sve2"),
}
"""Instruction set levels by architecture, each of which includes those before it; see
`pretune.hardware.hardware.isa_level_of`."""


class Covers(msgspec.Struct, frozen=True):
    """Hardware that the weights are for. An empty level is any of the architecture."""

    kind: str
    arch: str
    isa_level: str = ""


class MeasuredOn(msgspec.Struct, frozen=True):
    """One machine whose measurements the weights were trained on.

    Attributes
    ----------
    cpu : str
        Name of the machine's CPU, or GPU.
    microarch : str
        Its microarchitecture, or the architecture of a GPU.
    cores : int
        That measured; multiprocessors of a GPU.
    isa_level : str
        Instruction set level that its schedules were compiled for; empty if unknown.
    l2_bytes, l3_bytes : int
        Cache sizes; 0 if unknown.
    """

    cpu: str
    microarch: str
    cores: int
    schedules: int
    tasks: int
    days: tuple[str, ...] = ()
    isa_level: str = ""
    l2_bytes: int = 0
    l3_bytes: int = 0


class OnnxInfo(msgspec.Struct, frozen=True):
    opset: int
    ir: int


class Config(msgspec.Struct, frozen=True):
    """Contents of ``config.json``."""

    format_version: int
    min_sdk_version: str
    tvm: str
    feature_schema: int
    onnx: OnnxInfo
    covers: Covers
    measured_on: tuple[MeasuredOn, ...]
    sizes: dict[str, int]
    name: str
    quality: dict[str, float] = msgspec.field(default_factory=dict)


class FileInfo(msgspec.Struct, frozen=True):
    sha256: str
    size: int


class Manifest(msgspec.Struct, frozen=True):
    """Contents of ``manifest.json``."""

    files: dict[str, FileInfo]
    provenance: dict[str, Any] = msgspec.field(default_factory=dict)


@dataclass(frozen=True)
class Weights:
    """A checked weights folder.

    Attributes
    ----------
    path : pathlib.Path
    config : Config
    why : str
        How it was chosen, for people.
    notice : str
        One line to pass on to people if the weights do not cover the hardware; else empty.
    """

    path: Path
    config: Config
    why: str = ""
    notice: str = ""


class Software(NamedTuple):
    """Versions that decide whether weights can be used; None for a TVM that is not installed."""

    sdk: str
    tvm: str | None
    feature_schema: int = SCHEMA_VERSION


class Misfit(NamedTuple):
    """Why weights cannot be used with the installed versions, and the way out."""

    what: str
    way_out: str


def installed_software() -> Software:
    """The versions installed here."""
    import pretune

    try:
        tvm = importlib.metadata.version("apache-tvm")
    except importlib.metadata.PackageNotFoundError:
        tvm = None
    return Software(pretune.__version__, tvm)


def misfits(config: Config, software: Software) -> list[Misfit]:
    """What keeps weights from being used with some versions; empty if nothing does."""
    found = []
    if config.feature_schema != software.feature_schema:
        found.append(
            Misfit(
                f"weights for feature schema {config.feature_schema}, "
                f"this pretune computes {software.feature_schema}",
                _way_out(config.feature_schema, software.feature_schema),
            )
        )
    if _version(config.min_sdk_version) > _version(software.sdk):
        found.append(
            Misfit(
                f"weights need pretune {config.min_sdk_version} or newer, this is {software.sdk}",
                "run: pip install -U pretune",
            )
        )
    if software.tvm and not SpecifierSet(config.tvm).contains(software.tvm, prereleases=True):
        # The traces that the weights were trained on are those of some versions of TVM.
        found.append(
            Misfit(
                f"weights for apache-tvm {config.tvm}, but {software.tvm} is installed",
                f"run: pip install 'apache-tvm{config.tvm}', or use the weights that came with pretune "
                "(leave --weights out)",
            )
        )
    if config.onnx.opset > MAX_OPSET or config.onnx.ir > MAX_IR:
        found.append(
            Misfit(
                f"ONNX opset {config.onnx.opset}, IR {config.onnx.ir}; "
                f"at most {MAX_OPSET} and {MAX_IR} are read",
                "run: pip install -U pretune",
            )
        )
    return found


def read_config(path: Path) -> Config:
    """Read ``config.json`` of a weights folder.

    Raises
    ------
    WeightsError
        If it is missing, is of another format, or cannot be read.
    """
    file = path / "config.json"
    if not file.is_file():
        raise WeightsError(
            f"{file}: missing; a weights folder holds config.json, manifest.json and onnx/; "
            "run: pretune doctor, to see the weights at hand"
        )
    # The format is looked at first: a folder of another format may not decode as ours.
    version = _decode(file, dict[str, Any]).get("format_version")
    if version != FORMAT_VERSION:
        raise WeightsError(
            f"{path}: weights format {version!r}, this pretune reads {FORMAT_VERSION}; "
            + _way_out(version, FORMAT_VERSION)
        )
    config = _decode(file, Config)
    try:
        SpecifierSet(config.tvm)
    except InvalidSpecifier:
        raise WeightsError(
            f"{file}: {config.tvm!r} is no range of TVM versions; "
            "run: pretune doctor, to see the weights at hand"
        ) from None
    return config


def load_weights(
    path: Path | str, why: str = "given", stamps: Mapping[str, tuple[int, int]] | None = None
) -> Weights:
    """Check a weights folder and read its configuration.

    Parameters
    ----------
    path : Path or str
    why : str
        How the folder was chosen, for people.
    stamps : mapping, optional
        Size and time stamp of files when they were last checked: a file that has not changed since then is
        not hashed again.

    Raises
    ------
    WeightsError
        If a file is missing, is not what the manifest says, or was made for another format, feature schema,
        ONNX version, TVM or a newer pretune.
    """
    path = Path(path)
    if not path.is_dir():
        raise WeightsError(f"{path}: no such weights folder; run: pretune doctor, to see the weights at hand")
    config = read_config(path)
    if not (path / "manifest.json").is_file():
        raise WeightsError(f"{path / 'manifest.json'}: missing; {_repair(path)}")
    manifest = _decode(path / "manifest.json", Manifest)
    for misfit in misfits(config, installed_software()):
        raise WeightsError(f"{path}: {misfit.what}; {misfit.way_out}")
    for name in ("config.json", *ONNX_FILES):
        check_file(path, name, manifest, (stamps or {}).get(name))
    return Weights(path, config, why)


def check_file(path: Path, name: str, manifest: Manifest, stamp: tuple[int, int] | None = None) -> None:
    """Check one file of a weights folder against the manifest: size, then sha256.

    Raises
    ------
    WeightsError
        Naming the file and what is wrong with it.
    """
    info = manifest.files.get(name)
    if info is None:
        raise WeightsError(f"{path / 'manifest.json'}: does not list {name}; {_repair(path)}")
    file = path / name
    linked = file.is_symlink() or (path / name.split("/")[0]).is_symlink()
    if linked or not file.is_file():
        raise WeightsError(f"{file}: missing, or not a plain file; {_repair(path)}")
    found = file.stat()
    if found.st_size != info.size:
        raise WeightsError(f"{file}: {found.st_size} bytes, the manifest says {info.size}; {_repair(path)}")
    if (found.st_size, found.st_mtime_ns) == stamp:
        return
    if hashlib.sha256(file.read_bytes()).hexdigest() != info.sha256:
        raise WeightsError(f"{file}: damaged, its sha256 is not the manifest's; {_repair(path)}")


def _repair(path: Path) -> str:
    return f"run: pretune hub verify --repair {path}"


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(p) for p in text.split(".") if p.isdigit())


def _way_out(theirs: Any, ours: int) -> str:
    if isinstance(theirs, int) and theirs > ours:
        return "run: pip install -U pretune"
    return "use newer weights, or the ones that came with pretune (leave --weights out)"


def _decode(file: Path, type_: Any) -> Any:
    try:
        return msgspec.json.decode(file.read_bytes(), type=type_)
    except (msgspec.MsgspecError, RecursionError, OSError) as error:
        raise WeightsError(
            f"{file}: cannot be read ({error}); run: pretune doctor, to see the weights at hand"
        ) from None


def shipped_folder() -> Path | None:
    """Folder of the weights that came with pretune: inside the package, or beside it in a source checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "hub_cards", package.parents[1] / "hub_cards"):
        if folder.is_dir():
            return folder
    return None
