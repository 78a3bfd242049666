"""Files and words of strangers: none costs more than its size, leaves its line, or is written through."""

import gzip
import json
import os
import shutil
import sqlite3
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpointing.files import read_state
from checkpointing.finding import SHIPPED, find_checkpoint
from checkpointing.loading import load_trained_model, load_weights
from checkpointing.tensors import find_files, load_joined, save_section
from config.compose import compose_overrides
from config.files import load_defaults
from config.programs import SearchConfig
from config.schema import PretrainConfig, validate_config
from dataset.build.__main__ import main as build
from dataset.description import DatasetInfo, read_names
from dataset.files import open_split
from dataset.kinds.pairs.files import read_pairs
from dataset.kinds.sudoku.texts import read_grids
from dataset.metadata import usual_metadata
from distributed import log
from report.page import write_report
from runtime.reading import read_arrays, read_lines, read_text
from runtime.writing import to_yaml, write_text
from share.card import _build_command, _plain
from tests.checkpoints import resume, save, seal
from tests.puzzle_sets import write as make_dataset
from tests.ranks import REPOSITORY
from training.run_config import describe_changes
from training.run_folder import is_in_use, lock_folder, record_start, write_status
from tuning.space import read_space
from tuning.study import Study

_CODES = "\u00e9\x1b[2J\x9b\u202eb"


def test_what_is_small_on_disk_stays_small(tmp_path):
    (tmp_path / "bomb.jsonl.gz").write_bytes(gzip.compress(b"0" * 1_000_000))
    for read in (read_text, lambda path, most: [*read_lines(path, most=most)]):
        with pytest.raises(ValueError, match=r"bomb\.jsonl\.gz.* more than 10,000 "):
            read(tmp_path / "bomb.jsonl.gz", most=10_000)
    np.savez_compressed(tmp_path / "bomb.npz", a=np.zeros(1_000_000), b=np.arange(3))
    with pytest.raises(ValueError, match="more than 10,000 bytes"):
        read_arrays(tmp_path / "bomb.npz", ["a", "b"], most=10_000)
    assert read_arrays(tmp_path / "bomb.npz", ["b"], most=10_000)[0].tolist() == [0, 1, 2]
    (tmp_path / "ema_weights_0_of_999999999.safetensors").touch()
    with pytest.raises(ValueError, match="ema_weights_1_of_999999999.safetensors is missing"):
        find_files(tmp_path, "ema_weights")


def test_a_long_text_takes_little_time(tmp_path):
    """Time that grows with the square of the length would exceed the timeout of a test by far."""
    length = 600_000
    for text in ("(" + " " * length + "x", "[" + "1" * length + "x]"):
        (tmp_path / "p.jsonl").write_text(json.dumps({"input": text, "output": "a"}))
        read_pairs([tmp_path / "p.jsonl"], fields=("input", "output"))
    assert len(read_grids("grid" + "." * length + "x\n" + "." * 81)) == 1


@pytest.fixture(scope="module")
def some_files(tmp_path_factory) -> Path:
    """A run, a shared checkpoint, public weights, a dataset, and tables."""
    folder = tmp_path_factory.mktemp("files")
    save(folder / "run", 5).close()
    shutil.copytree(SHIPPED / "demo", folder / "shared")
    torch.save({}, folder / "step_7")
    make_dataset(folder / "data", train={"all": [[1]]}, test={"all": [[1]]})
    (folder / "data" / "identifiers.json").write_text("[]")
    for name in ("pairs.jsonl", "pairs.csv", "pairs.parquet", "pairs.json", "all__outputs.npz"):
        (folder / name).touch()
    return folder


def _read_table(path: Path) -> None:
    build(["pairs", "--source", str(path), "--output-dir", str(path.with_name("built"))])


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("run/step_5/weights.safetensors", lambda path: resume(path.parent.parent)),
        ("run/step_5/weights.safetensors", lambda path: load_joined(path.parent, "weights")),
        ("run/step_5/config.yaml", lambda path: find_checkpoint(path.parent)),
        ("run/step_5/state.json", lambda path: read_state(path.parent)),
        ("run/step_5/manifest.json", lambda path: find_checkpoint(path.parent)),
        ("shared/config.json", lambda path: find_checkpoint(path.parent)),
        ("shared/model.safetensors", lambda path: load_weights(find_checkpoint(path.parent))),
        ("step_7", lambda path: load_weights(replace(find_checkpoint(SHIPPED / "demo"), path=path))),
        ("data/train/dataset.json", lambda path: open_split(path.parent.parent, "train")),
        ("data/train/all__inputs.npy", lambda path: open_split(path.parent.parent, "train")),
        ("data/identifiers.json", lambda path: read_names(path.parent)),
        ("all__outputs.npz", lambda path: read_arrays(path, ["preds"])),
        *((f"pairs.{ending}", _read_table) for ending in ("jsonl", "csv", "parquet", "json")),
    ],
)
def test_a_pointer_of_git_lfs_is_named(some_files, tmp_path, capsys, name, read):
    folder = tmp_path / "copy"
    shutil.copytree(some_files, folder)
    path = folder / name
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 124837\n")
    with pytest.raises((ValueError, SystemExit)) as refused:
        read(path)
    line = f"{path} is a pointer of Git LFS. To download it, run git lfs pull in {path.parent}.\n"
    assert f"{refused.value}\n{capsys.readouterr().err}".count(line) == 1
    assert path.is_file(), "it is not renamed"


def test_sizes_are_compared_before_there_is_memory_for_them(tmp_path):
    config = compose_overrides(PretrainConfig, ["data_path=x", "arch.hidden_size=1048576"])
    folder = tmp_path / "step_1"
    folder.mkdir()
    save_section({"embed_tokens.embedding_weight": torch.zeros(12, 8)}, folder, "weights")
    write_text(folder / "config.yaml", to_yaml(config.model_dump()))
    metadata = usual_metadata(vocab_size=12, seq_len=81, num_puzzle_identifiers=1)
    with pytest.raises(ValueError, match="weights do not match the config"):
        load_trained_model(find_checkpoint(folder), metadata)


@pytest.mark.parametrize("num_rows", [None, 10])
def test_embeddings_that_the_identities_name_may_be_missing(tmp_path, num_rows):
    folder = shutil.copytree(SHIPPED / "arc_mini", tmp_path / "shared")
    weights = load_file(folder / "model.safetensors")
    table = weights.pop("puzzle_emb.weights")
    save_file(
        weights | ({"puzzle_emb.weights": table[:num_rows]} if num_rows else {}), folder / "model.safetensors"
    )
    checkpoint = find_checkpoint(folder)
    metadata = DatasetInfo.from_json(checkpoint.dataset_info, where="here").metadata
    with pytest.raises(ValueError, match="weights do not match the config stored with them"):
        load_trained_model(checkpoint, metadata, rows=np.arange(len(table)))


@pytest.mark.parametrize("more", ["", "plugins: [mine.py]"])
@pytest.mark.parametrize("name", ["[hrm]", "{hrm: 1}", "1"])
def test_a_name_of_a_model_that_is_no_text_is_refused(tmp_path, name, more):
    folder = tmp_path / "step_1"
    folder.mkdir()
    save_section({"weight": torch.zeros(1)}, folder, "weights")
    write_text(folder / "config.yaml", f"arch: {{name: {name}}}\n{more}\n")
    with pytest.raises(ValueError, match=f"^{folder}/config.yaml: .*(arch.name=|plugin)"):
        find_checkpoint(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": None}, "step=null should be"),
        ({"step": -1}, "step=-1 should be"),
        ({"metrics": []}, "metrics has no steps_summed"),
        ({"metrics": [{}]}, "metrics has no steps_summed"),
        ({"metrics": [{"steps_summed": 1, "loss": "x"}]}, "metrics[0]='x' should be"),
        ({"best": 7}, "best=7 should be"),
        ({"dataset_fingerprint": None}, "dataset_fingerprint=null should be"),
        (None, "key 'step' is missing"),
    ],
)
def test_a_state_from_which_no_run_can_continue_is_refused(tmp_path, capsys, changes, message):
    run = tmp_path / "run"
    save(run, 5).close()
    path = run / "step_5" / "state.json"
    state = {} if changes is None else json.loads(path.read_text()) | changes
    path.write_text(json.dumps(state))
    seal(path.parent)
    with pytest.raises(SystemExit):
        resume(run)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {path}: ")
    assert message in line


@pytest.mark.parametrize("odd", [{1: 2}, {"arch": {"name": []}}, {"arch": {"name": [1]}, "plugins": ["x"]}])
def test_a_stored_config_of_odd_values_is_one_line(tmp_path, odd):
    config = compose_overrides(PretrainConfig, ["data_path=x"])
    assert describe_changes(odd, config)
    shutil.copytree(SHIPPED / "demo", tmp_path / "demo")
    values = json.loads((tmp_path / "demo" / "config.json").read_text())
    (tmp_path / "demo" / "config.json").write_text(json.dumps(values | {"run": odd}))
    with pytest.raises(ValueError, match=r"config\.json: ") as refused:
        find_checkpoint(tmp_path / "demo")
    assert "\n" not in str(refused.value)


def test_no_code_of_a_terminal_is_shown(tmp_path, capsys):
    log.info(f"{_CODES}\n\tnext")
    log.warning(_CODES)
    log.error(_CODES)
    said = capsys.readouterr()
    assert said.out == "\u00e9\\x1b[2J\\x9b\\u202eb\n\tnext\n"
    assert all(line.isprintable() for line in said.err.splitlines())
    (tmp_path / "identifiers.json").write_text(json.dumps([_CODES]))
    assert read_names(tmp_path) == ["\u00e9\\x1b[2J\\x9b\\u202eb"]
    info = DatasetInfo(
        usual_metadata(vocab_size=4, seq_len=4, num_puzzle_identifiers=1, symbols=("x", "y"), num_columns=2)
    )
    values = info.to_json()
    assert DatasetInfo.from_json(values, where="here") == info
    values["metadata"]["symbols"] = ("x", _CODES)
    with pytest.raises(
        ValueError, match="^here: symbols contains a text twice, or a text that is not printable"
    ):
        DatasetInfo.from_json(values, where="here")


@pytest.mark.parametrize(
    "arguments",
    [
        {"source": "x; touch y"},
        {"source": {"a b $(touch y)": "0" * 64}},
        {"source": "a\n```\n# mine"},
        {"source": _CODES},
        {"x $(touch y)": 1},
        {"generate": [1, {"a\nb": 2}]},
    ],
)
def test_a_command_of_a_card_is_one_line_that_runs_one_program(tmp_path, arguments):
    manifest = {"builder": {"name": "sudoku", "arguments": arguments}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    command = _build_command(tmp_path, name="data/x; touch y")
    if command is not None:
        words = ["bash", "-c", f"python() {{ echo called; }}\n{command}"]
        shown = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
        assert (shown.stdout, shown.stderr) == ("called\n", "")
        assert command.isprintable()
    assert [each.name for each in tmp_path.iterdir()] == ["manifest.json"]
    assert _plain("<b>`$(x)`|\n") == "-b----x----"


_ODD = (None, True, -1, 2**64, 1e999, -0.0, "x", [], {}, [[]], {"a": 1}, "<b>", _CODES)


@pytest.mark.parametrize("odd", _ODD)
def test_a_report_of_odd_values_is_a_report(tmp_path, odd):
    names = ("time", "command", "git_commit", "hardware", "processes", "torch", "num_parameters")
    rows = [{"step": 1, "eval/all/exact_accuracy": odd, "eval/all/count": odd}, {"step": odd}]
    files = {
        "metrics.jsonl": [*rows, {"step": 2, "train/lm_loss": odd, "train/lr": odd}],
        "starts.jsonl": [{"step": 0} | dict.fromkeys(names, odd)],
        "status": [{"status": odd, "step": odd}],
        "evaluation/step_1/metrics.json": [{"all": {"exact_accuracy": odd, "count": odd, "x": odd}}],
        "evaluation/step_1/scaling.json": [{"sets": {"all": {"corners": [{"ways": {"q_head": odd}}]}}}],
        "step_1/state.json": [{"dataset_fingerprint": odd}],
        "config.yaml": [{"run_name": odd, "data_path": odd, "arch": odd, "lr": odd}],
    }
    for name, values in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("\n".join(map(json.dumps, values)))
    page = write_report(tmp_path, num_puzzles=0).read_text()
    assert "<b>" not in page


def test_no_file_of_a_run_is_written_through_a_link(tmp_path):
    run, victim = tmp_path / "run", tmp_path / "victim"
    (run / "logs").mkdir(parents=True)
    victim.write_text("mine")
    for name in ("lock", "status", "starts.jsonl", "logs/rank_0.log"):
        (run / name).symlink_to(victim)
    with pytest.raises(OSError, match="link"):
        lock_folder(run, other="run_name")
    with pytest.raises(OSError, match="link"):
        is_in_use(run)
    write_status(run, "running", step=1)
    record_start(run, step=0, num_parameters=1, gradient_sync="", device=torch.device("cpu"))
    log.open_rank_file(run)
    assert victim.read_text() == "mine"
    assert json.loads((run / "status").read_text()) == {"status": "running", "step": 1}


_CHOICE = json.dumps({"name": "CategoricalDistribution", "attributes": {"choices": ["hf://evil"]}})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("trial_params SET param_value = 1e9", "lr=.* is not in the search space"),
        (
            f"trial_params SET distribution_json = '{_CHOICE}', param_value = 0",
            "'hf://evil' is not in the search space",
        ),
        ("trial_params SET distribution_json = '[]'", "study.db is not a storage of studies"),
        ("study_user_attributes SET value_json = '7' WHERE key = 'config'", "study.db was not created"),
        ("study_user_attributes SET value_json = 'a'", "study.db is not a storage of studies"),
    ],
)
def test_only_the_space_is_searched(tmp_path, statement, message):
    space = read_space(["data_path=x", "lr=interval(1e-4,1e-2)"])
    given = {"study": "s", "folder": str(tmp_path)}
    config = validate_config(SearchConfig, load_defaults("search") | given)
    study = Study(tmp_path / "study.db", config, space, space.check())
    study.optuna.tell(study.begin()[0], 0.5)
    assert study.parameters(study.best()).keys() == {"lr"}
    with sqlite3.connect(tmp_path / "study.db") as storage:
        storage.execute(f"UPDATE {statement}")
    with pytest.raises(ValueError, match=message):
        _best_of(Study(tmp_path / "study.db", config, space, space.check()))


def _best_of(study: Study) -> dict[str, str]:
    return study.parameters(study.best())


@pytest.mark.parametrize("host", ["-oProxyCommand=x", "user@-x", "a;/e", "a b", "$(x)", ""])
def test_a_host_is_no_option_and_no_command(host):
    command = ["bash", REPOSITORY / "launch" / "hosts.sh", "--print", f"{host},node2", "pretrain.py", "x"]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 2
    assert "is not a host name or USER@HOST" in finished.stderr


@pytest.mark.parametrize("port", ["0", "65536", "29400x", "9" * 30])
def test_a_port_is_a_number(port):
    command = ["bash", REPOSITORY / "launch" / "hosts.sh", "--print", "node1,node2", "pretrain.py", "x"]
    finished = subprocess.run(command, env=os.environ | {"PORT": port}, capture_output=True, text=True)
    refused = f"error: PORT={port} is not an integer from 1 to 65535. Set another one.\n"
    assert (finished.returncode, finished.stdout, finished.stderr) == (2, "", refused)


def test_the_page_asks_nobody_and_the_image_is_no_root():
    page = (REPOSITORY / "share" / "site" / "index.html").read_text()
    assert "Content-Security-Policy" in page
    assert "default-src 'none'" in page
    assert "\nUSER 1000\n" in (REPOSITORY / "launch" / "Dockerfile").read_text()
