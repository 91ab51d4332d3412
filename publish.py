"""Publishes a run's models on the Hugging Face Hub, with a model card generated from the run's records.

    python publish.py --run runs/x --repo me/llama-125m-base --license apache-2.0          # final/ as main
    python publish.py --run runs/x --repo me/llama-125m-base --checkpoint 5000             # as revision step-5000
    python publish.py --run runs/x --repo me/llama-125m-base --milestones --final --private
    python publish.py --run runs/x --repo me/llama-125m-base --dry_run --output DIR        # writes the files only
    python publish.py --verify me/llama-125m-base                                          # or a folder
    python publish.py --run runs/x --repo me/llama-125m-base --sign key.pem                # and signed

Log in once with `hf auth login`, or set HF_TOKEN. Run the same command again to resume an interrupted upload.
Repository, licence and language can be set in the recipe (hub.repository, publish.license, publish.language).
"""

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pretrain.errors import EXIT_INTERRUPTED, InputError, Problems, did_you_mean, run_script

if TYPE_CHECKING:
    from pretrain_tools.publishing.publish import Model

EXIT_NOT_PUBLISHED = 1
"""Also where --verify finds a difference."""
LONGEST_WAIT_SECONDS = 3600


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--run", type=Path, metavar="RUN", help="folder of the run")
    add("--repo", metavar="OWNER/NAME", help="repository on the Hub; created if it does not exist [the recipe's]")
    add("--checkpoint", nargs="+", default=[], metavar="STEP", help="checkpoints, each a revision step-STEP; or best")
    add("--milestones", action="store_true", help="all checkpoints that checkpoint.milestones_every keeps")
    add("--final", action="store_true", help="publish final/ as main; the default")
    add("--with_optimizer", action="store_true", help="whole checkpoints, fp32 weights and optimizer")
    add("--private", action="store_true", help="make the repository private [the recipe's; else public]")
    add("--license", metavar="ID", help="licence id of the Hub, such as apache-2.0 [the recipe's]")
    add("--language", nargs="+", default=[], metavar="CODE", help="languages of the text, such as en [the recipe's]")
    add("--message", metavar="TEXT", help="commit message [step and tokens]")
    add("--dry_run", action="store_true", help="write what would be uploaded to --output, and upload nothing")
    add("--output", type=Path, metavar="DIR", help="with --dry_run: a folder, one subfolder per revision")
    add("--attempts", default="1", metavar="N", help="number of attempts; the wait between them doubles [1]")
    add("--first_wait", default="30", metavar="SECONDS", help="before the second attempt; doubles, up to an hour [30]")
    beside = "used by train.py: records the outcome in metrics.jsonl and adds the scores of a late evaluation to the "
    add("--beside_training", action="store_true", help=f"{beside}card")
    verify = "check every file of what was published, a folder or OWNER/NAME[@REVISION]; alone"
    add("--verify", metavar="PLACE", help=verify)
    add("--sign", type=Path, metavar="KEY", help="sign the folder with a private elliptic key in PEM (model-signing)")
    add("--public_key", type=Path, metavar="KEY", help="with --verify: of the signature, in PEM")
    return parser


def read_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The command line, and what is wrong with it as far as can be told without the run."""
    parser = build_parser()
    arguments, unknown = parser.parse_known_args(argv)
    flags = [flag for action in parser._actions for flag in action.option_strings]
    problems = [f"{word}: unknown{did_you_mean(word, flags)}" for word in unknown]
    steps = [text.replace(",", "").removeprefix("step-") for text in arguments.checkpoint]
    known = [text for text in steps if text.isdecimal() or text == "best"]
    problems += [f"--checkpoint {text}: must be a step, as 5000, or best" for text in steps if text not in known]
    arguments.checkpoint = [text if text == "best" else int(text) for text in known]
    for name, least in (("attempts", 1), ("first_wait", 0)):
        text = getattr(arguments, name)
        if text.isdecimal() and int(text) >= least:
            setattr(arguments, name, int(text))
        else:
            problems.append(f"--{name} {text}: must be a whole number from {least}")
    if arguments.verify is not None:
        given = [flag for flag in flags if any(word.partition("=")[0] == flag for word in argv)]
        problems += [f"{flag}: not with --verify" for flag in given if flag not in ("--verify", "--public_key")]
        return arguments, problems
    if arguments.public_key is not None:
        problems.append("--public_key: only valid with --verify")
    if arguments.dry_run and arguments.output is None:
        problems.append("--dry_run: give --output DIR, the folder for the files that would be uploaded")
    if arguments.output is not None and not arguments.dry_run:
        problems.append("--output: only valid with --dry_run; without it everything is uploaded to the Hub")
    return arguments, problems


def add_recipe(arguments: argparse.Namespace) -> list[str]:
    """Fills in from the run's recipe what the command line does not set; returns what is still missing or wrong."""
    from pretrain.runs.run_folder import read_config, setting

    if arguments.run is None:
        return ["--run is missing: give the folder of a run, such as runs/x"]
    if not (arguments.run / "config.yaml").is_file():
        return [f"--run {arguments.run}: not the folder of a run (it has no config.yaml)"]
    config = read_config(arguments.run)
    arguments.repo = arguments.repo or setting(config, "hub.repository")
    arguments.private = arguments.private or bool(setting(config, "hub.private"))
    arguments.license = arguments.license or setting(config, "publish.license")
    language = arguments.language or setting(config, "publish.language") or []
    arguments.language = [language] if isinstance(language, str) else list(language)
    arguments.dtype = setting(config, "export.dtype")
    return []


def publish_all(arguments: argparse.Namespace, models: list["Model"]) -> None:
    """Stages and uploads one model after the other. Raises PublishError."""
    from pretrain.processes import is_held, wait_until_free
    from pretrain.runs.hub import STAGING, evaluation_log
    from pretrain.runs.run_folder import checkpoint_name
    from pretrain_tools.publishing.hub_upload import open_repository
    from pretrain_tools.publishing.publish import writing_to

    staging, url = arguments.output or arguments.run / STAGING, ""
    with writing_to(staging):
        staging.mkdir(parents=True, exist_ok=True)
    if not arguments.dry_run:
        url = insist(arguments, lambda: open_repository(arguments.repo, private=arguments.private))
    for model in models:
        publish_one(arguments, model, staging, url)
    for model in models if arguments.beside_training else []:
        log = evaluation_log(arguments.run, checkpoint_name(model.step))
        if is_held(log):
            print(f"{model.revision}: waiting for evaluation scores, {log}", flush=True)
            wait_until_free(log)
            publish_one(arguments, model, staging, url)


def publish_one(arguments: argparse.Namespace, model: "Model", staging: Path, url: str) -> None:
    """Stages one model and, unless this is a dry run, makes its revision hold that. Raises PublishError."""
    from pretrain.processes import folder_lock
    from pretrain.runs.hub import waiting_mark
    from pretrain_tools.publishing.card import Publication
    from pretrain_tools.publishing.hub_upload import upload
    from pretrain_tools.publishing.publish import stage, writing_to

    license, languages = arguments.license, tuple(arguments.language)
    publication = Publication(arguments.repo, license=license, languages=languages, dtype=arguments.dtype)
    folder = staging / model.revision
    # One process per revision: two that stage it at once would send each other's halves.
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
            commit = insist(arguments, partial(upload, folder, model, arguments.repo, message=arguments.message))
        finally:
            shutil.rmtree(folder)
    print(f"{model.revision} is at {url}/tree/{model.revision}, commit {commit[:12]}", flush=True)
    waiting_mark(arguments.run, model.revision).unlink(missing_ok=True)
    note(arguments, step=model.step, revision=model.revision, commit=commit)


def note(arguments: argparse.Namespace, **facts: object) -> None:
    """Records an upload during training in the run's metrics.jsonl: nobody watches its output."""
    from pretrain.runs.history import append_events

    if arguments.beside_training and arguments.run:
        event = {"event": "publish", **facts, "repository": arguments.repo, "time": round(time.time(), 3)}
        try:
            append_events(arguments.run, [event])
        except OSError as error:
            print(f"could not be recorded in metrics.jsonl ({error})", file=sys.stderr)


def insist(arguments: argparse.Namespace, act: Callable[[], str]) -> str:
    """What `act` returns, retried as the command line says. Raises the last PublishError."""
    from pretrain_tools.publishing.publish import PublishError

    for attempt in range(1, arguments.attempts):
        try:
            return act()
        except PublishError as failure:
            if attempt == 1:
                note(arguments, problem=f"{failure}; retrying")
            wait = min(arguments.first_wait * 2 ** (attempt - 1), LONGEST_WAIT_SECONDS)
            text = f"{failure}\nattempt {attempt} of {arguments.attempts}; the next in {wait} s"
            print(text, file=sys.stderr, flush=True)
            time.sleep(wait)
    return act()


def find_all(arguments: argparse.Namespace, problems: list[str]) -> list["Model"]:
    """The models to publish. Raises InputError with the problems given and all that can be found without the Hub."""
    from pretrain.runs.hub import login_problems, offer_problems
    from pretrain_tools.publishing.publish import find_publishable
    from pretrain_tools.publishing.signature import load_signer

    problems = Problems(problems)
    unusable = add_recipe(arguments)
    problems += unusable
    flags = ("--repo", "--license", "--language")
    problems += offer_problems(arguments.repo, arguments.license, arguments.language, flags)
    problems += [] if arguments.dry_run else login_problems()
    if arguments.sign is not None:
        problems.attempt(load_signer, arguments.sign)
    models = []
    if not unusable:
        wanted = {"steps": arguments.checkpoint, "milestones": arguments.milestones, "final": arguments.final}
        wanted["with_optimizer"] = arguments.with_optimizer
        models = problems.attempt(find_publishable, arguments.run, **wanted) or []
    if output := arguments.output:
        if output.exists() and not output.is_dir():
            problems.append(f"--output {output}: is a file; give a folder")
        taken = [model.revision for model in models if (output / model.revision).exists()]
        problems += [f"--output {output}: already contains {name}; give another" for name in taken]
    problems.stop_if_any()
    return models


def verify(place: str, public_key: Path | None) -> int:
    """Prints what differs from what was published and signed, each file by name."""
    from pretrain.files import SIGNATURE_FILE
    from pretrain_tools.publishing.provenance import provenance_problems, provenance_text, published_folder
    from pretrain_tools.publishing.signature import load_verifier, signature_problems

    verifier = load_verifier(public_key) if public_key is not None else None
    folder = published_folder(place)
    problems, is_signed = provenance_problems(folder), (folder / SIGNATURE_FILE).exists()
    if verifier is not None and is_signed:
        problems += signature_problems(folder, verifier)
    elif verifier is not None and not any(problem.startswith(SIGNATURE_FILE) for problem in problems):
        problems.append(f"{SIGNATURE_FILE} is missing: it is not signed")
    if problems:
        print("\n".join(f"{place}: {problem}" for problem in problems))
        return EXIT_NOT_PUBLISHED
    print(f"{place}: {provenance_text(folder)}")
    if is_signed and verifier is None:
        raise InputError(
            f"--public_key is missing: {place} is signed, and that was not checked; give the signer's key"
        )
    print(
        f"signed by the owner of {public_key}" if is_signed else "not signed: anyone who can write it can have made it"
    )
    return 0


def main(argv: list[str]) -> int:
    arguments, problems = read_arguments(argv)  # before torch is imported: --help and a mistyped flag answer at once
    if arguments.verify is not None:
        if problems:
            raise InputError(*problems)
        return verify(arguments.verify, arguments.public_key)
    from pretrain_tools.publishing.publish import PublishError

    try:
        publish_all(arguments, find_all(arguments, problems))
    except PublishError as failure:
        note(arguments, problem=str(failure))
        print(failure, file=sys.stderr)
        return EXIT_NOT_PUBLISHED
    except InputError as error:
        note(arguments, problem="; ".join(error.problems))
        raise
    except KeyboardInterrupt:
        print("\ninterrupted; run the same command to resume", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    run_script(lambda: main(sys.argv[1:]))
