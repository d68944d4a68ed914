"""Weights folders: reading, checking, and choosing the one that covers the hardware.

A folder holds what a hub repository of one target holds::

    README.md  config.json  manifest.json  model.safetensors
    onnx/encoder.onnx  onnx/action.onnx  onnx/transition.onnx  onnx/ranker.onnx

``config.json`` is read first, to see whether this pretune knows the format. The networks are opened only
after they and ``config.json`` agree with the hashes of the manifest; ``model.safetensors`` is for training.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from pretune.errors import WeightsError
from pretune.features.schema import SCHEMA_VERSION
from pretune.hardware import Hardware

FORMAT_VERSION = 1
MAX_OPSET, MAX_IR = 18, 10
"""Highest ONNX operator set and IR version that are accepted. ONNX Runtime 1.22, the lowest that pretune
installs with, loads both."""

ONNX_FILES = ("onnx/encoder.onnx", "onnx/action.onnx", "onnx/transition.onnx", "onnx/ranker.onnx")
ISA_LEVELS = {
    "x86_64": ("x86-64", "x86-64-v2", "x86-64-v3", "x86-64-v4"),
    "aarch64": ("aarch64", "aarch64-sve", "aarch64-sve2"),
}
"""Instruction set levels by architecture, each of which includes those before it; see `isa_level_of`."""


class Covers(msgspec.Struct, frozen=True):
    """Hardware that the weights are for. An empty level is any of the architecture."""

    kind: str
    arch: str
    isa_level: str = ""


class MeasuredOn(msgspec.Struct, frozen=True):
    """One machine whose measurements the weights were trained on."""

    cpu: str
    microarch: str
    cores: int
    schedules: int
    tasks: int
    days: tuple[str, ...] = ()


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


@dataclass(frozen=True)
class Considered:
    """One weights folder that was looked at, and the reason it may be used or not.

    Attributes
    ----------
    accepted : bool
        Whether the weights can rank for the hardware at all.
    coverage : str
        ``"measured"``: trained on this microarchitecture. ``"compatible"``: on others with the same
        instruction set level or a lower one. ``"uncovered"``: not for this hardware; if accepted, for a
        higher level of its architecture.
    level : int
        Among those of one coverage, the highest comes first.
    """

    name: str
    path: Path
    accepted: bool
    coverage: str
    reason: str
    level: int = 0

    @property
    def described(self) -> str:
        """Coverage and reason for people, where the reason does not name the coverage itself."""
        return self.reason if self.reason.startswith(self.coverage) else f"{self.coverage}: {self.reason}"


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(p) for p in text.split(".") if p.isdigit())


def load_weights(path: Path | str, why: str = "given") -> Weights:
    """Check a weights folder and read its configuration.

    Raises
    ------
    WeightsError
        If a file is missing, is not what the manifest says, or was made for another format, feature schema,
        ONNX version, TVM or a newer pretune.
    """
    import pretune

    path = Path(path)
    if not path.is_dir():
        raise WeightsError(f"{path}: no such weights folder; run: pretune doctor, to see the weights at hand")
    config_file, manifest_file = path / "config.json", path / "manifest.json"
    for file in (config_file, manifest_file):
        if not file.is_file():
            raise WeightsError(
                f"{file}: missing; a weights folder holds config.json, manifest.json and onnx/; "
                "run: pretune doctor, to see the weights at hand"
            )
    # The format is looked at first: a folder of another format may not decode as ours.
    version = _decode(config_file, dict[str, Any]).get("format_version")
    if version != FORMAT_VERSION:
        raise WeightsError(
            f"{path}: weights format {version!r}, this pretune reads {FORMAT_VERSION}; "
            + _way_out(version, FORMAT_VERSION)
        )
    config = _decode(config_file, Config)
    manifest = _decode(manifest_file, Manifest)
    if config.feature_schema != SCHEMA_VERSION:
        raise WeightsError(
            f"{path}: weights for feature schema {config.feature_schema}, "
            f"this pretune computes {SCHEMA_VERSION}; " + _way_out(config.feature_schema, SCHEMA_VERSION)
        )
    if _version(config.min_sdk_version) > _version(pretune.__version__):
        raise WeightsError(
            f"{path}: weights need pretune {config.min_sdk_version} or newer, "
            f"this is {pretune.__version__}; run: pip install -U pretune"
        )
    _check_tvm(path, config)
    if config.onnx.opset > MAX_OPSET or config.onnx.ir > MAX_IR:
        raise WeightsError(
            f"{path}: ONNX opset {config.onnx.opset}, IR {config.onnx.ir}; "
            f"at most {MAX_OPSET} and {MAX_IR} are read; run: pip install -U pretune"
        )
    for name in ("config.json", *ONNX_FILES):
        check_file(path, name, manifest)
    return Weights(path, config, why)


def _check_tvm(path: Path, config: Config) -> None:
    """The traces that the weights were trained on are those of some versions of TVM."""
    try:
        installed = importlib.metadata.version("apache-tvm")
    except importlib.metadata.PackageNotFoundError:
        return  # Nothing works without it, and whatever needs it says so.
    try:
        fits = SpecifierSet(config.tvm).contains(installed, prereleases=True)
    except InvalidSpecifier:
        raise WeightsError(
            f"{path / 'config.json'}: {config.tvm!r} is no range of TVM versions; "
            "run: pretune doctor, to see the weights at hand"
        ) from None
    if not fits:
        raise WeightsError(
            f"{path}: weights for apache-tvm {config.tvm}, but {installed} is installed; "
            f"run: pip install 'apache-tvm{config.tvm}', or use the weights that came with pretune "
            "(leave --weights out)"
        )


def check_file(path: Path, name: str, manifest: Manifest) -> None:
    """Check one file of a weights folder against the manifest: size, then sha256.

    Raises
    ------
    WeightsError
        Naming the file and what is wrong with it.
    """
    again = "restore it, or reinstall: pip install --force-reinstall --no-deps pretune"
    info = manifest.files.get(name)
    if info is None:
        raise WeightsError(f"{path / 'manifest.json'}: does not list {name}; {again}")
    file = path / name
    if file.is_symlink() or not file.is_file():
        raise WeightsError(f"{file}: missing, or not a plain file; {again}")
    data = file.read_bytes()
    if len(data) != info.size:
        raise WeightsError(f"{file}: {len(data)} bytes, the manifest says {info.size}; {again}")
    if hashlib.sha256(data).hexdigest() != info.sha256:
        raise WeightsError(f"{file}: damaged, its sha256 is not the manifest's; {again}")


def _way_out(theirs: Any, ours: int) -> str:
    if isinstance(theirs, int) and theirs > ours:
        return "run: pip install -U pretune"
    return "use newer weights, or the ones that came with pretune (leave --weights out)"


def _decode(file: Path, type_: Any) -> Any:
    try:
        return msgspec.json.decode(file.read_bytes(), type=type_)
    except (msgspec.MsgspecError, OSError) as error:
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


def consider(hardware: Hardware, folders: list[Path]) -> list[Considered]:
    """Judge each weights folder for `hardware`; accepted ones first, the best coverage first."""
    out = []
    for folder in folders:
        if not (folder / "config.json").is_file():
            continue
        try:
            config = _decode(folder / "config.json", Config)
        except WeightsError as error:
            out.append(Considered(folder.name, folder, False, "uncovered", str(error)))
            continue
        out.append(_judge(hardware, folder, config))
    order = {"measured": 0, "compatible": 1, "uncovered": 2}
    return sorted(out, key=lambda c: (order[c.coverage], not c.accepted, -c.level, c.name))


def _judge(hardware: Hardware, folder: Path, config: Config) -> Considered:
    covers = config.covers

    def entry(coverage: str, reason: str, level: int = 0, accepted: bool = True) -> Considered:
        return Considered(config.name, folder, accepted, coverage, reason, level)

    if covers.kind != hardware.kind or covers.arch != hardware.arch:
        mine, theirs = f"{hardware.kind} {hardware.arch}", f"{covers.kind} {covers.arch}"
        return entry("uncovered", f"for {theirs}, this is {mine}", accepted=False)
    levels = ("", *ISA_LEVELS.get(covers.arch, (hardware.isa_level,)))
    if covers.isa_level not in levels:
        reason = f"for {covers.isa_level}, a level of {covers.arch} that this pretune does not know"
        return entry("uncovered", reason, accepted=False)
    level = levels.index(covers.isa_level)
    if covers.isa_level and hardware.isa_level not in levels:
        return entry("uncovered", f"for {covers.isa_level}, the level here is unknown", -level)
    if covers.isa_level and levels.index(hardware.isa_level) < level:
        return entry("uncovered", f"for {covers.isa_level}, this is {hardware.isa_level}", -level)
    if any(m.microarch == hardware.microarch for m in config.measured_on):
        return entry("measured", f"measured on {hardware.microarch}", level)
    if not covers.isa_level:
        return entry("compatible", f"any {covers.arch}")
    same = "same" if covers.isa_level == hardware.isa_level else "lower"
    return entry("compatible", f"{same} instruction set level {covers.isa_level}", level)


def find_weights(hardware: Hardware, explicit: Path | str | None = None) -> Weights:
    """The weights to use: the given folder, or the best of those that came with pretune.

    Weights for a higher instruction set level rank worse, but the search corrects them with what it measures:
    they are used where no others cover the hardware. So are any that are given. Both have a `Weights.notice`.

    Raises
    ------
    WeightsError
        If the given folder is unusable, or there are none for the kind and architecture of the hardware.
    """
    if explicit is not None:
        weights = load_weights(explicit)
        return _with_notice(weights, _judge(hardware, weights.path, weights.config))
    shipped = shipped_folder()
    considered = consider(hardware, sorted(p for p in shipped.iterdir() if p.is_dir()) if shipped else [])
    if considered and considered[0].accepted:
        best = considered[0]
        return _with_notice(load_weights(best.path, best.described), best)
    table = "; ".join(f"{c.name}: {c.reason}" for c in considered) or "no weights are installed"
    raise WeightsError(
        f"no weights for {hardware.microarch} ({hardware.isa_level or hardware.arch}): {table}; give a "
        "folder of weights for it with --weights; without weights, TVM itself tunes: ms.tune_relax"
    )


def _with_notice(weights: Weights, judged: Considered) -> Weights:
    if judged.coverage != "uncovered":
        return weights
    return replace(
        weights,
        notice=f"weights {judged.name} do not cover this target ({judged.reason}), so they rank worse "
        "here; what is measured corrects them",
    )
