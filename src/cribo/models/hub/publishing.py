"""Repositories on the Hugging Face hub for backbones: checked before any work, and written in one commit."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cribo.base.errors import InputError
from cribo.base.job import RECORD
from cribo.models.hub.download import LOG_IN, WEIGHTS, HubName, address, explained_errors, hub_name
from cribo.models.licences import README, split_header

OUTDATED = (
    *(file for file in WEIGHTS if file != "model.safetensors"),
    "backbone.json",
    *("model-*-of-*.safetensors", "pytorch_model-*-of-*.bin", "*.index.json", "tf_model.h5", "flax_model.msgpack"),
    *("preprocessor_config.json", "open_clip_config.json", "config.yaml", "variant.yml"),
    *("export.json", "evaluation/*"),
)
"""Patterns of files that describe the former weights of a repository, or that readers would prefer to the new ones.

Files that are uploaded in the same commit are kept.
"""

_HUBS_OWN = ".gitattributes"
_LISTED = 4


@contextlib.contextmanager
def publishing_to(
    repo: str,
    *,
    overwrite: bool = False,
    private: bool | None = None,
    token: str | bool | None = None,
    branch: str | None = None,
) -> Iterator[None]:
    """Check a repository, then run the upload to a branch in this context; errors say what remains and what to do.

    Raises:
        errors of `require_publishable`; InputError: the hub refuses the upload; ConnectionError: the upload failed. In
            both cases nothing was committed.
    """
    is_new = not require_publishable(repo, overwrite=overwrite, private=private, token=token)
    try:
        with explained_errors(HubName(repo, branch), writing=True):
            yield
    except (ConnectionError, InputError) as error:
        if is_new and _exists(repo, token):
            raise type(error)(
                f"{error}. The new repository {address(repo)} remains and is empty: repeat the command, which uses it, "
                "or delete it in its settings"
            ) from error
        if isinstance(error, InputError):
            raise
        raise ConnectionError(
            f"{error}. The files of {address(repo)} are unchanged, because all are committed at once: repeat the "
            "command"
        ) from error


def require_publishable(
    repo: str, *, overwrite: bool = False, private: bool | None = None, token: str | bool | None = None
) -> bool:
    """Check that a backbone can be published in a repository; return whether the repository exists.

    Args:
        repo: owner/name.
        overwrite: allow other files in the repository.
        private: whether the repository shall be private.
        token: token of the hub; by default that of `hf auth login` or HF_TOKEN.

    Raises:
        InputError: the name is malformed; the token is missing, invalid or may not write; the repository is public and
            `private` is set; or it contains files, and `overwrite` is not set.
        ConnectionError: the hub cannot be reached.
    """
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    name = _repository(repo)
    if constants.HF_HUB_OFFLINE:
        raise InputError("HF_HUB_OFFLINE=1 is set, and publishing needs the network: unset it")
    if not isinstance(token, str) and get_token() is None:
        raise InputError(
            f"no token for the Hugging Face hub: create one that may write to {repo} at "
            f"{address('settings/tokens')}, then {LOG_IN}"
        )
    api = HfApi(token=token)
    with explained_errors(name, writing=True):
        _require_writer(repo, api.whoami())
        try:
            found = api.model_info(repo, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        except GatedRepoError:
            raise
        except RepositoryNotFoundError:
            return False
        if private and not found.private:
            raise InputError(
                f"{address(repo)} exists and is public: make it private in its settings, or omit --private"
            )
        files = [file.rfilename for file in found.siblings or ()]
        if not overwrite:
            _require_empty(repo, files, token)
    return True


def _exists(repo: str, token: str | bool | None) -> bool:
    """Whether a repository exists; False if the hub does not answer."""
    from huggingface_hub import HfApi, constants

    try:
        HfApi(token=token).model_info(repo, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception:  # the client's errors have no common base; the first error is the one to report
        return False
    return True


def _repository(repo: str) -> HubName:
    """Parse owner/name."""
    malformed = f"--repo (repo_id) must be owner/name, the name of a repository on the Hugging Face hub, got {repo!r}"
    if repo.startswith("hf:"):
        raise InputError(malformed)
    try:
        name = hub_name(f"hf://{repo}")
    except InputError as error:
        raise InputError(malformed) from error
    if name is None or name != HubName(repo):
        raise InputError(malformed)
    return name


def _require_writer(repo: str, user: Mapping[str, Any]) -> None:
    owner, own = repo.split("/")[0], user.get("name")
    token = user.get("auth", {}).get("accessToken", {})
    if token.get("role") == "read":
        raise InputError(
            f"the token {token.get('displayName', '')!r} may only read: create one that may write at "
            f"{address('settings/tokens')}, then {LOG_IN}"
        )
    organisations = [each.get("name") for each in user.get("orgs", ())]
    if owner not in (own, *organisations):
        owners = " or ".join([str(own), *organisations])
        raise InputError(f"the token is of {own}, who cannot write to {repo}: the owner must be {owners}")


def _require_empty(repo: str, files: Sequence[str], token: str | bool | None) -> None:
    """Raise an error if a repository contains more than the hub writes to a new one."""
    others = [file for file in files if file != _HUBS_OWN]
    if others == [README] and not _has_text(repo, token):
        return
    if not others:
        return
    listed = ", ".join(others[:_LISTED]) + (", ..." if len(others) > _LISTED else "")
    what = "an earlier export" if RECORD in files else "other files"
    raise InputError(
        f"{address(repo)} contains {what} ({listed}): choose another repository, or set --overwrite (overwrite=True), "
        "which replaces the weights and their description in a new commit (earlier commits are kept)"
    )


def _has_text(repo: str, token: str | bool | None) -> bool:
    """Whether the README.md of a repository contains more than the header that the hub writes."""
    from huggingface_hub import hf_hub_download

    text = Path(hf_hub_download(repo, README, token=token)).read_text(encoding="utf-8", errors="replace")
    return bool(split_header(text)[1].strip())
