"""Downloads from the Hugging Face Hub by address, with the Hub's own client and cache.

An address is hf://[datasets/]OWNER/NAME[@REVISION]. The client is imported only where an address is used.
This file does not need torch.
"""

import contextlib
import dataclasses
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Literal

Say = Callable[[str], None]

_SCHEME = re.compile(r"hf:/+")  # pathlib.Path turns hf://a/b into hf:/a/b


@dataclasses.dataclass(frozen=True)
class Address:
    """A repository of the Hub. revision: a branch, a tag or a commit; None: the newest of its main branch."""

    kind: Literal["model", "dataset"]
    repo: str  # OWNER/NAME
    revision: str | None = None

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"hf://{self._path}{revision}"

    @property
    def url(self) -> str:
        """Returns the web page of the repository, on the server that the client uses (HF_ENDPOINT)."""
        from huggingface_hub import constants

        return f"{constants.ENDPOINT}/{self._path}"

    @property
    def _path(self) -> str:
        return f"datasets/{self.repo}" if self.kind == "dataset" else self.repo


def is_address(location: str | Path) -> bool:
    return _SCHEME.match(str(location)) is not None


def parse_address(location: str | Path, *, kind: Literal["model", "dataset"]) -> Address:
    """Parses an address. ValueError for another form, another kind of repository, or a missing client."""
    import_client()
    from huggingface_hub.utils import parse_hf_uri

    text, form = _SCHEME.sub("hf://", str(location)), Address(kind, "OWNER/NAME")
    problem = f"{text} is no address of a {kind} on the Hub: that is {form} or {form}@REVISION"
    try:
        parsed = parse_hf_uri(text)
    except ValueError:
        raise ValueError(problem) from None
    if parsed.type != kind or parsed.path_in_repo:
        raise ValueError(problem)
    return Address(kind, parsed.id, parsed.revision)


def import_client() -> ModuleType:
    """Imports huggingface_hub, without its telemetry. ValueError where it is missing."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        import huggingface_hub
    except ImportError:
        raise ValueError("hf:// needs the package huggingface_hub: pip install huggingface_hub") from None
    return huggingface_hub


def download(
    address: Address, choose: Callable[[list[str]], Sequence[str]], *, by_hand: str, say: Say = print
) -> list[Path]:
    """Downloads some files of a repository; returns their paths in a cache folder named after the commit.

    Files in the cache are not downloaded again, and an interrupted download continues. A new file is compared
    with the Hub's digest. Where the Hub cannot be reached, the cache is used.

    choose: names of all files -> one or more that are needed; raises ValueError, with what is missing, where
    there are none. by_hand: advice for people, where neither the Hub nor the cache has the files. say: prints
    a line, such as that a download begins. ValueError, one line, for every failure.
    """
    with client_errors(address, by_hand=by_hand):
        pinned, sizes = _list_files(address, say=say)
        try:
            names = choose(list(sizes))
        except ValueError as error:
            raise ValueError(f"{address} {error}") from None
        for name in names:
            if "\\" in name or name.startswith("/") or ".." in PurePosixPath(name).parts:
                raise ValueError(f"{address} names a file {name!r}, which leads out of its folder: not used")
        options = {"by_hand": by_hand, "say": say}
        return [download_file(pinned, name, num_bytes=sizes[name], **options) for name in names]


def download_file(
    pinned: Address, name: str, *, by_hand: str, num_bytes: int | None = None, say: Say = print
) -> Path:
    """Returns the path of a file in the cache; downloads a missing file, and checks the Hub's digest.

    pinned: the address with a commit. by_hand: advice. ValueError, one line, for every failure.
    """
    client = import_client()
    file = {"repo_id": pinned.repo, "repo_type": pinned.kind, "revision": pinned.revision, "filename": name}
    with client_errors(pinned, by_hand=by_hand):
        if isinstance(cached := client.try_to_load_from_cache(**file), str):
            return Path(cached)
        size = "" if num_bytes is None else f" ({max(num_bytes / 1e6, 0.1):.1f} MB)"
        say(f"downloading {name} of {pinned.repo}{size}")
        path = Path(client.hf_hub_download(**file))
    _check_digest(path, where=f"{name} of {pinned}")
    return path


def _list_files(address: Address, *, say: Say) -> tuple[Address, dict[str, int | None]]:
    """Returns (the address with its commit, {file: size}); if the Hub is out of reach, of cached files."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.file_download import repo_folder_name

    api, repo = HfApi(), {"repo_id": address.repo, "repo_type": address.kind}
    commit = api.resolve_revision(**repo, revision=address.revision).resolved
    pinned = dataclasses.replace(address, revision=commit)
    folder = Path(constants.HF_HUB_CACHE, repo_folder_name(**repo), "snapshots", commit)
    try:
        info = api.repo_info(**repo, revision=commit, files_metadata=True)
    except Exception as error:
        if not _is_out_of_reach(error) or not folder.is_dir():
            raise
        say(f"{address} cannot be reached ({_reason(error)}): what the cache has of it is used")
        cached = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        return pinned, dict.fromkeys(cached)
    return pinned, {file.rfilename: file.size for file in info.siblings}


def _check_digest(path: Path, *, where: str) -> None:
    """Compares a cached file with the Hub's digest, which is the name of the blob behind the link `path`.

    Removes a file that differs, with ValueError. The client itself compares only sizes.
    """
    from huggingface_hub.utils.sha import git_hash, sha_fileobj

    expected = Path(os.readlink(path)).name if path.is_symlink() else ""  # no blobs without links
    with path.open("rb") as file:  # 64 hex digits: of a large file; 40: git's name of a small file
        found = {64: lambda: sha_fileobj(file).hex(), 40: lambda: git_hash(file.read())}.get(len(expected))
        is_whole = found is None or found() == expected
    if not is_whole:
        path.resolve().unlink()
        path.unlink()
        raise ValueError(f"{where} is corrupt (its digest is not the Hub's): it is removed, start again")


@contextlib.contextmanager
def client_errors(address: Address, *, by_hand: str) -> Iterator[None]:
    """Turns errors of the Hub's client in the block into ValueError, one line; silences the client's log.

    Progress bars are for terminals only. by_hand: what to do where the Hub cannot be reached.
    """
    from huggingface_hub import utils

    logging, verbosity = utils.logging, utils.logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    hides_bars = not sys.stderr.isatty() and not utils.are_progress_bars_disabled()
    if hides_bars:
        utils.disable_progress_bars()
    try:
        yield
    except Exception as error:
        if (message := _explain(error, address, by_hand=by_hand)) is None:
            raise
        raise ValueError(f"{address} {message}") from None
    finally:
        logging.set_verbosity(verbosity)
        if hides_bars:
            utils.enable_progress_bars()


def _explain(error: Exception, address: Address, *, by_hand: str) -> str | None:
    """Returns what happened and what to do; None for an error to raise unchanged."""
    from huggingface_hub import errors

    if isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):  # of an upload
        error = error.__cause__
    log_in = "log in (hf auth login, or HF_TOKEN)"
    if isinstance(error, errors.GatedRepoError):
        return f"is for those who accepted its terms: accept them at {address.url}, then {log_in}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"is not there, or private: look at the name; for a private {address.kind} {log_in}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"is not there: the {address.kind} has no revision {address.revision}"
    if _is_out_of_reach(error):
        return f"cannot be reached ({_reason(error)}): {by_hand}"
    if isinstance(error, errors.HfHubHTTPError):
        advice = f": {log_in} as somebody who may" if error.response.status_code in (401, 403) else ""
        return f"is refused by the Hub ({_reason(error)}){advice}"
    if isinstance(error, OSError):
        return f"could not be transferred ({_reason(error)}): start again"
    return None


def _is_out_of_reach(error: Exception) -> bool:
    """Returns whether the Hub cannot be reached, or its server fails."""
    from huggingface_hub import errors

    if isinstance(error, errors.HfHubHTTPError):
        return error.response.status_code >= 500
    offline = (errors.OfflineModeIsEnabled, errors.RevisionResolutionError, errors.LocalEntryNotFoundError)
    return isinstance(error, (*offline, errors.HTTPError))


def _reason(error: BaseException) -> str:
    """Returns the cause of a client's error in a few words."""
    from huggingface_hub import errors

    if isinstance(error, (errors.RevisionResolutionError, errors.LocalEntryNotFoundError)):
        error = error.__cause__ or error
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set"
    if isinstance(error, errors.HfHubHTTPError):
        said = error.server_message or error.response.reason_phrase
        return f"{error.response.status_code} {' '.join(said.split())}"
    return getattr(error, "strerror", None) or (str(error) or type(error).__name__).splitlines()[0]
