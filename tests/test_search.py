"""search.py: its trials of a stand-in for training and of real runs, and what it makes of them."""

import csv
import os
import re
import shutil
import signal
import sys
from multiprocessing import Process
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from config.compose import compose_overrides
from config.files import load_defaults
from config.programs import SearchConfig
from config.schema import PretrainConfig, validate_config
from runtime.reading import read_yaml
from search import search
from tests.ranks import REPOSITORY, start_program
from tests.refusals import cases, check
from tests.tiny import tiny_config
from tests.waiting import wait_for
from tuning.space import compose_search, read_space
from tuning.trial import _stop_signal

_STAND_IN = '''
"""Writes what pretrain.py would: three evaluations, the better the nearer lr is to 3."""
import json, os, pathlib, signal, sys, time

given = dict(word.partition("=")[::2] for word in sys.argv[2:])
lr, seed = float(given["lr"]), int(given.get("seed", 0))
folder = pathlib.Path(given["checkpoint_path"].strip("'"))
folder.mkdir(parents=True, exist_ok=True)
if lr == 9:
    sys.exit("noise\\nerror: lr is too high\\nand more noise")
(folder / "starts").open("a").write(f"{given['run_name']} {os.environ.get('SLOT')}\\n")
if lr == 7 and not (folder / "step_1").exists():
    (folder / "step_1").mkdir()
    (folder / "step_1" / "manifest.json").touch()
    os.kill(os.getpid(), signal.SIGKILL)
def end(*_):
    (folder / "status").write_text('{"status": "stopped", "step": 1}')
    sys.exit(1)
signal.signal(signal.SIGTERM, end)
with (folder / "metrics.jsonl").open("w") as log:
    for step in (1, 2, 3):
        value = 1 - abs(lr - 3) / 10 + seed / 100 - (3 - step) / 100
        row = {"step": step, "eval/all/exact_accuracy": value, "eval/all/count": 100}
        log.write(json.dumps(row) + "\\n")
        log.flush()
        time.sleep(3600 if lr == 5 else 60 if lr < 1 else 0)
(folder / "status").write_text('{"status": "finished", "step": 3}')
(folder / "config.yaml").write_text(f"lr: {lr}\\nseed: {seed}\\n")
'''


@pytest.fixture
def run_search(monkeypatch, tmp_path, capsys):
    """Runs search.py on the stand-in, in a folder of its own; returns stdout and stderr."""
    (tmp_path / "stand_in.py").write_text(_STAND_IN)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "arc-aug-1000" / "train").mkdir(parents=True)  # the default, which no stand-in reads
    monkeypatch.setattr("tuning.trial._POLL_SECONDS", 0.02)
    launch = f"env SLOT={{slot}} {sys.executable} stand_in.py"
    monkeypatch.setattr("search.write_page", lambda *_: None)

    def run(*words: str, **options: object) -> tuple[str, str]:
        given = {"launch": launch, "study": "s", "folder": "out", "epochs": 3, "eval_interval": 1} | options
        monkeypatch.setattr(sys, "argv", ["search.py", *(f"{k}={v}" for k, v in given.items()), *words])
        try:
            search(*compose_search())
        finally:
            shown = capsys.readouterr()
        return shown.out, shown.err

    return run


def load_study(path: str = "out/study.db", name: str = "s") -> optuna.Study:
    return optuna.load_study(study_name=name, storage=f"sqlite:///{path}")


@pytest.mark.long
@pytest.mark.slow
def test_a_search_tells_failures_goes_on_and_prints_the_best(run_search):
    out, err = run_search("lr=choice(1,2,3,9)", trials=8, parallel=2, pruner="none")
    trials = load_study().trials
    assert [trial.number for trial in trials] == list(range(8))
    for trial in trials:
        lr = float(trial.params["lr"])
        assert trial.state == (TrialState.FAIL if lr == 9 else TrialState.COMPLETE)
        if lr != 9:
            assert trial.value == pytest.approx(1 - abs(lr - 3) / 10)
        if f"because trial {trial.number} has" in out:
            (start,) = Path(f"out/trial_{trial.number}/starts").read_text().splitlines()
            assert re.fullmatch(rf"s_trial_{trial.number} [01]", start)
    repeated = len(
        re.findall(
            r"^trial \d+: exact_accuracy .* because trial \d+ has the same values\)$", out, re.MULTILINE
        )
    )
    assert repeated > 0, "equal parameters need no run of their own"
    assert len(list(Path("out").glob("trial_*"))) == 8 - repeated
    failed = [trial.number for trial in trials if trial.state == TrialState.FAIL]
    assert failed, "or there is nothing to test"
    assert f"trial {failed[0]} failed: lr is too high (out/trial_{failed[0]}" in err
    assert "selected on the test split" in err
    best = load_study().best_trial
    assert f"trial {best.number}: exact_accuracy 1, the best so far" in out
    assert out.endswith(f"{Path('out/best.yaml').read_text()}\n")
    assert "lr: 3\n" in out
    assert f"(trial {best.number} of the study s)" in out

    # Started again there is nothing left to do; with more trials it goes on.
    assert "done: " in run_search("lr=choice(1,2,3,9)", trials=8, pruner="none")[0]
    assert len(load_study().trials) == 8
    run_search("lr=choice(1,2,3,9)", trials=9, pruner="none")
    assert len(load_study().trials) == 9

    # What was searched is part of the study.
    for words, options, message in (
        (["lr=choice(1,2)"], {}, r"lr: \w+\(choices=\('1', '2', '3', '9'\)\) -> \w+\(choices=\('1', '2'\)\)"),
        (["lr=choice(1,2,3,9)", "beta1=0.5"], {}, "beta1: 0.9 -> 0.5"),
        (["lr=choice(1,2,3,9)"], {"seeds": 2}, "seeds: 1 -> 2"),
        (["lr=choice(1,2,3,9)"], {"keep_best": "accuracy"}, "metric: exact_accuracy -> accuracy"),
        (["lr=choice(1,2,3,9)"], {"folder": "b", "storage": "out/study.db"}, "folder: .*/out -> .*/b"),
    ):
        with pytest.raises(ValueError, match=f"study s in .* is another search .*{message}.*. Choose anoth"):
            run_search(*words, **options)
    with pytest.raises(
        ValueError, match="trial_0 exists, but out/study.db contains no trial. Choose another"
    ):
        run_search("lr=choice(1,2)", study="t")


@pytest.mark.slow
def test_a_grid_runs_every_combination_once_and_writes_its_table(run_search):
    """Without pruning, in the order of the words; another start has nothing left."""
    words = ("lr=2,3", "seed=range(0,3)")
    out, err = run_search(*words, sampler="grid", parallel=2, trials=1)
    trials = load_study().trials
    assert [(each.params["lr"], each.params["seed"]) for each in trials] == [
        (lr, seed) for lr in ("2", "3") for seed in (0, 1, 2)
    ]
    assert {each.state for each in trials} == {TrialState.COMPLETE}
    assert "ExperimentalWarning" not in err
    rows = list(csv.DictReader(Path("out/table.csv").read_text().splitlines()))
    assert [(row["lr"], row["seeds"]) for row in rows] == [("2.0", "3"), ("3.0", "3")]
    assert [float(row["solved"]) for row in rows] == pytest.approx([0.91, 1.01])
    assert "| 2.0 | 3     | 0.910 [" in out
    assert "toprule" in Path("out/table.tex").read_text()
    assert "comparison.html" in out
    assert "done: 6 complete" in run_search(*words, sampler="grid")[0]
    with pytest.raises(ValueError, match="^config: sampler=grid needs a list of values for lr"):
        run_search("lr=interval(1,2)", sampler="grid", study="t")


@pytest.mark.slow
def test_the_next_start_of_a_grid_repeats_what_has_failed(run_search):
    assert "done: 1 complete, 0 pruned, 1 failed of 2 trials" in run_search("lr=9,3", sampler="grid")[0]
    Path("stand_in.py").write_text(_STAND_IN.replace("lr == 9", "lr == 8"))
    out, _ = run_search("lr=9,3", sampler="grid")
    assert "done: 2 complete, 0 pruned, 1 failed of 3 trials" in out
    assert [trial.params["lr"] for trial in load_study().trials] == ["9", "3", "9"]


@pytest.mark.slow
def test_seeds_are_runs_of_one_trial_and_the_mean_is_its_score(run_search):
    run_search("lr=choice(2,3)", "seed=4", seeds=3, trials=1)
    (trial,) = load_study().trials
    assert sorted(path.name for path in Path("out/trial_0").iterdir()) == ["seed_4", "seed_5", "seed_6"]
    alone = 1 - abs(float(trial.params["lr"]) - 3) / 10
    assert trial.value == pytest.approx(alone + 0.05)
    values = [alone + seed / 100 - missing / 100 for seed in (4, 5, 6) for missing in (2, 1, 0)]
    assert trial.intermediate_values == pytest.approx(dict(enumerate(values, 1)))


_ENDED_BY_MAX_STEPS = """
import json, pathlib, signal, sys, time

given = dict(word.partition("=")[::2] for word in sys.argv[2:])
folder, end = pathlib.Path(given["checkpoint_path"].strip("'")), int(given["max_steps"])
signal.signal(signal.SIGTERM, lambda *_: None)  # it comes after the last step
row = {"step": end, "eval/all/exact_accuracy": float(given["lr"]), "eval/all/count": 100}
(folder / "metrics.jsonl").write_text(json.dumps(row))
time.sleep(0.2)
(folder / "status").write_text(json.dumps({"status": "max_steps", "step": end}))
"""


@pytest.mark.slow
def test_a_trial_that_max_steps_ends_is_complete(run_search):
    """Also a bad one that was asked to stop after its last evaluation."""
    Path("stand_in.py").write_text(_ENDED_BY_MAX_STEPS)
    run_search("lr=choice(0.1,0.9)", "max_steps=1", trials=4, startup_trials=1, epochs=100)
    run_search("lr=0.9", "max_steps=1,2", sampler="grid", study="t", folder="b", epochs=100)
    for trials in (load_study().trials, load_study("b/study.db", "t").trials):
        assert {trial.state for trial in trials} == {TrialState.COMPLETE}
        assert len({str(trial.params) for trial in trials}) == 2, "or there is nothing to test"


@pytest.mark.slow
def test_bad_trials_are_pruned(run_search):
    """The bad one would take a minute."""
    run_search("lr=choice(0.1,3)", trials=6, startup_trials=1)
    states = {(trial.params["lr"], trial.state) for trial in load_study().trials[1:]}
    assert states == {("3", TrialState.COMPLETE), ("0.1", TrialState.PRUNED)}
    pruned = next(trial for trial in load_study().trials if trial.state == TrialState.PRUNED)
    assert list(pruned.intermediate_values) == [1]
    assert Path(f"out/trial_{pruned.number}/status").exists(), "it was asked to stop, not killed"


@pytest.mark.slow
def test_a_run_that_dies_goes_on_and_best_yaml_says_what_a_final_run_needs(run_search):
    Path("stand_in.py").write_text(_STAND_IN.replace("eval/all", "validation/all"))
    run_search("lr=choice(7)", "validation_fraction=0.1", "checkpoint_every_eval=false", trials=1)
    assert [trial.value for trial in load_study().trials] == pytest.approx([0.6])
    assert len(Path("out/trial_0/starts").read_text().splitlines()) == 2
    text = Path("out/best.yaml").read_text()
    for line in (
        "# Final run: validation_fraction=0.1 holds puzzles out. To train on all, set it to 0.\n",
        "# Final run: checkpoint_every_eval=false may lose the best checkpoint. To keep it, set true.\n",
    ):
        assert line in text


@pytest.mark.slow
def test_where_every_trial_fails_it_ends_with_an_error(run_search):
    with pytest.raises(ValueError, match="the first 3 trials failed, so the search stops"):
        run_search("lr=choice(9,9.0)", trials=8)
    with pytest.raises(SystemExit) as caught:
        run_search("lr=choice(9,9.0)", trials=2, folder="b")
    assert caught.value.code == 1


@pytest.fixture(scope="module")
def foreign_storage(tmp_path_factory) -> Path:
    """A storage with a study that search.py did not create. Creating it takes longer than the tests."""
    path = tmp_path_factory.mktemp("storage") / "foreign.db"
    foreign = optuna.create_study(study_name="foreign", storage=f"sqlite:///{path}")
    foreign.add_trial(optuna.create_trial(value=1.0))
    return path


@cases("search settings", "options")
def test_what_cannot_be_used_is_one_line(tmp_path, monkeypatch, foreign_storage, options, words):
    monkeypatch.chdir(tmp_path)
    Path("no.db").write_text("this is no database, but long enough to be looked at as if it were one" * 99)
    Path("missing").mkdir()
    Path("missing/no.db").touch()
    shutil.copy(foreign_storage, "foreign.db")
    given = load_defaults("search") | {"study": "s", "folder": "out"} | options
    config = validate_config(SearchConfig, given)
    with pytest.raises(ValueError, match=".") as caught:
        search(config, read_space(["lr=1,2"]), tiny_config())
    check(str(caught.value), words)


def test_data_that_is_not_there_is_told_before_the_first_trial(run_search):
    with pytest.raises(ValueError, match=r"^data folder nowhere does not exist\. Build it"):
        run_search("lr=1,2", data_path="nowhere")
    assert not list(Path("out").glob("trial_*"))


def test_srun_gets_a_signal_that_it_forwards():
    for launch in ("srun -n1 python", "/usr/bin/srun python", "env X=1 Y=2 srun python"):
        assert _stop_signal([*launch.split(), "pretrain.py"]) == signal.SIGUSR1, launch
    for launch in ("python", "env X=srun python", "torchrun --rdzv-id srun"):
        assert _stop_signal([*launch.split(), "pretrain.py", "run_name=srun"]) == signal.SIGTERM, launch


@pytest.fixture
def start(tmp_path):
    """Starts search.py as a process in a folder, where its output is in search.stdout and search.stderr."""
    started = []

    def start(*words: str) -> Process:
        started.append(start_program("search", "study=s", "folder=out", *words, folder=tmp_path))
        return started[-1]

    yield start
    for process in started:
        process.terminate()  # and so its trials
        process.join(60)
        process.kill()


def _num_lines(paths: list[Path]) -> list[int]:
    return [len(path.read_text().splitlines()) if path.exists() else 0 for path in paths]


@pytest.mark.slow
def test_a_search_that_is_asked_to_stop_stops_its_trials_and_goes_on(tmp_path, start, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("data/arc-aug-1000/train").mkdir(parents=True)  # the default, which no stand-in reads
    Path("stand_in.py").write_text(_STAND_IN)
    words = (f"launch={sys.executable} stand_in.py", "lr=choice(5,5.0)", "trials=2", "parallel=2")
    starts = [Path("out", f"trial_{number}", "starts") for number in range(2)]
    logs = [path.with_name("metrics.jsonl") for path in starts]
    for number in (1, 2):
        process = start(*words)
        said = Path("search.stderr")
        wait_for(lambda number=number: _num_lines(starts) == [number] * 2, "no starts", output=said)
        wait_for(lambda: _num_lines(logs) == [1] * 2, "no rows", output=said)
        os.kill(process.pid, signal.SIGINT)
        process.join(60)
        assert process.exitcode == 0
        assert [trial.state for trial in load_study().trials] == [TrialState.RUNNING] * 2
        text = Path("search.stdout").read_text()
        assert ("resuming trials 0, 1" in text) == (number == 2)
        assert "0 complete, 0 pruned, 0 failed of 2 trials" in text
        assert "Traceback" not in Path("search.stderr").read_text()


@pytest.mark.slow
def test_an_agent_of_wandb_starts_runs_of_the_sweep(tmp_path, monkeypatch):
    """W&B's own agent makes the command of what a server sends; torchrun here only writes it down."""
    from wandb.wandb_agent import Agent

    page = (REPOSITORY / "docs" / "search.md").read_text()
    (tmp_path / "sweep.yaml").write_text(page.partition("```yaml\n")[2].partition("```")[0])
    sweep = read_yaml(tmp_path / "sweep.yaml")
    torchrun = tmp_path / "torchrun"
    torchrun.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > command.txt\n')
    torchrun.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name in ("WANDB_DIR", "WANDB_RUN_ID", "WANDB_SWEEP_PARAM_PATH"):  # which the agent sets
        monkeypatch.setenv(name, str(tmp_path))
    args = {
        key: {"value": each["values"][-1] if "values" in each else each["max"]}
        for key, each in sweep["parameters"].items()
    }
    agent = Agent(api=None, queue=None, sweep_id="s")
    agent._sweep_command = sweep["command"]
    agent._command_run({"type": "run", "run_id": "r", "program": sweep["program"], "args": args})
    assert agent._run_processes["r"].wait(60) == 0
    processes, program, *words = (tmp_path / "command.txt").read_text().splitlines()
    assert (processes, program) == ("--nproc-per-node=2", "pretrain.py")
    run = compose_overrides(PretrainConfig, words)
    assert (run.lr, run.arch.L_cycles, run.optimizer, run.wandb_mode) == (0.01, 3, "muon", "online")
    assert sweep["metric"]["name"] == f"best/{run.keep_best}"
