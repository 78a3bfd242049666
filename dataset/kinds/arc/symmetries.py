"""The symmetries of ARC: turning and mirroring all grids of a task, and other colours, keep its rule.

A transform is 11 bytes: the number of a dihedral transform, then what each of the 10 colours becomes. The
grids of one example may also be moved inside their field (`translations`). The name of a variant tells its
transform: <task>|||t<dihedral number>|||<what the colours become>.
"""

import re

import numpy as np

from dataset.kinds.arc.tasks import COLOR_0, END, NUM_COLORS, PAD, SIZE, VARIANT_SEPARATOR, VOCAB_SIZE
from dataset.symmetries import DIHEDRAL_FLAGS, DIHEDRAL_WORDS, NUM_DIHEDRAL, Augmentation, look_up

IDENTITY = (0, *range(NUM_COLORS))  # the transform that changes nothing

_SEPARATOR = re.escape(VARIANT_SEPARATOR)
_NAME = re.compile(rf"(.+?)(?:{_SEPARATOR}t([0-7]){_SEPARATOR}([0-9]{{10}}))?", re.DOTALL)


def variant_name(task_id: str, transform: list[int]) -> str:
    """Writes the name of a variant."""
    number, *colors = transform
    return VARIANT_SEPARATOR.join((task_id, f"t{number}", "".join(map(str, colors))))


def parse_variant_name(name: str) -> tuple[str, tuple[int, ...]]:
    """Parses a name into (task, transform); of a task's own name the transform is `IDENTITY`.

    ValueError where it is no such name.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is no name")
    task_id, number, colors = match.groups()
    if number is None:
        return task_id, IDENTITY
    transform = (int(number), *map(int, colors))
    if sorted(transform[1:]) != list(range(NUM_COLORS)):
        raise ValueError(f"{name!r} makes two colours one")
    return task_id, transform


def describe_name(name: str) -> str:
    """Puts the augmentation that a puzzle's name tells into words; "" where it tells none."""
    try:
        return _describe(list(parse_variant_name(name)[1]), None)
    except ValueError:
        return ""


# --------------------------------------------------------------------------------------------------- applying


def _apply(tokens: np.ndarray, transforms: np.ndarray, translations: np.ndarray | None) -> np.ndarray:
    """Applies transforms to grids of any size, each in the top left corner of its field.

    `translations`: how far down and right each lies in the result. The end-of-grid token marks the row below
    a grid and the column right of it.
    """
    num = len(tokens)
    is_cell = tokens.reshape(num, SIZE, SIZE) >= COLOR_0
    height, width = is_cell[:, :, 0].sum(axis=1), is_cell[:, 0, :].sum(axis=1)
    swaps, rows_from_end, columns_from_end = (flag[:, None] for flag in DIHEDRAL_FLAGS[transforms[:, 0]].T)
    offsets = np.zeros((num, 2), np.intp) if translations is None else translations.astype(np.intp)
    down = np.arange(SIZE) - offsets[:, :1]  # row of the transformed grid at each row of the result
    right = np.arange(SIZE) - offsets[:, 1:]

    # Row and column of the original that go with each row and column of the result; outside beyond the end.
    along_rows, along_columns = np.where(swaps, right, down), np.where(swaps, down, right)
    outside = tokens.shape[1]
    rows = _line(along_rows, height[:, None], rows_from_end, step=SIZE, outside=outside)
    columns = _line(along_columns, width[:, None], columns_from_end, step=1, outside=outside)
    first, second = np.where(swaps, columns, rows), np.where(swaps, rows, columns)
    cells = np.minimum(first[:, :, None] + second[:, None, :], outside).reshape(tokens.shape)

    # The token after the last is the padding that cells outside show.
    padded = np.zeros((num, outside + 1), np.uint8)
    padded[:, :-1] = tokens
    names = np.empty((num, VOCAB_SIZE), np.uint8)
    names[:, PAD], names[:, END], names[:, COLOR_0:] = PAD, END, transforms[:, 1:] + COLOR_0
    result = look_up(names, look_up(padded, cells)).reshape(num, SIZE, SIZE)

    in_down, in_right = first < outside, second < outside
    end_down = down == np.where(swaps[:, 0], width, height)[:, None]
    end_right = right == np.where(swaps[:, 0], height, width)[:, None]
    result[end_down[:, :, None] & in_right[:, None, :]] = END
    result[in_down[:, :, None] & end_right[:, None, :]] = END
    return result.reshape(tokens.shape)


def _line(
    places: np.ndarray, length: np.ndarray, from_end: np.ndarray, *, step: int, outside: int
) -> np.ndarray:
    """Computes what a row or column adds to the number of a cell; `outside` where there is none."""
    is_inside = (places >= 0) & (places < length)
    return np.where(is_inside, np.where(from_end, length - 1 - places, places) * step, outside)


def _is_valid(transforms: np.ndarray, _seq_len: int) -> np.ndarray:
    are_colors = (np.sort(transforms[:, 1:], axis=1) == np.arange(NUM_COLORS)).all(axis=1)
    return (transforms[:, 0] < NUM_DIHEDRAL) & are_colors


def _describe(transform: list[int], translation: list[int] | None) -> str:
    number, *colors = transform
    words = [DIHEDRAL_WORDS[number]] if number else []
    if changed := [f"{old} becomes {new}" for old, new in enumerate(colors) if old != new]:
        words.append(f"colours: {', '.join(changed)}")
    if translation and any(translation):
        words.append(f"moved {translation[0]} down and {translation[1]} right")
    return "; ".join(words)


ARC = Augmentation(
    num_bytes=lambda _seq_len: 1 + NUM_COLORS,
    is_valid=_is_valid,
    apply=_apply,
    describe=_describe,
    has_translations=True,
)
