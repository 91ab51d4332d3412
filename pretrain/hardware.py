"""Reports the machine's capabilities: peak FLOP/s (for MFU), native bf16, memory and cores."""

import ctypes
import os
import platform
import re
import textwrap
import time
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import torch

from pretrain.gpus import gpu_called
from pretrain.limits import available_cores, available_memory, bound_cores
from pretrain.mesh_sizes import processes_here, processes_launched
from pretrain.units import bytes_text, counted

M_TRIM_THRESHOLD = -1
"""mallopt(3) parameter, from glibc's malloc.h."""
M_MMAP_MAX = -4
"""mallopt(3) parameter."""
MADV_HUGEPAGE = 14
"""madvise(2) advice."""
OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")

FIXED_CUDNN = 92600
"""First cuDNN version whose attention supports masks for all lengths."""
DRIVER_FILE = Path("/proc/driver/nvidia/version")
DEVICE_FILE = Path("/dev/nvidia0")
"""Device file of NVIDIA's Linux driver."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""{precision: activation dtype}"""

ONEDNN_ISAS_WITHOUT_BF16 = ("sse41", "avx", "avx2", "avx2_vnni", "avx2_vnni_2", "avx512_core", "avx512_core_vnni")
"""Values of ONEDNN_MAX_CPU_ISA that make oneDNN convert bf16 to fp32 for matmuls."""


ONEDNN_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""Environment variables that limit oneDNN's instructions. oneDNN reads the second if the first isn't set."""


def cpu_instructions() -> str:
    """Describes the instructions that torch and oneDNN use on this CPU."""
    limit = next(filter(None, map(os.environ.get, ONEDNN_VARIABLES)), "none")
    # The oldest supported torch has no public function for a CPU's instructions.
    bf16, amx = torch.cpu._is_avx512_bf16_supported(), torch.cpu._is_amx_tile_supported()
    return f"{torch.backends.cpu.get_cpu_capability()}, AVX-512 BF16 {bf16}, AMX {amx}, oneDNN's limit {limit}"


def tag_compiled_code() -> None:
    """Makes torch cache compiled code separately for each set of CPU instructions. Call it before compiling.

    torch's cache ignores the instructions. Code that was compiled for others can return NaN or corrupt memory.
    """
    torch.compiler.config.cache_key_tag = f"{os.environ.get('TORCH_COMPILE_CACHE_KEY_TAG', '')} {cpu_instructions()}"


@cache
def missing_bf16(device_type: str) -> str | None:
    """Returns why 'cpu' or 'cuda' emulates bf16 matmuls, or None if bf16 is native.

    Unlike torch.cpu's own checks, this respects ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA.
    """
    if device_type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return None if native else "this GPU has no bf16 instructions"
    if not torch.backends.mkldnn.is_available():
        return "this torch has no oneDNN for bf16 matmuls"
    # torch has no public function for a CPU's instructions.
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return None if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "this CPU has no bf16 instructions"
    if not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()):
        return "this CPU has no bf16 instructions"
    for variable in ONEDNN_VARIABLES:
        if limit := os.environ.get(variable):
            if limit.lower() in ONEDNN_ISAS_WITHOUT_BF16:
                return f"{variable}={limit} disables this CPU's bf16 instructions"
            break
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return f"ATEN_CPU_CAPABILITY={os.environ.get('ATEN_CPU_CAPABILITY')} disables this CPU's AVX-512"
    return None


def emulation_of_bf16(device: torch.device) -> str | None:
    """Measures how much slower emulated bf16 is than fp32, and describes the result. Takes 0.2 s.

    Returns None if bf16 is native or isn't slower. Uses small matrices on a CPU, because an emulated (1024, 1024)
    matmul takes seconds.
    """
    reason = missing_bf16(device.type)
    if reason is None:
        return None
    size = 256 if device.type == "cpu" else 2048
    bf16, fp32 = (
        measured_matrix_flops(dtype, device, size=size, least_repeats=3, least_seconds=0.05)
        for dtype in (torch.bfloat16, torch.float32)
    )
    if bf16 >= fp32:
        return None
    return (
        f"bf16 is emulated here ({reason}): its matmuls run at {bf16 / fp32:.2g} times the speed of fp32 "
        f"({bf16 / 1e9:,.3g} instead of {fp32 / 1e9:,.3g} GFLOP/s)"
    )


MIN_CORES = 2
"""Cores needed per GPU process: one for the training loop, and one for prefetching, compiling and communicating."""
INFINIBAND = Path("/sys/class/infiniband")
"""Linux sysfs folder with one entry per InfiniBand or RoCE adapter."""
CAP_IPC_LOCK = 14
"""Number of the Linux capability to lock any amount of memory."""
STATUS = Path("/proc/self/status")


def environment_warnings(device: torch.device) -> list[str]:
    """Lists problems with this machine or container that slow down GPU training, with remedies."""
    if device.type != "cuda":
        return []
    found = [few_cores()]
    has_adapters = INFINIBAND.is_dir() and any(INFINIBAND.iterdir())
    if has_adapters and processes_launched() > processes_here():
        found.append(unused_infiniband())
    return [*filter(None, found)]


def name_machines(found: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """Merges the warnings of all machines and adds the machines' names, unless there is only one machine.

    Args:
        found: (host name, warnings) of each machine.
    """
    if len(found) == 1:
        return [*found[0][1]]
    hosts: dict[str, list[str]] = {}
    for host, warnings in found:
        for warning in warnings:
            hosts.setdefault(warning, []).append(host)
    return [
        f"{len(affected):,} of {len(found):,} machines ({textwrap.shorten(', '.join(affected), 100)}): {warning}"
        for warning, affected in hosts.items()
    ]


def few_cores() -> str | None:
    """Returns a warning if this process has too few cores. Processes share the launcher's, unless bound to fewer."""
    cores = available_cores()
    is_bound = bound_cores() < bound_cores(os.getppid())
    share = cores if is_bound else cores / processes_here()
    if share >= MIN_CORES:
        return None
    return (
        f"cores: each process has {share:.2g}, but needs at least {MIN_CORES} for the training loop, prefetching and "
        "compiling; on SLURM, set --cpus-per-task, and export SRUN_CPUS_PER_TASK for srun"
    )


def unused_infiniband() -> str | None:
    """Returns a warning if NCCL can't use this machine's InfiniBand adapters. TCP is many times slower."""
    import resource

    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        return (
            "network: this machine has InfiniBand, but libibverbs.so.1 is not installed here, so NCCL uses TCP; run "
            "apt install libibverbs1 ibverbs-providers"
        )
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY or limit >= 2**30 or ignores_lock_limit():
        return None
    return (
        f"network: this machine has InfiniBand, but can lock only {bytes_text(limit)} of memory for it; run "
        "ulimit -l unlimited first (in Docker, pass --ulimit memlock=-1; on Kubernetes, add the IPC_LOCK capability)"
    )


def ignores_lock_limit() -> bool:
    """Returns True if this process may lock more memory than its limit, because it has the IPC_LOCK capability."""
    try:
        capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)$", STATUS.read_text(), re.MULTILINE)
    except OSError:
        return False
    return capabilities is not None and bool(int(capabilities[1], 16) >> CAP_IPC_LOCK & 1)


def unusable_gpu() -> str | None:
    """Returns an error message if there is an NVIDIA GPU that torch can't use, unless CUDA_VISIBLE_DEVICES hides it.

    Without this check, training would silently run on the CPU.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1", "NoDevFiles"):
        return None
    if not DRIVER_FILE.exists() and not DEVICE_FILE.exists():
        return None
    driver = f"driver {version}" if (version := driver_version()) else "unknown driver version"
    if torch.version.cuda is None:
        built = f"torch {torch.__version__} is a CPU build; install a CUDA build"
    else:
        built = (
            f"torch {torch.__version__} is built for CUDA {torch.version.cuda}. If nvidia-smi shows an older CUDA "
            "Version, install a newer driver, or a torch build for that version. In a container, pass --gpus all"
        )
        if "CUDA_VISIBLE_DEVICES" in os.environ:
            built += f". CUDA_VISIBLE_DEVICES is {os.environ['CUDA_VISIBLE_DEVICES']}; check that this GPU exists"
    return (
        f"device: this machine has an NVIDIA GPU ({driver}), but torch can't use it. {built}. To run on the CPU "
        "anyway, set CUDA_VISIBLE_DEVICES to an empty string (CUDA_VISIBLE_DEVICES= python ...), or set "
        "ACCELERATE_USE_CPU=true, as accelerate launch --cpu does for a single process"
    )


def driver_version() -> str | None:
    """Returns the NVIDIA driver's version, or None if it can't be read."""
    try:
        version = re.search(r"\b\d+\.\d+(?:\.\d+)*", DRIVER_FILE.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return version and version[0]


def peak_flops(device: torch.device, precision: str) -> tuple[float | None, str]:
    """Returns (peak matmul FLOP/s, source of the value). The peak is None for GPUs that aren't in the table."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        if (gpu := gpu_called(name)) is None:
            return None, f"unknown peak FLOP/s for {name}"
        return gpu.peak_flops(precision), f"{name} data sheet, {'fp32' if precision == 'fp32' else 'dense bf16'}"
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    size = 256 if precision == "bf16" and missing_bf16("cpu") else 1024  # 1024 takes seconds if bf16 is emulated
    # Without the index in cpu:0, because the measurement is the same for each.
    flops = measured_matrix_flops(dtype, torch.device(device.type), size=size)
    return flops, f"measured {dtype} matmul on {torch.get_num_threads()} threads"


def measured_matrix_flops(
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    size: int = 1024,
    least_repeats: int = 5,
    least_seconds: float = 0.5,
) -> float:
    """Measures the FLOP/s of a (size, size) matmul, after a warmup.

    Takes the fastest of at least `least_repeats` matmuls within `least_seconds`, because the OS may keep all threads
    on one core for the first tenth of a second.
    """
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    wait = torch.cuda.synchronize if a.is_cuda else lambda: None
    a @ b
    wait()
    seconds = []
    while len(seconds) < least_repeats or sum(seconds) < least_seconds:
        start = time.perf_counter()
        a @ b
        wait()
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


def describe_machine(device: torch.device) -> dict[str, str | int]:
    """Describes the device, cores and operating system for the run's records."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "device": gpu or platform.processor() or platform.machine(),
        "cores": os.cpu_count() or 1,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def device_in_words(device: torch.device) -> str:
    """Describes the device and its memory, and for a GPU also the driver and torch's CUDA version."""
    memory = bytes_text(memory_bytes(device))
    if device.type != "cuda":
        return f"CPU ({platform.machine()}), {counted(torch.get_num_threads(), 'thread')}, {memory} of memory"
    capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return (
        f"{torch.cuda.get_device_name(device)} (compute capability {capability}), {memory} of memory, "
        f"{counted(torch.cuda.device_count(), 'GPU')} here; driver {driver_version() or 'unknown'}, "
        f"torch {torch.__version__} for CUDA {torch.version.cuda}"
    )


def memory_bytes(device: torch.device) -> int:
    """Returns the GPU's memory, or on a CPU this process's share of the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return available_memory() // processes_here()


def use_all_cores() -> None:
    """Sets torch's thread count to this process's share of the cores, because launchers limit each process to one.

    If OMP_NUM_THREADS is set, keeps that number. With a launcher, 1 counts as not set.
    """
    threads = os.environ.get("OMP_NUM_THREADS")
    launched = "LOCAL_RANK" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ
    if threads is None or (threads == "1" and launched):
        torch.set_num_threads(max(1, available_cores() // processes_here()))


def threads_beside(device: torch.device) -> str:
    """Returns OMP_NUM_THREADS for a process that runs next to training on this device."""
    return str(torch.get_num_threads()) if device.type == "cuda" else os.environ.get("OMP_NUM_THREADS", "1")


def seed_dropout(seed: int, device: torch.device) -> None:
    """Sets the seed like torch.manual_seed, but on a CPU without its 0.6 ms of overhead for stack traces."""
    (torch.default_generator if device.type == "cpu" else torch).manual_seed(seed)


def compute_deterministically() -> None:
    """Makes torch use only deterministic kernels. Operators without one raise RuntimeError."""
    # cuBLAS reads this when it creates its first handle. With other workspaces, results depend on concurrent work.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # saves time; we never read uninitialized memory
    torch._inductor.config.deterministic = True  # don't choose kernels by benchmarking them


def avoid_faulty_cudnn(lengths: Iterable[int]) -> None:
    """Excludes cuDNN from torch's attention if its gradients could be NaN for windows of these lengths.

    If there is a mask, cuDNN before 9.26 pads keys to a multiple of 128 incorrectly on Hopper, and the gradients are
    NaN for low logits (github.com/pytorch/pytorch/issues/196678). The setting also covers transformers' attention.
    """
    if any(length % 128 == 64 for length in lengths) and (torch.backends.cudnn.version() or FIXED_CUDNN) < FIXED_CUDNN:
        torch.backends.cuda.enable_cudnn_sdp(False)


def keep_freed_memory(reserved_bytes: int) -> None:
    """Makes glibc keep freed memory and use huge pages. Does nothing with other C libraries.

    On a CPU, every step frees and allocates the same memory. If glibc returned it, clearing new pages would take 4% of
    the step time. Huge pages save another 6%, because the processor finds their addresses faster
    (docs/measurements_cpu.md).

    Args:
        reserved_bytes: size of the heap's next addresses, to use huge pages for. They take no memory until used.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, -1)
    # Under strict overcommit, the reserved range would count as used memory.
    if OVERCOMMIT.exists() and OVERCOMMIT.read_text().strip() == "2":
        return
    libc.malloc.restype = ctypes.c_void_p
    start = libc.malloc(ctypes.c_size_t(reserved_bytes))
    if start is None:
        return
    page = os.sysconf("SC_PAGE_SIZE")
    # The kernel only accepts whole pages.
    libc.madvise(ctypes.c_void_p(-(-start // page) * page), ctypes.c_size_t(reserved_bytes - 2 * page), MADV_HUGEPAGE)
    libc.free(ctypes.c_void_p(start))  # it stays part of the heap, because glibc no longer trims it
