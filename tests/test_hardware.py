"""Hardware detection on machines described as /proc and /sys trees, and targets built for them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from tvm.target import Target, codegen

from pretune.errors import TargetError
from pretune.hardware import (
    VECTOR_NAMES,
    check_runs_here,
    count_cores,
    detect,
    hardware_for_target,
    make_target,
    native_config,
    parse_target_string,
)

V2 = "fpu sse2 pni ssse3 sse4_1 sse4_2 popcnt cx16"
V3 = f"{V2} avx avx2 fma f16c bmi1 bmi2 abm movbe"
V4 = f"{V3} avx512f avx512dq avx512cd avx512bw avx512vl"
ICELAKE = f"{V4} gfni avx512ifma avx512vbmi avx512_vbmi2 avx512_vnni avx512_bitalg avx512_vpopcntdq"
ZEN4 = f"{ICELAKE} avx512_bf16"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def machine(
    root: Path,
    *,
    cpus: int = 4,
    smt: int = 1,
    flags: str = V3,
    model: str = "Some CPU @ 3.00GHz",
    vendor: str = "GenuineIntel",
    allowed: str | None = None,
    caches: bool = True,
    files: dict[str, str] | None = None,
) -> Path:
    """Write the /proc and /sys of a machine whose hyper-threads are numbered after all first threads."""
    cores = cpus // smt
    blocks = [
        f"processor\t: {cpu}\nvendor_id\t: {vendor}\nmodel name\t: {model}\ncpu MHz\t\t: 2100.5\n"
        f"physical id\t: 0\ncore id\t\t: {cpu % cores}\nflags\t\t: {flags}\n"
        for cpu in range(cpus)
    ]
    tree = {
        "proc/cpuinfo": "\n".join(blocks),
        "proc/meminfo": "MemTotal:       16000000 kB\nMemFree: 1 kB\n",
        "proc/self/status": f"Name:\tx\nCpus_allowed_list:\t{allowed or f'0-{cpus - 1}'}\n",
        "sys/devices/system/cpu/online": f"0-{cpus - 1}\n",
    }
    for cpu in range(cpus):
        base = f"sys/devices/system/cpu/cpu{cpu}"
        siblings = ",".join(str(other) for other in range(cpu % cores, cpus, cores))
        tree[f"{base}/topology/thread_siblings_list"] = f"{siblings}\n"
        if caches:
            for index, (level, kind, size) in enumerate(
                [
                    ("1", "Data", "32K"),
                    ("1", "Instruction", "64K"),
                    ("2", "Unified", "1024K"),
                    ("3", "Unified", "32M"),
                ]
            ):
                tree |= {
                    f"{base}/cache/index{index}/level": level,
                    f"{base}/cache/index{index}/type": kind,
                    f"{base}/cache/index{index}/size": size,
                }
    write(root, tree | (files or {}))
    return root


# This machine ---------------------------------------------------------------------------------------


def test_this_machine_compiles_and_runs_for_native():
    import tvm
    from tvm.script import tirx as T

    hardware = detect()
    assert hardware.microarch == codegen.llvm_get_system_cpu()
    assert 1 <= hardware.cores <= len(os.sched_getaffinity(0))
    assert hardware.vector_bits in (128, 256, 512)
    assert hardware.memory_bytes > 2**28
    target = make_target("native", hardware)
    assert target.attrs["num-cores"] == hardware.cores
    check_runs_here(target, hardware)

    @T.prim_func(s_tir=True)
    def double(a: T.Buffer((64,), "float32"), b: T.Buffer((64,), "float32")):
        for i in T.vectorized(64):
            with T.sblock("b"):
                v = T.axis.spatial(64, i)
                b[v] = a[v] * T.float32(2)

    source = tvm.runtime.tensor(np.arange(64, dtype="float32"))
    result = tvm.runtime.tensor(np.zeros(64, dtype="float32"))
    tvm.compile(double, target=target)["double"](source, result)
    np.testing.assert_array_equal(result.numpy(), np.arange(64) * 2)


# Cores ----------------------------------------------------------------------------------------------


def test_hyper_threads_count_once(tmp_path):
    count = count_cores(machine(tmp_path, cpus=16, smt=2))
    assert (count.online, count.physical, count.quota, count.cores) == (16, 8, None, 8)
    assert count.why == "16 logical CPUs, these are 8 physical cores"


def test_affinity_to_both_threads_of_two_cores(tmp_path):
    count = count_cores(machine(tmp_path, cpus=16, smt=2, allowed="0-1,8-9"))
    assert count.allowed == (0, 1, 8, 9)
    assert count.cores == 2
    assert "affinity allows 4" in count.why


def test_siblings_from_cpuinfo_without_a_topology_folder(tmp_path):
    root = machine(tmp_path, cpus=8, smt=2)
    for path in root.glob("sys/devices/system/cpu/cpu*/topology/*"):
        path.unlink()
    assert count_cores(root).cores == 4


def test_offline_cpus_are_left_out(tmp_path):
    root = machine(tmp_path, cpus=8, allowed="0-7", files={"sys/devices/system/cpu/online": "0,2-3\n"})
    assert count_cores(root).allowed == (0, 2, 3)


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 8), ("350000 100000", 3), ("50000 100000", 1), ("1600000 100000", 8)]
)
def test_quota_of_cgroup_v2(tmp_path, quota, cores):
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": f"{quota}\n"}
    assert count_cores(machine(tmp_path, cpus=8, files=files)).cores == cores


def test_quota_of_a_cgroup_above_ours(tmp_path):
    files = {
        "proc/self/cgroup": "0::/machine.slice/job.scope\n",
        "sys/fs/cgroup/machine.slice/cpu.max": "200000 100000\n",
        "sys/fs/cgroup/machine.slice/job.scope/cpu.max": "max 100000\n",
    }
    count = count_cores(machine(tmp_path, cpus=8, files=files))
    assert count.quota == 2
    assert "the cgroup allows 2 CPUs" in count.why


@pytest.mark.parametrize("folder", ["cpu,cpuacct/docker/0123", "cpu,cpuacct", "cpu/docker/0123"])
def test_quota_of_cgroup_v1(tmp_path, folder):
    # In a container the path below the mount point may be missing: then the mount point is ours.
    files = {
        "proc/self/cgroup": "5:memory:/docker/0123\n4:cpu,cpuacct:/docker/0123\n0::/\n",
        f"sys/fs/cgroup/{folder}/cpu.cfs_quota_us": "150000\n",
        f"sys/fs/cgroup/{folder}/cpu.cfs_period_us": "50000\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "2147483648\n",
    }
    root = machine(tmp_path, cpus=8, files=files)
    assert count_cores(root).quota == 3
    assert detect(root).memory_bytes == 2 << 30


def test_no_limit_in_cgroup_v1(tmp_path):
    files = {
        "proc/self/cgroup": "4:cpu:/\n5:memory:/\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    root = machine(tmp_path, cpus=8, files=files)
    assert count_cores(root).quota is None
    assert detect(root).memory_bytes == 16000000 << 10


# The description ------------------------------------------------------------------------------------


def test_a_zen_4_machine(tmp_path):
    root = machine(
        tmp_path,
        cpus=16,
        smt=2,
        flags=ZEN4,
        vendor="AuthenticAMD",
        model="AMD Ryzen 7 7700X",
        files={"sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq": "5573000\n"},
    )
    hardware = detect(root, microarch="znver4", arch="AMD64")
    assert (hardware.vendor, hardware.model_name, hardware.arch) == ("amd", "AMD Ryzen 7 7700X", "x86_64")
    assert (hardware.isa_level, hardware.vector_bits, hardware.cores) == ("x86-64-v4", 512, 8)
    assert (hardware.l1d_bytes, hardware.l2_bytes, hardware.l3_bytes) == (32 << 10, 1 << 20, 32 << 20)
    assert hardware.clock_ghz == pytest.approx(5.573)
    assert {"avx512vnni", "avx512bf16", "sse4.1", "lzcnt"} <= set(hardware.isa)
    assert native_config(hardware) == {"kind": "llvm", "mcpu": "znver4", "num-cores": 8}


@pytest.mark.parametrize(
    ("flags", "level", "bits"),
    [
        ("fpu sse2", "x86-64", 128),
        (V2, "x86-64-v2", 128),
        (f"{V2} avx", "x86-64-v2", 256),
        (V3, "x86-64-v3", 256),
        (V4, "x86-64-v4", 512),
        (V4.replace("movbe", ""), "x86-64-v2", 512),
    ],
)
def test_isa_levels(tmp_path, flags, level, bits):
    hardware = detect(machine(tmp_path, flags=flags), arch="x86_64")
    assert (hardware.isa_level, hardware.vector_bits) == (level, bits)


def test_clock_from_the_model_name_rather_than_the_clock_of_this_moment(tmp_path):
    assert detect(machine(tmp_path / "a")).clock_ghz == 3.0
    assert detect(machine(tmp_path / "b", model="Xeon")).clock_ghz == pytest.approx(2.1, abs=0.01)


def test_missing_caches(tmp_path):
    hardware = detect(machine(tmp_path, caches=False))
    assert hardware.l1d_bytes == 32 << 10
    assert hardware.l2_bytes > hardware.l1d_bytes
    assert hardware.l3_bytes > hardware.l2_bytes


def test_no_third_level_cache(tmp_path):
    root = machine(tmp_path)
    for path in root.glob("sys/devices/system/cpu/cpu*/cache/index3/*"):
        path.unlink()
    hardware = detect(root)
    assert hardware.l3_bytes == 0
    assert hardware.vector()[VECTOR_NAMES.index("l3")] == 0


GRAVITON3 = (
    "processor\t: 0\nBogoMIPS\t: 2100.00\n"
    "Features\t: fp asimd evtstrm aes atomics fphp asimdhp asimdrdm asimddp sve asimdfhm svebf16 i8mm bf16\n"
    "CPU implementer\t: 0x41\nCPU architecture: 8\nCPU part\t: 0xd40\n"
)


def test_an_arm_server(tmp_path):
    files = {
        "proc/cpuinfo": "\n".join(GRAVITON3.replace(": 0\n", f": {cpu}\n", 1) for cpu in range(4)),
        "proc/sys/abi/sve_default_vector_length": "32\n",
    }
    hardware = detect(machine(tmp_path, files=files), microarch="neoverse-v1", arch="aarch64")
    assert (hardware.vendor, hardware.arch, hardware.isa_level) == ("arm", "aarch64", "aarch64-sve")
    assert hardware.vector_bits == 256
    assert "neoverse-v1" in hardware.model_name
    vector = dict(zip(VECTOR_NAMES, hardware.vector(), strict=True))
    assert vector["neon"] == vector["sve"] == vector["fma"] == 1
    assert vector["avx2"] == vector["is_gpu"] == 0


def test_without_proc_and_sys_it_asks_python_psutil_and_llvm(tmp_path):
    # As on a Mac: no /proc, no /sys.
    hardware = detect(tmp_path, microarch="apple-m2", arch="arm64")
    assert (hardware.arch, hardware.vendor, hardware.isa_level) == ("aarch64", "apple", "aarch64")
    assert {"neon", "dotprod", "bf16", "i8mm"} <= set(hardware.isa)
    assert hardware.vector_bits == 128
    assert hardware.cores >= 1
    assert hardware.memory_bytes > 0
    assert hardware.clock_ghz > 0


# The vector -----------------------------------------------------------------------------------------


def test_vector_layout_is_fixed(tmp_path):
    """Weights are trained with it: changing an entry must be a decision, not an accident."""
    hardware = detect(machine(tmp_path, cpus=8, smt=2, flags=ICELAKE), arch="x86_64")
    vector = hardware.vector()
    assert vector.dtype == np.float32
    peak = (np.log2(4 * 3.0 * 16 * 2 * 2) - 4) / 3
    expected = [1, 3, 1, 1, 2, 1.5, 1, 1, 1, 1, 0, 0, 0, peak, 0, 0]
    np.testing.assert_allclose(vector, expected, rtol=1e-6)


def test_vector_stays_in_range(tmp_path):
    tiny = detect(machine(tmp_path / "tiny", cpus=1, flags="sse2", model="x @ 0.80GHz"), arch="x86_64")
    huge = detect(
        machine(
            tmp_path / "huge",
            cpus=384,
            flags=f"{ZEN4} amx_tile amx_int8",
            files={"sys/devices/system/cpu/cpu0/cache/index3/size": "1024M"},
        ),
        arch="x86_64",
    )
    gpu = hardware_for_target(make_target("nvidia/nvidia-a100", tiny), tiny)
    for hardware in (tiny, huge, gpu, detect()):
        assert hardware.vector().shape == (16,)
        assert np.all((hardware.vector() >= 0) & (hardware.vector() <= 4))
    assert gpu.vector()[VECTOR_NAMES.index("is_gpu")] == 1
    assert huge.vector()[0] > tiny.vector()[0]


# Targets --------------------------------------------------------------------------------------------


@pytest.fixture
def zen4(tmp_path):
    return detect(
        machine(tmp_path, cpus=16, smt=2, flags=ZEN4, vendor="AuthenticAMD"),
        microarch="znver4",
        arch="x86_64",
    )


def test_a_hypervisor_that_hides_avx512(tmp_path):
    flags = f"{V3} gfni"
    hardware = detect(machine(tmp_path, flags=flags), microarch="icelake-server", arch="x86_64")
    target = make_target("native", hardware)
    assert target.attrs["mcpu"] == "icelake-server"
    assert "-avx512f" in target.attrs["mattr"]
    assert "-avx2" not in target.attrs["mattr"]
    seen = hardware_for_target(target, hardware)
    assert (seen.isa_level, seen.vector_bits, seen.isa) == ("x86-64-v3", 256, hardware.isa)
    check_runs_here(target, hardware)
    with pytest.raises(TargetError, match="lacks: avx512"):
        check_runs_here(make_target("llvm -mcpu=icelake-server", hardware), hardware)
    # What the user adds to native does not switch the hidden sets on again.
    target = make_target("native -mattr=-fma", hardware)
    assert {"-fma", "-avx512f"} <= set(target.attrs["mattr"])
    # Another CPU is not this one: nothing of it is hidden.
    assert "mattr" not in make_target("native -mcpu=haswell", hardware).attrs


def test_a_cpu_that_llvm_does_not_know_falls_back_to_its_level(tmp_path):
    hardware = detect(machine(tmp_path, flags=V4), microarch="znver99", arch="x86_64")
    assert native_config(hardware)["mcpu"] == "x86-64-v4"


@pytest.mark.parametrize(
    ("text", "config"),
    [
        (
            "llvm -mcpu=znver4 -mattr=+avx2,-avx512f -num-cores 2 -mtriple=x86_64-linux-gnu",
            {
                "kind": "llvm",
                "mcpu": "znver4",
                "mattr": ["+avx2", "-avx512f"],
                "num-cores": 2,
                "mtriple": "x86_64-linux-gnu",
            },
        ),
        ("llvm --mcpu skylake-avx512", {"kind": "llvm", "mcpu": "skylake-avx512"}),
        (
            "llvm -keys=arm_cpu,cpu -device=arm_cpu",
            {"kind": "llvm", "keys": ["arm_cpu", "cpu"], "device": "arm_cpu"},
        ),
        ("llvm -fast-math -opt-level=2", {"kind": "llvm", "fast-math": True, "opt-level": 2}),
        ("llvm -fast-math-nnan=0", {"kind": "llvm", "fast-math-nnan": False}),
        ("llvm -mattr -avx512f -jit orcjit", {"kind": "llvm", "mattr": ["-avx512f"], "jit": "orcjit"}),
        (
            "cuda -arch=sm_80 -max_threads_per_block=512",
            {"kind": "cuda", "arch": "sm_80", "max_threads_per_block": 512},
        ),
    ],
)
def test_old_target_strings(text, config):
    assert parse_target_string(text) == config


@pytest.mark.parametrize(
    "spec",
    [
        "llvm -mcpu=znver4 -num-cores=3",
        '{"kind": "llvm", "mcpu": "znver4", "num-cores": 3}',
        {"kind": "llvm", "mcpu": "znver4", "num-cores": 3},
        Target({"kind": "llvm", "mcpu": "znver4", "num-cores": 3}),
        "native -num-cores 3",
    ],
    ids=str,
)
def test_every_way_to_write_one_target(zen4, spec):
    assert str(make_target(spec, zen4)) == str(Target({"kind": "llvm", "mcpu": "znver4", "num-cores": 3}))


def test_num_cores_is_filled_in(zen4):
    for spec in (None, "llvm", {"kind": "llvm"}, Target({"kind": "llvm", "mcpu": "haswell"})):
        assert make_target(spec, zen4).attrs["num-cores"] == 8
    assert make_target("aws/cpu/c5.12xlarge", zen4).attrs["num-cores"] == 24


def test_a_complete_target_is_passed_through(zen4):
    target = Target({"kind": "llvm", "mcpu": "haswell", "num-cores": 2})
    assert make_target(target, zen4).same_as(target)


def test_a_string_of_features_in_a_dict(zen4):
    target = make_target({"kind": "llvm", "mcpu": "znver4", "mattr": "-avx512f"}, zen4)
    assert list(target.attrs["mattr"]) == ["-avx512f"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("llvm -mcpu=zenver4", "does not know the CPU 'zenver4'.*znver4"),
        ({"kind": "llvm", "mcpu": ""}, "does not know the CPU ''"),
        ("llvm -mcpu=znver4 -mtriple=aarch64-linux-gnu", "for aarch64-linux-gnu"),
        ("llvm -mtriple=foo-bar", "unknown target triple"),
        ("llvm -mattr=avx2", r"needs a sign: \+avx2"),
        ("llvm -mattr=+avx512", "does not know the feature 'avx512'.*avx512"),
        ("llvm -mattr", "mattr of a target is a list"),
        ("x86-64-v3", 'is a CPU, not a kind of target; write "llvm -mcpu=x86-64-v3"'),
        ("nvidia/nvidia-h200", "unknown target tag.*nvidia-h100"),
        ({"tag": "nope"}, "unknown target tag"),
        ("lvm", "'lvm' is not supported; similar names: llvm"),
        ("vulkan", "pretune tunes for llvm"),
        ("cuda -arch=80", "looks like sm_80"),
        ("", "the target is empty"),
        ("llvm 'x", "No closing quotation"),
        ("llvm mcpu=znver4", "options are written"),
        ('{"kind": "llvm"', "not valid JSON"),
        ({"mcpu": "znver4"}, "names no kind"),
        ({"kind": "llvm", "mcpuu": "znver4"}, "Unknown config option 'mcpuu'"),
        ("llvm -num-cores=0", "at least 1, not 0"),
        ("llvm -num-cores=two", "at least 1, not 'two'"),
        (3, "not int"),
    ],
    ids=str,
)
def test_bad_targets_are_one_line(zen4, spec, message):
    with pytest.raises(TargetError, match=message) as error:
        make_target(spec, zen4)
    assert "\n" not in str(error.value)


def test_cuda(zen4):
    import tvm

    target = make_target("cuda -arch=sm_90a", zen4)
    assert target.attrs["max_threads_per_block"] == 1024  # MetaSchedule's GPU rules need the limits
    assert hardware_for_target(target, zen4).kind == "cuda"
    assert make_target("nvidia/nvidia-a100", zen4).attrs["arch"] == "sm_80"
    if not tvm.cuda(0).exist:
        with pytest.raises(TargetError, match="needs an architecture"):
            make_target("cuda", zen4)
        with pytest.raises(TargetError, match="no GPU was found"):
            check_runs_here(target, zen4)


def test_hardware_as_a_target_restricts_it(zen4):
    seen = hardware_for_target(make_target("llvm -mcpu=x86-64-v3 -num-cores 2", zen4), zen4)
    assert (seen.isa_level, seen.vector_bits, seen.cores) == ("x86-64-v3", 256, 2)
    assert (seen.microarch, seen.l2_bytes) == (zen4.microarch, zen4.l2_bytes)
    assert hardware_for_target(make_target("llvm -mcpu=x86-64-v2", zen4), zen4).vector_bits == 128
    assert (
        hardware_for_target(make_target("llvm -mcpu=znver4 -vector-width=256", zen4), zen4).vector_bits == 256
    )
    devices = hardware_for_target(make_target("llvm -mcpu=haswell", zen4), zen4, here=False)
    assert (devices.microarch, devices.vendor, devices.isa_level) == ("haswell", "unknown", "x86-64-v3")
    # LLVM's znver4 has all that this machine shows.
    assert hardware_for_target(make_target("native", zen4), zen4) == zen4


def test_a_target_of_another_architecture(zen4):
    target = make_target("llvm -mtriple=aarch64-linux-gnu -mcpu=neoverse-n1 -num-cores 4", zen4)
    seen = hardware_for_target(target, zen4)
    assert (seen.arch, seen.microarch, seen.isa_level, seen.vector_bits) == (
        "aarch64",
        "neoverse-n1",
        "aarch64",
        128,
    )
    with pytest.raises(TargetError, match="is for aarch64"):
        check_runs_here(target, zen4)


def test_targets_survive_json(zen4):
    for spec in ("native", "nvidia/nvidia-a100", "llvm -mtriple=aarch64-linux-gnu -mcpu=neoverse-v1"):
        target = make_target(spec, zen4)
        assert str(make_target(json.loads(str(target)), zen4)) == str(target)
