"""What runs ONNX in a browser: two files of the npm package onnxruntime-web, of which nothing is kept here.

They are those that compute with WebAssembly in one thread, so that any server serves the page: threads would
need its headers COOP and COEP.
"""

import base64
import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "onnxruntime-web@1.30.0"
_INTEGRITY = "q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=="
FILES = ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm")

_TIMEOUT_SECONDS = 600
_REMEDY = f"give runtime=FOLDER with the files of the npm package {PACKAGE}"


def check_runtime(folder: Path | None) -> None:
    """Raises ValueError where the files are not in `folder`, or with None npm is not there to fetch them."""
    if folder is None:
        if shutil.which("npm") is None:
            raise ValueError(f"npm is not installed: {_REMEDY}, or install npm")
        return
    for name in FILES:
        if not _find(folder, name).is_file():
            raise ValueError(f"runtime={folder} has no {name}: {_REMEDY}")


def copy_runtime(folder: Path | None, target: Path) -> None:
    """Copies the files into `target`, from `folder`, or with None as npm fetches them.

    ValueError where npm fails, or brings another package than the one whose digest is written here.
    """
    if folder is not None:
        for name in FILES:
            shutil.copyfile(_find(folder, name), target / name)
        return
    with tempfile.TemporaryDirectory() as scratch:
        package = _fetch(Path(scratch))
        digest = base64.b64encode(hashlib.sha512(package.read_bytes()).digest()).decode()
        if digest != _INTEGRITY:
            raise ValueError(
                f"npm brought another {PACKAGE} than the published one (sha512 {digest}): {_REMEDY}"
            )
        with tarfile.open(package) as archive:
            for name in FILES:
                with archive.extractfile(f"package/dist/{name}") as file, (target / name).open("wb") as copy:
                    shutil.copyfileobj(file, copy)


def _find(folder: Path, name: str) -> Path:
    """Returns where a file of the package is: in its dist, or in `folder` itself."""
    of_package = folder / "dist" / name
    return of_package if of_package.is_file() else folder / name


def _fetch(folder: Path) -> Path:
    """Lets npm fetch the package into `folder`; npm looks into its cache first."""
    command = ["npm", "pack", PACKAGE, "--pack-destination", str(folder), "--loglevel", "error"]
    try:
        finished = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"npm cannot fetch {PACKAGE} ({error}): {_REMEDY}") from None
    packages = list(folder.glob("*.tgz"))
    if finished.returncode or not packages:
        lines = [line for line in finished.stderr.splitlines() if line.strip()] or ["it brought nothing"]
        raise ValueError(f"npm cannot fetch {PACKAGE} ({lines[0]}): {_REMEDY}")
    return packages[0]
