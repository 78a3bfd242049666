"""Downloads from the Hugging Face Hub by address, with the Hub's own client and cache.

An address is hf://[datasets/]OWNER/NAME[@REVISION]. The client is imported only if an address is used. This
file does not need torch.
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

from runtime.reading import printable

Say = Callable[[str], None]

_SCHEME = re.compile(r"hf:/+")  # pathlib.Path turns hf://a/b into hf:/a/b


@dataclasses.dataclass(frozen=True)
class Address:
    """A repository on the Hugging Face Hub, such as hf://OWNER/NAME.

    revision: Branch, tag or commit. If None, the head of the main branch.
    """

    kind: Literal["model", "dataset"]
    repo: str  # OWNER/NAME
    revision: str | None = None

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"hf://{self._path}{revision}"

    @property
    def url(self) -> str:
        from huggingface_hub import constants

        return f"{constants.ENDPOINT}/{self._path}"

    @property
    def _path(self) -> str:
        return f"datasets/{self.repo}" if self.kind == "dataset" else self.repo


def is_address(location: str | Path) -> bool:
    return _SCHEME.match(str(location)) is not None


def parse_address(location: str | Path, *, kind: Literal["model", "dataset"]) -> Address:
    """Parses the address of a repository on the Hugging Face Hub, such as hf://OWNER/NAME.

    Does not contact the Hub. Raises ValueError if the text is not an address of this kind, or if the package
    huggingface_hub is not installed.

    kind: "model" for hf://OWNER/NAME, or "dataset" for hf://datasets/OWNER/NAME.
    """
    import_client()
    from huggingface_hub.utils import parse_hf_uri

    text, form = _SCHEME.sub("hf://", str(location)), Address(kind, "OWNER/NAME")
    problem = f"{text} is not an address of a {kind} on the Hub. Pass {form} or {form}@REVISION."
    try:
        parsed = parse_hf_uri(text)
    except ValueError:
        raise ValueError(problem) from None
    if parsed.type != kind or parsed.path_in_repo:
        raise ValueError(problem)
    return Address(kind, parsed.id, parsed.revision)


def import_client() -> ModuleType:
    """Imports the package huggingface_hub without its telemetry, and returns it.

    Raises ValueError if it is not installed.
    """
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        import huggingface_hub
    except ImportError:
        raise ValueError("hf:// needs huggingface_hub. Install it: pip install huggingface_hub") from None
    return huggingface_hub


def download(
    address: Address, choose: Callable[[list[str]], Sequence[str]], *, by_hand: str, say: Say = print
) -> list[Path]:
    """Downloads files of a repository on the Hugging Face Hub.

    Returns their paths in the local cache. Files in the cache are not downloaded again. If the Hub cannot be
    reached, the cache is used. Raises ValueError if the download fails or if the digest of a file is wrong.

    choose: Function that gets the names of all files in the repository, and returns the names of those to
    download. If a necessary file is missing, `choose` raises ValueError. by_hand: Advice for the user if the
    Hub cannot be reached and the cache lacks the files. say: Function that prints a line.
    """
    with client_errors(address, by_hand=by_hand):
        pinned, sizes, cached = _list_files(address, say=say)
        try:
            names = choose(list(sizes))
        except ValueError as error:
            if cached is None:
                raise ValueError(f"{address} {error}") from None
            reason = f"the cached copy of {address} {str(error).removesuffix('.')}"
            raise ValueError(
                f"{reason}. It has {cached}. Connect to the Hub once, and start again."
            ) from None
        for name in names:
            if "\\" in name or name.startswith("/") or ".." in PurePosixPath(name).parts:
                raise ValueError(f"{address}: file name {name!r} leads out of the folder. Not downloaded.")
        options = {"by_hand": by_hand, "say": say}
        return [download_file(pinned, name, num_bytes=sizes[name], **options) for name in names]


def download_file(
    pinned: Address, name: str, *, by_hand: str, num_bytes: int | None = None, say: Say = print
) -> Path:
    """Downloads one file from the Hugging Face Hub, unless it is in the local cache.

    Returns its path in the cache. Raises ValueError if the download fails or if the digest of the file is
    wrong.

    pinned: Repository, with the hash of a commit as revision. name: Path of the file in the repository.
    by_hand: Advice for the user if the Hub cannot be reached. num_bytes: Size of the file, for the message.
    """
    client = import_client()
    file = {"repo_id": pinned.repo, "repo_type": pinned.kind, "revision": pinned.revision, "filename": name}
    with client_errors(pinned, by_hand=by_hand):
        if isinstance(cached := client.try_to_load_from_cache(**file), str):
            return Path(cached)
        size = "" if num_bytes is None else f" ({max(num_bytes / 1e6, 0.1):.1f} MB)"
        say(f"downloading {printable(name)} of {pinned.repo}{size}")
        path = Path(client.hf_hub_download(**file))
    _check_digest(path, where=f"{name} of {pinned}")
    return path


def _list_files(address: Address, *, say: Say) -> tuple[Address, dict[str, int | None], str | None]:
    """Lists the files of a repository on the Hugging Face Hub.

    Returns (address with the hash of the commit as revision, {file: size in bytes}, None). If the Hub cannot
    be reached, lists the files in the local cache. The sizes are then None, and the third value is a text for
    the user that names these files.
    """
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
        reason = printable(_reason(error))
        say(f"{address} cannot be reached ({reason}). Using the files in the cache.")
        paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*"))}
        cached = [name for name, path in paths.items() if path.is_file()]
        broken = [name for name, path in paths.items() if path.is_symlink() and not path.exists()]
        links = f", and links to files that are gone ({', '.join(broken)})" if broken else ""
        return pinned, dict.fromkeys(cached), f"{', '.join(cached) or 'no files'}{links}"
    return pinned, {file.rfilename: file.size for file in info.siblings}, None


def _check_digest(path: Path, *, where: str) -> None:
    # huggingface_hub compares only sizes. `path` is a link in its cache to a file that is named after its
    # hash.
    from huggingface_hub.utils.sha import git_hash, sha_fileobj

    expected = Path(os.readlink(path)).name if path.is_symlink() else ""  # no links, no digests
    with path.open("rb") as file:  # 64 hex digits: SHA-256 of a large file; 40: git's hash of a small file
        found = {64: lambda: sha_fileobj(file).hex(), 40: lambda: git_hash(file.read())}.get(len(expected))
        is_intact = found is None or found() == expected
    if not is_intact:
        path.resolve().unlink()
        path.unlink()
        raise ValueError(f"{where} is corrupt: its digest is not the Hub's. It was removed. Start again.")


@contextlib.contextmanager
def client_errors(address: Address, *, by_hand: str) -> Iterator[None]:
    """Context manager that converts errors of huggingface_hub to a ValueError of one line.

    Inside, huggingface_hub logs nothing. If stderr is not a terminal, it also shows no progress bars.

    address: Repository that the message names. by_hand: Advice for the user if the Hub cannot be reached.
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
    # The end of a sentence that starts with the address. None: not an error of huggingface_hub.
    from huggingface_hub import errors

    if isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):  # from an upload
        error = error.__cause__
    log_in = "log in (hf auth login, or HF_TOKEN)"
    if isinstance(error, errors.GatedRepoError):
        return f"requires that you accept its terms. Accept them at {address.url}, then {log_in}."
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"does not exist, or is private. Check the name. For a private {address.kind}, {log_in}."
    if isinstance(error, errors.RevisionNotFoundError):
        return f"does not exist: the {address.kind} has no revision {address.revision}."
    if _is_out_of_reach(error):
        return f"cannot be reached ({_reason(error)}): {by_hand}"
    if isinstance(error, errors.HfHubHTTPError):
        is_denied = error.response.status_code in (401, 403)
        advice = f". Use an account that has access: {log_in}." if is_denied else ""
        return f"was refused by the Hub ({_reason(error)}){advice}"
    if isinstance(error, OSError):
        return f"could not be transferred ({_reason(error)}). Start again."
    return None


def _is_out_of_reach(error: Exception) -> bool:
    from huggingface_hub import errors

    if isinstance(error, errors.HfHubHTTPError):
        return error.response.status_code >= 500
    offline = (errors.OfflineModeIsEnabled, errors.RevisionResolutionError, errors.LocalEntryNotFoundError)
    return isinstance(error, (*offline, errors.HTTPError))


def _reason(error: BaseException) -> str:
    from huggingface_hub import errors

    if isinstance(error, (errors.RevisionResolutionError, errors.LocalEntryNotFoundError)):
        error = error.__cause__ or error
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set"
    if isinstance(error, errors.HfHubHTTPError):
        answer = error.server_message or error.response.reason_phrase
        return f"{error.response.status_code} {' '.join(answer.split())}"
    return getattr(error, "strerror", None) or (str(error) or type(error).__name__).splitlines()[0]
