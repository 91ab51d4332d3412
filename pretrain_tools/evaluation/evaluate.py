"""Runs evaluate.py: checks all inputs, then evaluates the models one by one."""

import argparse
import math
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer
from transformers.utils import logging as transformers_logging

from pretrain.checkpoint.average_folder import average_folder, require_average
from pretrain.data.shards import ShardReader
from pretrain.errors import InputError, Problems, one_line, shortened
from pretrain.hardware import emulation_of_bf16
from pretrain.model.model_config import load_model_config
from pretrain.model.pretrained import load_pretrained
from pretrain.parallel.launcher import launched_strategy
from pretrain.parallel.strategy import Strategy, device_type
from pretrain.registry import TASKS, digest_of
from pretrain.training.background_jobs import numbers_of
from pretrain.training.metrics import finite
from pretrain.training.samples import Sampling, encode_prompt, generate_text
from pretrain.training.trackers import Trackers
from pretrain_tools.evaluation.lm_harness import TaskSelection, score_tasks, select_tasks
from pretrain_tools.evaluation.results import (
    ModelResults,
    TaskScore,
    print_table,
    require_writable,
    write_results,
)
from pretrain_tools.evaluation.shard_loss import (
    ShardSettings,
    measure_shards,
    open_evaluation_shards,
    run_config_of,
    settings_for,
)
from pretrain_tools.runs.addresses import ModelAddress, find_models
from pretrain_tools.runs.history import append_events, read_end
from pretrain_tools.runs.status import is_training

HELP = """Type some text and press Enter; \\n is a new line. The model continues your text as if it were a document.
  :more     continue the last text
  :quit     or Ctrl-D. Ctrl-C stops generation. See also --temperature, --top_k, --top_p and --max_new_tokens"""
MOST_TOKENS = 1_000_000
"""Number of positions of a model without a limit."""


@dataclass
class Job:
    """A model to evaluate, and its inputs."""

    address: ModelAddress
    config: PreTrainedConfig
    settings: ShardSettings | None = None
    readers: dict[str, ShardReader] = field(default_factory=dict)
    tokenizer: Any = None
    prompt_ids_BT: torch.Tensor | None = None


def evaluate_models(arguments: argparse.Namespace) -> tuple[list[ModelResults], Strategy]:
    """Evaluates all models. Returns (results, strategy).

    Checks all inputs first, and raises InputError listing all problems.
    """
    jobs, tasks = find_everything(arguments)
    # Set up the processes only now, so that mistakes are reported first.
    strategy = evaluation_strategy()  # precision is set per model in measure_shards
    if not strategy.ranks.is_main or not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    # With --precision auto, tasks use the saved dtype.
    saved_in_bf16 = tasks is not None and any(job.config.dtype == torch.bfloat16 for job in jobs)
    in_bf16 = arguments.precision == "bf16" or (arguments.precision == "auto" and saved_in_bf16)
    if strategy.ranks.is_main and in_bf16 and (problem := emulation_of_bf16(strategy.device)):
        print(f"warning: {problem}; use --precision fp32", file=sys.stderr)
    evaluations: list[ModelResults] = []
    for job in jobs:
        evaluation = measure(job, tasks, arguments, strategy)
        evaluations.append(evaluation)
        if strategy.ranks.is_main:
            # Save after each model, because the next one may take hours or crash.
            if evaluation.address.run is not None and evaluation.address.weights == "raw":
                append_events(evaluation.address.run, map(finite, evaluation.lines()))
                track(evaluation)
            if arguments.output:
                try:
                    write_results(arguments.output, evaluations, vars(arguments))
                except OSError:  # such as a full disk
                    print_table(evaluations)
                    raise
            if evaluation.sample is not None:
                print(f"--- {job.address.name}\n{evaluation.sample}\n---", flush=True)
    if strategy.ranks.is_main:
        if arguments.data or arguments.tasks:
            print_table(evaluations)
        if arguments.output:
            print(f"All results were written to {arguments.output}.")
    return evaluations, strategy


def evaluation_strategy() -> Strategy:
    """Builds the strategy for scripts that don't train. Raises InputError unless it is `single` or `ddp`."""
    name = launched_strategy()
    if name not in ("single", "ddp"):
        raise InputError(
            f"launcher: {name} can only be used for training; use accelerate_configs/single.yaml or ddp.yaml, which "
            "can read checkpoints from any strategy"
        )
    return Strategy("fp32")


def track(evaluation: ModelResults) -> None:
    """Logs the scores to the trackers of the model's run, unless the run is active and does so itself."""
    run = evaluation.address.run
    if is_training(run):
        return
    try:
        config = run_config_of(evaluation.address)
    except InputError:
        return  # an unreadable recipe, such as one from another version
    if not config.trackers:
        return
    trackers = Trackers(run, config, lambda text: print(f"warning: {text}", file=sys.stderr), is_late=True)
    last = max((event.get("step") or 0 for event in read_end(run)), default=0)
    # wandb rejects steps before the run's last one, so log the evaluated step as a value.
    trackers.log(numbers_of(evaluation.as_dict()), step=last)
    trackers.finish()


def find_everything(arguments: argparse.Namespace) -> tuple[list[Job], TaskSelection | None]:
    """Finds models, shards and tasks. Raises InputError listing all problems."""
    problems = Problems()
    if arguments.output is not None:
        problems.attempt(require_writable, arguments.output)
    addresses = [address for text in arguments.model for address in problems.attempt(find_models, text) or []]
    jobs = [job for address in addresses if (job := problems.attempt(job_of, address, arguments))]
    for job in jobs:
        if arguments.data:
            problems.attempt(add_sources, job, arguments)
        if arguments.tasks or arguments.prompt is not None:
            problems.attempt(add_tokenizer, job, arguments)
    # Load tasks last, because this is slow and may download files.
    tasks = None
    named = [name for name in arguments.tasks if name not in TASKS]
    if named and not problems:
        tasks = problems.attempt(select_tasks, named, arguments.include_path, arguments.eval_bundle)
    problems.stop_if_any()
    return jobs, tasks


def job_of(address: ModelAddress, arguments: argparse.Namespace) -> Job:
    """Creates a job without data. Raises InputError if config.json is unusable, or if averaged weights are missing."""
    if arguments.weights == "average":
        require_average(f"--weights average: {address.name}", address.folder)
        address = replace(address, name=f"{address.name}, average", weights="average")
    config = load_model_config(str(address.folder), trust_remote_code=arguments.trust_remote_code)
    return Job(address, config)


def weights_of(address: ModelAddress) -> AbstractContextManager[Path]:
    """Returns a context manager that yields a model folder with the requested weights."""
    return average_folder(address.folder) if address.weights == "average" else nullcontext(address.folder)


def add_sources(job: Job, arguments: argparse.Namespace) -> None:
    """Adds the shards and their settings to a job. Raises InputError."""
    job.settings = settings_for(job.address, job.config, arguments)
    job.readers = open_evaluation_shards(job.address, job.config, job.settings.window, arguments)


def add_tokenizer(job: Job, arguments: argparse.Namespace) -> None:
    """Adds the tokenizer and the prompt to a job. Raises InputError."""
    try:
        job.tokenizer = AutoTokenizer.from_pretrained(
            str(job.address.folder), trust_remote_code=arguments.trust_remote_code
        )
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise InputError(
            f"--model {job.address.name}: --tasks and --prompt need its tokenizer, which cannot be loaded "
            f"({one_line(error)}); copy the tokenizer files to the model folder"
        ) from error
    if arguments.prompt is not None:
        if not is_utf8(arguments.prompt):
            raise InputError("--prompt: must be UTF-8; convert it, for example with iconv")
        job.prompt_ids_BT = encode_prompt(job.tokenizer, arguments.prompt)
        tokens = job.prompt_ids_BT.shape[1]
        positions = getattr(job.config, "max_position_embeddings", None) or math.inf
        if (room := positions - tokens) < arguments.max_new_tokens:
            advice = f"use at most --max_new_tokens {room}" if room > 0 else "shorten the prompt"
            raise InputError(
                f"--prompt: {tokens:,} tokens and --max_new_tokens {arguments.max_new_tokens:,} exceed the model's "
                f"{positions:,} positions; {advice}"
            )


def measure(job: Job, tasks: TaskSelection | None, arguments: argparse.Namespace, strategy: Strategy) -> ModelResults:
    """Runs all requested evaluations for a model."""
    started = time.perf_counter()
    with weights_of(job.address) as folder:
        result = measure_loss(folder, job, arguments, strategy)
        # Free this copy, because the harness loads the model again.
        clear_device_cache(garbage_collection=True)
        if tasks is not None:
            result.limit = arguments.limit
            result.tasks += score_tasks(folder, tasks, strategy, arguments)
    result.seconds = time.perf_counter() - started
    return result


def measure_loss(folder: Path, job: Job, arguments: argparse.Namespace, strategy: Strategy) -> ModelResults:
    """Returns the parameter count, the sample, the losses and the scores of extension tasks."""
    model = load_pretrained(str(folder), trust_remote_code=arguments.trust_remote_code)
    model.eval()
    result = ModelResults(job.address, model.num_parameters())
    if job.prompt_ids_BT is not None and strategy.ranks.is_main:
        result.sample = generate_text(
            model.to(strategy.device), job.tokenizer, job.prompt_ids_BT, sampling_of(arguments)
        )
    for name in arguments.tasks:
        if name in TASKS:  # every rank runs the whole task
            result.tasks.append(own_score(name, model.to(strategy.device), job.tokenizer))
    if job.readers:
        result.sources = measure_shards(model, job.readers, strategy, job.settings)
        settings = asdict(job.settings)
        result.source_settings = {"split": arguments.split, **settings.pop("window"), **settings}
    return result


def own_score(name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> TaskScore:
    """Scores a model with a task from an extension. Raises InputError if the result isn't {metric: number}."""
    evaluation = TASKS[name]
    with torch.no_grad():
        measures = evaluation(model, tokenizer)
    if not isinstance(measures, dict) or not all(isinstance(value, int | float) for value in measures.values()):
        raise InputError(f"--tasks {name}: must return {{metric: number}}, but returned {shortened(repr(measures))}")
    code = digest_of([Path(sys.modules[evaluation.__module__].__file__)])
    return TaskScore(name, {key: float(value) for key, value in measures.items()}, None, None, code, uses_limit=False)


def sampling_of(arguments: argparse.Namespace) -> Sampling:
    """Returns the sampling settings. Temperature 0 means greedy decoding."""
    if not arguments.temperature:
        return Sampling(arguments.max_new_tokens, seed=arguments.seed)
    top_k = 50 if arguments.top_k is None else arguments.top_k or None
    return Sampling(arguments.max_new_tokens, arguments.temperature, top_k, arguments.seed, arguments.top_p)


def talk_to_model(arguments: argparse.Namespace) -> None:
    """Runs `evaluate.py --interactive` until the user quits. Raises InputError."""
    device = torch.device(device_type())  # before loading the model, because a GPU's driver may be too old
    transformers_logging.disable_progress_bar()
    address, *others = [found for text in arguments.model for found in find_models(text)]
    if others:
        raise InputError(f"--interactive: must be used with a single model, not {' '.join(arguments.model)}")
    job = job_of(address, arguments)
    add_tokenizer(job, arguments)
    with weights_of(job.address) as folder:
        model = load_pretrained(str(folder), trust_remote_code=arguments.trust_remote_code)
    if emulation_of_bf16(device):
        model.float()
    print(job.address.name)
    interact(model.eval().to(device), job.tokenizer, sampling_of(arguments), arguments.prompt)


def interact(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sampling: Sampling, first: str | None = None
) -> None:
    """Continues text until `:quit` or the end of the input. Increases the seed by 1 after each generation.

    If the text is too long, only its end is used, and a note says so. first: optional prompt.
    """
    positions = getattr(model.config, "max_position_embeddings", None) or MOST_TOKENS
    most = positions - sampling.max_new_tokens
    if most < 1:
        raise InputError(
            f"--max_new_tokens {sampling.max_new_tokens}: must be less than the model's {positions:,} positions"
        )
    print(HELP, flush=True)
    text = ""
    for line in lines(first):
        if line == ":quit":
            return
        if not is_utf8(line):
            print("the input must be UTF-8; convert it, for example with iconv", file=sys.stderr)
        elif line.startswith(":") and not (line == ":more" and text):
            print(f"{line}: unknown, or there is no text yet\n{HELP}", file=sys.stderr)
        elif line:
            text = text if line == ":more" else line.replace("\\n", "\n")
            ids_BT = encode_prompt(tokenizer, text)
            if (tokens := ids_BT.shape[1]) > most:
                why = f"the model has {positions:,} positions, and --max_new_tokens is {sampling.max_new_tokens:,}"
                print(f"using only the last {most:,} of {tokens:,} tokens, because {why}", file=sys.stderr)
            streamer = TextStreamer(tokenizer, skip_special_tokens=True)
            try:
                text = generate_text(model, tokenizer, ids_BT[:, -most:], sampling, streamer)
            except KeyboardInterrupt:
                print()
            sampling = replace(sampling, seed=sampling.seed + 1)
        if not sys.stdin.isatty():
            print(flush=True)


def is_utf8(text: str) -> bool:
    """Returns True if all bytes of an argument or an input line were valid UTF-8."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def lines(first: str | None) -> Iterator[str]:
    """Yields `first`, then lines from standard input. In a terminal, line editing and history are available."""
    if first is not None:
        yield first
    is_terminal = sys.stdin.isatty()
    sys.stdin.reconfigure(errors="surrogateescape")  # by default, the first invalid byte ends the session
    if is_terminal:
        with suppress(ImportError):  # not available in every Python
            import readline  # noqa: F401
    while True:
        try:
            yield input("> " if is_terminal else "")
        except KeyboardInterrupt:
            print()
        except EOFError:
            if is_terminal:
                print()
            return
