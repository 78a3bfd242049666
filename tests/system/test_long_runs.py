"""Longer cases of what `make test` holds by shorter ones: torchruns, compilers, trainings, exports."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import evaluate
import pretrain
from distributed.watchdog import EXIT_HANG
from records import __main__ as records
from records import comparison, seeds
from records.rungs import RUNGS, Rung
from runtime.reading import read_yaml
from tests.ranks import REPOSITORY, complete_program, start_program
from tests.test_ldt import assert_learns_searches_and_solves
from tests.test_pretrain import assert_resumed_is_bit_equal
from tests.test_recovery import OPTIONS, STEP_TIMEOUT, Launch
from tests.test_search import load_study
from tests.test_seeds import RUNG
from tests.test_share_page import assert_onnx_answers_as_torch
from tests.tiny import OVERRIDES, logged_rows
from tests.waiting import wait_for
from tuning.space import compose_search
from tuning.study import Study


def test_a_compiled_run_that_is_resumed_has_the_same_bits(tmp_path, sudoku_folder):
    """Slots stop in other numbers each time, which may not change the kernels of the rest."""
    words = ("arch=trm", "arch.H_layers=0", "compile=true", "arch.halt_exploration_prob=0.5")
    words += ("eval_interval=null", "sanity_check=false")
    assert_resumed_is_bit_equal(tmp_path, sudoku_folder, *words, world_size=1)


def test_a_run_of_the_published_ldt_learns_searches_and_solves(tmp_path, sudoku_folder):
    assert_learns_searches_and_solves(tmp_path, sudoku_folder, "ldt_sudoku")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("serrm", {"gradient_cycles": 1}),
        ("transformer", {"puzzle_emb_ndim": 0}),
        ("trm_singlez", {"mlp_t": True, "pos_encodings": "none", "damping": 0.7}),
        ("trm", {"conv": "instead", "pos_encodings": "none", "puzzle_emb_ndim": 0}),
        ("infiloop", {}),
        ("fprm", {}),
        ("urm", {"pos_encodings": "learned", "conv": "beside"}),
    ],
)
def test_onnx_of_other_models_answers_as_torch_does(name, changes, tmp_path):
    assert_onnx_answers_as_torch(name, changes, tmp_path)


_TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")


def _run(*command: str, folder: Path) -> subprocess.CompletedProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=280
    )


def test_torchrun_ends_with_our_line(tmp_path):
    failed = _run(*_TORCHRUN, str(REPOSITORY / "pretrain.py"), "lr=fast", folder=tmp_path)
    assert failed.returncode == 1
    *_, last = (line.strip() for line in failed.stderr.splitlines() if line.strip(" =\n"))
    assert last.startswith("traceback : error: ")
    assert "lr='fast' should be a valid number" in last
    # Each process left the reason: which of them torchrun sees first does not matter.
    assert "To enable traceback" not in failed.stderr


def test_runs_from_python_and_the_loop_of_the_page_compute_the_same(
    tmp_path, sudoku_folder, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    words = ["experiment=demo", f"data_path={sudoku_folder}", "epochs=2", "eval_interval=2", "device=cpu"]
    trained = pretrain.run([*words, "checkpoint_path=trained"], processes=2)
    assert trained.folder == Path("trained")
    assert "done: trained is at training step 3 of 3" in capsys.readouterr().out
    evaluated = evaluate.run([f"checkpoint={trained.folder}", "device=cpu"])
    assert evaluated.folder == tmp_path / "trained" / "evaluation" / "step_3"
    logged = trained.metrics["all"]["lm_loss"]
    assert logged == trained.rows[-1]["eval/all/lm_loss"]
    assert evaluated.metrics["all"]["lm_loss"] == pytest.approx(logged, rel=1e-2)
    words_again = ("checkpoint=trained", "output_dir=again")
    finished = _run(*_TORCHRUN, str(REPOSITORY / "evaluate.py"), *words_again, folder=tmp_path)
    assert finished.returncode == 0, finished.stderr
    found = json.loads((tmp_path / "again" / "metrics.json").read_text())["all"]
    assert found["lm_loss"] == pytest.approx(evaluated.metrics["all"]["lm_loss"], rel=1e-5)

    with pytest.raises(
        ValueError,
        match=r"^trained contains a run .* Choose another checkpoint_path\. .* init_from=\S*step_3\.$",
    ):
        pretrain.run([*words, "checkpoint_path=trained", "seed=1"])

    loop = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs" / "python.md").read_text(), re.DOTALL)[-1]
    (tmp_path / "loop.py").write_text(loop)
    loop_words = (*words, "checkpoint_path=looped")
    said = complete_program(str(tmp_path / "loop"), *loop_words, folder=tmp_path, world_size=2)
    assert "eval/all/lm_loss" in said.stdout
    of_runs = [tmp_path / run / "step_3" / "ema_weights.safetensors" for run in ("trained", "looped")]
    weights, own = map(load_file, of_runs)
    assert all(value.equal(own[name]) for name, value in weights.items())


@pytest.mark.skipif(not os.path.exists("/proc/self/environ"), reason="finds the workers in /proc")
def test_a_killed_and_a_frozen_rank_cost_only_time(tmp_path, sudoku_folder):
    """Then a signal stops the run. The weights and the log are those of a run that is left alone."""
    folder, data = tmp_path, sudoku_folder
    epochs = 18  # of 200 puzzles, in batches of 24
    length, num_steps = (*OPTIONS, f"epochs={epochs}", f"eval_interval={epochs}"), epochs * 200 // 24
    words = (*length, f"step_timeout_seconds={STEP_TIMEOUT}")
    options = ("--max-restarts=9", "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGUSR1")
    with Launch(folder, data, *words, options=options) as run:
        run.wait_for(lambda: run.step >= 10, what="the run does not start")
        os.kill(run.workers()[0], signal.SIGKILL)
        run.wait_for(lambda: "recovered: " in run.log(0), what="the kill is not recovered from")

        survivor, frozen = (run.workers()[number] for number in (0, 1))
        os.kill(frozen, signal.SIGSTOP)
        run.wait_for(lambda: survivor not in run.workers().values(), what="nobody misses rank 1")
        assert run.workers().get(1, frozen) == frozen, "only others can end it"
        os.kill(frozen, signal.SIGKILL)  # torchrun would do so after 30 seconds
        failure = "the hang is not recovered from"
        run.wait_for(lambda: run.log(0).count("recovered: ") > 1, what=failure)

        run.process.send_signal(signal.SIGUSR1)
        run.wait_for(lambda: not run.workers(), what="the workers do not end")
        assert run.process.wait(60) == 1, "so torchrun ends after a signal, whatever the workers do"
        output, log = run.output, run.log(0)

    assert "To continue, run the same command with checkpoint_path=" in output
    stopped = json.loads((run.run / "status").read_text())
    assert stopped["status"] == "stopped"
    assert (run.run / f"step_{stopped['step']}").is_dir()
    assert re.search(rf"failed \(exitcode: {EXIT_HANG}\) local_rank: 0 ", output)
    told = re.compile(
        rf"^error \(rank 0\): no (?:progress on|heartbeat from) rank \d for {STEP_TIMEOUT} s "
        r"\(step_timeout_seconds\)\. rank 1: not responding, .*; "
        r"rank 0: in step \d+, .*$",
        flags=re.MULTILINE,
    )
    assert told.search(output), output
    assert told.search(log)
    assert re.search(r'File ".*pretrain.py", line \d+ in train\n', log)
    assert re.search(r"recovered: step \d+ is done [\d.]+ s after the failure", log)

    for path in (run.run, "whole"):
        command = (f"data_path={data}", *OVERRIDES, *length, f"checkpoint_path={path}")
        complete_program("pretrain", *command, folder=folder, world_size=2)
    rows, whole = logged_rows(run.run), logged_rows(folder / "whole")
    recovered = [row.pop("train/recovery_seconds", None) for row in rows]
    assert any(recovered)
    assert [row["step"] for row in rows] == list(range(1, num_steps + 1))
    assert rows == whole
    ours, theirs = (path / f"step_{num_steps}" for path in (run.run, folder / "whole"))
    assert (ours / "weights.safetensors").read_bytes() == (theirs / "weights.safetensors").read_bytes()


def test_killed_and_started_again_it_comes_to_the_same_trials(tmp_path, sudoku_folder, monkeypatch):
    """As are drawn by a study of that seed, and as runs of their own that nobody kills."""
    monkeypatch.chdir(tmp_path)
    fixed = [word for word in OVERRIDES if not word.startswith("lr=")]
    words = ("trials=2", f"data_path={sudoku_folder}", *fixed, "wandb_mode=disabled", "compile=false")
    words = (*words, "checkpoint_interval=2", "log_interval=1", "epochs=2", "keep_best=lm_loss", "seed=1")
    words = (*words, "eval_interval=1", "lr=tag(log,interval(1e-4,1e-2))", "arch.L_cycles=range(1,3)")
    command = ("search", "study=s", "folder=out", *words)
    killed, folders = start_program(*command, folder=tmp_path), [Path("out/trial_0"), Path("out/trial_1")]
    wait_for(lambda: any(folders[0].glob("step_*/manifest.json")), "no checkpoint")
    holder = re.search(r"process (\d+)", (folders[0] / "lock").read_text())
    killed.kill()
    killed.join()
    subprocess.run(["kill", "-9", holder[1]])  # not all systems end it with the search
    again = start_program(*command, folder=tmp_path)
    again.join(280)
    assert again.exitcode == 0, Path("search.stderr").read_text()
    assert "resuming trial 0" in Path("search.stdout").read_text()

    monkeypatch.setattr(sys, "argv", list(command))
    config, space, run = compose_search()
    whole, trials = Study(Path("whole.db"), config, space, run), load_study().trials
    assert len(trials) == 2
    for trial, folder in zip(trials, folders, strict=True):
        drawn, values = whole.begin()
        assert drawn.params == trial.params
        given = (*space.overrides(values), f"checkpoint_path=whole_{trial.number}")
        complete_program("pretrain", *given, folder=tmp_path)
        rows = logged_rows(tmp_path / f"whole_{trial.number}")
        assert logged_rows(folder) == rows
        losses = [row["eval/all/lm_loss"] for row in rows if "eval/all/lm_loss" in row]
        assert (list(trial.intermediate_values.values()), trial.value) == (losses, min(losses))
        whole.report(drawn, losses)
        whole.optuna.tell(drawn, min(losses))
    page = Path("out/study.html").read_text()
    assert "arch.L_cycles" in page
    assert "the best so far" in page
    assert "://" not in page


def test_a_rung_of_several_trainings(tmp_path, monkeypatch, capsys):
    """The second begins with the weights of the first, on other data; a longer evaluation is its judge."""
    rung = Rung(
        "demo",
        *("tiny ARC", "arc --generate 5 --max-size 8 --num-aug 1"),
        also="arc --generate 5 --max-size 8 --num-aug 0 --seed 1",
        **{"goal": 0.5, "seconds": 60, "test_time": "", "metric": "arc/pass@2", "processes": 1},
        judge="data_path={data} halt_max_steps=2 compile=false",
        trainings=(
            "experiment=arc_mini seed={seed} data_path={more_data}",
            "experiment=arc_mini_adapt seed={seed} data_path={data} init_from={before}",
        ),
    )
    monkeypatch.setitem(RUNGS, "demo", rung)
    tiny = ["max_steps=1", "global_batch_size=4", "arch.hidden_size=16"]
    words = ["--rung", "demo", "--seeds", "1", "--first-seed", "7", "--folder", str(tmp_path), *tiny]
    words += ["compile=false", "sanity_check=false"]
    records.main(words)
    (run,) = json.loads(capsys.readouterr().out.splitlines()[-1])["runs"]
    folders = [tmp_path / "seed_7" / name for name in ("training_1/run", "run")]
    assert {read_yaml(folder / "config.yaml")["seed"] for folder in folders} == {7}
    logs = [
        [json.loads(row) for row in (each / "metrics.jsonl").read_text().splitlines()] for each in folders
    ]
    assert run["petaflops"] == pytest.approx(sum(rows[-1]["train/petaflops"] for rows in logs))
    assert [rows[-1]["eval/all/arc/votes"] for rows in logs] == [10, 20]
    first, adapted = (load_file(each / "step_1/weights.safetensors") for each in folders)
    averaged = load_file(folders[0] / "step_1/ema_weights.safetensors")
    assert torch.equal(averaged["lm_head.weight"], adapted["lm_head.weight"])
    assert first["puzzle_emb.weights"].shape != adapted["puzzle_emb.weights"].shape
    judged = json.loads((tmp_path / "seed_7/judged/metrics.json").read_text())["all"]
    assert (run["arc/pass@2"], run["puzzles"]) == (judged["arc/pass@2"], judged["count"])
    assert judged["steps"] == 2
    paths = [*(each.parent / "clock.json" for each in folders), tmp_path / "seed_7/judge.clock.json"]
    clocks = [seeds.Clock(each) for each in paths]
    assert run["seconds"] == pytest.approx(
        run["data_seconds"] + sum(each.seconds for each in clocks), abs=0.2
    )
    monkeypatch.setattr(seeds, "_run", None)  # nothing is run again
    records.main(words)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["runs"] == [run]


def test_models_are_compared_at_equal_operations(tmp_path, monkeypatch):
    monkeypatch.setitem(RUNGS, "demo", RUNG)
    left_out = ("lr", "epochs", "eval_int", "arch.H_layers", "arch.forward_dtype")
    tiny = [word for word in OVERRIDES if not word.startswith(left_out)]
    words = ["arch=trm", *tiny, "compile=false", "sanity_check=false", "lr_warmup_steps=1"]
    model = {"groups": ["tiny"], "words": words[:1], "rates": [1e-9, 1e-3]}
    model["longer"] = "halt_max_steps=[4,8] compile=false"
    plan = {
        "processes": 1,
        "tuning": {"rung": "demo", "petaflops": 7e-6, "seed": 5, "validation_fraction": 0.2},
        "trainings": [{"rung": "demo", "petaflops": 2e-5, "seeds": [2]}],
        "common": ["wandb_mode=disabled"],
        "groups": {"tiny": words[1:]},
        "models": {"a & b": model},
    }
    comparison.compare(plan, tmp_path, dtype="float32")
    configs = [read_yaml(path) for path in tmp_path.glob("demo/*/seed_*/run/config.yaml")]
    assert [config["arch"]["forward_dtype"] for config in configs] == ["float32"] * 3
    content = json.loads((tmp_path / "comparison.json").read_text())
    (row,) = content["results"]
    assert (row["model"], row["seed"], row["lr"]) == ("a & b", 2, 1e-3)
    assert row["petaflops"] == pytest.approx(2e-5, rel=0.05)
    assert row["gigaflops"] == pytest.approx([row["gigaflops"][1] / 2, row["gigaflops"][1]])
    assert f"| a & b | {row['parameters']:,} | 0.001 |" in (tmp_path / "README.md").read_text()
    assert "demo, 2e-05 PF" in (tmp_path / "comparison.svg").read_text()
    shutil.rmtree(tmp_path / "demo")  # as on another machine
    monkeypatch.setattr(seeds, "_run", None)  # nothing is run again
    comparison.compare(plan, tmp_path)
    assert json.loads((tmp_path / "comparison.json").read_text()) == content
