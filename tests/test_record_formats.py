"""Records: the number format that a folder of runs keeps."""

import json
from unittest import mock
from xml.etree import ElementTree

import pytest

from config.compose import compose_overrides
from config.schema import PretrainConfig
from distributed import number_format
from records import comparison, machine, seeds
from records.rungs import RUNGS
from runtime.reading import read_yaml
from runtime.writing import to_yaml
from tests.ranks import REPOSITORY, complete_program

_FORMATS_OF = """
import sys
from pathlib import Path
from records.rungs import RUNGS
from records.seeds import Rerun
for folder in map(Path, sys.argv[1:]):
    rerun = Rerun(RUNGS["demo"], folder, source=None)
    rerun.check(range(2))
    print(rerun.machine["instruction_set"], *(list(rerun._trainings(seed))[0][1][-1] for seed in range(2)))
"""


@pytest.mark.slow
def test_a_folder_of_an_earlier_version_goes_on_in_bfloat16(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    (run, recipe), *_ = seeds.Rerun(RUNGS["demo"], old, source=None)._recipes(0)
    stored = compose_overrides(PretrainConfig, recipe).model_dump()
    stored["arch"]["forward_dtype"] = "bfloat16"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(to_yaml(stored))
    (tmp_path / "formats.py").write_text(_FORMATS_OF)
    options = {"folder": tmp_path, "world_size": None, "ATEN_CPU_CAPABILITY": "avx2"}
    ended = complete_program(str(tmp_path / "formats"), str(old), str(new), **options)
    lines = [f"avx2 {' '.join([f'arch.forward_dtype={name}'] * 2)}" for name in ("bfloat16", "float32")]
    assert ended.stdout.splitlines() == lines


def _tune(plan: dict, model_name: str, lr: float, folder: object, *, forward_dtype: str) -> dict:
    best = {"TRM": 0.003}.get(model_name)
    of_cells = None if model_name == "HRM" else 0.6  # a search has no fraction of right cells
    return {"lr": lr, "exact_accuracy": 0.5 if lr == best else 0.4, "accuracy": of_cells}


def test_a_better_learning_rate_replaces_the_results_of_the_old_one(tmp_path, monkeypatch):
    plan = read_yaml(REPOSITORY / "records/comparison.yaml")
    content = json.loads((REPOSITORY / "records/comparison/comparison.json").read_text())
    rows = [next(row for row in content["results"] if row["model"] == name) for name in ("TRM", "HRM")]
    rung, petaflops = rows[0]["training"].removesuffix(" PF").split(", ")
    plan["trainings"] = [{"rung": rung, "petaflops": float(petaflops), "seeds": [rows[0]["seed"]]}]
    plan["models"] = {
        "TRM": plan["models"]["TRM"] | {"rates": [0.003, 0.006]},
        "HRM": plan["models"]["HRM"] | {"rates": [0.0003]},
    }
    monkeypatch.setattr(comparison, "build_rerun", lambda *_, **__: None)
    monkeypatch.setattr(comparison, "train", lambda _, seed: {"seed": seed} | rows[1])
    monkeypatch.setattr(comparison, "tune", _tune)
    (tmp_path / "comparison.json").write_text(json.dumps(content | {"results": rows, "tuning": {}}))
    comparison.compare(plan, tmp_path)
    after = json.loads((tmp_path / "comparison.json").read_text())
    assert [row["lr"] for row in after["tuning"]["TRM"]] == [0.003, 0.006]
    assert after["tuning"]["HRM"] == []  # it has only one rate
    assert [(row["model"], row["lr"]) for row in after["results"]] == [("TRM", 0.003), ("HRM", 0.0003)]


def test_an_interrupted_comparison_keeps_each_rate_and_has_the_first_seed_of_all_models(
    tmp_path, monkeypatch
):
    plan = read_yaml(REPOSITORY / "records/comparison.yaml")
    plan["models"] = {name: plan["models"][name] for name in ("TRM", "HRM")}
    plan["trainings"] = [{"rung": "demo", "petaflops": 0.3, "seeds": [0, 1]}]
    plan["models"]["HRM"]["rates"] = [0.0003, 0.001]
    row = json.loads((REPOSITORY / "records/comparison/comparison.json").read_text())["results"][0]

    def tune_one(plan, model_name, lr, folder, **options):
        if lr == plan["models"][model_name]["rates"][1]:
            raise KeyboardInterrupt
        return _tune(plan, model_name, lr, folder, **options)

    def stored() -> dict:
        return json.loads((tmp_path / "comparison.json").read_text())

    monkeypatch.setattr(comparison, "tune", tune_one)
    with pytest.raises(KeyboardInterrupt):
        comparison.compare(plan, tmp_path)
    assert [tried["lr"] for tried in stored()["tuning"]["TRM"]] == [0.003]

    monkeypatch.setattr(comparison, "tune", _tune)
    monkeypatch.setattr(comparison, "build_rerun", lambda *_, **__: None)
    monkeypatch.setattr(comparison, "train", lambda _, seed: row | {"seed": seed})
    comparison.compare(plan, tmp_path)
    order = [(found["seed"], found["model"]) for found in stored()["results"]]
    assert order == [(0, "TRM"), (0, "HRM"), (1, "TRM"), (1, "HRM")]


def test_a_comparison_creates_its_folder(tmp_path, monkeypatch):
    plan = read_yaml(REPOSITORY / "records/comparison.yaml")
    plan["models"], plan["trainings"] = {"TRM": plan["models"]["TRM"]}, []
    monkeypatch.setattr(comparison, "tune", _tune)
    folder = tmp_path / "checkpoints" / "comparison"
    comparison.compare(plan, folder, dtype="float32")
    assert json.loads((folder / "format.json").read_text()) == {"forward_dtype": "float32"}


def test_a_comparison_refuses_results_with_other_settings(tmp_path, monkeypatch):
    plan = read_yaml(REPOSITORY / "records/comparison.yaml")
    plan["models"] = {name: plan["models"][name] for name in ("TRM", "HRM")}
    plan["trainings"] = []
    monkeypatch.setattr(comparison, "tune", _tune)
    comparison.compare(plan | {"models": {"TRM": plan["models"]["TRM"]}}, tmp_path)
    plan["common"].remove("compile=true")  # it does not change results
    plan["models"]["HRM"]["words"].append("arch.H_cycles=2")  # it has no results yet
    comparison.compare(plan, tmp_path)
    for change in (
        {"common": [*plan["common"], "weight_decay=0.2"]},
        {"tuning": plan["tuning"] | {"seed": 1}},
    ):
        with pytest.raises(
            ValueError, match=r"results of TRM with other settings \((weight_decay|tuning.seed): .* -> "
        ):
            comparison.compare(plan | change, tmp_path)


def test_the_committed_comparison_shows_its_results(tmp_path):
    plan, folder = read_yaml(REPOSITORY / "records/comparison.yaml"), REPOSITORY / "records/comparison"
    content = json.loads((folder / "comparison.json").read_text())
    comparison.write_results(plan, {"tuning": {}} | content, tmp_path)
    assert (folder / "README.md").read_text() == (tmp_path / "README.md").read_text()


def test_the_picture_of_a_comparison_is_valid(tmp_path):
    content = json.loads((REPOSITORY / "records/comparison/comparison.json").read_text())
    rows = [content["results"][0] | {"model": "a & b"}]
    plan = read_yaml(REPOSITORY / "records/comparison.yaml")
    comparison.write_results(plan, content | {"results": rows, "tuning": {}}, tmp_path)
    assert "a & b" in "".join(ElementTree.parse(tmp_path / "comparison.svg").getroot().itertext())


def test_a_comparison_keeps_its_format(tmp_path, monkeypatch):
    """One of an earlier version names none. This machine has no bfloat16 instructions."""
    monkeypatch.setattr(number_format, "instruction_set", lambda device: "avx2")
    monkeypatch.setattr(machine, "instruction_set", lambda device: "avx2")
    plan = read_yaml(REPOSITORY / "records/comparison.yaml")
    content = json.loads((REPOSITORY / "records/comparison/comparison.json").read_text())
    (first,) = (row for row in content["results"] if (row["model"], row["seed"]) == ("TRM", 0))
    first = first | {"training": "sudoku_9x9_medium, 0.1 PF", "lr": 0.003}
    plan["trainings"] = [{"rung": "sudoku_9x9_medium", "petaflops": 0.1, "seeds": [0, 1]}]
    plan["models"] = {first["model"]: plan["models"][first["model"]]}
    used = []

    def train(forward_dtype: str, seed: int) -> dict:
        used.append(forward_dtype)
        return {key: value for key, value in first.items() if key not in ("training", "model", "seed", "lr")}

    monkeypatch.setattr(comparison, "build_rerun", lambda *_, forward_dtype: forward_dtype)
    monkeypatch.setattr(comparison, "train", train)
    monkeypatch.setattr(comparison, "tune", _tune)
    earlier = {"cpu": "AN EPYC", "commit": "COMMIT", "results": [first]}
    trial = _tune(plan, "TRM", 0.003, tmp_path, forward_dtype="bfloat16")
    tuned = {"forward_dtype": "bfloat16", "results": [], "tuning": {"TRM": [trial]}}
    folders = (("old", earlier, "bfloat16"), ("tuned", tuned, "bfloat16"), ("new", None, "float32"))
    for name, before, expected in folders:
        folder, path = tmp_path / name, tmp_path / name / "comparison.json"
        folder.mkdir()
        if before:
            path.write_text(json.dumps(before))
            with pytest.raises(ValueError, match=r"contains results computed in bfloat16, not in float32"):
                comparison.compare(plan, folder, dtype="float32")
        comparison.compare(plan, folder)
        after = json.loads(path.read_text())
        assert (after["instruction_set"], after["forward_dtype"]) == ("avx2", expected)
        assert len(after["results"]) == 2
        assert [row["lr"] for row in after["tuning"]["TRM"]] == [0.003, 0.006]
        assert "| TRM | 0.006 | 0.400 | 0.600 |" in (folder / "README.md").read_text()
        assert {*used} == {expected}
        assert f"Number format: {expected}. The last training" in (folder / "README.md").read_text()
        assert "instruction set: avx2" in (folder / "README.md").read_text()
        used.clear()
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(machine, "instruction_set", lambda device: "neon")
            comparison.compare(plan, folder)  # nothing is trained
        assert json.loads(path.read_text()) == after
    assert json.loads((tmp_path / "new/format.json").read_text()) == {"forward_dtype": "float32"}


def test_a_comparison_in_a_folder_with_a_space(tmp_path, monkeypatch):
    folder, data = tmp_path / "my runs", mock.Mock()
    data.schedule.petaflops.return_value = 1e-6
    monkeypatch.setattr(comparison, "open_data", lambda config: data)
    monkeypatch.setattr(comparison, "count_steps", lambda *_: None)
    monkeypatch.setattr(seeds.Rerun, "build_data", lambda self: 0.0)
    plan = {"processes": 1, "common": [], "groups": {}}
    plan["models"] = {"TRM": {"groups": [], "words": ["arch=trm"], "longer": ""}}
    training = {"rung": "demo", "petaflops": 1e-5}
    rerun = comparison.build_rerun(plan, "TRM", training, folder, "lr=0.5", forward_dtype="float32")
    ((run, recipe),) = rerun._trainings(3)
    config = compose_overrides(PretrainConfig, recipe)
    assert (config.data_path, config.checkpoint_path) == ([str(folder / "demo/data")], str(run))
    assert (config.lr, config.seed, config.train_steps) == (0.5, 3, 10)


def test_a_comparison_refuses_a_finished_run_with_other_settings(tmp_path, monkeypatch, capsys):
    rerun = seeds.Rerun(RUNGS["demo"], tmp_path, source=None, overrides=("lr=0.5",), dtype="float32")
    ((run, recipe),) = rerun._trainings(0)
    run.mkdir(parents=True)
    config = compose_overrides(PretrainConfig, [*recipe, "weight_decay=0.2"]).model_dump()
    (run / "config.yaml").write_text(to_yaml(config))
    row = {"step": 1, "train/petaflops": 1.0}
    row |= {f"{split}/all/{name}accuracy": 0.5 for split in ("eval", "validation") for name in ("", "exact_")}
    for name, content in (("status", {"status": "finished", "step": 1}), ("metrics.jsonl", row)):
        (run / name).write_text(json.dumps(content) + "\n")
    monkeypatch.setattr(comparison, "build_rerun", lambda *_, **__: rerun)
    plan = {"tuning": {"validation_fraction": 0.1, "seed": 0}}
    with pytest.raises(SystemExit):
        comparison.tune(plan, "TRM", 0.5, tmp_path, forward_dtype="float32")
    with pytest.raises(SystemExit):
        comparison.train(rerun, 0)
    assert capsys.readouterr().err.count("another recipe (weight_decay: 0.2 -> 1.0). Choose another") == 2
