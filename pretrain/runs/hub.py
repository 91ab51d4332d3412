"""Checks a run's Hub settings, and defines the paths and names used to publish it."""

import re
from pathlib import Path

from pretrain.runs.run_folder import EVALUATIONS

STAGING = "publish"
"""Subfolder of a run for staged models and the log of background publishing."""
LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Za-z]{2,8})?|multilingual|code")
WAITING = ".waiting"


def offer_problems(
    repository: str | None,
    license: str | None,
    languages: list[str],
    named: tuple[str, str, str] = ("hub.repository", "publish.license", "publish.language"),
) -> list[str]:
    """Lists problems with the repository, license and languages that can be detected offline.

    named: names of the three settings, for messages.
    """
    problems = repository_problems(repository, named[0])
    if not license:
        problems.append(
            f"{named[1]} is missing, but publishing requires a license; set one, such as apache-2.0 (with "
            "--license, or publish.license in the recipe)"
        )
    elif not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", license):
        problems.append(
            f"{named[1]} {license}: not a Hub license ID, such as apache-2.0, mit or other; see "
            "https://huggingface.co/docs/hub/repositories-licenses"
        )
    problems += [
        f"{named[2]} {code}: must be an ISO 639 code (such as en or de), multilingual or code"
        for code in languages
        if not LANGUAGE.fullmatch(code)
    ]
    return problems


def repository_problems(repository: str | None, named: str) -> list[str]:
    """Returns [problem] if this isn't a valid OWNER/NAME, otherwise []."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if not repository:
        return [f"{named} is missing; set it to OWNER/NAME (your Hub account or organization, and the model's name)"]
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        return [f"{named} {repository}: {' '.join(str(error).split())}"]
    return [] if "/" in repository else [f"{named} {repository}: must be OWNER/NAME, such as me/{repository}"]


def login_problems() -> list[str]:
    """Returns [problem] if there is no Hub token in the environment or login store. Doesn't validate the token."""
    from huggingface_hub import get_token

    if get_token():
        return []
    return ["not logged in to the Hub: run `hf auth login`, or set HF_TOKEN to a token with write access"]


def evaluation_log(run: Path, checkpoint: str) -> Path:
    """Returns the path of a checkpoint's evaluation log, which the evaluation holds open (see processes.py)."""
    return run / EVALUATIONS / f"{checkpoint}.log"


def revision_of(step: int) -> str:
    """Returns the name of a checkpoint's branch on the Hub."""
    return f"step-{step}"


def waiting_mark(run: Path, revision: str) -> Path:
    """Returns the path of the marker file that exists while a model is being published."""
    return run / STAGING / f".{revision}{WAITING}"
