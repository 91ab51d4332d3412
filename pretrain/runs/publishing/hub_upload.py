"""Uploads by huggingface_hub, which skips what is there already: the same call completes an interrupted upload.

Also in a process of its own during training.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pretrain.errors import InputError, did_you_mean
from pretrain.files import SEAL_FILE, SIGNATURE_FILE
from pretrain.parallel.launcher import environment_alone
from pretrain.processes import hold_while_open, is_held
from pretrain.runs.publishing.card import PICTURE_FILE
from pretrain.runs.publishing.publish import STAGING, Model, PublishError, revision_of
from pretrain.runs.run_folder import checkpoint_name
from pretrain.units import count_text

REPLACED_ON_HUB = (
    "*.safetensors", "*.safetensors.index.json", "*.py", PICTURE_FILE, "trainer_state.json", SEAL_FILE,
    SIGNATURE_FILE,
)  # fmt: skip
"""Files of an earlier model that stay in the repository unless this one replaces them."""
LICENSES = (
    "apache-2.0", "mit", "bsd-3-clause", "cc0-1.0", "cc-by-4.0", "cc-by-sa-4.0", "cc-by-nc-4.0", "cc-by-nc-sa-4.0",
    "gpl-3.0", "agpl-3.0", "lgpl-3.0", "mpl-2.0", "openrail", "bigscience-openrail-m", "odc-by", "unlicense", "other",
)  # fmt: skip
"""The common ones of the Hub's licence ids, for suggestions: the Hub itself has the last word."""
LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Za-z]{2,8})?|multilingual|code")
BACKGROUND_ATTEMPTS = 10
WAITING = ".waiting"


def offer_problems(
    repository: str | None,
    license: str | None,
    languages: list[str],
    named: tuple[str, str, str] = ("hub.repository", "publish.license", "publish.language"),
) -> list[str]:
    """What is wrong with a repository, a licence and languages, as far as can be told without the Hub.

    named: the three settings, in messages.
    """
    problems = repository_problems(repository, named[0])
    if not license:
        problems.append(
            f"{named[1]} is missing: a licence is required; give one, such as apache-2.0 (--license on "
            "the command line, publish.license in the recipe)"
        )
    elif not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", license):
        near = did_you_mean(license.lower().replace(" ", "-"), LICENSES)
        problems.append(f"{named[1]} {license}: not a licence id of the Hub{near}")
    problems += [
        f"{named[2]} {code}: must be an ISO 639 code, as en or de, or multilingual, or code"
        for code in languages
        if not LANGUAGE.fullmatch(code)
    ]
    return problems


def repository_problems(repository: str | None, named: str) -> list[str]:
    """Why this cannot be OWNER/NAME; [] if it can."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if not repository:
        return [f"{named} is missing: give OWNER/NAME, your account or organisation on the Hub and the model's name"]
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        return [f"{named} {repository}: {' '.join(str(error).split())}"]
    return [] if "/" in repository else [f"{named} {repository}: give OWNER/NAME, such as me/{repository}"]


def login_problems() -> list[str]:
    """Whether a token is in the environment or the login store; not whether the Hub takes it."""
    from huggingface_hub import get_token

    if get_token():
        return []
    return ["not logged in to the Hub: run `hf auth login`, or set HF_TOKEN to a token with write access"]


def publish_in_background(
    run: Path, repository: str, *, step: int | None, private: bool, license: str, languages: list[str]
) -> str | None:
    """Starts publish.py for a checkpoint, or for final/ where step is None, and returns at once.

    It outlives this process, retries, writes to RUN/publish/publish.log and records the outcome in metrics.jsonl.
    Returns why it could not be started; None if it was. The step's checkpoint must be committed, and kept.
    """
    command = [sys.executable, str(Path(__file__).parents[3] / "publish.py"), "--run", str(run), "--repo", repository]
    command += ["--final"] if step is None else ["--checkpoint", str(step)]
    command += ["--license", license, "--attempts", str(BACKGROUND_ATTEMPTS), "--beside_training"]
    command += ["--language", *languages] if languages else []
    command += ["--private"] if private else []
    revision = "main" if step is None else revision_of(step)
    if shutil.which("nice"):
        command = ["nice", "-n", "10", *command]
    environment = environment_alone()
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    try:
        (run / STAGING).mkdir(exist_ok=True)
        with open(run / STAGING / "publish.log", "ab") as log, open(waiting_mark(run, revision), "a+b") as mark:
            hold_while_open(mark)
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                # The signals and the end of the training must not reach it.
                start_new_session=True,
                pass_fds=[mark.fileno()],
            )
    except OSError as error:
        return f"publishing to {repository} could not be started ({error}); run publish.py yourself"
    return None


def waiting_mark(run: Path, revision: str) -> Path:
    """A file that exists from when training starts to publish a model until the model is on the Hub."""
    return run / STAGING / f".{revision}{WAITING}"


def cut_short(run: Path) -> list[int | None]:
    """The steps (None: final/) whose uploads a crash interrupted and whose models still exist."""
    steps = []
    for mark in sorted((run / STAGING).glob(f".*{WAITING}")):
        revision = mark.name.removeprefix(".").removesuffix(WAITING)
        step = None if revision == "main" else int(revision.removeprefix("step-"))
        folder = run / "final" if step is None else run / "checkpoints" / checkpoint_name(step)
        if not folder.is_dir():
            mark.unlink()
        elif not is_held(mark):
            steps.append(step)
    return steps


def open_repository(repository: str, *, private: bool) -> str:
    """Creates the repository if it does not exist; returns its URL.

    Raises InputError for what the user must change (login, rights, visibility), PublishError for all else.
    """
    from huggingface_hub import HfApi, get_token

    api = HfApi(token=get_token())
    with hub_errors(repository, api.token):
        api.whoami()
        url = api.create_repo(repository, private=private, exist_ok=True)
        if private and not api.model_info(repository).private:
            raise InputError(
                f"{repository} is already public, not private as requested: make it private in its settings on the "
                "Hub, or publish without --private"
            )
    return str(url)


def upload(folder: Path, model: Model, repository: str, *, message: str | None) -> str:
    """Makes the model's branch of an existing repository hold this folder; returns the commit.

    Raises InputError where the Hub refuses the model card, PublishError for all else.
    """
    from huggingface_hub import HfApi, get_token

    api = HfApi(token=get_token())
    tokens = f", {count_text(model.tokens)} tokens" if model.tokens else ""
    with hub_errors(repository, api.token):
        if model.revision != "main":
            api.create_branch(repository, branch=model.revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            revision=model.revision,
            commit_message=message or f"Step {model.step:,}{tokens}",
            delete_patterns=list(REPLACED_ON_HUB),
        )
        set_tag(api, repository, model)
    return commit.oid


def set_tag(api: Any, repository: str, model: Model) -> None:
    """Points the model's tag at its branch, unless the tag is that of another step: two may round to one name."""
    if model.tag is None:
        return
    references = api.list_repo_refs(repository)
    heads = {branch.name: branch.target_commit for branch in references.branches}
    tagged = {tag.name: tag.target_commit for tag in references.tags}.get(model.tag)
    if tagged == heads[model.revision]:
        return
    others = [name for name, commit in heads.items() if commit == tagged and name.startswith("step-")]
    if others:
        print(f"{model.tag} stays with {others[0]}: the two steps have the same rounded number of tokens")
        return
    if tagged is not None:
        api.delete_tag(repository, tag=model.tag)
    api.create_tag(repository, tag=model.tag, revision=model.revision)


@contextmanager
def hub_errors(repository: str, token: str) -> Iterator[None]:
    """Turns errors of the Hub into InputError or PublishError, in words and without the token."""
    from huggingface_hub import constants

    try:
        yield
    except InputError:
        raise
    except Exception as error:  # whatever the network, the server and three libraries may raise
        response = getattr(error, "response", None)
        status = getattr(response, "status_code", None)
        text = " ".join(str(error).split())[:500].replace(token, "***")
        if status == 401:
            raise InputError(
                f"{constants.ENDPOINT} does not accept the token: log in again with `hf auth login`, or set HF_TOKEN"
            ) from None
        if status == 403:
            raise InputError(
                f"--repo {repository}: the token may not write there ({text}); use a token with write access, or a "
                "repository of your own account or organisation"
            ) from None
        if isinstance(error, ValueError) and "README.md" in text:
            why = " ".join(str(error.__cause__ or error).split())
            raise InputError(f"the Hub does not accept the model card: {why}; see --license and --language") from None
        raise PublishError(
            f"publishing to {repository} at {constants.ENDPOINT} failed: {type(error).__name__}: {text or 'no reason'}"
            "\nThe run is unchanged and uploaded files are kept: run the same command to resume."
        ) from error
