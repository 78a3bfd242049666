"""The typed config: which keys there are, what they may be, and how a mistake in them is told to a person.

Defaults live in the YAML files beside this one, each with its comment; here are the types and limits.
Importing this takes no torch, so that `--help` and typing errors answer at once. Choices live here, facts of
the data do not.
"""

import difflib
import itertools
import typing
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt

from config.architecture import Architecture, Fraction, Strict

Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Auto = Literal["auto"]
Scaling = Literal["none", "sqrt", "linear"]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Paths = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    Field(min_length=1),
]
Name = Annotated[  # becomes a folder's name; run_name=$SLURM_JOB_ID is a number
    str,
    BeforeValidator(lambda value: str(value) if type(value) is int else value),
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+-]*$"),
]
Evaluator = Literal["arc", "maze", "sudoku"]
SavedOutput = Literal[
    "preds", "logits", "q_halt_logits", "q_continue_logits", "inputs", "labels", "puzzle_identifiers"
]


class _MachineConfig(Strict):
    device: Literal["auto", "cpu", "cuda", "mps"]
    backend: Literal["auto", "nccl", "gloo", "mpi"]
    compile: Auto | bool
    cpu_threads: Auto | PositiveInt
    init_timeout_seconds: Seconds
    step_timeout_seconds: Seconds


class StageConfig(Strict):
    """A stage of a curriculum: training before the main one, on other data, or with fewer cycles."""

    data_path: Paths | None = None
    epochs: PositiveInt
    eval_interval: PositiveInt | None = None
    H_cycles: PositiveInt | None = None
    L_cycles: PositiveInt | None = None


def all_data_paths(data_path: list[str], curriculum: list[StageConfig]) -> list[str]:
    """Every folder that a run reads: those of the main training first, then those of the stages."""
    of_stages = [path for stage in curriculum for path in stage.data_path or []]
    return list(dict.fromkeys([*data_path, *of_stages]))


class PretrainConfig(_MachineConfig):
    """Everything that pretrain.py is told; the comments are in config/pretrain.yaml."""

    arch: Architecture
    data_path: Paths
    global_batch_size: PositiveInt
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    epochs: PositiveInt
    eval_interval: PositiveInt | None
    max_steps: PositiveInt | None
    curriculum: list[StageConfig]
    optimizer: Literal["adam_atan2", "muon"]
    lr: Rate
    lr_min_ratio: Fraction
    lr_warmup_steps: NonNegativeInt
    beta1: Decay
    beta2: Decay
    weight_decay: Rate
    puzzle_emb_lr: Rate
    puzzle_emb_weight_decay: Rate
    lr_scaling: Scaling
    puzzle_emb_lr_scaling: Scaling
    lr_reference_batch_size: PositiveInt
    ema: Annotated[float, Field(gt=0, lt=1)] | None
    init_from: Annotated[str, Field(min_length=1)] | None
    train_only: Literal["all", "puzzle_embeddings"]
    grad_clip_norm: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None
    gradient_accumulation_steps: PositiveInt
    activation_checkpointing: Literal["none", "block"]
    sync: Literal["flat", "ddp"]
    bucket_size_mb: Auto | Annotated[float, Field(gt=0, allow_inf_nan=False)]
    gradient_dtype: Literal["float32", "bfloat16"]
    replica_check_interval: PositiveInt | None
    project_name: Name | None
    run_name: Name | None
    checkpoint_path: Annotated[str, Field(min_length=1)] | None
    checkpoint_every_eval: bool
    checkpoint_interval: PositiveInt | None
    keep_checkpoints: Annotated[int, Field(ge=2)] | None
    keep_best: Annotated[str, Field(min_length=1)] | None
    checkpoint_async: bool
    resume: Annotated[str, Field(min_length=1)]
    evaluators: list[Evaluator]
    halting: Literal["max", "act"]
    raw: bool
    save_outputs: list[SavedOutput]
    dry_run: bool
    log_interval: PositiveInt
    profile: bool
    wandb_mode: Literal["auto", "online", "offline", "disabled"]

    @pydantic.model_validator(mode="after")
    def _values_fit(self) -> "PretrainConfig":
        if self.eval_interval is not None and self.epochs % self.eval_interval:
            raise ValueError(f"eval_interval {self.eval_interval} does not divide epochs {self.epochs}")
        if self.gradient_dtype != "float32" and self.sync != "flat":
            raise ValueError(
                f"gradient_dtype={self.gradient_dtype} needs sync=flat: sync={self.sync} exchanges float32"
            )
        if self.train_only == "puzzle_embeddings":
            if self.sync == "ddp":
                raise ValueError("train_only=puzzle_embeddings leaves nothing for sync=ddp: choose flat")
            if self.optimizer == "muon":
                raise ValueError("train_only=puzzle_embeddings leaves nothing for optimizer=muon: drop it")
            if not self.arch.puzzle_emb_ndim:
                raise ValueError("train_only=puzzle_embeddings needs puzzle embeddings: puzzle_emb_ndim is 0")
        if self.raw and self.ema is None:
            raise ValueError("raw=true needs ema: without averages eval/ is of the weights; drop raw")
        for stage in self.curriculum:
            if stage.eval_interval is not None and stage.epochs % stage.eval_interval:
                raise ValueError(
                    f"curriculum: eval_interval {stage.eval_interval} does not divide epochs {stage.epochs}"
                )
            if (stage.H_cycles or stage.L_cycles) and self.arch.name == "transformer":
                raise ValueError("curriculum: arch=transformer has no cycles to change")
            if stage.H_cycles is not None and stage.H_cycles < self.arch.gradient_cycles:
                raise ValueError(
                    f"curriculum: H_cycles {stage.H_cycles} is less than gradient_cycles "
                    f"{self.arch.gradient_cycles}"
                )
        return self

    @property
    def data_paths(self) -> list[str]:
        return all_data_paths(self.data_path, self.curriculum)


class EvaluateConfig(_MachineConfig):
    """Everything that evaluate.py is told; the comments are in config/evaluate.yaml."""

    checkpoint: Paths | None
    data_path: Paths | None
    output_dir: Annotated[str, Field(min_length=1)] | None
    raw: bool
    evaluators: list[Evaluator]
    halting: Literal["max", "act"]
    halt_max_steps: PositiveInt | None
    arc_votes: list[Annotated[str, Field(min_length=1)]]
    eval_batch_size: PositiveInt | None
    save_outputs: list[SavedOutput]

    @pydantic.model_validator(mode="after")
    def _is_complete(self) -> "EvaluateConfig":
        if self.checkpoint is None:
            raise ValueError(
                "checkpoint=PATH is needed: a run folder, one step_<N> folder or a published step_<N> file"
            )
        if self.arc_votes and "arc" not in self.evaluators:
            raise ValueError("arc_votes are for the evaluator arc: add evaluators=[arc]")
        if len(self.checkpoint) > 1 and self.arc_votes:
            raise ValueError("arc_votes join one evaluation: give one checkpoint")
        return self


Config = TypeVar("Config", bound=pydantic.BaseModel)


def validate_config(schema: type[Config], values: dict[str, Any], *, where: str = "config") -> Config:
    """The frozen config, or ValueError: one line with the first wrong key and the key that was meant."""
    try:
        return schema.model_validate(values)
    except pydantic.ValidationError as error:
        errors = error.errors(include_url=False)
        first = next((item for item in errors if item["type"] == "extra_forbidden"), errors[0])
        same_key = [item for item in errors if _key(schema, item) == _key(schema, first)]
        raise ValueError(f"{where}: {_explain(schema, same_key)}") from None


def explain_unknown_key(schema: type[pydantic.BaseModel], key: str) -> str:
    known = _keys((schema,))
    if key in known:
        return f"key {key!r} belongs to another arch than the chosen one"
    near = difflib.get_close_matches(key, known, n=1) or [
        name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]
    ]
    return f"unknown key {key!r}" + (f", did you mean {near[0]!r}?" if near else "")


def _explain(schema: type[pydantic.BaseModel], errors: list[dict[str, Any]]) -> str:
    """One line for the errors of one key, which has one for each type that it may have."""
    error, key = errors[0], _key(schema, errors[0])
    if error["type"] == "extra_forbidden":
        return explain_unknown_key(schema, key)
    if error["type"] == "union_tag_invalid":
        return f"{key}.name={error['ctx']['tag']!r} should be one of {error['ctx']['expected_tags']}"
    if error["type"] == "union_tag_not_found":
        return f"key '{key}.name' is missing"
    if error["type"] == "missing":
        return f"key {key!r} is missing"
    if error["type"] == "value_error":  # our own cross-checks name their keys themselves
        message = error["msg"].removeprefix("Value error, ")
        return f"{key}: {message}" if key else message
    if error["type"] == "string_pattern_mismatch":
        return (
            f"{key}={error['input']!r} should start with a letter or digit and go on with those and _ . + -"
        )
    expected = " or ".join(item["msg"].removeprefix("Input should be ") for item in errors)
    return f"{key}={error['input']!r} should be {expected}"


def _key(schema: type[pydantic.BaseModel], error: dict[str, Any]) -> str:
    """The dotted key of an error, without the members of a union that pydantic adds to it."""
    key, models = "", (schema,)
    for number, part in enumerate(error["loc"], 1):
        if isinstance(part, int):
            key += f"[{part}]"
        elif any(part in model.model_fields for model in models) or (
            error["type"] == "extra_forbidden" and number == len(error["loc"])
        ):
            key += f".{part}" if key else part
            models = _submodels(models, part)
    return key


def _keys(models: tuple[type[pydantic.BaseModel], ...], prefix: str = "") -> list[str]:
    """Every dotted key; of one that may be one of several models, those of all of them."""
    keys = []
    for name in dict.fromkeys(name for model in models for name in model.model_fields):
        keys.append(prefix + name)
        if submodels := _submodels(models, name):
            keys.extend(_keys(submodels, f"{prefix}{name}."))
    return keys


def _submodels(
    models: tuple[type[pydantic.BaseModel], ...], name: str
) -> tuple[type[pydantic.BaseModel], ...]:
    """The models that the field `name` may hold."""
    annotations = [model.model_fields[name].annotation for model in models if name in model.model_fields]
    members = [member for annotation in annotations for member in typing.get_args(annotation) or [annotation]]
    is_model = [isinstance(member, type) and issubclass(member, pydantic.BaseModel) for member in members]
    return tuple(dict.fromkeys(itertools.compress(members, is_model)))
