"""The number formats in which a model can compute."""

from typing import Literal

NumberFormat = Literal["bfloat16", "float32"]
