"""Seeds: how the trainings of a rung are run, measured and continued."""

import dataclasses
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from config.compose import compose_overrides
from config.schema import PretrainConfig
from distributed import number_format
from records import __main__ as records
from records import record, seeds
from records.rungs import RUNGS, Rung
from runtime.reading import read_yaml
from runtime.writing import to_yaml, write_json
from tests.ranks import start_program
from tests.tiny import OVERRIDES
from tests.waiting import wait_for

RUNG = Rung("demo", "tiny Sudoku", "sudoku --box 2x2 --generate 100", goal=0.5, seconds=60, test_time="")


def test_a_clock_goes_on_and_notes_when_rows_come(tmp_path):
    log, used = tmp_path / "metrics.jsonl", 0.0
    for number in (1, 2):
        clock = seeds.Clock(tmp_path / "clock.json", log=log)
        before = clock.seconds
        with clock:
            with log.open("a") as file:
                file.write(f'{{"step": {number}}}\n{{"st')
            time.sleep(0.05)
            clock.tick()
            with log.open("a") as file:
                file.write(f'ep": {10 * number}}}\n')
            subprocess.run([sys.executable, "-c", "sum(range(10**6))"], check=True)
        assert clock.starts == number
        assert clock.processor_seconds > max(used, 0.01)
        used = clock.processor_seconds
        assert clock.seconds >= before + 0.05
    with seeds.Clock(tmp_path / "clock.json", log=log) as clock:
        log.write_text('{"step": 1}\n')  # a run that continues cuts rows back, and logs them again
        clock.tick()
        log.write_text('{"step": 1}\n{"step": 22, "loss": 0.123456789012}\n{"step": 3}\n')
    assert seeds.Clock(tmp_path / "clock.json").times.keys() == {1, 2, 10, 20, 22, 3}


def test_a_model_that_trained_on_is_evaluated_again(tmp_path, monkeypatch):
    """Also in a folder with a space in its name."""
    rerun = seeds.Rerun(RUNG, tmp_path / "my runs", source=None, dtype="float32")
    run, folder, commands = rerun.run_folder(0), tmp_path / "my runs/seed_0/judged", []

    def evaluate(command: list[str], clock: seeds.Clock, *, log: Path) -> None:
        commands.append(command)
        write_json(folder / "measured.json", {"checkpoint": str(run / f"step_{step}")})
        write_json(folder / "metrics.json", {"all": {"exact_accuracy": 0.5}})

    monkeypatch.setattr(seeds, "_run", evaluate)
    for path in (folder, run / "step_8", run / "step_16"):
        path.mkdir(parents=True)
    for step, num_evaluations in ((8, 1), (8, 1), (16, 2)):
        write_json(run / f"step_{step}/manifest.json", {})
        found = rerun._evaluate(0, "data_path={more_data} samples=2", folder, seeds.Clock(tmp_path / "clock"))
        assert found == [{"exact_accuracy": 0.5}]
        assert len(commands) == num_evaluations
    assert f"data_path={tmp_path}/my runs/more_data" in commands[0]
    (folder / "measured.json").unlink()  # earlier versions did not write it
    rerun._evaluate(0, "", folder, seeds.Clock(tmp_path / "clock"))
    assert len(commands) == 2


def test_a_training_after_a_shortened_one_is_refused(tmp_path, monkeypatch, capsys):
    trainings = ("experiment=demo seed={seed}", "experiment=demo seed={seed} init_from={before}")
    rung = dataclasses.replace(RUNG, trainings=trainings)
    rerun = seeds.Rerun(rung, tmp_path, source=None, dtype="float32")
    for run in (tmp_path / "seed_0/training_1/run", tmp_path / "seed_0/run"):
        run.mkdir(parents=True)
        (run / "config.yaml").write_text("arch: {forward_dtype: float32}")
        write_json(run / "status", {"status": "max_steps", "step": 1})
    monkeypatch.setattr(seeds, "describe_changes", lambda *_, **__: "")
    with pytest.raises(SystemExit):
        rerun.check([0])
    words = "seed_0/run started before .*/training_1/run had all its steps. Choose another --folder."
    assert re.search(words, capsys.readouterr().err)


def _finish_runs(name: str, folder: Path, *overrides: str) -> None:
    rerun = seeds.Rerun(RUNGS[name], folder, source=None, overrides=overrides, dtype="float32")
    for run, recipe in rerun._trainings(0):
        run.mkdir(parents=True)
        (run / "config.yaml").write_text(to_yaml(compose_overrides(PretrainConfig, recipe).model_dump()))
        write_json(run / "status", {"status": "finished", "step": 1})
    command = sum(RUNGS[name].build_commands(folder, None), [])
    write_json(folder / "data.json", {"command": command, "seconds": 2.0})


@pytest.mark.parametrize("override", ["data_path=data/other", "test_data_path=data/other", "stop_patience=1"])
def test_a_run_with_an_override_that_changes_its_result_is_refused(override, tmp_path, capsys):
    _finish_runs("demo", tmp_path, "keep_best=accuracy", override)
    with pytest.raises(SystemExit):
        seeds.Rerun(RUNGS["demo"], tmp_path, source=None).check([0])
    assert f"has a run of another recipe ({override.partition('=')[0]}: " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["demo", "arc_mini_unseen"])
def test_a_rung_continues_after_its_folder_was_moved(name, tmp_path):
    _finish_runs(name, tmp_path / "old")
    (tmp_path / "old").rename(tmp_path / "new")
    rerun = seeds.Rerun(RUNGS[name], tmp_path / "new", source=None)
    rerun.check([0])
    assert rerun.build_data() == 2


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGKILL, -9)])
def test_a_signal_ends_the_command_too(tmp_path, number, status):
    clock = tmp_path / "clock"
    run = f"seeds._run(['sleep', '1000'], seeds.Clock(Path('{clock}')), log=Path('{tmp_path}/log'))"
    imports = "from pathlib import Path; from benchmarks.harness import run_main; from records import seeds"
    (tmp_path / "script.py").write_text(f"{imports}; run_main(lambda: {run})")
    program = start_program(str(tmp_path / "script"), folder=tmp_path)
    while not (clock.exists() and json.loads(clock.read_text())["seconds"] > 0.5):
        time.sleep(0.02)
    (child,) = Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()
    command_line = Path(f"/proc/{child}/cmdline")  # empty of a process that has ended and is not reaped
    wait_for(lambda: command_line.read_bytes().startswith(b"sleep"), "the command does not start")
    os.kill(program.pid, number)
    program.join()
    assert program.exitcode == status
    wait_for(lambda: not (command_line.exists() and command_line.read_bytes()), "the command goes on")


@pytest.mark.long
@pytest.mark.slow
def test_an_interrupted_rung_goes_on(tmp_path, monkeypatch, capsys, heeds_interrupts, sudoku_folder):
    rule = number_format.choose_format(torch.device("cpu")).name
    other = "float32" if rule == "bfloat16" else "bfloat16"
    tiny = [*(word for word in OVERRIDES if "forward_dtype" not in word), "epochs=12", "eval_interval=12"]
    recipe = ["experiment={name} seed={seed} data_path={data}", *tiny]
    rung = dataclasses.replace(
        RUNG,
        trainings=(" ".join([*recipe, "compile=false", "evaluators=[sudoku]"]),),
        **{"processes": 1, "metric": "sudoku/valid_accuracy"},
        test_time="halt_max_steps=[2,4] compile=false",
    )
    monkeypatch.setitem(RUNGS, "demo", rung)
    folder = tmp_path / "runs"
    shutil.copytree(sudoku_folder, folder / "data")
    built = {"command": sum(rung.build_commands(folder, None), []), "seconds": 1000.0}
    (folder / "data.json").write_text(json.dumps(built))
    words = ["--rung", "demo", "--seeds", "1", "--first-seed", "3", "--folder", str(folder)]

    def interrupt() -> None:
        log = folder / "seed_3/run/metrics.jsonl"
        while not (log.exists() and log.stat().st_size):  # a row: the run hears signals
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        records.main([*words, "--dtype", other])
    assert json.loads((folder / "seed_3/run/status").read_text())["status"] == "stopped"
    assert json.loads((folder / "format.json").read_text()) == {"forward_dtype": other}
    capsys.readouterr()

    records.main(words)  # in the format of the folder, which is not that of the rule
    first, last = capsys.readouterr().out.splitlines()
    assert "interrupted 1 times" in first
    result = json.loads(last)
    assert (result["seeds"], result["first_seed"], result["interruptions"]) == (1, 3, 1)
    assert result["forward_dtype"] == other
    assert read_yaml(folder / "seed_3/run/config.yaml")["arch"]["forward_dtype"] == other
    (run,) = result["runs"]
    assert result[f"{rung.metric}_mean"] == result[f"{rung.metric}_min"] == run[rung.metric]
    assert 1000 < run["seconds"] == result["seconds_max"] < 2000
    assert 0 < run["processor_hours"] == result["processor_hours_max"] < 1
    assert run["petaflops"] == result["petaflops"] > 0
    rows = seeds.Rerun(rung, folder, source=None).rows(3, data_seconds=1000.0)
    assert rows[-1]["eval/all/exact_accuracy"] == run["exact_accuracy"]
    assert 1000 < rows[0]["seconds"] < rows[-1]["seconds"] <= run["seconds"]

    records.main([*words, "--test-time"])
    assert f"computes in {other}: forward_dtype is set" in (folder / "seed_3/test_time.txt").read_text()
    monkeypatch.setattr(seeds, "_run", None)  # nothing is run again
    kept = functools.partial(record.write_record, folder=tmp_path / "records")
    monkeypatch.setattr(records, "write_record", kept)
    monkeypatch.setattr(records, "pages", dict)
    records.main([*words, "--test-time", "--dtype", other, "--write", "New."])
    (again,) = json.loads(capsys.readouterr().out.splitlines()[-1])["runs"]
    shallow, deep = again.pop("test_time")
    assert again == run
    assert shallow.keys() == {"steps", "samples", "exact_accuracy", "valid_accuracy", "calls"}
    assert deep[rung.metric] == deep["valid_accuracy"]
    (entry,) = record.read_entries(tmp_path / "records/demo")
    used = number_format.instruction_set(torch.device("cpu"))
    assert (entry["instruction_set"], entry["forward_dtype"]) == (used, other)
    assert entry["command"].endswith(f"--first-seed 3 --dtype {other} --test-time")
    assert (tmp_path / f"records/demo/{used}_{other}/seed_3.jsonl").exists()

    with pytest.raises(SystemExit):
        records.main([*words, "lr=2e-3"])
    assert "another recipe (lr: 0.001 -> 0.002). Choose another --folder" in capsys.readouterr().err
    for change in (["--dtype", rule], [f"arch.forward_dtype={rule}"]):
        with pytest.raises(ValueError, match=f"contains results computed in {other}, not in {rule}"):
            records.main([*words, *change])
    with pytest.raises(ValueError, match=f"--dtype {rule}: the recipe sets .*={other}. Remove --dtype."):
        records.main([*words, "--dtype", rule, f"arch.forward_dtype={other}"])
