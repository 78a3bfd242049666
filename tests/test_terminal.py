"""The picture of an answer in a terminal."""

import dataclasses
import re

import numpy as np

from dataset.kinds.kind import Puzzle, Style, find_kind
from evaluation.solving import Answer, Step
from evaluation.terminal import draw_answer
from report.animation import draw_animation


def _step(number: int, text: str, before: str, *, q: float, sure: float = 1.0, stops: bool = False) -> Step:
    symbols = "_.1234"
    tokens, last = (np.array([symbols.index(each) for each in cells]) for cells in (text, before))
    shape = (2, 2)
    return Step(
        number,
        tokens,
        grid=np.array(list(text)).reshape(shape),
        confidence=np.array([1, 1, 1, sure]).reshape(shape),
        changed=(tokens != last).reshape(shape),
        q_halt=q,
        wants_to_halt=stops,
    )


def _picture(*, width: int = 80, color: bool = False, **changes) -> str:
    return draw_answer(_answer(**changes), width=width, color=color)


def _answer(*, first: str = "1234", sure: float = 1, **more) -> Answer:
    texts = ["1.3.", first, "1214", "1214"]
    steps = [
        _step(1, texts[1], texts[0], q=0.1, sure=0.4),
        _step(2, texts[2], texts[1], q=0.62, stops=True),
        _step(3, texts[3], texts[2], q=0.999, sure=sure, stops=True),
    ]
    style = dataclasses.replace(find_kind("sudoku").style)
    puzzle = Puzzle(np.array([2, 1, 4, 1]), 6)
    chosen = {"sample": 1, "num_samples": 4, "select": "vote", "valid": True, "correct": None}
    return Answer(**vars(steps[2]), puzzle=puzzle, style=style, steps=steps, **chosen, **more)


def test_the_picture_in_plain_text():
    assert _picture() == (
        "puzzle   answer\n"
        "1 .      1 2      valid: the rules of the puzzle hold\n"
        "3 .      1 4      from sample 2 of 4: the most frequent answer\n"
        "                  thinking step 3 of 3\n"
        "                  predicted probability of being right: 1.00\n"
        "                  confident of every cell\n"
        "                  the model would halt after step 2\n"
        "\n"
        "step 1        steps 2 to 3\n"
        "right: 0.10   right: 0.62 to 1.00\n"
        "1  2*         1  2\n"
        "3  4*         1* 4\n"
        "\n"
        "right: predicted probability of being right   * changed"
    )
    assert max(map(len, _picture(width=47).splitlines()[:-1])) <= 47, "what has no room goes below"


def test_only_what_occurs_is_drawn_and_explained():
    assert "confidence (tenths)\n" in _picture(sure=0.89)
    assert "least confidence of a cell: 0.89" in _picture(sure=0.89)
    legend = _picture(color=True).splitlines()[-1]
    assert " <0.5 " in legend
    assert " <0.8 " not in legend
    search = _picture(is_search=True)
    assert search.endswith("\n\n* changed")
    assert "right" not in search, "a search has no probability"
    animations = (draw_animation(_answer(is_search=each)) for each in (False, True))
    assert ["right, predicted by the model" in each for each in animations] == [True, False]


def test_what_changed_has_a_mark_that_is_no_symbol():
    step = _step(1, "123_", "123.", q=0.5)
    style, puzzle = Style(symbols="*.1234"), Puzzle(np.array([2, 3, 4, 1]), 6)
    answer = Answer(*vars(step).values(), puzzle, style, [step], 0, 1, "q_head", valid=None, correct=None)
    text = draw_answer(answer, width=80, color=False)
    assert "*'" in text
    assert text.endswith("   ' changed")


def test_the_picture_in_colour_is_the_same_with_codes():
    colored = _picture(color=True)
    assert "\x1b[97;48;5;124;1;4m4\x1b[0m" in colored, "in doubt, and changed"
    assert "\x1b[32;1;4m2\x1b[0m" in colored, "sure, new and changed"
    assert "\x1b[97;48;5;124m." not in _picture(color=True, first="123."), "an open cell says it itself"
    plain = re.sub(r"\x1b\[[0-9;]*m", "", colored)
    assert plain.splitlines()[:10] == _picture().splitlines()[:10]
    areas = Style(symbols="_.1234", ansi={3: "30;103"}, gap="")
    step = _step(1, "1234", "1.3.", q=0.5, sure=0.7)
    puzzle = Puzzle(np.array([2, 1, 4, 1]), 6)
    answer = Answer(*vars(step).values(), puzzle, areas, [step], 0, 1, "q_head", valid=None, correct=None)
    assert "\x1b[1;4m:\x1b[0m" in draw_answer(answer, width=80, color=True), "a mark in place of the symbol"
