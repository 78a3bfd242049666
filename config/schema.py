"""The typed config: which keys there are, what they may be, and how a mistake in them is told to a person.

Defaults live in the YAML files beside this one, each with its comment; here are the types and limits.
Importing this takes no torch, so that `--help` and typing errors answer at once. Choices live here, facts of
the data do not.
"""

import difflib
import math
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt

Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
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
SavedOutput = Literal[
    "preds", "logits", "q_halt_logits", "q_continue_logits", "inputs", "labels", "puzzle_identifiers"
]


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)


class LossConfig(_Strict):
    """The loss on the label tokens. The halting losses are always binary cross-entropy."""

    loss_type: Literal["stablemax_cross_entropy", "softmax_cross_entropy"]


class HRMConfig(_Strict):
    """Architecture and halting of the Hierarchical Reasoning Model, under the published keys."""

    name: Literal["hrm"]
    hidden_size: PositiveInt
    num_heads: PositiveInt
    expansion: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    H_cycles: PositiveInt
    L_cycles: PositiveInt
    H_layers: PositiveInt
    L_layers: PositiveInt
    halt_max_steps: PositiveInt
    halt_exploration_prob: Fraction
    pos_encodings: Literal["rope", "learned", "none"]
    puzzle_emb_ndim: NonNegativeInt
    # Published configs leave these three out.
    forward_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    rope_theta: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10000.0
    rms_norm_eps: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-5
    loss: LossConfig

    @pydantic.model_validator(mode="after")
    def _heads_fit(self) -> "HRMConfig":
        if self.hidden_size % self.num_heads:
            raise ValueError(f"hidden_size {self.hidden_size} is not divisible by num_heads {self.num_heads}")
        if self.pos_encodings == "rope" and self.head_dim % 2:
            raise ValueError(
                f"hidden_size / num_heads is {self.head_dim}: rotary positions need an even head dimension"
            )
        return self

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def puzzle_emb_len(self) -> int:
        """Positions that the puzzle embedding takes in front of the tokens."""
        return math.ceil(self.puzzle_emb_ndim / self.hidden_size)


class _MachineConfig(_Strict):
    device: Literal["auto", "cpu", "cuda", "mps"]
    backend: Literal["auto", "nccl", "gloo", "mpi"]
    compile: Auto | bool
    cpu_threads: Auto | PositiveInt
    init_timeout_seconds: Seconds
    step_timeout_seconds: Seconds


class PretrainConfig(_MachineConfig):
    """Everything that pretrain.py is told; the comments are in config/pretrain.yaml."""

    arch: HRMConfig
    data_path: Paths
    global_batch_size: PositiveInt
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    epochs: PositiveInt
    eval_interval: PositiveInt | None
    max_steps: PositiveInt | None
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
    grad_clip_norm: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None
    gradient_accumulation_steps: PositiveInt
    activation_checkpointing: Literal["none", "block"]
    sync: Literal["flat", "per_parameter", "ddp"]
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
    eval_save_outputs: list[SavedOutput]
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
        if self.bucket_size_mb != "auto" and self.sync == "per_parameter":
            raise ValueError("bucket_size_mb needs sync=flat or sync=ddp: sync=per_parameter has no buckets")
        if len(self.data_path) > 1:
            raise ValueError(f"data_path names {len(self.data_path)} folders: a run trains on one")
        return self


class EvaluateConfig(_MachineConfig):
    """Everything that evaluate.py is told; the comments are in config/evaluate.yaml."""

    checkpoint: Annotated[str, Field(min_length=1)] | None
    data_path: Paths | None
    output_dir: Annotated[str, Field(min_length=1)] | None
    eval_batch_size: PositiveInt | None
    eval_save_outputs: list[SavedOutput]

    @pydantic.model_validator(mode="after")
    def _is_complete(self) -> "EvaluateConfig":
        if self.checkpoint is None:
            raise ValueError(
                "checkpoint=PATH is needed: a run folder, one step_<N> folder or a published step_<N> file"
            )
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
    known = _keys(schema)
    near = difflib.get_close_matches(key, known, n=1) or [
        name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]
    ]
    return f"unknown key {key!r}" + (f", did you mean {near[0]!r}?" if near else "")


def _explain(schema: type[pydantic.BaseModel], errors: list[dict[str, Any]]) -> str:
    """One line for the errors of one key, which has one for each type that it may have."""
    error, key = errors[0], _key(schema, errors[0])
    if error["type"] == "extra_forbidden":
        return explain_unknown_key(schema, key)
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
    key, model = "", schema
    for part in error["loc"]:
        if isinstance(part, int):
            key += f"[{part}]"
        elif model is not None and (part in model.model_fields or error["type"] == "extra_forbidden"):
            key += f".{part}" if key else part
            model = _submodel(model, part)
    return key


def _keys(schema: type[pydantic.BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name in schema.model_fields:
        keys.append(prefix + name)
        if (submodel := _submodel(schema, name)) is not None:
            keys.extend(_keys(submodel, f"{prefix}{name}."))
    return keys


def _submodel(schema: type[pydantic.BaseModel], name: str) -> type[pydantic.BaseModel] | None:
    annotation = schema.model_fields[name].annotation if name in schema.model_fields else None
    is_model = isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel)
    return annotation if is_model else None
