"""Sharing a run: pushed to a server that speaks the Hub's protocol, and read back by the programs."""

import io
import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from safetensors.torch import load_file

from checkpointing.files import STARTS_FILE
from checkpointing.finding import broadcast_checkpoints, find_checkpoint
from checkpointing.loading import load_weights
from checkpointing.tensors import load_joined
from config.files import FOLDER
from dataset.build import build_dataset
from dataset.mixture import open_datasets
from distributed.world import rank
from runtime.hub import parse_address
from share import keep
from share.push import main as push
from share.push import upload
from tests.golden import GOLDEN
from tests.hub_server import HubServer, hub_server
from tests.ranks import NUM_THREADS, Finished, complete_program, run_program, run_ranks
from tests.refusals import cases, check, refusal
from tests.solvers import save_run
from tests.tiny import OVERRIDES

pytestmark = pytest.mark.slow

_FILES = ["config.json", "model.safetensors", "trained_on.safetensors"]
_REPO, _HERE = "owner/tiny", "hf://owner/tiny"


@pytest.fixture(scope="module")
def server() -> Iterator[HubServer]:
    with hub_server() as server:
        yield server


@pytest.fixture(scope="module")
def trained(tmp_path_factory, sudoku_folder) -> Path:
    """A run with averages, evaluated at its end alone; its data_path is absolute."""
    folder = tmp_path_factory.mktemp("trained")
    data = shutil.copytree(sudoku_folder, folder / "data" / "tiny")
    words = (f"data_path={data}", *OVERRIDES, "max_steps=10", "ema=0.5", "evaluators=[sudoku]")
    words = (*words, "checkpoint_path=run", "checkpoint_interval=5")
    complete_program("pretrain", *words, folder=folder, world_size=2)
    starts = folder / "run" / STARTS_FILE
    starts.write_text(starts.read_text().replace("+changes", ""))  # of this checkout while it is edited
    return folder / "run"


@pytest.fixture(scope="module")
def pushed(trained, server, tmp_path_factory) -> HubServer:
    home = tmp_path_factory.mktemp("home")
    finished = _push(trained.parent, "run", _REPO, **server.environment(home, HF_TOKEN=server.token))
    assert finished.statuses == [0], finished.stderr
    assert finished.stderr == ""
    page = f"{server.environment(home)['HF_ENDPOINT']}/{_REPO}"
    assert finished.stdout == f"pushed run/step_10 to {page}. To load it, set checkpoint={_HERE}.\n"
    return server


def _push(folder: Path, *arguments: str, **environment: str) -> Finished:
    return run_program("share/__main__", "push", *arguments, folder=folder, world_size=None, **environment)


def _evaluate(folder: Path, *arguments: str, world_size: int = 1, **environment: str) -> Finished:
    arguments = (*arguments, "device=cpu", f"cpu_threads={NUM_THREADS}")
    return run_program("evaluate", *arguments, folder=folder, world_size=world_size, **environment)


def test_a_model_is_kept_in_the_smallest_dtype_that_changes_no_answer(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(keep, "SHIPPED", tmp_path)
    keep.main([str(trained), "tiny", "--data-path", "data/tiny"])
    tried = re.findall(
        r"^weights in torch\.(\w+) change (\d+) of 100 answers, computed in (\w+)$",
        capsys.readouterr().out,
        re.M,
    )
    kept = find_checkpoint(tmp_path / "tiny")
    assert kept.data_paths == ["data/tiny"]
    (dtype,) = {str(tensor.dtype).removeprefix("torch.") for tensor in load_file(kept.path).values()}
    refused = [name for name, changed, _ in tried if changed != "0"]
    assert [*refused, dtype] == ["float8_e4m3fn", "float16", "float32"][: len(refused) + 1]
    data = open_datasets([trained.parent / "data" / "tiny"], splits=("test",), read_everything=False)
    asked = (find_checkpoint(trained), kept)
    ours, theirs = (keep.answer(each, data, torch.float32, "float32", count=99) for each in asked)
    assert ours.keys() == theirs.keys() == {("all", number) for number in range(99)}
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


def test_a_dtype_in_which_a_search_finds_no_answer_is_not_kept(monkeypatch, capsys):
    answers = {("all", number): np.array([number]) for number in range(20)}
    found = {torch.float8_e4m3fn: {}, torch.float16: dict([*answers.items()][:19]), torch.float32: answers}
    monkeypatch.setattr(keep, "answer", lambda checkpoint, data, dtype, *_, **__: found[dtype])
    checkpoint = SimpleNamespace(arch=SimpleNamespace(forward_dtype="bfloat16"))
    assert keep.choose_dtype(checkpoint, None, count=20) == torch.float16
    assert "weights in torch.float8_e4m3fn answer 0 puzzles, 20 before\n" in capsys.readouterr().out
    monkeypatch.setattr(keep, "answer", lambda *_, **__: {})  # nothing is compared
    assert keep.choose_dtype(checkpoint, None, count=20) == torch.float32


def test_the_weights_that_are_asked_are_rounded_once_as_those_that_are_stored(trained, monkeypatch):
    checkpoint, asked = find_checkpoint(trained), {}
    data = open_datasets([trained.parent / "data" / "tiny"], splits=("test",), read_everything=False)
    monkeypatch.setattr(
        keep, "evaluate_split", lambda model, *_, **__: asked.update(model.network.state_dict()) or {}
    )
    keep.answer(checkpoint, data, torch.float8_e4m3fn, "bfloat16", count=9)
    for name, each in load_weights(checkpoint).items():
        rounded = each.to(torch.float8_e4m3fn) if each.is_floating_point() else each
        assert torch.equal(asked[name], rounded.to(asked[name].dtype)), name


def test_kept_weights_are_asked_puzzles_with_several_examples(tmp_path):
    build_dataset("arc", ["--output-dir", str(tmp_path), "--generate", "5", "--max-size", "7", "--dihedral"])
    (asked,) = open_datasets([tmp_path], splits=("test",), read_everything=False).splits["test"].sets.values()
    assert asked.num_examples == 2 * 40
    assert np.array_equal(keep.choose_puzzles(asked, 1000), np.arange(40))
    assert keep.choose_puzzles(asked, 4).tolist() == [0, 10, 20, 30]


def test_a_second_push_leaves_no_file_about_other_weights(server, tmp_path, monkeypatch):
    """The first model was trained on puzzles with embeddings. Those of the second are not known."""
    before = {
        "README.md": b"old",
        "identities.npz": b"old",
        "trained_on.safetensors": b"old",
        "notes": b"mine",
    }
    server.add("model", "owner/again", before)
    (tmp_path / "README.md").write_text("new")
    api = huggingface_hub.HfApi(server.environment(tmp_path)["HF_ENDPOINT"], token=server.token)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
    upload(tmp_path, parse_address("hf://owner/again", kind="model"), message="second", is_private=False)
    repository = server.repositories["model", "owner/again"]
    assert repository.commits[repository.find("main")] == {"README.md": b"new", "notes": b"mine"}


def test_what_is_pushed_evaluates_to_the_same_bytes(pushed, trained, tmp_path):
    repository = pushed.repositories["model", _REPO]
    files = repository.commits[repository.find("main")]
    assert files.keys() == {".gitattributes", "README.md", *_FILES}
    assert files["trained_on.safetensors"] == (trained / "step_10" / "trained_on.safetensors").read_bytes()
    averages = load_joined(trained / "step_10", "ema_weights")
    (tmp_path / "model.safetensors").write_bytes(files["model.safetensors"])
    theirs = load_file(tmp_path / "model.safetensors")
    assert theirs.keys() == averages.keys()
    assert all(theirs[name].equal(value) for name, value in averages.items())

    shutil.copytree(trained.parent / "data", tmp_path / "data")
    common = ("evaluators=[sudoku]", "output_dir=ours")
    assert _evaluate(tmp_path, f"checkpoint={trained}", *common, world_size=2).statuses == [0, 0]
    pushed.requests.clear()
    environment = pushed.environment(tmp_path / "home")
    finished = _evaluate(tmp_path, f"checkpoint={_HERE}", "evaluators=[sudoku]", world_size=2, **environment)
    assert finished.statuses == [0, 0], finished.stderr
    assert finished.stderr == ""
    assert sorted(pushed.downloads()) == _FILES, "by one rank, once"
    written = tmp_path / "checkpoints" / "hf" / "owner" / "tiny" / "evaluation" / "step_10" / "metrics.json"
    assert written.read_bytes() == (tmp_path / "ours" / "metrics.json").read_bytes()

    arguments = (f"checkpoint={_HERE}", "puzzle=1..4 .... .... 4..1", "device=cpu")
    complete_program("solve", *arguments, folder=tmp_path, world_size=None, **environment)
    training = ("data_path=data/tiny", *OVERRIDES, "max_steps=1", f"init_from={_HERE}")
    training = (*training, "checkpoint_path=second")
    finished = complete_program("pretrain", *training, folder=tmp_path, world_size=2, **environment)
    assert f"starting with the weights of {_HERE}@{repository.find('main')}" in finished.stdout
    raw = _evaluate(tmp_path, f"checkpoint={_HERE}", "raw=true", **environment)
    assert raw.error_lines[0].endswith("contains only averaged (EMA) weights. Remove raw=true.")


def test_the_card_tells_what_the_run_was(trained, tmp_path, capsys):
    from huggingface_hub import ModelCard

    recorded = (trained / STARTS_FILE).read_text()
    (first,) = (json.loads(line) for line in recorded.splitlines())
    changed = "a" * 40 + "+changes"
    starts = [first | {"git_commit": changed}, first | {"step": 10, "git_commit": "b" * 40}]  # a later one
    (trained / STARTS_FILE).write_text("".join(json.dumps(start) + "\n" for start in starts))
    push([str(trained), "owner/name", "--dry-run", str(tmp_path / "dry"), "--license", "mit"])
    (trained / STARTS_FILE).write_text(recorded)
    assert "the run had uncommitted code changes" in capsys.readouterr().err
    names = sorted(path.name for path in (tmp_path / "dry").iterdir())
    assert names == ["README.md", *_FILES]
    card = ModelCard.load(tmp_path / "dry" / "README.md")
    text, config = card.content, json.loads((tmp_path / "dry" / "config.json").read_text())
    assert "information needed" not in text.lower()
    assert str(tmp_path.parent) not in text + json.dumps(config), "nothing of this machine"
    assert card.data.license == "mit"
    assert {"hrm", "sudoku"} <= set(card.data.tags)
    logged = json.loads((trained / "metrics.jsonl").read_text().splitlines()[-1])
    found = {result.metric_name: result.metric_value for result in card.data.eval_results}
    assert found["exact_accuracy"] == logged["eval/all/exact_accuracy"]
    assert found["sudoku/valid_accuracy"] == logged["eval/all/sudoku/valid_accuracy"]
    state = json.loads((trained / "step_10" / "state.json").read_text())
    assert "b" * 40 not in text
    for expected in (changed, state["dataset_fingerprint"], "(EMA 0.5)", "checkpoint=hf://owner/name"):
        assert expected in text

    first_lines = (trained / "logs" / "rank_0.log").read_text()
    assert "slots on each of 2 processes" in first_lines
    (num_parameters,) = re.findall(r"([\d,]+) parameters on", first_lines)
    assert f" with {num_parameters} weights, and 32 in puzzle embeddings" in text

    # The command makes the same run.
    (command,) = [line for line in text.splitlines() if line.startswith("python pretrain.py")]
    with initialize_config_dir(str(FOLDER), version_base="1.3"):
        composed = OmegaConf.to_container(compose("pretrain", shlex.split(command)[2:]), resolve=True)
    run = config["run"]
    assert {**run, "data_path": ["data/tiny"]} == run
    assert {key: composed[key] for key in run} == run
    (built,) = [line for line in text.splitlines() if line.startswith("python -m dataset.build sudoku")]
    assert built.endswith(
        " --output-dir data/tiny --seed 0 --generate 200 --box 2x2 --num-test 100 --num-aug 0"
    )

    # What would be uploaded is a checkpoint, too; the best one says who chose it.
    shutil.copytree(trained.parent / "data", tmp_path / "data")
    assert find_checkpoint(tmp_path / "dry").seq_len == 16
    push([str(trained / "best"), "owner/name", "--dry-run", str(tmp_path / "best")])
    assert find_checkpoint(tmp_path / "best").selected_by == "test"
    assert "selected on the test puzzles" in (tmp_path / "best" / "README.md").read_text()
    assert capsys.readouterr().err == ""
    push([str(trained / "step_5"), "owner/name", "--dry-run", str(tmp_path / "early")])
    found = f"no accuracy of step_5 found in metrics.jsonl and evaluation/step_5 of {trained}."
    assert f"{found} The card will have no results." in capsys.readouterr().err
    assert "No results of the model were found" in (tmp_path / "early" / "README.md").read_text()


@pytest.mark.parametrize(
    ("conv", "expected"), [("instead", "also answers puzzles of other"), ("none", "only")]
)
def test_a_card_says_whether_the_model_answers_puzzles_of_other_sizes(
    conv, expected, sudoku_folder, tmp_path
):
    arch = {"conv": conv, "pos_encodings": "none", "puzzle_emb_ndim": 0, "puzzle_emb_len": 0}
    run = save_run(tmp_path / "run", sudoku_folder, name="trm", **arch)
    push([str(run), "owner/name", "--dry-run", str(tmp_path / "dry")])
    assert f"a vocabulary of 6. It {expected} " in (tmp_path / "dry" / "README.md").read_text()


@pytest.mark.parametrize("content", ["", '{"model_type": "bert"}'])
def test_a_model_of_another_program_is_not_replaced(content, tmp_path, monkeypatch):
    monkeypatch.setattr(keep, "SHIPPED", tmp_path)
    folder = tmp_path / "bert"
    folder.mkdir()
    (folder / "model.safetensors").touch()
    (folder / "config.json").write_text(content)
    commands = {"keep": ["run", "bert"], "push": ["run", "owner/name", "--dry-run", str(folder)]}
    for name, words in commands.items():
        with pytest.raises(SystemExit, match=f"bert is not empty and was not made by share {name}. Choose"):
            {"keep": keep.main, "push": push}[name](words)


def _find_on_nodes(homes: list[str], environment: dict[str, str]) -> str:
    """Ranks 0 and 1 are one node, rank 2 another, whose cache is elsewhere."""
    os.environ.update(environment, HF_HOME=homes[rank()], LOCAL_RANK=str(rank() % 2))
    (found,) = broadcast_checkpoints([_HERE])
    assert found.path.is_file()
    return str(found.path)


def test_every_node_downloads_once(pushed, tmp_path):
    homes = [str(tmp_path / node) for node in ("a", "a", "b")]
    pushed.requests.clear()
    paths = run_ranks(_find_on_nodes, 3, homes, pushed.environment(tmp_path))
    assert [path.startswith(home) for path, home in zip(paths, homes, strict=True)] == [True] * 3
    assert sorted(pushed.downloads()) == ["config.json", *_FILES[1:2], *_FILES[1:]]


@pytest.mark.parametrize("name", ["checkpoint", "step_4000", "step_4000.pt"])
def test_published_layout(server, tmp_path, name):
    golden = GOLDEN / "hrm_checkpoint"
    weights, config = (golden / "step_4000").read_bytes(), (golden / "all_config.yaml").read_bytes()
    config_name = "config.yaml" if name.endswith(".pt") else "all_config.yaml"
    files = {config_name: config, name: weights}
    code = {"hrm_act_v1.py": b"raise SystemExit", "step_10/weights.safetensors": b"", "step_3": b"older"}
    server.add("model", f"published/{name}", files | (code if name != "checkpoint" else {}))
    server.requests.clear()
    words = (f"checkpoint=hf://published/{name}", f"data_path={golden / 'dataset'}")
    finished = _evaluate(tmp_path, *words, **server.environment(tmp_path / "home"))
    assert finished.statuses == [0], finished.stderr
    assert sorted(server.downloads()) == [config_name, name]
    folder = tmp_path / "checkpoints" / "hf" / "published" / name / "evaluation"
    (results,) = folder.glob(f"{name.removesuffix('.pt')}_*/metrics.json")  # on other data than its own
    expected = json.loads((golden / "expected.json").read_text())
    found = json.loads(results.read_text())[expected["set"]]
    assert {name: found[name] for name in expected["metrics"]} == pytest.approx(expected["metrics"], rel=1e-3)


class _Stranger:
    def __reduce__(self):
        return print, ("a stranger's code has run",)


@pytest.fixture(scope="module")
def strangers(pushed) -> HubServer:
    """The server with repositories that are none of ours."""
    config, strange = (GOLDEN / "hrm_checkpoint" / "all_config.yaml").read_bytes(), io.BytesIO()
    torch.save({"weight": _Stranger()}, strange)
    pushed.add("model", "owner/strange", {"all_config.yaml": config, "checkpoint": strange.getvalue()})
    pushed.add("model", "owner/other", {"config.json": b'{"model_type": "bert"}', "model.safetensors": b""})
    pushed.add("model", "owner/broken", {"config.json": b"{", "model.safetensors": b""})
    pushed.add("model", "owner/code", {"model.py": b"", "weights.bin": b""})
    return pushed


@cases("hub checkpoints", "given", "environment")
def test_checkpoints_that_cannot_be_read(strangers, trained, tmp_path, given, environment, words):
    given = given.replace("DATA", str(trained.parent / "data" / "tiny"))
    environment = strangers.environment(tmp_path / "home") | environment
    finished = _evaluate(tmp_path, *given.split(), world_size=2, **environment)
    assert finished.statuses == [1, 1]
    (line,) = finished.error_lines
    check(line, words)
    assert finished.stdout.count("a stranger") == 0


@cases("push command lines", "given")
def test_what_is_refused_before_the_hub_is_asked(trained, monkeypatch, given, words):
    monkeypatch.setattr("share.push.upload", None)
    monkeypatch.chdir(trained.parent)
    given = given.replace("PUBLISHED", str(GOLDEN / "hrm_checkpoint"))
    check(refusal(push, "share push", *shlex.split(given)), words)


@cases("pushes", "given", "environment")
def test_what_cannot_be_pushed(pushed, trained, tmp_path, given, environment, words):
    environment = pushed.environment(tmp_path / "home") | {"HF_TOKEN": pushed.token} | environment
    before = len(pushed.repositories["model", _REPO].commits)
    finished = _push(trained.parent, *shlex.split(given), **environment)
    assert finished.statuses == [1]
    (line,) = finished.error_lines
    check(line, ["share push: error: ", *words])
    assert len(pushed.repositories["model", _REPO].commits) == before
