"""The Tiny Recursive Model (arXiv 2510.04871): one small level that updates both z_L and z_H."""

from torch import Tensor

from config.architecture import TRMConfig
from dataset.format import Metadata
from models.carry import Reasoning, State
from models.layers import Level, Rotary
from models.random import Draws
from models.recursion import RecursiveNetwork, gradient, update


class TRM(RecursiveNetwork):
    """One level for both states; only the update of z_L sees the question e.

    With `single_z` (table 2 of the paper) there is one latent for answer and reasoning, called z_H here as
    the heads read it: H_cycles x (L_cycles times z_H = L(z_H, e), then z_H = L(z_H)).
    """

    def __init__(self, arch: TRMConfig, metadata: Metadata):
        if arch.single_z:
            self.state_names = ("z_H",)
        super().__init__(arch, metadata, levels={"L_level": arch.L_layers})

    @property
    def slow_and_fast(self) -> tuple[Level, Level]:
        return self.L_level, self.L_level

    def reason(
        self, state: State, e: Tensor, rotary: Rotary | None, reasoning: Reasoning, draws: Draws | None
    ) -> State:
        if "z_L" in self.state_names:
            return super().reason(state, e, rotary, reasoning, draws)
        z = state["z_H"]
        for cycle in range(reasoning.H_cycles):
            is_last = cycle == reasoning.H_cycles - 1
            with_gradient = reasoning.H_cycles - cycle <= self.gradient_cycles
            for call in range(reasoning.L_cycles):
                with gradient(with_gradient or (is_last and call == reasoning.L_cycles - 1)):
                    z = update(z, self.L_level(z, e, rotary), reasoning, draws, use=f"z_H {cycle} {call}")
            with gradient(with_gradient or is_last):
                z = update(z, self.L_level(z, 0, rotary), reasoning, draws, use=f"z_H {cycle}")
        return {"z_H": z}


NETWORK = TRM
