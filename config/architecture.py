"""The schemas of the config section `arch`: a class for each model.

A model's class is derived from `ArchConfig`, or from `TokenConfig` if the model has one vector for each cell.
Most keys have the names that the published code of the model uses.

A class declares only the type and the bounds of each key. The default and the meaning of the key are in
config/arch/<name>.yaml. Defaults of keys that several models have are in config/arch/shared/. If an old
checkpoint lacks a key, the key gets its default from these files, too (`fill_defaults` in config/files.py).
So with the default of a new key, a model must compute the same as before the key existed.
"""

import contextlib
import math
import typing
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import Field, NonNegativeInt

from runtime import plugins
from runtime.formats import NumberFormat

Fraction = Annotated[float, Field(ge=0, le=1)]
StandardDeviation = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Damping = Annotated[float, Field(gt=0, le=1)]
# Sizes that determine memory and time have upper bounds, because a config may come from an untrusted file.
_Width = Annotated[int, Field(ge=0, le=2**20)]
_AtLeastOne = Annotated[_Width, Field(ge=1)]
_Repeats = Annotated[int, Field(ge=1, le=1000)]  # number of layers or cycles
_Steps = Annotated[int, Field(ge=1, lt=2**16)]
DecisionCell = Literal["uniform", "fewest"]
DecisionValue = Literal["drawn", "best"]
_Inside = Annotated[float, Field(gt=0, lt=1)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_QTarget = Literal["exact", "deferred"]


class Strict(pydantic.BaseModel):
    """The base class of all configs. A config is immutable. Unknown keys and wrong types are errors."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)
    VERBATIM: ClassVar[tuple[str, ...]] = ()  # keys with texts that are never read as a path, a list or null

    def mistakes(self) -> Iterator[str]:
        """Yields a message for each wrong combination of keys. Creating a config raises the first message."""
        yield from ()

    @pydantic.model_validator(mode="after")
    def _has_no_mistakes(self) -> "Strict":
        for mistake in self.mistakes():
            raise ValueError(mistake)
        return self


class LossConfig(Strict):
    """The keys `arch.loss.*` of the training loss. The formula of the loss is in models/objective.py."""

    loss_type: Literal["stablemax_cross_entropy", "softmax_cross_entropy"]
    label_smoothing: Annotated[float, Field(ge=0, lt=1)]
    halting_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    supervision_decay: Annotated[float, Field(gt=0, le=1)]


class ArchConfig(Strict):
    """The base class of every model's config: the keys that all models have, and facts about the model.

    Attributes:
        title: Short name of the model in papers. If "", `heading` returns the name in capital letters.
        paper: (Full name of the model, arXiv number). None if there is no paper.
        cycle_keys: Keys with a number of loops inside one call of the model, such as "H_cycles". A curriculum
            may change their values during the training.
        has_q_continue: Whether the model has the output q_continue_logits, the logit of "the answer will be
            right after more thinking steps".
        finds_candidates: Whether the model needs to know which labels each input token may have
            (`Metadata.candidates`). These labels are read from the training data.
        confuses_symbols: Whether the model always gives equal logits to padding and to each token that does
            not occur in the input.
        no_mesh: Reason why pipeline and tensor parallelism are impossible. If they are possible, "".
        reads_any_length: Whether a trained model can read puzzles with another number of cells.
        eval_changes: {key: value in evaluations}, for keys with another value than in training. Example:
            {"L_cycles": 1}.
    """

    title: ClassVar[str] = ""
    paper: ClassVar[tuple[str, str] | None] = None
    cycle_keys: ClassVar[tuple[str, ...]] = ()
    has_q_continue: ClassVar[bool] = False
    finds_candidates: ClassVar[bool] = False
    confuses_symbols: ClassVar[bool] = False
    no_mesh: ClassVar[str] = ""
    reads_any_length: ClassVar[bool] = False
    eval_changes: ClassVar[dict[str, int]] = {}

    hidden_size: _AtLeastOne
    num_heads: _AtLeastOne
    expansion: _Positive
    rope_theta: _Positive
    puzzle_emb_ndim: _Width
    forward_dtype: Literal["auto"] | NumberFormat

    @property
    def has_puzzle_embeddings(self) -> bool:
        return self.puzzle_emb_ndim > 0

    @property
    def formats(self) -> list[NumberFormat]:
        """The number formats in which the model can compute. A plugin's model may have only one."""
        formats = []
        for name in typing.get_args(NumberFormat):
            with contextlib.suppress(pydantic.ValidationError):
                type(self).model_validate(self.model_dump() | {"forward_dtype": name})
                formats.append(name)
        return formats

    @classmethod
    def heading(cls) -> str:
        """Returns the title, or the name in capital letters if the class has no title, as in a plugin."""
        return cls.title or str(_name_of(cls)).upper()

    def check_outputs(self, names: list[str]) -> None:
        """Raises ValueError if the model does not have one of the outputs, such as "q_continue_logits"."""
        if "q_continue_logits" in names and not self.has_q_continue:
            raise ValueError(f"save_outputs: arch={self.name} has no q_continue_logits. Remove it.")


class TokenConfig(ArchConfig):
    """The keys of models with one hidden vector for each cell. Base class of their configs.

    With puzzle embeddings, the embedding of the puzzle is cut into vectors. The sequence of hidden vectors
    starts with these vectors, and the vectors of the cells follow.
    """

    has_q_continue: ClassVar[bool] = True

    pos_encodings: Literal["rope", "learned", "none"]
    mlp_t: bool
    conv: Literal["none", "instead", "beside"]
    puzzle_emb_len: _Width
    rms_norm_eps: _Positive
    loss: LossConfig

    @property
    def num_puzzle_positions(self) -> int:
        """Returns the number of hidden vectors for the puzzle embedding. Without embeddings, 0."""
        if not self.puzzle_emb_ndim:
            return 0
        return self.puzzle_emb_len or math.ceil(self.puzzle_emb_ndim / self.hidden_size)

    @property
    def reads_any_length(self) -> bool:
        return self.conv == "instead" and self.pos_encodings != "learned"

    def mistakes(self) -> Iterator[str]:
        if self.conv != "none" and self.mlp_t:
            yield f"conv={self.conv} needs attention, but mlp_t=true has none. Set mlp_t=false or conv=none."
        if self.conv == "instead" and self.puzzle_emb_ndim:
            yield "conv=instead mixes only the cells of a grid. Set puzzle_emb_ndim=0."
        if self.conv == "instead" and self.pos_encodings == "rope":
            yield "conv=instead does not use rotary positions. Set pos_encodings=none."
        if self.hidden_size % self.num_heads:
            yield f"hidden_size {self.hidden_size} is not divisible by num_heads {self.num_heads}"
        if self.pos_encodings == "rope" and self.hidden_size // self.num_heads % 2:
            yield (
                f"hidden_size / num_heads is {self.hidden_size // self.num_heads}. Rotary positions need an "
                "even head dimension. Change one of them."
            )
        room = self.num_puzzle_positions * self.hidden_size
        if self.puzzle_emb_ndim > room:
            yield (
                f"puzzle_emb_ndim {self.puzzle_emb_ndim} does not fit into puzzle_emb_len "
                f"{self.puzzle_emb_len} positions of hidden_size {self.hidden_size}. Use at most {room}."
            )


def _mistakes_of_cycles(arch: ArchConfig) -> Iterator[str]:
    if arch.gradient_cycles > arch.H_cycles:
        yield f"gradient_cycles {arch.gradient_cycles} is more than H_cycles {arch.H_cycles}"


def _mistakes_of_q_target(arch: ArchConfig) -> Iterator[str]:
    if arch.q_target == "deferred" and arch.no_ACT_continue:
        yield "q_target=deferred needs no_ACT_continue=false. Without it, there is no q_continue."


class RecursiveConfig(TokenConfig):
    """The keys of models that run their blocks in H_cycles x L_cycles loops. Base class of their configs."""

    cycle_keys: ClassVar[tuple[str, ...]] = ("H_cycles", "L_cycles")

    name: str
    H_cycles: _Repeats
    L_cycles: _Repeats
    H_layers: ClassVar[int]  # only some of the models have this key; here is its place in config.yaml
    L_layers: _Repeats
    gradient_cycles: NonNegativeInt
    halt_max_steps: _Steps
    eval_halt_max_steps: _Steps | None
    halt_exploration_prob: Fraction
    no_ACT_continue: bool
    q_target: _QTarget
    init_noise: StandardDeviation
    state_noise: StandardDeviation
    damping: Damping

    def mistakes(self) -> Iterator[str]:
        yield from super().mistakes()
        yield from _mistakes_of_cycles(self)
        yield from _mistakes_of_q_target(self)


class HRMConfig(RecursiveConfig):
    """The config of the Hierarchical Reasoning Model (HRM)."""

    title: ClassVar[str] = "HRM"
    paper: ClassVar[tuple[str, str]] = "Hierarchical Reasoning Model", "2506.21734"

    name: Literal["hrm"]
    H_layers: _Repeats

    def mistakes(self) -> Iterator[str]:
        yield from TokenConfig.mistakes(self)  # without q_continue, q_target has no effect
        yield from _mistakes_of_cycles(self)


class TRMConfig(RecursiveConfig):
    """The config of the Tiny Recursive Model (TRM).

    H_layers has no effect. It exists because published configs contain it.
    """

    title: ClassVar[str] = "TRM"
    paper: ClassVar[tuple[str, str]] = "Tiny Recursive Model", "2510.04871"

    name: Literal["trm"]
    H_layers: Literal[0]


class TRMSingleZConfig(TRMConfig):
    """The config of TRM with one latent state instead of two."""

    title: ClassVar[str] = "TRM single z"

    name: Literal["trm_singlez"]


class InfiLoopConfig(RecursiveConfig):
    """The config of TRM with InfiLoop's gate.

    With the gate, each hidden state of a puzzle is a weighted mean of its initial value and of the results of
    all calls of the level that have updated this state. Learned parameters decide the weights of the mean.
    """

    title: ClassVar[str] = "InfiLoop"
    paper: ClassVar[tuple[str, str]] = "TRM with InfiLoop's gate", "2610.11570"

    name: Literal["infiloop"]


class URMConfig(RecursiveConfig):
    """The config of the Universal Reasoning Model (URM)."""

    title: ClassVar[str] = "URM"
    paper: ClassVar[tuple[str, str]] = "Universal Reasoning Model", "2512.14693"

    name: Literal["urm"]


class FPRMConfig(TokenConfig):
    """The config of the Fixed-Point Reasoning Model (FPRM)."""

    title: ClassVar[str] = "FPRM"
    paper: ClassVar[tuple[str, str]] = "Fixed-Point Reasoning Model", "2606.18206"
    cycle_keys: ClassVar[tuple[str, ...]] = ("L_cycles",)

    name: Literal["fprm"]
    H_cycles: Literal[1]
    L_cycles: _Repeats
    L_layers: _Repeats
    gradient_cycles: Literal[1]
    eval_L_cycles: _Repeats
    conv_type: Literal["conv2d", "conv1d"]
    norm_placement: Literal["none", "output"]
    alpha_1_init: _Inside
    alpha_2_init: _Inside
    fp_thresh: _Positive
    stepsize_decay_train: Damping
    stepsize_decay_eval: Damping
    decay_patience: _Repeats
    fixed_init_std: StandardDeviation
    mlp_t: Literal[False]
    conv: Literal["none"]
    halt_max_steps: _Steps
    eval_halt_max_steps: _Steps | None
    halt_exploration_prob: Fraction
    no_ACT_continue: Literal[True]
    q_target: _QTarget
    init_noise: StandardDeviation
    state_noise: StandardDeviation
    damping: Damping

    @property
    def eval_changes(self) -> dict[str, int]:
        return {"L_cycles": self.eval_L_cycles}

    def mistakes(self) -> Iterator[str]:
        yield from super().mistakes()
        if self.fixed_init_std and self.init_noise:
            yield f"fixed_init_std={self.fixed_init_std:g} has no effect with init_noise. Set init_noise=0."
        yield from _mistakes_of_cycles(self)
        yield from _mistakes_of_q_target(self)


class FlowConfig(TokenConfig):
    """The config of Looped Flows."""

    title: ClassVar[str] = "Looped Flows"
    paper: ClassVar[tuple[str, str]] = "Looped Flows", "2609.11801"
    cycle_keys: ClassVar[tuple[str, ...]] = ("H_cycles", "L_cycles")
    no_ACT_continue: ClassVar[bool] = True

    name: Literal["flow"]
    H_cycles: _Repeats
    L_cycles: _Repeats
    L_layers: _Repeats
    gradient_cycles: NonNegativeInt
    halt_max_steps: _Steps
    eval_halt_max_steps: _Steps | None
    halt_exploration_prob: Fraction
    x0_std: _Positive | None
    times: Literal["sorted", "random_start"]
    own_predictions: Annotated[float, Field(gt=0, le=1)] | None
    sde_noise: StandardDeviation

    def mistakes(self) -> Iterator[str]:
        yield from super().mistakes()
        yield from _mistakes_of_cycles(self)


class TransformerConfig(TokenConfig):
    """The config of the baseline without recurrence: one forward pass for each puzzle."""

    title: ClassVar[str] = "Transformer"
    halt_max_steps: ClassVar[int] = 1
    eval_halt_max_steps: ClassVar[None] = None
    halt_exploration_prob: ClassVar[float] = 0.0
    no_ACT_continue: ClassVar[bool] = True
    q_target: ClassVar[str] = "exact"

    name: Literal["transformer"]
    num_layers: _Repeats


class SERRMConfig(ArchConfig):
    """The config of the Symbol-Equivariant Recurrent Reasoning Model (SE-RRM).

    If puzzle_emb_ndim is 0, there are no puzzle embeddings. All other values have the same effect, because
    the model determines the size of the embeddings.
    """

    no_ACT_continue: ClassVar[bool] = True

    title: ClassVar[str] = "SE-RRM"
    paper: ClassVar[tuple[str, str]] = "Symbol-Equivariant Recurrent Reasoning Model", "2603.02193"
    cycle_keys: ClassVar[tuple[str, ...]] = ("H_cycles", "L_cycles")

    name: Literal["serrm"]
    head_dim: _AtLeastOne
    num_heads_t: _AtLeastOne
    head_dim_t: _AtLeastOne
    H_cycles: _Repeats
    L_cycles: _Repeats
    L_layers: _Repeats
    gradient_cycles: NonNegativeInt
    pos_encodings: Literal["rope", "rope2d", "learned"]
    equivariant_symbols: bool
    add_tokens: _Width
    rms_norm_eps: _Positive
    dropout: Annotated[float, Field(ge=0, lt=1)]
    halt_max_steps: _Steps
    eval_halt_max_steps: _Steps | None
    halt_exploration_prob: Fraction
    init_noise: StandardDeviation
    state_noise: StandardDeviation
    damping: Damping
    loss: LossConfig

    @property
    def reads_any_length(self) -> bool:
        return self.pos_encodings != "learned"

    @property
    def confuses_symbols(self) -> bool:
        return self.equivariant_symbols and not self.add_tokens and not self.puzzle_emb_ndim

    def mistakes(self) -> Iterator[str]:
        yield from _mistakes_of_cycles(self)
        multiple = {"rope": 2, "rope2d": 4}.get(self.pos_encodings, 1)
        if self.head_dim % multiple:
            yield (
                f"head_dim {self.head_dim} is not a multiple of {multiple}. "
                f"pos_encodings={self.pos_encodings} needs that."
            )


class LDTConfig(ArchConfig):
    """The config of the Lattice Deduction Transformer (LDT).

    LDT searches for the solution. It removes candidates, the values that a cell may still have.
    """

    title: ClassVar[str] = "LDT"
    paper: ClassVar[tuple[str, str]] = "Lattice Deduction Transformer", "2605.08605"
    finds_candidates: ClassVar[bool] = True
    no_mesh: ClassVar[str] = "its blocks and its search need the complete slot on one rank"
    cycle_keys: ClassVar[tuple[str, ...]] = ("loops",)

    name: Literal["ldt"]
    puzzle_emb_ndim: Literal[0]
    num_layers: _Repeats
    loops: _Repeats
    pos_encodings: Literal["learned", "rope"]
    dropout: Annotated[float, Field(ge=0, lt=1)]
    boards_per_slot: _Repeats
    num_answers: Annotated[int, Field(ge=1, le=32)]
    kill_threshold: Fraction
    conflict_threshold: Fraction
    eval_conflict_threshold: Fraction
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    decision_cell: DecisionCell
    decision_value: DecisionValue
    hint_prob: Fraction
    wrong_hint_prob: Fraction
    true_pin_prob: Fraction
    keep_weight: _Positive
    kill_weight: _Positive
    digit_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    conflict_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    balanced_conflict: bool
    halt_max_steps: _Steps
    eval_halt_max_steps: _Steps | None

    def mistakes(self) -> Iterator[str]:
        multiple = self.num_heads * (4 if self.pos_encodings == "rope" else 1)
        if self.hidden_size % multiple:
            yield f"hidden_size {self.hidden_size} is not a multiple of {multiple}, as num_heads requires."
        if self.hint_prob + self.wrong_hint_prob > 1:
            yield "hint_prob and wrong_hint_prob are fractions of all boards. Their sum may be at most 1."


_BUILT_IN = (
    *(HRMConfig, TRMConfig, TRMSingleZConfig, InfiLoopConfig, URMConfig, FPRMConfig, FlowConfig),
    *(SERRMConfig, TransformerConfig, LDTConfig),
)


def architectures() -> dict[str, type[ArchConfig]]:
    """Returns {name: config class} for all models, such as {"hrm": HRMConfig, ...}.

    This includes the models of imported plugins (users' Python files). Raises ValueError if a plugin's model
    has no name, or the name of a model of this repository.
    """
    ours = {_name_of(schema): schema for schema in _BUILT_IN}
    of_plugins = {_name_of(schema): schema for schema in plugins.defined("Config")}
    for name in (None, *ours):
        if name in of_plugins:
            (file,) = plugins.plugin_names([plugins.plugin_of("Config", of_plugins[name])])
            raise ValueError(
                f"plugin {file}: Config has {f'the name {name} of another model' if name else 'no name'}. "
                "Add name: Literal[...] with the name in its YAML file."
            )
    return ours | of_plugins


def _name_of(schema: type[ArchConfig]) -> str | None:
    # The class has a field such as `name: Literal["hrm"]`. None if it has none.
    field = schema.model_fields.get("name")
    return next(iter(typing.get_args(field.annotation)), None) if field else None


def _choose_class(values: Any) -> Any:
    if not isinstance(values, dict):
        return values
    if "name" not in values:
        raise ValueError("key 'arch.name' is missing")
    name, known = values["name"], architectures()
    if not isinstance(name, str) or name not in known:
        names = ", ".join(map(repr, known))
        raise ValueError(
            f"arch.name={name!r} should be one of {names}. For a model of yours, add plugins=[FILE]."
        )
    return known[name].model_validate(values)


Architecture = Annotated[pydantic.SerializeAsAny[ArchConfig], pydantic.BeforeValidator(_choose_class)]
