"""Fake CUDA cases for tests/parallel/test_communication.py: each strategy on one of eight GPUs.

A single process acts as one rank in torch's "fake" process group, which sends nothing. The environment, Accelerator,
model and optimizer are the same as in a real launch. The first step creates buffers and optimizer state. Cases then
count the operations in two micro-steps, an update and a validation batch, none of which may wait for the device. ZeRO
runs on the CPU, because DeepSpeed reads tensor values.
"""

import functools
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from torch._dynamo.backends.debugging import aot_eager
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed._meta_registrations import create_fakework
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import ProcessGroup, _resolve_process_group
from torch.distributed.pipelining.stage import InferenceMode
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from pretrain.config import RunConfig, WindowSpec
from pretrain.mesh_sizes import launched_sizes
from pretrain.model.attention import attention_arguments, document_layout
from pretrain.model.build import InitialWeights, build_meta_model
from pretrain.model.compile import compile_model
from pretrain.model.loss import LanguageModelLoss
from pretrain.model.model_config import load_model_config
from pretrain.optim.optimizers import optimizer_builder
from pretrain.parallel.registry import make_strategy
from pretrain.parallel.strategy import Strategy
from pretrain.recipe import read_run_config
from support.fake_cuda import fake_cuda, refuse_waits, torch_cuda_with
from support.flash_packages import flash_packages
from support.launcher_environment import LAUNCHER_VARIABLES, launcher_environment
from support.steps_on_fake_cuda import compiled_by, four_steps

ROOT = Path(__file__).parents[2]
RANKS, SEQUENCES, LENGTH = 8, 8, 256
DOCUMENT_TOKENS = 97
"""Length of each document."""
MODEL = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
}
MIXTURE = {
    **MODEL,
    "model_type": "qwen3_moe",
    "head_dim": 64,
    "moe_intermediate_size": 256,
    "num_experts": 16,
    "num_experts_per_tok": 2,
}
MODELS = {"llama": MODEL, "qwen3_moe": MIXTURE}
HIDDEN_STATES = (SEQUENCES, LENGTH, MODEL["hidden_size"])

RNG_STATE = torch.zeros(16, dtype=torch.uint8)

C10D = torch.library.Library("c10d", "IMPL")
"""Library object, which must stay alive to keep the function below registered."""
C10D.impl("allreduce_coalesced_", lambda *args: create_fakework(args, return_first_arg=False), "Meta")


@dataclass(frozen=True)
class Launch:
    """A strategy on eight GPUs, and the rank to run."""

    file: str
    """Name of a file in accelerate_configs/."""
    rank: int = 0
    environment: tuple[tuple[str, str], ...] = ()
    """Variables that launcher options would set."""
    layers: int = MODEL["num_hidden_layers"]
    model: str = "llama"
    may_wait: bool = False
    saves: bool = False
    settings: tuple[tuple[str, str], ...] = ()
    """Additional recipe settings."""
    attention: str = "groundwork_sdpa"
    ranks: int = RANKS
    """Number of ranks. A single rank runs without a launcher and without process groups."""
    sequences: int = SEQUENCES
    length: int = LENGTH

    @property
    def on_host(self) -> bool:
        return self.file.startswith("zero")


KINDS = {
    "broadcast": "broadcast",
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "allgather": "all-gather",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "all_to_all": "all-to-all",
    "send": "send",
    "recv": "receive",
}


@dataclass
class Seen:
    """Operation counts for one phase of a step."""

    collectives: dict[str, list[int]] = field(default_factory=dict)
    """{'<kind> of <group size>': [number of calls, bytes of the full tensors]}."""
    waits: int = 0
    """Waits for the number of rows per expert."""
    unawaited_copies: int = 0
    """Non-blocking copies from the device to the host."""
    sent_from_host: int = 0
    """Collectives with CPU tensors, which NCCL doesn't support."""
    casts_to_fp32: int = 0
    """Casts of hidden states to fp32."""
    head_dtypes: list[str] = field(default_factory=list)
    """Compute dtype of each output head matmul."""
    peak_bytes: int = 0
    """Peak bytes on the device; see products_on_fake_cuda.py."""


class Counter(TorchDispatchMode):
    current: "Counter | None" = None

    def __init__(self):
        super().__init__()
        self.seen = Seen()

    def __enter__(self):
        Counter.current = self
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # torch calls this again with its collectives
        kwargs = kwargs or {}
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func._opname:
            self.count(func, [*args, *kwargs.values()])
        elif func is torch.ops.aten._to_copy.default:
            to, dtype = kwargs.get("device") or args[0].device, kwargs.get("dtype")
            self.seen.unawaited_copies += args[0].is_cuda and to.type == "cpu" and kwargs.get("non_blocking", False)
            self.seen.casts_to_fp32 += dtype == torch.float32 and args[0].shape[2:] == HIDDEN_STATES[2:]
        elif func is torch.ops.groundwork.chunked_loss.default:
            names = [argument.name for argument in func._schema.arguments]
            self.seen.head_dtypes.append(str(args[names.index("dtype")]))
        return func(*args, **kwargs)

    def name(self, kind: str, group: ProcessGroup) -> str:
        return f"{kind} of {group.size()}"

    def count(self, func, arguments: list) -> None:
        name = func._opname.strip("_")
        kind = next((kind for start, kind in KINDS.items() if name.startswith(start)), name)
        group = next(group for argument in arguments if (group := group_of(argument)))
        ranks = group.size()
        # The largest argument is the full tensor, except in functional all-gathers, which only get the shard.
        size = max(map(bytes_of, arguments))
        self.seen.sent_from_host += any(map(is_on_host, arguments))
        if func.namespace == "_c10d_functional" and kind == "all-gather":
            size *= ranks
        times_and_bytes = self.seen.collectives.setdefault(self.name(kind, group), [0, 0])
        times_and_bytes[0] += 1
        times_and_bytes[1] += size


def group_of(argument: object) -> ProcessGroup | None:
    """Returns the process group that an operator's argument refers to, or None."""
    if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
        return ProcessGroup.unbox(argument)
    if isinstance(argument, str) and argument not in ("sum", "avg"):
        return _resolve_process_group(argument)
    return None


def bytes_of(argument: object) -> int:
    if isinstance(argument, torch.Tensor):
        return argument.numel() * argument.element_size()
    return sum(map(bytes_of, argument)) if isinstance(argument, list | tuple) else 0


def is_on_host(argument: object) -> bool:
    if isinstance(argument, torch.Tensor):
        return argument.device.type == "cpu"
    return any(map(is_on_host, argument)) if isinstance(argument, list | tuple) else False


class NoWeights(InitialWeights):
    """Initial weights that are zeros on the host."""

    def fill(self, causal_lm: torch.nn.Module, unit: str) -> None:
        for module in causal_lm.get_submodule(unit).modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.is_meta:
                    module._parameters[name] = torch.nn.Parameter(torch.zeros(parameter.shape))
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype)


def apply_in_place(module: torch.nn.Module, function, recurse: bool = True) -> torch.nn.Module:
    """Replaces `Module._apply`, which would create new parameters when it moves fake tensors to another device."""
    for child in module.children():
        apply_in_place(child, function)
    for parameter in module._parameters.values():
        if parameter is not None:
            set_data(parameter, function(parameter.detach()))
    for name, buffer in module._buffers.items():
        module._buffers[name] = None if buffer is None else function(buffer)
    return module


def set_data(tensor: torch.Tensor, moved: torch.Tensor) -> None:
    tensor.data = moved
    if isinstance(tensor, FakeTensor):
        tensor.fake_device = moved.fake_device


def move_states(parameters: list[torch.Tensor], buffers: list[torch.Tensor], device: torch.device) -> None:
    """Replaces fully_shard's function that moves parameters and buffers to the device."""
    for tensor in [*parameters, *buffers]:
        set_data(tensor, tensor.detach().to(device))


def real_mesh(*arguments, **settings):
    """Creates a mesh with real tensors, because torch reads its ranks."""
    with unset_fake_temporarily():
        return init_device_mesh(*arguments, **settings)


init_mesh = DeviceMesh.__init__


def init_real_mesh(mesh: DeviceMesh, *arguments, **settings) -> None:
    """Initializes a mesh with real tensors, as needed when FSDP2 combines its mesh with the TP mesh."""
    with unset_fake_temporarily():
        init_mesh(mesh, *arguments, **settings)


def agree_on_shapes(schedule, stages: list, *_) -> None:
    """Makes all pipeline stages use static shapes, instead of letting them vote."""
    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC


def flex_attention(query, key, value, *, block_mask, **_):
    """Checks the shapes and returns an output that depends on query, key and value."""
    assert block_mask.shape[-2:] == (query.shape[2], key.shape[2]) == (LENGTH, LENGTH)
    # Not an attention of torch, because its CUDA builds ask for the GPU's properties to choose a kernel.
    return query * key + value, SimpleNamespace(lse=query.new_empty(query.shape[:3]))


def even_rows(counts: FakeTensor) -> list[list[int]]:
    """Replaces `tolist` for the number of rows sent and received per process, (2, processes). All counts are equal."""
    if Counter.current is not None:
        Counter.current.seen.waits += 1
    sizes = launched_sizes()
    rows = even_rows.tokens * even_rows.choices // (sizes.cp * sizes.tp)
    return [[rows // counts.shape[1]] * counts.shape[1]] * 2


even_rows.tokens = SEQUENCES * LENGTH
even_rows.choices = MIXTURE["num_experts_per_tok"]


def final_limits(config: object, **_) -> tuple[list[int], list[int]]:
    """Returns the bucket sizes that DDP uses after the first step."""
    return [config.first_bucket_bytes_cap, config.bucket_bytes_cap], []


class FixedBuckets:
    """Wrapper for DDP's reducer that never rebuilds buckets, because rebuilding reads tensor values."""

    def __init__(self, reducer):
        self._reducer = reducer

    def __getattr__(self, name: str):
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


def all_reduce_bucket(_, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduces a DDP bucket and returns a future with the result, which the fake group doesn't provide."""
    dist.all_reduce(bucket.buffer())
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def forget_meshes() -> None:
    """Clears torch's DTensor caches, which may refer to destroyed groups from earlier launches."""
    torch._C._clear_DTensor_sharding_propagator_cache()
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()


def environment_of(launch: Launch) -> dict[str, str]:
    environment = launcher_environment(ROOT / f"accelerate_configs/{launch.file}.yaml", launch.ranks)
    environment |= {"WORLD_SIZE": str(launch.ranks), "LOCAL_WORLD_SIZE": str(RANKS), "RANK": str(launch.rank)}
    return environment | {
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        **dict(launch.environment),
    }


@contextmanager
def as_rank_of(launch: Launch) -> Iterator[None]:
    """Sets this rank's environment and creates its process group."""
    is_alone = launch.ranks == 1
    environment = {} if is_alone else environment_of(launch)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}
    new_group = dist.new_group
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {**kept, **environment}, clear=True))
        fake_group = mock.patch.object(
            dist, "new_group", lambda *a, **more: new_group(*a, **more | {"backend": "fake"})
        )
        stack.enter_context(fake_group)
        AcceleratorState._reset_state(reset_partial_state=True)
        if not dist.is_initialized() and not is_alone:  # DeepSpeed keeps its groups
            dist.init_process_group("fake", store=FakeStore(), rank=launch.rank, world_size=launch.ranks)
            forget_meshes()
        if not launch.on_host and not is_alone:
            stack.callback(dist.destroy_process_group)
        yield


@contextmanager
def fake_devices() -> Iterator[FakeTensorMode]:
    """Enables fake CUDA and patches functions that don't work with fake tensors."""
    patches = (
        mock.patch("pretrain.parallel.mesh.init_device_mesh", real_mesh),
        mock.patch.object(DeviceMesh, "__init__", init_real_mesh),
        mock.patch.object(torch.nn.Module, "_apply", apply_in_place),
        mock.patch.object(FakeTensor, "tolist", even_rows),
        mock.patch("torch.distributed.fsdp._fully_shard._fsdp_init._move_states_to_device", move_states),
        mock.patch.multiple(torch.cuda, get_rng_state=lambda *_: RNG_STATE, set_rng_state=mock.Mock()),
        mock.patch("torch.nn.parallel.distributed._BucketCapacityConfig.compute_bucket_size_limits", final_limits),
        # These access tensor memory directly.
        mock.patch("torch.nn.parallel.distributed._verify_param_shape_across_processes"),
        mock.patch("torch.nn.parallel.distributed._sync_module_states"),
        mock.patch("torch.distributed.pipelining.schedules._PipelineSchedule._warmup_p2p", agree_on_shapes),
        mock.patch("transformers.integrations.flex_attention.compile_friendly_flex_attention", flex_attention),
        flash_packages(),
    )
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        fake = stack.enter_context(fake_cuda(RANKS, may_wait=True))
        all_pinned = {"pin_memory": lambda tensor: tensor, "is_pinned": lambda tensor: tensor.device.type == "cpu"}
        stack.enter_context(mock.patch.multiple(torch.Tensor, **all_pinned))
        yield fake


def read_config(folder: Path, launch: Launch) -> RunConfig:
    model = MODELS[launch.model]
    (folder / "model.json").write_text(json.dumps({**model, "num_hidden_layers": launch.layers}))
    recipe = {
        "model": str(folder / "model.json"),
        "output": str(folder / "run"),
        "precision": "bf16",
        "data": {"train": [{"shards": str(folder)}], "sequence_length": launch.length},
        "budget": {"steps": 9},
        "batch": {
            "tokens_per_step": 2 * launch.ranks * launch.sequences * launch.length,
            "sequences_per_micro_batch": launch.sequences,
        },
        "optim": {"learning_rate": 0.001, "max_grad_norm": 1.0},
        "pipeline": {"schedule": "1F1B"},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return read_run_config(folder / "recipe.yaml", list(launch.settings))


@dataclass(frozen=True)
class Prepared:
    """A strategy, its model and a batch."""

    strategy: Strategy
    model: torch.nn.Module
    causal_lm: torch.nn.Module
    batch: dict[str, Any]


def prepared(launch: Launch, stack: ExitStack) -> Prepared:
    """Builds a launch's model as train.py does. Fake CUDA and the process group stay active until the stack closes."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    config = read_config(folder, launch)
    stack.enter_context(as_rank_of(launch))
    stack.enter_context(nullcontext() if launch.on_host else torch_cuda_with(RANKS))
    strategy = make_strategy(config)
    causal_lm = build_meta_model(load_model_config(config.model.config), attention=launch.attention)
    model = LanguageModelLoss(causal_lm, from_hidden_states=True)
    build_optimizer = optimizer_builder(
        config.optim, causal_lm, 0.001, seed=0, device_type="cpu" if launch.on_host else "cuda"
    )
    fake = stack.enter_context(nullcontext() if launch.on_host else fake_devices())
    # Ordering buckets reads values.
    stack.enter_context(mock.patch("pretrain.parallel.strategy.order_buckets"))
    model = strategy.prepare(model, NoWeights(seed=0), build_optimizer)
    if isinstance(model, DistributedDataParallel):
        model.register_comm_hook(None, all_reduce_bucket)
        model.reducer, model.logger = FixedBuckets(model.reducer), mock.Mock()
    rows = launch.sequences * strategy.micro_batches_per_call
    length = launch.length
    even_rows.tokens = launch.sequences * launch.length
    even_rows.choices = MODELS[launch.model].get("num_experts_per_tok", 1)
    ids = torch.zeros(rows, length, dtype=torch.long, device=strategy.device)
    with unset_fake_temporarily():
        layout = document_layout(np.arange(rows * length).reshape(rows, length) % DOCUMENT_TOKENS, 0)
    layout = {name: fake.from_tensor(values) if fake else values for name, values in layout.items()}
    batch = {"input_ids_BT": ids, "targets_BT": ids}
    batch |= attention_arguments(layout, launch.attention, strategy.device)
    return Prepared(strategy, model, causal_lm, batch)


def count(launch: Launch, counter: type[Counter] = Counter) -> dict[str, dict]:
    """Returns {phase: its `Seen` as a dict} for the second step and the second validation batch."""
    with ExitStack() as stack:
        run = prepared(launch, stack)
        strategy = run.strategy
        model = run.model
        batch = run.batch
        # One micro-step is enough, except for ZeRO-3, which records the order of its gathers in two.
        take_step(strategy, model, batch, ("only",) if not launch.on_host else ("first", "last"))
        with nullcontext() if launch.may_wait or launch.on_host else refuse_waits():
            counters = take_step(strategy, model, batch, ("micro-step", "last micro-step"), counter)
            model.eval()
            for _ in range(2):  # the second batch could reuse results of the first
                with counter() as counters["validation"], torch.no_grad():
                    model(**batch)
        if launch.saves:
            with Counter() as counters["save"]:
                tensors = strategy.model_tensors()
                assert all(tensors.whole(name).is_cuda for name in tensors.shapes)
        return {moment: asdict(counter.seen) for moment, counter in counters.items()}


class Order(TorchDispatchMode):
    """Collectives and matmuls in call order, as (gather, reduce or product, stream)."""

    def __init__(self):
        super().__init__()
        self.issued: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented
        name = func._opname.strip("_")
        kinds = {"gather": name.startswith("allgather"), "reduce": name.startswith(("reduce_scatter", "allreduce"))}
        kinds["product"] = func.namespace == "aten" and name in ("mm", "addmm")
        for kind, is_it in kinds.items():
            if is_it:
                self.issued.append((kind, torch.cuda.current_stream().name))
        return func(*args, **(kwargs or {}))


def order(launch: Launch) -> dict[str, list[tuple[str, str]]]:
    """Returns the `Order` for a micro-step's forward and backward pass."""
    with ExitStack() as stack:
        run = prepared(launch, stack)
        take_step(run.strategy, run.model, run.batch, ("only",))
        run.model.train()
        with run.strategy.accumulate(is_last=True):
            with Order() as forward:
                loss, _ = run.model(**run.batch)
            with Order() as backward:
                run.strategy.backward(loss)
        return {"forward": forward.issued, "backward": backward.issued}


def train_four_steps(launch: Launch) -> None:
    """Runs `steps_on_fake_cuda.four_steps` with compiled layers."""
    compiles = functools.partial(torch.compile, backend=aot_eager)
    with ExitStack() as stack:
        run = prepared(launch, stack)
        stack.enter_context(compiled_by(compiles))
        compile_model(run.model, run.causal_lm, "regional")
        four_steps(run.strategy, run.model, WindowSpec(launch.length, True), launch.attention)


def take_step(
    strategy: Strategy,
    model: torch.nn.Module,
    batch: dict,
    micro_steps: tuple[str, ...],
    counter: Callable[[], Any] = nullcontext,
) -> dict[str, Any]:
    """Runs micro-steps and an update, as in train.py. Returns {phase: its counter}."""
    counters = {moment: counter() for moment in (*micro_steps, "update")}
    model.train()
    strategy.begin_step(0.001, micro_steps=len(micro_steps))
    for moment in micro_steps:
        with counters[moment], strategy.accumulate(is_last=moment == micro_steps[-1]):
            loss, _ = model(**batch)
            strategy.backward(loss / len(micro_steps))
    with counters["update"]:
        grad_norm, skipped = strategy.update(1.0)
    assert grad_norm.device == skipped.device == strategy.device
    return counters


FEW_TOKENS = {"sequences": 1, "length": 32}
"""Micro-batch size for ZeRO, which computes real values. Its traffic doesn't depend on the micro-batch size."""
LAUNCHES = {
    "ddp": Launch("ddp"),
    "fsdp2": Launch("fsdp2"),
    "fsdp2, no_sync": Launch("fsdp2", settings=(("batch.no_sync", "true"),)),
    "fsdp2, offloaded": Launch("fsdp2", environment=(("FSDP_OFFLOAD_PARAMS", "true"),), may_wait=True),
    "hsdp, 2 x 4": Launch("hsdp"),
    "tp": Launch("tp"),
    "tp, 2 x 4": Launch("tp", rank=7, environment=(("PARALLELISM_CONFIG_TP_SIZE", "4"),)),
    "fsdp_tp, 4 x 2": Launch("fsdp_tp", rank=7),
    "pp, an inner stage": Launch("pp", rank=3, layers=8),
    "pp, 2 x 4, the last stage": Launch("pp", rank=7, environment=(("PARALLELISM_CONFIG_PP_SIZE", "4"),), layers=4),
    "cp": Launch("cp"),
    "cp, 2 x 4": Launch("cp", rank=7, environment=(("PARALLELISM_CONFIG_CP_SIZE", "4"),)),
    "ep": Launch("ep", model="qwen3_moe"),
    "ep, 2 x 4": Launch("ep", rank=7, environment=(("PARALLELISM_CONFIG_EP_SIZE", "4"),), model="qwen3_moe"),
    "zero1": Launch("zero1", **FEW_TOKENS),
    "zero2": Launch("zero2", **FEW_TOKENS),
    "zero3": Launch("zero3", **FEW_TOKENS),
    "zero3, fp32, no_sync": Launch("zero3", settings=(("precision", "fp32"), ("batch.no_sync", "true")), **FEW_TOKENS),
}
ATTENTIONS = {
    f"cp, {attention}": Launch("cp", attention=attention)
    for attention in ("groundwork_eager", "flex_attention", "groundwork_fa2", "groundwork_fa3")
}
"""Other attention implementations for sharded sequences."""
IN_HOST_MEMORY = (("FSDP_OFFLOAD_PARAMS", "true"),)
OFFLOADED = {
    "fsdp_tp, offloaded": Launch("fsdp_tp", rank=7, environment=IN_HOST_MEMORY, may_wait=True, saves=True),
    "pp, 2 x 4, offloaded": Launch(
        "pp", environment=(*IN_HOST_MEMORY, ("PARALLELISM_CONFIG_PP_SIZE", "4")), layers=4, may_wait=True
    ),
    "ep, 2 x 4, offloaded": Launch(
        "ep",
        rank=7,
        environment=(*IN_HOST_MEMORY, ("PARALLELISM_CONFIG_EP_SIZE", "4")),
        model="qwen3_moe",
        may_wait=True,
    ),
}
"""Launches with parameters in CPU memory and a dimension that sums gradients on GPUs."""
MUON = {
    f"{strategy}, muon": Launch(strategy, model=model, settings=(("optim.name", "muon"),))
    for strategy, model in (("fsdp2", "llama"), ("tp", "llama"), ("cp", "llama"), ("ep", "qwen3_moe"))
}
OVERLAPPED = {name: Launch(name, layers=6) for name in ("ddp", "fsdp2", "hsdp")}
"""Launches whose operation order is recorded."""
COUNTED = {**LAUNCHES, **ATTENTIONS, **OFFLOADED, **MUON}
CASES = {name: functools.partial(count, launch) for name, launch in COUNTED.items()}
COMPILED = ("ddp", "fsdp2", "tp", "cp")
"""Launches that train four steps with compiled layers and with the work between steps."""
CASES |= {f"four steps: {name}": functools.partial(train_four_steps, LAUNCHES[name]) for name in COMPILED}
CASES |= {f"order: {name}": functools.partial(order, launch) for name, launch in OVERLAPPED.items()}
