"""Tests that models are compiled once, in the first steps, and never again during a run."""

import functools
import json
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._functorch import config as functorch_config
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.activations import ACT2FN

from pretrain.config import MemoryBudget
from pretrain.errors import InputError
from pretrain.model import loss
from pretrain.model.compile import (
    checkpoint_activations,
    checkpointing_problems,
    choose_compile,
    compile_model,
    compiler_problems,
    gelu_by_sigmoid,
)
from pretrain.recipe import read_run_config
from pretrain.training.run_plan import derive
from support.project import ROOT, events, launch, losses, run_script


def compilations(path) -> list[float]:
    """Returns the times at which compilations started."""
    return [float(line.split()[0]) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("variable", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
def test_compiled_code_is_cached_for_the_cpus_instructions(monkeypatch, variable):
    """Code that was compiled with ONEDNN_MAX_CPU_ISA=AVX2 corrupted memory in a later run with AMX."""
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setenv("TORCH_COMPILE_CACHE_KEY_TAG", "own")
    tags = []
    with torch.compiler.config.patch(cache_key_tag=""):
        for limit in ("", "AVX2", "AVX2", "AVX512_CORE_BF16"):
            monkeypatch.setenv(variable, limit)
            model = torch.nn.Linear(2, 2)
            compile_model(model, model, "full")
            tags.append(torch.compiler.config.cache_key_tag)
        with torch.compiler.config.patch(cache_key_tag=""):
            loss._compiled_softmax_less_target_.__wrapped__(None)
            assert torch.compiler.config.cache_key_tag == tags[-1]
    assert tags[1] == tags[2] and len(set(tags)) == 3 and all(tag.startswith("own ") for tag in tags)


@pytest.mark.parametrize("strategy", ["single", "fsdp2", "zero3"])
def test_layers_are_compiled_once_and_nothing_after_step_2(recipe, tmp_path, strategy):
    """After step 2, training, validation and text samples of any length never cause a recompilation.

    All layers share one compilation, both with and without gradients. Multi-process runs use the aot_eager backend,
    which counts graphs without generating code, unless STRATEGIES=all is set.
    """
    arguments = [
        "tests/support/train_and_count.py", "--config", recipe, "--precision", "bf16", "--compile", "regional",
        "--budget.steps", "8", "--validation.every_steps", "4", "--samples.every_steps", "4",
        "--samples.max_new_tokens", "8",
    ]  # fmt: skip
    backend = "inductor" if strategy == "single" or os.environ.get("STRATEGIES") == "all" else "aot_eager"
    environment = {"COMPILATIONS": str(tmp_path / "compilations"), "BACKEND": backend}
    if strategy == "single":
        run_script(*arguments, **environment)
    else:
        launch(strategy, 2, *arguments, **environment)
    times = {line["step"]: line["time"] for line in events(tmp_path / "run", "train")}
    began = compilations(tmp_path / "compilations0")
    assert 1 <= len(began) <= 4, f"{len(began)} compilations"
    assert not [when for when in began if when > times[2]], (
        f"{sum(when > times[2] for when in began)} of {len(began)} compilations came after step 2"
    )
    if strategy == "single":
        continue_uncompiled(recipe, tmp_path)


def test_ddp_leaves_layers_whole(monkeypatch):
    """Dynamo's default would split this layer at every 25 MB of parameters."""
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "vocab_size": 64}
    config = AutoConfig.for_model("llama", num_hidden_layers=2, **shape)
    causal_lm = AutoModelForCausalLM.from_config(config)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=count))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with torch._dynamo.config.patch(optimize_ddp=True, recompile_limit=8):  # torch's defaults
            compile_model(causal_lm, causal_lm, "regional")
            model = DistributedDataParallel(causal_lm)
            model(input_ids=torch.zeros(1, 8, dtype=torch.int64), use_cache=False).logits.sum().backward()
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()
    assert len(graphs) == 1


def test_layers_that_share_no_compilation_are_all_compiled(monkeypatch):
    """torch would silently stop compiling after eight of the ten layers, and in all after 256 (here 9)."""
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    shape = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "vocab_size": 64}
    causal_lm = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", num_hidden_layers=10, **shape))
    for layer in causal_lm.model.layers:
        layer.mlp.forward = functools.partial(layer.mlp.forward)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=count))
    with torch._dynamo.config.patch(optimize_ddp=False, recompile_limit=8, accumulated_recompile_limit=9):
        compile_model(causal_lm, causal_lm, "regional")
        causal_lm(input_ids=torch.zeros(1, 8, dtype=torch.int64), use_cache=False)
    torch._dynamo.reset()
    assert len(graphs) == 10


@pytest.mark.parametrize(
    ("device_type", "missing", "message"),
    [
        ("cpu", ("g++",), "compile: auto needs a C++ compiler (g++ not found); install the missing software (apt"),
        ("cuda", ("gcc", "clang"), "compile: auto needs a C compiler (gcc, clang not found); install the missing"),
        ("cuda", ("triton",), "compile: auto needs Triton; install the missing software"),
        (
            "cuda",
            ("Python.h", "triton"),
            "Python.h is missing) and Triton; install the missing software (apt install build-essential python3-dev, ",
        ),
    ],
)
def test_compiler_requirements_are_checked_before_the_start(monkeypatch, device_type, missing, message):
    there = {"g++", "gcc", "clang", "triton"} - set(missing)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: name if name in there else None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in there else None)
    if "Python.h" in missing:
        monkeypatch.setattr("sysconfig.get_path", lambda name: "/nowhere")
    (problem,) = compiler_problems("auto", device_type)
    assert message in problem
    assert compiler_problems("none", device_type) == []


def test_a_plan_rejects_compilation_without_a_compiler(monkeypatch, recipe):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(InputError, match="compile: regional needs a C"):
        derive(read_run_config(recipe, [("compile", "regional")]), ranks=1)


def test_the_image_has_what_compiled_layers_need(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    (problem,) = compiler_problems("auto", "cuda")
    packages = problem.partition("apt install ")[2].partition(",")[0].split()
    assert len(packages) == 2 and set(packages) <= set((ROOT / "Dockerfile").read_text().split())


def continue_uncompiled(recipe, tmp_path):
    """Resumes without compilation from a checkpoint of the compiled run."""
    shutil.copytree(tmp_path / "run/checkpoints/step-00000004", tmp_path / "moved/checkpoints/step-00000004")
    settings = ["--precision", "bf16", "--budget.steps", "8", "--validation.every_steps", "4"]
    run_script("train.py", "--config", recipe, "--output", tmp_path / "moved", "--compile", "none", *settings)
    compiled, moved = losses(tmp_path / "run"), losses(tmp_path / "moved")
    assert list(moved) == [5, 6, 7, 8]
    assert 0 < max(abs(moved[step] - compiled[step]) for step in moved) < 5e-3, (
        "the losses must differ, because Inductor rounds differently"
    )


@pytest.mark.skipif(os.environ.get("STRATEGIES") != "all", reason="half a minute; in make test-strategies")
def test_checkpoints_move_between_whole_compiled_models_and_uncompiled_ones(recipe, tmp_path):
    """A run can switch between no compilation and `full`, and each checkpoint is loaded exactly."""
    constant = ["--optim.schedule", "constant", "--validation.every_steps", "100"]

    def run(name: str, steps: int, compiled: str) -> dict:
        arguments = ["--output", str(tmp_path / name), "--compile", compiled, "--budget.steps", str(steps), *constant]
        return {"strategy": "single", "arguments": arguments}

    every = [run("moved", 4, "none"), run("moved", 8, "full"), run("moved", 12, "none"), run("plain", 12, "none")]
    (tmp_path / "runs.json").write_text(json.dumps(every))
    program = ["tests/support/train_strategies.py", recipe, tmp_path / "runs.json"]
    launch("single", 1, *program)
    found, plain = losses(tmp_path / "moved"), losses(tmp_path / "plain")
    assert found == pytest.approx(plain, abs=1e-5) and len(found) == 12
    assert [event["step"] for event in events(tmp_path / "moved", "resume")] == [4, 8]
    assert any(found[step] != plain[step] for step in range(5, 9)), (
        "some losses must differ, because Inductor sums in a different order"
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-8)])
@pytest.mark.parametrize("name", ["gelu_new", "gelu_pytorch_tanh"])
def test_the_sigmoid_formula_equals_tanh_gelu(name, dtype, tolerance):
    """The sigmoid formula matches fp64, with one rounding in bf16.

    The fp32 tolerance is 1e-5 because of the tail, where the argument of the exponential is large.
    """
    x = torch.linspace(-8, 8, 10_001).to(dtype).requires_grad_()
    exact = x.detach().double().requires_grad_()
    got, wanted = gelu_by_sigmoid(x), ACT2FN[name](exact)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=1e-6)
    (gradient,) = torch.autograd.grad(got.sum(), x)
    (wanted_gradient,) = torch.autograd.grad(wanted.sum(), exact)
    torch.testing.assert_close(gradient.double(), wanted_gradient, rtol=tolerance, atol=tolerance)


def tiny_gpt2(layers: int, **settings: float) -> torch.nn.Module:
    sizes = {"n_layer": layers, "n_embd": 32, "n_head": 4, "n_positions": 16, "vocab_size": 64} | settings
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **sizes))


@pytest.mark.parametrize(
    ("requested", "layers", "device_type", "is_alone", "is_plain", "chosen"),
    [
        ("auto", 4, "cpu", True, True, "full"),
        ("auto", 5, "cpu", True, True, "regional"),
        ("auto", 4, "cuda", True, True, "regional"),
        ("auto", 4, "cpu", False, True, "regional"),
        ("auto", 4, "cpu", True, False, "regional"),
        ("none", 4, "cpu", True, True, "none"),
    ],
)
def test_a_few_layers_are_compiled_whole(requested, layers, device_type, is_alone, is_plain, chosen):
    model = tiny_gpt2(layers)
    assert choose_compile(requested, model, device_type=device_type, is_alone=is_alone, is_plain=is_plain) == chosen


def kept_and_computed(memory_budget: float) -> tuple[int, list[torch.Tensor]]:
    """Returns the bytes saved for the backward pass, excluding weights, and the loss with its gradients."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = tiny_gpt2(layers=2).eval()  # disables dropout
    compile_model(model, model, "regional", memory_budget=memory_budget)
    ids = torch.arange(128).view(8, 16) % 64
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(ids, labels=ids).loss
    return sum(kept.values()), [loss, *torch.autograd.grad(loss, list(model.parameters()))]


def test_a_memory_budget_keeps_less_and_computes_the_same(monkeypatch):
    # This backend chooses what to keep as Inductor does, but generates no code.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager_decomp_partition"))
    all_kept, expected = kept_and_computed(1.0)
    kept, computed = kept_and_computed(0.1)
    compile_model(torch.nn.Module(), torch.nn.Module(), "none")
    assert functorch_config.activation_memory_budget == 1.0, "the budget must be reset for the next model"
    torch.testing.assert_close(computed, expected, rtol=1e-5, atol=1e-6)
    assert kept < 0.7 * all_kept, (kept, all_kept)


def test_layers_with_an_uncompiled_part_are_compiled_and_recomputed(monkeypatch):
    """Dynamo doesn't compile checkpointed functions with graph breaks, such as experts of other processes."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch.manual_seed(0)
    model = tiny_gpt2(layers=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    ids = torch.randint(0, 64, (2, 16))
    expected = torch.autograd.grad(model(ids, labels=ids, use_cache=False).loss, list(model.parameters()))
    calls = []
    for block in model.transformer.h:
        block.mlp.register_forward_pre_hook(torch.compiler.disable(lambda mlp, _: calls.append(mlp.training)))
        block.mlp.forward = torch.compiler.disable(block.mlp.forward)
    checkpoint_activations(model, "full")
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compile_model(model, model, "regional")
    gradients = torch.autograd.grad(model(ids, labels=ids, use_cache=False).loss, list(model.parameters()))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 2, "attention and the rest of the layer"
    torch.testing.assert_close(gradients, expected)
    assert len(calls) == 2 * 2, "forward and recomputed"
    model.eval()(ids, labels=ids, use_cache=False).loss.backward()
    assert len(calls) == 3 * 2, "validation doesn't recompute"


@pytest.mark.parametrize("compile_mode", ["none", "full"])
def test_a_memory_budget_needs_compiled_layers(compile_mode):
    config = SimpleNamespace(activation_checkpointing=MemoryBudget(memory_budget=0.5), compile=compile_mode)
    model = tiny_gpt2(layers=1, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    (problem,) = checkpointing_problems(config, model)
    assert problem.startswith(
        f"activation_checkpointing: {{memory_budget: 0.5}} does not work with compile: {compile_mode}"
    )
    assert "use compile: auto, or a share of the layers such as 50%" in problem
    config.compile = "auto"
    assert checkpointing_problems(config, model) == []
    (problem,) = checkpointing_problems(config, tiny_gpt2(layers=1, attn_pdrop=0.0))
    assert "does not work with dropout (Dropout: 0.1): the compiler would use different masks" in problem
    opt = AutoConfig.for_model(
        "opt", hidden_size=32, ffn_dim=32, num_hidden_layers=1, num_attention_heads=2, dropout=0.2
    )
    (problem,) = checkpointing_problems(config, AutoModelForCausalLM.from_config(opt))
    assert "(dropout: 0.2)" in problem


def test_compiled_gpt2_layers_match_eager_layers():
    torch.manual_seed(0)
    model = tiny_gpt2(layers=2).eval()
    ids = torch.randint(0, 64, (2, 16))
    names, wanted = list(model.state_dict()), model(ids).logits
    compile_model(model, model, "regional")
    assert model.transformer.h[0].mlp.act.forward is gelu_by_sigmoid
    torch.testing.assert_close(model(ids).logits, wanted, rtol=1e-5, atol=1e-5)
    assert list(model.state_dict()) == names
