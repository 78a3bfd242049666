"""How far TRM with an MLP over positions comes on Sudoku in the time that is left: accuracy over seconds."""

import time
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import torch

from benchmarks.gpu.tasks import Options, Tell
from benchmarks.harness import now
from benchmarks.trainee import Trainee, build_experiment, random_batch
from dataset.format import Dataset, Metadata
from dataset.loader import Batch, PuzzleDataset, read_batches
from dataset.mixture import open_datasets
from dataset.plan import TrainPlan
from evaluation.passes import evaluate_split
from models.compilation import eager_blocks
from parallel.launch import keep_freed_memory
from training.metrics import FiniteCheck

EXPERIMENT = "trm_sudoku_mlp"
# Of a run of minutes instead of days.
_RECIPE = {"lr": 3e-4, "lr_warmup_steps": 200, "lr_scaling": "sqrt", "ema_bias_correction": True}
_TINY = {"hidden_size": 32, "num_heads": 2, "H_cycles": 2, "L_cycles": 2, "puzzle_emb_len": 2}
_TINY |= {"halt_max_steps": 2}
_BATCHES, _TINY_BATCHES = (768, 1536, 3072, 6144), (4, 8)
_PAYS = 1.05  # times the examples a second of half the batch
_EPOCHS = 100_000  # more than there is time for
_EPOCHS_PLANNED = 500  # at once
_EVALUATIONS, _TEST_PUZZLES = 12, 1000
_TINY_STEPS = 3
_LAST_SHARE = 0.08  # of the time, for the last evaluation


def learn(options: Options, seconds: float, tell: Tell) -> None:
    """Trains until the time is over (tiny: a few steps), and tells the averages' accuracy every so often."""
    began = time.monotonic()
    device = torch.device(options.device)
    keep_freed_memory(device)
    if options.is_tiny:
        torch.compiler.set_stance("force_eager")
    data = open_datasets([options.data], read_everything=False)
    batch_size = _batch_that_pays(options, data.metadata, device, tell)
    config = _config(options, batch_size)
    trainee = Trainee(config, device, metadata=data.metadata, compiles=True)
    finite, ends = FiniteCheck(device), began + seconds * (1 - _LAST_SHARE)
    interval = (ends - time.monotonic()) / _EVALUATIONS
    training_seconds, since, step = 0.0, now(device), 0
    for step, batch in enumerate(_batches(config, data, device), start=1):
        result = trainee.step(batch)
        finite.add(step, set_name="all", loss=result.loss, grad_norm=result.grad_norm)
        is_over = time.monotonic() > ends or (options.is_tiny and step == _TINY_STEPS)
        if is_over or time.perf_counter() - since > interval:
            training_seconds += now(device) - since
            finite.check()
            row = {"seconds": training_seconds, "step": step, "examples": step * batch_size}
            tell(**row, loss=float(result.loss), **_evaluate(trainee, data, device, batch_size))
            since = now(device)
        if is_over:
            break


def _config(options: Options, batch_size: int) -> SimpleNamespace:
    sizes = _TINY if options.is_tiny else {}
    return build_experiment(EXPERIMENT, sizes=sizes, global_batch_size=batch_size, **_RECIPE)


def _batch_that_pays(options: Options, metadata: Metadata, device: torch.device, tell: Tell) -> int:
    """Doubles the batch as long as that makes 5 % more examples a second, and fits."""
    best, chosen = 0.0, 0
    for batch_size in _TINY_BATCHES if options.is_tiny else _BATCHES:
        try:
            rate = _examples_per_second(_config(options, batch_size), metadata, device)
        except torch.OutOfMemoryError:
            break
        tell(batch=batch_size, examples_per_second=rate)
        if rate < _PAYS * best:
            break
        best, chosen = rate, batch_size
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return chosen


def _examples_per_second(config: SimpleNamespace, metadata: Metadata, device: torch.device) -> float:
    """Measures steps that are not compiled, as each batch would be compiled anew."""
    trainee = Trainee(config, device, metadata=metadata)
    batch = random_batch(config.global_batch_size, seed=0, device=device, metadata=metadata)
    for _ in range(2):
        trainee.step(batch)
    begin, count = now(device), 3
    for _ in range(count):
        trainee.step(batch)
    return count * config.global_batch_size / (now(device) - begin)


def _batches(config: SimpleNamespace, data: Dataset, device: torch.device) -> Iterator[Batch]:
    plan = TrainPlan(
        data.splits["train"].sets,
        seed=config.seed,
        global_batch_size=config.global_batch_size,
        epochs=_EPOCHS,
        eval_interval=_EPOCHS_PLANNED,
    )
    dataset = PuzzleDataset(data.folders, "train", plan, rank=0, world_size=1)
    with read_batches(dataset, device=device) as batches:
        for _, batch in batches:
            yield batch.to(device)


def _evaluate(trainee: Trainee, data: Dataset, device: torch.device, batch_size: int) -> dict[str, float]:
    state = trainee.state
    sets = data.splits["test"].sets
    with state.ema.swapped_in(step=state.step), eager_blocks():
        results = evaluate_split(
            state.model,
            data,
            loss_type=trainee.config.arch.loss.loss_type,
            global_batch_size=batch_size,
            device=device,
            puzzles={
                name: np.arange(min(_TEST_PUZZLES, len(each.puzzle_indices) - 1))
                for name, each in sets.items()
            },
        )
    names = ("accuracy", "exact_accuracy", "q_halt_accuracy")
    return {name: float(np.mean([each.metrics[name] for each in results.values()])) for name in names}
