"""Weights on the Hugging Face hub, named `hf://owner/name`, `hf://owner/name@revision` or `hf://owner/name/path`."""

import contextlib
import difflib
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from cribo.base.errors import InputError

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

_logger = logging.getLogger(__name__)

_SCHEME = "hf://"
_ADDRESS = re.compile(
    r"(?:hf-hub:|https?:/+(?:www\.)?(?:huggingface\.co|hf\.co)/)?(?P<repo>[\w-][\w.-]*/[\w.-]+?)(?:@(?P<version>[^/@]+))?"
    r"(?:/(?:tree|blob|resolve)/(?P<revision>[^/]+)(?P<path>/.+?)?)?/?"
)
_NAME = re.compile(r"hf://(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>refs/pr/\d+|(?!refs/)[^/@]+))?(/(?P<path>[^@]+?))?/?")

WEIGHTS = (
    *("backbone.safetensors", "model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
"""Names of weights in a folder, the first that exists is used; an index names the files into which they are split."""

SHARD_INDEX = ".index.json"
"""Suffix of the file that names the files into which transformers splits weights."""

_README, _CONFIG, _DESCRIPTION = "README.md", "config.json", "backbone.json"
_BESIDE = (
    _README,
    _CONFIG,
    _DESCRIPTION,
    "cribo.json",
    "preprocessor_config.json",
    "open_clip_config.json",
    "config.yaml",
    "variant.yml",
)
WEIGHT_SUFFIXES = (".safetensors", ".pth", ".pt", ".ckpt", ".bin", ".tar", ".npz", ".msgpack")
_LISTED = 5

LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"


class HubName(NamedTuple):
    """A repository on the hub, or a file or folder in it; `revision` is a branch, tag or commit."""

    repo: str
    revision: str | None = None
    path: str = ""

    @property
    def short(self) -> str:
        """Name of the repository, or of the file or folder in it, for tables and folders."""
        path = PurePosixPath(self.path)
        if path.name in WEIGHTS:
            path = path.parent
        named = path.name.removesuffix(path.suffix) if path.suffix in WEIGHT_SUFFIXES else path.name
        return named or self.repo.rpartition("/")[2]

    def __str__(self) -> str:
        """The name, such as hf://owner/name@revision/path."""
        revision = f"@{self.revision}" if self.revision else ""
        return f"{_SCHEME}{self.repo}{revision}{'/' if self.path else ''}{self.path}"


class Download(NamedTuple):
    """Downloaded weights: their name, their file in the hub's cache, its commit, and README.md of the repository."""

    name: HubName
    path: Path
    commit: str
    readme: Path


def hub_name(source: str | Path) -> HubName | None:
    """Parse the name of weights on the hub; None for other sources.

    Raises:
        InputError: the name starts with `hf:` but is malformed.

    Example:
        >>> hub_name("hf://owner/name@v1/encoder/model.safetensors")
        HubName(repo='owner/name', revision='v1', path='encoder/model.safetensors')
        >>> hub_name("runs/camvid") is None
        True
    """
    text = str(source)
    if isinstance(source, Path):  # a Path merges the slashes
        text = re.sub(r"^hf:/+", _SCHEME, source.as_posix())
    if not re.match(r"hf:", text):
        return None
    found = _NAME.fullmatch(text)
    if found is None or {"", ".", ".."} & {*(found["path"] or "-").split("/")}:
        raise InputError(
            f"{text!r} is not a name on the Hugging Face hub: write hf://owner/name, hf://owner/name@revision (a "
            "branch or tag without slashes, a commit, or refs/pr/N) or "
            "hf://owner/name/file"
        )
    return HubName(found["repo"], found["revision"], found["path"] or "")


def suggested_name(source: str | Path) -> HubName | None:
    """Guess the repository that a source refers to, such as the address of its page; None if it refers to none.

    Example:
        >>> print(suggested_name("hf-hub:owner/name"), suggested_name("https://huggingface.co/owner/name/tree/v1/run"))
        hf://owner/name hf://owner/name@v1/run
        >>> suggested_name("runs/a/b") is suggested_name("/data") is None
        True
    """
    found = _ADDRESS.fullmatch(source.as_posix() if isinstance(source, Path) else source)
    if found is None or found["repo"].endswith(WEIGHT_SUFFIXES):
        return None
    revision = found["version"] or found["revision"]
    return HubName(found["repo"], None if revision == "main" else revision, (found["path"] or "").strip("/"))


def source_name(source: str) -> str:
    """Return a name of weights without local paths: a timm name, the name on the hub, or that of the file or run.

    Example:
        >>> source_name("hf://owner/name@main"), source_name("runs/camvid/backbone.safetensors")
        ('hf://owner/name@main', 'camvid')
    """
    if source.startswith(_SCHEME):
        return source
    path = Path(source)
    is_home = path.parent.absolute().parent.name in ("home", "Users")  # its name is that of a user
    if path.name in WEIGHTS and len(path.parts) > 1 and not is_home and path.parent.absolute() != Path.home():
        return path.parent.name or path.name
    return path.name


# --------------------------------------------------------------------------------------------------------- reading


def download(
    name: HubName,
    *,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    force: bool = False,
    local: bool = False,
) -> Download:
    """Download the weights of a repository and the small files that describe them, into the hub's cache.

    Without a connection, or with HF_HUB_OFFLINE=1, a cached copy is used.

    Args:
        name: the repository, or a file or folder in it.
        token: token of the hub; by default that of `hf auth login` or HF_TOKEN.
        cache_dir: cache to use instead of the hub's own.
        force: download again.
        local: use the cache only.

    Raises:
        InputError: the repository, revision or file does not exist, is private or gated, or contains no weights.
        ConnectionError: the hub cannot be reached, and the weights are not cached.
    """
    from huggingface_hub import HfApi, constants, hf_hub_download

    where = None if cache_dir is None else str(cache_dir)
    with explained_errors(name):
        try:
            if local:
                raise ConnectionError("only the cache is used")
            timeout = constants.HF_HUB_ETAG_TIMEOUT
            found = HfApi(token=token).model_info(name.repo, revision=name.revision, timeout=timeout)
        except Exception as error:
            if not _is_connection_error(error):
                raise
            if (cached := _cached(name, where)) is not None:
                return cached
            raise ConnectionError(_not_cached(name, error)) from error
        weights, others = choose_files([file.rfilename for file in found.siblings or ()], name)
        path, revision = Path(), name.revision
        # Weights are last, so that cached weights imply that the other files are cached, too.
        for file in (*others, weights):
            path = Path(
                hf_hub_download(name.repo, file, revision=revision, token=token, cache_dir=where, force_download=force)
            )
            revision = _as_download(name, path, file).commit  # all files are of one commit
        return _as_download(name, path, weights)


def choose_files(files: Sequence[str], name: HubName) -> tuple[str, list[str]]:
    """Choose the weights among the files of a repository, and the small files beside them.

    Raises:
        InputError: the file does not exist, or the choice is not clear.

    Example:
        >>> choose_files(["README.md", "config.json", "model.safetensors", "tf_model.h5"], HubName("owner/name"))
        ('model.safetensors', ['README.md', 'config.json'])
    """
    if name.path in files:
        weights = name.path
    else:
        folder = f"{name.path}/" if name.path else ""
        here = [file.removeprefix(folder) for file in files if file.startswith(folder)]
        if not here and name.path:
            near = difflib.get_close_matches(name.path, files, n=1) or [file for file in files if is_weights(file)]
            raise InputError(
                f"{name.repo} has no file or folder {name.path!r}"
                + (f": it has {', '.join(near[:_LISTED])}" if near else f": {_see(name)}")
            )
        weights = folder + _only_weights([file for file in here if "/" not in file], files, name)
    folder = weights.rpartition("/")[0]
    beside = [file for file in (f"{folder}/{small}" if folder else small for small in _BESIDE) if file in files]
    if weights.endswith(SHARD_INDEX):
        start, _, suffix = weights.removesuffix(SHARD_INDEX).rpartition(".")
        beside += [file for file in files if re.fullmatch(rf"{re.escape(start)}-\d+-of-\d+\.{re.escape(suffix)}", file)]
    readme = [_README] if folder and _README in files else []
    return weights, [*readme, *(file for file in beside if file != weights)]


def is_weights(file: str) -> bool:
    """Whether a file has the suffix of weights."""
    return file.endswith(WEIGHT_SUFFIXES)


def _only_weights(here: Sequence[str], files: Sequence[str], name: HubName) -> str:
    for known in WEIGHTS:
        if known in here:
            return known
    shards = [file for file in here if re.search(r"-\d+-of-\d+\.", file)]
    if shards:
        raise InputError(
            f"the weights of {name} are split into {len(shards)} files without their index ({WEIGHTS[2]}): load it "
            "with its own library, and save its state dict as one file"
        )
    candidates = [file for file in here if is_weights(file)]
    if len(candidates) == 1:
        return candidates[0]
    elsewhere = candidates or [file for file in files if is_weights(file)]
    if elsewhere:
        listed = ", ".join(elsewhere[:_LISTED]) + (", ..." if len(elsewhere) > _LISTED else "")
        where = "several weights" if len(elsewhere) > 1 else "its weights elsewhere"
        raise InputError(f"{name} has {where} ({listed}): name one, such as hf://{name.repo}/{elsewhere[0]}")
    raise InputError(
        f"{name} has no weights that cribo can read (of {', '.join(WEIGHT_SUFFIXES)}): {_see(name)} shows its files"
    )


def _cached(name: HubName, cache_dir: str | None) -> Download | None:
    """Find the weights in the cache; None if they, or the configuration beside them, are not there.

    An interrupted update leaves its commit without weights: then an earlier commit of the main branch is used.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        # No file matches the pattern: the cache need not contain all files of the repository.
        root = Path(
            snapshot_download(
                name.repo, revision=name.revision, cache_dir=cache_dir, local_files_only=True, allow_patterns=[]
            )
        )
    except LocalEntryNotFoundError:
        return None
    if (found := _in_snapshot(name, root)) is not None or name.revision not in (None, constants.DEFAULT_REVISION):
        return found
    others = sorted(root.parent.iterdir(), key=lambda folder: folder.stat().st_mtime_ns, reverse=True)
    found = next(filter(None, (_in_snapshot(name, folder) for folder in others)), None)
    if found is not None:
        _logger.warning(
            f"the download of commit {root.name} of {name} is not complete: using the cached commit {found.commit}"
        )
    return found


def _in_snapshot(name: HubName, root: Path) -> Download | None:
    """Find the weights in the cached files of a commit."""
    try:
        weights, others = choose_files(
            [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()], name
        )
    except InputError:
        return None
    is_described = any(PurePosixPath(file).name in (_CONFIG, _DESCRIPTION) for file in others)
    if not is_described and PurePosixPath(weights).name in WEIGHTS and weights != name.path:
        return None  # another program has downloaded the weights only
    return _as_download(name, root / weights, weights)


def _as_download(name: HubName, path: Path, file: str) -> Download:
    """Describe a file of a cached commit, whose folder in the cache has the name of the commit."""
    root = path.parents[file.count("/")]
    return Download(name, path, root.name, root / _README)


def _not_cached(name: HubName, error: Exception) -> str:
    from huggingface_hub import constants

    is_offline = constants.HF_HUB_OFFLINE
    why = "HF_HUB_OFFLINE=1 is set" if is_offline else _first_line(error) or type(error).__name__
    files = f"{name.path}" if is_weights(name.path) else "config.json, README.md and the weights (model.safetensors)"
    return (
        f"cannot download {name} ({why}), and {constants.HF_HUB_CACHE} does not contain it. Without a network: "
        f"download {files} from {_see(name)} on another machine into one folder, and pass its path"
    )


def _see(name: HubName) -> str:
    return f"{address(name.repo)}/tree/{name.revision or 'main'}"


def address(repo: str) -> str:
    """Return the address of a repository."""
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{repo}"


# ---------------------------------------------------------------------------------------------------------- errors


@contextlib.contextmanager
def explained_errors(name: HubName, *, writing: bool = False) -> Iterator[None]:
    """Convert errors of huggingface_hub to one-line errors that say what to do."""
    from huggingface_hub import errors

    repo = name.repo
    try:
        yield
    except errors.HFValidationError as error:
        raise InputError(f"{repo!r} is not a name on the Hugging Face hub: {_first_line(error)}") from error
    except errors.GatedRepoError as error:
        raise InputError(
            f"{name} is gated: accept its terms at {address(repo)} with your account, then {LOG_IN}"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise InputError(
            f"{repo} has no branch {name.revision!r}: create it at {address(repo)}, or omit it"
            if writing
            else f"{repo} has no revision {name.revision!r}: omit it, or choose a branch, tag or commit of "
            f"{address(repo)}"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise InputError(
            f"the repository {repo} does not exist on {address('').rstrip('/')}, or is private: check the name, and if "
            f"it is private, {LOG_IN}{_of_reader()}"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        if isinstance(error.__cause__, errors.HfHubHTTPError) and not _is_temporary(error.__cause__):
            raise _refusal(name, error.__cause__, writing=writing) from error
        raise ConnectionError(_not_cached(name, error)) from error
    except errors.EntryNotFoundError as error:
        raise InputError(f"{repo} has no such file: {_see(name)} shows its files") from error
    except errors.HfHubHTTPError as error:
        if not _is_temporary(error):
            raise _refusal(name, error, writing=writing) from error
        raise ConnectionError(f"the Hugging Face hub failed at {name} ({_first_line(error)}): try later") from error
    except RuntimeError as error:
        if not isinstance(error.__cause__, errors.HfHubHTTPError):
            raise
        if not _is_temporary(error.__cause__):
            raise _refusal(name, error.__cause__, writing=writing) from error
        raise ConnectionError(f"the Hugging Face hub failed at {name} ({_first_line(error)})") from error
    except Exception as error:
        if isinstance(error, InputError | ConnectionError) or not _is_connection_error(error):
            raise
        raise ConnectionError(
            f"the connection to the Hugging Face hub failed at {name} ({_first_line(error)}): try again"
        ) from error


def _refusal(name: HubName, error: "HfHubHTTPError", *, writing: bool) -> InputError:
    """Return the error for a request that the hub will not accept when it is repeated."""
    status, tokens = error.response.status_code, address("settings/tokens")
    if status == 401:
        return InputError(f"the Hugging Face hub does not accept your token: create one at {tokens}, then {LOG_IN}")
    reason = _first_line(error)
    if status == 403 and writing:
        return InputError(f"the token may not write to {name.repo} ({reason}): give it write access at {tokens}")
    if status == 403:
        return InputError(
            f"access to {name} is denied ({reason}): check at {address(name.repo)} that your account may read it, and "
            f"at {tokens} that your token may"
        )
    return InputError(f"the Hugging Face hub refuses the request for {name}: {reason}")


def _is_temporary(error: "HfHubHTTPError") -> bool:
    """Whether a request may succeed when it is repeated: time-outs, conflicts, limits and failures of the server."""
    return error.response.status_code in (408, 409, 412, 429) or error.response.status_code >= 500


def _of_reader() -> str:
    from huggingface_hub import get_token

    return " with an account that may read it" if get_token() else ""


def _is_connection_error(error: Exception) -> bool:
    """Whether the hub could not be reached, as opposed to an answer that it does not have the files."""
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        return _is_temporary(error)
    # The client's own errors have no base class that all its versions share.
    is_client = type(error).__module__.partition(".")[0] in ("httpx", "httpx2", "requests")
    return is_client or isinstance(error, ConnectionError | TimeoutError)


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")
