"""Fake CUDA cases for tests/test_gpu_kernels.py: kernels that torch.compile generates for GPUs.

Inductor generates Triton code as on a GPU, and Triton compiles it for each architecture with its bundled assembler.
Each case returns every kernel's name, number of loops, and machine code size per architecture.
"""

import contextlib
import copy
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch._inductor.config
import triton
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.codecache import PyCodeCache
from torch._inductor.compile_fx import view_to_reshape
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes import joint_graph
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._inductor.scheduler import Scheduler
from torch._inductor.virtualized import V
from torch.utils._triton import has_triton
from transformers import AutoConfig
from triton.backends.compiler import GPUTarget

import pretrain.model.loss
from pretrain.model.attention import HostBatch
from pretrain.model.build import build_meta_model
from pretrain.model.compile import compile_model
from pretrain.model.loss import LanguageModelLoss
from support.fake_cuda import fake_cuda
from support.steps_on_fake_cuda import FakeWeights, host_arrays, replacements
from support.tiny_models import TINY_LLAMA

ARCHITECTURES = (80, 90, 100)
"""Compute capabilities of A100, H100 and B200."""


class Driver:
    """Triton driver for one H100."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_active_torch_device(self):
        return torch.device("cuda", 0)


def lowered(compiled: Callable[[str, torch.fx.GraphModule, GraphLowering], Callable | None]) -> Callable:
    """Returns a torch.compile backend that lowers graphs for CUDA, but runs them without their kernels.

    compiled: called with 'forward' or 'backward', each partitioned graph, and its lowered version, for `schedule` or
        `codegen`. May return a function to run instead of the graph.
    """

    def write_kernels(direction, graph_module, inputs):
        graph = copy.deepcopy(graph_module)
        with V.set_debug_handler(DebugContext()), V.set_fake_mode(torch._guards.detect_fake_mode(inputs)):
            view_to_reshape(graph)
            post_grad_passes(graph, True)
            lowering = GraphLowering(graph, example_inputs=list(inputs))
            with V.set_graph_handler(lowering):
                lowering.run(*inputs)
                run = compiled(direction, graph_module, lowering)
        return make_boxed_func(run or graph_module.forward)

    return aot_autograd(
        fw_compiler=functools.partial(write_kernels, "forward"),
        bw_compiler=functools.partial(write_kernels, "backward"),
        partition_fn=functools.partial(min_cut_rematerialization_partition, compiler="inductor"),
        decompositions=select_decomp_table(),
    )


@contextlib.contextmanager
def inductor(backend: Callable) -> Iterator[None]:
    """Makes torch.compile use a backend from `lowered`."""
    compile_with = torch.compile
    joint_graph.lazy_init(*[None] * len(inspect.signature(inspect.unwrap(joint_graph.lazy_init)).parameters))
    triton.runtime.driver.set_active(Driver())
    has_triton.cache_clear()  # torchao calls it when it's imported, without a GPU
    state = torch.zeros(16, dtype=torch.uint8)
    with contextlib.ExitStack() as stack:
        for name, value in {
            "torch.compile": lambda function, **settings: compile_with(function, backend=backend, **settings),
            "torch.version.cuda": "13.0",
            "torch.cuda.get_rng_state": lambda *_: state,
            "torch.cuda.set_rng_state": lambda *_: None,
        }.items():
            stack.enter_context(mock.patch(name, value))
        properties = mock.patch(
            "torch.cuda._get_device_properties", lambda _: torch.cuda.get_device_properties(), create=True
        )
        stack.enter_context(properties)
        stack.enter_context(torch._inductor.config.patch(compile_threads=1))
        torch._dynamo.reset()
        yield


def schedule(lowering: GraphLowering) -> Scheduler:
    """Fuses a graph's operations into kernels, without writing their code."""
    lowering.init_wrapper_code()
    lowering._update_scheduler()
    return lowering.scheduler


def kernels(sources: list[str]) -> list[tuple[str, str]]:
    """Returns (name, Triton code) for all kernels, without duplicates."""
    found = (
        pair for code in sources for pair in re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", code, re.S)
    )
    return list(dict.fromkeys(found))


def assembled(name: str, source: str, architecture: int) -> int:
    """Returns the size of a kernel's machine code in bytes."""
    assert "cc=90" in source
    plain_launcher = torch._inductor.config.patch(use_static_cuda_launcher=False)  # keeps machine code
    with plain_launcher, mock.patch.object(triton_helpers, "set_driver_to_gpu", lambda: None):
        kernel = getattr(PyCodeCache.load(source.replace("cc=90", f"cc={architecture}")), name)
        compiled = kernel._precompile_config(kernel.configs[0]).kernel
    assert compiled.metadata.target.arch == architecture
    return len(compiled.asm["cubin"])


def of_run(run: Callable[[], None]) -> list[dict[str, object]]:
    sources: list[str] = []

    def write_code(_direction: str, _graph: torch.fx.GraphModule, lowering: GraphLowering) -> None:
        code, _ = lowering.codegen()
        sources.append(code.value)

    with inductor(lowered(write_code)):
        run()
    # Most pointwise kernels (triton_poi) are the same on all architectures, so one is enough.
    return [
        {
            "kernel": name,
            "loops": len(re.findall(r"\n +for \w+ in tl.range", source)),
            "bytes": {
                architecture: assembled(name, source, architecture)
                for architecture in ARCHITECTURES
                if architecture == 90 or not name.startswith("triton_poi") or "searchsorted" in name
            },
        }
        for name, source in kernels(sources)
    ]


def softmax_of_the_loss(cap: float | None = None) -> None:
    pretrain.model.loss._compiled_softmax_less_target_.cache_clear()
    softmax_less_target_ = pretrain.model.loss._compiled_softmax_less_target_(cap)
    pretrain.model.loss._compiled_softmax_less_target_.cache_clear()
    with fake_cuda(may_wait=True):
        logits = torch.empty(2624, 50304, device="cuda", dtype=torch.bfloat16)
        softmax_less_target_(logits, torch.empty(2624, 1, device="cuda", dtype=torch.int64), 1e-4)


def layers(dtype: torch.dtype) -> Callable[[], None]:
    """Returns a case that runs a model's forward and backward pass with `compile: regional`."""

    def run():
        causal_lm = build_meta_model(AutoConfig.for_model(**TINY_LLAMA), attention="groundwork_sdpa")
        ids, layout = host_arrays(document_mask=True)
        with replacements(), fake_cuda(may_wait=True) as fake:
            FakeWeights(dtype=torch.float32).fill(causal_lm, "")
            causal_lm.tie_weights()
            model = LanguageModelLoss(causal_lm, from_hidden_states=True).train()
            compile_model(model, causal_lm, "regional")
            host_batch = HostBatch(
                fake.from_tensor(torch.from_numpy(ids)),
                {name: fake.from_tensor(tensor) for name, tensor in layout.items()},
            )
            with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
                loss, _ = model(**host_batch.on_device(torch.device("cuda"), "groundwork_sdpa"))
            loss.backward()

    return run


RUNS = {
    "softmax of the loss": softmax_of_the_loss,
    "softmax of capped logits": functools.partial(softmax_of_the_loss, 15.0),
    "layer in bf16": layers(torch.bfloat16),
    "layer in fp32": layers(torch.float32),
}
CASES = {name: functools.partial(of_run, run) for name, run in RUNS.items()}
