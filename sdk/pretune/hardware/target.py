"""TVM targets: from what a user writes, for the machine at hand."""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from pretune.errors import TargetError
from pretune.hardware.hardware import Hardware, flags_of, isa_level_of, vector_bits_of
from pretune.native_log import quiet_native

if TYPE_CHECKING:
    from tvm.target import Target

_LISTS = {"keys", "libs", "mattr", "cl-opt"}
_NUMBERS = {"num-cores", "opt-level", "vector-width"}
# What every NVIDIA GPU since Maxwell offers; TVM's GPU design spaces fail without them.
_CUDA_LIMITS = {
    "max_threads_per_block": 1024,
    "max_shared_memory_per_block": 49152,
    "registers_per_block": 65536,
    "thread_warp_size": 32,
}
_FORMS = 'expected native, "llvm -mcpu=NAME", a tag such as nvidia/nvidia-a100, or JSON as {"kind":"llvm"}'


def make_target(spec: str | Mapping[str, Any] | Target | None, hardware: Hardware) -> Target:
    """Build a target that MetaSchedule accepts.

    Parameters
    ----------
    spec : str, mapping, Target or None
        None or ``"native"``: this machine. A string may also be an old target string
        (``"llvm -mcpu=znver4 -num-cores 4"``; ``native`` may head one too), JSON, or a tag.
    hardware : Hardware
        The machine: what ``native`` means, and the value of a missing ``num-cores``.

    Returns
    -------
    target : tvm.target.Target
        Of kind ``llvm`` with ``num-cores``, or of kind ``cuda`` with an architecture and its limits.

    Raises
    ------
    TargetError
        If the kind, CPU, feature, triple, tag or option is unknown; similar names are listed.
    """
    from tvm.target import Target

    config = _parse(spec, hardware)
    kind = config.get("kind")
    if kind == "llvm":
        _check_llvm(config)
        config.setdefault("num-cores", hardware.cores)
        cores = config["num-cores"]
        if not isinstance(cores, int) or cores < 1:
            raise TargetError(f"num-cores of a target is a whole number of at least 1, not {cores!r}")
    elif kind == "cuda":
        _check_cuda(config)
        for name, value in _CUDA_LIMITS.items():
            config.setdefault(name, value)
    else:
        raise TargetError(
            f"target kind {kind!r} is not supported{_similar(str(kind), ('llvm', 'cuda', 'native'))}; "
            "pretune tunes for llvm (CPUs) and cuda"
        )
    if isinstance(spec, Target) and config == json.loads(str(spec)):
        return spec
    return _build(config)


def native_config(hardware: Hardware) -> dict[str, Any]:
    """Target of the machine itself, as a dict.

    Instruction sets that LLVM expects of the CPU but the machine does not show (a hypervisor may hide
    AVX-512) are switched off with ``mattr``, since using one would end the process.

    Parameters
    ----------
    hardware : Hardware
        The machine.
    """
    mcpu = hardware.microarch
    if mcpu not in _cpu_names(None):  # newer than this LLVM, or not recognised
        mcpu = hardware.isa_level if hardware.isa_level in _cpu_names(None) else "generic"
    config: dict[str, Any] = {"kind": "llvm", "mcpu": mcpu, "num-cores": hardware.cores}
    implied = llvm_features(config) & set(flags_of(hardware.arch))
    hidden = sorted(implied - set(hardware.isa))
    if hidden:
        config["mattr"] = [f"-{name}" for name in hidden]
    return config


def parse_target_string(text: str) -> dict[str, Any]:
    """Turn a target string of the form that TVM dropped into the dict form.

    Parameters
    ----------
    text : str
        Such as ``"llvm -mcpu=znver4 -mattr=+avx2,-avx512f -num-cores 2"``.

    Raises
    ------
    TargetError
        If it is not of this form.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise TargetError(f"cannot read target {text!r}: {error}; {_FORMS}") from None
    if not words:
        raise TargetError(f"the target is empty; {_FORMS}")
    kind = words.pop(0)
    config: dict[str, Any] = {"kind": kind}
    while words:
        word = words.pop(0)
        match = re.fullmatch(r"--?([A-Za-z][\w.-]*)(?:=(.*))?", word)
        if not match:
            raise TargetError(f"cannot read {word!r} in target {text!r}: options are written -mcpu=NAME")
        name, value = match.groups()
        # A value may stand alone; only one of mattr may begin with a sign.
        if value is None and words and (name == "mattr" or not re.match(r"-{1,2}[A-Za-z]", words[0])):
            value = words.pop(0)
        config[name] = _option(name, value)
    return config


def llvm_features(config: Mapping[str, Any]) -> frozenset[str]:
    """Instruction sets and tuning flags of a target's ``mcpu`` and ``mattr``, by LLVM's names."""
    from tvm.target import Target, codegen

    return frozenset(str(name) for name in codegen.llvm_get_cpu_features(Target(dict(config))))


def hardware_for_target(target: Target, hardware: Hardware, *, here: bool = True) -> Hardware:
    """Describe the machine as code for a target sees it.

    On an AVX-512 machine, ``mcpu=x86-64-v3`` leaves vectors of 256 bits. The microarchitecture, caches and
    clock stay those of the machine; for a target of another architecture, or where the code runs elsewhere,
    they are unknown, and the target's CPU's name, with the machine's caches and clock for want of better,
    stands in.

    Parameters
    ----------
    target : tvm.target.Target
        As from `make_target`.
    hardware : Hardware
        This machine.
    here : bool
        Whether it will run the code; a farm's devices are such as the target describes.
    """
    config = json.loads(str(target))
    if config["kind"] == "cuda":
        return _cuda_hardware(config, hardware, _cuda_device() if here else None)
    arch = _arch_of(config, hardware)
    isa = llvm_features(config) & set(flags_of(arch))
    sve_bits = hardware.vector_bits if arch == hardware.arch and "sve" in hardware.isa else 128
    changes: dict[str, Any] = {
        "arch": arch,
        "isa": tuple(sorted(isa)),
        "isa_level": isa_level_of(arch, isa),
        "vector_bits": int(config.get("vector-width") or vector_bits_of(isa, sve_bits)),
        "cores": int(config.get("num-cores") or hardware.cores),
    }
    if not here or arch != hardware.arch:
        mcpu = config.get("mcpu") or "generic"
        changes |= {"microarch": mcpu, "model_name": mcpu, "vendor": "unknown"}
    return msgspec.structs.replace(hardware, **changes)


def check_runs_here(target: Target, hardware: Hardware) -> None:
    """Check that the machine can run code for a target; if not, the first kernel would end the process.

    Raises
    ------
    TargetError
        If the target has another architecture or uses instruction sets the machine lacks.
    """
    config = json.loads(str(target))
    if config["kind"] == "cuda":
        if _cuda_device() is None:
            raise TargetError("target cuda cannot be measured here: no GPU was found; tune with --trials 0")
        return
    name = config.get("mcpu") or config.get("mtriple") or config["kind"]
    arch = _arch_of(config, hardware)
    if arch != hardware.arch:
        raise TargetError(
            f"target {name} is for {arch}, so nothing can be measured on this machine ({hardware.arch}); "
            "tune with --trials 0"
        )
    lacking = sorted((llvm_features(config) & set(flags_of(arch))) - set(hardware.isa))
    if lacking:
        raise TargetError(
            f"target {name} uses what this machine ({hardware.microarch}) lacks: {', '.join(lacking)}; "
            "tune for native, or with --trials 0"
        )


def _parse(spec: Any, hardware: Hardware) -> dict[str, Any]:
    from tvm.target import Target

    if spec is None:
        return native_config(hardware)
    if isinstance(spec, Target):
        return json.loads(str(spec))
    if isinstance(spec, Mapping):
        config = dict(spec)
    elif not isinstance(spec, str):
        raise TargetError(f"a target is a string, a dict or a Target, not {type(spec).__name__}; {_FORMS}")
    elif spec.lstrip().startswith("{"):
        try:
            config = json.loads(spec)
        except ValueError as error:
            raise TargetError(f"target {spec!r} is not valid JSON: {error}") from None
    else:
        config = parse_target_string(spec)
    if "kind" not in config and "tag" not in config:
        raise TargetError(f"target {spec!r} names no kind; {_FORMS}")

    kind = config.get("kind")
    if kind == "native":
        native = native_config(hardware)
        hidden = native.pop("mattr", [])
        if hidden and "mcpu" not in config:
            chosen = config.get("mattr", [])
            config["mattr"] = hidden + (_option("mattr", chosen) if isinstance(chosen, str) else list(chosen))
        return {**native, **config, "kind": "llvm"}
    if kind is None or kind in _tags():
        tag = config.pop("tag") if kind is None else config.pop("kind")
        if tag not in _tags():
            raise TargetError(f"unknown target tag {tag!r}{_similar(str(tag), _tags())}")
        return {**json.loads(str(Target(tag))), **config}
    if "/" in str(kind):
        raise TargetError(f"unknown target tag {kind!r}{_similar(str(kind), _tags())}")
    if isinstance(spec, str) and kind in _cpu_names(None):
        raise TargetError(f'{kind!r} is a CPU, not a kind of target; write "llvm -mcpu={kind}"')
    return config


def _check_llvm(config: dict[str, Any]) -> None:
    """Check names that LLVM would replace, ignore or crash on; normalise ``mattr`` to a list."""
    from tvm.target import codegen

    triple = config.get("mtriple")
    # An unknown triple is a segfault later on.
    if triple is not None:
        with quiet_native():
            known = codegen.llvm_is_valid_cpu("generic", str(triple))
        if not known:
            raise TargetError(
                f"unknown target triple {triple!r}; this one's is {codegen.llvm_get_system_triple()}, "
                "for ARM it is aarch64-linux-gnu"
            )
    if config.get("mcpu") in ("native", "host"):
        config["mcpu"] = str(codegen.llvm_get_system_cpu())
    mcpu = config.get("mcpu")
    if mcpu is not None and mcpu not in _cpu_names(triple):
        where = f" for {triple}" if triple else ""
        similar = _similar(str(mcpu), _cpu_names(triple))
        raise TargetError(f"LLVM does not know the CPU {mcpu!r}{where}{similar}")
    if "mattr" not in config:
        return
    if isinstance(config["mattr"], str):
        config["mattr"] = _option("mattr", config["mattr"])
    if not isinstance(config["mattr"], list | tuple):
        raise TargetError(f"mattr of a target is a list such as ['+avx2'], not {config['mattr']!r}")
    base = {key: config[key] for key in ("kind", "mcpu", "mtriple") if key in config}
    for entry in config["mattr"]:
        # LLVM reads a name without its sign as "off", and only warns of an unknown one.
        if not isinstance(entry, str) or entry[:1] not in ("+", "-"):
            raise TargetError(f"mattr entry {entry!r} needs a sign: +{entry} to use it, -{entry} not to")
        with quiet_native():
            with_it = llvm_features({**base, "mattr": [f"+{entry[1:]}"]})
        if entry[1:] not in with_it:
            known = llvm_features(base) | set(flags_of("x86_64")) | set(flags_of("aarch64"))
            raise TargetError(f"LLVM does not know the feature {entry[1:]!r}{_similar(entry[1:], known)}")


def _check_cuda(config: Mapping[str, Any]) -> None:
    if "arch" not in config and _cuda_device() is None:  # TVM would silently take sm_50
        raise TargetError(
            "target cuda needs an architecture, for no GPU was found here; write "
            '"cuda -arch=sm_80" or a tag such as nvidia/nvidia-a100'
        )
    if "arch" in config and not re.fullmatch(r"sm_\d+[a-z]?", str(config["arch"])):
        raise TargetError(f"arch of a cuda target looks like sm_80 or sm_90a, not {config['arch']!r}")


def _cuda_hardware(config: Mapping[str, Any], hardware: Hardware, device: Any) -> Hardware:
    """Describe the GPU: what the target says of it, and the device itself where it is present."""
    arch = str(config.get("arch", "sm_50"))
    return Hardware(
        vendor="nvidia",
        model_name=str(device.device_name) if device is not None else arch,
        microarch=arch,
        arch=arch,
        isa=(),
        isa_level=arch,
        vector_bits=32 * int(config.get("thread_warp_size", 32)),
        cores=int(device.multi_processor_count) if device is not None else 1,
        l1d_bytes=int(config.get("max_shared_memory_per_block", 49152)),
        l2_bytes=int(config.get("l2_cache_size_bytes", 0)),
        l3_bytes=0,
        clock_ghz=int(device.max_clock_rate) / 1e6 if device is not None else 1.5,
        memory_bytes=hardware.memory_bytes,
        kind="cuda",
    )


def _cuda_device() -> Any:
    import tvm

    device: Any = tvm.cuda(0)
    return device if device.exist else None


def _build(config: Mapping[str, Any]) -> Target:
    from tvm.target import Target

    try:
        return Target(dict(config))
    except Exception as error:  # TVM raises several types here, all with a usable first sentence
        reason = str(error).strip().split(". Target creation")[0].splitlines()[0]
        shown = json.dumps(dict(config), default=str)
        raise TargetError(f"TVM refuses the target {shown}: {reason}") from None


def _option(name: str, value: str | None) -> Any:
    """Value of an old-style option in the type that the dict form asks for."""
    if value is None or value.lower() == "true":
        return True
    if name.startswith("fast-math") or value.lower() == "false":
        return value.lower() not in ("0", "false")
    if name in _LISTS:
        return [part.strip() for part in value.split(",") if part.strip()]
    if name in _NUMBERS or name.startswith("max_") or name.endswith(("_bytes", "_size", "_per_block")):
        return int(value) if re.fullmatch(r"-?\d+", value) else value
    return value


def _arch_of(config: Mapping[str, Any], hardware: Hardware) -> str:
    """Architecture that code for a target is made of; without a triple it is the machine's."""
    triple = config.get("mtriple")
    if not triple:
        return hardware.arch
    arch = str(triple).split("-")[0].lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(arch, arch)


def _cpu_names(triple: str | None) -> tuple[str, ...]:
    from tvm.target import Target, codegen

    target = Target({"kind": "llvm", **({"mtriple": str(triple)} if triple else {})})
    return tuple(str(name) for name in codegen.llvm_get_cpu_archlist(target))


def _tags() -> tuple[str, ...]:
    import tvm

    return tuple(str(name) for name in tvm.target.list_tags() or ())


def _similar(name: str, names: Iterable[str]) -> str:
    """The end of a message: similar names, if there are any."""
    matches = difflib.get_close_matches(name, list(names), n=4, cutoff=0.5)
    return f"; similar names: {', '.join(matches)}" if matches else ""
