"""A puzzle table with each row on one rank equals, to the bit, the table that every rank has."""

import pytest
import torch

from dataset.format import Metadata
from dataset.loader import Batch
from models.network import PuzzleEmbedding
from parallel import row_owners
from parallel.process_group import rank, world_size
from parallel.row_owners import RowOwners
from parallel.shards import all_gather_owned_rows
from tests.ranks import run_ranks
from tests.test_step import METADATA
from tests.tiny import FACTS, random_batch, tiny_arch, tiny_config
from training.clock import StepClock
from training.state import TrainState, broadcast_model_, build_train_state
from training.step import train_step

_STEPS, _GLOBAL_BATCH = 6, 24
_TABLE, _NUM_ROWS = "puzzle_emb.weights", 21  # which no number of ranks but 3 divides
_METADATA = Metadata(**vars(FACTS) | {"num_puzzle_identifiers": _NUM_ROWS}, **METADATA)
# By number of ranks.
_WAYS = {
    1: {"plain": {}},
    2: {
        "exact target": {"arch": tiny_arch(q_target="exact").model_dump()},
        "serrm": {
            "arch": tiny_arch("serrm", puzzle_emb_ndim=1).model_dump(),
            "optimizer_sharding": "ranks",
        },
    },
    3: {"accumulation": {"gradient_accumulation_steps": 2}},
    4: {"ddp": {"sync": "ddp", "gradient_accumulation_steps": 3}},
}


def _whole(state: TrainState, rows: torch.Tensor) -> torch.Tensor:
    """Joins what the ranks have of the table, [n, ...] each, in the order of identifiers."""
    if state.owners is None:
        return rows.clone()
    return all_gather_owned_rows(rows, _NUM_ROWS)


def _train(**options) -> dict[str, torch.Tensor]:
    """Trains with EMA; returns weights, gradients and averages, of the whole table too."""
    config = tiny_config(ema=0.9, **options)
    state = build_train_state(config, _METADATA, device=torch.device("cpu"))
    broadcast_model_(state)
    state.model.train()
    for step in range(_STEPS):
        batch = random_batch(_GLOBAL_BATCH, seed=step)
        batch.puzzle_identifiers[: _GLOBAL_BATCH // 2] %= 3  # on several ranks, and often
        share = Batch(*(part[state.slots] for part in batch))
        result = train_step(state, share, config=config, total_steps=20, clock=StepClock(torch.device("cpu")))
    with state.ema.swapped_in(step=state.step):
        averages = {name: tensor.clone() for name, tensor in state.model.network.state_dict().items()}
    found = {f"ema {name}": tensor for name, tensor in averages.items()}
    found |= {name: tensor.clone() for name, tensor in state.model.network.state_dict().items()}
    found["gradients"], found["loss"] = state.flat.gradients.clone(), result.loss
    for name in (_TABLE, f"ema {_TABLE}"):
        found["rows here of " + name] = torch.tensor(len(found[name]))
        found[name] = _whole(state, found[name])
    return found


def _train_both_ways(ways: dict[str, dict]) -> dict[str, tuple[dict, dict]]:
    return {
        name: tuple(_train(puzzle_emb_sharding=each, **options) for each in ("replicated", "rows"))
        for name, options in ways.items()
    }


@pytest.mark.parametrize("num_ranks", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_training_is_the_same_to_the_bit(num_ranks):
    for number, found in enumerate(run_ranks(_train_both_ways, num_ranks, _WAYS[num_ranks])):
        for name, (replicated, rows) in found.items():
            assert (replicated[_TABLE] != 0).any(dim=1).sum() > _NUM_ROWS / 2
            for tensor, value in replicated.items():
                if tensor.startswith("rows here"):
                    assert rows[tensor] == len(range(number, _NUM_ROWS, num_ranks)), (name, tensor)
                else:
                    assert torch.equal(rows[tensor], value), f"{name}, rank {number}: {tensor}"


def _read_in_pieces() -> None:
    row_owners._PIECE = 4
    whole = torch.randn(_NUM_ROWS, 3, generator=torch.Generator().manual_seed(0))
    embedding = PuzzleEmbedding(len(whole[rank() :: world_size()]), 3).eval()
    owners = RowOwners(embedding, _NUM_ROWS)
    owners.broadcast_table_(whole if rank() == 0 else None)
    assert torch.equal(embedding.weights, whole[rank() :: world_size()])
    wanted = torch.arange(_NUM_ROWS, dtype=torch.int32).flip(0)[: 20 * (2 - rank())]  # rank 2 wants nothing
    owners.fetch_many(wanted.repeat(2))
    assert torch.equal(embedding(wanted), whole[wanted])


def test_many_rows_travel_in_pieces():
    run_ranks(_read_in_pieces, 3)
