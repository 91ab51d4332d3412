"""Averages the weights of several models uniformly.

Averaging a run's last checkpoints approximates a learning-rate decay (LAWA: Kaddour, arXiv 2209.14981; Sanyal et al.,
arXiv 2306.03241; for WSD schedules: Tian et al., arXiv 2507.17634). Averaging runs that branched from one checkpoint
produces a model soup (Wortsman et al., arXiv 2203.05482).
"""

import itertools
import json
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from pretrain.checkpoint.average_folder import require_average
from pretrain.checkpoint.checkpoints import require_space
from pretrain.checkpoint.tensor_files import SavedTensors, bytes_of, write_group
from pretrain.errors import InputError, Problems
from pretrain.files import CARD_FILE, PICTURE_FILE, PROVENANCE_FILE, SEAL_FILE, SIGNATURE_FILE, commit
from pretrain.model.model_config import config_differences, load_model_config, register_code_of
from pretrain.model.published_names import JoinedTensors, PublishedNames
from pretrain.parallel.tensor_group import TensorGroup
from pretrain.runs.event_log import read_metrics
from pretrain.runs.run_folder import checkpoint_folders
from pretrain_tools.runs.addresses import ModelAddress, find_models, newest_models
from pretrain_tools.runs.history import require_output

MERGE_FILE = "merge.json"
LEFT_BEHIND = {SEAL_FILE, PROVENANCE_FILE, SIGNATURE_FILE, CARD_FILE, PICTURE_FILE, MERGE_FILE, "trainer_state.json"}
"""Files that describe a single model and therefore aren't copied to the merged one."""


def merge_models(
    models: list[str], *, last: int | None, weights: str, output: Path | None, trust_remote_code: bool = False
) -> str:
    """Averages the models at these addresses. Returns a text that names them and the output folder.

    Reads one tensor at a time, and holds at most one output file in memory. Raises InputError listing all problems
    before writing anything.

    Args:
        last: number of newest intact checkpoints to use from each run.
        weights: raw, or average to use the averaged weights in checkpoints.
        trust_remote_code: run Python code from the model folders.
        output: a new folder; None for a folder in the run, if all models are from one run.
    """
    problems = Problems()
    addresses = [found for text in models for found in problems.attempt(addressed, text, last) or []]
    problems.stop_if_any()
    names = [address.name for address in addresses]
    if len(names) < 2 and weights == "raw":
        problems.append(
            f"merge {names[0]}: needs at least two models, such as RUN --last 5, RUN@400 RUN@500 or two folders"
        )
    same: dict[object, list[str]] = {}
    for address in addresses:
        same.setdefault(identity_of(address), []).append(address.name)
    problems += [
        f"merge: {' and '.join(dict.fromkeys(found))} would count twice; list each model only once"
        for found in same.values()
        if len(found) > 1
    ]
    for address in addresses if weights == "average" else ():
        problems.attempt(require_average, f"merge {address.name}: --weights average", address.folder)
    output = problems.attempt(output_folder, addresses, output)
    problems.stop_if_any()
    prefix = "model" if weights == "raw" else "average"
    group, published = mean_of(addresses, prefix, trusted=trust_remote_code)
    # Write to a hidden folder and rename it at the end, so that the output is never incomplete.
    unfinished = output.with_name(f".saving-{output.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        require_space(unfinished, bytes_of(group))
        files = write_group(unfinished, "model", group, 0, 1, published=published)
        describe_mean(unfinished, addresses[-1].folder, {"models": names, "weights": weights})
        commit(unfinished, output, files)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise InputError(
            f"--output {output}: cannot be written ({error}); free up disk space, or use another disk"
        ) from error
    trial = f"python evaluate.py --model {shlex.quote(str(output))} --data FOLDER"
    return f"The mean of {', '.join(names)} is in {output}.\nTry: {trial}"


def addressed(text: str, last: int | None) -> list[ModelAddress]:
    """Returns the models at an address, or a run's newest intact checkpoints if `last` is set. Raises InputError."""
    run = Path(text).expanduser()
    if last is None or not checkpoint_folders(run):
        models = find_models(text, "merge")
        if last is not None:
            raise InputError(f"merge {text} --last {last}: --last needs runs with checkpoints; omit it, or use RUN")
        return models
    found = list(itertools.islice(newest_models(run), last))
    if len(found) < last:
        raise InputError(
            f"merge {text} --last {last}: the run has only {len(found)} intact checkpoints; reduce --last, or "
            "increase checkpoint.keep_last"
        )
    return found[::-1]


def identity_of(address: ModelAddress) -> object:
    """Returns a value that is equal for models with the same weights: a run's step, or the folder.

    A run's final/ has the weights of the checkpoint at its step, unless it contains an average.
    """
    folder = address.folder.resolve()
    if address.run is None or address.step is None:
        return folder
    exports = [event for event in read_metrics(address.run) if event["event"] == "export"]
    if folder.name == "final" and exports and exports[-1].get("weights") == "average":
        return folder
    return address.run.resolve(), address.step


def output_folder(addresses: Sequence[ModelAddress], asked: Path | None) -> Path:
    """Chooses the output folder. Raises InputError if it exists or can't be created."""
    if asked is None:
        runs = {address.run for address in addresses}
        if len(runs) > 1 or None in runs:
            raise InputError("merge: --output is required, because the models aren't all from the same run")
        # A final/ whose `end` event is missing has no step.
        steps = sorted({address.step for address in addresses} - {None})
        asked = runs.pop() / ("merged-" + "-".join(f"{step}" for step in dict.fromkeys((steps[0], steps[-1]))))
    if asked.exists():
        raise InputError(f"--output {asked}: already exists; remove it, or use another folder")
    return require_output("--output", asked)


def mean_of(addresses: list[ModelAddress], prefix: str, *, trusted: bool) -> tuple[TensorGroup, PublishedNames]:
    """Returns the mean of the models' tensors, and the names that they have in published models.

    Means are computed in fp64 on access, and returned in fp32. Raises InputError if the architectures
    differ.
    """
    problems = Problems()
    configs = [problems.attempt(config_of, address.folder, trusted) for address in addresses]
    saved = [SavedTensors(address.folder, prefix) for address in addresses]
    problems += [
        f"merge {address.name}: contains no safetensors files"
        for address, model in zip(addresses, saved, strict=True)
        if not model
    ]
    problems.stop_if_any()
    published = PublishedNames(configs[0])
    models = [JoinedTensors(model, published) for model in saved]
    shapes, *others = (joined.shapes(of.shapes()) for joined, of in zip(models, saved, strict=True))
    for address, config, ours in zip(addresses[1:], configs[1:], others, strict=True):
        # RoPE has no weights, so comparing shapes isn't enough.
        ropes = [getattr(one, "rope_parameters", None) for one in (configs[0], config)]
        if type(config) is not type(configs[0]) or ours != shapes or ropes[0] != ropes[1]:
            problems.append(
                f"merge {addresses[0].name} {address.name}: have different architectures "
                f"({config_differences(configs[0], config)}); merge only models with the same architecture, or "
                "checkpoints from the same stage"
            )
    problems.stop_if_any()

    def mean(name: str) -> torch.Tensor:
        # A sum in fp32 would lose the small differences between models.
        total = models[0][name].double()
        for model in models[1:]:
            total += model[name]
        return (total / len(models)).float()

    return TensorGroup(shapes, dict.fromkeys(shapes, torch.float32), mean), published


def config_of(folder: Path, trusted: bool) -> PreTrainedConfig:
    """Loads a model folder's config. trusted: run the folder's own code."""
    if trusted:
        register_code_of(str(folder))
    return load_model_config(str(folder))


def describe_mean(folder: Path, newest: Path, contents: dict) -> None:
    """Copies all other files from the newest model, and writes merge.json with a list of the models."""
    for path in newest.iterdir():
        if path.is_file() and path.name not in LEFT_BEHIND and ".safetensors" not in path.suffixes:
            shutil.copyfile(path, folder / path.name)
    note_dtype(folder, torch.float32)
    (folder / MERGE_FILE).write_text(json.dumps(contents, indent=1), encoding="utf-8")


def note_dtype(folder: Path, dtype: torch.dtype) -> None:
    """Sets the dtype in config.json, which from_pretrained uses by default."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
