"""Each strategy's communication, counted on fake GPUs, must match docs/measurements_communication.md.

The table on that page compares it with the minimum computed from the model's shape.
"""

import pytest

from support.fake_cuda import outcomes_of
from support.project import ROOT
from support.ranks_on_fake_cuda import (
    ATTENTIONS,
    COMPILED,
    COUNTED,
    HIDDEN_STATES,
    LAUNCHES,
    MIXTURE,
    MODEL,
    OFFLOADED,
    OVERLAPPED,
    RANKS,
)

WIDTH, MLP, LAYERS = MODEL["hidden_size"], MODEL["intermediate_size"], MODEL["num_hidden_layers"]
SPLIT = 4 * WIDTH**2 + 3 * WIDTH * MLP
"""Number of parameters in a layer's matrices."""
BESIDE = (2 * MODEL["vocab_size"] + 1) * WIDTH
"""Number of parameters in the embedding, head and final norm."""
NORMS = 2 * WIDTH
"""Number of parameters in a layer's norms."""
TOTAL = LAYERS * (SPLIT + NORMS) + BESIDE
WHOLE = LAYERS * NORMS + BESIDE
"""Number of parameters that tensor parallelism doesn't split."""
EXPERTS = LAYERS * MIXTURE["num_experts"] * 3 * WIDTH * MIXTURE["moe_intermediate_size"]
"""Number of parameters in all experts."""
BESIDE_EXPERTS = LAYERS * (4 * WIDTH**2 + NORMS + 2 * MIXTURE["head_dim"] + MIXTURE["num_experts"] * WIDTH) + BESIDE
HIDDEN = HIDDEN_STATES[0] * HIDDEN_STATES[1] * HIDDEN_STATES[2]
"""Number of elements in a micro-batch's hidden states."""
BF16, FP32, INT64 = 2, 4, 8
ONE_SUM = {"all-reduce of 8": (1, FP32)}


def gathered(total: int, beside: int) -> int:
    """Returns the number of parameters gathered per micro-step; `beside` is the number outside the layers."""
    return total + (total - beside) * (LAYERS - 1) // LAYERS


def sharded(ranks: int) -> dict[str, dict[str, tuple[int, int]]]:
    """Returns FSDP's minimum traffic, with weights gathered in bf16 and gradients reduced in fp32.

    The last layer and the weights outside the layers are gathered only once per micro-step.
    """
    gathers = {f"all-gather of {ranks}": (2 * LAYERS, BF16 * gathered(TOTAL, BESIDE))}
    micro_step = {**gathers, f"reduce-scatter of {ranks}": (LAYERS + 1, FP32 * TOTAL)}
    return {
        "micro-step": micro_step,
        "last micro-step": micro_step,
        "update": {f"all-reduce of {ranks}": (1, FP32)},
        "validation": {f"all-gather of {ranks}": (LAYERS + 1, BF16 * TOTAL)},
    }


def reduced_once(least: dict[str, dict[str, tuple[int, int]]]) -> dict[str, dict[str, tuple[int, int]]]:
    """Returns `least` without the first micro-step's reduce-scatter."""
    gathers = {kind: sent for kind, sent in least["micro-step"].items() if not kind.startswith("reduce-scatter")}
    return {**least, "micro-step": gathers}


def cut(ranks: int) -> dict[str, dict[str, tuple[int, int]]]:
    """Returns the minimum traffic for context parallelism, which exchanges queries, keys, values and outputs."""
    forward = (2 * LAYERS, 4 * LAYERS * BF16 * HIDDEN // ranks)
    both = {f"all-to-all of {ranks}": tuple(2 * number for number in forward)}
    least = sharded(RANKS)
    least = {moment: collectives | (both if "step" in moment else {}) for moment, collectives in least.items()}
    return {**least, "validation": {**least["validation"], f"all-to-all of {ranks}": forward}}


def split(ranks: int) -> dict[str, dict[str, tuple[int, int]]]:
    """Returns the minimum traffic for tensor parallelism: two all-reduces of hidden states per layer in each pass.

    In the update, the gradients of replicated weights and the gradient norm are all-reduced.
    """
    micro_step = {
        f"all-reduce of {ranks}": (4 * LAYERS + 1, 4 * LAYERS * BF16 * HIDDEN + FP32),
        f"all-gather of {ranks}": (1, BF16 * HIDDEN),
    }
    return {
        "micro-step": micro_step,
        "last micro-step": micro_step,
        "update": {f"all-reduce of {ranks}": (2, FP32 * WHOLE + FP32)},
        "validation": {f"all-reduce of {ranks}": (2 * LAYERS, 2 * LAYERS * BF16 * HIDDEN)},
    }


def split_and_sharded(ranks: int, groups: int) -> dict[str, dict[str, tuple[int, int]]]:
    """Returns the minimum traffic for tensor parallelism within groups and FSDP across groups."""
    total = LAYERS * (SPLIT // ranks + NORMS) + BESIDE
    gathers = (2 * LAYERS, BF16 * gathered(total, BESIDE))
    of_shards = {f"all-gather of {groups}": gathers, f"reduce-scatter of {groups}": (LAYERS + 1, FP32 * total)}
    least = {moment: collectives | of_shards for moment, collectives in split(ranks).items() if "step" in moment}
    return {
        **least,
        "update": {
            f"all-reduce of {ranks}": (2, FP32 * WHOLE // groups + FP32),
            f"all-reduce of {groups}": (1, FP32),
        },
        "validation": {**split(ranks)["validation"], f"all-gather of {groups}": (LAYERS + 1, BF16 * total)},
    }


def staged(ranks: int, neighbors: int) -> dict[str, dict[str, tuple[int, int]]]:
    """Returns the minimum traffic for a pipeline with as many microbatches as ranks."""
    passed = (neighbors * ranks, neighbors * ranks * BF16 * HIDDEN)
    micro_step = {f"receive of {ranks}": passed, f"send of {ranks}": passed}
    once = (ranks, ranks * BF16 * HIDDEN)
    forward = {f"receive of {ranks}": once, f"send of {ranks}": once}
    if neighbors == 1:  # the last stage
        del forward[f"send of {ranks}"]
    update = {f"all-reduce of {ranks}": (1, FP32)}
    return {"micro-step": micro_step, "last micro-step": micro_step, "update": update, "validation": forward}


def exchanged(ranks: int) -> dict[str, dict[str, tuple[int, int]]]:
    """Returns the minimum traffic for expert parallelism: token counts are exchanged, then tokens are sent to experts
    and back.

    Experts are sharded across the ranks that have the same experts, and all other weights across all ranks.
    """
    rows, counts = BF16 * HIDDEN * MIXTURE["num_experts_per_tok"], INT64 * MIXTURE["num_experts"]
    gathers = (2 * LAYERS, BF16 * gathered(BESIDE_EXPERTS, BESIDE))
    micro_step = {
        f"all-to-all of {ranks}": (5 * LAYERS, LAYERS * (4 * rows + counts)),
        "all-gather of 8": gathers,
        "reduce-scatter of 8": (LAYERS + 1, FP32 * BESIDE_EXPERTS),
    }
    validation = {
        f"all-to-all of {ranks}": (3 * LAYERS, LAYERS * (2 * rows + counts)),
        "all-gather of 8": (LAYERS + 1, BF16 * BESIDE_EXPERTS),
    }
    if ranks < RANKS:
        copies, here = RANKS // ranks, EXPERTS // ranks
        micro_step |= {
            f"all-gather of {copies}": (2 * LAYERS - 1, BF16 * gathered(here, 0)),
            f"reduce-scatter of {copies}": (LAYERS, FP32 * here),
        }
        validation[f"all-gather of {copies}"] = (LAYERS, BF16 * here)
    return {
        "micro-step": micro_step,
        "last micro-step": micro_step,
        "update": {"all-reduce of 8": (1, FP32)},
        "validation": validation,
    }


def with_replicas(least: dict, moment: str, times: int, elements: int) -> dict:
    """Adds an all-reduce of `elements` gradients between two replicas."""
    return {**least, moment: {**least[moment], "all-reduce of 2": (times, FP32 * elements)}}


STAGE = SPLIT + NORMS + WIDTH + MODEL["vocab_size"] * WIDTH
"""Number of parameters in the last stage if it has one layer."""
GATHERED_ONCE = {"all-gather of 8": (1, BF16 * TOTAL)}
SCATTERED_ONCE = {"reduce-scatter of 8": (1, FP32 * TOTAL)}
LEAST = {
    "ddp": {"last micro-step": {"all-reduce of 8": (1, FP32 * TOTAL)}},
    "fsdp2": sharded(8),
    "fsdp2, no_sync": reduced_once(sharded(8)),
    "fsdp2, offloaded": sharded(8),
    "hsdp, 2 x 4": with_replicas(sharded(4), "last micro-step", 1, TOTAL // 4),
    "cp": cut(8),
    "cp, 2 x 4": cut(4),
    "tp": split(8),
    "fsdp_tp, 4 x 2": split_and_sharded(2, 4),
    "tp, 2 x 4": with_replicas(split(4), "last micro-step", 1, WHOLE + LAYERS * SPLIT // 4),
    "pp, an inner stage": staged(8, neighbors=2),
    "pp, 2 x 4, the last stage": with_replicas(staged(4, neighbors=1), "last micro-step", 1, STAGE),
    "ep": exchanged(8),
    "ep, 2 x 4": exchanged(4),
    "zero1": {"last micro-step": SCATTERED_ONCE, "update": {**GATHERED_ONCE, **ONE_SUM}},
    "zero2": {"micro-step": SCATTERED_ONCE, "last micro-step": SCATTERED_ONCE, "update": {**GATHERED_ONCE, **ONE_SUM}},
    "zero3": {
        "micro-step": {**GATHERED_ONCE, **SCATTERED_ONCE},
        "last micro-step": {**GATHERED_ONCE, **SCATTERED_ONCE},
        "update": ONE_SUM,
    },
    "zero3, fp32, no_sync": {
        "micro-step": {"all-gather of 8": (1, FP32 * TOTAL)},
        "last micro-step": {"all-gather of 8": (1, FP32 * TOTAL), **SCATTERED_ONCE},
        "update": ONE_SUM,
    },
}
"""{launch: {phase: {'<kind> of <ranks>': (count, bytes of the full tensors)}}}, computed from the model's shape."""
ALL_REDUCED = "DeepSpeed all-reduces the gradients, although each rank only needs its shard"
IN_TWO = "DeepSpeed gathers parameters with and without weight decay separately"
REASONS = {
    ("ddp", "last micro-step"): "DDP reduces gradients in 25 MB buckets",
    ("hsdp, 2 x 4", "last micro-step"): "gradients are reduced layer by layer",
    ("tp, 2 x 4", "last micro-step"): "gradients are reduced layer by layer",
    **{
        (launch, "update"): "the gradient norm takes one all-reduce over all ranks"
        for launch in ("hsdp, 2 x 4", "tp, 2 x 4", "fsdp_tp, 4 x 2", "pp, 2 x 4, the last stage")
    },
    ("pp, 2 x 4, the last stage", "last micro-step"): "gradients are reduced layer by layer",
    ("zero1", "last micro-step"): ALL_REDUCED,
    ("zero1", "update"): IN_TWO,
    ("zero2", "micro-step"): ALL_REDUCED,
    ("zero2", "last micro-step"): ALL_REDUCED,
    ("zero2", "update"): f"{IN_TWO}, and uses three all-reduces for the gradient norm and the overflow check",
    **{
        (launch, moment): "DeepSpeed prefetches parameters in buckets, and doesn't shard norm weights"
        for launch in ("zero3", "zero3, fp32, no_sync")
        for moment in ("micro-step", "last micro-step")
    },
    **{
        (launch, "update"): (
            "DeepSpeed gathers norm weights, and uses two all-reduces for the gradient norm and the overflow check"
        )
        for launch in ("zero3", "zero3, fp32, no_sync")
    },
}
"""Reasons why a phase sends more than the minimum."""


@pytest.fixture(scope="module")
def outcomes():
    return outcomes_of("support.ranks_on_fake_cuda")


@pytest.mark.parametrize("launch", COUNTED)
def test_a_step_runs_on_one_of_eight_gpus_without_synchronizing(outcomes, launch):
    assert outcomes[launch].error is None


@pytest.mark.parametrize("launch", COMPILED)
def test_compiled_steps_and_the_work_between_them_do_not_synchronize(outcomes, launch):
    """Prefetching batches, exchanging reports and copying weights for a checkpoint don't synchronize."""
    assert outcomes[f"four steps: {launch}"].error is None


def sent(collectives: dict[str, tuple[int, int]]) -> float:
    """Returns the MB sent per GPU. A ring all-reduce sends the tensor twice, a gather or scatter once."""
    total = 0.0
    for name, (_, size) in collectives.items():
        kind, _, ranks = name.partition(" of ")
        rounds = {"all-reduce": 2, "send": 0, "receive": 0}.get(kind, 1)
        total += size if kind == "send" else rounds * size * (int(ranks) - 1) / int(ranks)
    return total / 1e6


def in_words(collectives: dict[str, tuple[int, int]]) -> str:
    words = []
    for name, (times, _) in sorted(collectives.items()):
        kind, _, ranks = name.partition(" of ")
        words.append(f"{times} {kind}{'s' if times > 1 else ''} over {ranks}")
    return ", ".join(words)


def rows(outcomes) -> list[str]:
    """Returns the rows of the table in docs/measurements_communication.md.

    Micro-steps with the same traffic share a row, and phases without communication are omitted.
    """
    lines = []
    for launch in LAUNCHES:
        moments = outcomes[launch].result
        counted = {moment: seen["collectives"] for moment, seen in moments.items()}
        same = counted["micro-step"] == counted["last micro-step"]
        for moment, collectives in counted.items():
            least = LEAST[launch].get(moment, {})
            if not collectives or (same and moment == "last micro-step"):
                continue
            name = {"micro-step": "every micro-step" if same else "earlier micro-steps"}.get(moment, moment)
            is_least = {kind: tuple(both) for kind, both in collectives.items()} == least
            minimum = f"{sent(least):.2f}" if is_least else f"{in_words(least)}: {sent(least):.2f}"
            reason = "" if is_least else REASONS.get((launch, moment), "?")
            cells = (launch, name, in_words(collectives), f"{sent(collectives):.2f}", minimum, reason)
            lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
    return lines


def test_the_table_in_the_docs_matches_the_counts(outcomes):
    """Each row above the minimum must also have a reason."""
    counted = rows(outcomes)
    text = (ROOT / "docs/measurements_communication.md").read_text()
    _, _, table = text.partition("| launch | when |")
    assert table.splitlines()[2 : 2 + len(counted)] == counted, "\n" + "\n".join(counted)
    assert not table.splitlines()[2 + len(counted)].startswith("|")
    assert "| ? |" not in table, "a row above the minimum has no reason"


def test_every_reason_is_needed(outcomes):
    for launch, moment in REASONS:
        counted = outcomes[launch].result[moment]["collectives"]
        assert {kind: tuple(both) for kind, both in counted.items()} != LEAST[launch].get(moment, {}), (launch, moment)


@pytest.mark.parametrize("launch", ATTENTIONS)
def test_every_attention_has_the_same_exchanges(outcomes, launch):
    counted, expected = outcomes[launch].result, outcomes["cp"].result
    assert all(counted[moment]["collectives"] == expected[moment]["collectives"] for moment in expected)


def test_sharding_needs_the_expected_number_of_collectives(outcomes):
    """Two micro-steps of a two-layer model need 8 all-gathers, and HSDP also needs 3 all-reduces between replicas."""
    micro_steps = ("micro-step", "last micro-step")
    for launch, ranks in {"fsdp2": RANKS, "hsdp, 2 x 4": RANKS // 2}.items():
        counted = [outcomes[launch].result[moment]["collectives"] for moment in micro_steps]
        assert sum(moment[f"all-gather of {ranks}"][0] for moment in counted) == 8
    assert sum(moment.get("all-reduce of 2", (0,))[0] for moment in counted) == 3


@pytest.mark.parametrize("launch", LAUNCHES)
def test_only_moe_layers_synchronize_once_per_layer(outcomes, launch):
    """Each MoE layer synchronizes once in the forward pass, for the token counts, and never in the backward pass."""
    waits = {moment: seen["waits"] for moment, seen in outcomes[launch].result.items()}
    layers = LAYERS if launch.startswith("ep") else 0
    assert waits == {"micro-step": layers, "last micro-step": layers, "update": 0, "validation": layers}


@pytest.mark.parametrize("launch", ["fsdp2", "hsdp, 2 x 4", "tp", "ep", "zero1", "zero2", "zero3"])
def test_sharded_layers_output_bf16(outcomes, launch):
    """Only norms may run in fp32; the head's matmul must be in bf16."""
    seen = outcomes[launch].result["micro-step"]
    assert seen["head_dtypes"] == ["torch.bfloat16"]
    assert seen["casts_to_fp32"] == 2 * (2 * LAYERS + 1)


def test_a_cpu_update_waits_for_the_values_it_reads(outcomes):
    """A CPU update must wait for the clipping divisor and the skip flag, which torch copies asynchronously."""
    assert outcomes["fsdp2, offloaded"].result["update"]["unawaited_copies"] == 0
    assert outcomes["fsdp2, offloaded"].result["micro-step"]["unawaited_copies"] > 0, (
        "FSDP waits for the gradient copies itself"
    )


@pytest.mark.parametrize("launch", ["fsdp2, offloaded", *OFFLOADED])
def test_offloaded_tensors_are_sent_by_gpus(outcomes, launch):
    moments = outcomes[launch].result
    assert not any(seen["sent_from_host"] for moment, seen in moments.items()), moments


def in_layers(issued: list[tuple[str, str]], products: int) -> list[list[str]]:
    """Returns the collectives issued before the first matmul, and after each layer's first matmul."""
    found = [[]]
    count = 0
    for kind, _ in issued:
        if kind == "product":
            count += 1
            if count % products == 1:
                found.append([])
        else:
            found[-1].append(kind)
    return found


PRODUCTS = 7
"""Number of matmuls in a layer's forward pass; the backward pass has twice as many."""


@pytest.mark.parametrize("launch", [name for name in OVERLAPPED if name != "ddp"])
def test_a_layer_is_gathered_while_the_previous_one_computes(outcomes, launch):
    """Gathers and reductions must overlap with the computation of other layers.

    In the forward pass, the CPU launches each gather on a separate stream, right after the previous layer. In the
    backward pass, it launches the gather before the current layer's matmuls.
    """
    outcome = outcomes[f"order: {launch}"]
    assert outcome.error is None, outcome.error
    layers = OVERLAPPED[launch].layers
    forward, backward = outcome.result["forward"], outcome.result["backward"]
    streams = {kind: {stream for one, stream in forward + backward if one == kind} for kind in ("gather", "reduce")}
    assert "compute" not in streams["gather"] | streams["reduce"] and not streams["gather"] & streams["reduce"]
    gathers = [moment.count("gather") for moment in in_layers(forward, PRODUCTS)]
    assert gathers == [2] + [1] * (layers - 1) + [0], (
        "first the weights outside the layers and the first layer, then one layer at a time"
    )
    moments = in_layers(backward, 2 * PRODUCTS)
    gathers = [moment.count("gather") for moment in moments]
    assert gathers == [1] * (layers - 1) + [0, 0], "each layer must be prefetched; the last layer is still gathered"
    assert all("reduce" in moment for moment in moments[1:])


def test_buckets_are_summed_during_the_backward_pass(outcomes):
    outcome = outcomes["order: ddp"]
    assert outcome.error is None, outcome.error
    kinds = [kind for kind, _ in outcome.result["backward"]]
    during = kinds[: len(kinds) - kinds[::-1].index("product")]
    assert kinds.count("reduce") == 4 and during.count("reduce") >= 2
    assert during.index("reduce") < len(during) / 2, (
        "the first bucket must be reduced in the first half of the backward pass"
    )
    assert "reduce" not in [kind for kind, _ in outcome.result["forward"]]
