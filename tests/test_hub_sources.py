"""Datasets from the Hub: the real client against a server here that speaks its protocol."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from checkpointing.finding import find_checkpoint
from dataset.build import build_dataset
from dataset.build.sources import find_source_files
from runtime import hub
from runtime.hub import Address, download
from tests.hub_server import HubServer, hub_server
from tests.ranks import Finished, call_each, run_program, run_ranks

pytestmark = pytest.mark.slow  # each program loads the client

_HERE = "hf://datasets/owner/puzzles"


@pytest.fixture
def files(source) -> dict[str, bytes]:
    """40 puzzles for training, 10 for testing, and what no builder needs."""
    content = {path.name: path.read_bytes() for path in source.iterdir()}
    return {**content, "README.md": b"not needed", "../outside.csv": b"out of the folder"}


@pytest.fixture
def server(files) -> Iterator[HubServer]:
    with hub_server() as server:
        server.add("dataset", "owner/puzzles", files)
        server.add("dataset", "owner/private", files, token=server.token)
        yield server


def _build(folder: Path, source: str, *words: str, **environment: str) -> Finished:
    folder.mkdir(exist_ok=True)
    words = (*(words or ("sudoku", "--box", "2x2")), "--output-dir", "data", "--source", source)
    return run_program("dataset/build/__main__", *words, folder=folder, world_size=None, **environment)


def test_files_are_downloaded_once_and_only_those_that_are_needed(server, files, tmp_path):
    environment = server.environment(tmp_path / "home")
    finished = _build(tmp_path / "hub", _HERE, **environment)
    assert finished.statuses == [0], finished.stderr
    told = [line for line in finished.stdout.splitlines() if "downloading" in line]
    names = ["train.csv", "test.csv.gz"]
    assert told == [f"downloading {name} of owner/puzzles (0.1 MB)" for name in names]
    assert finished.stderr == ""
    assert all("owner/puzzles" in line for line in server.requests), "nothing else is told to the Hub"
    assert server.downloads() == names

    for name in names:
        (tmp_path / name).write_bytes(files[name])
    assert _build(tmp_path / "by_hand", str(tmp_path)).statuses == [0]
    built = [tmp_path / place / "data" / "manifest.json" for place in ("hub", "by_hand")]
    assert built[0].read_bytes() == built[1].read_bytes()

    shorter = files["train.csv"].rsplit(b"\n", 2)[0] + b"\n"
    newer = server.add("dataset", "owner/puzzles", {"train.csv": shorter})
    offline = _build(tmp_path / "offline", _HERE, **environment | {"HF_HUB_OFFLINE": "1"})
    assert offline.statuses == [0], offline.stderr
    assert "cannot be reached (HF_HUB_OFFLINE is set). Using the files in the cache." in offline.stdout
    again = _build(tmp_path / "newer", f"{_HERE}@{newer}", **environment)
    assert server.downloads() == ["train.csv"], "the other file is in the cache"
    assert "train: 39 puzzles" in again.stdout


def test_no_code_of_a_terminal_is_in_the_name_of_a_download(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    client = {"try_to_load_from_cache": lambda **_: None, "hf_hub_download": lambda **_: tmp_path / "file"}
    monkeypatch.setattr(hub, "import_client", lambda: SimpleNamespace(**client))
    told: list[str] = []
    hub.download_file(Address("dataset", "owner/puzzles", "0"), "a\x1b[2J.csv", by_hand="", say=told.append)
    assert told == [r"downloading a\x1b[2J.csv of owner/puzzles"]


def test_what_breaks_is_taken_up_and_what_is_corrupt_is_not_kept(server, files, tmp_path):
    environment = server.environment(tmp_path / "home")
    header, *rows = files["train.csv"].decode().splitlines()
    padded = [f"{header},comment", *(f"{row},{'x' * 100_000}" for row in rows for _ in range(3))]
    large = "\n".join(padded).encode()
    server.add("dataset", "owner/large", {**files, "train.csv": large})
    server.breaks_after = len(large) - 1000
    finished = _build(tmp_path / "broken", "hf://datasets/owner/large", **environment)
    assert finished.statuses == [0], finished.stderr
    assert finished.stderr == ""
    (start,) = [int(line.split()[1]) for line in server.requests if line.startswith("RANGE")]
    assert start >= 10 * 2**20, "what the client had written by then"

    server.corrupts = "train.csv"
    corrupt = _build(tmp_path / "corrupt", _HERE, **environment)
    assert corrupt.statuses == [1]
    (line,) = corrupt.error_lines
    assert line.startswith("build sudoku: error: train.csv of hf://datasets/owner/puzzles@")
    assert line.endswith("is corrupt: its digest is not the Hub's. It was removed. Start again.")
    server.corrupts = None
    assert _build(tmp_path / "corrupt", _HERE, **environment).statuses == [0]


def _refusals(folder: Path, environment: dict[str, str], addresses: list[str]) -> list[str]:
    """The lines in which addresses of datasets or models are refused, all in one process."""
    os.environ.update(environment)
    lines, words = [], ["--output-dir", str(folder / "data"), "--box", "2x2", "--source"]
    for address in addresses:
        is_model = address.startswith("hf://owner/name")
        try:
            with contextlib.redirect_stdout(None):
                find_checkpoint(address) if is_model else build_dataset("sudoku", [*words, address])
        except ValueError as error:
            lines.append(str(error))
    return lines


def test_mistakes_are_one_line(server, files, tmp_path):
    server.add("dataset", "owner/empty", {"README.md": b""})
    by_hand = "download train.csv and test.csv of http"
    ours = server.environment(tmp_path / "home")
    addresses = {
        "hf://datasets/owner/none": "does not exist, or is private. Check the name.",
        "hf://datasets/owner/private": "For a private dataset, log in (hf auth login, or HF_TOKEN)",
        f"{_HERE}@v2": "the dataset has no revision v2",
        "hf://datasets/owner/empty": "has no train.csv (or .tsv, .txt",
        "hf://owner/puzzles": "is not an address of a dataset on the Hub. Pass hf://datasets/OWNER/NAME",
        "hf://datasets/puzzles": "is not an address of a dataset",
        "hf://datasets/../puzzles": "is not an address of a dataset",
        f"{_HERE}/train.csv": "is not an address of a dataset",
    }
    refused = "[Errno 111] Connection refused"
    for change, expected in (
        ({}, addresses),
        ({"HF_TOKEN": "hf_wrong"}, {_HERE: "refused by the Hub (401 Invalid credentials"}),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, {_HERE: f"reached ({refused}): {by_hand}"}),
        ({"HF_HUB_OFFLINE": "1"}, {_HERE: f"reached (HF_HUB_OFFLINE is set): {by_hand}"}),
    ):
        (lines,) = run_ranks(_refusals, 1, tmp_path, ours | change, list(expected))
        for line, (source, message) in zip(lines, expected.items(), strict=True):
            assert line.startswith(f"{source} "), change
            assert message in line, change
            assert "\n" not in line, change
    assert not (tmp_path / "data").exists()
    with_token = ours | {"HF_TOKEN": server.token}
    assert run_ranks(_refusals, 1, tmp_path, with_token, ["hf://datasets/owner/private"]) == [[]]


# Files in the cache, those of them that are then removed, and what the line says.
_INCOMPLETE = [
    (["config.json"], [], "contains no checkpoint. Expected config.json and model.safetensors, or"),
    (["config.json", "model.safetensors"], ["model.safetensors"], "contains no checkpoint. Expected "),
    (["config.json", "model.safetensors.index.json"], [], "contains no checkpoint. Expected "),
    ([], [], "contains no checkpoint. Expected "),
    (["train.csv"], [], "has no test.csv (or "),
]


def test_without_the_hub_an_incomplete_cache_is_described(tmp_path):
    kinds = ["dataset" if "train.csv" in cached else "model" for cached, *_ in _INCOMPLETE]
    with hub_server() as server:
        environment = server.environment(tmp_path / "home")
        downloads = []
        for number, (kind, (cached, *_)) in enumerate(zip(kinds, _INCOMPLETE, strict=True)):
            names = [*cached, "others"]
            server.add(kind, f"owner/name{number}", dict.fromkeys(names, b"x"))
            downloads.append((environment, Address(kind, f"owner/name{number}"), names))
        run_ranks(call_each, 1, _download, downloads)
    for number, (_, gone, _) in enumerate(_INCOMPLETE):
        (snapshot,) = (tmp_path / "home").rglob(f"*--name{number}/snapshots/*")
        (snapshot / "others").unlink()
        for name in gone:
            (snapshot / name).resolve().unlink()
    addresses = [f"hf://{'datasets/' * (kind == 'dataset')}owner/name{n}" for n, kind in enumerate(kinds)]
    (lines,) = run_ranks(_refusals, 1, tmp_path, environment | {"HF_HUB_OFFLINE": "1"}, addresses)
    for line, address, (cached, gone, told) in zip(lines, addresses, _INCOMPLETE, strict=True):
        assert line.startswith(f"the cached copy of {address} {told}")
        links = f", and links to files that are gone ({', '.join(gone)})" if gone else ""
        names = ", ".join(name for name in cached if name not in gone) or "no files"
        assert line.endswith(f". It has {names}{links}. Connect to the Hub once, and start again.")


def _download(environment: dict[str, str], address: Address, names: list[str]) -> None:
    os.environ.update(environment)
    with contextlib.redirect_stdout(None):
        download(address, lambda _: names, by_hand="")


def _take_every_csv_file(environment: dict[str, str]) -> str:
    os.environ.update(environment)
    with pytest.raises(ValueError, match="outside") as refusal:
        find_source_files(
            Path(_HERE), lambda names: [n for n in names if "csv" in n], needed="", output_dir=Path("x")
        )
    return str(refusal.value)


def test_names_never_lead_out_of_the_folder(server, tmp_path):
    """By ourselves, before the client would refuse the name too."""
    (line,) = run_ranks(_take_every_csv_file, 1, server.environment(tmp_path / "home"))
    assert line == f"{_HERE}: file name '../outside.csv' leads out of the folder. Not downloaded."
    assert server.downloads() == []


def test_pairs_from_the_hub(server, tmp_path):
    """In a subfolder, as many datasets have them."""
    line = '{{"input": "{0}", "output": "{0}{0}"}}\n'
    files = {"train.jsonl": line.format(1).encode(), "test.jsonl": line.format(2).encode()}
    in_folder = {f"data/{name}": content for name, content in files.items()}
    server.add("dataset", "owner/pairs", {"README.md": b"# Pairs", **in_folder})
    environment = server.environment(tmp_path / "home")
    finished = _build(tmp_path / "hub", "hf://datasets/owner/pairs", "pairs", **environment)
    assert finished.statuses == [0], finished.stderr
    assert server.downloads() == list(files)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert _build(tmp_path / "by_hand", str(tmp_path), "pairs").statuses == [0]
    built = [tmp_path / place / "data" / "manifest.json" for place in ("hub", "by_hand")]
    assert built[0].read_bytes() == built[1].read_bytes()
