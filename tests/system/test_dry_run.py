"""What real ranks keep and send is what the formulas of a dry run say."""

import pytest

from benchmarks.layout import computed, counting, stored_bytes
from tests.checkpoints import begin_training, do_step
from tests.ranks import run_ranks
from tests.test_layouts import ARCHS, LAYOUTS
from tests.tiny import FACTS, random_batch, tiny_arch, tiny_config

_ROWS, _PARTS = {"puzzle_emb_sharding": "rows"}, {"gradient_accumulation_steps": 2}
_AGAIN = {"activation_checkpointing": "block"}
_LAYOUTS = LAYOUTS | {"pp4": (4, {"pipeline_parallel_degree": 4})}
# Layout, model, and keys beside the layout's.
_RUNS = [
    ("dp2", "hrm", {}),
    ("dp2", "hrm", {"sync_dtype": "bfloat16"}),
    ("fsdp2", "hrm", {"arch": {"forward_dtype": "float32"}}),
    ("fsdp2", "trm", _ROWS),
    ("pp2", "transformer", {"ema": None}),
    ("tp2", "serrm", {}),
    ("tp2", "fprm", _AGAIN),
    ("tp2", "trm", {"arch": {"forward_dtype": "float32"}}),
    ("dp2 x pp2", "urm", _PARTS),
    ("fsdp2 x pp2", "trm", {"optimizer": "muon"}),
    ("dp2 x tp2", "hrm", {"optimizer": "adamw"}),
    ("tp2 x pp2", "urm", _PARTS | _AGAIN),
    ("pp4", "trm", {"arch": {"L_layers": 4}}),
    ("fsdp2 x tp2", "trm", {}),
    ("tp2", "hrm", {"optimizer": "muon"}),
    ("fsdp2 x tp2", "trm", {"optimizer": "muon"}),
]


def _count(runs: list[tuple[str, str, dict]]) -> list[tuple]:
    """Returns of each run what this rank keeps and sends in its second step, counted and computed."""
    found = []
    for layout, name, options in runs:
        arch = {**ARCHS[name], "forward_dtype": "bfloat16", **options.get("arch", {})}
        keys = {"ema": 0.9, "sync": "flat", **_LAYOUTS[layout][1], **options}
        arch = tiny_arch(name, **arch).model_dump()
        config = tiny_config(**{**keys, "arch": arch, "global_batch_size": 8})
        state = begin_training(config)
        with counting() as sent:
            do_step(state, config, random_batch(8))
        found.append((stored_bytes(state), dict(sent), *computed(config, FACTS)))
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_keep_and_send_what_the_formulas_say(size):
    """Memory as the sum over the ranks, to the byte; messages of blocks too, others beside small numbers."""
    runs = [run for run in _RUNS if _LAYOUTS[run[0]][0] == size]
    for run, *ranks in zip(runs, *run_ranks(_count, size, runs), strict=True):
        memories, sents, (memory, *_), (formulas, *_) = zip(*ranks, strict=True)
        for part in {*memory, *memories[0]}:
            total = sum(each[part] for each in memories)
            assert total == pytest.approx(size * memory.get(part, 0), rel=1e-12), f"{run}: {part}"
        for what, formula in formulas.items():
            most = max(each[what].bytes for each in sents)
            if what in ("stages", "sums of features"):
                assert max(each[what] for each in sents) == formula, f"{run}: {what}"
            elif what == "gradients of puzzle rows":
                assert most <= formula.bytes + 128, f"{run}: {what}"  # and counts
            else:
                assert formula.bytes <= most <= 1.1 * formula.bytes, f"{run}: {what}"
        assert {*formulas} == {*sents[0]} - {"metrics"}, run
