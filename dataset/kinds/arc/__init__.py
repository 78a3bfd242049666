"""ARC: tasks of a few demonstration pairs and test pairs of coloured grids, each laid into a square field."""

import math

from dataset.format import Metadata
from dataset.kinds.arc.evaluator import ArcEvaluator
from dataset.kinds.arc.question import read_puzzles
from dataset.kinds.arc.tasks import COLOR_0, SIZE, VOCAB_SIZE
from dataset.kinds.kind import FAINT, Kind, Style
from dataset.symmetries import END, PAD

# The colours 0 to 9 as the website of ARC shows them; and text and background nearly so, of a terminal's 256.
_COLORS = (
    *("#000000", "#0074d9", "#ff4136", "#2ecc40", "#ffdc00"),
    *("#aaaaaa", "#f012be", "#ff851b", "#7fdbff", "#870c25"),
)
_TEXTS, _BACKGROUNDS = (
    (15, 15, 15, 16, 16, 16, 15, 16, 16, 15),
    (16, 26, 196, 40, 220, 248, 199, 208, 117, 88),
)
_STYLES = [f"38;5;{text};48;5;{under}" for text, under in zip(_TEXTS, _BACKGROUNDS, strict=True)]


def _mismatch(metadata: Metadata) -> str | None:
    size = math.isqrt(metadata.seq_len)
    if size**2 != metadata.seq_len or size > SIZE or metadata.vocab_size != VOCAB_SIZE:
        sizes = f"seq_len is {metadata.seq_len} and its vocab_size {metadata.vocab_size}"
        return f"{sizes}, not {SIZE**2} (or a smaller square) and {VOCAB_SIZE}"
    return None


KIND = Kind(
    name="arc",
    mismatch=_mismatch,
    build_evaluator=ArcEvaluator,
    augmentation="arc",
    style=Style(
        symbols="_+0123456789",
        ansi={PAD: FAINT, END: FAINT, **dict(enumerate(_STYLES, COLOR_0))},
        colors=dict(enumerate(_COLORS, COLOR_0)),
        gap="",
        first_of_field=COLOR_0,
    ),
    read_puzzles=read_puzzles,
)
