"""The schema of the config of pretrain.py: its keys, their types, and the combinations that are errors.

The meaning and the default of each key are in config/pretrain.yaml. The schemas of the other programs are in
`config.programs`.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import pydantic
from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt

from config.architecture import Architecture, Fraction, Strict
from config.messages import explain_mistakes
from runtime import plugins

Value = TypeVar("Value")
# Marks a key that may change when a run is resumed. Most other keys change what the model learns: the
# weights, the schedule, or the order of the data. The dataset folder may change too, but not its fingerprint.
_MAY_CHANGE = "may change on resume"
MayChange = Annotated[Value, _MAY_CHANGE]

Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Auto = Literal["auto"]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Text = Annotated[str, Field(min_length=1)]
Seconds = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
Threads = Annotated[int, Field(gt=0, le=4096)]
# For a list of values. One value is also accepted, as a list of one.
_accepts_one = BeforeValidator(lambda value: value if value is None or isinstance(value, list) else [value])
Several = Annotated[list[Value], Field(min_length=1), _accepts_one]
Paths = Several[Text]
Plugins = MayChange[Annotated[list[Text], _accepts_one]]  # Python files that `runtime.plugins` imports
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+-]*$")]  # name of a folder

# Required values if gradients are not summed over ranks (local_steps > 1), or if no dense weight is trained
# (train_only=puzzle_embeddings). The keys would have no effect, so any other value is an error.
_OF_GRADIENTS = {"sync": ("auto",), "data_parallel_shard_degree": ("auto", 1)}
_OF_DENSE_WEIGHTS = _OF_GRADIENTS | {
    "optimizer": ("adam_atan2", "adamw"),
    "sync_dtype": ("float32",),
    "local_steps": (1,),
    "grad_clip_norm": (None,),
}
SavedOutput = Literal[
    "preds", "logits", "q_halt_logits", "q_continue_logits", "inputs", "labels", "puzzle_identifiers"
]
_OPTIMIZERS = Path(__file__).parents[1] / "optimizers" / "rules"  # one file for each optimizer


def optimizer_names() -> list[str]:
    """Returns the names of the optimizers in optimizers/rules/ and in imported plugins."""
    here = sorted(file.stem for file in _OPTIMIZERS.glob("[a-z]*.py"))
    return here + [optimizer.name for optimizer in plugins.defined("OPTIMIZER")]


def find_optimizer(name: str) -> Any:
    """Returns the optimizer class with this name from an imported plugin (a user's file).

    If no plugin has such an optimizer, returns None.
    """
    return next((optimizer for optimizer in plugins.defined("OPTIMIZER") if optimizer.name == name), None)


def _interval_mistakes(epochs: int | None, interval: int | None) -> Iterator[str]:
    if epochs is not None and interval is not None and epochs % interval:
        small = [divisor for divisor in range(1, math.isqrt(epochs) + 1) if epochs % divisor == 0]
        divisors = [*small, *(epochs // divisor for divisor in small)]
        lower = max(divisor for divisor in divisors if divisor < interval)
        upper = min((divisor for divisor in divisors if divisor > interval), default=lower)
        intervals = " or ".join(map(str, sorted({lower, upper})))
        longer = -(-epochs // interval) * interval
        yield (
            f"eval_interval {interval} does not divide epochs {epochs}. Set eval_interval={intervals}, or "
            f"epochs={longer}."
        )


class MachineConfig(Strict):
    """The keys that pretrain.py and evaluate.py have in common: device, processes, threads and timeouts."""

    device: MayChange[Literal["auto", "cpu", "cuda", "mps"]]
    backend: MayChange[Literal["auto", "nccl", "gloo"]]
    compile: MayChange[Auto | bool]
    cpu_threads: MayChange[Auto | Threads]
    deterministic: MayChange[bool]
    init_timeout_seconds: MayChange[Seconds]
    step_timeout_seconds: MayChange[Seconds]

    @pydantic.field_validator("backend", mode="before")
    @classmethod
    def _is_not_mpi(cls, value: Any) -> Any:
        if value == "mpi":
            raise ValueError(
                "no published build of torch has mpi. Set backend=auto, and start with torchrun."
            )
        return value


class StageConfig(Strict):
    """One stage of a curriculum: a part of the run with its own data or model settings.

    The main training is the part of the run that the config keys `epochs` and `data_path` describe. There are
    two kinds of stages:

    1. A stage with `epochs` comes before the main training.
    2. A stage with `share` is a part of the main training. The first stage of this kind starts together with
       the main training. Each further stage starts at the end of the stage before it.

    Attributes:
        data_path: Dataset folders of the stage. If None, those of the main training.
        epochs: Number of epochs of the stage. If None, the stage has `share`.
        share: Fraction of the steps of the main training. If None, the stage has `epochs`.
        eval_interval: Number of epochs between two evaluations. If None, `epochs`.
        H_cycles, L_cycles, loops: Numbers of loops inside one call of the model. If None, those in the config
            section `arch`.
    """

    data_path: Paths | None = None
    epochs: PositiveInt | None = None
    share: Annotated[float, Field(gt=0, lt=1)] | None = None
    eval_interval: PositiveInt | None = None
    H_cycles: PositiveInt | None = None
    L_cycles: PositiveInt | None = None
    loops: PositiveInt | None = None

    @property
    def cycles(self) -> dict[str, int]:
        """Returns the values of H_cycles, L_cycles and loops that are set, such as {"H_cycles": 2}."""
        values = {"H_cycles": self.H_cycles, "L_cycles": self.L_cycles, "loops": self.loops}
        return {key: value for key, value in values.items() if value}

    def mistakes(self) -> Iterator[str]:
        if (self.epochs is None) == (self.share is None):
            yield (
                "curriculum: a stage needs either epochs (it comes before the main training) or share (it is "
                "a part of the main training). Set one of them."
            )
        if self.share is not None and (self.data_path or self.eval_interval):
            yield "curriculum: a stage with share has no data_path and no eval_interval. Remove them."


def all_data_paths(data_path: list[str], curriculum: list[StageConfig]) -> list[str]:
    of_stages = [path for stage in curriculum for path in stage.data_path or []]
    return list(dict.fromkeys([*data_path, *of_stages]))


class PretrainConfig(MachineConfig):
    """The config of pretrain.py. config/pretrain.yaml explains its keys."""

    YAML: ClassVar[str] = "pretrain"

    arch: Architecture
    plugins: Plugins
    data_path: MayChange[Paths]
    test_data_path: MayChange[Paths | None]
    global_batch_size: PositiveInt
    seed: Seed
    epochs: PositiveInt
    eval_interval: PositiveInt | None
    train_steps: PositiveInt | None
    eval_steps: PositiveInt | None
    max_steps: MayChange[PositiveInt | None]
    validation_fraction: Annotated[float, Field(ge=0, lt=1)]
    leaks: MayChange[Literal["warn", "error"]]
    curriculum: list[StageConfig]
    optimizer: Text
    optimizer_options: dict[str, Any] | None
    lr: Rate
    lr_min_ratio: Fraction
    lr_warmup_steps: NonNegativeInt
    beta1: Decay
    beta2: Decay
    weight_decay: Rate
    puzzle_emb_lr: Rate
    puzzle_emb_weight_decay: Rate
    lr_scaling: Literal["none", "sqrt", "linear"]
    lr_reference_batch_size: PositiveInt
    ema: Annotated[float, Field(gt=0, lt=1)] | None
    ema_bias_correction: bool
    init_from: Text | None
    train_only: Literal["all", "puzzle_embeddings"]
    grad_clip_norm: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None
    gradient_accumulation_steps: MayChange[PositiveInt]
    activation_checkpointing: MayChange[Literal["none", "block"]]
    sync: MayChange[Literal["auto", "flat", "ddp"]]
    pipeline_parallel_degree: MayChange[PositiveInt]
    tensor_parallel_degree: MayChange[PositiveInt]
    data_parallel_shard_degree: MayChange[Auto | Literal[-1] | PositiveInt]
    puzzle_emb_sharding: MayChange[Literal["replicated", "rows"]]
    bucket_size_mb: MayChange[Auto | Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]]
    sync_dtype: Literal["float32", "bfloat16"]
    local_steps: PositiveInt
    outer_lr: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    outer_momentum: Decay
    replica_check_interval: MayChange[PositiveInt | None]
    project_name: MayChange[Name | None]
    run_name: MayChange[Name | None]
    checkpoint_path: MayChange[Text | None]
    checkpoint_every_eval: MayChange[bool]
    checkpoint_interval: MayChange[PositiveInt | None]
    keep_checkpoints: MayChange[Annotated[int, Field(ge=2)] | None]
    keep_best: MayChange[Text | None]
    stop_patience: MayChange[PositiveInt | None]
    checkpoint_async: MayChange[bool]
    resume: MayChange[Text]
    evaluators: MayChange[list[str] | None]
    halting: Literal["max", "act"]  # may not change, because the best checkpoint compares all evaluations
    raw: MayChange[bool]
    save_outputs: MayChange[list[SavedOutput]]
    report: MayChange[bool]
    sanity_check: MayChange[bool]
    log_interval: MayChange[PositiveInt]
    profile: MayChange[bool]
    profile_steps: MayChange[Annotated[list[PositiveInt], Field(min_length=2, max_length=2)]]
    profile_ranks: MayChange[list[NonNegativeInt]]
    profile_details: MayChange[list[Literal["shapes", "stacks"]]]
    loggers: MayChange[list[Text]]
    wandb_mode: MayChange[Literal["auto", "online", "offline", "disabled"]]
    wandb_group: MayChange[Annotated[str, Field(min_length=1, max_length=128)] | None]
    wandb_log_checkpoints: MayChange[Literal["none", "best", "all"]]
    wandb_log_puzzles: MayChange[Annotated[int, Field(ge=0, le=64)]]

    def mistakes(self) -> Iterator[str]:
        yield from self._optimizer_mistakes()
        if self.profile_steps[0] > self.profile_steps[1]:
            yield f"profile_steps={self.profile_steps}: the first step is after the last one. Exchange them."
        if self.stop_patience is not None and self.keep_best is None:
            yield "stop_patience needs keep_best, the metric that it compares. Set keep_best=exact_accuracy."
        if self.train_steps is None:
            yield from _interval_mistakes(self.epochs, self.eval_interval)
            if self.eval_steps is not None:
                yield "eval_steps needs train_steps. Set train_steps, or set eval_interval, in epochs."
        if self.sync_dtype != "float32" and self.sync == "ddp":
            yield f"sync_dtype={self.sync_dtype} needs sync=flat, because DDP sends float32. Set sync=flat."
        for key, value in (("train_only", "puzzle_embeddings"), ("puzzle_emb_sharding", "rows")):
            if getattr(self, key) == value and not self.arch.puzzle_emb_ndim:
                yield f"{key}={value} needs puzzle embeddings, but arch.puzzle_emb_ndim is 0. Remove {key}."
        if self.train_only == "puzzle_embeddings":
            yield from self._nothing_for(_OF_DENSE_WEIGHTS, setting="train_only=puzzle_embeddings")
        if self.ema_bias_correction and self.ema is None:
            yield "ema_bias_correction=true needs ema. Set ema=0.999, or remove ema_bias_correction."
        self.arch.check_outputs(self.save_outputs)
        if self.arch.confuses_symbols:
            yield (
                "arch.equivariant_symbols=true: the model cannot distinguish padding from symbols that are "
                "not in the input. Set arch.add_tokens=4 or arch.puzzle_emb_ndim=1."
            )
        if self.raw and self.ema is None:
            yield "raw=true needs ema. Without ema, eval/ already uses the raw weights. Remove raw."
        for split, key in (("validation/", "validation_fraction"), ("eval_raw/", "raw")):
            if (self.keep_best or "").startswith(split) and not getattr(self, key):
                yield f"keep_best={self.keep_best} needs {key}. Without {key}, no evaluation has this metric."
        if self.wandb_log_checkpoints == "best" and not (self.keep_best and self.checkpoint_every_eval):
            yield "wandb_log_checkpoints=best needs keep_best and checkpoint_every_eval=true. Set them."
        yield from self._local_steps_mistakes()
        if self.pipeline_parallel_degree * self.tensor_parallel_degree > 1:
            yield from self._mesh_mistakes()
        yield from self._curriculum_mistakes()

    def _optimizer_mistakes(self) -> Iterator[str]:
        optimizer = find_optimizer(self.optimizer)
        if optimizer is None:
            if self.optimizer not in optimizer_names():
                names = ", ".join(optimizer_names())
                yield (
                    f"optimizer={self.optimizer!r} should be one of {names}. For an optimizer of yours, add "
                    "plugins=[FILE]."
                )
            if self.optimizer_options:
                yield f"optimizer_options has no effect with optimizer={self.optimizer}. Remove it."
        else:
            try:
                optimizer.check_options(self.optimizer_options or {})
            except (TypeError, ValueError) as error:
                yield f"optimizer_options={self.optimizer_options}: {error}"

    def _local_steps_mistakes(self) -> Iterator[str]:
        if self.local_steps == 1:
            for key, value in {"outer_lr": 1, "outer_momentum": 0}.items():
                if getattr(self, key) != value:
                    yield f"{key}={getattr(self, key)} needs local_steps above 1. Remove {key}."
            return
        yield from self._nothing_for(_OF_GRADIENTS, setting=f"local_steps={self.local_steps}")
        if self.puzzle_emb_sharding == "rows":
            yield "local_steps above 1 needs the full puzzle table. Set puzzle_emb_sharding=replicated."

    def _mesh_mistakes(self) -> Iterator[str]:
        arch, stages, shares = self.arch, self.pipeline_parallel_degree, self.tensor_parallel_degree
        values = arch.model_dump()  # without the keys that this model does not have
        if stages > 1:
            key = f"pipeline_parallel_degree={stages}"
            for name in ("H_layers", "L_layers", "num_layers"):
                if values.get(name, 0) % stages:
                    yield (
                        f"{key} does not divide arch.{name}={values[name]}, so the stages would have "
                        f"different numbers of blocks. Set a divisor of {values[name]}."
                    )
            if values.get("q_target") == "deferred" and not arch.no_ACT_continue:
                yield f"{key} needs arch.q_target=exact, so that all ranks make the same network calls."
        else:
            key = f"tensor_parallel_degree={shares}"
        for name in ("num_heads", "num_heads_t"):
            if values.get(name, 0) % shares:
                yield (
                    f"tensor_parallel_degree={shares} does not divide arch.{name}={values[name]}. Set a "
                    f"divisor of {values[name]}."
                )
        if 256 % shares:
            yield f"tensor_parallel_degree={shares} does not divide the inner features. Use a power of 2."
        if arch.no_mesh:
            yield f"{key} is not possible with arch={arch.name}: {arch.no_mesh}. Remove it."
        if values.get("dropout"):
            yield f"{key} needs arch.dropout=0. Only the rank that owns a slot has its random numbers."
        if self.sync == "ddp":
            yield f"{key} does not work with sync=ddp. Remove one of them."
        if self.local_steps > 1:
            yield f"{key} does not work with local_steps above 1. Remove one of them."

    def _nothing_for(self, keys: dict[str, tuple], *, setting: str) -> Iterator[str]:
        for key, neutral in keys.items():
            if (value := getattr(self, key)) not in neutral:
                yield f"{key}={value} has no effect with {setting}. Remove it."

    def _curriculum_mistakes(self) -> Iterator[str]:
        shares = [stage.share for stage in self.curriculum if stage.share is not None]
        if math.fsum(shares) > 1:  # `sum` may round to more
            yield f"curriculum: the sum of all share is {math.fsum(shares):.4g}. It must be at most 1."
        if any(stage.share is None for stage in self.curriculum[len(self.curriculum) - len(shares) :]):
            yield "curriculum: put stages with epochs before stages with share."
        for stage in self.curriculum:
            for mistake in _interval_mistakes(stage.epochs, stage.eval_interval):
                yield f"curriculum: {mistake}"
            for key in stage.cycles.keys() - set(self.arch.cycle_keys):
                yield f"curriculum: arch={self.arch.name} has no {key}. Remove it from the stage."
            needed = getattr(self.arch, "gradient_cycles", 0) if stage.H_cycles else 0  # a plugin may lack it
            if needed and stage.H_cycles < needed:
                yield f"curriculum: H_cycles {stage.H_cycles} is less than gradient_cycles {needed}."

    @property
    def data_paths(self) -> list[str]:
        return all_data_paths(self.data_path, self.curriculum)

    @property
    def folder_key(self) -> str:
        """Returns the key that chooses the run folder: "run_name", or "checkpoint_path" if it was set."""
        usual = Path("checkpoints", str(self.project_name), str(self.run_name))
        return "run_name" if Path(self.checkpoint_path or usual) == usual else "checkpoint_path"


def keys_that_may_change(schema: type[pydantic.BaseModel]) -> set[str]:
    """Returns the config keys that may have another value when a run is resumed, such as "device"."""
    return {name for name, field in schema.model_fields.items() if _MAY_CHANGE in field.metadata}


Config = TypeVar("Config", bound=pydantic.BaseModel)


def validate_config(schema: type[Config], values: dict[str, Any], *, where: str = "config") -> Config:
    """Checks the values of a config, and returns them as an object of the class `schema`.

    If a key or value is wrong, raises ValueError with one line about one wrong key.

    where: Name of the source of the values. The line starts with this name.
    """
    try:
        return schema.model_validate(values)
    except pydantic.ValidationError as error:
        raise ValueError(f"{where}: {explain_mistakes(schema, error)}") from None
