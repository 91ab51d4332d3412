"""Tests for hardware detection: limits set in the environment are respected, and unusable GPUs always cause an
error."""

import json
import re
import resource
import runpy
import subprocess
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

from pretrain import hardware
from pretrain.config import CurriculumStage
from pretrain.errors import InputError
from pretrain.hardware import (
    ONEDNN_ISAS_WITHOUT_BF16,
    emulation_of_bf16,
    environment_warnings,
    missing_bf16,
    name_machines,
    peak_flops,
    seed_dropout,
)
from pretrain.parallel import registry, strategy
from pretrain.parallel.registry import make_strategy, strategy_named
from pretrain.parallel.strategy import device_type, resolve_precision
from pretrain.recipe import read_run_config
from pretrain.training.run_plan import derive
from pretrain_tools.planning import judgement
from support.project import ROOT
from support.tiny_models import TINY_LLAMA

OLD_CPU = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.57.02  Tue Jul 13 16:14:05 2021\nGCC version: 9.3.0\n"


@pytest.fixture
def fresh():
    """Clears the cache of missing_bf16."""
    missing_bf16.cache_clear()
    yield
    missing_bf16.cache_clear()


@pytest.fixture
def new_cpu(monkeypatch, fresh):
    """A CPU with bf16 instructions and no limits set."""
    for variable in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(hardware.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")


def test_bf16_is_native_without_limits(new_cpu, monkeypatch):
    monkeypatch.setattr(strategy, "device_type", lambda: "cpu")
    assert missing_bf16("cpu") is None and resolve_precision("auto") == "bf16"
    assert emulation_of_bf16(CPU) is None


@pytest.mark.parametrize(
    ("capability", "launched", "precision"),
    [
        ((8, 0), "fsdp2", "bf16"),
        ((7, 5), "single", "fp16"),
        ((7, 0), "ddp", "fp16"),
        ((7, 5), "fsdp2", "fp32"),
        ((6, 1), "single", "fp32"),
    ],
    ids=["A100", "T4", "V100", "sharded", "GTX 1080"],
)
def test_auto_is_fp16_on_gpus_without_bf16_units(fresh, monkeypatch, capability, launched, precision):
    """`auto` never selects fp16 with strategies that don't scale the loss."""
    monkeypatch.setattr(strategy, "device_type", lambda: "cuda")
    monkeypatch.setattr(strategy, "launched_strategy", lambda: launched)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: capability >= (8, 0))
    assert resolve_precision("auto") == precision
    assert precision in strategy_named(launched if launched == "fsdp2" else "ddp").precisions


@pytest.mark.parametrize("limit", [*ONEDNN_ISAS_WITHOUT_BF16, "AVX2"])
def test_onednns_limit_disables_bf16(new_cpu, monkeypatch, limit):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert missing_bf16("cpu") == f"ONEDNN_MAX_CPU_ISA={limit} disables this CPU's bf16 instructions"


@pytest.mark.parametrize("limit", ["ALL", "AVX512_CORE_BF16", "AVX512_CORE_AMX"])
def test_a_limit_above_bf16_does_not_disable_it(new_cpu, monkeypatch, limit):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "AVX2")  # its old name, which oneDNN reads only if the new one isn't set
    assert missing_bf16("cpu") is None


def test_the_older_name_of_the_limit_works_alone(new_cpu, monkeypatch):
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "AVX2")
    assert "DNNL_MAX_CPU_ISA=AVX2" in missing_bf16("cpu")


def test_torchs_own_limit_disables_bf16(new_cpu, monkeypatch):
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert missing_bf16("cpu") == "ATEN_CPU_CAPABILITY=avx2 disables this CPU's AVX-512"


def test_an_old_cpu_has_no_bf16(new_cpu, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert missing_bf16("cpu") == "this CPU has no bf16 instructions"


@pytest.mark.parametrize("native", [True, False])
def test_arm_cpus_use_torchs_own_check(new_cpu, monkeypatch, native):
    monkeypatch.setattr(hardware.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: native)
    assert (missing_bf16("cpu") is None) == native


def test_emulation_is_reported_with_measurements(fresh, monkeypatch):
    monkeypatch.setattr(hardware, "missing_bf16", lambda device_type: "this CPU has no bf16 instructions")
    rates = {torch.bfloat16: 12e9, torch.float32: 240e9}
    monkeypatch.setattr(hardware, "measured_matrix_flops", lambda dtype, device, **settings: rates[dtype])
    assert emulation_of_bf16(CPU) == (
        "bf16 is emulated here (this CPU has no bf16 instructions): its matmuls run at 0.05 times the speed of "
        "fp32 (12 instead of 240 GFLOP/s)"
    )
    rates[torch.bfloat16] = 250e9
    assert emulation_of_bf16(CPU) is None, "emulation must not be reported if it is faster"


def test_environment_variables_simulate_an_old_cpu():
    """Libraries read the variables when they are imported, so the test uses a new process."""
    code = """
import torch
from pretrain.hardware import emulation_of_bf16, missing_bf16
from pretrain.optim.muon import product_dtype
from pretrain.errors import InputError
from pretrain.parallel.strategy import device_type, resolve_precision
print(missing_bf16("cpu"), resolve_precision("auto"), product_dtype(torch.device("cpu")), sep="|")
print(emulation_of_bf16(torch.device("cpu")))
"""
    environment = hardware.os.environ | OLD_CPU | {"CUDA_VISIBLE_DEVICES": ""}
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    reason, precision, dtype = found[0].split("|")
    assert "bf16 instructions" in reason and (precision, dtype) == ("fp32", "torch.float32")
    assert "its matmuls run at 0." in found[1] and "GFLOP/s)" in found[1]


def test_the_peak_depends_on_the_precision(new_cpu, monkeypatch):
    asked = []
    monkeypatch.setattr(
        hardware, "measured_matrix_flops", lambda dtype, device, size: asked.append((dtype, size)) or 1e11
    )
    assert peak_flops(CPU, "bf16")[0] == 1e11 and peak_flops(CPU, "fp32")[0] == 1e11
    missing_bf16.cache_clear()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    peak_flops(CPU, "bf16")
    assert asked == [(torch.bfloat16, 1024), (torch.float32, 1024), (torch.bfloat16, 256)]


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with a GPU whose driver is too old for torch."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    (tmp_path / "version").write_text(DRIVER)
    monkeypatch.setattr(hardware, "DRIVER_FILE", tmp_path / "version")
    monkeypatch.setattr(hardware, "DEVICE_FILE", tmp_path / "nvidia0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    return tmp_path


@pytest.fixture(scope="module")
def model(tmp_path_factory, tokenizer):
    """A folder with a tokenizer and a model that is never loaded."""
    folder = tmp_path_factory.mktemp("model")
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA))
    (folder / "model.safetensors").touch()
    return folder


def test_the_driver_and_torchs_cuda_version_are_named(machine, monkeypatch):
    with pytest.raises(InputError, match=r"driver 470\.57\.02.* is built for CUDA 13\.0"):
        device_type()
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(InputError, match="is a CPU build; install a CUDA build"):
        device_type()
    (machine / "version").unlink()
    (machine / "nvidia0").touch()
    with pytest.raises(InputError, match="unknown driver version"):
        device_type()


@pytest.mark.parametrize(("name", "value"), [("CUDA_VISIBLE_DEVICES", ""), ("ACCELERATE_USE_CPU", "true")])
def test_the_cpu_can_be_chosen_explicitly(machine, monkeypatch, name, value):
    with pytest.raises(InputError, match=rf"anyway, set .*{name}"):
        device_type()
    monkeypatch.setenv(name, value)
    assert device_type() == "cpu"


def test_accelerates_cpu_setting_is_respected_with_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device_type() == "cuda"
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert device_type() == "cpu"


@pytest.mark.parametrize(
    "command",
    [
        "train.py --config RECIPE",
        "train.py --config RECIPE --check",
        "train.py --config RECIPE --smoke",
        "train.py --text TEXT --minutes 1 --output OUTPUT",
        "evaluate.py --model MODEL --prompt Once",
        "evaluate.py --model MODEL --interactive",
    ],
)
def test_no_script_uses_the_cpu_silently(machine, recipe, model, monkeypatch, capsys, command):
    (machine / "text.txt").write_text("Once upon a time there was a text. " * 3000)
    places = {"RECIPE": recipe, "MODEL": model, "TEXT": machine / "text.txt", "OUTPUT": machine / "own"}
    words = [str(places.get(word, word)) for word in command.split()]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / words[0]), run_name="__main__")
    errors = [line for line in capsys.readouterr().err.splitlines() if "driver" in line]
    assert ended.value.code == 2 and len(errors) == 1 and "470.57.02" in errors[0] and "CUDA 13.0" in errors[0]


def test_missing_devices_are_named(machine, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(InputError, match="CUDA_VISIBLE_DEVICES is 7; check that this GPU exists"):
        device_type()


def test_a_machine_without_a_gpu_uses_its_cpu(machine):
    (machine / "version").unlink()
    assert device_type() == "cpu"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_processes_share_the_cores_with_and_without_a_gpu(monkeypatch, device):
    """accelerate sets OMP_NUM_THREADS=1, which would leave an offloaded AdamW with a single thread."""
    environment = {"OMP_NUM_THREADS": "1", "ACCELERATE_MIXED_PRECISION": "no", "LOCAL_WORLD_SIZE": "2"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(hardware, "available_cores", lambda: 16)
    monkeypatch.setattr(strategy, "keep_freed_memory", lambda reserved: None)
    accelerator = SimpleNamespace(device=torch.device(device))
    monkeypatch.setattr(strategy.Strategy, "make_accelerator", lambda self: accelerator)
    strategy.Strategy("fp32")
    assert threads == [8]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert hardware.threads_beside(torch.device(device)) == ("8" if device == "cuda" else "1"), (
        "an evaluation next to training on a CPU must use one thread"
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # set by the user
    strategy.Strategy("fp32")
    assert threads == [8]


HUGE_PAGES = """
import sys, torch
from pathlib import Path
from pretrain.hardware import keep_freed_memory

keep_freed_memory(2**30)
if len(sys.argv) > 1:
    for _ in range(5):
        torch.ones(2**25)
smaps = Path("/proc/self/smaps").read_text()
print(sum(int(line.split()[1]) for line in smaps.splitlines() if line.startswith("AnonHugePages")))
"""


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists()
    or "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(),
    reason="needs Linux with transparent huge pages",
)
def test_tensors_on_a_cpu_use_huge_pages_without_taking_memory_in_advance():
    """Five tensors of 134 MB are allocated and freed, one after the other.

    glibc may place a tensor behind the memory that the one before it freed, because small freed blocks lie in between.
    """
    kilobytes = [
        int(subprocess.run([sys.executable, "-c", HUGE_PAGES, *arguments], capture_output=True, check=True).stdout)
        for arguments in ([], ["allocate"])
    ]
    assert kilobytes[0] < 20_000
    assert 120_000 < kilobytes[1] < 5 * 140_000


def test_the_device_is_described_with_driver_and_memory(machine, monkeypatch):
    answers = {"get_device_name": "NVIDIA H100 80GB HBM3", "get_device_capability": (9, 0), "device_count": 8}
    answers["get_device_properties"] = SimpleNamespace(total_memory=85_045_149_696)
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *device, answer=answer: answer)
    assert hardware.device_in_words(torch.device("cuda")) == (
        "NVIDIA H100 80GB HBM3 (compute capability 9.0), 85.0 GB of memory, 8 GPUs here; driver 470.57.02, "
        f"torch {torch.__version__} for CUDA 13.0"
    )
    assert re.fullmatch(r"CPU \(\w+\), \d+ threads?, [\d.,]+ GB of memory", hardware.device_in_words(CPU))


def test_dropout_on_a_cpu_is_seeded_as_by_torch_without_stack_traces(monkeypatch):
    torch.manual_seed(5)
    wanted = torch.rand(4)
    monkeypatch.setattr(
        traceback, "format_stack", lambda: pytest.fail("no stack trace may be created in a micro-step")
    )
    seed_dropout(5, CPU)
    assert torch.equal(torch.rand(4), wanted)


def test_deterministic_runs_use_deterministic_kernels(recipe):
    """torch's flags are global, so the test uses a new process."""
    program = (
        "import os, sys, torch, runpy\n"
        f"sys.argv = ['train.py', '--config', '{recipe}', '--deterministic', 'true', '--budget.steps', '1']\n"
        "try:\n    runpy.run_path('train.py', run_name='__main__')\nfinally:\n"
        "    print(torch.are_deterministic_algorithms_enabled(), torch._inductor.config.deterministic)\n"
        "    print(os.environ['CUBLAS_WORKSPACE_CONFIG'])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert "True True\n:4096:8\n" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("version", "lengths", "avoided"),
    [
        (92000, (704,), True),
        (92000, (640, 704), True),
        (92000, (128, 640), False),
        (92000, (96,), False),
        (92600, (704,), False),
        (None, (704,), False),
    ],
)
def test_cudnn_is_not_used_for_lengths_with_faulty_gradients(recipe, monkeypatch, version, lengths, avoided):
    """See github.com/pytorch/pytorch/issues/196678."""
    set_to = []
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", set_to.append)
    monkeypatch.setattr(registry, "strategy_class", lambda _: lambda *_: None)
    config = read_run_config(recipe, [])
    stages = [CurriculumStage(train=config.data.train, sequence_length=length) for length in lengths]
    data = config.data.model_copy(update={"train": None, "stages": stages})
    make_strategy(config.model_copy(update={"data": data}))
    assert set_to == [False] * avoided


@pytest.fixture
def eight_gpus(monkeypatch, tmp_path):
    """Environment of a process on one of two machines, each with eight processes, InfiniBand and 64 cores."""
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(hardware, "INFINIBAND", tmp_path)
    monkeypatch.setattr(hardware, "available_cores", lambda: 64)
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("resource.getrlimit", lambda kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    monkeypatch.setattr(hardware.ctypes, "CDLL", lambda name: None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("WORLD_SIZE", "16")


def test_a_complete_machine_gives_no_warning(eight_gpus):
    assert environment_warnings(GPU) == environment_warnings(CPU) == []


def test_a_check_warns_about_the_machine(monkeypatch, recipe):
    config = read_run_config(recipe, [])
    monkeypatch.setattr(judgement, "machine_warnings", lambda plan, device: ["cores: too few"])
    assert "warning: cores: too few" in judgement.judgement(config, derive(config, ranks=1), frozenset(), {}, [])


def test_warnings_name_their_machines():
    """A single machine isn't named. Machines with the same problem share a line."""
    slow, tcp = "cores: too few", "network: TCP"
    assert name_machines([("a", [slow, tcp])]) == [slow, tcp]
    assert name_machines([("a", []), ("b", [])]) == []
    assert name_machines([("a", [slow]), ("b", [slow, tcp])]) == [
        f"2 of 2 machines (a, b): {slow}",
        f"1 of 2 machines (b): {tcp}",
    ]
    many = [(f"node{number}", [slow] if number % 2 else []) for number in range(1000)]
    (warning,) = name_machines(many)
    assert warning.startswith("500 of 1,000 machines (node1, node3, ") and warning.endswith(f", [...]): {slow}")
    assert len(warning) < 150


@pytest.mark.parametrize(
    ("cores", "of_launcher", "message"),
    [(1, 64, "each process has 1, but needs at least 2"), (8, 8, "each process has 1"), (4, 64, None), (16, 16, None)],
)
def test_too_few_cores_per_process_give_a_warning(eight_gpus, monkeypatch, cores, of_launcher, message):
    """A process limited to 4 of the launcher's 64 cores doesn't share them. Eight processes share all 8, even if SLURM
    gave the launcher only 8 of the machine's 128."""
    monkeypatch.setattr(hardware, "available_cores", lambda: cores)
    monkeypatch.setattr(hardware, "bound_cores", lambda process=0: of_launcher if process else cores)
    monkeypatch.setattr("os.cpu_count", lambda: 128)
    found = environment_warnings(GPU)
    assert found == [] if message is None else message in found[0]


def test_infiniband_that_nccl_cannot_use_gives_a_warning(eight_gpus, monkeypatch, tmp_path):
    monkeypatch.setattr("resource.getrlimit", lambda kind: (2**16, 2**16))
    monkeypatch.setattr(hardware, "STATUS", tmp_path / "status")
    assert "can lock only 65.5 kB of memory" in environment_warnings(GPU)[0]
    # Docker's default capabilities, and the same with IPC_LOCK.
    for capabilities, warnings in (("00000000a80425fb", 1), ("00000000a80465fb", 0)):
        (tmp_path / "status").write_text(f"CapPrm:\t{capabilities}\nCapEff:\t{capabilities}\nCapBnd:\t0\n")
        assert len(environment_warnings(GPU)) == warnings
    (tmp_path / "status").unlink()

    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(hardware.ctypes, "CDLL", missing)
    (warning,) = environment_warnings(GPU)
    assert "libibverbs.so.1 is not installed here, so NCCL uses TCP" in warning
    packages = warning.partition("apt install ")[2].split()
    assert len(packages) == 2 and set(packages) <= set((ROOT / "Dockerfile").read_text().split()), (
        "the Docker image must contain the suggested packages"
    )
    monkeypatch.setenv("WORLD_SIZE", "8")  # not needed on a single machine
    assert environment_warnings(GPU) == []
