"""Draws each chart once. Without this module, the reports of equal runs draw equal charts again."""

import functools
import pickle
from collections.abc import Callable
from typing import Any

from report import charts

_draw = charts._chart
_drawn: dict[bytes, bytes] = {}


@functools.wraps(_draw)
def _draw_once(title: str, draw: Callable, **options: Any) -> charts.Chart:
    data = [cell.cell_contents for cell in draw.__closure__]
    key = pickle.dumps((title, draw.__qualname__, data, options))
    if key not in _drawn:
        _drawn[key] = pickle.dumps(_draw(title, draw, **options))
    return pickle.loads(_drawn[key])


def draw_once() -> None:
    """Makes this process draw each chart once. A chart takes 50 ms."""
    charts._chart = _draw_once
