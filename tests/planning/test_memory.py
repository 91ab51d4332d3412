"""Tests memory predictions against real tensors, a measured peak and each other."""

import gc
import json
from dataclasses import replace

import pytest
import torch
from transformers import GPT2Config

from pretrain.config import MemoryBudget, RunConfig, WindowSpec
from pretrain.mesh_sizes import Sizes
from pretrain.model import bf16_cpu_attention
from pretrain.model.build import build_meta_model, build_model
from pretrain.model.model_config import load_model_config
from pretrain.optim.optimizers import optimizer_builder
from pretrain.parallel.registry import STRATEGIES
from pretrain.registry import load_extensions
from pretrain.units import bytes_text
from pretrain_tools.planning import activations
from pretrain_tools.planning.activations import AutocastOfGPUs, ForwardPass, trace_activations
from pretrain_tools.planning.candidates import work_of_run
from pretrain_tools.planning.footprints import footprint, largest_footprint
from pretrain_tools.planning.layouts import Layout, layout
from pretrain_tools.planning.memory import PlannedRun, optimizer_elements, sizes_of
from pretrain_tools.planning.memory_advice import advise, ladder
from pretrain_tools.planning.traffic import Links, Step, flows
from support.project import ROOT, run_script
from support.tiny_models import TINY_LLAMA

SHAPE = {**TINY_LLAMA, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4}


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "small.json"
    path.write_text(json.dumps(SHAPE))
    return path


@pytest.fixture(scope="module")
def model_config(model_file):
    return load_model_config(str(model_file))


def run_config(model_file, **settings) -> RunConfig:
    values = {
        "model": str(model_file),
        "output": "runs/x",
        "precision": "bf16",
        "data": {"train": [{"shards": "none"}], "sequence_length": 128},
        "batch": {"tokens_per_step": 128 * 8 * 4, "sequences_per_micro_batch": 8},
        "optim": {"learning_rate": 1e-3},
        "compile": "none",
    }
    return RunConfig.model_validate({**values, **settings})


def need(config, model_config, name="single", ranks=1, precision="bf16", sequences=8):
    return footprint(PlannedRun(config, model_config, precision), layout(name, ranks), sequences)


def test_sizes_are_those_of_the_model(model_config):
    sizes, model = sizes_of(model_config), build_model(model_config, seed=0)
    assert sizes.total == sum(parameter.numel() for parameter in model.parameters())
    assert sizes.embedding == model.get_input_embeddings().weight.numel() and sizes.is_tied
    assert sizes.root == sizes.embedding + SHAPE["hidden_size"], (
        "the root must contain the embedding and the final norm"
    )
    assert sizes.largest == sizes.embedding


def test_layers_of_two_sizes_are_counted_and_traced_separately():
    """With a dense first layer, as in DeepSeek-V3, a plan needs both kinds of layers."""
    dense_first = load_model_config("model_configs/deepseek_v3_4m.json")
    sizes, model = sizes_of(dense_first), build_meta_model(dense_first)
    layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in model.model.layers]
    assert layers[0] < layers[1] == sizes.layer and sum(layers) == sizes.in_layers
    assert sizes.root == model.model.embed_tokens.weight.numel() + dense_first.hidden_size
    call = ForwardPass(WindowSpec(64, True), torch.float32, autocast=False)
    traces = []
    for first_sparse in (1, 0, len(layers)):
        dense_first.first_k_dense_replace = first_sparse
        traces.append(trace_activations(dense_first, call))
    mixed, sparse, dense = traces
    assert mixed == replace(sparse, per_layer=mixed.per_layer, first=dense.first)
    assert dense.per_layer(1) < 0.9 * sparse.per_layer(1)
    assert len(layers) * mixed.per_layer(1) == pytest.approx(
        dense.per_layer(1) + (len(layers) - 1) * sparse.per_layer(1)
    )


def test_narrower_values_are_padded_for_documents():
    """Unpadded values are a slice of the tensor that also holds the keys, and autograd saves all of it."""
    latent = load_model_config("model_configs/deepseek_v3_4m.json")
    calls = [ForwardPass(WindowSpec(64, documents), torch.bfloat16, autocast=False) for documents in (True, False)]
    packed, undivided = (trace_activations(latent, call).per_layer(1) for call in calls)
    padded, out, values_and_keys = 48, 32, 32 + 32
    assert packed - undivided == 2 * 64 * latent.num_attention_heads * (2 * padded + out - values_and_keys - out)


def test_powers_run_in_fp32_as_with_autocast_on_gpus():
    half = torch.ones(2, dtype=torch.bfloat16)
    with AutocastOfGPUs():
        assert torch.pow(half, 3.0).dtype == (half**2).dtype == torch.float32
        assert torch.pow(10000.0, half).dtype == (half * 2).dtype == torch.bfloat16, "not cast"


def test_layers_with_ops_that_autocast_runs_in_fp32_can_be_recomputed():
    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=128, bos_token_id=0, eos_token_id=0)
    call = ForwardPass(WindowSpec(64, True), torch.float32, autocast=True)
    kept, recomputed = (
        trace_activations(config, replace(call, activation_checkpointing=mode)).per_layer(1)
        for mode in ("none", "full")
    )
    assert recomputed == 64 * 64 * 2 < kept / 10, "only the layer's bf16 input is kept"


def test_compiled_layers_with_dropout_can_be_recomputed():
    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=128, bos_token_id=0, eos_token_id=0)
    assert config.resid_pdrop == 0.1
    call = ForwardPass(
        WindowSpec(64, True), torch.float32, autocast=True, activation_checkpointing="full", compiled=True
    )
    states = trace_activations(config, call).per_layer(1) - 64 * 64 * 2  # besides the layer's bf16 input
    assert 0 <= states <= 3 * torch.get_rng_state().nbytes, "one state of the random number generator per dropout"


@pytest.mark.parametrize("name", [name for name in STRATEGIES if not name.endswith("nvme")])
def test_an_average_is_four_bytes_of_each_parameter_that_a_process_updates(model_file, model_config, name):
    plain, averaging = (run_config(model_file, averaging={"kind": kind}) for kind in ("none", "ema"))
    ranks = 1 if name == "single" else 4 if name == "hsdp" else 2
    before, after = (need(config, model_config, name, ranks) for config in (plain, averaging))
    total = sizes_of(model_config).total
    expected = 4 * total / (1 if name in ("single", "ddp") else 2)
    added = after.total + after.host - before.total - before.host
    # tp shards only the layers. For pp, the process with the embedding counts.
    assert expected <= added < 4 * total if name in ("tp", "fsdp_tp", "pp") else added == pytest.approx(expected)
    assert (after.host > before.host) == (name == "zero3_offload")


@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor"])
def test_optimizer_state_is_that_of_the_real_optimizer(model_config, model_file, name):
    model = build_model(model_config, seed=0)
    settings = run_config(model_file, optim={"learning_rate": 1e-3, "name": name}).optim
    optimizer = optimizer_builder(settings, model, 1e-3, seed=0, device_type="cpu")(list(model.named_parameters()))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    kept = sum(value.numel() for state in optimizer.state.values() for value in state.values() if value.dim())
    assert optimizer_elements(name, sizes_of(model_config)) == kept


def test_a_traced_layer_keeps_what_autograd_keeps(model_config):
    """Hooks record the tensors that autograd saves."""
    act = trace_activations(model_config, ForwardPass(WindowSpec(64, False), torch.float32, autocast=False))
    model = build_model(model_config, seed=0, attention="groundwork_sdpa")
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage  # keeps the tensor alive, so that its address isn't reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        embeddings = torch.randn(2, 64, SHAPE["hidden_size"], requires_grad=True)
        hidden = model.base_model(inputs_embeds=embeddings, use_cache=False).last_hidden_state
    kept = sum(storage.nbytes() for storage in saved.values())
    # The trace also counts the embedding's output and tensors held by the caller, 2% of this total.
    assert act.kept(SHAPE["num_hidden_layers"], 2) == pytest.approx(kept, rel=0.05)
    assert act.hidden(2) == hidden.nbytes


def test_a_trace_can_be_the_first_to_use_the_attention_kernel(model_config):
    bf16_cpu_attention.why_not.cache_clear()
    call = ForwardPass(WindowSpec(96, False), torch.float32, autocast=True, attention="groundwork_sdpa")
    assert trace_activations(model_config, call).per_layer(1) > 0


@pytest.mark.parametrize("threshold", [0, 20])  # 0 turns garbage collection off
def test_a_compiled_trace_does_not_depend_on_garbage_collection(model_config, threshold):
    call = ForwardPass(WindowSpec(96, True), torch.bfloat16, autocast=False, compiled=True)
    expected = dict(vars(trace_activations(model_config, call)))
    activations._trace.cache_clear()
    thresholds = gc.get_threshold()
    gc.set_threshold(threshold, 2, 2)
    try:
        found = vars(trace_activations(model_config, call))
    finally:
        gc.set_threshold(*thresholds)
    expected.pop("recomputed")
    assert {name: list(found[name]) for name in expected} == {name: list(line) for name, line in expected.items()}


def test_a_traced_weight_counts_once_whatever_the_batch(model_config):
    act = trace_activations(model_config, ForwardPass(WindowSpec(64, True), torch.float32, autocast=True))
    matrices = sizes_of(model_config).layer - 2 * SHAPE["hidden_size"]
    assert act.per_layer(0) == 2 * matrices, "autocast's bf16 copies of a layer's matrices must be counted once"


def test_compiled_layers_keep_less(model_config, model_file):
    eager, compiled = (need(run_config(model_file, compile=mode), model_config) for mode in ("none", "regional"))
    assert 0.4 * eager.activations < compiled.activations < 0.9 * eager.activations


def test_compiled_fp8_layers_keep_less_than_bf16_layers(model_config):
    """Uncompiled layers keep the bf16 inputs of their matmuls."""
    call = ForwardPass(WindowSpec(64, True), torch.bfloat16, autocast=False)
    calls = [replace(call, compiled=compiled, fp8=fp8) for compiled in (False, True) for fp8 in (False, True)]
    eager, eager_fp8, compiled, compiled_fp8 = (trace_activations(model_config, each).per_layer(1) for each in calls)
    assert eager_fp8 == eager
    assert 0.5 * compiled < compiled_fp8 < 0.9 * compiled


def test_settings_that_cost_or_save_memory(model_config, model_file):
    plain = need(run_config(model_file), model_config)
    assert need(run_config(model_file, attention="eager"), model_config).total > plain.total
    full = need(run_config(model_file, activation_checkpointing="full"), model_config)
    half = need(run_config(model_file, activation_checkpointing=0.5), model_config)
    assert full.activations < half.activations < plain.activations
    assert need(run_config(model_file), model_config, sequences=4).activations < plain.activations


def test_a_memory_budget_keeps_less_and_repeats_more(model_config, model_file):
    """With a lower memory budget, the compiler saves less and recomputes more. Its choice depends on the micro-batch
    size."""
    kept, repeated = [], []
    for setting in ("none", MemoryBudget(memory_budget=0.5), MemoryBudget(memory_budget=0.1), "full"):
        config = run_config(model_file, activation_checkpointing=setting, compile="regional")
        work = PlannedRun(config, model_config, "bf16").work(layout("single", 1), 8)
        kept.append(work.activations.per_layer(8))
        repeated.append(work.repeated_flops)
    assert kept[0] > kept[1] > kept[2] > kept[3]
    assert 0 == repeated[0] < repeated[1] <= repeated[2] < repeated[3] == 1


def test_the_loss_of_a_gpu_has_no_softmax_in_fp32_where_it_is_compiled(model_config, model_file):
    compiled = {"compile": "regional"}
    chunked = need(run_config(model_file, **compiled), model_config)
    assert need(run_config(model_file, **compiled), model_config, precision="fp32").activations > chunked.activations
    for backend in ("chunked", "logits"):
        config = run_config(model_file, **compiled, loss={"backend": backend})
        assert need(config, model_config).activations > chunked.activations


def test_strategies_shard_the_documented_states(model_config, model_file):
    """Bytes per parameter match Table 1 of Rajbhandari et al., but with fp32 gradients and 2 processes."""
    total, config = sizes_of(model_config).total, run_config(model_file)

    def states(name):
        memory = need(config, model_config, name, ranks=2)
        return (memory.parameters + memory.gradients + memory.optimizer) / total

    assert states("ddp") == 4 + 4 + 8
    assert states("fsdp2") == (4 + 4 + 8) / 2
    assert states("zero1") == 2 + 4 + (4 + 8) / 2
    assert states("zero3") == (2 + 4 + 4 + 8) / 2


@pytest.mark.parametrize("name", ["fsdp2", "zero3"])
def test_gradients_reduced_once_are_unsharded_between_micro_steps(model_config, model_file, name):
    """With no_sync, the full fp32 gradients are in memory during the last backward pass."""
    batch = {"tokens_per_step": 128 * 8 * 8, "sequences_per_micro_batch": 8}
    often, once = (
        need(run_config(model_file, batch={**batch, "no_sync": once}), model_config, name, 4, "fp32")
        for once in (False, True)
    )
    assert often.gradients == 4 * sizes_of(model_config).total / 4
    assert 0.8 * 4 * sizes_of(model_config).total < once.gradients <= 5 * sizes_of(model_config).total


def test_offload_moves_the_states_away(model_config, model_file):
    memory = need(run_config(model_file), model_config, "zero3_offload", ranks=2)
    total = sizes_of(model_config).total
    assert memory.parameters == memory.optimizer == memory.gradients == 0
    assert memory.host == total * (2 + 4 + 4 + 4 + 8) / 2
    run = PlannedRun(run_config(model_file), model_config, "bf16")
    nvme = layout("zero3_offload_nvme", 2)
    on_disk = footprint(run, replace(nvme, zero=nvme.zero | {"sub_group_size": 1}), 8)
    largest = sizes_of(model_config).largest
    assert on_disk.disk == total * (4 + 4 + 8) / 2
    # DeepSpeed has four fp32 buffers, each as large as the largest sub-group. Here, that is one parameter.
    assert on_disk.host == (total * (2 + 4) + 4 * 4 * largest) / 2


def test_fsdp_offload_moves_the_states_away(model_config, model_file):
    run = PlannedRun(run_config(model_file), model_config, "bf16")
    memory = footprint(run, replace(layout("fsdp2", 2), offloads=True), 8)
    assert memory.parameters == memory.optimizer == memory.gradients == 0
    assert memory.host == sizes_of(model_config).total * (4 + 4 + 8) / 2


STATES = {
    "single": (4 + 4 + 8, 0, 0),
    "ddp": (4 + 4 + 8, 0, 0),
    "fsdp2": ((4 + 4 + 8) / 2, 0, 0),
    "hsdp": (4 + 4 + 8, 0, 0),  # two replicas of one process each
    "zero1": (2 + 4 + (4 + 8) / 2, 0, 0),
    "zero2": (2 + (4 + 4 + 8) / 2, 0, 0),
    "zero3": ((2 + 4 + 4 + 8) / 2, 0, 0),
    "zero3_offload": (0, (2 + 4 + 4 + 4 + 8) / 2, 0),  # DeepSpeed keeps two copies of the gradients
    "zero3_offload_nvme": (0, (2 + 4 + 4 * 4) / 2, (4 + 4 + 8) / 2),  # four buffers for a single sub-group
    "cp": ((4 + 4 + 8) / 2, 0, 0),
    "ep": ((4 + 4 + 8) / 2, 0, 0),
    "mesh": ((4 + 4 + 8) / 2, 0, 0),
    "tp": ((4 + 4 + 8) / 2, 0, 0),
    "fsdp_tp": ((4 + 4 + 8) / 2, 0, 0),
    "pp": ((4 + 4 + 8) / 2, 0, 0),
}
"""{strategy: bytes per parameter of weights, gradients and moments on the device, in CPU memory and on disk}, for bf16
and 2 processes."""


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_launcher_file_has_a_footprint(model_config, model_file, name):
    memory = need(run_config(model_file), model_config, name, ranks=1 if name == "single" else 2)
    total, (device, host, disk) = sizes_of(model_config).total, STATES[name]
    states = (memory.parameters + memory.gradients + memory.optimizer) / total
    # Norms under tp, and the tied embedding under pp, are on both processes.
    whole = {"tp": 0.1, "fsdp_tp": 0.1, "pp": 0.1}.get(name, 0) * device
    assert device <= states <= device + whole
    assert (memory.host / total, memory.disk / total) == (host, disk)
    # 8 x 128 tokens through at least two of four layers, each saving about 20 hidden-size vectors of 2 bytes.
    assert memory.activations * (2 if name == "cp" else 1) > 2 * 20 * 2 * 8 * 128 * SHAPE["hidden_size"]
    assert memory.total >= device * total + memory.activations
    assert (ROOT / f"accelerate_configs/{name}.yaml").exists()


def test_launcher_files_are_all_planned():
    assert set(STRATEGIES) == {path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml")}


def test_a_measured_peak_is_predicted_within_15_percent():
    result = run_script("bench/memory.py", "--only", "llama 1.3M")
    assert "2 cases" in result.stdout, "both cases must run: several micro-steps and recomputation"


def test_the_ladder_climbs_until_it_fits(model_config, model_file):
    run = PlannedRun(run_config(model_file), model_config, "bf16")
    rungs = ladder(run, layout("ddp", 2), 0.0)
    compiled = PlannedRun(run_config(model_file, compile="regional"), model_config, "bf16")
    for found, part in ((rungs, " 50%"), (ladder(compiled, layout("ddp", 2), 0.0), ".memory_budget 0.5")):
        options = [rung.split(",")[0].removeprefix("--activation_checkpointing") for rung in found[:2]]
        assert options == [part, " full"]
    assert [rung.split(":")[0] for rung in rungs[2:5]] == [f"--batch.sequences_per_micro_batch {n}" for n in (4, 2, 1)]
    assert rungs[-1].startswith("accelerate_configs/zero3_offload.yaml") and "does not fit" in rungs[-1]
    enough = need(run_config(model_file, activation_checkpointing="full"), model_config, "ddp", ranks=2).total / 0.89
    half, full = ladder(run, layout("ddp", 2), enough)
    assert "does not fit" in half and "which fits in" in full


@pytest.mark.parametrize(
    ("sizes", "offloads"), [({"tp": 2, "dp_replicate": 2}, False), ({"tp": 2, "dp_shard": 2}, True)]
)
def test_advice_uses_the_sizes_of_the_running_mesh(model_config, model_file, sizes, offloads):
    config = run_config(model_file, activation_checkpointing="full")
    name = Layout.of(Sizes(**sizes)).name
    facts = {
        "config": config.model_dump(mode="json"), "precision": "bf16", "device": "cuda", "strategy": name, "ranks": 4,
        "sizes": vars(Sizes(**sizes)), "offloads": offloads, "memory_bytes": 1e6, "deepspeed": {},
    }  # fmt: skip
    layout_here = replace(Layout.of(Sizes(**sizes)), offloads=offloads)
    needed = largest_footprint(PlannedRun(config, model_config, "bf16", "cuda", 1e6), layout_here, 4).total
    assert advise(facts)[0].startswith(f"--batch.sequences_per_micro_batch 4: needs {bytes_text(needed)}, which")


def test_advice_uses_the_launched_deepspeed_json(model_config, model_file):
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": "auto"}
    config = run_config(model_file, activation_checkpointing="full")
    facts = {
        "config": config.model_dump(mode="json"), "precision": "bf16", "device": "cuda", "strategy": "zero3",
        "ranks": 2, "sizes": None, "offloads": False, "memory_bytes": 1e6, "deepspeed": {"zero_optimization": zero},
    }  # fmt: skip
    offloaded = replace(layout("zero3", 2), zero={name: zero[name] for name in ("stage", "offload_optimizer")})
    run = PlannedRun(config, model_config, "bf16", "cuda", 1e6)
    needed = bytes_text(largest_footprint(run, offloaded, 4).total)
    assert needed != bytes_text(largest_footprint(run, layout("zero3", 2), 4).total)
    assert advise(facts)[0].startswith(f"--batch.sequences_per_micro_batch 4: needs {needed}, which")


def test_parameters_of_loss_terms_are_counted(model_config, model_file):
    load_extensions([str(ROOT / "examples/multi_token_prediction.py")])
    plain = run_config(model_file, budget={"steps": 4})
    with_term = run_config(model_file, budget={"steps": 4}, loss={"terms": {"multi_token_prediction": {"depths": 2}}})
    works = [work_of_run(config, model_config) for config in (plain, with_term)]
    width = SHAPE["hidden_size"]
    terms = 2 * (works[0].sizes.layer + 2 * width * width + 3 * width)  # a block, a projection and three norms
    assert works[1].sizes.terms == terms and works[1].sizes.total == works[0].sizes.total + terms
    assert works[1].flops_per_token - works[0].flops_per_token == 6 * terms
    for name, each in (("ddp", 8), ("fsdp2", 4), ("zero1", 6), ("tp", 8)):  # zero1 includes the fp32 weights
        without, whole = (need(config, model_config, name, ranks=2, precision="fp32") for config in (plain, with_term))
        assert whole.optimizer - without.optimizer == pytest.approx(each * terms), name


@pytest.mark.parametrize(("name", "reductions"), [("ddp", 1), ("zero1", 1), ("zero2", 4)])
def test_gradients_are_all_reduced_and_zero_gathers_the_weights(model_config, model_file, name, reductions):
    """DeepSpeed all-reduces the gradients, see tests/parallel/test_communication.py."""
    config = run_config(model_file, budget={"steps": 4})
    work = PlannedRun(config, model_config, "bf16").work(layout(name, 8), 1)
    sent = {flow.name: flow.sent for flow in flows(Step(work, 4, Links(1.0, 1.0, 8)))}
    share = work.sizes.total * 7 / 8
    gathered = {} if name == "ddp" else {"update": 2 * share}
    assert sent == pytest.approx({"dp_replicate": 2 * 4 * share * reductions, **gathered})
