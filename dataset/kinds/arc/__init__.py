"""ARC: tasks of a few demonstration pairs and test pairs of coloured grids, laid into 30 x 30 cells each."""

from dataset.format import Metadata
from dataset.kinds import FAINT, Kind, Look
from dataset.kinds.arc.evaluator import ArcEvaluator
from dataset.kinds.arc.tasks import COLOR_0, END, PAD, SIZE, VOCAB_SIZE
from dataset.kinds.arc.variants import ARC

# Background of each colour, nearly as the website of ARC shows them, and the text on it.
_WHITE, _BLACK = "38;5;15", "38;5;16"
_BACKGROUNDS = (16, 26, 196, 40, 220, 248, 199, 208, 117, 88)
_TEXTS = (_WHITE, _WHITE, _WHITE, _BLACK, _BLACK, _BLACK, _WHITE, _BLACK, _BLACK, _WHITE)


def _misfit(metadata: Metadata) -> str | None:
    if (metadata.seq_len, metadata.vocab_size) != (SIZE**2, VOCAB_SIZE):
        return (
            f"seq_len is {metadata.seq_len} and its vocab_size {metadata.vocab_size}, "
            f"not {SIZE**2} and {VOCAB_SIZE}"
        )
    return None


KIND = Kind(
    name="arc",
    builder="dataset.build_arc",
    misfit=_misfit,
    build_evaluator=ArcEvaluator,
    augmentations={"arc": ARC},
    look=Look(
        symbols="_+0123456789",
        styles={
            PAD: FAINT,
            END: FAINT,
            **{
                COLOR_0 + color: f"{text};48;5;{background}"
                for color, (text, background) in enumerate(zip(_TEXTS, _BACKGROUNDS, strict=True))
            },
        },
        gap="",
        first_of_field=COLOR_0,
    ),
)
