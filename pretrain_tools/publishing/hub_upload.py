"""Uploads models with huggingface_hub, which skips files that were already uploaded.

During training, this module runs in a separate process.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pretrain.errors import InputError
from pretrain.files import PICTURE_FILE, SEAL_FILE, SIGNATURE_FILE
from pretrain.units import count_text
from pretrain_tools.publishing.staging import Model

if TYPE_CHECKING:
    from huggingface_hub import HfApi

REPLACED_ON_HUB = [
    "*.safetensors", "*.safetensors.index.json", "*.py", PICTURE_FILE, "trainer_state.json", SEAL_FILE,
    SIGNATURE_FILE,
]  # fmt: skip
"""Patterns of files to delete from the repository unless the uploaded model contains them."""


class PublishError(Exception):
    """Raised if the disk, the network or the Hub fails. The same command resumes the upload."""


def open_repository(repository: str, *, private: bool) -> str:
    """Creates the repository if it doesn't exist. Returns its URL.

    Raises InputError for problems with the login, permissions or visibility, and PublishError for others.
    """
    with hub_api(repository) as api:
        # Detect an invalid token before creating anything.
        api.whoami()
        url = api.create_repo(repository, private=private, exist_ok=True)
        # create_repo doesn't change the visibility of an existing repository.
        if private and not api.model_info(repository).private:
            raise InputError(
                f"{repository} already exists and is public; make it private in its settings on the Hub, publish "
                "without --private, or set hub.private: false in the recipe and in the run's config.yaml"
            )
    return str(url)


def upload(folder: Path, model: Model, repository: str) -> str:
    """Uploads a folder to the model's branch. Returns the commit hash.

    Raises InputError if the Hub rejects the model card, and PublishError for other failures.
    """
    tokens = f", {count_text(model.tokens)} tokens" if model.tokens else ""
    with hub_api(repository) as api:
        # upload_folder doesn't create branches.
        if model.revision != "main":
            api.create_branch(repository, branch=model.revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            revision=model.revision,
            commit_message=f"Step {model.step:,}{tokens}",
            delete_patterns=REPLACED_ON_HUB,
        )
    return commit.oid


@contextmanager
def hub_api(repository: str) -> Iterator["HfApi"]:
    """Yields the Hub's API. Converts its errors to InputError or PublishError, and removes the token from them."""
    from huggingface_hub import HfApi, constants, get_token

    api = HfApi(token=get_token())
    try:
        yield api
    except InputError:
        raise
    except Exception as error:  # the network, the server and several libraries raise many types
        response = getattr(error, "response", None)
        status = getattr(response, "status_code", None)
        text = " ".join(str(error).split())[:500].replace(api.token, "***")
        if status == 401:
            raise InputError(
                f"{constants.ENDPOINT} rejected the token; log in again with `hf auth login`, or set HF_TOKEN"
            ) from None
        if status == 403:
            raise InputError(
                f"--repo {repository}: the token has no write access ({text}); use a token with write access, or a "
                "repository in your own account or organization"
            ) from None
        if isinstance(error, ValueError) and "README.md" in text:
            why = " ".join(str(error.__cause__ or error).split())
            raise InputError(f"the Hub rejected the model card: {why}; see --license and --language") from None
        raise PublishError(
            f"publishing to {repository} at {constants.ENDPOINT} failed: {type(error).__name__}: {text or 'no reason'}"
            "\nThe run is unchanged, and uploaded files are kept; run the same command to resume."
        ) from error
