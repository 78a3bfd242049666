"""What is due at which step: a pure function of the step, so that a resumed run does what it had done."""

from __future__ import annotations

from config.schema import PretrainConfig
from dataset.plan import CurriculumPlan
from optimizers.outer import next_exchange, steps_joined


class Schedule:
    """The steps of a run, counted by those that are done.

    total_steps: of the whole run. last_step: where this start ends, by `max_steps` perhaps earlier.

    With `local_steps` the ranks are one only after an exchange: what is due at a step is done after the first
    exchange at or after it.
    """

    def __init__(self, config: PretrainConfig, plan: CurriculumPlan):
        self._config = config
        self.total_steps = plan.total_steps
        self._exchanges = {"local_steps": config.local_steps, "total_steps": plan.total_steps}
        self.last_step = next_exchange(config.max_steps or plan.total_steps, **self._exchanges)
        self._evaluations = {*plan.iteration_ends, self.last_step}

    def is_evaluation(self, step: int) -> bool:
        return any(each in self._evaluations for each in self._steps(step))

    def is_logged(self, step: int) -> bool:
        interval = self._config.log_interval
        is_due = any(each == 1 or each % interval == 0 for each in self._steps(step))
        return is_due or self.is_evaluation(step)

    def is_kept(self, step: int) -> bool:
        """Tells whether the state after the step is saved; the last step's is in any case."""
        at_evaluation = self._config.checkpoint_every_eval and self.is_evaluation(step)
        return step == self.last_step or at_evaluation or self._is_due(self._config.checkpoint_interval, step)

    def is_replica_check(self, step: int) -> bool:
        return self._is_due(self._config.replica_check_interval, step)

    def _is_due(self, interval: int | None, step: int) -> bool:
        return interval is not None and any(each > 0 and each % interval == 0 for each in self._steps(step))

    def _steps(self, step: int) -> range:
        """Returns the steps of which everything that is due is done after `step`: without local_steps, it."""
        return steps_joined(step, **self._exchanges)

    def describe(self, step: int) -> str:
        """Names the run folder, the step and where it ends, for a person."""
        config = self._config
        end = f", max_steps={config.max_steps}" if self.last_step < self.total_steps else ""
        return f"{config.checkpoint_path} is at step {step} of {self.total_steps}{end}"
