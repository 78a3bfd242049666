"""What is due after which step of a run: a pure function of its config and the number of the step."""

import dataclasses

from config.schema import PretrainConfig
from dataset.plan import TrainPlan
from models import HaltingModel
from models.carry import Reasoning
from optimizers.schedule import learning_rates
from parallel.strategy import next_sync, synced_steps


class Schedule:
    """What is due after which step of a run.

    total_steps: of the whole run. last_step: of this start; `max_steps` may make it earlier.

    With `local_steps` the ranks are equal only after a synchronisation: what is due at a step is done after
    the first synchronisation at or after it.
    """

    def __init__(self, config: PretrainConfig, plan: TrainPlan):
        self._config, self._plan = config, plan
        self.total_steps = plan.total_steps
        self._interval = {"local_steps": config.local_steps, "total_steps": plan.total_steps}
        self.last_step = next_sync(config.max_steps or plan.total_steps, **self._interval)
        self._evaluations = {*plan.iteration_ends, self.last_step}

    def learning_rates(self, step: int) -> dict[str, float]:
        """Returns the rates of update `step`, by the keys of their peaks."""
        return learning_rates(self._config, step, total_steps=self.total_steps)

    def reasoning(self, step: int, usual: Reasoning) -> Reasoning:
        """Returns the reasoning of update `step`: the usual one, with the cycles that its stage names."""
        cycles = self._plan.stage_of(step).cycles
        return dataclasses.replace(usual, progress=step / self.total_steps, **cycles)

    def petaflops(self, step: int, model: HaltingModel, *, seq_len: int) -> float:
        """Counts the operations of the first `step` updates (`models.flops`), in 1e15, over all ranks."""
        of_slot = 0.0
        for stage, number in self._plan.num_steps(step):
            reasoning = dataclasses.replace(model.reasoning, **stage.cycles)
            of_slot += number * model.network.step_flops(reasoning, seq_len=seq_len, trains=True)
        return of_slot * self._config.global_batch_size / 1e15

    def is_evaluation(self, step: int) -> bool:
        return any(each in self._evaluations for each in self._steps(step))

    def has_row(self, step: int) -> bool:
        interval = self._config.log_interval
        is_due = any(each == 1 or each % interval == 0 for each in self._steps(step))
        return is_due or self.is_evaluation(step)

    def is_checkpoint(self, step: int) -> bool:
        """Returns whether the state after the step is saved; the last one is in any case."""
        at_evaluation = self._config.checkpoint_every_eval and self.is_evaluation(step)
        return step == self.last_step or at_evaluation or self._is_due(self._config.checkpoint_interval, step)

    def is_replica_check(self, step: int) -> bool:
        return self._is_due(self._config.replica_check_interval, step)

    def _is_due(self, interval: int | None, step: int) -> bool:
        return interval is not None and any(each > 0 and each % interval == 0 for each in self._steps(step))

    def _steps(self, step: int) -> range:
        """Returns the steps that are completed after `step`: `step` alone, or with local_steps all since the
        last synchronisation, and none between two.
        """
        return synced_steps(step, **self._interval)

    def status(self, step: int, *, lacks_row: bool = False) -> str:
        """Names how a run ends that stops at `step`, perhaps without the row of it, for the file `status`."""
        if step < self.last_step or lacks_row:
            return "stopped"
        return "finished" if step >= self.total_steps else "max_steps"

    def describe(self, step: int) -> str:
        """Names the run folder, the step and where it ends, for a person."""
        config = self._config
        end = f", max_steps={config.max_steps}" if self.last_step < self.total_steps else ""
        return f"{config.checkpoint_path} is at training step {step} of {self.total_steps}{end}"
