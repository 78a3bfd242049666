"""The page: a folder with a model, puzzles to try it on, and what a browser needs to run it.

Two files of the npm package onnxruntime-web, which are not kept here, run ONNX with WebAssembly in one
thread, so that any server serves the page. Threads would need the headers COOP and COEP.
"""

import base64
import dataclasses
import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from checkpointing.pretrained import Checkpoint, find_checkpoint, load_trained_model
from config.schema import PageConfig
from config.writing import write_json
from dataset.build.writing import check_output_folder, replaced_folder
from dataset.description import read_info
from dataset.drawing import SCRIPTS, THEME, page_style
from dataset.format import IGNORE_LABEL_ID, Dataset
from dataset.kinds.kind import to_grid
from dataset.loader import choose_rows, names_of, read_rows
from dataset.mixture import open_datasets
from evaluation.trace import MOST_TOKENS
from models import HaltingModel
from parallel import log
from share.onnx import check_packages, write_step

MODEL, DATA = "model.onnx", "page.json"
_OF_PUZZLE = ("identifier", "inputs", "labels")
_NUM_MADE_UP = 100
_SITE = Path(__file__).parent / "site"

PACKAGE = "onnxruntime-web@1.30.0"
_INTEGRITY = "q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=="
FILES = ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm")

_TIMEOUT_SECONDS = 600
_REMEDY = f"give runtime=FOLDER with the files of the npm package {PACKAGE}"


def write_page(config: PageConfig) -> None:
    """Writes the folder of the page. ValueError, one line, before anything is written."""
    output = check_output_folder(Path(config.output), mark=DATA, maker="share page", key="output")
    check_packages()
    checkpoint = in_float32(find_checkpoint(config.checkpoint))
    folders = [Path(path) for path in config.data_path] if config.data_path else checkpoint.find_data()
    data = open_datasets(folders, splits=("test",), read_everything=False)
    model = load_trained_model(checkpoint, data.metadata, raw=config.raw).eval()
    reasoning = model.eval_reasoning
    is_search = model.network.is_search
    if is_search and data.metadata.vocab_size > MOST_TOKENS:
        raise ValueError(
            f"a page shows candidates of {MOST_TOKENS} tokens at most, not {data.metadata.vocab_size}"
        )
    if model.network.needs_draws(reasoning) and not is_search:
        raise ValueError(
            f"checkpoint {checkpoint.path} is of a model with init_noise or state_noise: a page has no "
            "random numbers for it"
        )

    puzzles = choose_puzzles(data, config.puzzles)
    keep_embeddings(model, puzzles)
    with tempfile.TemporaryDirectory() as scratch, replaced_folder(output) as folder:
        for path in find_runtime(Path(config.runtime) if config.runtime else None, Path(scratch)):
            shutil.copy(path, folder)
        shutil.copytree(_SITE, folder, dirs_exist_ok=True)
        for path in (THEME, *SCRIPTS):
            shutil.copy(path, folder)
        log.info("translating the model, which takes a minute or so")
        state = write_step(model.network, reasoning, folder / MODEL, seq_len=data.metadata.seq_len)
        page_data = describe(checkpoint, model, data) | {"state": state, "puzzles": puzzles}
        page_data["made_up"] = make_up(data)
        page_data["steps"] = config.halt_max_steps or reasoning.max_steps
        write_json(folder / DATA, page_data, indent=None)
        size = (folder / MODEL).stat().st_size / 1e6
    log.info(
        f"wrote {config.output}: {MODEL} of {size:.1f} MB, and a page with {len(puzzles)} puzzles\n"
        f"open it with: python -m http.server --directory {config.output} 8000, then http://localhost:8000"
    )


def in_float32(checkpoint: Checkpoint) -> Checkpoint:
    """Returns the checkpoint with forward_dtype=float32; stored weights are float32 already."""
    arch = checkpoint.arch.model_copy(update={"forward_dtype": "float32"})
    return dataclasses.replace(checkpoint, arch=arch)


def choose_puzzles(data: Dataset, count: int) -> list[dict[str, Any]]:
    """Chooses up to `count` test puzzles of the sets together, or one of each, evenly among the originals.

    Returns tokens, identifier and, where it has one of its own, name: as page.json holds them, with a label
    of -1 where a cell counts nowhere.
    """
    sets = data.splits["test"].sets
    puzzles = []
    for set_name, puzzle_set in sets.items():
        batch = read_rows(data, set_name, choose_rows(puzzle_set, max(count // len(sets), 1)))
        labels = torch.where(batch.labels == IGNORE_LABEL_ID, -1, batch.labels)
        names = names_of(data, [set_name] * len(batch.rows), batch.puzzle_identifiers)
        lists = [each.tolist() for each in (batch.puzzle_identifiers, batch.inputs, labels)]
        for name, *values in zip(names, *lists, strict=True):
            puzzles.append({"name": name or None} | dict(zip(_OF_PUZZLE, values, strict=True)))
    return puzzles


def make_up(data: Dataset) -> list[dict[str, Any]]:
    """Makes new puzzles of the kind and size of the data, as page.json holds them; none where it cannot."""
    kind = read_info(data.folders, data.metadata).kind
    if kind is None or kind.make_up is None:
        return []
    puzzles = zip(*(tokens.tolist() for tokens in kind.make_up(data.metadata, _NUM_MADE_UP)), strict=True)
    return [dict(zip(_OF_PUZZLE[1:], puzzle, strict=True)) for puzzle in puzzles]


def keep_embeddings(model: HaltingModel, puzzles: list[dict[str, Any]]) -> None:
    """Keeps the rows of the puzzles alone in a table, which may have a million, and numbers them anew."""
    identifiers = sorted({puzzle["identifier"] for puzzle in puzzles})
    for puzzle in puzzles:
        puzzle["identifier"] = identifiers.index(puzzle["identifier"])
    model.network.keep_puzzles(torch.tensor(identifiers))


def describe(checkpoint: Checkpoint, model: HaltingModel, data: Dataset) -> dict[str, Any]:
    """Returns what the page must know of the model and of its puzzles' kind, as JSON values."""
    metadata = data.metadata
    info = read_info(data.folders, metadata)
    rows, columns = to_grid(np.arange(metadata.seq_len), num_columns=info.style.num_columns).shape
    return {
        "arch": checkpoint.arch.title,
        "run": checkpoint.run_folder.name,
        "step": checkpoint.step,
        "parameters": sum(each.numel() for each in model.network.parameters()),
        "search": model.network.search_facts(),
        "kind": info.kind.name if info.kind else None,
        "rows": rows,
        "columns": columns,
        **page_style(info.style, metadata),
    }


def find_runtime(folder: Path | None, scratch: Path) -> list[Path]:
    """Finds the files that run ONNX, of a folder, or with None as npm fetches them into `scratch`.

    ValueError where the folder lacks one, npm is missing or fails, or brings a package with another digest.
    """
    if folder is None and shutil.which("npm") is None:
        raise ValueError(f"npm is not installed: {_REMEDY}, or install npm")
    of_package = folder or _fetch(scratch)
    found = [
        next(filter(Path.is_file, (of_package / "dist" / name, of_package / name)), None) for name in FILES
    ]
    if None in found:
        raise ValueError(f"runtime={folder} has no {FILES[found.index(None)]}: {_REMEDY}")
    return found


def _fetch(folder: Path) -> Path:
    """Lets npm, which looks into its cache first, fetch the package into `folder`, and unpacks the files."""
    command = ["npm", "pack", PACKAGE, "--pack-destination", str(folder), "--loglevel", "error"]
    options = {"cwd": folder, "capture_output": True, "text": True, "timeout": _TIMEOUT_SECONDS}
    try:
        finished = subprocess.run(command, **options)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"npm cannot fetch {PACKAGE} ({error}): {_REMEDY}") from None
    packages = list(folder.glob("*.tgz"))
    if finished.returncode or not packages:
        lines = [line for line in finished.stderr.splitlines() if line.strip()] or ["it brought nothing"]
        raise ValueError(f"npm cannot fetch {PACKAGE} ({lines[0]}): {_REMEDY}")
    digest = base64.b64encode(hashlib.sha512(packages[0].read_bytes()).digest()).decode()
    if digest != _INTEGRITY:
        raise ValueError(f"npm brought another {PACKAGE} than the published one (sha512 {digest}): {_REMEDY}")
    with tarfile.open(packages[0]) as archive:
        members = [archive.getmember(f"package/dist/{name}") for name in FILES]
        archive.extractall(folder, members=members, filter="data")
    return folder / "package"
