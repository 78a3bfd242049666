"""The schedule of a run: the work that is due after each step. It depends on config, dataset and step."""

import dataclasses
from pathlib import Path
from typing import Any

from config.schema import PretrainConfig
from dataset.plan import TrainPlan
from distributed import log
from evaluation.metric_tables import is_number
from models.carry import Reasoning
from models.flops import StepCounter
from optimizers.learning_rate import learning_rates
from runtime.metrics_file import read_rows
from training.strategy import next_sync, synced_steps


class Schedule:
    """Decides after which training steps the run logs its metrics, evaluates, or saves a checkpoint.

    The schedule also has the learning rates of each step, and the settings that a curriculum changes.

    With `local_steps` > 1, each rank trains without the others, and all ranks merge their weights every
    `local_steps` steps. Work that is due at a step without a merge is done after the next merge.

    `total_steps` is the number of steps of the run. This process ends after step `end_step` at the latest.
    """

    def __init__(self, config: PretrainConfig, plan: TrainPlan):
        self._config, self._plan = config, plan
        self.total_steps = plan.total_steps
        self._interval = {"local_steps": config.local_steps, "total_steps": plan.total_steps}
        self.end_step = next_sync(config.max_steps or plan.total_steps, **self._interval)
        self._evaluations = {*plan.iteration_ends, self.end_step}

    def learning_rates(self, step: int) -> dict[str, float]:
        return learning_rates(self._config, step, total_steps=self.total_steps)

    def epochs(self, step: int) -> float:
        """Returns how many epochs the first `step` training steps take, such as 2.5."""
        return self._plan.epochs(step)

    def reasoning(self, step: int, usual: Reasoning) -> Reasoning:
        """Returns the settings of the model's thinking for training step `step`.

        The result is a copy of `usual` with the fraction of the training that is done (`progress`). If a
        curriculum sets H_cycles, L_cycles or loops for this step, the copy has these values.

        usual: Settings of a run without a curriculum.
        """
        cycles = self._plan.stage_of(step).cycles
        return dataclasses.replace(usual, progress=step / self.total_steps, **cycles)

    def petaflops(self, step: int, counter: StepCounter) -> float:
        """Returns the floating-point operations of the first `step` training steps on all ranks, in 1e15.

        counter: Counts the operations of a thinking step on one puzzle.
        """
        of_slot = 0.0
        for stage, count in self._plan.num_steps(step):
            reasoning = dataclasses.replace(counter.model.reasoning, **stage.cycles)
            of_slot += count * counter.flops(reasoning, trains=True)
        return of_slot * self._config.global_batch_size / 1e15

    def is_evaluation(self, step: int) -> bool:
        return any(synced in self._evaluations for synced in self._steps(step))

    def has_row(self, step: int) -> bool:
        interval = self._config.log_interval
        is_due = any(synced == 1 or synced % interval == 0 for synced in self._steps(step))
        return step > 0 and (is_due or self.is_evaluation(step))

    def is_checkpoint(self, step: int) -> bool:
        at_evaluation = self._config.checkpoint_every_eval and self.is_evaluation(step)
        return step == self.end_step or at_evaluation or self._is_due(self._config.checkpoint_interval, step)

    def warn_of_unsaved_best(self) -> None:
        """Warns if the step with the best evaluation may have no checkpoint."""
        steps = {next_sync(step, **self._interval) for step in self._evaluations}
        is_unsaved = any(step < self.end_step and not self.is_checkpoint(step) for step in steps)
        if self._config.keep_best is not None and is_unsaved:
            log.warning(
                f"checkpoint_every_eval=false: the step that keep_best={self._config.keep_best} marks as the "
                "best may have no checkpoint. Training continues. Set checkpoint_every_eval=true to save it."
            )

    def is_replica_check(self, step: int) -> bool:
        return self._is_due(self._config.replica_check_interval, step)

    def _is_due(self, interval: int | None, step: int) -> bool:
        return interval is not None and any(
            synced > 0 and synced % interval == 0 for synced in self._steps(step)
        )

    def _steps(self, step: int) -> range:
        # The steps whose log row, evaluation or checkpoint is made after `step`. With local_steps > 1, there
        # are several if the ranks merge their weights after `step`, otherwise none.
        return synced_steps(step, **self._interval)

    def status(self, step: int, *, lacks_row: bool = False) -> str:
        """Returns the status of a run whose processes end after step `step`.

        The status is "finished" after the last step, and "max_steps" if the config key `max_steps` ends the
        run earlier. Otherwise it is "stopped".

        lacks_row: Whether the metrics of `step` are not logged yet. The status is then "stopped", so that the
            run is started again and logs them.
        """
        if step < self.end_step or lacks_row:
            return "stopped"
        return "finished" if step >= self.total_steps else "max_steps"

    def describe(self, step: int) -> str:
        """Returns a text such as "checkpoints/demo is at training step 100 of 500"."""
        config = self._config
        end = f", max_steps={config.max_steps}" if self.end_step < self.total_steps else ""
        return f"{config.checkpoint_path} is at training step {step} of {self.total_steps}{end}"


def log_rate_change(config: PretrainConfig, chosen: Path, content: dict[str, Any], total_steps: int) -> None:
    """Logs a message if the learning rate jumps when a run continues from another run.

    The message is logged if the rates of both runs differ by more than 1 % at the same step. Example: the
    other run had fewer steps, so its learning rate was lower at its end.

    chosen: Folder of a checkpoint of the other run (resume=PATH).
    content: Content of the state.json of this checkpoint, such as {"step": 100, "total_steps": 500, ...}.
    total_steps: Number of training steps of this run.
    """
    step, before, logged_step = content["step"], None, 0
    for row, _ in read_rows(chosen.parent):
        if row["step"] <= step and "train/lr" in row:
            before, logged_step = row["train/lr"], row["step"]
    same, after = (
        learning_rates(config, at, total_steps=total_steps)["lr"] for at in (logged_step, step + 1)
    )
    if is_number(before) and abs(same - before) > 0.01 * before:
        length = content.get("total_steps")
        other = "" if length is None else f", that run had {length}"
        log.info(
            f"the learning rate changes from {before:.3g} to {after:.3g} after step {step}, because this run "
            f"has another schedule than {chosen.parent}. This run has {total_steps} steps{other}."
        )
