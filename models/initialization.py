"""Initial weights: normal values cut at two standard deviations, with the deviation asked for."""

import math

import torch

# In standard deviations of the normal distribution before the cut.
_CUT = 2.0


def _std_after_cut() -> float:
    density = math.exp(-(_CUT**2) / 2) / math.sqrt(2 * math.pi)
    inside = math.erf(_CUT / math.sqrt(2))
    return math.sqrt(1 - 2 * _CUT * density / inside)


# Cutting a standard normal at +-2 leaves 0.8796.
_STD_AFTER_CUT = _std_after_cut()


def truncated_normal(*shape: int, std: float) -> torch.Tensor:
    """Draws float32 values whose standard deviation *after* the cut at +-2 sigma is `std`.

    They come from torch's global generator.
    """
    if std == 0:
        return torch.zeros(shape)
    sigma = std / _STD_AFTER_CUT
    return torch.nn.init.trunc_normal_(torch.empty(shape), std=sigma, a=-_CUT * sigma, b=_CUT * sigma)
