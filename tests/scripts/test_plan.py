"""Tests for plan.py: its reports and its errors."""

import json
import math
import re
import shlex
import sys
from dataclasses import replace

import pytest
import yaml

import plan as plan_script
from pretrain.config import Averaging
from pretrain.data.vocabulary import planned_model_config
from pretrain.errors import InputError
from pretrain.gpus import GIB, GPUS, gpu_called
from pretrain.limits import available_memory
from pretrain.mesh_sizes import Sizes
from pretrain.recipe import read_run_config
from pretrain.units import co2_text
from pretrain_tools.planning import memory
from pretrain_tools.planning.candidates import (
    AS_FAST,
    Candidate,
    Case,
    command_of,
    consider_layout,
    micro_batches,
    reason_of,
    recommend,
    search_products,
    shares_of,
    storage_of,
    work_of_run,
)
from pretrain_tools.planning.footprints import largest_footprint
from pretrain_tools.planning.layouts import Layout, layout, layouts, products
from pretrain_tools.planning.memory import Memory, PlannedRun, sizes_of
from pretrain_tools.planning.plan_options import find_gpu
from pretrain_tools.planning.report import PARTS, build_plan, comment_of, facts, plan_json, plan_verdict, remarks
from pretrain_tools.planning.step_time import COMMUNICATION_BYTES, CONTEXT_BYTES, FRAGMENTATION, Hardware, StepTime
from pretrain_tools.planning.traffic import Links
from support.project import ROOT, run_script
from support.quick_traces import use_quick_traces
from support.terminals import lines_that_remain, watched
from support.tiny_models import TINY_LLAMA


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    (folder / "tiny.json").write_text(json.dumps(TINY_LLAMA))
    values = {
        "model": str(folder / "tiny.json"),
        "output": str(folder / "run"),
        "data": {
            "train": [{"shards": str(folder / "a"), "weight": 0.75}, {"shards": str(folder / "b"), "weight": 0.25}]
        }
        | {"sequence_length": 64},
        "budget": {"tokens": "1M"},
        "batch": {"tokens_per_step": "8k", "sequences_per_micro_batch": 4},
        "optim": {"learning_rate": 1e-3},
        "compile": "none",
        "checkpoint": {"every_steps": 10, "keep_last": 2, "keep_best": 1, "keep_every": 50},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values))
    return folder / "recipe.yaml"


def plan_of(recipe, *overrides, gpu="h100", gpus=8, machines=1, **options):
    config = read_run_config(recipe, list(overrides))
    gpu = find_gpu(gpu) if isinstance(gpu, str) else gpu
    return build_plan(config, str(recipe), list(overrides), Hardware(gpu, gpus, machines), **options)


@pytest.fixture(scope="module")
def plan(recipe):
    return plan_of(recipe, mfu=0.4)


def candidate(plan, name):
    return next(candidate for candidate in plan.candidates if candidate.name == name)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_moe_models_are_planned(precision):
    """torch can only infer the output shapes of grouped matmuls in bf16."""
    plan = plan_of(ROOT / "recipes/moe_5m.yaml", ("precision", precision), gpus=2, mfu=0.4)
    assert candidate(plan, "ddp").fits
    assert candidate(plan, "tp").problems == candidate(plan, "ep").problems == []
    assert candidate(plan, "pp").problems == []


def test_the_work_of_a_run_equals_a_hand_calculation(plan):
    values = json.loads(plan_json(plan))
    assert values["steps"] == math.ceil(1_000_000 / 8192) == 123 and values["tokens"] == 123 * 8192
    layers, hidden, length = 2, 64, 64
    assert values["flops_per_token"] == 6 * values["non_embedding_parameters"] + 12 * layers * hidden * length
    assert values["flops"] == values["flops_per_token"] * values["tokens"]


def test_a_batch_ramp_changes_steps_but_not_hours(recipe):
    """Smaller steps are shorter."""
    ramp = ("batch.ramp", "{from: 0.25, over: 0.5}")
    plain, ramped = (plan_of(recipe, *overrides, gpus=1, mfu=0.4) for overrides in ((), (ramp,)))
    assert ramped.work.steps > 1.5 * plain.work.steps
    assert ramped.hours == pytest.approx(plain.hours, rel=0.01)


def test_hours_cost_and_energy_follow_from_the_mfu(plan):
    chosen = plan.recommended
    assert chosen.time.exposed > 0, "a model this small must wait for gradient communication"
    computing = plan.work.flops / (8 * 989e12 * 0.4)
    assert plan.work.steps * (chosen.step_seconds - chosen.time.exposed) == pytest.approx(computing)
    assert plan.gpu_hours == 8 * plan.hours
    assert plan.cost == plan.gpu_hours * GPUS["h100"].price_per_hour
    assert plan.kilowatt_hours == pytest.approx(plan.gpu_hours * 0.7)
    assert plan_verdict(plan)[0].count(f"kWh at rated power{co2_text(plan.kilowatt_hours, 473)};") == 1


def test_a_command_is_ready_to_paste(plan, recipe):
    launcher = f"accelerate launch --config_file accelerate_configs/{plan.recommended.name}.yaml --num_processes 8 "
    assert plan.command.startswith(launcher) and f"train.py --config {recipe}" in plan.command
    several = plan_of(recipe, ("optim.learning_rate", "2e-3"), gpus=16, machines=2)
    assert "--num_machines 2 --machine_rank RANK --main_process_ip ADDRESS" in several.command
    assert "train.py --config" in several.command and "--optim.learning_rate 2e-3" in several.command


def test_commands_are_quoted_for_the_shell(recipe, printed):
    value = "{half_life_fraction: 0.1, kind: ema}"
    plan = plan_of(recipe, ("averaging", value), gpus=1, mfu=0.4)
    assert shlex.split(plan.command)[-2:] == ["--averaging", value]
    words = ["--config", str(recipe), "--averaging", value]
    assert shlex.join(["plan.py", *words]) in printed(*words, "--comment").replace("\n#   ", " ")


def case_of(recipe, *overrides, gpus, machines=1):
    plan = plan_of(recipe, *overrides, gpus=1, mfu=0.4)
    run = PlannedRun(plan.config, planned_model_config(plan.config), "bf16")
    return Case(run, plan.work, Hardware(find_gpu("h100"), gpus, machines), plan.mfu)


def test_the_search_matches_an_exhaustive_search(recipe, monkeypatch):
    """Uses two machines with four GPUs each and a network slow enough to matter."""
    use_quick_traces(monkeypatch)
    case = case_of(recipe, ("batch.sequences_per_micro_batch", "1"), ("pipeline.schedule", "1F1B"), gpus=8, machines=2)
    tried = [consider_layout(each, case) for each in products(8, 2) if not each.is_planned]
    able = [candidate for candidate in tried if candidate.runs]
    assert len(able) > 10
    fastest = min(candidate.step_seconds for candidate in able)
    found = search_products(case)
    assert len(found) == 3 and found[0].step_seconds <= (1 + AS_FAST) * fastest
    assert len({candidate.label for candidate in found}) == 3


def test_inner_dimensions_stay_in_a_machine_and_outer_ones_cross_the_network():
    links = Links(inside=100.0, network=10.0, per_machine=8)
    product = Layout.of(Sizes(pp=2, dp_replicate=2, dp_shard=8, tp=4), machines=16)
    assert product.name == "mesh" and product.groups["tp"] == (4, 1)
    assert links.seconds(100.0, *product.groups["tp"]) == 1.0
    assert links.seconds(100.0, *product.groups["fsdp"]) == 5.0, (
        "two of the group's eight processes share a machine, with an adapter each"
    )
    assert links.seconds(100.0, *product.groups["dp_replicate"]) == 10.0
    exchange = links.seconds(70.0, 8, 4, is_exchange=True)
    assert exchange == pytest.approx(60.0 / 10), "one of the seven other processes is on the same machine"


@pytest.mark.parametrize(
    ("name", "machines", "per_machine", "gbits", "published"),
    [
        ("a100", 1, 8, None, 232.5),  # NVIDIA/nccl-tests issue 175
        ("a100", 2, 8, 100, 86.0),  # issue 175, with 4 adapters of 200 Gbit/s per machine
        ("a100", 3, 8, 100, 96.0),  # issue 119: peak with the same number of adapters
        ("h100", 1, 8, None, 476.0),  # issue 290, with reduction in NVLink switches
        ("h100", 16, 1, None, 46.0),  # issue 290: NVIDIA's figure for a 400 Gbit/s adapter
        ("h200", 248, 8, None, 350.0),  # issue 283
    ],
)
def test_planned_bandwidths_are_a_little_below_those_of_nccl_tests(name, machines, per_machine, gbits, published):
    """nccl-tests measures all-reduces of gigabytes. Those in a step are smaller and reach 65% to 95% of that
    bandwidth."""
    gpu = GPUS[name]
    if gbits:
        gpu = replace(gpu, network_bytes_per_second=gbits * 1e9 / 8)
    links = Hardware(gpu, machines * per_machine, machines).links
    planned = 1.0 / links.seconds(1e9, machines * per_machine, 1)
    assert 0.65 * published < planned < 0.95 * published


def test_meshes_have_the_names_and_configs_of_their_files():
    names = {"fsdp2": Sizes(dp_shard=8), "hsdp": Sizes(dp_replicate=4, dp_shard=2), "tp": Sizes(dp_replicate=2, tp=4)}
    names |= {"fsdp_tp": Sizes(dp_shard=4, tp=2), "cp": Sizes(cp=8), "pp": Sizes(pp=2, dp_replicate=4)}
    names |= {"ep": Sizes(dp_shard=8, ep=4), "mesh": Sizes(dp_replicate=2, cp=4)}
    assert all(Layout.of(sizes).name == name for name, sizes in names.items())
    ep, mesh = Layout.of(names["ep"]), Layout.of(Sizes(pp=2, dp_shard=2, tp=2))
    assert (ep.launcher, ep.options) == ("python -m pretrain.launch", " --parallelism_config_ep_size 4")
    assert mesh.options == " --parallelism_config_pp_size 2 --parallelism_config_tp_size 2"
    assert Layout.of(names["hsdp"]).launcher == "accelerate launch"


def test_a_command_sets_group_sizes_that_differ_from_the_file(recipe):
    plan = plan_of(recipe, ("batch.sequences_per_micro_batch", "1"), gpus=32, machines=4)
    hardware, config = plan.hardware, plan.config
    hsdp = command_of(candidate(plan, "hsdp"), str(recipe), [], hardware, config)
    assert "--parallelism_config_dp_replicate_size 4 --num_machines 4" in hsdp
    tp = command_of(replace(candidate(plan, "tp"), micro_batch=1), str(recipe), [], hardware, config)
    assert "--parallelism_config_tp_size 8" in tp


def test_the_largest_micro_batch_fits_and_divides_the_batch(recipe):
    small = find_gpu("t4", memory_bytes=2.4e9)
    plan = plan_of(recipe, ("precision", "fp32"), gpu=small, gpus=2)
    chosen = candidate(plan, "ddp")
    possible = micro_batches(plan.config, 2)
    assert possible == [1, 2, 4, 8, 16, 32, 64]
    assert chosen.largest_micro_batch in possible
    assert chosen.memory.total <= plan.hardware.usable_bytes


@pytest.mark.parametrize("found", [None, 1, 4, 32])
def test_largest_micro_batch_is_found_by_bisection(found, recipe, monkeypatch):
    monkeypatch.setattr(Case, "memory", lambda case, layout, sequences: Memory(sequences, 0, 0, 0, 0, "loss"))
    case = case_of(recipe, gpus=2)
    gpu = replace(case.hardware.gpu, memory_bytes=((found or 0.5) + CONTEXT_BYTES + COMMUNICATION_BYTES) / 0.92)
    case = replace(case, hardware=replace(case.hardware, gpu=gpu))
    considered = consider_layout(layout("ddp", 2), case)
    assert considered.largest_micro_batch == found
    assert (considered.planned_memory and considered.planned_memory.total) == considered.micro_batch


def test_the_largest_micro_batch_may_need_less_memory_than_smaller_ones(recipe, monkeypatch):
    """A step with one micro-step accumulates no gradients."""
    monkeypatch.setattr(Case, "memory", lambda case, layout, n: Memory(n + 100 * (n < 64), 0, 0, 0, 0, "loss"))
    case = case_of(recipe, ("batch.sequences_per_micro_batch", "64"), gpus=2)
    gpu = replace(case.hardware.gpu, memory_bytes=(70 + CONTEXT_BYTES + COMMUNICATION_BYTES) / (1 - FRAGMENTATION))
    considered = consider_layout(layout("ddp", 2), replace(case, hardware=replace(case.hardware, gpu=gpu)))
    assert considered.fits and considered.runs
    assert considered.largest_micro_batch == considered.micro_batch == 64


def test_auto_on_a_t4_is_fp16_only_under_strategies_that_scale_the_loss(recipe):
    auto, fp16, fp32 = (plan_of(recipe, ("precision", name), gpu="t4", gpus=2) for name in ("auto", "fp16", "fp32"))
    memory = candidate(auto, "ddp").memory
    assert memory == candidate(fp16, "ddp").memory and memory.total < candidate(fp32, "ddp").memory.total
    assert candidate(auto, "fsdp2").memory == candidate(fp32, "fsdp2").memory
    assert facts(auto)["GPUs"] == "2 x t4, 65 TFLOP/s dense fp16, 15 GB"


def test_what_cannot_run_is_reported_with_the_reason(recipe):
    plan = plan_of(recipe, ("optim.name", "adamw_8bit"))
    text = "\n".join(remarks(plan))
    assert "adamw_8bit is not supported with zero2; use adamw or adafactor or muon, or a strategy" in text
    assert "num_key_value_heads 2" in text and "must all be divisible by 8" in text
    assert not candidate(plan, "zero2").runs and candidate(plan, "ddp").runs
    assert "adamw_8bit is not supported with tp: tp splits matrices by columns" in text


def test_settings_that_depend_on_the_precision_are_checked_in_the_planned_precision(recipe):
    """ZeRO reduces gradients once per step only in fp32."""
    bf16, fp32 = (plan_of(recipe, ("batch.no_sync", "true"), ("precision", name)) for name in ("bf16", "fp32"))
    assert candidate(fp32, "zero2").runs and candidate(fp32, "zero3").runs
    assert candidate(bf16, "fsdp2").runs
    for name in ("zero2", "zero3"):
        assert candidate(bf16, name).problems[0].startswith(f"batch.no_sync: not supported with {name} except in fp32")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (("activation_checkpointing.memory_budget", "0.5"), "does not work with compile: none"),
        (("averaging", "{kind: tail, tail_fraction: 0.01}"), "averaging.every_steps: 10 averages only"),
    ],
)
def test_settings_that_training_rejects_are_not_planned(recipe, settings, problem):
    with pytest.raises(InputError, match=problem):
        plan_of(recipe, settings, gpus=1)


def test_shards_have_their_share_of_8_bit_moments(recipe):
    exact, coarse = (plan_of(recipe, ("optim.name", name)) for name in ("adamw", "adamw_8bit"))
    names = ("ddp", "fsdp2", "hsdp")
    states = {name: [candidate(plan, name).memory.optimizer for plan in (exact, coarse)] for name in names}
    assert candidate(coarse, "fsdp2").runs
    share = states["ddp"][1] / states["ddp"][0]
    assert 2 + 2 / 64 < 8 * share < 2.6, "bytes per parameter, a bit more than two because some matrices are too small"
    for exactly, coarsely in states.values():
        assert coarsely / exactly == pytest.approx(share)


def test_a_batch_that_does_not_divide_is_reported(recipe):
    plan = plan_of(recipe, ("batch.sequences_per_micro_batch", "3"))
    assert "is not a multiple of 3 sequences per micro-batch x data.sequence_length 64 x" in "\n".join(remarks(plan))
    chosen = plan.recommended
    assert f"--batch.sequences_per_micro_batch {chosen.micro_batch}" in plan.command
    size = f"{chosen.planned_memory.total / GIB:.1f} GB per GPU"
    said = f"{chosen.micro_batch} sequences per micro-batch instead of 3 ({size})"
    assert said in "\n".join(remarks(plan))


def test_the_choice_among_equals_has_a_reason():
    def able(name, seconds, *, fits=True):
        return Candidate(layout(name, 8), [], None, fits, 8, 8, time=StepTime(seconds))

    ddp, zero1, slow = able("ddp", 1.0), able("zero1", 0.99), able("pp", 1.5)
    assert reason_of(ddp, [ddp, zero1, slow]) == (
        "Of the fastest strategies, ddp is the simplest with the recipe's micro-batch; within the estimate's error "
        "(3%), it is as fast as zero1."
    )
    assert recommend([zero1, able("ddp", 1.0, fits=False)]) is zero1
    assert reason_of(zero1, [zero1, slow]) == "zero1 is the fastest that fits."
    too_large = Candidate(layout("ddp", 8), [], Memory(1e12, 0, 0, 0, 0, "loss"))
    assert reason_of(slow, [slow, too_large]) == "Only pp fits."
    assert reason_of(slow, [slow, replace(too_large, memory=None)]) == "Only pp can run this recipe."
    tp = replace(slow, time=StepTime(0.9, 0.1, {"tp": 0.5}))
    assert shares_of(tp) == "60% computing, 33% summing hidden states across tp, 7% waiting in the pipeline"


def test_one_gpu_runs_single(recipe):
    plan = plan_of(recipe, gpus=1)
    assert plan.recommended.name == "single"
    assert candidate(plan, "ddp").problems == ["needs more than one GPU"]


def test_a_plan_where_nothing_fits(recipe):
    plan = plan_of(recipe, gpu=find_gpu("h100", memory_bytes=2.2e9))
    assert plan.recommended is None and plan.command is None and plan.hours is None
    assert "Nothing fits on 8 x h100: use more GPUs" in "\n".join(remarks(plan))


def test_a_plan_where_no_strategy_can_run(recipe):
    plan = plan_of(recipe, gpus=3)
    assert plan.recommended is None and not any(candidate.memory for candidate in plan.candidates)
    assert remarks(plan)[-1] == "No strategy can run this recipe on 3 x h100: fix one of the problems above."


LONG = (
    ("data.sequence_length", "64k"), ("model.max_position_embeddings", "65536"), ("batch.tokens_per_step", "512k"),
    ("batch.sequences_per_micro_batch", "1"),
)  # fmt: skip
COMPILED = ("compile", "regional")
BUDGET = ("activation_checkpointing.memory_budget", "0.5")
FULL = ("activation_checkpointing", "full")


@pytest.mark.parametrize(
    ("settings", "enough_for", "proposed", "repeated"),
    [
        ((COMPILED,), BUDGET, BUDGET, 0.25),
        ((COMPILED, ("activation_checkpointing", "none")), BUDGET, BUDGET, 0.25),
        ((COMPILED,), FULL, FULL, 1.0),
        ((), BUDGET, FULL, 1.0),  # layers must be compiled
        ((COMPILED, ("model.attention_dropout", "0.1")), BUDGET, FULL, 1.0),
    ],
)
def test_activation_checkpointing_is_proposed_if_nothing_fits(
    recipe, monkeypatch, settings, enough_for, proposed, repeated
):
    """The memory is just enough for one of the settings. On one GPU, the only other strategy is offloading."""
    use_quick_traces(monkeypatch)
    settings = (*LONG, *settings)
    config = read_run_config(recipe, [*settings, enough_for])
    run = PlannedRun(config, planned_model_config(config), "bf16")
    need = largest_footprint(run, layout("single", 1), 1).total
    gpu = find_gpu("h100", memory_bytes=(1.01 * need + CONTEXT_BYTES) / (1 - FRAGMENTATION))
    plan = plan_of(recipe, *settings, gpu=gpu, gpus=1)
    assert not candidate(plan, "single").runs
    proposal = plan.proposal
    assert (proposal.option, proposal.repeated, proposal.candidate.name) == (proposed, repeated, "single")
    option = f"--{proposed[0]} {proposed[1]}"
    text = "\n".join(remarks(plan))
    assert f"With {option}, single fits with 1 sequence per micro-batch and takes " in text
    assert option in proposal.command and f"\n  {proposal.command}" in text
    assert "--activation_checkpointing none" not in proposal.command
    assert json.loads(plan_json(plan))["proposal"][proposed[0]] == proposed[1]
    planned = plan_of(recipe, *settings, proposed, gpu=gpu, gpus=1)
    assert planned.recommended.name == "single" and planned.hours == pytest.approx(proposal.hours)
    assert planned.proposal is None


def test_activation_checkpointing_is_not_proposed_if_a_smaller_micro_batch_is_as_fast(recipe, monkeypatch):
    use_quick_traces(monkeypatch)
    traced = []
    trace = memory.trace_activations
    monkeypatch.setattr(memory, "trace_activations", lambda model, call: traced.append(call) or trace(model, call))
    settings = (*LONG, COMPILED, ("batch.sequences_per_micro_batch", "8"))
    config = read_run_config(recipe, list(settings))
    run = PlannedRun(config, planned_model_config(config), "bf16")
    need = largest_footprint(run, layout("single", 1), 4).total
    gpu = find_gpu("h100", memory_bytes=(1.01 * need + CONTEXT_BYTES) / (1 - FRAGMENTATION))
    plan = plan_of(recipe, *settings, gpu=gpu, gpus=1)
    assert plan.recommended.name == "single" and plan.recommended.micro_batch == 4
    assert plan.proposal is None and {call.activation_checkpointing for call in traced} == {"none"}


def test_disk_usage_counts_kept_checkpoints(recipe):
    config = read_run_config(recipe)
    from pretrain.model.model_config import load_recipe_model_config

    work = work_of_run(config, load_recipe_model_config(config.model, None))
    storage, total = storage_of(config, work), work.sizes.total
    assert storage.checkpoint == 12 * total, "a checkpoint must contain fp32 weights and AdamW's two moments"
    averaging = config.model_copy(update={"averaging": Averaging(kind="tail")})
    assert storage_of(averaging, work).checkpoint == 16 * total
    assert storage.kept == 2 + 1 + 123 // 50
    rarer = config.model_copy(update={"interval_scale": 3.0})
    assert storage_of(rarer, work).kept == 2 + 1, "every 30th step is saved, and the run is shorter than 150 steps"
    assert storage_of(config.model_copy(update={"interval_scale": 100.0}), work).kept == 1
    assert storage.total == 12 * total * 6 + 2 * total, (
        "the total must include a checkpoint being written, and final/ in bf16"
    )


def test_tokens_drawn_from_each_source(plan, recipe, shards):
    drawn = {row["source"].rsplit("/", 1)[-1]: row["tokens"] for row in plan.sources}
    assert drawn == {"a": 0.75 * plan.work.tokens, "b": 0.25 * plan.work.tokens}
    prepared = plan_of(recipe, ("data.train", f"[{{shards: {shards}}}]"), gpus=1)
    (row,) = prepared.sources
    assert row["epochs"] == pytest.approx(prepared.work.tokens / row["available"], rel=0.01)


def test_sources_that_run_out_are_reported(recipe, shards):
    plan = plan_of(recipe, ("data.train", f"[{{shards: {shards}, max_epochs: 1}}]"), gpus=1)
    assert "the sources are used up" in "\n".join(remarks(plan))


def test_the_comment_fits_a_recipe(plan):
    text = comment_of(plan, "plan.py --config x --gpus 8 --gpu h100")
    assert all(line.startswith("# ") and len(line) <= 119 for line in text.splitlines())
    assert "123 steps" in text and "8 x h100" in text


@pytest.mark.parametrize(
    ("device_name", "gpu"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100_pcie"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100_40gb"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA GeForce RTX 4090", "rtx_4090"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("Tesla T4", "t4"),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA H100 NVL", "h100_nvl"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA GeForce RTX 5090", "rtx_5090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", None),
    ],
)
def test_a_gpu_is_found_by_the_name_that_torch_gives_it(device_name, gpu):
    assert gpu_called(device_name) == (gpu and GPUS[gpu])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "h10O"], "--gpu: h10O is not a known GPU; did you mean h100?"),
        (["--gpu", "mine", "--gpu_memory", "48GB"], "for other GPUs, also pass --gpu_memory and --peak_tflops"),
        (["--gpus", "0"], "--gpus 0: must be at least 1"),
        (["--gpus", "12"], "--gpus 12: must be a multiple of 8, the default per machine; otherwise, set --machines"),
        (["--gpus", "8", "--machines", "3"], "--machines 3: must divide the number of GPUs (8)"),
        (["--mfu", "40"], "--mfu 40.0: must be above 0 and at most 1; write 40% as 0.4"),
        (["--price_per_gpu_hour", "-1"], "--price_per_gpu_hour -1: must be at least 0 and finite"),
        (["--price_per_gpu_hour", "nan"], "--price_per_gpu_hour nan: must be at least 0 and finite"),
        (["--gpu_memory", "1GB"], "memory: 1.0 GB per GPU must be more than the 1.1 GB that plan.py reserves"),
        (["--gpu_memory", "lots"], "--gpu_memory lots: must be a size, such as 80GB"),
        (["--optim.learning_rat", "1"], "--optim.learning_rat: unknown key; did you mean learning_rate?"),
    ],
)
def test_bad_input_is_refused(recipe, arguments, message, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["plan.py", "--config", str(recipe), *arguments])
    with pytest.raises(InputError, match=re.escape(message)):
        plan_script.main()


def test_all_problems_at_once(recipe):
    result = run_script("plan.py", "--config", recipe, "--gpu", "x", "--gpus", "0", "--seed", "-1", check=False)
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 3 and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("overrides", "gpu", "message"),
    [
        ([("precision", "fp8")], "a100", "precision: a100 doesn't support fp8"),
        ([("precision", "bf16")], "v100", "precision: v100 doesn't support bf16; use --precision fp16"),
        ([("batch.tokens_per_step", "1000")], "h100", "1,000 is not a multiple of data.sequence_length 64"),
        ([("data.sequence_length", "256")], "h100", "is more than the model's max_position_embeddings"),
        ([("optim.muon.qk_clip", "100")], "h100", "optim.muon.qk_clip: requires optim.name: muon, got adamw"),
    ],
)
def test_runs_that_cannot_be_planned_are_refused(recipe, overrides, gpu, message):
    with pytest.raises(InputError, match=message):
        plan_of(recipe, *overrides, gpu=gpu)


def test_a_missing_gpu_package_does_not_prevent_a_plan(recipe):
    assert plan_of(recipe, ("optim.name", "adamw_8bit"), gpu="h100").recommended


def test_an_unknown_gpu_can_be_described():
    gpu = find_gpu("mine", memory_bytes=48e9, bf16_flops=2e14, price_per_hour=0.5)
    assert (gpu.memory_bytes, gpu.bf16_flops, gpu.price_per_hour) == (48e9, 2e14, 0.5)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("RTX 4090", "rtx_4090"),
        ("rtx4090", "rtx_4090"),
        ("4090", "rtx_4090"),
        ("GeForce RTX 4090", "rtx_4090"),
        ("A100-SXM4-80GB", "a100"),
        ("a100-40gb", "a100_40gb"),
        ("NVIDIA H100 PCIe", "h100_pcie"),
        ("h100-sxm5", "h100"),
        ("H100 NVL", "h100_nvl"),
        ("RTX A6000", "a6000"),
    ],
)
def test_gpus_are_known_in_the_spellings_people_use(spelling, name):
    assert find_gpu(spelling) == GPUS[name]


def test_a_gpu_that_is_not_listed_stays_unknown():
    with pytest.raises(InputError, match="--gpu: h800nvl is not a known GPU"):
        find_gpu("h800nvl")


@pytest.fixture
def printed(monkeypatch, capsys):
    """Returns a function that returns plan.py's output when stdout isn't a terminal."""

    def printed(*arguments) -> str:
        monkeypatch.setattr(sys, "argv", ["plan.py", *map(str, arguments)])
        plan_script.main()
        return capsys.readouterr().out

    return printed


def test_a_plan_for_the_processors_of_this_machine(recipe, printed):
    plan = json.loads(printed(recipe, "--gpu", "cpu", "--gpus", "2", "--precision", "auto", "--json"))
    assert plan["gpu"]["name"] == "cpu" and plan["gpu"]["memory_bytes"] == available_memory() / 2 and plan["cost"] == 0
    assert 1e8 < plan["gpu"]["bf16_flops"] < 1e14
    assert plan["hours"] > 0 and 0 < plan["mfu"] <= 0.4


def test_a_plan_in_fp32_uses_the_fp32_peak(recipe, printed):
    planned = {
        precision: json.loads(printed(recipe, "--gpu", "h100", "--gpus", "1", "--precision", precision, "--json"))
        for precision in ("bf16", "fp32")
    }
    assert planned["fp32"]["hours"] / planned["bf16"]["hours"] == pytest.approx(989 / 67)
    given = printed(recipe, "--gpu", "h100", "--gpus", "1", "--precision", "fp32", "--peak_tflops", "400")
    assert "400 TFLOP/s fp32" in given


def test_a_plan_fits_eighty_columns(recipe, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["plan.py", str(recipe), "--gpus", "8", "--gpu", "a100"])
    screen = watched(monkeypatch, 80)
    plan_script.main()
    lines = [line for line in lines_that_remain(screen.getvalue()) if not line.startswith("  accelerate launch")]
    assert max(map(len, lines)) <= 80
    (heading,) = [line for line in lines if line.startswith("strategy")]
    assert heading.split() == ["strategy", "total", "fits", "largest", "micro-batch", "tokens/s", "hours"]


def test_the_example_on_the_page_and_in_the_recipe_is_what_is_printed(monkeypatch):
    """The plan for a 1.1B model on 8 GPUs is up to date in docs/memory.md and in the recipe. `python plan.py ...
    --comment` prints the recipe's."""
    monkeypatch.chdir(ROOT)
    plan = plan_of("recipes/llama_1b.yaml", gpu="h100", gpus=8)
    page = (ROOT / "docs/memory.md").read_text().partition("### 1.1B on 8 GPUs")[2].partition("###")[0]
    rows = re.findall(r"^\| ([^|]+) \|((?: [\d.]+ \|){6})", page.replace("**", ""), re.MULTILINE)
    memory = {c.label: [f"{getattr(c.memory, part) / GIB:.1f}" for part in PARTS] for c in plan.candidates if c.memory}
    assert {name: cells.replace("|", "").split() for name, cells in rows} == memory
    command = "plan.py --config recipes/llama_1b.yaml --gpus 8 --gpu h100"
    assert comment_of(plan, command) in (ROOT / "recipes/llama_1b.yaml").read_text()


def test_the_page_is_readable_when_piped(recipe, printed):
    text = printed("--config", recipe, "--gpus", "8", "--gpu", "a100")
    assert "\x1b" not in text
    assert "Recommended: " in text and "accelerate launch --config_file accelerate_configs/" in text
    assert str(ROOT) not in text


def test_offload_to_disk_reads_and_writes_weights_gradients_and_states(plan):
    on_disk, in_memory = (candidate(plan, f"zero3_offload{disk}").time.on_host for disk in ("_nvme", ""))
    assert on_disk - in_memory == pytest.approx(2 * (4 + 4 + 8) * plan.work.sizes.total / 5e9)


def test_untested_optimizers_are_rejected_with_disk_offload(recipe):
    found = candidate(plan_of(recipe, ("optim.name", "muon"), gpus=1, mfu=0.4), "zero3_offload_nvme")
    assert any(
        problem.startswith("optim.name: muon does not support optimizer state on disk") for problem in found.problems
    )


def test_muon_sends_matrices_to_their_owners_and_back(recipe):
    """Muon's additional communication is in bf16: an all-gather with ddp, and shards sent and returned with fsdp2 and
    ZeRO-3."""
    adamw, muon = (plan_of(recipe, ("optim.name", name), mfu=0.4) for name in ("adamw", "muon"))
    longer = {
        name: candidate(muon, name).step_seconds - candidate(adamw, name).step_seconds
        for name in ("ddp", "fsdp2", "zero1", "zero3")
    }
    config = read_run_config(recipe, [])
    sizes = sizes_of(planned_model_config(config))
    hidden = 2 * sum(math.prod(s) for n, s in sizes.shapes.shapes.items() if sizes.shapes.is_hidden_matrix(n))
    rate = muon.hardware.links.inside
    assert longer["ddp"] == pytest.approx(hidden * 7 / 8 / rate)
    assert longer["fsdp2"] == pytest.approx(longer["zero3"]) == pytest.approx(2 * hidden / 8 * 7 / 8 / rate)
    assert longer["zero1"] == 0


def test_offload_on_one_gpu_rejects_the_same_settings(recipe):
    found = candidate(plan_of(recipe, ("optim.name", "adamw_8bit"), gpus=1, mfu=0.4), "zero3_offload")
    assert found.problems[0].startswith(
        "optim.name: adamw_8bit is not supported with zero3_offload; use adamw or adafactor or muon"
    )
    assert candidate(plan_of(recipe, gpus=1, mfu=0.4), "zero3_offload").runs


@pytest.mark.parametrize(("share", "parts"), [(1.01, 2), (0.7, 4)])
def test_the_smallest_cp_size_that_fits_is_chosen(recipe, share, parts, monkeypatch):
    """The smallest cp size that fits in memory is chosen for eight GPUs. With four query heads, it can't be eight."""
    use_quick_traces(monkeypatch)
    settings = (
        ("data.sequence_length", "64k"), ("model.max_position_embeddings", "65536"), ("batch.tokens_per_step", "512k"),
        ("batch.sequences_per_micro_batch", "1"), ("activation_checkpointing", "full"),
    )  # fmt: skip
    config = read_run_config(recipe, list(settings))
    run = PlannedRun(config, planned_model_config(config), "bf16")
    of_two = largest_footprint(run, layouts("cp", 8)[0], 1).total
    memory = (share * of_two + CONTEXT_BYTES + COMMUNICATION_BYTES) / (1 - FRAGMENTATION)
    plan = plan_of(recipe, *settings, gpu=find_gpu("h100", memory_bytes=memory))
    found = candidate(plan, "cp")
    assert found.fits and found.layout.options == f" --parallelism_config_cp_size {parts}"
    assert f"cp: {parts} of 8 processes share each sequence" in found.notes
    assert plan.recommended.name == "cp", "cp must be recommended, because a whole sequence doesn't fit"
    assert f"--num_processes 8 --parallelism_config_cp_size {parts} train.py" in plan.command
