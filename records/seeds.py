"""Runs a rung (a benchmark task): builds data, trains each seed, evaluates, and measures the time.

The time counts only while a program runs that builds, trains or evaluates. It is saved to disk. If this
program is interrupted and started again, the time continues. A folder contains the files of one rung:
`data/`, and for each seed `seed_<n>/` with the run folder `run/`, the output, and the measured times. For
each record of metrics.jsonl, the time at which it was written is also stored. If a rung has several
trainings, the earlier ones are in `training_<m>/`. `format.json` contains the number format (bfloat16 or
float32) of all trainings and evaluations.
"""

from runtime.environment import num_cores

import functools
import os
import resource
import shlex
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import REPOSITORY, Load, fail, program, program_environment
from checkpointing.files import CONFIG_FILE, newest_checkpoint
from config.compose import compose_overrides
from config.schema import PretrainConfig
from distributed.child import start_child, why_it_failed
from evaluation.metric_tables import metrics_by_set
from evaluation.results import EVALUATION_FILE, MEASURED_FILE, SCALING_FILE
from records.machine import describe_machine, find_format, training_device, write_format
from records.rungs import Rung
from report.run import Row, read_run
from runtime.formats import NumberFormat
from runtime.metrics_file import METRICS_FILE
from runtime.reading import parse_json, read_json, read_yaml
from runtime.writing import open_to_append, write_json
from training.run_config import FORMAT_KEY, describe_changes
from training.run_folder import has_ended

_POLL_SECONDS, _SAVE_SECONDS = 0.1, 1.0
# Keys that may change when a run resumes, but that change its result.
_OF_RESULT = ("data_path", "test_data_path", "stop_patience", "plugins")


class Rerun:
    """Runs a benchmark task in a folder: builds its data, trains, and evaluates.

    source: Path of external data. None if the task needs none.
    overrides: key=value arguments of pretrain.py that change the task's config.
    dtype: Dtype, such as "bfloat16". If None, the dtype of earlier trainings in the folder. If there are
    none, the dtype in the config of the task, or else the fast one on this machine.
    """

    def __init__(
        self,
        rung: Rung,
        folder: Path,
        *,
        source: Path | None,
        overrides: tuple[str, ...] = (),
        dtype: NumberFormat | None = None,
    ):
        self.rung, self.folder, self.source, self.overrides = rung, folder, source, overrides
        self._dtype = dtype

    @functools.cached_property
    def forward_dtype(self) -> NumberFormat:
        """The dtype of all trainings in the folder, such as "bfloat16".

        Raises ValueError if earlier trainings in the folder have another dtype than the requested one.
        """
        return find_format(self.folder, self._configs[-1], self._device, requested=self._dtype)

    @property
    def machine(self) -> dict[str, Any]:
        """Describes the machine that this program runs on, and the dtype of the trainings.

        The keys are "cpu" (name of the processor, or of the GPU if the training uses one), "instruction_set",
        "cores", "torch" (version) and "forward_dtype".
        """
        versions = {"cores": num_cores(), "torch": torch.__version__}
        return describe_machine(self._device) | versions | {"forward_dtype": self.forward_dtype}

    def check(self, seeds: Iterable[int]) -> None:
        """Checks the settings of all trainings before anything runs.

        With one seed, several trainings may follow each other. Raises ValueError if the config of any
        training is invalid. Exits the program if the folder contains a run with other settings. Also exits
        the program if a run has started although the training before it did not reach its last step.
        """
        for seed in seeds:
            before = None
            for run, recipe in self._trainings(seed):
                now, config = compose_overrides(PretrainConfig, recipe), run / CONFIG_FILE
                changes = ""
                if config.exists():
                    changes = describe_changes(_moved(read_yaml(config), now), now, also=_OF_RESULT)
                if changes:
                    fail(f"{self.folder} has a run of another recipe ({changes}). Choose another --folder.")
                # Example: a first launch had max_steps=100.
                if before and config.exists() and not has_ended(before, max_steps=now.max_steps):
                    fail(f"{run} started before {before} had all its steps. Choose another --folder.")
                before = run

    def build_data(self) -> float:
        """Builds the datasets, unless the folder has them. Returns the seconds that building took.

        Exits the program if the folder has datasets that were built with other options.
        """
        commands, made = self.rung.build_commands(self.folder, self.source), self.folder / "data.json"
        if not made.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            clock = Clock(self._data_clock)
            for command in commands:
                _run(program(*command), clock, log=self.folder / "data.txt")
            write_json(made, {"command": sum(commands, []), "seconds": clock.seconds})
        built = read_json(made)
        if _without_folders(built["command"]) != _without_folders(sum(commands, [])):
            other = f"was not built with the options of this rung ({self.rung.builder})"
            fail(f"the data in {self.folder} {other}. Choose another --folder.")
        return built["seconds"]

    def train(self, seed: int, *, data_seconds: float) -> dict[str, Any]:
        """Trains with one seed to the end, and evaluates. An interrupted training continues.

        Returns a dict with the accuracy, and among others "seconds" (data_seconds plus the time of trainings
        and of the evaluation that counts), "processor_hours" (CPU time, also of building the data),
        "petaflops" (operations of the trainings, in 1e15), and "other_cores". This is the mean number of
        cores that other programs used, in the training or evaluation where it is largest, or None if unknown.

        Exits the program if a training fails or is stopped early, or if the metric of the task is missing.

        data_seconds: Seconds that building the data took.
        """
        rung, clocks, petaflops = self.rung, [Clock(self._data_clock)], []
        for run, recipe in self._trainings(seed):
            folder = run.parent
            folder.mkdir(parents=True, exist_ok=True)
            clocks.append(Clock(folder / "clock.json", log=run / METRICS_FILE))
            max_steps = compose_overrides(PretrainConfig, recipe).max_steps
            if not has_ended(run, max_steps=max_steps):
                write_format(self.folder, self.forward_dtype)
                command = program("pretrain.py", *recipe, processes=rung.processes)
                _run(command, clocks[-1], log=folder / "log.txt")
                if not has_ended(run, max_steps=max_steps):
                    fail(f"seed {seed} was stopped early. To continue, run the same command with --folder.")
            petaflops.append(read_run(run).petaflops)
        rows = self.rows(seed, data_seconds=data_seconds)
        metrics = ("exact_accuracy", rung.metric, "count")
        found = {metric: final_evaluation(rows, metric) for metric in metrics}
        if rung.judge:
            folder = self.run_folder(seed).parent
            clocks.append(Clock(folder / "judge.clock.json"))
            judged = self._evaluate(seed, rung.judge, folder / "judged", clocks[-1])
            found = {metric: statistics.fmean(of_set[metric] for of_set in judged) for metric in found}
        if found[rung.metric] is None:
            metric = f"{rung.metric}, the metric of the rung"
            fail(f"experiment={rung.name} does not compute {metric}. Add its evaluator to `evaluators`.")
        count = found.pop("count")
        others = [clock.other_cores for clock in clocks[1:] if clock.other_cores is not None]
        return {
            "seed": seed,
            **{key: value for key, value in found.items() if value is not None},
            **({} if count is None else {"puzzles": int(count)}),
            "seconds": round(data_seconds + sum(clock.seconds for clock in clocks[1:]), 1),
            "data_seconds": round(data_seconds, 1),
            "processor_hours": round(sum(clock.processor_seconds for clock in clocks) / 3600, 5),
            "petaflops": sum(petaflops),
            "steps": rows[-1]["step"],
            "interruptions": sum(clock.starts - 1 for clock in clocks[1:]),
            "other_cores": max(others, default=None),
        }

    def rows(self, seed: int, *, data_seconds: float) -> list[Row]:
        """Returns the log of the last training with a seed, as a list of dicts.

        A dict belongs to one training step. If the time is known, it has the additional key "seconds": the
        time to build the data and to train up to this step.

        data_seconds: Seconds that building the data took.
        """
        *before, last = (Clock(run.parent / "clock.json") for run, _ in self._trainings(seed))
        rows = read_run(self.run_folder(seed)).rows
        began = data_seconds + sum(clock.seconds for clock in before)
        when = {step: {"seconds": round(began + seconds, 1)} for step, seconds in last.times.items()}
        return [{"step": row["step"], **when.get(row["step"], {}), **row} for row in rows]

    def reason_longer(self, seed: int) -> list[dict[str, Any]]:
        """Evaluates the trained model with more thinking steps and more samples of each puzzle.

        Returns a list of results, one for each number of thinking steps and each number of samples. Example:
        {"steps": 32, "samples": 4, "exact_accuracy": 0.99, "calls": 110.5}. "calls" is the number of thinking
        steps of all samples of a puzzle together, as mean over puzzles. The last result also has the metric
        of the benchmark task.
        """
        rung, folder = self.rung, self.run_folder(seed).parent / "test_time"
        metrics = self._evaluate(seed, rung.test_time, folder, Clock(folder.with_suffix(".clock.json")))
        sets = read_json(folder / SCALING_FILE)["sets"].values()
        settings = []
        for of_sets in zip(*(content["corners"] for content in sets), strict=True):
            shares = [next(iter(corner["ways"].values())) for corner in of_sets]
            names = [name for name in ("exact_accuracy", "valid_accuracy", "calls") if name in shares[0]]
            means = {metric: statistics.fmean(share[metric] for share in shares) for metric in names}
            settings.append({key: of_sets[0][key] for key in ("steps", "samples")} | means)
        settings[-1][rung.metric] = statistics.fmean(of_set[rung.metric] for of_set in metrics)
        return settings

    def _evaluate(self, seed: int, template: str, folder: Path, clock: "Clock") -> list[dict[str, float]]:
        if not self._has_evaluated(seed, folder):
            data = {name: self.folder / name for name in ("data", "more_data")}
            overrides = [f"checkpoint={self.run_folder(seed)}", f"output_dir={folder}"]
            overrides += [f"forward_dtype={self.forward_dtype}"]
            overrides += [word.format(**data) for word in template.split()]
            evaluator, slash, _ = self.rung.metric.rpartition("/")
            overrides += [f"evaluators=[{evaluator}]"] if slash else []
            command = program("evaluate.py", *overrides, processes=self.rung.processes)
            _run(command, clock, log=folder.with_suffix(".txt"))
        return list(read_json(folder / EVALUATION_FILE).values())

    def _has_evaluated(self, seed: int, folder: Path) -> bool:
        if not (folder / EVALUATION_FILE).exists():
            return False
        if not (folder / MEASURED_FILE).exists():  # an earlier version wrote the results
            return True
        # Example: a first launch had max_steps=100, and a later one trained on.
        evaluated, newest = read_json(folder / MEASURED_FILE), newest_checkpoint(self.run_folder(seed))
        return newest is None or Path(evaluated["checkpoint"]).name == newest.name

    @property
    def _data_clock(self) -> Path:
        return self.folder / "data.clock.json"

    def run_folder(self, seed: int) -> Path:
        return self.folder / f"seed_{seed}" / "run"

    @functools.cached_property
    def _configs(self) -> list[PretrainConfig]:
        return [compose_overrides(PretrainConfig, recipe) for _, recipe in self._recipes(0)]

    @functools.cached_property
    def _device(self) -> torch.device:
        return training_device(self._configs[-1], processes=self.rung.processes)

    def _trainings(self, seed: int) -> Iterator[tuple[Path, list[str]]]:
        word = f"{FORMAT_KEY}={self.forward_dtype}"
        for (run, recipe), config in zip(self._recipes(seed), self._configs, strict=True):
            yield run, [*recipe, word] if config.arch.forward_dtype == "auto" else recipe

    def _recipes(self, seed: int) -> Iterator[tuple[Path, list[str]]]:
        values = {"name": self.rung.name, "seed": seed, "before": ""}
        values |= {name: self.folder / name for name in ("data", "more_data")}
        last = len(self.rung.trainings)
        for position, recipe_text in enumerate(self.rung.trainings, 1):
            run = self.run_folder(seed)
            run = run if position == last else run.parent / f"training_{position}" / "run"
            recipe = [word.format(**values) for word in recipe_text.split()]
            yield run, [*recipe, f"checkpoint_path={run}", *self.overrides]
            values["before"] = run


def _moved(stored: dict[str, Any], now: PretrainConfig) -> dict[str, Any]:
    # If the folder of a rung was moved, the paths in it are those of the config `now`.
    stored, before = dict(stored), stored.get("checkpoint_path")
    for key in ("data_path", "init_from") if before else ():
        if _seen_from(before, stored.get(key)) == _seen_from(now.checkpoint_path, getattr(now, key)):
            stored[key] = getattr(now, key)
    return stored


def _seen_from(run: str, paths: str | list[str] | None) -> list[str]:
    return [os.path.relpath(path, run) for path in ([paths] if isinstance(paths, str) else paths or [])]


def _without_folders(command: list[str]) -> list[str]:
    # The folder of the rung may have been moved since the command was stored.
    options = zip(["", *command], command, strict=False)
    return [Path(word).name if option == "--output-dir" else word for option, word in options]


def final_evaluation(rows: list[Row], metric: str, *, of: str = "eval") -> float | None:
    """Returns the mean of a metric over test sets, in the last evaluation of a log that has the metric.

    Returns None if no evaluation has it.

    metric: Name without split and test set, such as "exact_accuracy". of: Split, "eval" or "validation".
    """
    for row in reversed(rows):
        values = [metrics[metric] for metrics in metrics_by_set(row, of).values() if metric in metrics]
        if values:
            return statistics.fmean(values)
    return None


def _run(command: list[str], clock: "Clock", *, log: Path) -> None:
    """Runs a command to its end, while the clock runs. Its output is appended to the file `log`.

    If the command fails, exits this program with the command's error message.
    """
    print(f"running {shlex.join(command[:8])} ... (output: {log})", file=sys.stderr, flush=True)
    begin = log.stat().st_size if log.exists() else 0
    with open_to_append(log) as output, clock:
        process = start_child(command, output, folder=REPOSITORY, environment=program_environment())
        try:
            while process.poll() is None:
                time.sleep(_POLL_SECONDS)
                clock.tick()
        finally:
            if process.poll() is None:
                process.terminate()  # it saves its state
                process.wait()
    if process.returncode:
        text = log.read_bytes()[begin:].decode(errors="replace")
        fail(f"{why_it_failed(text, process.returncode)} (full output: {log})")


class Clock:
    """Measures the total time of all its `with` blocks, and saves it to a file.

    A `Clock` with the same file continues the time, for example after an interruption.

    path: File for the time.
    log: Log of a training (metrics.jsonl) that runs in the block, or None.

    Attributes:
        seconds: Time in all `with` blocks so far.
        processor_seconds: CPU time of the child processes that ended in a `with` block.
        times: {training step: value of `seconds` when its record appeared in `log`}.
    """

    def __init__(self, path: Path, *, log: Path | None = None):
        self._path, self._log = path, log
        saved = read_json(path) if path.exists() else {}
        self.starts, self.seconds = saved.get("starts", 0), saved.get("seconds", 0.0)
        self.processor_seconds = saved.get("processor_seconds", 0.0)
        self.times = {int(step): seconds for step, seconds in saved.get("times", {}).items()}
        self._others, self._others_of = saved.get("others", 0.0), saved.get("others_of", 0.0)

    @property
    def other_cores(self) -> float | None:
        """The mean number of cores that other programs used while the clock ran. None if unknown."""
        return round(self._others / self._others_of, 2) if self._others_of else None

    def __enter__(self) -> "Clock":
        self.starts += 1
        self._read = self._log_size()
        self._before, self._saved = self.seconds, float("-inf")
        self._load, self._began, self._used = Load(), time.perf_counter(), _processor_seconds()
        self.tick()
        return self

    def tick(self) -> None:
        """Updates `seconds` and `times`. Call it often in the `with` block."""
        self.seconds = self._before + time.perf_counter() - self._began
        self._read = min(self._read, self._log_size())  # a run that continues first truncates its log
        if self._log_size() > self._read:
            with self._log.open("rb") as log:
                log.seek(self._read)
                for line in log:
                    if line.endswith(b"\n"):  # an incomplete line is read at the next tick
                        self._read += len(line)
                        self.times[parse_json(line, where="a row")["step"]] = round(self.seconds, 1)
        if self.seconds - self._saved >= _SAVE_SECONDS:
            self._save()

    def __exit__(self, *_: object) -> None:
        self.tick()
        if (cores := self._load.other_cores()) is not None:
            seconds = self.seconds - self._before
            self._others, self._others_of = self._others + cores * seconds, self._others_of + seconds
        self.processor_seconds += _processor_seconds() - self._used
        self._save()

    def _log_size(self) -> int:
        return self._log.stat().st_size if self._log is not None and self._log.exists() else 0

    def _save(self) -> None:
        self._saved = self.seconds
        names = ("starts", "seconds", "processor_seconds", "times")
        saved = {name: getattr(self, name) for name in names}
        write_json(self._path, saved | {"others": self._others, "others_of": self._others_of})


def _processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
