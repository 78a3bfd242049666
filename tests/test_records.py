"""Records: how the runs of a rung are counted, kept and shown, and how an interrupted one continues."""

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
from evaluation.intervals import goal_p, mean_interval, t_tail
from records import __main__ as records
from records import page, record, seeds
from records.rungs import RUNGS, Rung
from runtime.reading import read_yaml
from runtime.writing import to_yaml, write_json
from tests.ranks import start_program
from tests.refusals import cases, check
from tests.tiny import OVERRIDES
from tests.waiting import wait_for

RUNG = Rung("demo", "tiny Sudoku", "sudoku --box 2x2 --generate 100", goal=0.5, seconds=60, test_time="")


@pytest.mark.parametrize(
    ("freedom", "t", "p"),  # of a table of critical values
    [
        *((1, 6.3138, 0.05), (2, 2.9200, 0.05), (3, 4.5407, 0.01), (4, 2.1318, 0.05), (5, 3.3649, 0.01)),
        *((9, 2.8214, 0.01), (30, 1.6973, 0.05)),
    ],
)
def test_the_tail_is_students(freedom, t, p):
    assert t_tail(t, freedom) == pytest.approx(p, rel=1e-4)
    assert t_tail(-t, freedom) == pytest.approx(1 - p, rel=1e-4)
    assert t_tail(0.0, freedom) == pytest.approx(0.5)


def test_a_goal_is_held_by_the_mean():
    # t = (0.98 - 0.97) sqrt(3) / 0.01 = sqrt(3); with 2 degrees p = 1/2 - t / (2 sqrt(2 + t t))
    assert goal_p([0.98, 0.97, 0.99], 0.97) == pytest.approx(0.5 - 3**0.5 / (2 * 5**0.5))
    assert goal_p([0.98, 0.97, 0.99], 0.98) == pytest.approx(0.5)
    assert goal_p([0.98, 0.98], 0.97) == 0.0
    assert goal_p([0.97, 0.97], 0.97) == 1.0
    assert goal_p([0.98], 0.97) is None
    half = 4.302653 * 0.01 / 3**0.5
    assert mean_interval([0.98, 0.97, 0.99]) == pytest.approx((0.98 - half, 0.98 + half))
    assert mean_interval([0.98]) is None


def _rows(count: int, *, every: int) -> list[dict]:
    rows = [
        {"step": step, "seconds": step / 10, "train/lm_loss": 1 / step, "lr": 0}
        for step in range(1, count + 1)
    ]
    for row in rows[every - 1 :: every]:
        row["eval/all/exact_accuracy"] = row["step"] / count
    return rows


@pytest.mark.parametrize(("count", "every"), [(1, 1), (150, 40), (1000, 7)])
def test_a_log_is_thinned(count, every):
    thin = record.thin(_rows(count, every=every))
    steps = [row["step"] for row in thin]
    evaluated = {*range(every, count + 1, every)}
    assert steps == sorted({*steps, 1, count} | evaluated)
    assert len({*steps} - evaluated) <= 201
    gaps = [after - before for before, after in zip(steps, steps[1:], strict=False)]
    assert max(gaps, default=0) <= -(-count // 200)
    assert not any("lr" in row for row in thin)


_BFLOAT16 = {"cpu": "AN EPYC", "cores": 2, "torch": "2.13", "instruction_set": "unknown"}
_BFLOAT16 |= {"forward_dtype": "bfloat16"}
_FLOAT32 = _BFLOAT16 | {"cpu": "A XEON", "instruction_set": "avx2", "forward_dtype": "float32"}


def _result(*shares: float, on: dict = _BFLOAT16, **changes) -> dict:
    common = {"data_seconds": 3.0, "steps": 40, "interruptions": 0, "other_cores": 0.0}
    common |= {"petaflops": 0.25, "processor_hours": 1.5}
    runs = [
        {"seed": seed, "exact_accuracy": share, "seconds": 50.0 + seed, **common, **changes}
        for seed, share in enumerate(shares)
    ]
    return records.summarize(RUNGS["demo"], runs) | on | {"runs": runs}


def _write(result: dict, change: str, folder: Path) -> Path:
    rows = {run["seed"]: _rows(40, every=10) for run in result["runs"]}
    return record.write_record(result, rows, change=change, command="COMMAND", folder=folder)


def _pages(tmp_path: Path) -> dict[str, str]:
    """Returns {name: content} of the pages about the records in `tmp_path`, and writes them there."""
    for name in ("records/README.md", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n")
    contents = page.pages(root=tmp_path, folder=tmp_path / "records")
    for path, content in contents.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    return {str(path.relative_to(tmp_path)): content for path, content in contents.items()}


def test_a_final_evaluation_is_the_mean_over_its_sets():
    rows = [{"step": 1, "eval/a/arc/pass@2": 0.5, "eval/b/arc/pass@2": 0.25, "eval/a/arc/pass@1": 0.0}]
    assert seeds.final_evaluation(rows, "arc/pass@2") == 0.375
    assert seeds.final_evaluation(rows, "exact_accuracy") is None
    assert [_result(0.9, other_cores=cores)["is_busy"] for cores in (0.0, 0.5)] == [False, True]


def test_records_are_written_and_shown(tmp_path):
    where = {"root": tmp_path, "folder": tmp_path / "records"}
    found = ((8, 4, 0.99), (16, 1, 0.995))
    longer = [dict(zip(("steps", "samples", "exact_accuracy"), each, strict=True)) for each in found]
    better = _result(0.98, 0.985, 0.99, test_time=longer)
    for change, result in (("First.", _result(0.9, 0.8, test_time=longer[:1])), ("Better.", better)):
        for _ in range(2):  # the same again is no new record
            _write(result, change, where["folder"])
    contents = _pages(tmp_path)
    text = contents["records/README.md"]
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    row = next(line for line in text.splitlines() if line.startswith("| `demo` |"))
    cells = "0.985 +- 0.005 [0.973, 0.997], 3 seeds | 0.980 | 0.018: not held | 52 | 1.5 | 0.25 |"
    assert f"{cells} 0.995 (16 steps) | AN EPYC (instruction set unknown), bfloat16 |" in row
    assert text.count("First.") == 1
    assert "0.850 in 51 s (2 seeds, AN EPYC). First." in text
    assert "    COMMAND\n" in text
    short = "| exact 0.97 in 1 min | 0.985 +- 0.005 [0.973, 0.997], 3 seeds | 52 | AN EPYC (instruction set"
    assert short in contents["README.md"]
    picture = page.draw_curves(RUNGS["demo"], better, tmp_path / "records/demo")
    assert ">goal 0.97 in 1 min<" in picture
    assert ">exact accuracy, 3 seeds; faint lines: during training<" in picture
    assert page.pages(**where) == {path: path.read_text() for path in page.pages(**where)}
    path = tmp_path / "records/demo/record.json"  # as an older version wrote it
    path.write_text(re.sub(r'"(petaflops|processor_hours(_max)?)": [\d.]+,', "", path.read_text()))
    assert "0.018: not held | 52 |  |  | 0.995 (16 steps) |" in _pages(tmp_path)["records/README.md"]
    (tmp_path / "README.md").write_text("nothing")
    with pytest.raises(ValueError, match=r"README.md lacks the lines"):
        page.pages(**where)


def test_an_entry_leaves_those_of_other_machines_alone(tmp_path):
    folder = tmp_path / "records"
    logs = _write(_result(0.99, 0.98, 0.97), "First.", folder)
    assert logs == folder / "demo/unknown_bfloat16"
    files = {path: path.read_bytes() for path in logs.iterdir()}
    (kept,) = record.read_entries(folder / "demo")
    for change, shares in (("On AVX2.", (0.9,)), ("Faster.", (0.96,))):
        slow = _result(*shares, on=_FLOAT32, seconds=61.0)
        assert _write(slow, change, folder) == folder / "demo/avx2_float32"
    assert {path: path.read_bytes() for path in logs.iterdir()} == files
    entries = record.read_entries(folder / "demo")
    assert entries[0] == kept
    assert [entry["forward_dtype"] for entry in entries] == ["bfloat16", "float32"]
    assert [each["change"] for each in entries[1]["history"]] == ["On AVX2."]

    contents = _pages(tmp_path)
    rows = [line for line in contents["records/README.md"].splitlines() if line.startswith("| `demo` |")]
    assert ["(instruction set unknown), bfloat16" in row for row in rows] == [True, False]
    assert "| 0.960, 1 seed: missed | 0.960 | one seed | 61: missed |" in rows[1]
    assert "| A XEON (avx2), float32 |" in rows[1]
    assert "](demo/avx2_float32/seed_0.jsonl)" in contents["records/README.md"]
    assert "\nA XEON (avx2), float32, 2 cores," in contents["records/README.md"]
    assert contents["README.md"].count("`demo`") == 1
    assert "3 seeds | 52 | AN EPYC (instruction set unknown), bfloat16 |" in contents["README.md"]

    more = [{"seeds": seeds, "date": date} for seeds, date in ((1, "2"), (3, "0"), (3, "1"), (2, "3"))]
    assert record.best_entry(more) == {"seeds": 3, "date": "1"}


def test_the_committed_pages_show_the_committed_records():
    """Written by python -m records --table. Versions of matplotlib place things a little apart."""
    number = re.compile(r"-?\d+\.\d+")
    for path, content in page.pages().items():
        there, told = path.read_text(), f"{path} is not what its records say"
        assert number.sub("", there) == number.sub("", content), told
        off_by = 0.5 if path.suffix == ".svg" else 0
        for one, other in zip(number.findall(there), number.findall(content), strict=True):
            assert abs(float(one) - float(other)) <= off_by, told


@cases("records command lines", "given")
def test_mistakes_are_one_line(given, words, monkeypatch, capsys):
    laptop = Rung("laptop", "", "sudoku --source {source}", goal=1, seconds=1, test_time="")
    monkeypatch.setitem(RUNGS, "laptop", laptop)
    with pytest.raises((SystemExit, ValueError)) as refused:
        records.main(given.split())
    check(capsys.readouterr().err.removesuffix("\n") or str(refused.value), words)


def test_a_rung_without_a_source_uses_its_public_dataset(monkeypatch, tmp_path):
    monkeypatch.delenv("RECORDS_SOURCE", raising=False)
    for given, source in (([], "hf://datasets/sapientinc/sudoku-extreme"), (["--source", "."], ".")):
        arguments = records._read(["--rung", "sudoku_extreme_search", *given])
        commands = RUNGS["sudoku_extreme_search"].build_commands(tmp_path, arguments.source)
        assert [command[command.index("--source") + 1] for command in commands] == [source, source]


def test_a_stored_command_has_all_options_that_change_the_result():
    given = "--rung demo --seeds 2 --first-seed 5 --processes 1 --dtype float32 --test-time"
    arguments = records._read([*given.split(), "--write", "New."])
    assert records._command(arguments, forward_dtype="float32") == f"python -m records {given}"


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
