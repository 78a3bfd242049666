"""Prepares the server process from which `tests.ranks` forks ranks: imports modules and composes configs.

The server imports this module before the first fork. This module starts no thread, because the fork of a
process with threads can hang. Composing a config builds the tables of Hydra's parser and finds Hydra's
plugins. This takes longer than ten training steps.
"""
# ruff: noqa: E402

import gc

gc.disable()  # imports leave no garbage: the collector takes a tenth of their time

import encodings.idna  # noqa: F401
import json
import multiprocessing.synchronize  # noqa: F401
import os
import tempfile

import numpy.ctypeslib
import numpy.ma  # noqa: F401
import pytest  # noqa: F401
import torch._dynamo
import torch.distributed.nn.functional
import torch.profiler  # noqa: F401
import wandb  # noqa: F401

import dataset.kinds.sudoku  # noqa: F401
import evaluate  # noqa: F401
import models.hrm
import models.transformer
import models.trm  # noqa: F401
import pretrain  # noqa: F401
from config.architecture import architectures
from config.compose import compose_config
from config.files import load_defaults
from config.programs import EvaluateConfig
from config.schema import PretrainConfig
from models.flops import StepCounter
from tests.parsing import parse_once
from tests.tiny import OVERRIDES

parse_once()

for schema, words in (
    (PretrainConfig, ("arch=hrm", "data_path='a b'", "checkpoint_path=run", "evaluators=[]", *OVERRIDES)),
    (EvaluateConfig, ("checkpoint=[a,b/c]", "save_outputs=[preds]", "device=cpu")),
):
    compose_config(schema, words)

# Counting the operations of a model takes as long as ten training steps. So processes share their counts.
_counted = tempfile.TemporaryFile("a+b", buffering=0)  # noqa: SIM115
_flops = StepCounter.flops


def _count_once(self, reasoning, *, trains=False):
    network = self.model.network
    sizes = [(*each.shape, each.requires_grad) for each in network.parameters()]
    key = f"{network.arch} {sizes} {self._seq_len} {reasoning} {trains}"
    text = os.pread(_counted.fileno(), os.fstat(_counted.fileno()).st_size, 0)
    lines = text.rpartition(b"\n")[0].splitlines()  # the last line may not be whole yet
    known = dict(map(json.loads, lines))
    if key not in known:
        known[key] = _flops(self, reasoning, trains=trains)
        _counted.write(json.dumps([key, known[key]]).encode() + b"\n")
    return known[key]


StepCounter.flops = _count_once
for name in ("pretrain", *(f"arch/{each}" for each in architectures())):
    load_defaults(name)  # which keeps what it has read
gc.enable()
gc.freeze()  # what is here is never garbage: the collector of a rank need not touch it, nor copy its pages
