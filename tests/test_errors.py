"""Every mistake that a person can make: one line from us, status not 0, nothing half-written."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.ranks import NUM_THREADS, run_program
from tests.tiny import OVERRIDES


def _remove(name: str):
    return lambda data: (data / name).unlink()


def _edit_json(**changes):
    def edit(data: Path) -> None:
        path = data / "train" / "dataset.json"
        values = json.loads(path.read_text())
        values.update(changes)
        path.write_text(json.dumps({key: value for key, value in values.items() if value != "removed"}))

    return edit


def _edit_array(name: str, change):
    def edit(data: Path) -> None:
        path = data / "train" / f"all__{name}.npy"
        np.save(path, change(np.load(path)))

    return edit


def _truncate(data: Path) -> None:
    path = data / "train" / "all__inputs.npy"
    path.write_bytes(path.read_bytes()[:-100])


def _set(index, value):
    def change(array: np.ndarray) -> np.ndarray:
        array[index] = value
        return array

    return change


_DATA = {
    "no folder": (shutil.rmtree, ["data folder", "dataset.build sudoku", "experiment=demo"]),
    "no dataset.json": (_remove("train/dataset.json"), ["train/dataset.json is missing"]),
    "malformed dataset.json": (
        lambda data: (data / "train" / "dataset.json").write_text("{"),
        ["dataset.json", "not valid JSON"],
    ),
    "missing field": (_edit_json(vocab_size="removed"), ["dataset.json", "'vocab_size'"]),
    "missing array": (_remove("train/all__labels.npy"), ["all__labels.npy is missing"]),
    "missing test array": (_remove("test/all__inputs.npy"), ["test/all__inputs.npy is missing"]),
    "truncated array": (_truncate, ["all__inputs.npy", "truncated"]),
    "wrong shape": (_edit_array("inputs", lambda array: array[:, :-1]), ["all__inputs.npy", "shape"]),
    "wrong dtype": (
        _edit_array("inputs", lambda array: array.astype(np.float32)),
        ["all__inputs.npy", "float32"],
    ),
    "token": (_edit_array("inputs", _set((3, 4), 6)), ["all__inputs.npy", "token 6", "row 3"]),
    "identifier": (_edit_array("puzzle_identifiers", _set(2, 1)), ["all__puzzle_identifiers.npy"]),
    "offsets": (_edit_array("puzzle_indices", _set(5, 3)), ["all__puzzle_indices.npy", "rise"]),
}

_CONFIG = {
    "misspelt key": (["epoch=3"], ["unknown key 'epoch'", "'epochs'"]),
    "misspelt arch key": (["arch.hiden_size=8"], ["'arch.hidden_size'"]),
    "eval_interval": (["eval_interval=3"], ["eval_interval 3", "epochs 4"]),
    "negative rate": (["lr=-1e-3"], ["lr=-0.001"]),
    "heads": (["arch.num_heads=3"], ["hidden_size 32", "num_heads 3"]),
    "head dimension": (["arch.hidden_size=6", "arch.num_heads=2"], ["even head dimension"]),
    "unknown arch": (["arch=foo"], ["arch/foo"]),
    "accumulation": (
        ["gradient_accumulation_steps=5"],
        ["slots of each process", "gradient_accumulation_steps 5"],
    ),
    "nccl": (["backend=nccl"], ["backend=nccl", "CUDA"]),
    "batch too large": (["global_batch_size=1200"], ["do not fill one batch", "global_batch_size"]),
}
if not torch.cuda.is_available():
    _CONFIG["no cuda"] = (["device=cuda"], ["device=cuda", "device=cpu"])


@pytest.fixture
def data(tmp_path, sudoku_folder) -> Path:
    return shutil.copytree(sudoku_folder, tmp_path / "data")


def _assert_told_once(finished, world_size: int, parts: list[str]) -> None:
    assert all(status not in (0, None) for status in finished.statuses), finished
    assert len(finished.statuses) == world_size
    assert len(finished.error_lines) == 1, finished.stderr
    assert finished.error_lines[0].startswith("error: ")
    for part in parts:
        assert part in finished.error_lines[0]


def _assert_nothing_written(folder: Path) -> None:
    left = {path.name for path in folder.iterdir()} - {"data", ".output_pretrain", ".output_evaluate"}
    assert not left


def _first_two_are_fast(cases: dict[str, Any]) -> list[Any]:
    """Each case starts processes, and takes the same way as the others to its line."""
    slow = [pytest.param(case, marks=pytest.mark.slow) for case in cases]
    return [*list(cases)[:2], *slow[2:]]


@pytest.mark.parametrize("case", _first_two_are_fast(_DATA))
def test_damaged_data(tmp_path, data, case):
    damage, parts = _DATA[case]
    damage(data)
    finished = run_program("pretrain", f"data_path={data}", *OVERRIDES, folder=tmp_path, world_size=2)
    _assert_told_once(finished, 2, parts)
    _assert_nothing_written(tmp_path)


@pytest.mark.parametrize("case", _first_two_are_fast(_CONFIG))
def test_mistakes_in_the_config(tmp_path, data, case):
    overrides, parts = _CONFIG[case]
    words = (f"data_path={data}", *OVERRIDES, *overrides)
    _assert_told_once(run_program("pretrain", *words, folder=tmp_path, world_size=2), 2, parts)
    _assert_nothing_written(tmp_path)


@pytest.mark.parametrize("case", ["misspelt key", "batch too large"])
def test_mistakes_in_the_config_of_one_process(tmp_path, data, case):
    """One that is noticed when the config is read, and one when the data is."""
    overrides, parts = _CONFIG[case]
    words = (f"data_path={data}", *OVERRIDES, *overrides)
    _assert_told_once(run_program("pretrain", *words, folder=tmp_path, world_size=None), 1, parts)
    _assert_nothing_written(tmp_path)


@pytest.mark.slow
def test_batch_that_the_processes_do_not_divide(tmp_path, data):
    finished = run_program(
        "pretrain", f"data_path={data}", *OVERRIDES, "global_batch_size=25", folder=tmp_path, world_size=2
    )
    _assert_told_once(finished, 2, ["global_batch_size 25", "2 processes"])
    _assert_nothing_written(tmp_path)


@pytest.mark.slow
def test_compiling_without_a_compiler(tmp_path, data):
    finished = run_program(
        "pretrain",
        f"data_path={data}",
        *OVERRIDES,
        "compile=true",
        "device=cpu",
        folder=tmp_path,
        world_size=2,
        CXX="no-such-compiler",
    )
    _assert_told_once(finished, 2, ["compile=true", "no-such-compiler", "compile=auto"])
    _assert_nothing_written(tmp_path)


@pytest.mark.slow
def test_run_folder_that_cannot_be_written(tmp_path, data):
    (tmp_path / "file").touch()
    finished = run_program(
        "pretrain",
        f"data_path={data}",
        *OVERRIDES,
        f"checkpoint_path={tmp_path / 'file' / 'run'}",
        folder=tmp_path,
        world_size=2,
    )
    _assert_told_once(finished, 2, ["cannot write into the run folder", "checkpoint_path"])


def test_data_that_only_one_rank_cannot_read(tmp_path, data, sudoku_folder):
    """As on a cluster whose second node lacks the folder."""
    from tests.ranks import run_ranks

    outcomes = run_ranks(_train_where_rank_1_has_no_data, 2, tmp_path)
    assert outcomes == ["ended with 1"] * 2


def _train_where_rank_1_has_no_data(folder: Path) -> str:
    import os

    import pretrain
    from parallel.process_group import rank
    from tests.tiny import run_of, tiny_config

    elsewhere = folder / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    os.chdir(elsewhere if rank() == 1 else folder)
    try:
        config = tiny_config(data_path="data", checkpoint_path=str(folder / "run"))
        pretrain.train(run_of(config))
    except SystemExit as error:
        return f"ended with {error.code}"
    return "went on"


def _evaluate(folder: Path, *arguments: str, world_size: int = 2):
    return run_program(
        "evaluate",
        *arguments,
        "device=cpu",
        f"cpu_threads={NUM_THREADS}",
        folder=folder,
        world_size=world_size,
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory, sudoku_folder) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    run = folder / "run"
    finished = run_program(
        "pretrain",
        f"data_path={sudoku_folder}",
        *OVERRIDES,
        "max_steps=1",
        f"checkpoint_path={run}",
        folder=folder,
    )
    assert finished.statuses == [0], finished.stderr
    return run


@pytest.mark.slow
def test_checkpoint_that_is_not_there(tmp_path):
    _assert_told_once(_evaluate(tmp_path, "checkpoint=nowhere"), 2, ["nowhere", "does not exist"])
    (tmp_path / "empty").mkdir()
    _assert_told_once(_evaluate(tmp_path, "checkpoint=empty"), 2, ["no checkpoint step_<N>", "empty"])
    _assert_told_once(_evaluate(tmp_path), 2, ["checkpoint=PATH is needed"])


@pytest.mark.slow
def test_checkpoint_for_another_vocabulary(tmp_path, trained):
    from dataset.build import build_dataset

    build_dataset("sudoku", ["--output-dir", str(tmp_path / "other"), "--generate", "5", "--box", "2x3"])
    finished = _evaluate(tmp_path, f"checkpoint={trained}", "data_path=other")
    _assert_told_once(finished, 2, ["vocab_size 6", "dataset has 8"])


@pytest.mark.slow
def test_checkpoint_of_another_architecture(tmp_path, trained):
    run = shutil.copytree(trained, tmp_path / "run")
    path = run / "step_1" / "config.yaml"
    path.write_text(path.read_text().replace("H_layers: 1", "H_layers: 2"))
    (run / "step_1" / "manifest.json").unlink()
    _assert_told_once(
        _evaluate(tmp_path, "checkpoint=run/step_1"), 2, ["another architecture", "H_level.layers.1"]
    )


@pytest.mark.slow
def test_damaged_weights(tmp_path, trained):
    run = shutil.copytree(trained, tmp_path / "run")
    (run / "step_1" / "weights.safetensors").write_bytes(b"nothing")
    _assert_told_once(_evaluate(tmp_path, "checkpoint=run"), 2, ["step_1", "corrupt"])
    (run / "step_1" / "manifest.json").unlink()
    _assert_told_once(_evaluate(tmp_path, "checkpoint=run/step_1"), 2, ["step_1", "cannot be read"])


class _Payload:
    """What unpickling would execute."""

    def __reduce__(self):
        return (Path.touch, (Path("executed"),))


def _published(folder: Path, *, weights, **arch) -> None:
    folder.mkdir()
    torch.save(weights, folder / "step_7")
    values = {
        **{
            "H_cycles": 1,
            "L_cycles": 1,
            "H_layers": 1,
            "L_layers": 1,
            "expansion": 4,
            "forward_dtype": "float32",
        },
        **{"halt_exploration_prob": 0.1, "halt_max_steps": 2, "hidden_size": 32, "num_heads": 2},
        **{"pos_encodings": "rope", "puzzle_emb_ndim": 0, "loss": {"loss_type": "softmax_cross_entropy"}},
        "name": "hrm.hrm_act_v1@HierarchicalReasoningModel_ACTV1",
        **arch,
    }
    config = {"arch": values, "data_path": "data", "global_batch_size": 8, "what": "ever"}
    (folder / "all_config.yaml").write_text(json.dumps(config))


def test_nothing_in_a_published_checkpoint_is_executed(tmp_path, data):
    _published(tmp_path / "evil", weights=_Payload())
    finished = _evaluate(tmp_path, "checkpoint=evil/step_7")
    _assert_told_once(finished, 2, ["evil/step_7", "cannot be read"])
    assert not (tmp_path / "executed").exists()


@pytest.mark.slow
def test_published_config_of_something_else(tmp_path, data):
    _published(tmp_path / "other", weights={}, name="os@system")
    _assert_told_once(_evaluate(tmp_path, "checkpoint=other"), 2, ["unknown architecture 'os@system'"])
    _published(tmp_path / "extra", weights={}, hidden_sizes=3)
    _assert_told_once(
        _evaluate(tmp_path, "checkpoint=extra"), 2, ["unknown key 'arch.hidden_sizes'", "'arch.hidden_size'"]
    )
    (tmp_path / "extra" / "all_config.yaml").unlink()
    _assert_told_once(_evaluate(tmp_path, "checkpoint=extra"), 2, ["all_config.yaml is missing"])


@pytest.mark.slow
def test_evaluation_folder_that_cannot_be_written(tmp_path, trained):
    (tmp_path / "file").touch()
    finished = _evaluate(tmp_path, f"checkpoint={trained}", f"output_dir={tmp_path / 'file' / 'out'}")
    _assert_told_once(finished, 2, ["cannot write into", "output_dir"])
