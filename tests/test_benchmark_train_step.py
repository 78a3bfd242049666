"""benchmarks.train_step: its contenders, each in a process of its own, and the parts of their steps."""

import json
import multiprocessing
import os
import signal
from types import SimpleNamespace

import pytest
import torch

from benchmarks.train_step import __main__ as train_step
from benchmarks.train_step import comparison
from benchmarks.train_step.contenders import FLASH_ATTENTION, OURS, PARTS, build_contender, timed_calls
from benchmarks.train_step.process import ContenderProcess
from benchmarks.trainee import METADATA, build_config


@pytest.mark.parametrize("contender", ["published", FLASH_ATTENTION, "ours", "ours_deferred"])
def test_every_part_of_a_step_is_timed_and_the_step_is_left_as_it_was(contender):
    metadata = SimpleNamespace(vocab_size=5, seq_len=4, num_puzzle_identifiers=3)
    sizes = {"hidden_size": 8, "num_heads": 2, "H_layers": 1, "L_layers": 1, "forward_dtype": "float32"}
    cpu = torch.device("cpu")
    trainer = build_contender(contender, build_config(global_batch_size=2, sizes=sizes), metadata, cpu)
    backward = torch.Tensor.backward
    with timed_calls(trainer.calls(), cpu) as seconds:
        trainer.step()
    assert tuple(seconds) == PARTS
    assert [part for part in PARTS if not seconds[part]] == ([] if contender in OURS.values() else ["sync"])
    assert torch.Tensor.backward is backward
    before = dict(seconds)
    trainer.step()
    assert seconds == before


@pytest.mark.slow
def test_a_contender_that_dies_ends_the_benchmark_with_one_line(capfd):
    cpu = torch.device("cpu")
    config = build_config("trm", global_batch_size=2, sizes={"hidden_size": 32, "num_heads": 2})
    with ContenderProcess("ours", config, METADATA, device=cpu, threads=1) as contender:
        assert contender.take_turn() > 0
        os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
        with pytest.raises(SystemExit) as ended:
            contender.take_turn()
    assert ended.value.code == 1
    assert capfd.readouterr().err == "error: the process of ours ended with status -9\n"
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_what_a_contender_raises_is_raised_here():
    cpu = torch.device("cpu")
    config = build_config("trm", global_batch_size=2, sizes={"hidden_size": 30, "num_heads": 4})
    with pytest.raises(RuntimeError):
        ContenderProcess("ours", config, METADATA, device=cpu, threads=1)
    assert not multiprocessing.active_children()


class _SmallMemory(ContenderProcess):
    """Beside another one there is room for a batch of 4."""

    def __init__(self, name, config, *arguments, **options):
        if name == "ours" and config.global_batch_size > 4:
            raise torch.OutOfMemoryError
        super().__init__(name, config, *arguments, **options)


@pytest.mark.slow
def test_the_batch_is_halved_until_all_contenders_have_room(monkeypatch, capsys):
    monkeypatch.setattr(comparison, "ContenderProcess", _SmallMemory)
    words = ["--quick", "--arch", "trm", "--dtype", "float32", "--batch", "6", "--rounds", "1"]
    train_step.main([*words, "--threads", "1", "--contenders", "published", "ours"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["batch_trm_fp32"] == 3
    assert min(result["speedup_trm_fp32"], result["fraction_of_matmul_peak_trm_fp32"]) > 0
    assert not multiprocessing.active_children()
