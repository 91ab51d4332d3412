"""Every combination of parallel dimensions must have the same loss curve on four processes.

Each combination is trained with AdamW, cycling through the pipeline schedules. A combination that shards matrices in
two dimensions is also trained with Muon and Adafactor. All of these runs share one launch
(tests/support/train_strategies.py). With STRATEGIES=all in the environment (`make test-strategies`), all combinations
are trained with all three optimizers and resumed from another combination's checkpoint. Combinations of three and four
dimensions are trained in a second launch, with eight processes.

By default, most runs have two steps, and models have two layers unless a pipeline needs four.
"""

import importlib.util
import json
import math
import os
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from pretrain.errors import InputError
from pretrain.mesh_sizes import (
    DIMENSIONS,
    Sizes,
    environment_flag,
    launched_sizes,
    setting,
    take_own_options,
    variable,
)
from pretrain.parallel.launcher import launched_strategy, launcher_problems
from pretrain.parallel.mesh import MeshStrategy
from pretrain.parallel.pipeline import STAGE_LAYOUTS
from pretrain.recipe import read_run_config
from support.mesh_products import MODELS, SCHEDULES, name_of, products, variables
from support.project import ROOT, events, free_port, launch, losses, nearly_equal, run_script

EVERYTHING = os.environ.get("STRATEGIES") == "all"
STEPS, SHORT = 4, 2
NORM = 2e-6
"""Relative tolerance for gradient norms, which depend on the fp32 summation order."""
MIDDLE = "checkpoints/step-00000002"


def is_typical(model: str, sizes: Sizes) -> bool:
    """Checks whether a combination is tested by default."""
    return model == "dense" or sizes.ep == 2 or (sizes.ep == 1 and (sizes.tp > 1 or sizes.fsdp == 1))


Case = tuple[str, str, Sizes]
"""(optimizer, model, sizes)"""


def cases(processes: int, optimizer: str = "adamw") -> dict[str, Case]:
    prefix = "" if optimizer == "adamw" else f"{optimizer} "
    return {f"{prefix}{name}": (optimizer, *case) for name, case in products(processes).items()}


IN_TWO_DIMENSIONS = {
    f"{optimizer} moe dp_shard2 tp2": (optimizer, "moe", Sizes(dp_shard=2, tp=2))
    for optimizer in ("muon", "adafactor")
}
FEW_EXPERTS = {
    f"muon few {name_of('', sizes).strip()}": ("muon", "few", sizes)
    for sizes in (Sizes(dp_shard=4), Sizes(dp_shard=4, ep=2))
}
TYPICAL = {name: case for name, case in cases(4).items() if EVERYTHING or is_typical(*case[1:])}
OF_FOUR = {"moe dp_shard4 ep2": ("adamw", "moe", Sizes(dp_shard=4, ep=2))}
OF_FOUR |= {"moe dp_shard2 cp2": ("adamw", "moe", Sizes(dp_shard=2, cp=2))}
if EVERYTHING:
    OF_FOUR |= {"moe dp_shard4 ep4": ("adamw", "moe", Sizes(dp_shard=4, ep=4))}
    OF_FOUR |= {"moe cp4": ("adamw", "moe", Sizes(cp=4))}
ON_FOUR: dict[str, Case] = TYPICAL | IN_TWO_DIMENSIONS | FEW_EXPERTS | OF_FOUR
ON_EIGHT: dict[str, Case] = {}
if EVERYTHING:
    ON_FOUR |= cases(4, "muon") | cases(4, "adafactor")
    ON_EIGHT = cases(8)
RESUMED = list(ON_FOUR | ON_EIGHT) if EVERYTHING else [*IN_TWO_DIMENSIONS, list(FEW_EXPERTS)[-1]]
CLIPPED = {"tp2 dp_shard2": ("muon", "dense", Sizes(tp=2, dp_shard=2))}
"""Combinations trained with QK-clip."""
if EVERYTHING:
    CLIPPED |= {
        "tp2 pp2": ("muon", "dense", Sizes(tp=2, pp=2)),
        "cp2 tp2": ("muon", "dense", Sizes(cp=2, tp=2)),
        "cp2 dp_shard2": ("muon", "dense", Sizes(cp=2, dp_shard=2)),
        "pp2 cp2": ("muon", "dense", Sizes(pp=2, cp=2)),
        "pp2 dp_shard2": ("muon", "dense", Sizes(pp=2, dp_shard=2)),
        "dp_replicate2 dp_shard2": ("muon", "dense", Sizes(dp_replicate=2, dp_shard=2)),
        "ep2 dp_shard4": ("muon", "mixtral", Sizes(dp_shard=4, ep=2)),
        "ep2 tp2 dp_shard2": ("muon", "mixtral", Sizes(dp_shard=2, tp=2, ep=2)),
    }
ONLY_TRAIN = ["--data.validation", "[]", "--diagnostics.every_steps", "null"]
CLIP = ["--optim.muon.qk_clip", "0.003"]
PACKED = {"pp2 cp2": ("adamw", "dense", Sizes(pp=2, cp=2))}
"""Combinations trained on whole documents."""
if EVERYTHING:
    PACKED |= {
        "pp2 dp_shard2": ("adamw", "dense", Sizes(pp=2, dp_shard=2)),
        "tp2 dp_shard2": ("adamw", "dense", Sizes(tp=2, dp_shard=2)),
    }
BEST_FIT = ["--data.sampling", "best_fit", *ONLY_TRAIN]
COMPILED = {"dense pp2 dp_shard2": "mesh", "dense dp_replicate2 tp2": "tp", "dense dp_shard2 cp2": "cp"}
"""{combination: strategy}, trained with compiled layers too."""
COMPILED_CLIP = [*CLIP, "--precision", "bf16", "--compile", "regional"]
MIXTRAL = MODELS["dense"] | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
"""MoE model without query and key norms, as QK-clip requires."""
HAS_FP8 = importlib.util.find_spec("torchao") is not None
PRESETS = {
    "dense pp2 dp_replicate2": "pp",
    "dense dp_replicate2 tp2": "tp",
    "dense dp_shard2 tp2": "fsdp_tp",
    "dense dp_replicate2 dp_shard2": "hsdp",
    "moe dp_shard4 ep2": "ep",
    "moe dp_shard4 ep4": "ep",
    "moe dp_shard2 cp2": "cp",
    "moe cp4": "cp",
}
"""Combinations that have their own launcher file."""
OPTIONS = {"dense pp2 dp_replicate2": ["--pipeline.microbatches_per_stage", "2"]}
"""Extra options per combination; this one uses smaller microbatches than necessary."""
IN_FP8 = ["--precision", "fp8"]
ROUNDED = ["--optim.name", "adafactor", "--optim.stochastic_rounding", "true", "--averaging.kind", "none"]
PIPELINES = [name for name, (_, _, sizes) in (ON_FOUR | ON_EIGHT).items() if sizes.pp > 1]
SCHEDULE_OF = dict(zip(PIPELINES, cycle(SCHEDULES)))


def steps_of(name: str) -> int:
    return STEPS if EVERYTHING or name in RESUMED else SHORT


def layers_of(sizes: Sizes) -> int:
    return 4 if EVERYTHING or sizes.pp > 1 else 2


def alone(optimizer: str, model: str, sizes: Sizes) -> str:
    """Returns the name of the single-process reference run."""
    return f"{optimizer} {model} of {layers_of(sizes)} alone"


def clipped_alone(optimizer: str, model: str, sizes: Sizes) -> str:
    return f"clipped {alone(optimizer, model, sizes)}"


def packed_alone(optimizer: str, model: str, sizes: Sizes) -> str:
    return f"packed {alone(optimizer, model, sizes)}"


@pytest.fixture
def sizes(monkeypatch):
    """Sets the launcher's environment variables. Returns the sizes that a process reads from them."""

    def sizes(processes: int, kind: str = "FSDP", **given: str) -> Sizes:
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        monkeypatch.setenv("ACCELERATE_USE_FSDP", str(kind == "FSDP"))
        monkeypatch.setenv("FSDP_VERSION", "2")
        monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
        for name in DIMENSIONS:
            monkeypatch.delenv(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", raising=False)
        for name, size in given.items():
            monkeypatch.setenv(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", size)
        return launched_sizes()

    return sizes


def test_remaining_processes_are_sharded_or_replicated(sizes):
    assert sizes(8) == Sizes(dp_shard=8)
    assert sizes(8, "MULTI_GPU") == Sizes(dp_replicate=8)
    assert sizes(8, pp="2", tp="2") == Sizes(pp=2, tp=2, dp_shard=2)
    assert sizes(8, "MULTI_GPU", pp="2", tp="2") == Sizes(pp=2, tp=2, dp_replicate=2)
    assert sizes(8, dp_replicate="2", dp_shard="None") == Sizes(dp_replicate=2, dp_shard=4)
    assert sizes(8, dp_shard="2", cp="0") == Sizes(dp_shard=2, cp=4)
    assert sizes(8, dp_shard="None", cp="0") == Sizes(cp=8)
    assert sizes(8, tp="2", ep="all") == Sizes(dp_shard=4, tp=2, ep=8)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"tp": "3"},
            "parallelism_config_tp_size 3 does not fit the number of processes (8); use 0 (all remaining) or 2, "
            "4, 8, or --num_processes 3",
        ),
        (
            {"tp": "2", "pp": "3"},
            "pp_size 3 x parallelism_config_tp_size 2 does not fit the number of processes",
        ),
        ({"tp": "two"}, "parallelism_config_tp_size: two is not a valid size"),
        ({"tp": "0", "cp": "0"}, "parallelism_config_cp_size and parallelism_config_tp_size are both 0"),
        ({"dp_shard": "2", "tp": "2"}, "parallelism_config_tp_size 2 does not fit the number of processes (8)"),
        ({"ep": "3"}, "parallelism_config_ep_size: 3 does not divide dp_shard x cp x tp = 8; use 0"),
        ({"dp_replicate": "8", "ep": "2"}, "parallelism_config_ep_size: 2 does not divide dp_shard x cp x tp = 1"),
    ],
)
def test_impossible_sizes_are_rejected_with_alternatives(sizes, given, message):
    with pytest.raises(InputError) as raised:
        sizes(8, **given)
    assert message in str(raised.value)


def test_a_missing_size_is_rejected(sizes, recipe):
    """accelerate drops the pp size, so it must be read from the launcher file. Otherwise, the run would use DDP."""
    sizes(2, "MULTI_GPU")
    (problem,) = launcher_problems(read_run_config(recipe), "fp32", launched_strategy())
    assert problem.startswith(
        "launcher: parallelism_config sets no size above 1; set one of parallelism_config_pp_size"
    )


def test_sizes_that_cannot_be_read_from_the_launcher_file_are_rejected(sizes, recipe, monkeypatch):
    sizes(2, cp="2")
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_BACKEND", "torch")  # as accelerate's launcher does
    (problem,) = launcher_problems(read_run_config(recipe), "fp32", launched_strategy())
    assert "cannot read" in problem and "set PARALLELISM_CONFIG_PP_SIZE and PARALLELISM_CONFIG_EP_SIZE" in problem


@pytest.mark.parametrize(
    ("words", "exported", "ignored"),
    [
        (["--config_file", "accelerate_configs/fsdp2.yaml", "--parallelism_config_tp_size", "2"], {}, ["tp"]),
        (["--config_file", "accelerate_configs/tp.yaml", "--multi_gpu"], {}, ["tp"]),
        (["--config_file", "accelerate_configs/hsdp.yaml", "--use_fsdp"], {}, ["dp_replicate"]),
        (["--config_file", "accelerate_configs/mesh.yaml", "--use_fsdp"], {}, []),
        (["--config_file", "accelerate_configs/ddp.yaml"], {"pp": "2"}, ["pp"]),  # pretrain.launch sets the variable
        (["--config_file", "accelerate_configs/ddp.yaml"], {"pp": "1"}, []),
        (None, {"tp": "2", "cp": "2"}, ["cp", "tp"]),  # torchrun
    ],
)
def test_sizes_without_an_effect_are_rejected(recipe, monkeypatch, words, exported, ignored):
    command = None if words is None else ([*words, "--num_processes", "2", "train.py"], ROOT)
    monkeypatch.setattr("pretrain.mesh_sizes.launcher_command", lambda: command)
    for name, value in {"WORLD_SIZE": "2", **{variable(name): size for name, size in exported.items()}}.items():
        monkeypatch.setenv(name, value)
    problems = launcher_problems(read_run_config(recipe), "fp32", launched_strategy())
    assert len(problems) == bool(ignored)
    for problem in problems:
        assert problem.startswith(f"launcher: {' and '.join(map(setting, ignored))} would be ignored")


def test_flags_for_torchrun_may_be_in_any_case(monkeypatch):
    monkeypatch.delenv("FSDP_RESHARD_AFTER_FORWARD", raising=False)
    assert environment_flag("FSDP_RESHARD_AFTER_FORWARD", "true")
    for value, expected in {"True": True, "1": True, "False": False}.items():
        monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", value)
        assert environment_flag("FSDP_RESHARD_AFTER_FORWARD", "true") == expected


def test_presets_keep_their_names_and_other_products_are_the_mesh(sizes):
    names = {"hsdp": {"dp_replicate": "2"}, "fsdp_tp": {"tp": "2"}, "cp": {"cp": "2"}, "ep": {"ep": "2"}, "fsdp2": {}}
    for name, given in names.items():
        sizes(4, **given)
        assert launched_strategy() == name
    for name, given in {"tp": {"tp": "2"}, "pp": {"pp": "2"}}.items():
        sizes(4, "MULTI_GPU", **given)
        assert launched_strategy() == name
    sizes(8, pp="2", tp="2")
    assert launched_strategy() == "mesh"


def test_all_problems_of_a_mesh_are_reported_at_once(sizes, recipe):
    sizes(8, cp="2", tp="4")
    found = MeshStrategy.problems(read_run_config(recipe, [("data.sequence_length", "33")]), "mesh")
    assert any(
        "sequence_length: 33 cannot be split into 2 equal chunks; nearest: 32 or 34" in problem for problem in found
    )
    expected = "must all be divisible by 4, the number of tensor-parallel processes; 2 would work"
    assert any(expected in problem for problem in found)


def test_unsupported_precision_is_rejected(sizes, recipe, monkeypatch):
    sizes(4, pp="2")
    monkeypatch.setattr("pretrain.parallel.strategy.resolve_precision", lambda requested: requested)
    in_fp16 = read_run_config(recipe, [("precision", "fp16")])
    problem, *_ = MeshStrategy.problems(in_fp16, "mesh")
    assert problem.startswith("precision: fp16 is not supported with mesh")
    assert problem.endswith("use fp32 or bf16 or fp8, or a strategy that supports it, such as ddp")


def test_fp8_is_only_rejected_with_zero_bubble_schedules(sizes, recipe, monkeypatch):
    monkeypatch.setattr("pretrain.parallel.strategy.resolve_precision", lambda requested: requested)
    zero_bubble = [("precision", "fp8"), ("pipeline.schedule", "ZBVZeroBubble")]
    in_fp8 = read_run_config(recipe, zero_bubble)
    for given, reasons in (
        ({"dp_shard": "8"}, []),
        ({"tp": "2"}, []),
        ({"pp": "2"}, ["precision: fp8 is not supported with pipeline.schedule ZBVZeroBubble"]),
    ):
        sizes(8, **given)
        found = [problem for problem in MeshStrategy.problems(in_fp8, "mesh") if "precision" in problem]
        assert len(found) == len(reasons) and all(map(str.startswith, found, reasons))


SHOWS_SIZES = """
import os, sys
sys.path.insert(0, os.getcwd())
from pretrain.mesh_sizes import launched_sizes
with open(f"{__file__}.{os.environ['RANK']}", "w") as file:  # output of two processes could be interleaved
    file.write(str(launched_sizes().named()))
"""


@pytest.mark.parametrize(
    ("launcher", "given", "mesh"),
    [
        ("accelerate.commands.launch", (), {"pp": 2}),
        ("pretrain.launch", ("--parallelism_config_pp_size", "1"), {"dp_shard": 2}),
    ],
)
def test_sizes_that_accelerate_ignores_are_read(launcher, given, mesh, tmp_path):
    """Sizes that accelerate ignores must be read from the launcher's file and command line."""
    settings = yaml.safe_load((ROOT / "accelerate_configs/mesh.yaml").read_text())
    settings["parallelism_config"]["parallelism_config_pp_size"] = 2
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(settings))
    (tmp_path / "shows.py").write_text(SHOWS_SIZES)
    words = ("-m", launcher, *given, "--config_file", tmp_path / "two.yaml", "--num_processes", "2")
    run_script(*words, "--main_process_port", free_port(), tmp_path / "shows.py", fresh=True)
    assert [(tmp_path / f"shows.py.{rank}").read_text() for rank in range(2)] == [str(mesh)] * 2


def test_the_scripts_own_options_are_not_taken():
    words = ["--parallelism_config_pp_size=2", "--num_processes", "4", "train.py", "--parallelism_config_ep_size", "2"]
    assert take_own_options(words) == ({"pp": "2"}, words[1:])


@dataclass(frozen=True)
class Trainer:
    """Describes and launches runs in a folder that contains the recipe and the models."""

    folder: Path

    def run(self, case: Case, name: str, strategy: str, *options: str, steps: int = SHORT, **more) -> dict:
        """Describes a run for tests/support/train_strategies.py."""
        optimizer, model, sizes = case
        arguments = ["--output", str(self.folder / name), "--model", str(self.folder / f"{model}.json")]
        arguments += ["--model.num_hidden_layers", str(layers_of(sizes)), "--budget.steps", str(steps)]
        arguments += ["--averaging.half_life_fraction", str(1 / steps)]  # one step
        arguments += ["--pipeline.schedule", SCHEDULE_OF.get(name.removesuffix(" resumed"), "1F1B")]
        arguments += ["--optim.name", optimizer, *options]
        if model != "dense":
            arguments += ["--loss.router_balance", "0.5", "--loss.router_z_loss", "0.01"]
        environment = variables(sizes) if strategy != "ddp" else {}
        if case in IN_TWO_DIMENSIONS.values():
            environment["FSDP_OFFLOAD_PARAMS"] = str(optimizer == "adafactor")
        return {"strategy": strategy, "arguments": arguments, "environment": environment, "muon_bucket": 2**13, **more}

    def run_alone(self, case: Case, name: str, *options: str, **more) -> dict:
        """Describes a single-process run with the same number of layers as the case."""
        return self.run(case, name, "single", *options, steps=STEPS, **more) | {"environment": {}}

    def train(self, processes: int, them: list[dict]) -> None:
        (self.folder / "runs.json").write_text(json.dumps(them))
        program = ("tests/support/train_strategies.py", self.folder / "recipe.yaml", self.folder / "runs.json")
        launch("single" if processes == 1 else "ddp", processes, *program, timeout=3000)


@pytest.fixture(scope="module")
def trainer(shards, tmp_path_factory) -> Trainer:
    folder = tmp_path_factory.mktemp("mesh")
    for name, values in {**MODELS, "mixtral": MIXTRAL}.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    values = {
        "model": str(folder / "dense.json"),
        "output": str(folder / "run"),
        "seed": 1,
        "precision": "fp32",
        "data": {"train": [{"shards": str(shards)}], "sequence_length": 32},
        "budget": {"steps": STEPS},
        "batch": {"tokens_per_step": 512, "sequences_per_micro_batch": 2},
        "optim": {"learning_rate": 0.001, "schedule": "constant", "warmup_steps": 2, "max_grad_norm": 0.5},
        "compile": "none",
        "validation": {"every_steps": SHORT, "sequences": 6},
        "checkpoint": {"every_steps": 2, "keep_last": 9, "save_final": False},
        "averaging": {"kind": "ema", "every_steps": 1},
        "logging": {"every_steps": 1},
        "diagnostics": {"every_steps": SHORT},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values))
    return Trainer(folder)


@pytest.fixture(scope="module")
def runs(trainer) -> Path:
    """Trains every combination, and each model on one process."""
    folder, run, run_alone, train = trainer.folder, trainer.run, trainer.run_alone, trainer.train
    bf16 = ("--precision", "bf16")
    exported = ("--checkpoint.save_final", "true")
    every = [*ON_FOUR.values(), *ON_EIGHT.values()]
    # Builds the same graphs as other backends, but in a second instead of a minute.
    compiled = {"aot_eager": True}
    in_bf16 = ("adamw", "moe", Sizes(pp=2, tp=2, ep=2))
    rounded = ("adafactor", "dense", Sizes(dp_shard=2, tp=2))
    rounded_in_stages = ("adafactor", "dense", Sizes(dp_shard=2, pp=2))
    copies = ("adamw", "dense", Sizes(dp_replicate=4))
    references = {alone(*case): case for case in (*every, copies)}
    single = [run_alone(case, name) for name, case in references.items()]
    single += [run_alone(in_bf16, "bf16 alone", *bf16), run_alone(rounded, "rounded alone", *ROUNDED)]
    single.append(run_alone(rounded_in_stages, "rounded in stages alone", *ROUNDED))
    special = [
        run(in_bf16, "bf16", "mesh", *bf16, *exported),
        *(
            run(cases(4)[name], f"compiled {name}", strategy, "--compile", "regional", *exported, **compiled)
            for name, strategy in COMPILED.items()
        ),
        run(rounded, "rounded", "mesh", *ROUNDED, *exported),
        run(rounded_in_stages, "rounded in stages", "mesh", *ROUNDED, *exported),
        run(copies, "copies", "ddp", *ONLY_TRAIN, steps=STEPS),
        run(copies, "copies resumed", "ddp", *ONLY_TRAIN, steps=STEPS, start_from=str(folder / "copies" / MIDDLE)),
    ]
    clipped = {clipped_alone(*case): case for case in CLIPPED.values()}
    single += [run_alone(case, name, *CLIP) for name, case in clipped.items()]
    special += [run(case, f"clipped {name}", "mesh", *CLIP) for name, case in CLIPPED.items()]
    packed = {packed_alone(*case): case for case in PACKED.values()}
    single += [run_alone(case, name, *BEST_FIT) for name, case in packed.items()]
    for name, case in PACKED.items():
        special.append(run(case, f"packed {name}", "mesh", *BEST_FIT))
        start = str(folder / packed_alone(*case) / MIDDLE)
        special.append(run(case, f"packed {name} resumed", "mesh", *BEST_FIT, steps=STEPS, start_from=start))
    if EVERYTHING:
        case = CLIPPED["tp2 dp_shard2"]
        single.append(run_alone(case, "clipped bf16 alone", *CLIP, *bf16))
        special.append(run(case, "clipped bf16 compiled", "mesh", *COMPILED_CLIP, **compiled))
        case = ("adamw", "dense", Sizes(dp_replicate=2, dp_shard=2))
        special.append(run(case, "reduced once", "hsdp", "--batch.no_sync", "true"))
    train(1, single)
    before = {name: name for name in references}
    for processes, them in ((4, ON_FOUR), (8, ON_EIGHT)):
        runs = special if processes == 4 else []
        for name, case in them.items():
            given = (PRESETS.get(name, "mesh"), *OPTIONS.get(name, ()))
            runs.append(run(case, name, *given, steps=steps_of(name)))
            if name in RESUMED:
                start = str(folder / before[alone(*case)] / MIDDLE)
                runs.append(run(case, f"{name} resumed", *given, *ONLY_TRAIN, steps=steps_of(name), start_from=start))
            before[alone(*case)] = name
        if runs:
            train(processes, runs)
    return folder


def norms(run: Path) -> dict[int, float]:
    return {event["step"]: event["grad_norm"] for event in events(run, "train")}


@pytest.mark.parametrize(
    ("name", "reference", "loss", "norm"),
    [
        # Sharded matmuls round different partial sums to bf16. After four steps, losses differ by 4e-5 and norms by
        # 2e-3.
        ("bf16", "bf16 alone", 2e-4, 1e-2),
        *((f"compiled {name}", name, 1e-6, 1e-5) for name in COMPILED),
    ],
)
def test_bf16_matches_one_process_and_compiled_meshes_match_uncompiled_ones(runs, name, reference, loss, norm):
    assert losses(runs / name) == pytest.approx(first(losses(runs / reference), SHORT), rel=loss)
    assert norms(runs / name) == pytest.approx(first(norms(runs / reference), SHORT), rel=norm)
    assert validations(runs / name) == pytest.approx(first(validations(runs / reference), SHORT), rel=loss)
    assert not events(runs / name, "export")[0]["problems"]


def validations(run: Path) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events(run, "validation")}


def first(figures: dict[int, float], steps: int) -> dict[int, float]:
    return {step: figure for step, figure in figures.items() if step <= steps}


@pytest.mark.parametrize("name", [*ON_FOUR, *ON_EIGHT])
def test_every_mesh_matches_one_process(runs, name):
    case = {**ON_FOUR, **ON_EIGHT}[name]
    _, model, sizes = case
    expected, found = runs / alone(*case), runs / name
    steps = steps_of(name)
    described = json.loads((found / "strategy.json").read_text())
    assert described["mesh"] == sizes.named() and described["data_parallel_size"] == sizes.batch
    assert described["no_sync"] == (sizes.pp > 1 or sizes.fsdp == 1)
    wanted = first(losses(expected), steps)
    assert losses(found).keys() == wanted.keys()
    assert all(math.isclose(loss, wanted[step], rel_tol=1e-6) for step, loss in losses(found).items())
    assert norms(found) == pytest.approx(first(norms(expected), steps), rel=NORM)
    if sizes.pp > 1:
        stages = STAGE_LAYOUTS[SCHEDULE_OF[name]].stages_per_rank
        assert json.loads((found / "reductions.json").read_text()) == steps * stages
    if model != "dense":
        for figure in ("router_balance_loss", "router_z_loss", "expert_load_max", "expert_entropy_min"):
            of_steps = [[event[figure] for event in events(run, "train")] for run in (expected, found)]
            assert of_steps[1] == pytest.approx(of_steps[0][:steps], rel=1e-6), figure
    validated = validations(found)
    assert max(validated) == steps and validated == pytest.approx(first(validations(expected), steps), rel=1e-6)
    for file in ("model", "optimizer", "average"):
        tensors, given = (load_file(run / MIDDLE / f"{file}.safetensors") for run in (expected, found))
        assert tensors.keys() == given.keys()
        assert all(nearly_equal(given[key], tensor, 2e-5, relative=1e-5) for key, tensor in tensors.items())


def test_replicas_on_four_processes_resume_bit_for_bit(runs):
    """With more than two processes, the summation order affects the last bit."""
    whole, resumed = runs / "copies", runs / "copies resumed"
    end = f"checkpoints/step-{STEPS:08}"
    assert losses(resumed) == {step: loss for step, loss in losses(whole).items() if step > SHORT}
    assert losses(whole) == pytest.approx(losses(runs / alone("adamw", "dense", Sizes())), rel=1e-6)
    for file in ("model", "optimizer", "average"):
        expected, found = (load_file(run / end / f"{file}.safetensors") for run in (whole, resumed))
        assert expected.keys() == found.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", PACKED)
def test_packed_documents_on_a_mesh_match_one_process(runs, name):
    """Losses must match from the start, and after resuming from a single-process checkpoint."""
    expected = losses(runs / packed_alone(*PACKED[name]))
    assert expected != losses(runs / alone(*PACKED[name]))
    found = losses(runs / f"packed {name}") | losses(runs / f"packed {name} resumed")
    assert found == pytest.approx(expected, rel=1e-6) and len(found) == STEPS


@pytest.mark.parametrize("name", CLIPPED)
def test_qk_clip_on_a_mesh_matches_one_process(runs, name):
    both = (runs / clipped_alone(*CLIPPED[name]), runs / f"clipped {name}")
    expected, found = map(losses, both)
    assert len(found) == SHORT and found == pytest.approx(first(expected, SHORT), rel=1e-6)
    expected, found = map(validations, both)
    assert max(found) == SHORT and found == pytest.approx(first(expected, SHORT), rel=1e-6)
    logits = [events(run, "diagnostics")[0]["largest_logit"] for run in both]
    assert [logit is None for logit in logits[0]] == [logit is None for logit in logits[1]] and any(logits[1])
    tensors, given = (load_file(run / MIDDLE / "model.safetensors") for run in both)
    assert all(torch.allclose(given[key], tensor, atol=1e-5) for key, tensor in tensors.items())


@pytest.mark.skipif(not EVERYTHING, reason="STRATEGIES=all")
def test_compiled_qk_clip_in_bf16_matches_one_process(runs):
    expected = first(losses(runs / "clipped bf16 alone"), SHORT)
    assert losses(runs / "clipped bf16 compiled") == pytest.approx(expected, rel=2e-4)


@pytest.mark.skipif(not EVERYTHING, reason="STRATEGIES=all")
def test_hsdp_that_reduces_once_matches_one_process(runs):
    expected, found = runs / alone("adamw", "dense", Sizes()), runs / "reduced once"
    assert json.loads((found / "strategy.json").read_text())["no_sync"]
    assert losses(found) == pytest.approx(first(losses(expected), SHORT), rel=1e-6)
    assert norms(found) == pytest.approx(first(norms(expected), SHORT), rel=NORM)


@pytest.mark.parametrize("name", [*ON_FOUR, *ON_EIGHT])
def test_diagnostics_on_a_mesh_match_one_process(runs, name):
    case = {**ON_FOUR, **ON_EIGHT}[name]
    sizes = case[2]
    expected, *_ = events(runs / alone(*case), "diagnostics")
    found, *_ = events(runs / name, "diagnostics")
    assert found["layers"] == expected["layers"]
    for measure in ("weight_rms", "gradient_rms", "update_rms"):
        # AdamW divides by the root of a mean square, so updates are less accurate if that is close to 0.
        assert found[measure] == pytest.approx(expected[measure], rel=1e-3 if measure == "update_rms" else 1e-5)
    for measure in ("activation_rms", "largest_logit", "units_off"):
        known = [row for row, value in enumerate(expected[measure]) if value is not None]
        assert known == [row for row, value in enumerate(found[measure]) if value is not None]
        if sizes.batch == sizes.pp == 1:  # the last micro-batch is the same
            near = pytest.approx([expected[measure][row] for row in known], rel=1e-5, abs=1e-6)
            assert [found[measure][row] for row in known] == near


@pytest.mark.parametrize("name", RESUMED)
def test_a_mesh_resumes_the_run_of_another(runs, name):
    """The losses must match an uninterrupted run (train_strategies.py compares the loaded tensors bit for bit)."""
    wanted = losses(runs / alone(*{**ON_FOUR, **ON_EIGHT}[name]))
    found = losses(runs / f"{name} resumed")
    assert min(found) == 3 and all(math.isclose(loss, wanted[step], rel_tol=1e-6) for step, loss in found.items())


@pytest.mark.parametrize("name", [*ON_FOUR, *ON_EIGHT])
def test_replicas_are_equal_and_a_changed_one_is_found(runs, name):
    _, _, sizes = {**ON_FOUR, **ON_EIGHT}[name]
    equal, changed = json.loads((runs / name / "replicas.json").read_text())
    assert equal == []
    # Two stages share the tied embedding. In a V schedule, they are on the same rank.
    in_two_stages = sizes.pp > 1 and SCHEDULE_OF[name] != "ZBVZeroBubble"
    assert bool(changed) == (sizes.dp_replicate > 1 or sizes.tp > 1 or in_two_stages)


@pytest.mark.parametrize("name", ["rounded", "rounded in stages"])
def test_bf16_weights_round_as_on_one_process(runs, name):
    """The fraction of weights that equal those of one process must be above 0.6. With different random numbers, it is
    between 0.41 and 0.45.

    The other weights differ because gradients differ in the last digits of bf16.
    """
    wanted = losses(runs / f"{name} alone")
    found = losses(runs / name)
    assert all(math.isclose(loss, wanted[step], rel_tol=1e-3) for step, loss in found.items())
    assert validations(runs / name) == pytest.approx(first(validations(runs / f"{name} alone"), SHORT), rel=1e-3)
    assert not events(runs / name, "export")[0]["problems"]
    expected, given = (load_file(runs / each / MIDDLE / "model.safetensors") for each in (f"{name} alone", name))
    matrices = [key for key in expected if "proj" in key]
    assert all(given[key].dtype == torch.bfloat16 for key in matrices)
    assert all((given[key] == expected[key]).float().mean() > 0.6 for key in matrices)


FP8_CASES = {
    "ep": ("adamw", "moe", Sizes(dp_replicate=2, dp_shard=2, ep=2)),
    "tp": ("adamw", "dense", Sizes(dp_replicate=2, tp=2)),
    "tp dp_shard": ("adamw", "dense", Sizes(dp_shard=2, tp=2)),
    "tp cp": ("adamw", "dense", Sizes(cp=2, tp=2)),
    "tp ep": ("adamw", "moe", Sizes(dp_shard=2, tp=2, ep=2)),
    "tp pp": ("adamw", "dense", Sizes(pp=2, tp=2)),
}


@pytest.mark.skipif(not HAS_FP8, reason="pip install torchao")
def test_fp8_differs_from_one_process_only_by_rounding(trainer):
    """The losses must differ from one process only by rounding: 1e-3 at a loss of 6.2."""
    in_fp8 = {"emulates_fp8": True}
    compiled = {"aot_eager": True, **in_fp8}
    runs = {name: trainer.run(case, f"fp8 {name}", "mesh", *IN_FP8, **in_fp8) for name, case in FP8_CASES.items()}
    for name in ("tp", "tp dp_shard"):
        options = (*IN_FP8, "--compile", "regional")
        runs[f"{name} compiled"] = trainer.run(FP8_CASES[name], f"fp8 {name} compiled", "mesh", *options, **compiled)
    references = {alone(*case): case for case in FP8_CASES.values()}
    trainer.train(1, [trainer.run_alone(case, f"fp8 {name}", *IN_FP8, **in_fp8) for name, case in references.items()])
    trainer.train(4, list(runs.values()))
    for name in runs:
        wanted = losses(trainer.folder / f"fp8 {alone(*FP8_CASES[name.removesuffix(' compiled')])}")
        found = losses(trainer.folder / f"fp8 {name}")
        assert len(found) == SHORT and all(0 < abs(loss - wanted[step]) < 5e-3 for step, loss in found.items()), name
