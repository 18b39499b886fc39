"""Upload of a finished folder through huggingface_hub, which hashes, resumes and splits large files itself."""

import os
from pathlib import Path

import httpx
from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from swapq.checkpoint.record import SCRATCH_NAME
from swapq.checkpoint.verify import verify
from swapq.errors import CheckpointError

__all__ = ["check_repository", "upload"]


def check_repository(repository: str) -> None:
    """Refuse a name that no repository on the Hub can have, before hours of work are done for it.

    Raises:
        CheckpointError: with the Hub's reason.
    """
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise CheckpointError(f"{repository!r} is no repository on the Hub ({error}); name it owner/name") from None


def upload(
    directory: "str | os.PathLike[str]",
    repository: str,
    *,
    private: bool = False,
    token: str | None = None,
    message: str = "Upload quantized checkpoint",
) -> str:
    """Create ``repository`` if need be and upload the folder in one commit. The address of the commit.

    Raises:
        CheckpointError: a name that no repository can have, a folder that does not verify or has no model card, a Hub that refuses or
            cannot be reached.
    """
    check_repository(repository)
    folder = Path(directory)
    report = verify(folder)
    if not report.ok:
        raise CheckpointError(f"{directory}: does not verify ({report.problems[0]}); nothing was uploaded")
    if not (folder / "README.md").exists():
        raise CheckpointError(f"{directory}: has no README.md; write the model card first (`swapq card`)")
    api = HfApi(token=token)
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        done = api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message=message, ignore_patterns=[f"{SCRATCH_NAME}/**"]
        )
    except (httpx.HTTPError, OSError) as error:  # every error of huggingface_hub about the network is one of these
        raise CheckpointError(
            f"{repository}: the Hub refused or cannot be reached ({error}); nothing in {directory} has changed, run the same command again"
        ) from error
    return done.commit_url
