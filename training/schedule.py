"""What is due at which step: a pure function of the step, so that a resumed run does what it had done."""

from __future__ import annotations

from config.schema import PretrainConfig
from dataset.plan import CurriculumPlan


class Schedule:
    """The steps of a run, counted by those that are done.

    total_steps: of the whole run. last_step: where this start ends, by `max_steps` perhaps earlier.
    """

    def __init__(self, config: PretrainConfig, plan: CurriculumPlan):
        self._config = config
        self.total_steps = plan.total_steps
        self.last_step = min(plan.total_steps, config.max_steps or plan.total_steps)
        self._evaluations = {*plan.iteration_ends, self.last_step}

    def is_evaluation(self, step: int) -> bool:
        return step in self._evaluations

    def is_logged(self, step: int) -> bool:
        return step == 1 or step % self._config.log_interval == 0 or self.is_evaluation(step)

    def is_kept(self, step: int) -> bool:
        """Tells whether the state after the step is saved; the last step's is in any case."""
        at_evaluation = self._config.checkpoint_every_eval and self.is_evaluation(step)
        return step == self.last_step or at_evaluation or _divides(self._config.checkpoint_interval, step)

    def is_replica_check(self, step: int) -> bool:
        return _divides(self._config.replica_check_interval, step)

    def describe(self, step: int) -> str:
        """Names the run folder, the step and where it ends, for a person."""
        config = self._config
        end = f", max_steps={config.max_steps}" if self.last_step < self.total_steps else ""
        return f"{config.checkpoint_path} is at step {step} of {self.total_steps}{end}"


def _divides(interval: int | None, step: int) -> bool:
    return interval is not None and step > 0 and step % interval == 0
