"""The schemas of the configs of all programs except pretrain.py.

The meaning and the default of each key are in config/evaluate.yaml, solve.yaml, page.yaml and search.yaml.
"""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt

from config.architecture import (
    Damping,
    DecisionCell,
    DecisionValue,
    Fraction,
    StandardDeviation,
    Strict,
)
from config.schema import (
    Auto,
    MachineConfig,
    Name,
    Paths,
    Plugins,
    Rate,
    SavedOutput,
    Seed,
    Several,
    Text,
    Threads,
    Value,
)
from runtime.formats import NumberFormat

Select = Literal["q_head", "q_head_any_step", "first_to_halt", "vote", "residual", "rules"]
# Number of steps or samples. The key of the noise has 16 bits for each.
Count = Annotated[int, Field(ge=1, lt=2**16)]


def _are_different(values: list[Any]) -> list[Any]:
    if len(set(values)) < len(values):
        raise ValueError(f"{values} has a value twice. Remove one.")
    return values


Different = Annotated[Several[Value], AfterValidator(_are_different)]


class _TrainedConfig(Strict):
    """The keys that evaluate.py and solve.py have in common, such as data_path, halting and seed."""

    plugins: Plugins
    data_path: Paths | None
    raw: bool
    halting: Literal["max", "act"]
    init_noise: StandardDeviation | None
    damping: Damping | None
    loops: PositiveInt | None
    sde_noise: StandardDeviation | None
    decision_cell: DecisionCell | None
    decision_value: DecisionValue | None
    eval_conflict_threshold: Fraction | None
    forward_dtype: NumberFormat | None
    seed: Seed


class EvaluateConfig(_TrainedConfig, MachineConfig):
    """The config of evaluate.py. config/evaluate.yaml explains its keys."""

    YAML: ClassVar[str] = "evaluate"

    checkpoint: Paths | None
    output_dir: Text | None
    evaluators: list[str] | None
    leaks: Literal["warn", "error"]
    halt_max_steps: Different[Count] | None
    samples: Different[Count]
    retry_samples: Count | None
    noise: StandardDeviation
    select: Different[Select]
    eval_batch_size: PositiveInt | None
    report: bool
    save_outputs: list[SavedOutput]

    def mistakes(self) -> Iterator[str]:
        if self.checkpoint is None:
            yield "checkpoint is missing. Set it to a run folder, a step_<N> folder, a file, or hf://OWNER/NAME."
        if "rules" in self.select and not self.evaluators:
            yield "select=rules needs the rules of the puzzle. Set evaluators=[KIND], such as [sudoku]."
        if (retry := self.retry_samples) is not None:
            if len(self.samples) > 1 or len(self.halt_max_steps or []) > 1:
                yield "retry_samples needs one value of samples and one of halt_max_steps, not a list."
            elif retry <= self.samples[0]:
                yield f"retry_samples={retry} must be larger than samples={self.samples[0]}."

    @property
    def asks_for_settings(self) -> bool:
        """Returns whether the evaluation writes scaling.json.

        True if `samples`, `select` or `retry_samples` differs from its default, or if `halt_max_steps` has
        several values.
        """
        is_plain = self.samples == [1] and self.select == ["q_head"] and self.retry_samples is None
        return len(self.halt_max_steps or []) > 1 or not is_plain


class SolveConfig(_TrainedConfig):
    """The config of solve.py. config/solve.yaml explains its keys."""

    YAML: ClassVar[str] = "solve"
    VERBATIM: ClassVar[tuple[str, ...]] = ("puzzle",)  # here, even `null` is a text

    checkpoint: Text
    puzzle: str | None
    test: NonNegativeInt
    task: Text | None
    steps: Count | None
    samples: Count
    select: Select
    noise: StandardDeviation | None
    picture: Text | None
    adapt: bool
    adapt_steps: Count
    adapt_lr: Rate
    device: Literal["auto", "cpu", "cuda", "mps"]
    cpu_threads: Auto | Threads

    def mistakes(self) -> Iterator[str]:
        if self.picture is not None and not self.picture.endswith(".svg"):
            yield f"picture={self.picture}: pictures are SVG files. Choose a name that ends in .svg."


class PageConfig(Strict):
    """The config of `python -m share page`. config/page.yaml explains its keys."""

    YAML: ClassVar[str] = "page"

    checkpoint: Paths | None
    output: Text | None
    replace: bool
    plugins: Plugins
    data_path: Paths | None
    raw: bool
    halt_max_steps: Count | None
    puzzles: PositiveInt
    runtime: Text | None

    def mistakes(self) -> Iterator[str]:
        if self.data_path is not None and len(self.checkpoint or ()) != 1:
            yield "data_path needs exactly one checkpoint. Remove data_path, or set checkpoint to one path."
        if self.output is None:
            yield "output is missing. Set it to the folder of the page."


class SearchConfig(Strict):
    """The config of search.py, which searches hyperparameters. config/search.yaml explains its keys.

    Other keys on the command line are those of pretrain.py. A key with one value is passed to every training,
    and a key with several values is searched. The search sets run_name, checkpoint_path and resume itself.
    """

    YAML: ClassVar[str] = "search"

    study: Name
    folder: Text | None
    storage: Text | None
    trials: PositiveInt
    launch: Text | None
    parallel: PositiveInt
    seeds: PositiveInt
    sampler: Literal["tpe", "grid"]
    pruner: Literal["median", "hyperband", "none"]
    startup_trials: NonNegativeInt
    sampler_seed: NonNegativeInt
