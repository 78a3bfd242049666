"""The facts of a dataset that its puzzles are read and drawn by. A checkpoint keeps them, as folders go."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dataset.format import IDENTIFIERS, Metadata, read_builder
from dataset.kinds import Kind, Look, kind_of
from dataset.vocabulary import Vocabulary


@dataclasses.dataclass(frozen=True)
class Facts:
    """The facts of a dataset, or of a mixture.

    builder: the module that built it, None where no manifest says so, or where a mixture has several.
    """

    metadata: Metadata
    builder: str | None = None

    @functools.cached_property
    def kind(self) -> Kind | None:
        return kind_of(self.metadata, builder=self.builder)

    @property
    def look(self) -> Look:
        """The look of its grids; of no kind: with numbers for tokens."""
        if self.vocabulary is not None:
            return self.vocabulary.look
        return self.kind.look if self.kind else Look()

    @functools.cached_property
    def vocabulary(self) -> Vocabulary | None:
        """The symbols that the dataset brings, None where they are those of its kind."""
        return Vocabulary.of(self.metadata)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Facts:
        metadata = values["metadata"]
        lists = {name: tuple(value) for name, value in metadata.items() if isinstance(value, list)}
        return cls(Metadata(**metadata | lists), values["builder"])

    @classmethod
    def from_sizes(cls, *, vocab_size: int, seq_len: int, num_puzzle_identifiers: int) -> Facts:
        """Makes the facts of a dataset whose sizes alone are known; the rest is as our builders have it."""
        return cls(
            Metadata(
                pad_id=0,
                ignore_label_id=0,
                blank_identifier_id=0,
                vocab_size=vocab_size,
                seq_len=seq_len,
                num_puzzle_identifiers=num_puzzle_identifiers,
                total_groups=1,
                mean_puzzle_examples=1.0,
                sets=("all",),
            )
        )


def read_facts(folders: Sequence[Path], metadata: Metadata) -> Facts:
    """Reads the facts of the dataset in one folder, or of the mixture of several. metadata: of the whole."""
    modules = {builder and builder["module"] for builder in map(read_builder, folders)}
    return Facts(metadata, modules.pop() if len(modules) == 1 else None)


def read_names(folder: Path) -> list[str]:
    """Reads the name of each puzzle identifier; empty where the dataset has none."""
    path = folder / IDENTIFIERS
    try:
        names = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from None
    return [str(name) for name in names] if isinstance(names, list) else []
