"""Find out what machine this is, from the files the kernel shows, and from LLVM for the name of the CPU."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pretune.hardware.hardware import Hardware, flags_of, isa_level_of, vector_bits_of

_ARCHS = {"amd64": "x86_64", "x64": "x86_64", "arm64": "aarch64"}
_VENDORS = {"GenuineIntel": "intel", "AuthenticAMD": "amd", "HygonGenuine": "hygon"}
_IMPLEMENTERS = {
    "0x41": "arm",
    "0x46": "fujitsu",
    "0x48": "hisilicon",
    "0x4e": "nvidia",
    "0x51": "qualcomm",
    "0x61": "apple",
    "0x6d": "microsoft",
    "0xc0": "ampere",
}
# Assumed where the kernel shows no caches, as in some virtual machines: what a server core of today has.
_DEFAULT_CACHES = (32 << 10, 1 << 20, 16 << 20)
_DEFAULT_CLOCK_GHZ = 2.5
# Version 1 kernels report "no limit" as the largest multiple of a page.
_NO_MEMORY_LIMIT = 1 << 62


@dataclass(frozen=True)
class CoreCount:
    """How the number of usable cores comes about.

    Parameters
    ----------
    online : int
        Logical CPUs of the machine.
    allowed : tuple of int
        Logical CPUs that the affinity of this process leaves (the cpuset of a cgroup included).
    physical : int
        Physical cores these belong to.
    quota : float or None
        CPU time that the cgroup allows, in CPUs; None without a limit.
    """

    online: int
    allowed: tuple[int, ...]
    physical: int
    quota: float | None

    @property
    def cores(self) -> int:
        """Physical cores to use: a quota is rounded down, since a throttled core spoils every timing."""
        if self.quota is None:
            return self.physical
        return max(1, min(self.physical, int(self.quota)))

    @property
    def why(self) -> str:
        """One line that says where `cores` comes from."""
        parts = [f"{self.online} logical CPUs"]
        if len(self.allowed) < self.online:
            parts.append(f"affinity allows {len(self.allowed)}")
        if self.physical < len(self.allowed):
            parts.append(f"these are {self.physical} physical cores")
        if self.quota is not None:
            parts.append(f"the cgroup allows {self.quota:g} CPUs")
        return ", ".join(parts)


def detect(root: Path = Path("/"), *, microarch: str | None = None, arch: str | None = None) -> Hardware:
    """Describe the machine.

    Parameters
    ----------
    root : Path
        Where its ``proc`` and ``sys`` are. Missing files get a default: from the running Python and psutil
        (macOS), or what is usual.
    microarch : str or None
        LLVM's name of the CPU; None asks LLVM, which only knows the machine it runs on. Below another root
        None means the instruction-set level.
    arch : str or None
        Architecture; None means that of the running Python.

    Returns
    -------
    hardware : Hardware
        With what this process may use of it: affinity, cgroup quota and memory limit are taken into account.
    """
    arch = (arch or platform.machine()).lower()
    arch = _ARCHS.get(arch, arch)
    here = root == Path("/")
    info = next(_processors(root), {})
    if microarch is None and here:
        microarch = _llvm_host_cpu()

    table = flags_of(arch)
    shown = set((info.get("flags") or info.get("Features") or "").split())
    if shown:
        isa = {name for name, flag in table.items() if flag in shown}
    elif microarch is not None and table:  # no /proc/cpuinfo: take what the CPU has by its name
        from pretune.hardware.target import llvm_features

        isa = set(table) & llvm_features({"kind": "llvm", "mcpu": microarch, "mtriple": f"{arch}-linux-gnu"})
    else:
        isa = set()
    level = isa_level_of(arch, isa)
    microarch = microarch or (level if arch == "x86_64" else "generic")

    cores = count_cores(root)
    caches = _caches(root, cores.allowed[0])
    sve_bits = 8 * _read_int(root / "proc/sys/abi/sve_default_vector_length", default=16)
    vendor, model = _names(info, arch, microarch)
    return Hardware(
        vendor=vendor,
        model_name=model,
        microarch=microarch,
        arch=arch,
        isa=tuple(sorted(isa)),
        isa_level=level,
        vector_bits=vector_bits_of(isa, sve_bits),
        cores=cores.cores,
        l1d_bytes=caches[0],
        l2_bytes=caches[1],
        l3_bytes=caches[2],
        clock_ghz=_clock_ghz(root, cores.allowed[0], info),
        memory_bytes=_memory_bytes(root),
    )


def count_cores(root: Path = Path("/")) -> CoreCount:
    """Count the physical cores this process may use, and say why.

    Parameters
    ----------
    root : Path
        Where ``proc`` and ``sys`` are.
    """
    online = _cpu_list(_read(root / "sys/devices/system/cpu/online"))
    processors = list(_processors(root))
    if not online:
        online = tuple(int(info["processor"]) for info in processors if info.get("processor", "").isdigit())
    if not online:  # not Linux
        import psutil

        logical = psutil.cpu_count() or 1
        return CoreCount(logical, tuple(range(logical)), psutil.cpu_count(logical=False) or logical, None)

    match = re.search(r"^Cpus_allowed_list:\s*(\S+)", _read(root / "proc/self/status"), re.MULTILINE)
    allowed = _cpu_list(match.group(1)) if match else online
    allowed = tuple(cpu for cpu in allowed if cpu in online) or online

    ids = {info.get("processor"): (info.get("physical id"), info.get("core id")) for info in processors}
    groups: set[object] = set()
    for cpu in allowed:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        siblings = _read(topology / "core_cpus_list") or _read(topology / "thread_siblings_list")
        package_and_core = ids.get(str(cpu), (None, None))
        if siblings:
            groups.add(siblings.strip())
        else:
            groups.add(cpu if None in package_and_core else package_and_core)
    return CoreCount(len(online), allowed, len(groups), _cpu_quota(root))


def _llvm_host_cpu() -> str:
    from tvm.target import codegen

    return str(codegen.llvm_get_system_cpu())


def _names(info: dict[str, str], arch: str, microarch: str) -> tuple[str, str]:
    """Vendor and model name."""
    if "vendor_id" in info:
        vendor = _VENDORS.get(info["vendor_id"], info["vendor_id"].lower())
        return vendor, info.get("model name") or microarch
    if "CPU implementer" in info:
        vendor = _IMPLEMENTERS.get(info["CPU implementer"], "unknown")
        return vendor, info.get("model name") or f"{microarch} (part {info.get('CPU part', '?')})"
    if info:
        return "unknown", info.get("model name") or microarch
    vendor = "apple" if microarch.startswith("apple") else "unknown"
    return vendor, platform.processor() or f"{microarch} ({arch})"


def _caches(root: Path, cpu: int) -> tuple[int, int, int]:
    """Bytes of L1 data, L2 and L3 of one CPU; a level that is missing beside others does not exist."""
    sizes: dict[int, int] = {}
    for index in sorted((root / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index*")):
        level = _read_int(index / "level", default=0)
        match = re.fullmatch(r"(\d+)([KMG]?)", _read(index / "size").strip())
        if match and level in (1, 2, 3) and _read(index / "type").strip() in ("Data", "Unified"):
            sizes[level] = int(match.group(1)) << {"": 0, "K": 10, "M": 20, "G": 30}[match.group(2)]
    if not sizes:
        return _DEFAULT_CACHES
    l1d, l2, _ = _DEFAULT_CACHES
    return sizes.get(1, l1d), sizes.get(2, l2), sizes.get(3, 0)


def _clock_ghz(root: Path, cpu: int, info: dict[str, str]) -> float:
    """Highest clock in GHz. The clock of this moment comes last: it differs from call to call."""
    khz = _read_int(root / f"sys/devices/system/cpu/cpu{cpu}/cpufreq/cpuinfo_max_freq", default=0)
    if khz:
        return khz / 1e6
    match = re.search(r"@\s*([\d.]+)\s*GHz", info.get("model name", ""))
    if match:
        return float(match.group(1))
    try:
        mhz = float(info.get("cpu MHz", "0"))
    except ValueError:
        mhz = 0.0
    if not mhz and not info:
        import psutil

        try:
            frequency = psutil.cpu_freq()
        except (OSError, NotImplementedError, RuntimeError):  # macOS on ARM, some containers
            frequency = None
        mhz = (frequency.max or frequency.current) if frequency else 0.0
    return round(mhz / 1000, 3) if mhz else _DEFAULT_CLOCK_GHZ


def _memory_bytes(root: Path) -> int:
    match = re.search(r"^MemTotal:\s*(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    if match:
        total = int(match.group(1)) << 10
    else:
        import psutil

        total = psutil.virtual_memory().total
    for folder in _cgroups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = _read_int(folder / name, default=0)
            if 0 < limit < _NO_MEMORY_LIMIT:
                total = min(total, limit)
    return total


def _cpu_quota(root: Path) -> float | None:
    """CPU time per time, the least that this process's cgroup or one above it allows."""
    limits = []
    for folder in _cgroups(root, "cpu"):
        fields = _read(folder / "cpu.max").split()  # version 2: "150000 100000" or "max 100000"
        if not fields:  # version 1: two files, -1 for no limit
            fields = [_read(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        if len(fields) == 2 and fields[0].isdigit() and fields[1].isdigit() and int(fields[1]):
            limits.append(int(fields[0]) / int(fields[1]))
    return min(limits, default=None)


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's cgroup and those above it, of both versions, for a controller.

    In a container the path in ``/proc/self/cgroup`` may be the host's, of which only the lower end is
    mounted: then the mount point itself, which always comes last, is this process's cgroup.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            mounts = ["sys/fs/cgroup", "sys/fs/cgroup/unified"]
        elif controller in controllers.split(","):
            mounts = [f"sys/fs/cgroup/{controllers}", f"sys/fs/cgroup/{controller}"]
        else:
            continue
        inner = PurePosixPath(path.strip().lstrip("/"))
        if ".." in inner.parts:  # outside of our cgroup namespace
            inner = PurePosixPath()
        for mount in dict.fromkeys(mounts):
            for folder in (inner, *inner.parents):
                yield root / mount / folder


def _processors(root: Path) -> Iterator[dict[str, str]]:
    """The blocks of ``/proc/cpuinfo``, one per logical CPU."""
    for block in re.split(r"\n\s*\n", _read(root / "proc/cpuinfo")):
        pairs = (line.partition(":") for line in block.splitlines() if ":" in line)
        info = {key.strip(): value.strip() for key, _, value in pairs}
        if "processor" in info:
            yield info


def _cpu_list(text: str) -> tuple[int, ...]:
    """Parse the kernel's ``0-3,8,10-11``."""
    cpus: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            cpus.extend(range(int(first), int(last or first) + 1))
    return tuple(cpus)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _read_int(path: Path, default: int) -> int:
    text = _read(path).strip()
    return int(text) if text.isdigit() else default
