"""The model that benchmarks train: HRM with 27 M parameters on 9x9 Sudoku, another, or one of other sizes.

Its config is that of config/, read without Hydra, pydantic and PyYAML, and random tokens stand for the data:
a machine with torch and numpy alone can measure. tests/test_benchmark_harness.py holds it against Hydra's.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from dataset.loader import Batch
from training.clock import StepClock
from training.state import build_train_state
from training.step import StepResult, train_step

METADATA = SimpleNamespace(vocab_size=11, seq_len=81, num_puzzle_identifiers=1000, num_columns=None)
TINY = {"hidden_size": 128, "num_heads": 4, "H_layers": 1, "L_layers": 1}
TOTAL_STEPS = 10**6
CONFIG = Path(__file__).resolve().parent.parent / "config"


# ----------------------------------------------------------------------------------------------------- config
def build_config(
    arch: str = "hrm", *, sizes: Mapping[str, Any] | None = None, **changes: Any
) -> SimpleNamespace:
    """Returns the config of a run with `arch=NAME`.

    sizes: other values of `arch`. changes: other values of the rest.
    """
    values = read_config(CONFIG / "pretrain.yaml")
    values["arch"] = _merged(read_config(CONFIG / "arch" / f"{arch}.yaml"), sizes or {})
    return _namespace(values | changes)


def build_experiment(name: str, *, sizes: Mapping[str, Any] | None = None, **changes: Any) -> SimpleNamespace:
    """Returns the config of a run with `experiment=NAME`; sizes, changes: as for `build_config`."""
    arch, values = read_experiment(name)
    return build_config(arch, sizes=_merged(values.pop("arch", {}), sizes or {}), **values | changes)


def read_experiment(name: str) -> tuple[str, dict[str, Any]]:
    """Returns the name of the `arch` of an experiment, and what it says otherwise than the defaults."""
    path = CONFIG / "experiment" / f"{name}.yaml"
    arch, values = "hrm", {}
    for override, word in re.findall(r"^  - (override /arch: )?(\w+)$", path.read_text(), re.MULTILINE):
        if override:
            arch = word
        elif word != "_self_":
            arch, values = read_experiment(word)
    values = _merged(values, read_yaml(path))
    values.pop("defaults", None)
    return arch, values


def read_config(path: Path) -> dict[str, Any]:
    """Reads a config file on top of the files that its `defaults` name as `<file>@_here_`."""
    values: dict[str, Any] = {}
    for name in re.findall(r"^ *- (\S+)@_here_$", path.read_text(), re.MULTILINE):
        values |= read_config(path.parent / f"{name}.yaml")
    values |= read_yaml(path)
    values.pop("defaults", None)
    return values


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads what the files of config/ need of YAML: `key: value # comment`, and sections by indentation.

    Values are null, booleans, numbers, lists of words, or text. Lists over several lines stay empty sections.
    """
    values: dict[str, Any] = {}
    sections = [(-1, values)]
    for line in path.read_text().splitlines():
        found = re.fullmatch(r"( *)(\w+):(?: +([^#]*?))?(?: *#.*)?", line)
        if found is None:
            continue
        indent, key, text = len(found[1]), found[2], found[3]
        while indent <= sections[-1][0]:
            sections.pop()
        if text:
            sections[-1][1][key] = _value(text)
        else:
            sections[-1][1][key] = section = {}
            sections.append((indent, section))
    return values


def _value(text: str) -> Any:
    words = {"null": None, "true": True, "false": False}
    if text in words:
        return words[text]
    if text.startswith("["):
        return text.strip("[]").replace(",", " ").split()
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _merged(values: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values, in place of which others count, section by section."""
    return {
        **values,
        **{
            name: _merged(values[name], value)
            if isinstance(value, dict) and isinstance(values.get(name), dict)
            else value
            for name, value in others.items()
        },
    }


def _namespace(values: dict[str, Any]) -> SimpleNamespace:
    """Returns the config with the attributes of the typed one, as far as a training step reads them."""
    arch = {
        name: values["arch"][value[3:-1]] if isinstance(value, str) and value.startswith("${.") else value
        for name, value in values["arch"].items()
    }
    arch["loss"] = SimpleNamespace(**arch["loss"])
    if "puzzle_emb_len" in arch:
        needed = -(-arch["puzzle_emb_ndim"] // arch["hidden_size"])
        arch["puzzle_emb_positions"] = (arch["puzzle_emb_len"] or needed) if arch["puzzle_emb_ndim"] else 0
    if arch["name"] == "serrm":
        arch |= {"no_ACT_continue": True, "q_target": "exact"}
    return SimpleNamespace(**values | {"arch": SimpleNamespace(**arch)})


# --------------------------------------------------------------------------------------------------- training
class Trainee:
    """A model in training, with what a run's step needs. All ranks build it together, and call `step`."""

    def __init__(
        self,
        config: SimpleNamespace,
        device: torch.device,
        *,
        metadata: SimpleNamespace = METADATA,
        compiles: bool = False,
    ):
        self.config, self._clock = config, StepClock(device)
        self.state = build_train_state(config, metadata, device=device, compiles=compiles)
        self.state.model.train()

    def step(self, batch: Batch) -> StepResult:
        return train_step(self.state, batch, config=self.config, total_steps=TOTAL_STEPS, clock=self._clock)


def random_batch(
    batch_size: int, *, seed: int, device: torch.device, metadata: SimpleNamespace = METADATA
) -> Batch:
    """Draws tokens, labels and identifiers."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=generator, dtype=torch.int32)

    return Batch(
        inputs=draw(metadata.vocab_size, batch_size, metadata.seq_len),
        labels=draw(metadata.vocab_size, batch_size, metadata.seq_len),
        puzzle_identifiers=draw(metadata.num_puzzle_identifiers, batch_size),
        rows=torch.arange(batch_size),
    ).to(device)
