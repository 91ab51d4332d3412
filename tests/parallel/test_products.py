"""With combined parallel dimensions, traffic and memory on one of 64 fake GPUs must match the minimum and the plan.

With STRATEGIES=all, more combinations are tested.
"""

from collections import defaultdict
from dataclasses import replace

import pytest

from pretrain.mesh_sizes import Sizes
from pretrain.model.model_config import load_model_config
from pretrain_tools.planning.footprints import footprint
from pretrain_tools.planning.layouts import Layout
from pretrain_tools.planning.memory import PlannedRun
from pretrain_tools.planning.plan_options import find_gpu
from pretrain_tools.planning.traffic import Links, Step, flows
from support.fake_cuda import outcomes_of
from support.products_on_fake_cuda import LAUNCHES, OLMOE, OLMOE_LAUNCHES, OLMOE_SIZES, SHAPE
from support.ranks_on_fake_cuda import LENGTH, MIXTURE, MODEL, SEQUENCES, read_config

BF16, FP32, INT64 = 2, 4, 8
LAYERS, VOCABULARY = SHAPE["num_hidden_layers"], SHAPE["vocab_size"]
WIDTH, MLP, HEAD = MODEL["hidden_size"], MODEL["intermediate_size"], MIXTURE["head_dim"]
EXPERTS, CHOICES, EXPERT_WIDTH = map(MIXTURE.get, ("num_experts", "num_experts_per_tok", "moe_intermediate_size"))
MOMENTS = ("micro-step", "last micro-step", "update")


@pytest.fixture(scope="module")
def outcomes():
    return outcomes_of("support.products_on_fake_cuda")


def padded(rows: int, shards: int) -> float:
    """Returns the ratio of padded to original size. FSDP2 pads so that all ranks have the same number of rows."""
    return -(-rows // shards) * shards / rows


def least(model: str, sizes: Sizes, padding=lambda rows, shards: 1.0) -> dict[str, float]:
    """Returns the minimum number of bytes that the last stage sends in two micro-steps and an update.

    The result is {'<kind> of <ranks> by <stride>': bytes of the full tensors}, computed from the model's shape.
    """
    is_mixture, stages, tp, ep = model == "qwen3_moe", sizes.pp, sizes.tp, sizes.ep
    layers = LAYERS / stages
    experts = EXPERTS * 3 * WIDTH * EXPERT_WIDTH if is_mixture else 0
    split = 4 * WIDTH**2 + (0 if is_mixture else 3 * WIDTH * MLP) + (experts if ep == 1 else 0)
    router = EXPERTS * WIDTH * padding(EXPERTS, sizes.fsdp)
    unsplit = 2 * WIDTH + (2 * HEAD + router if is_mixture else 0)
    root = VOCABULARY * WIDTH * (2 if stages == 1 else 1) + WIDTH
    in_layers = layers * (split / tp + unsplit)
    here = layers * experts / ep if ep > 1 else 0
    tokens = SEQUENCES * stages * LENGTH / sizes.cp
    hidden = tokens * WIDTH
    found: dict[str, float] = defaultdict(float)

    def add(kind: str, ranks: int, distance: int, size: float) -> None:
        if ranks > 1 and size:
            found[f"{kind} of {ranks} by {distance}"] += size

    # Weights are gathered for the forward pass and, except in the last layer, again for the backward pass. With a
    # pipeline, weights are gathered and gradients reduced only once per step.
    passes, micro_steps = (2 - 1 / layers, 2) if stages == 1 else (1, 1)
    add("all-gather", sizes.fsdp, tp, micro_steps * BF16 * (passes * in_layers + root))
    add("reduce-scatter", sizes.fsdp, tp, micro_steps * FP32 * (in_layers + root))
    add("all-gather", sizes.efsdp, ep, micro_steps * BF16 * passes * here)
    add("reduce-scatter", sizes.efsdp, ep, micro_steps * FP32 * here)
    own = (in_layers + root) / sizes.fsdp + here / sizes.efsdp
    add("all-reduce", sizes.dp_replicate, sizes.fsdp * tp, FP32 * own)
    # Hidden states are summed after attention and MLP. Under expert parallelism, expert outputs are gathered instead.
    sums = 2 if ep > 1 else 4
    add("all-reduce", tp, 1, 2 * BF16 * sums * layers * hidden + FP32 * (layers * unsplit + root) / sizes.fsdp)
    gathered = 2 * layers * hidden if ep > 1 else 0
    add("all-gather", tp, 1, 2 * BF16 * (hidden + gathered))
    if is_mixture:
        add("all-gather" if ep > 1 else "all-reduce", tp, 1, 2 * BF16 * layers * tokens * CHOICES)
    add("all-to-all", sizes.cp, tp, 2 * BF16 * 2 * 4 * hidden / tp * layers)
    add("all-to-all", ep, 1, 2 * layers * (BF16 * 4 * hidden / tp * CHOICES + INT64 * EXPERTS))
    add("send", stages, sizes.world // stages, 2 * BF16 * hidden)
    return found


def counted(outcome) -> dict[str, float]:
    """Returns the counted bytes in the format of `least`, without the scalar all-reduces of the gradient norm."""
    assert outcome.error is None, outcome.error
    found: dict[str, float] = defaultdict(float)
    for moment in MOMENTS:
        for name, (_, size) in outcome.result[moment]["collectives"].items():
            if name != "all-reduce of 64 by 1" and not name.startswith("receive"):
                found[name] += size
    return found


def rings(name: str) -> float:
    """Returns the number of bytes each rank sends in a collective, relative to the tensor's size."""
    kind, _, ranks = name.partition(" by ")[0].partition(" of ")
    passes = {"send": 0.0, "all-reduce": 2.0}.get(kind, 1.0)
    return 1.0 if kind == "send" else passes * (int(ranks) - 1) / int(ranks)


def flow_of(name: str, sizes: Sizes) -> str:
    kind, _, group = name.partition(" of ")
    of_tp = group == f"{sizes.tp} by 1" and sizes.tp > 1
    match kind:
        case "send":
            return "pp"
        case "all-to-all":
            return "cp" if group == f"{sizes.cp} by {sizes.tp}" else "ep"
        case "all-reduce":
            return "tp" if of_tp else "dp_replicate"
    return "tp" if of_tp and kind == "all-gather" else "fsdp"


def planned_run(name: str, folder) -> tuple[Sizes, PlannedRun]:
    sizes, launch = LAUNCHES[name]
    config = read_config(folder, launch)
    return sizes, PlannedRun(config, load_model_config(config.model.config), "bf16")


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_mesh_has_minimal_traffic(outcomes, name):
    """The traffic must be minimal, except that routers with fewer rows than shards are padded."""
    sizes, _ = LAUNCHES[name]
    expected = least(name.split()[0], sizes, padded)
    found = counted(outcomes[name])
    assert found.keys() == expected.keys()
    for collective, size in found.items():
        assert size == pytest.approx(expected[collective], rel=0.005)


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_plan_predicts_the_traffic(outcomes, name, tmp_path):
    sizes, run = planned_run(name, tmp_path)
    work = run.work(Layout.of(sizes, machines=8), SEQUENCES)
    planned = {flow.name: flow.sent for flow in flows(Step(work, 2, Links(1.0, 1.0, 8)))}
    found: dict[str, float] = defaultdict(float)
    for collective, size in counted(outcomes[name]).items():
        found[flow_of(collective, sizes)] += size * rings(collective)
    if sizes.pp > 1:  # the last stage, which is the one we count, sends only gradients
        found["pp"] *= 2
    assert planned == pytest.approx(found, rel=0.02)


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_plan_predicts_the_memory(outcomes, name, tmp_path):
    sizes, run = planned_run(name, tmp_path)
    planned = footprint(run, Layout.of(sizes), SEQUENCES).total
    peak = max(outcomes[name].result[moment]["peak_bytes"] for moment in MOMENTS)
    assert 0.98 * peak < planned
    assert planned < 1.07 * peak or sizes.pp > 1, (
        "for pipelines, the plan is for the first stage and the measurement for the last"
    )


@pytest.mark.parametrize("sizes", OLMOE_SIZES, ids=str)
def test_olmoe_fits_on_eight_h100s_as_planned(outcomes, sizes, tmp_path):
    """The plan must match measurements with two and three layers, extrapolated to all layers.

    Each GPU processes 8 x 2,048 tokens, without activation checkpointing.
    """
    seen = {layers: outcomes[f"olmoe {(sizes, layers)}"] for layers in (2, 3)}
    assert all(outcome.error is None for outcome in seen.values()), seen
    layers = OLMOE["num_hidden_layers"]
    config = read_config(tmp_path, replace(OLMOE_LAUNCHES[sizes, 2], layers=layers))
    run = PlannedRun(config, load_model_config(config.model.config), "bf16")
    layout = Layout.of(sizes)

    def of_all_layers(figure) -> float:
        two, three = (figure(seen[layers].result) for layers in (2, 3))
        return two + (three - two) * (layers - 2)

    def sent(*kinds: str) -> float:
        def figure(result: dict) -> float:
            collectives = [found for moment in MOMENTS for found in result[moment]["collectives"].items()]
            return sum(size * rings(name) for name, (_, size) in collectives if name.startswith(kinds))

        return of_all_layers(figure)

    needed = of_all_layers(lambda result: max(result[moment]["peak_bytes"] for moment in MOMENTS))
    planned = footprint(run, layout, SEQUENCES).total
    assert 0.98 * needed < planned < 1.05 * needed and max(needed, planned) < find_gpu("h100").memory_bytes
    expected = {flow.name: flow.sent for flow in flows(Step(run.work(layout, SEQUENCES), 2, Links(1.0, 1.0, 8)))}
    found = {"fsdp": sent("all-gather", "reduce-scatter"), "ep": sent("all-to-all")}
    assert expected == pytest.approx({name: size for name, size in found.items() if size}, rel=0.02)
