import math
import os
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pretrain.files import ROOT
from pretrain.model import bf16_cpu_attention

pytestmark = pytest.mark.skipif(
    bf16_cpu_attention.why_unsupported() is not None, reason=f"{bf16_cpu_attention.why_unsupported()}"
)


def forget():
    bf16_cpu_attention.why_not.cache_clear()
    bf16_cpu_attention._library.cache_clear()


@pytest.fixture(autouse=True)
def loads_again(monkeypatch):
    forget()
    yield
    monkeypatch.undo()
    forget()


@pytest.fixture(params=["AMX", "AVX-512"])
def instructions(request, monkeypatch):
    if request.param == "AMX" and not bf16_cpu_attention.has_amx():
        pytest.skip("this CPU has no AMX")
    if request.param == "AVX-512":
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


def random(*shape):
    """Returns bf16 values (B, H, T, E) with the memory layout (B, T, H, E), as projections produce them."""
    batch, heads, length, width = shape
    return torch.randn(batch, length, heads, width).bfloat16().transpose(1, 2)


def results(query, key, value, cu_seq_lens, scale, grad_out):
    """Returns the output and the gradients."""
    inputs = [x.detach().requires_grad_() for x in (query, key, value)]
    out = bf16_cpu_attention.attend(*inputs, torch.tensor(cu_seq_lens, dtype=torch.int32), scale)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad_out)]


def in_fp64(query, key, value, cu_seq_lens, scale, grad_out):
    """Returns `results` from the whole matrix of scores in fp64."""
    batch, heads, length, _ = query.shape
    inputs = [x.detach().double().requires_grad_() for x in (query, key, value)]
    keys, values = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in inputs[1:])
    ends = torch.tensor(cu_seq_lens)
    segment = torch.searchsorted(ends, torch.arange(batch * length), right=True).view(batch, 1, length)
    is_hidden = (segment[..., None] != segment[..., None, :]) | torch.ones(length, length).triu(1).bool()
    out = (inputs[0] @ keys.mT * scale).masked_fill(is_hidden, -math.inf).softmax(-1) @ values
    return [out.detach(), *torch.autograd.grad(out, inputs, grad_out.double())]


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize(
    ("batch", "heads", "groups", "length", "width", "cuts"),
    [
        (2, 4, 4, 512, 64, []),
        (2, 4, 2, 512, 64, [1, 31, 32, 33, 100, 600, 601, 1000]),
        (3, 3, 1, 100, 16, [50, 64, 99, 101, 250]),
        (1, 2, 2, 33, 80, [32]),
        (1, 2, 1, 1500, 32, [3, 700, 1400]),
        (2, 2, 1, 257, 7, [*range(0, 514, 9)]),
        (1, 1, 1, 300, 256, []),
        (2, 2, 2, 2, 8, [1]),
    ],
)
def test_equals_attention_in_fp64(batch, heads, groups, length, width, cuts):
    torch.manual_seed(0)
    query, key, value, grad_out = (random(batch, h, length, width) for h in (heads, groups, groups, heads))
    cu_seq_lens = sorted({*range(0, batch * length + 1, length), *cuts})
    # The last end is repeated in training, to keep the size constant.
    arguments = (query, key, value, [*cu_seq_lens, cu_seq_lens[-1]], 1.3 * width**-0.5, grad_out)
    for got, want in zip(results(*arguments), in_fp64(*arguments), strict=True):
        assert got.dtype == torch.bfloat16 and got.shape == want.shape
        assert (got - want).norm() < 0.006 * want.norm(), "bf16 has 8 bits"


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("scale", [-0.5, 0.0, 20.0])
def test_extreme_scores(scale):
    """Large scores would overflow without subtracting the maximum, and hidden ones could be the largest."""
    torch.manual_seed(1)
    query, key, value, grad_out = (random(1, 2, 400, 32) for _ in range(4))
    key[:, :, 300:] *= 50
    arguments = (query, key, value, [0, 130, 400], scale, grad_out)
    for got, want in zip(results(*arguments), in_fp64(*arguments), strict=True):
        assert (got - want).norm() <= 0.02 * want.norm()


@pytest.mark.usefixtures("instructions")
def test_results_depend_neither_on_threads_nor_on_other_documents():
    torch.manual_seed(2)
    query, key, value, grad_out = (random(2, h, 200, 24) for h in (4, 2, 2, 4))
    before = torch.get_num_threads()
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append(results(query, key, value, [0, 70, 200, 400], 0.2, grad_out))
    torch.set_num_threads(before)
    for one, several in zip(*found, strict=True):
        assert torch.equal(one, several)
    for x in (query, key, value, grad_out):
        x[0, :, :70] = 100 * torch.randn_like(x[0, :, :70])
    changed = results(query, key, value, [0, 70, 200, 400], 0.2, grad_out)
    for got, want in zip(changed, found[0], strict=True):
        assert not torch.equal(got[0, :, :70], want[0, :, :70])
        assert torch.equal(got[0, :, 70:], want[0, :, 70:]) and torch.equal(got[1], want[1])


@pytest.mark.usefixtures("instructions")
def test_any_memory_layout():
    """The kernel also accepts strided and expanded tensors, like a sum's gradient."""
    torch.manual_seed(3)
    whole = torch.randn(2, 100, 3, 4, 16).bfloat16()  # query, key and value from one projection
    query, key, value = (x.transpose(1, 2) for x in whole.unbind(2))
    grad_out = torch.ones(1, 1, 1, 1, dtype=torch.bfloat16).expand(2, 4, 100, 16)
    wanted = results(*(x.contiguous() for x in (query, key, value)), [0, 100, 200], 0.25, grad_out.contiguous())
    by_column = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (query, key, value)]
    for inputs in ((query, key, value), by_column):
        for got, want in zip(results(*inputs, [0, 100, 200], 0.25, grad_out), wanted, strict=True):
            assert torch.equal(got, want)


@pytest.mark.usefixtures("instructions")
def test_nan_is_not_hidden():
    torch.manual_seed(4)
    query, key, value, grad_out = (random(1, 1, 64, 16) for _ in range(4))
    query[0, 0, 40] = torch.nan
    out, *gradients = results(query, key, value, [0, 64], 0.25, grad_out)
    assert out[0, 0, 40].isnan().all() and not out[0, 0, :40].isnan().any()
    assert all(gradient.isnan().any() for gradient in gradients)


def test_operator_keeps_torchs_rules():
    torch.manual_seed(5)
    inputs = [random(2, heads, 8, 16).requires_grad_() for heads in (4, 2, 2)]
    arguments = (*inputs, torch.tensor([0, 3, 8, 16, 16], dtype=torch.int32), 0.25)
    torch.library.opcheck(torch.ops.groundwork.bf16_cpu_attention, arguments)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """Returns an empty folder for compiled kernels."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "groundwork" / "kernels"


def test_kernel_is_compiled_once(cache):
    assert bf16_cpu_attention.why_not() is None
    (compiled,) = cache.iterdir()
    modified = compiled.stat().st_mtime_ns
    forget()
    assert bf16_cpu_attention.why_not() is None
    assert [*cache.iterdir()] == [compiled] and compiled.stat().st_mtime_ns == modified


def test_damaged_kernel_is_compiled_again(monkeypatch, cache):
    assert bf16_cpu_attention.why_not() is None
    (compiled,) = cache.iterdir()
    # A path that is already loaded would not be read again.
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "other"))
    damaged = cache / "other" / "groundwork" / "kernels" / compiled.name
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(compiled.read_bytes()[:100])
    forget()
    assert bf16_cpu_attention.why_not() is None
    assert [*damaged.parent.iterdir()] == [damaged] and damaged.read_bytes() == compiled.read_bytes()


def test_ranks_can_compile_at_the_same_time(cache):
    code = "from pretrain.model import bf16_cpu_attention; assert bf16_cpu_attention.why_not() is None"
    ranks = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) for _ in range(2)]
    assert [rank.wait() for rank in ranks] == [0, 0]
    assert len([*cache.iterdir()]) == 1


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [("no-such-compiler -O1", "no-such-compiler"), (f"{sys.executable} -c exit(3)", "exit code 3")],
)
def test_without_a_working_compiler_there_is_no_kernel(monkeypatch, cache, compiler, reason):
    monkeypatch.setenv("CXX", compiler)
    assert reason in bf16_cpu_attention.why_not()
    assert not bf16_cpu_attention.is_available()
    assert [*cache.iterdir()] == []


def test_wrong_results_are_noticed(monkeypatch, cache):
    source = bf16_cpu_attention.SOURCE.read_text()
    wrong = cache.parent / "wrong.cpp"
    wrong.parent.mkdir()
    changes = (
        ("0.69314719f", "0.59314719f"),
        ("delta[row] =", "delta[row] = 1.2f *"),
        ("delta[row] =", "delta[row] = NAN *"),
    )
    for right, broken in changes:
        assert source.count(right) == 1
        wrong.write_text(source.replace(right, broken))
        monkeypatch.setattr(bf16_cpu_attention, "SOURCE", wrong)
        forget()
        assert "differ from torch's attention" in bf16_cpu_attention.why_not()


def test_the_first_call_can_be_in_any_context(cache):
    """The kernel is compared with torch's attention on first use, which must not use or change the caller's state."""
    query, key, value = (random(1, 2, 40, 16).requires_grad_() for _ in range(3))
    cu_seq_lens = torch.tensor([0, 40], dtype=torch.int32)

    def attend():
        forget()
        assert bf16_cpu_attention.is_available()
        return bf16_cpu_attention.attend(query, key, value, cu_seq_lens, 0.25)

    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda x: x):
        attend()
    assert len(saved) == 6
    for context in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), FakeTensorMode()):
        with context:
            forget()
            assert bf16_cpu_attention.why_not() is None


def test_shapes_that_the_kernel_cannot_read_are_rejected():
    query, narrow, short, fp32 = (
        random(1, 4, 32, 16),
        random(1, 4, 32, 8),
        random(1, 4, 8, 16),
        torch.randn(1, 4, 32, 16),
    )
    for key, value in ((query, narrow), (short, short), (fp32, query), (query[:, :3], query[:, :3])):
        with pytest.raises(ValueError, match="the kernel needs bf16 keys and values"):
            bf16_cpu_attention.attend(query, key, value, torch.tensor([0, 32], dtype=torch.int32), 0.25)


@pytest.mark.parametrize(
    ("limit", "wanted"), [("", True), ("AVX512_CORE_AMX", True), ("DEFAULT", True), ("AVX2", False)]
)
def test_onednns_limit_applies_to_amx(monkeypatch, tmp_path, limit, wanted):
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: True)
    (tmp_path / "cpuinfo").write_text("flags : fpu amx_bf16 amx_tile\n")
    monkeypatch.setattr(bf16_cpu_attention, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert bf16_cpu_attention.has_amx() == wanted
    (tmp_path / "cpuinfo").write_text("flags : fpu amx_tile\n")
    assert not bf16_cpu_attention.has_amx()


def test_a_compiler_without_amx_compiles_for_avx_512(monkeypatch, cache):
    compiler = cache.parent / "g++"
    compiler.parent.mkdir()
    compiler.write_text('#!/bin/sh\ncase "$*" in *-mamx*) exit 1;; esac\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert bf16_cpu_attention.why_not() is None


def test_an_unwritable_cache_is_not_needed(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert bf16_cpu_attention.why_not() is None


def test_cpus_without_bf16_do_not_use_the_kernel(monkeypatch):
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    code = "from pretrain.model import bf16_cpu_attention; print(bf16_cpu_attention.why_not())"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert "AVX2 disables this CPU's bf16" in ran.stdout
