"""Checks for bench/gpu_check.py: kernels against fp32 references, and entire runs against each other.

Every check returns an Outcome. Run kernel checks in a separate process, because a failure may crash it.
"""

import contextlib
import itertools
import math
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.shapes import END_OF_DOCUMENT_ID, Shape, write_model
from pretrain.errors import InputError, shortened
from pretrain.runs.event_log import read_metrics
from pretrain_tools.experiments.parity import (
    REFERENCE,
    TOLERANCES,
    Curve,
    largest_distance,
    launch_command,
    read_curve,
    train_under,
)
from pretrain_tools.runs.child_processes import signal_tree

ROOT = Path(__file__).resolve().parents[1]
PASSED = "passed"
FAILED = "failed"
NOT_RUN = "not run"
HEAD_WIDTHS = (100, 256)
"""Head widths to check separately: one that kernels have to pad, and the maximum in flash attention."""
LOGIT_CAP = 2.0
"""Cap that changes most of the logits in `loss_error`, whose standard deviation is 1."""
MOST_ERROR = {"fp32": 1e-4, "bf16": 4e-2, "fp16": 1e-2}
"""Maximum relative error of all gradients together, ||found - reference|| / ||reference||.

Rounding alone causes at most 20% of this. A wrong factor, or a document that ends one token late, causes at least 0.1.
"""
LOSS_SCALE = 1024.0
"""Factor that keeps fp16 gradients from underflowing. It is a power of two, so that scaling is exact."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a check."""

    word: str
    """passed, failed or not run."""
    said: str = ""
    """Errors, other measurements, or the reason."""
    figures: dict[str, Any] = field(default_factory=dict)
    """Numbers to save with the result."""


def check_attention(name: str, device: str, head_width: int | None = None) -> Outcome:
    """Compares a small Llama's loss and gradients with those of eager attention in fp32, computed per document.

    Covers grouped-query attention, head dimensions 64 and 128 or only `head_width`, and sequences of 2.5 blocks, with
    and without a document mask.
    """
    from pretrain.config import WindowSpec
    from pretrain.hardware import DTYPES
    from pretrain.model.attention import choose_attention

    half = half_precision(device)
    errors = {}
    refusals = []
    cases = [(half, 64, True), (half, 64, False), (half, 128, True), ("fp32", 64, True)]
    if head_width is not None:
        cases = [(half, head_width, True), (half, head_width, False)]
    for precision, width, documents in cases:
        window = WindowSpec(ATTENTION_WINDOW, documents)
        try:
            chosen = choose_attention(name, device_type=device, dtype=DTYPES[precision], window=window)
        except InputError as error:
            refusals += [reason for reason in error.problems if reason not in refusals]
            continue
        error = attention_error(chosen, device, precision, width, documents)
        case = f"{precision}, heads of {width}, {'documents' if documents else 'whole windows'}"
        errors[case] = (error, MOST_ERROR[precision])
    return judged(errors, refusals)


def check_loss(
    backend: str, device: str, sizes: tuple[int, int, int] = (4096, 256, 50_304), cap: float | None = None
) -> Outcome:
    """Compares a backend's loss and its gradients for all inputs with those from full logits in fp32.

    Every eighth target is ignored. Uses z-loss if the backend has it.

    Args:
        sizes: (tokens, hidden size, vocabulary size).
        cap: replaces the logits by cap x tanh(logits / cap).
    """
    errors = {precision: (loss_error(backend, device, precision, sizes, cap), MOST_ERROR[precision])
              for precision in (half_precision(device), "fp32")}  # fmt: skip
    return judged(errors, [])


def judged(errors: dict[str, tuple[float, float]], refusals: list[str]) -> Outcome:
    """Returns PASSED if every error is within its bound, or NOT_RUN if there are no errors.

    errors: {case: (error, bound)}.
    """
    if not errors:
        return Outcome(NOT_RUN, "; ".join(refusals))
    said = "; ".join(f"{case} {error:.1e}" for case, (error, _) in errors.items())
    # `not error <= most` instead of `error > most`, so that NaN fails.
    wrong = [
        f"{case}: error {error:.1e}, limit {most:g}" for case, (error, most) in errors.items() if not error <= most
    ]
    figures = {"errors": {case: error for case, (error, _) in errors.items()}}
    return Outcome(FAILED if wrong else PASSED, "; ".join(wrong) or f"error {said}", figures)


def half_precision(device: str) -> str:
    """Returns bf16, or fp16 on a GPU without bf16."""
    from pretrain.hardware import missing_bf16

    return "fp16" if device == "cuda" and missing_bf16(device) else "bf16"


def autocast(device: str, precision: str) -> contextlib.AbstractContextManager:
    import torch

    from pretrain.hardware import DTYPES

    return contextlib.nullcontext() if precision == "fp32" else torch.autocast(device, DTYPES[precision])


def relative_error(found: list, reference: list) -> float:
    """Computes ||found - reference|| / ||reference|| over all tensors together. Returns infinity instead of NaN."""
    pairs = list(zip(found, reference, strict=True))
    squared = sum(((one.double() - other.double()) ** 2).sum().item() for one, other in pairs)
    error = math.sqrt(squared / sum((other.double() ** 2).sum().item() for _, other in pairs))
    return math.inf if math.isnan(error) else error


ATTENTION_WINDOW = 320
ATTENTION_WINDOWS = 2
ATTENTION_VOCABULARY = 256


def attention_error(implementation: str, device: str, precision: str, head_width: int, documents: bool) -> float:
    """Returns the relative error of the gradients or the loss, whichever is larger."""
    import torch

    from pretrain.model.attention import attention_arguments, document_layout
    from pretrain.model.loss import LanguageModelLoss

    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, ATTENTION_VOCABULARY, (ATTENTION_WINDOWS, ATTENTION_WINDOW + 1), generator=generator)
    if documents:
        ids[torch.rand(ids.shape, generator=generator) < 1 / 60] = END_OF_DOCUMENT_ID
        ids[0, 200:230] = 7  # one document that always crosses a block boundary
    inputs = ids[:, :-1].contiguous()
    targets = ids[:, 1:].contiguous().to(device)
    arguments = attention_arguments(document_layout(inputs.numpy(), END_OF_DOCUMENT_ID), implementation, device)
    inputs = inputs.to(device)
    model = small_llama(head_width, implementation).to(device)
    with autocast(device, precision):
        loss, _ = LanguageModelLoss(model)(inputs, targets, **(arguments if documents else {}))
    found = gradients(model, loss)
    model.set_attn_implementation("eager")
    reference = loss_of_documents_alone(model, inputs, targets) if documents else plain_loss(model, inputs, targets)
    error = relative_error(found, gradients(model, reference))
    return max(error, abs(loss.item() / reference.item() - 1))


def small_llama(head_width: int, attention: str) -> Any:
    """Builds a Llama whose activations are near 1 and whose attention is far from uniform, to reveal a wrong mask."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": ATTENTION_VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": head_width}
    config = AutoConfig.for_model("llama", **sizes, **heads, max_position_embeddings=ATTENTION_WINDOW)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            std = 1.0 if "embed" in name else parameter.shape[1] ** -0.5 * (1.5 if "q_proj" in name else 1.0)
            torch.nn.init.normal_(parameter, std=std, generator=generator)
    return model


def gradients(model: Any, loss: Any) -> list:
    """Runs the backward pass on the scaled loss and returns the unscaled gradients, one per parameter."""
    model.zero_grad()
    (loss * LOSS_SCALE).backward()
    return [parameter.grad / LOSS_SCALE for parameter in model.parameters()]


def plain_loss(model: Any, inputs: Any, targets: Any, reduction: str = "mean") -> Any:
    from torch.nn.functional import cross_entropy

    logits = model(input_ids=inputs, use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)


def loss_of_documents_alone(model: Any, inputs: Any, targets: Any) -> Any:
    """Returns the mean loss over all tokens, computed with a separate forward pass for each document."""
    total = 0.0
    for row, row_targets in zip(inputs, targets, strict=True):
        starts = [0, *(t for t in range(1, len(row)) if row[t] == END_OF_DOCUMENT_ID), len(row)]
        for start, end in itertools.pairwise(starts):
            total = total + plain_loss(model, row[None, start:end], row_targets[None, start:end], "sum")
    return total / targets.numel()


def loss_error(
    backend: str, device: str, precision: str, sizes: tuple[int, int, int], cap: float | None = None
) -> float:
    """Returns the largest relative error of the loss and its gradients for hidden states, head and bias."""
    import torch

    from pretrain.model.attention import IGNORED
    from pretrain.model.loss import next_token_loss

    tokens, width, vocabulary = sizes
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, tokens, width), (vocabulary, width), (vocabulary,))
    hidden, weight, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    targets = torch.randint(0, vocabulary, (1, tokens), generator=generator)
    targets[0, ::8] = IGNORED
    inputs = [x.to(device).requires_grad_() for x in (hidden, weight * width**-0.5, bias)]
    results = []
    for name, chosen in (("logits", "fp32"), (backend, precision)):
        with autocast(device, chosen):
            loss, _ = next_token_loss(
                inputs[0], inputs[1], targets.to(device), head_bias=inputs[2], z_loss=1e-3, cap=cap, backend=name
            )
        results.append((loss.detach(), *(g / LOSS_SCALE for g in torch.autograd.grad(loss * LOSS_SCALE, inputs))))
    reference, found = results
    return max(relative_error([one], [other]) for one, other in zip(found, reference, strict=True))


MODEL = Shape("llama", 16, 128, 8, 1024, 128, 16)
"""Model for the runs. It has enough heads for eight tensor-parallel ranks, and enough layers for two pipeline stages
on each of eight processes."""
SMALL_MODEL = replace(MODEL, layers=4, sequence_length=64, sequences=8)
"""Model for the runs on a CPU, with two pipeline stages on each of two processes."""
STEPS = 12
KILL_AFTER_STEP = 9
"""The save of step 8 waits for the save of step 4, so one checkpoint is complete by then."""
KILL_SECONDS = 600
"""Maximum time until the step after which the run is killed."""
FORWARD = """\
import sys, torch
from transformers import AutoModelForCausalLM
assert not any(name.partition(".")[0] in ("pretrain", "pretrain_tools") for name in sys.modules)
device, *folders = sys.argv[1:]
ids = torch.arange(256, device=device).view(2, 128)
logits = []
for folder in folders:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    logits.append(model(input_ids=ids).logits)
assert logits[0].isfinite().all() and logits[0].std() > 0
print("largest difference", (logits[0] - logits[1]).abs().max().item())
"""


def default_kernels(precision: str = "auto") -> list[str]:
    """Returns the settings for fast attention, compiled layers and loss, in half precision or in `precision`."""
    settings = {"precision": precision, "attention": "auto", "compile": "regional", "loss.backend": "auto"}
    return [word for name, value in settings.items() for word in (f"--{name}", value)]


@dataclass(frozen=True)
class Runs:
    """Runs of a small recipe in fp32 with eager attention, whose kernels are deterministic.

    Args:
        folder: folder for the shards, the recipe and the runs. Later checks reuse it.
        device: cuda or cpu.
        model: model and batch size.
    """

    folder: Path
    device: str
    model: Shape = MODEL

    def recipe(self) -> Path:
        """Writes the recipe and prepares its data from the project's documentation. Returns the recipe's path."""
        path, shards, tokenizer = (self.folder / name for name in ("recipe.yaml", "shards", "tokenizer"))
        if path.exists():  # it is written last
            return path
        self.folder.mkdir(parents=True, exist_ok=True)
        model = write_model(self.model, self.folder)
        text = ["prepare_data.py", "--input", "docs/*.md"]
        self._python(*text, "--train_tokenizer", "1024", "--output", tokenizer)
        self._python(*text, "--tokenizer", tokenizer, "--validation_fraction", "0.05", "--output", shards)
        path.write_text(f"""\
model: {{config: {model}, vocab_size: auto}}
output: none
precision: fp32
attention: eager
compile: none
loss: {{backend: chunked}}
data: {{train: [{{shards: {shards}}}], sequence_length: {self.model.sequence_length}, document_mask: true}}
budget: {{steps: {STEPS}}}
batch: {{tokens_per_step: {self.model.tokens_per_step}, sequences_per_micro_batch: 2}}
optim: {{learning_rate: 1e-3, warmup_steps: 2}}
checkpoint: {{every_steps: 4, keep_last: 9}}
validation: {{every_steps: 6, sequences: 8}}
logging: {{every_steps: 1}}
export: {{dtype: fp32}}
""")
        return path

    def train(self, strategy: str, processes: int, name: str, *settings: str) -> Curve | Outcome:
        """Trains a new run. Returns its losses and gradient norms, or an Outcome if it failed or was rejected."""
        shutil.rmtree(self.folder / name, ignore_errors=True)
        outcome = train_under(strategy, processes, self.recipe(), self.folder / name, list(settings))
        if outcome.curve is not None:
            return outcome.curve
        if outcome.refusals:
            return Outcome(NOT_RUN, shortened("; ".join(outcome.refusals)))
        return Outcome(FAILED, last_words(self.folder / f"{name}.log"))

    def reference(self) -> Curve:
        """Returns the curve of the run on one GPU, training it if necessary. Raises InputError if training fails."""
        if (self.folder / REFERENCE / "final").is_dir():
            return read_curve(self.folder / REFERENCE)
        outcome = self.train(REFERENCE, 1, REFERENCE)
        if isinstance(outcome, Outcome):
            raise InputError(f"training on one process failed: {outcome.said}")
        return outcome

    def check_single(self) -> Outcome:
        """Checks that a run on one GPU completes and its loss falls."""
        shutil.rmtree(self.folder / REFERENCE, ignore_errors=True)
        return learned(self.reference())

    def check_learns(self, name: str, *settings: str) -> Outcome:
        """Checks that a run with the default kernels and these settings completes and its loss falls."""
        curve = self.train(REFERENCE, 1, name, *default_kernels(), *settings)
        return curve if isinstance(curve, Outcome) else learned(curve)

    def check_like_single(self, strategy: str, processes: int, *settings: str, name: str, precision: str) -> Outcome:
        """Checks that the losses match those of `single` within the tolerance of runs.py parity for the precision."""
        reference = self.reference()
        curve = self.train(strategy, processes, name, *settings)
        if isinstance(curve, Outcome):
            return curve
        most, most_norm = TOLERANCES[precision]
        loss = largest_distance(curve.loss, reference.loss, relative=False)
        norm = largest_distance(curve.grad_norm, reference.grad_norm, relative=True)
        same = loss <= most and (most_norm is None or norm <= most_norm)
        said = f"loss within {loss:.1e} of single's (limit {most:g}), gradient norm within {norm:.1e}"
        return Outcome(PASSED if same else FAILED, said, {"loss": loss, "grad_norm": norm})

    def check_defaults(self, strategy: str = REFERENCE, processes: int = 1, name: str = "defaults") -> Outcome:
        """Checks the default kernels: half precision, fast attention, compiled layers and loss."""
        precision = half_precision(self.device)
        return self.check_like_single(strategy, processes, *default_kernels(), name=name, precision=precision)

    def check_fp8(self, strategy: str = REFERENCE, processes: int = 1, name: str = "fp8") -> Outcome:
        """Checks fp8 with the default kernels."""
        return self.check_like_single(strategy, processes, *default_kernels("fp8"), name=name, precision="fp8")

    def check_memory_budget(self) -> Outcome:
        """Checks that the default kernels with half of the activations give the same losses."""
        settings = [*default_kernels(), "--activation_checkpointing.memory_budget", "0.5"]
        precision = half_precision(self.device)
        return self.check_like_single(REFERENCE, 1, *settings, name="memory-budget", precision=precision)

    def check_deterministic(self) -> Outcome:
        """Checks that `check_kill` also passes for the default kernels and samples with `deterministic: true`."""
        samples = ["--samples.every_steps", "6", "--samples.top_p", "0.9"]
        settings = [*default_kernels(), "--deterministic", "true", *samples]
        reference = self.train(REFERENCE, 1, "deterministic", *settings)
        if isinstance(reference, Outcome):
            return reference
        return self._kill_and_compare(reference, "deterministic", *settings)

    def check_kill(self) -> Outcome:
        """Checks that a killed and resumed run matches the uninterrupted run bit for bit."""
        return self._kill_and_compare(self.reference(), REFERENCE)

    def _kill_and_compare(self, reference: Curve, name: str, *settings: str) -> Outcome:
        """Kills a run and resumes it, and compares it with the run called `name`, whose curve is `reference`."""
        run = self.folder / f"{name}-killed"
        shutil.rmtree(run, ignore_errors=True)
        # The same launcher as for the reference, so that a CPU run also uses the same number of threads.
        command = launch_command(REFERENCE, 1, self.recipe(), run, list(settings))[1:]
        if problem := self._kill_after(run, KILL_AFTER_STEP, command):
            return Outcome(FAILED, problem)
        before = read_curve(run).loss
        self._python(*command)
        if not any(event["event"] == "resume" for event in read_metrics(run)):
            return Outcome(FAILED, "the run started over instead of resuming")
        curve = read_curve(run)
        weights = [(folder / "final/model.safetensors").read_bytes() for folder in (run, self.folder / name)]
        if curve == reference and weights[0] == weights[1]:
            return Outcome(
                PASSED, f"killed after step {max(before)} of {STEPS}: losses, norms and weights bit-identical"
            )
        differ = [step for step, loss in reference.loss.items() if curve.loss.get(step) != loss]
        said = f"the first difference is in step {differ[0]}" if differ else "the weights differ"
        # If the runs already differ before the kill, the kernels aren't deterministic and resuming isn't the cause.
        if any(reference.loss[step] != loss for step, loss in before.items()):
            said += ", even before the kill, so the kernels are not deterministic"
        return Outcome(FAILED, said)

    def check_export(self) -> Outcome:
        """Checks that final/, loaded with only transformers, gives the same logits as the last checkpoint."""
        self.reference()
        run = self.folder / REFERENCE
        folders = [str((run / name).resolve()) for name in ("final", f"checkpoints/step-{STEPS:08d}")]
        command = [sys.executable, "-c", FORWARD, self.device, *folders]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True)
        if done.returncode:
            return Outcome(FAILED, (done.stderr.strip().splitlines() or ["no output"])[-1])
        difference = float(done.stdout.split()[-1])
        said = f"logits differ by {difference:.1e} from the last checkpoint's, using only transformers"
        verified = [line for line in (run / "train.log").read_text().splitlines() if " verified: " in line]
        if not verified:
            return Outcome(FAILED, "train.log doesn't say that the export was verified")
        return Outcome(PASSED if difference == 0 else FAILED, said)

    def _kill_after(self, run: Path, step: int, command: list[str]) -> str | None:
        """Starts a run and kills it with its launcher once it has logged `step`. Returns the problem if this fails."""
        log = self.folder / f"{run.name}.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, *command], cwd=ROOT, stdout=file, stderr=file, start_new_session=True
            )
        end = time.monotonic() + KILL_SECONDS
        try:
            while max(read_curve(run).loss, default=0) < step if (run / "metrics.jsonl").exists() else True:
                if process.poll() is not None:
                    return f"the run exited before it could be killed: {last_words(log)}"
                if time.monotonic() > end:
                    return f"step {step} was not logged within {KILL_SECONDS} s"
                time.sleep(0.02)
        finally:
            signal_tree(process.pid, signal.SIGKILL)
            process.wait()
        return None if process.returncode == -signal.SIGKILL else "the run exited before it could be killed"

    def _python(self, *arguments: Any) -> None:
        """Runs one of the project's scripts. Raises InputError with its last lines if it fails."""
        command = [sys.executable, *map(str, arguments)]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise InputError(f"{arguments[0]} exited with status {done.returncode}", *done.stdout.splitlines()[-3:])


def learned(curve: Curve) -> Outcome:
    """Returns PASSED if the loss falls."""
    first = curve.loss[1]
    last = curve.loss[STEPS]
    return Outcome(PASSED if last < first - 0.1 else FAILED, f"loss started at {first:.4f} and ended at {last:.4f}")


def last_words(log: Path) -> str:
    """Returns the last non-empty line of a log, and the log's path."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{lines[-1].strip() if lines else 'no output'} (see {log})"
