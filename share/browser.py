"""Writes the web page that runs models in the browser: models as ONNX, puzzles, and the files of the page.

The page needs two files of the npm package onnxruntime-web. They are not in this repository. They run ONNX as
WebAssembly in one thread, because more threads need a server that sends the headers COOP and COEP.
"""

import base64
import contextlib
import dataclasses
import functools
import hashlib
import http.server
import shutil
import subprocess
import tarfile
import tempfile
import threading
import webbrowser
from collections import Counter
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import numpy as np
import torch

from checkpointing.files import SHARED_WEIGHTS_FILE
from checkpointing.finding import SHIPPED, Checkpoint, find_checkpoint
from checkpointing.loading import load_trained_model
from config.programs import PageConfig
from dataset.build.writing import check_output_folder, replaced_folder
from dataset.description import DatasetInfo
from dataset.drawing import SCRIPTS, THEME, page_style
from dataset.kinds.kind import to_grid
from dataset.loader import choose_rows, names_of, read_rows
from dataset.metadata import IGNORE_LABEL_ID, Dataset
from dataset.mixture import open_datasets
from distributed import log
from evaluation.known import find_match, known_puzzles
from evaluation.questions import find_info
from evaluation.test_time import needs_draws
from evaluation.trace import MOST_TOKENS
from models import HaltingModel
from models.objective import loss_type_of
from runtime.reading import read_json
from runtime.writing import write_json
from share.onnx import check_packages, write_step

MODELS, MODEL, DATA = "models.json", "model.onnx", "page.json"
_OF_PUZZLE = ("identifier", "inputs", "labels")
_NUM_MADE_UP = 100
_SITE = Path(__file__).parent / "site"

PACKAGE = "onnxruntime-web@1.30.0"
_INTEGRITY = "q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=="
FILES = ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm")

_TIMEOUT_SECONDS = 600
_REMEDY = f"Set runtime=FOLDER to a folder with the files of the npm package {PACKAGE}"


@dataclasses.dataclass(frozen=True)
class Exhibit:
    """A model on the web page."""

    name: str  # name of the model's folder in the page
    model: HaltingModel
    facts: dict[str, Any]  # what the page shows and needs: size of the grid, puzzles to solve, and others

    @property
    def listed(self) -> dict[str, Any]:
        """The model's entry in models.json: its name and title, and the kind and size of its puzzles."""
        facts = self.facts
        first, *rest = facts["plural"]
        title = f"{first.upper()}{''.join(rest)} {facts['rows']} \u00d7 {facts['columns']} \u00b7 {self.name}"
        return {"name": self.name, "title": title} | {key: facts[key] for key in ("kind", "rows", "columns")}


def write_page(config: PageConfig) -> None:
    """Writes the folder of a web page that runs models in the browser.

    If the function raises ValueError, nothing is written.
    """
    by_page = {"is_made": _is_page, "maker": "share page", "key": "output"}
    output = check_output_folder(Path(config.output), **by_page)
    check_packages()
    shipped = [path.parent for path in SHIPPED.glob(f"*/{SHARED_WEIGHTS_FILE}")]
    locations = config.checkpoint or sorted(shipped, reverse=True)
    exhibits = [prepare(find_checkpoint(location), config) for location in locations]
    for name, count in Counter(exhibit.name for exhibit in exhibits).items():
        if count > 1:
            raise ValueError(f"checkpoint: {count} run folders have the name {name}. Rename them.")
    with tempfile.TemporaryDirectory() as scratch, replaced_folder(output) as folder:
        # After `replaced_folder`, which restores a page if its replacement was interrupted.
        others = [] if config.replace else others_of(output, names={exhibit.name for exhibit in exhibits})
        for path in find_runtime(Path(config.runtime) if config.runtime else None, Path(scratch)):
            shutil.copy(path, folder)
        shutil.copytree(_SITE, folder, dirs_exist_ok=True)
        for path in (THEME, *SCRIPTS):
            shutil.copy(path, folder)
        for entry in others:
            if (folder / entry["name"]).exists():  # "..", or the name of a file of the page
                raise ValueError(
                    f"{output / MODELS}: {entry['name']!r} is not the name of a model's folder. Set "
                    "replace=true to write the page without it."
                )
            shutil.copytree(output / entry["name"], folder / entry["name"])
        for number, exhibit in enumerate(exhibits, 1):
            log.info(f"exporting {exhibit.name} to ONNX, {number} of {len(exhibits)}. This takes a minute.")
            (folder / exhibit.name).mkdir()
            network, reasoning = exhibit.model.network, exhibit.model.eval_reasoning("max")
            path, seq_len = folder / exhibit.name / MODEL, len(exhibit.facts["puzzles"][0]["inputs"])
            state = write_step(network, reasoning, path, seq_len=seq_len)
            write_json(folder / exhibit.name / DATA, exhibit.facts | {"state": state}, indent=None)
        listed = [exhibit.listed for exhibit in exhibits] + others
        write_json(folder / MODELS, listed)
        size = sum(path.stat().st_size for path in folder.glob(f"*/{MODEL}")) / 1e6
    log.info(
        f"wrote {config.output}: {', '.join(entry['name'] for entry in listed)}, {size:.1f} MB\n"
        f"to open it later, run python -m share open {config.output}"
    )


def _is_page(folder: Path) -> bool:
    return all((folder / name).is_file() for name in (MODELS, FILES[1]))


def others_of(page: Path, *, names: Set[str]) -> list[dict[str, Any]]:
    """Returns the models that an existing web page contains, as entries of the page's models.json.

    Returns [] if there is no page. Raises ValueError if models.json is damaged, or if the folder of a model
    is missing.

    page: Folder of the web page.
    names: Names of models to leave out.
    """
    if not (page / MODELS).exists():
        return []
    entries = read_json(page / MODELS)
    are_models = isinstance(entries, list) and all(
        isinstance(entry, dict)
        and Path(str(entry.get("name"))).name == entry.get("name")
        and (page / entry["name"] / MODEL).is_file()
        for entry in entries
    )
    if not are_models:
        problem = "does not list the models of this page"
        raise ValueError(f"{page / MODELS} {problem}. Set replace=true to write the page without them.")
    return [entry for entry in entries if entry["name"] not in names]


def open_page(folder: Path, *, port: int = 8000) -> None:
    """Serves a web page until Ctrl-C, and opens it in the browser.

    Raises ValueError if the folder was not written by `write_page`.

    port: Port of the server at localhost. If it is in use, any free port.
    """
    if not (folder / MODELS).is_file():
        raise ValueError(f"{folder} is not a page. Write one with python -m share page output={folder}.")
    handler = functools.partial(_QuietHandler, directory=str(folder))
    try:
        server = http.server.ThreadingHTTPServer(("localhost", port), handler)
    except OSError:
        server = http.server.ThreadingHTTPServer(("localhost", 0), handler)
    with server:
        address = f"http://localhost:{server.server_port}"
        log.info(f"{folder} is at {address} until Ctrl-C")
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


class _QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass  # requests are not logged


def prepare(checkpoint: Checkpoint, config: PageConfig) -> Exhibit:
    """Loads a model, and chooses the puzzles that the web page offers for it.

    A model that comes with this repository (in weights/) gets newly generated puzzles, if its kind of puzzle
    has a generator and the config has no data_path. Other models get puzzles of the test split of their
    dataset. Raises ValueError if a page cannot run the model.
    """
    folders = [Path(path) for path in config.data_path] if config.data_path else None
    info, options = find_info(checkpoint, folders), {"raw": config.raw, "forward_dtype": "float32"}
    is_shipped = folders is None and checkpoint.run_folder.parent == SHIPPED
    generated = make_up(info, max(config.puzzles, _NUM_MADE_UP)) if is_shipped else []
    if not generated:
        folders = folders or checkpoint.find_data()
        data = open_datasets(folders, splits=("test",), read_everything=False)
        match = find_match(checkpoint, data)
        data, known, _ = known_puzzles(data, match, model=str(checkpoint))
        # The dataset may have been built again, with another size of puzzles.
        info, options["rows"] = dataclasses.replace(info, metadata=data.metadata), match and match.rows
    model = load_trained_model(checkpoint, info.metadata, **options).eval()
    is_search = model.network.is_search
    if is_search and info.metadata.vocab_size > MOST_TOKENS:
        raise ValueError(
            f"checkpoint {checkpoint.path} has {info.metadata.vocab_size} tokens. A page supports at most "
            f"{MOST_TOKENS} for a search (LDT). Choose another checkpoint."
        )
    if needs_draws(model.network, model.eval_reasoning("max")) and not is_search:
        is_random = model.network.is_random
        cause = f"arch={checkpoint.arch.name} is random" if is_random else "init_noise or state_noise"
        raise ValueError(
            f"checkpoint {checkpoint.path} needs noise ({cause}). A page cannot generate that noise. Choose "
            "another checkpoint."
        )
    steps = config.halt_max_steps or model.eval_reasoning("max").max_steps
    if generated:
        puzzles = [{"name": None, "identifier": 0} | puzzle for puzzle in generated[: config.puzzles]]
        if not is_search:
            puzzles.insert(0, puzzles.pop(first_solved(model, puzzles, steps)))
    else:
        puzzles = choose_puzzles(data, config.puzzles, known)
    keep_embeddings(model, puzzles)
    of_puzzles = {"puzzles": puzzles, "made_up": generated or make_up(info, _NUM_MADE_UP), "steps": steps}
    return Exhibit(checkpoint.run_folder.name, model, describe(checkpoint, model, info) | of_puzzles)


def choose_puzzles(
    data: Dataset, count: int, known: Mapping[str, np.ndarray] | None = None
) -> list[dict[str, Any]]:
    """Chooses about `count` evenly spaced test puzzles, equally many from each test set.

    A puzzle is a dict with the keys "name" (or None), "identifier" (row of its puzzle embedding), "inputs"
    and "labels" (lists of tokens). A label is -1 if the cell is not scored. Augmented variants are left out.

    known: {test set: indices of the puzzles to choose from, int64 [n]}. If None, all puzzles.
    """
    sets = data.splits["test"].sets
    puzzles = []
    for set_name, puzzle_set in sets.items():
        rows = choose_rows(puzzle_set, max(count // len(sets), 1), known and known[set_name])
        batch = read_rows(data, set_name, rows)
        labels = torch.where(batch.labels == IGNORE_LABEL_ID, -1, batch.labels)
        names = names_of(data, [set_name] * len(batch.rows), batch.puzzle_identifiers)
        lists = [column.tolist() for column in (batch.puzzle_identifiers, batch.inputs, labels)]
        for name, *values in zip(names, *lists, strict=True):
            puzzles.append({"name": name or None} | dict(zip(_OF_PUZZLE, values, strict=True)))
    return puzzles


def make_up(info: DatasetInfo, count: int) -> list[dict[str, Any]]:
    """Generates `count` puzzles that are similar to those of a dataset.

    A puzzle is a dict with "inputs" and "labels", lists of tokens. Returns [] if there is no generator for
    this kind or this size of puzzles.
    """
    if info.kind is None or info.kind.make_up is None:
        return []
    puzzles = zip(*(array.tolist() for array in info.kind.make_up(info.metadata, count)), strict=True)
    return [dict(zip(_OF_PUZZLE[1:], puzzle, strict=True)) for puzzle in puzzles]


@torch.inference_mode()
def first_solved(model: HaltingModel, puzzles: list[dict[str, Any]], steps: int) -> int:
    """Returns the index of the first puzzle that the model solves, or 0 if it solves none.

    puzzles: Dicts with "inputs" and "labels", lists of tokens.
    steps: Number of thinking steps after which the answers are compared with the labels.
    """
    inputs, labels = (torch.tensor([puzzle[name] for puzzle in puzzles]) for name in _OF_PUZZLE[1:])
    identifiers = torch.zeros(len(puzzles), dtype=torch.int32)
    state = model.network.initial_state(len(puzzles), seq_len=inputs.shape[1])
    for _ in range(steps):
        state, prediction = model.network(state, inputs, identifiers, reasoning=model.eval_reasoning("max"))
    return int((prediction.logits.argmax(-1) == labels).all(-1).int().argmax())


def keep_embeddings(model: HaltingModel, puzzles: list[dict[str, Any]]) -> None:
    """Removes the puzzle embeddings that the given puzzles do not need from the model, in place.

    The exported model is then smaller. The remaining embeddings get new row numbers. In each puzzle, the
    value of "identifier" is replaced by the new row number of the puzzle's embedding.
    """
    identifiers = sorted({puzzle["identifier"] for puzzle in puzzles})
    for puzzle in puzzles:
        puzzle["identifier"] = identifiers.index(puzzle["identifier"])
    if (table := model.network.puzzle_emb) is not None:
        table.weights = table.weights[torch.tensor(identifiers)]


def describe(checkpoint: Checkpoint, model: HaltingModel, info: DatasetInfo) -> dict[str, Any]:
    """Returns a dict with facts about the model and its puzzles, for page.json.

    Examples of keys are "arch", "step", "parameters", "rows", "columns" and "symbols".
    """
    metadata = info.metadata
    rows, columns = to_grid(np.arange(metadata.seq_len), num_columns=info.style.num_columns).shape
    return {
        "arch": checkpoint.arch.heading(),
        "run": checkpoint.run_folder.name,
        "step": checkpoint.step,
        "parameters": sum(parameter.numel() for parameter in model.network.parameters()),
        "loss_type": loss_type_of(model.network.arch),
        "search": model.network.facts() if model.network.is_search else None,
        "kind": info.kind.name if info.kind else None,
        "plural": info.kind.plural if info.kind else "puzzles",
        "groups": info.kind.groups(metadata) if info.kind and info.kind.groups else None,
        "rows": rows,
        "columns": columns,
        **page_style(info.style, metadata),
    }


def find_runtime(folder: Path | None, scratch: Path) -> list[Path]:
    """Returns the paths of the two files of the npm package onnxruntime-web.

    A web page with models needs them. Raises ValueError if a file or npm is missing, if npm fails, or if the
    package has an unexpected digest.

    folder: Folder that contains the files. If None, npm downloads the package into `scratch`.
    """
    if folder is None and shutil.which("npm") is None:
        raise ValueError(f"npm is not installed. {_REMEDY}, or install npm.")
    of_package = folder or _fetch(scratch)
    places = [(of_package / "dist" / name, of_package / name) for name in FILES]
    found = [next(filter(Path.is_file, paths), None) for paths in places]
    if None in found:
        raise ValueError(f"runtime={folder} has no {FILES[found.index(None)]}. {_REMEDY}.")
    return found


def _fetch(folder: Path) -> Path:
    command = ["npm", "pack", PACKAGE, "--pack-destination", str(folder), "--loglevel", "error"]
    options = {"cwd": folder, "capture_output": True, "text": True, "timeout": _TIMEOUT_SECONDS}
    try:
        finished = subprocess.run(command, **options)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"npm cannot download {PACKAGE} ({error}). {_REMEDY}.") from None
    packages = list(folder.glob("*.tgz"))
    if finished.returncode or not packages:
        lines = [line for line in finished.stderr.splitlines() if line.strip()] or ["no file was downloaded"]
        raise ValueError(f"npm cannot download {PACKAGE} ({lines[0]}). {_REMEDY}.")
    digest = base64.b64encode(hashlib.sha512(packages[0].read_bytes()).digest()).decode()
    if digest != _INTEGRITY:
        raise ValueError(f"npm downloaded a {PACKAGE} with an unexpected sha512 digest: {digest}. {_REMEDY}.")
    with tarfile.open(packages[0]) as archive:
        members = [archive.getmember(f"package/dist/{name}") for name in FILES]
        archive.extractall(folder, members=members, filter="data")
    return folder / "package"
