"""Upload of a finished folder through huggingface_hub, which hashes, resumes and splits large files itself."""

import os
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

from swapq.checkpoint.record import SCRATCH_NAME
from swapq.checkpoint.verify import verify
from swapq.errors import CheckpointError

__all__ = ["upload"]


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
        CheckpointError: the folder does not verify, has no model card, or the Hub refuses.
    """
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
    except HfHubHTTPError as error:
        raise CheckpointError(
            f"{repository}: the Hub refused ({error}); nothing in {directory} has changed, run the same command again"
        ) from error
    return done.commit_url
