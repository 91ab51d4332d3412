"""Implements publish.py: publishes models and verifies published folders."""

import fcntl
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from pretrain.errors import EXIT_INTERRUPTED, InputError, Problems
from pretrain.files import SIGNATURE_FILE
from pretrain.processes import folder_lock, is_held
from pretrain.runs.hub import STAGING, evaluation_log, login_problems, offer_problems, waiting_mark
from pretrain.runs.run_folder import checkpoint_name, read_config, setting
from pretrain_tools.publishing.facts import Publication, gaps_in_records
from pretrain_tools.publishing.hub_upload import PublishError, open_repository, upload
from pretrain_tools.publishing.provenance import printable, provenance_problems, provenance_text
from pretrain_tools.publishing.signature import load_key, signature_problems
from pretrain_tools.publishing.staging import Model, copy_model, find_publishable, stage
from pretrain_tools.runs.addresses import download
from pretrain_tools.runs.history import append_events, refuse_url, require_output

EXIT_NOT_PUBLISHED = 1
"""Exit status if an upload fails, or if verification finds differences."""
ATTEMPTS_DURING_TRAINING = 10
FIRST_WAIT_SECONDS = 30
"""Wait before the second attempt. It doubles each time."""
LONGEST_WAIT_SECONDS = 3600


def publish(arguments: Namespace, problems: list[str]) -> int:
    """Publishes models or writes a GGUF file. Returns the exit status.

    problems: problems found so far. Raises InputError listing them and all others that can be found offline.
    """
    try:
        if arguments.gguf is not None:
            write_gguf_file(arguments, Problems(problems))
        else:
            publish_models(arguments, models_to_publish(arguments, Problems(problems)))
    except PublishError as failure:
        record(arguments, problem=str(failure))
        print(failure, file=sys.stderr)
        return EXIT_NOT_PUBLISHED
    except InputError as error:
        record(arguments, problem="; ".join(error.problems))
        raise
    except KeyboardInterrupt:
        print("\ninterrupted; run the same command to resume", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def find_models(arguments: Namespace) -> list[Model]:
    """Finds the requested models. Raises InputError listing problems with them or with --run."""
    run = arguments.run
    if run is None:
        raise InputError("--run is required; pass a run folder, such as --run runs/x")
    if not (run / "config.yaml").is_file():
        refuse_url(str(run))
        raise InputError(f"--run {run}: not a run folder (it contains no config.yaml)")
    if not read_config(run):
        raise InputError(
            f"--run {run}: config.yaml is damaged or empty, so the card could not describe the training; restore it "
            "from a copy of the run, such as its mirror"
        )
    return find_publishable(run, steps=arguments.checkpoint, milestones=arguments.milestones, final=arguments.final)


def models_to_publish(arguments: Namespace, problems: Problems) -> list[Model]:
    """Finds the models to publish and sets missing options from the recipe.

    Raises InputError listing all problems.
    """
    if arguments.run is not None:
        config = read_config(arguments.run)
        language = arguments.language or setting(config, "publish.language") or []
        arguments.repo = arguments.repo or setting(config, "hub.repository")
        # hub.private is true in every run's config.yaml unless the recipe sets it, even without a repository.
        is_from_recipe = arguments.repo == setting(config, "hub.repository")
        arguments.private = arguments.private or (is_from_recipe and bool(setting(config, "hub.private")))
        arguments.license = arguments.license or setting(config, "publish.license")
        arguments.language = [language] if isinstance(language, str) else list(language)
        arguments.dtype = setting(config, "export.dtype")
    flags = ("--repo", "--license", "--language")
    problems += offer_problems(arguments.repo, arguments.license, arguments.language, flags)
    if not arguments.dry_run:
        problems += login_problems()
    if arguments.sign is not None:
        arguments.sign = problems.attempt(load_key, "--sign", arguments.sign)
    models = problems.attempt(find_models, arguments) or []
    if output := arguments.output:
        problems.attempt(require_output, "--output", output)
        taken = [model.revision for model in models if (output / model.revision).exists()]
        problems += [f"--output {output}: already contains {name}; use another folder" for name in taken]
    problems.stop_if_any()
    for gap in dict.fromkeys(gap for model in models for gap in gaps_in_records(arguments.run, model.step)):
        print(f"warning: {gap}, so the model card is incomplete; restore it from a copy of the run", file=sys.stderr)
    return models


def write_gguf_file(arguments: Namespace, problems: Problems) -> None:
    """Writes one of a run's models as a GGUF file. Raises InputError, or PublishError if the disk is full."""
    file = arguments.gguf
    problems.attempt(require_output, "--gguf", file, "model.gguf")
    if file.suffix != ".gguf":
        problems.append(f"--gguf {file}: must end in .gguf")
    if file.exists():
        problems.append(f"--gguf {file}: already exists; use another name")
    if not file.parent.is_dir():
        problems.append(f"--gguf {file}: {file.parent} is not a folder; create it, or use another folder")
    models = problems.attempt(find_models, arguments) or []
    # These modules import torch.
    from pretrain_tools.publishing.gguf_comparison import comparison_note, validation_text
    from pretrain_tools.publishing.gguf_file import check_convertible, write_gguf

    for model in models:
        problems.attempt(check_convertible, model.folder)
    if len(models) > 1:
        problems.append("--gguf: accepts only one model; use --checkpoint with a single step, or --final")
    problems.stop_if_any()
    (model,) = models
    dtype = setting(read_config(arguments.run), "export.dtype") or "bf16"
    folder = file.with_name(f".gguf-{file.name}")
    with writing_to(file.parent), folder_lock(file.with_name(f".{file.name}.lock")):
        shutil.rmtree(folder, ignore_errors=True)  # from a killed process
        folder.mkdir()
        try:
            copy_model(model, folder, dtype)
            note = comparison_note(folder, validation_text(arguments.run))
            write_gguf(folder, folder / file.name, dtype, arguments.run.resolve().name)
            (folder / file.name).rename(file)
        finally:
            shutil.rmtree(folder)
    print(f"{file}: step {model.step:,}, {dtype}, {file.stat().st_size / 1e6:,.1f} MB. {note}")


def publish_models(arguments: Namespace, models: list[Model]) -> None:
    """Stages and uploads each model. Raises PublishError."""
    staging = arguments.output or arguments.run / STAGING
    with writing_to(staging):
        staging.mkdir(parents=True, exist_ok=True)
    act = partial(open_repository, arguments.repo, private=arguments.private)
    url = "" if arguments.dry_run else retry(arguments, act)
    for model in models:
        publish_model(arguments, model, staging, url)
    # Evaluation can take hours, so the model is uploaded first.
    for model in models if arguments.beside_training else []:
        log = evaluation_log(arguments.run, checkpoint_name(model.step))
        if is_held(log):
            print(f"{model.revision}: waiting for evaluation scores (see {log})", flush=True)
            with suppress(OSError), open(log, "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # returns when the evaluation has ended
            publish_model(arguments, model, staging, url)


def publish_model(arguments: Namespace, model: Model, staging: Path, url: str) -> None:
    """Stages a model and uploads it unless this is a dry run. Raises PublishError."""
    publication = Publication(
        arguments.repo,
        license=arguments.license,
        languages=tuple(arguments.language),
        dtype=arguments.dtype,
        trust_remote_code=arguments.trust_remote_code,
    )
    folder = staging / model.revision
    # Without the lock, two processes could upload each other's unfinished files.
    with folder_lock(staging / f".{model.revision}.lock"):
        with writing_to(staging):
            stage(arguments.run, model, publication, folder, arguments.sign)
        sizes = {path: path.stat().st_size for path in sorted(folder.iterdir())}
        total = sum(sizes.values())
        print(f"{model.revision}: step {model.step:,}, {len(sizes)} files, {total / 1e6:,.1f} MB", flush=True)
        if arguments.dry_run:
            print("\n".join(f"  {size:>14,}  {path}" for path, size in sizes.items()), flush=True)
            return
        try:
            commit = retry(arguments, partial(upload, folder, model, arguments.repo))
        finally:
            # Free the disk space of the staged weights.
            shutil.rmtree(folder)
    print(f"{model.revision}: uploaded to {url}/tree/{model.revision} as commit {commit[:12]}", flush=True)
    waiting_mark(arguments.run, model.revision).unlink(missing_ok=True)
    record(arguments, step=model.step, revision=model.revision, commit=commit)


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Converts errors from a full or read-only disk to PublishError."""
    try:
        yield
    except OSError as error:
        raise PublishError(
            f"{folder} is not writable, but publish.py stages models there ({error}); free up disk space, or publish "
            "a copy of the run from another disk"
        ) from error


def record(arguments: Namespace, **facts: object) -> None:
    """Records the outcome of an upload in the run's metrics.jsonl, if train.py started it."""
    if arguments.beside_training and arguments.run:
        event = {"event": "publish", **facts, "repository": arguments.repo, "time": round(time.time(), 3)}
        append_events(arguments.run, [event])


def retry(arguments: Namespace, act: Callable[[], str]) -> str:
    """Calls `act`, up to 10 times during training. Returns its result or raises the last PublishError."""
    for attempt in range(1, ATTEMPTS_DURING_TRAINING) if arguments.beside_training else ():
        try:
            return act()
        except PublishError as failure:
            if attempt == 1:
                record(arguments, problem=f"{failure}; retrying")
            wait = min(FIRST_WAIT_SECONDS * 2 ** (attempt - 1), LONGEST_WAIT_SECONDS)
            print(f"{failure}\nattempt {attempt} failed; retrying in {wait} s", file=sys.stderr)
            time.sleep(wait)
    return act()


def verify(place: str, public_key: Path | None) -> int:
    """Prints every file that differs from the published version. Returns the exit status.

    place: a folder, or OWNER/NAME[@REVISION] on the Hub. Raises InputError if it is signed, but `public_key` is
    None.
    """
    verifier = load_key("--public_key", public_key) if public_key is not None else None
    folder = Path(place).expanduser()
    folder = folder if folder.is_dir() else download("--verify", place)
    is_signed = (folder / SIGNATURE_FILE).exists()
    problems = provenance_problems(folder)
    if verifier is not None:
        problems += signature_problems(folder, verifier)
    if problems:
        print("\n".join(f"{place}: {printable(problem)}" for problem in problems))
        return EXIT_NOT_PUBLISHED
    print(f"{place}: {printable(provenance_text(folder))}")
    if is_signed and verifier is None:
        raise InputError(f"--public_key is required to check the signature of {place}; pass the signer's public key")
    print(f"signed with the private key for {public_key}" if is_signed else "not signed, so its author is unknown")
    return 0
