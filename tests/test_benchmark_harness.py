"""What the benchmarks measure with: their turns and reports, their processes, their configs."""

import json
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from benchmarks import harness
from benchmarks.harness import Sample, print_report, time_rounds
from benchmarks.processes import run_program as run_words
from benchmarks.trainee import build_experiment, read_yaml
from config.schema import PretrainConfig, validate_config
from parallel.process_group import rank
from tests.ranks import REPOSITORY, run_program, run_ranks

# ------------------------------------------------------------------------------------------ turns and reports
_turns: list[str] = []


def _take_turns() -> tuple[dict[str, np.ndarray], list[str]]:
    """A takes as many seconds as the turn on rank 0 and 10 on the others; B the other way round."""

    def contender(name: str, slow_rank: int):
        def turn() -> dict[str, float]:
            _turns.append(name)
            return {name: 10.0 if rank() == slow_rank else float(len(_turns))}

        return turn

    return time_rounds([contender("a", 1), contender("b", 0)], rounds=2, warmup_rounds=1), _turns


@pytest.mark.slow
def test_contenders_take_turns_and_the_slowest_rank_counts():
    for seconds, turns in run_ranks(_take_turns, 2):
        assert turns == ["a", "b"] * 3
        assert {name: values.tolist() for name, values in seconds.items()} == {"a": [10, 10], "b": [10, 10]}


@pytest.mark.parametrize(("changes", "uneven"), [({}, ["b"]), ({"quick": True}, None), ({"rounds": 1}, None)])
def test_ratios_of_an_uneven_machine_are_called_estimates(capsys, changes, uneven):
    arguments = SimpleNamespace(
        **{"quick": False, "rounds": 3, "device": "cpu", "processes": 1, "threads": 1} | changes
    )
    samples = {"a": Sample.of([1.0, 1.1, 1.0]), "b": Sample.of([1.0, 1.1, 1.5])}
    parts = {"header": ["way"], "rows": [["a"]], "notes": [], "result": {"ratio": 1.1}, "samples": samples}
    print_report("some", **parts, arguments=arguments)
    *said, last = capsys.readouterr().out.splitlines()
    assert json.loads(last).get("uneven") == uneven
    told = [line for line in said if line.startswith("too uneven to tell: 'b' spreads by 36% (at most 15%)")]
    assert bool(told) == bool(uneven)


def test_the_commit_is_dirty_by_changed_code_and_not_by_pages_and_records(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "REPOSITORY", tmp_path)
    assert harness.commit() == "unknown"
    for name in ("trainer.py", "README.md", "records/demo.json"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("1\n")
    author = ("-c", "user.name=A", "-c", "user.email=a@example.org")
    for words in (["init", "--quiet"], ["add", "."], [*author, "commit", "--quiet", "-m", "All"]):
        subprocess.run(["git", "-C", tmp_path, *words], check=True)
    name = harness.commit()
    assert len(name) >= 7
    assert name.isalnum()
    (tmp_path / "README.md").write_text("2\n")
    (tmp_path / "records" / "demo.json").write_text("2\n")
    assert harness.commit() == name
    (tmp_path / "trainer.py").write_text("2\n")
    assert harness.commit() == f"{name}-dirty"


# -------------------------------------------------------------------------------------------------- processes
@pytest.mark.slow
def test_a_rank_that_fails_ends_the_benchmark(tmp_path):
    (tmp_path / "failing.py").write_text(
        "from benchmarks.harness import add_processes, benchmark_parser, parse\n"
        "from benchmarks.processes import run\n"
        "from parallel.process_group import rank\n"
        "from parallel.collectives import barrier\n"
        "def measure(arguments, device):\n"
        "    if rank() == 1: raise RuntimeError('rank 1 is broken')\n"
        "    barrier()\n"
        "parser = benchmark_parser('failing', description='', rounds=1)\n"
        "add_processes(parser)\n"
        "run(measure, parse(parser, []))\n"
    )
    finished = run_program(str(tmp_path / "failing"), folder=tmp_path, world_size=None)
    assert finished.statuses == [1]
    assert "rank 1 is broken" in finished.stderr


@pytest.mark.slow
def test_a_failing_rank_is_seen_whenever_its_exit_code_comes(tmp_path):
    """A process that ends closes what it had open, and only then has an exit code."""
    (tmp_path / "late.py").write_text(
        "import os, time\n"
        "from benchmarks.harness import add_processes, benchmark_parser, parse\n"
        "from benchmarks.processes import run\n"
        "def closes_and_fails(arguments, device):\n"
        "    os.closerange(3, 256)\n"
        "    time.sleep(0.02)\n"
        "    os._exit(1)\n"
        "parser = benchmark_parser('late', description='', rounds=1)\n"
        "add_processes(parser)\n"
        "for _ in range(20):\n"
        "    try:\n"
        "        run(closes_and_fails, parse(parser, ['--processes', '1']))\n"
        "    except SystemExit as ended:\n"
        "        print(ended.code)\n"
        "    else:\n"
        "        print('not seen')\n"
    )
    finished = run_program(str(tmp_path / "late"), folder=tmp_path, world_size=None)
    assert finished.stdout.split() == ["1"] * 20, finished.stderr


def test_a_program_is_stopped_once_enough_is_there(tmp_path):
    """And whatever its status is then; else it counts, and its last line is told."""
    (tmp_path / "endless.py").write_text(
        "import sys, time\nfrom pathlib import Path\nPath(sys.argv[1]).touch()\n"
        "time.sleep(200)\nPath(sys.argv[2]).touch()\n"
    )
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    run_words(tmp_path / "endless.py", begun, ended, until=begun.exists)
    assert begun.exists()
    assert not ended.exists()


def test_a_program_that_fails_ends_the_benchmark_with_its_last_line(tmp_path, capsys):
    (tmp_path / "failing.py").write_text("import sys\nprint('more')\nsys.exit('it is broken')\n")
    with pytest.raises(SystemExit) as ended:
        run_words(tmp_path / "failing.py")
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "failing.py" in line
    assert "it is broken" in line


# ---------------------------------------------------------------------------------------------------- configs
@pytest.mark.parametrize("name", ["sudoku_extreme", "trm_sudoku_mlp", "urm_sudoku", "serrm_sudoku"])
def test_the_config_is_the_one_that_hydra_composes(name):
    ours = build_experiment(name, sizes={"hidden_size": 256}, global_batch_size=32, lr=2e-4)
    overrides = [f"experiment={name}", "arch.hidden_size=256", "global_batch_size=32", "lr=2e-4"]
    with initialize_config_dir(str(REPOSITORY / "config"), version_base="1.3"):
        composed = OmegaConf.to_container(compose("pretrain", overrides=overrides), resolve=True)
    arch = validate_config(PretrainConfig, composed).arch
    values = vars(ours) | {"arch": vars(ours.arch) | {"loss": vars(ours.arch.loss)}}
    for computed in values["arch"].keys() - composed["arch"].keys():
        assert values["arch"].pop(computed) == getattr(arch, computed)
    assert values == composed


def test_yaml_is_read_as_far_as_configs_need_it(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "# a comment\nlist:\n  - of: several lines\nnumber: 1e-4 # its comment\ncount: 3\n\nempty: []\n"
        "nothing: null\ntext: a b # c # d\nwords: [a, b]\nouter:\n"
        "  inner:\n    yes: true\n  other: x\nlast: false\n"
    )
    assert read_yaml(path) == {
        "list": {},
        "number": 1e-4,
        "count": 3,
        "empty": [],
        "nothing": None,
        "text": "a b",
        "words": ["a", "b"],
        "outer": {"inner": {"yes": True}, "other": "x"},
        "last": False,
    }
