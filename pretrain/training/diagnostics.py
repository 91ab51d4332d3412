"""Records per-layer statistics of the model at regular intervals.

For each layer, the embedding and the head, the statistics are the root mean square (RMS) of the outputs, weights,
gradients before clipping and weight updates, the largest attention logit before the softmax, and the fraction of dead
feed-forward units.

Activations, logits and units come from a second forward pass of the step's last micro-batch, after the update. It runs
in eager mode without gradients, because hooks in compiled layers would also affect all other steps.
"""

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pretrain.model.compile import layers_of
from pretrain.model.largest_logits import largest_logits
from pretrain.optim.optimizers import local_tensor
from pretrain.parallel.context_parallel import EXCHANGING
from pretrain.parallel.strategy import Strategy

OFF = 0.01
"""A unit counts as dead if its maximum magnitude is below this fraction of the RMS of all units in its layer."""
MEASURES = ("activation_rms", "weight_rms", "gradient_rms", "update_rms", "largest_logit", "units_off")


class Diagnostics:
    """Per-layer statistics of the model in training. Records nothing unless `is_due`."""

    def __init__(self, strategy: Strategy):
        self.strategy = strategy
        self.is_due = False
        """True if the current step is recorded."""
        causal_lm = strategy.causal_lm
        name_of = {module: name for name, module in causal_lm.named_modules(remove_duplicate=False)}
        self.layers = layers_of(causal_lm)
        prefixes = [f"{name_of[layer]}." for layer in self.layers]
        shapes = {name: shape for name, shape in strategy.model_tensors().shapes.items() if len(shape) > 1}
        places = {name: next((p for p in prefixes if name.startswith(p)), name) for name in shapes}
        rows = {place: row for row, place in enumerate(dict.fromkeys(places.values()))}
        self.names = [place.removesuffix(".weight").removesuffix(".") for place in rows]
        """Row names, in model order: embedding, layers, and the head unless it is tied."""
        self.row_of = {name: rows[place] for name, place in places.items()}
        """{matrix name: row}. Excludes norms and biases."""
        self.rows_of_layers = [rows[prefix] for prefix in prefixes]
        self.elements = [0] * len(rows)
        for name, row in self.row_of.items():
            self.elements[row] += math.prod(shapes[name])
        self._squares: dict[str, Tensor] = {}
        """{metric: (rows,) sums of squares over this rank's parameters}."""
        self._before: dict[str, Tensor] = {}
        """{matrix name: this rank's weights before the update}, on the CPU."""

    def attach(self) -> None:
        """Registers the hooks that run before and after each update."""
        self.strategy.before_update += (self.before_update,)
        self.strategy.after_update += (self.after_update,)

    @torch.no_grad()
    def before_update(self) -> None:
        """Records weights and gradients, and copies the weights for `after_update`."""
        if not self.is_due:
            return
        for measure in ("weight_rms", "gradient_rms", "update_rms"):
            self._squares[measure] = torch.zeros(len(self.names), dtype=torch.float64)
        for parameter, name in self.strategy.name_of.items():
            if name in self.row_of:
                self._add("weight_rms", parameter, local_tensor(parameter))
                if parameter.requires_grad:  # not of a weight that the model freezes
                    self._add("gradient_rms", parameter, local_tensor(parameter.grad))
                self._before[name] = local_tensor(parameter).detach().to("cpu", copy=True)

    @torch.no_grad()
    def after_update(self, skipped: Tensor) -> None:
        """Records how much the update changed the weights."""
        for parameter, name in self.strategy.name_of.items():
            if (before := self._before.pop(name, None)) is not None:
                weight = local_tensor(parameter)
                self._add("update_rms", parameter, weight - before.to(weight.device))

    def _add(self, measure: str, parameter: nn.Parameter, part: Tensor) -> None:
        square = torch.linalg.vector_norm(part, dtype=torch.float32).double().square().cpu()
        row = self.row_of[self.strategy.name_of[parameter]]
        self._squares[measure][row] += square * self.strategy.share_of(parameter)

    def measure(self, model: nn.Module, batch: dict[str, Any]) -> dict[str, list]:
        """Runs another forward pass. Returns the row names as `layers`, and a list of values for each of MEASURES.

        Values that don't exist for a row, strategy or architecture are None. A collective call.
        """
        watched = Watched(self.layers, self.strategy)
        model.eval()
        try:
            with torch.no_grad(), torch.compiler.set_stance("force_eager"), watched.attached():
                model(**batch)
        finally:
            model.train()
        found: dict[str, list] = {"layers": self.names}
        of_layers = watched.figures()
        for measure in MEASURES:
            values: list[float | None] = [None] * len(self.names)
            if measure in of_layers:
                for row, value in zip(self.rows_of_layers, of_layers[measure], strict=True):
                    values[row] = value
            elif measure in self._squares:
                total = self._squares[measure].to(self.strategy.device, torch.float32)
                if self.strategy.ranks.count > 1:
                    dist.all_reduce(total)
                squares = total.tolist()
                values = [math.sqrt(square / count) for square, count in zip(squares, self.elements, strict=True)]
            found[measure] = values
        self._squares.clear()
        return found


class Watched:
    """Recorder for a forward pass, with one value per layer; 0 for layers on other ranks."""

    def __init__(self, layers: list[nn.Module], strategy: Strategy):
        self.layers = layers
        self.strategy = strategy
        self.layer_of = {module: number for number, layer in enumerate(layers) for module in layer.modules()}
        self.sums = torch.zeros(5, len(layers), device=strategy.device)
        self.squares, self.elements, self.units, self.unit_squares, self.holders = self.sums
        """Views of `sums`. holders: number of ranks that hold the layer."""
        self.logits = torch.full_like(self.squares, -torch.inf)
        self.magnitudes: dict[int, list[Tensor]] = {}
        """{layer: one (units + 1,) tensor per call}: maximum magnitude per unit, then the mean square of all units."""

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Attaches the hooks within the context."""
        with ExitStack() as stack:
            for layer in self.layers:
                stack.enter_context(layer.register_forward_hook(self.record_output))
                for matrix in last_matrices(layer):
                    stack.enter_context(matrix.register_forward_pre_hook(self.record_units))
            stack.enter_context(self.attention())
            yield

    def record_output(self, layer: nn.Module, inputs: tuple, output: Any) -> None:
        number = self.layer_of[layer]
        hidden = output[0] if isinstance(output, tuple) else output
        self.squares[number] += hidden.float().square().sum()
        self.elements[number] += hidden.numel()

    def record_units(self, matrix: nn.Module, inputs: tuple) -> None:
        units_NF = inputs[0].detach().float().flatten(0, -2)
        magnitudes = torch.cat([units_NF.abs().amax(0), units_NF.square().mean()[None]])
        self.magnitudes.setdefault(self.layer_of[matrix], []).append(magnitudes)

    @contextmanager
    def attention(self) -> Iterator[None]:
        """Replaces the attention function with one that also records the largest logit."""
        config = self.strategy.causal_lm.config
        name = config._attn_implementation  # private, but there is no public attribute
        if name not in ALL_ATTENTION_FUNCTIONS.valid_keys():
            yield
            return
        before = ALL_ATTENTION_FUNCTIONS[name]
        if name == EXCHANGING:  # wraps another attention function
            watching = functools.partial(before.func, self.watching(before.args[0]), *before.args[1:])
        else:
            watching = self.watching(before)
        AttentionInterface.register(name, watching)
        try:
            yield
        finally:
            AttentionInterface.register(name, before)

    def watching(self, attend: Callable) -> Callable:
        def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **arguments):
            if (number := self.layer_of.get(module)) is not None:
                largest = largest_logits(query, key, mask, **arguments).max()
                self.logits[number] = torch.maximum(self.logits[number], largest)
            return attend(module, query, key, value, mask, **arguments)

        return attention

    def figures(self) -> dict[str, list[float | None]]:
        """Returns {metric: values per layer}, reduced over all ranks. Waits for the device. A collective call."""
        calls = {number: torch.stack(calls) for number, calls in self.magnitudes.items()}
        for number, of_calls in calls.items():
            self.units[number] = of_calls.shape[1] - 1
            self.unit_squares[number] = of_calls[:, -1].mean()
            self.holders[number] = 1
        squares, elements, units, unit_squares, holders = self.strategy.sum(self.sums, by_layer=True)
        units, unit_squares = units / holders.clamp(min=1), unit_squares / holders.clamp(min=1)
        # A unit is off only if it is off on every rank, because each rank has other tokens.
        used = torch.zeros(len(self.layers), max(1, int(units.max())), device=units.device)
        for number, of_calls in calls.items():
            largest = of_calls[:, :-1].amax(0)
            used[number, : len(largest)] = largest >= OFF * unit_squares[number].sqrt()
        off = units - (self.strategy.sum(used, by_layer=True) > 0).sum(1)
        if self.strategy.ranks.count > 1:
            dist.all_reduce(self.logits, op=dist.ReduceOp.MAX)
        logits = self.logits.tolist()
        return {
            "activation_rms": [math.sqrt(a / b) for a, b in zip(squares.tolist(), elements.tolist(), strict=True)],
            "largest_logit": [logit if math.isfinite(logit) else None for logit in logits],
            "units_off": [a / b if b else None for a, b in zip(off.tolist(), units.tolist(), strict=True)],
        }


def last_matrices(layer: nn.Module) -> list[nn.Module]:
    """Returns the down projections of a layer's feed-forward network; [] for MoE experts, which aren't modules."""
    return [
        module
        for name, module in layer.named_modules()
        if name.rpartition(".")[2] in ("down_proj", "c_proj", "w2", "fc2", "fc_out", "dense_4h_to_h")
        and "attn" not in name
        and "attention" not in name
    ]
