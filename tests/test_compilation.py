"""When a run is compiled, and what of it."""

import contextlib
import io
import os

import pytest
import torch

from distributed.world import rank
from evaluation import compilation
from evaluation.loop import answer_batches
from models.blocks import Block, Level
from models.compilation import COMPILER_OPTIONS, compile_blocks, find_compiler_failure, should_compile
from models.layers import SwiGLU
from tests.ranks import run_ranks
from tests.tiny import random_batch, run_losses, tiny_model

_CPU, _MPS = torch.device("cpu"), torch.device("mps")


def test_auto_compiles_where_it_pays_off():
    assert should_compile(True, _CPU, num_steps=1)
    assert not should_compile(False, _CPU, num_steps=10**9)
    assert not should_compile("auto", _CPU, num_steps=1500)  # the demo
    assert not should_compile("auto", _CPU, num_steps=4000)  # 90 s are saved, and 96 lost beside other load
    assert should_compile("auto", _CPU, num_steps=4500)
    assert not should_compile("auto", _MPS, num_steps=10**9)


@pytest.mark.long
@pytest.mark.slow
def test_a_compiler_that_fails_is_one_line_and_auto_does_without(tmp_path, monkeypatch, capsys):
    compiler = tmp_path / "some_c++"
    lines = ('case "$*" in *--version*) exec g++ --version;; esac', 'echo "In file included" >&2')
    compiler.write_text("\n".join(("#!/bin/sh", *lines, 'echo "x.h: fatal error: it is gone" >&2', "exit 1")))
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    assert not compilation.compiles_on_all_ranks("auto", _CPU, num_steps=10**9)
    monkeypatch.setattr(compilation, "find_compiler_failure", lambda _: "found once: it takes seconds")
    with pytest.raises(SystemExit):
        compilation.compiles_on_all_ranks(True, _CPU, num_steps=1)
    warning, error = capsys.readouterr().err.splitlines()
    told = "warning: blocks are not compiled, because the compiler fails (x.h: fatal error: it is gone). "
    assert warning.startswith(told)
    assert error.startswith("error: compile=true, but the compiler fails (found once: it takes seconds). ")


@pytest.mark.long
@pytest.mark.slow
def test_a_damaged_library_in_the_cache_ends_the_run(tmp_path, monkeypatch, capsys):
    """It does not continue without compilation, because its numbers would differ."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert find_compiler_failure(_CPU) is None
    (library,) = tmp_path.glob("*/*.main.so")
    os.truncate(library, 100)
    for choice in ("auto", True):
        with pytest.raises(SystemExit):
            compilation.compiles_on_all_ranks(choice, _CPU, num_steps=10**9)
        (line,) = capsys.readouterr().err.splitlines()
        told = f"error: {library.name} in the compiler's cache is damaged (cannot read file data), "
        assert line.startswith(told)
        assert line.endswith(f"Delete the folder {tmp_path}, and start again.")


def test_a_library_that_is_damaged_in_the_middle_of_a_run_is_one_line(capsys):
    with pytest.raises(SystemExit) as ended, compilation.compiler_cache_errors():
        raise RuntimeError("ImportError: /a b/cx/c1.main.so: file too short\n\nSet TORCHDYNAMO_VERBOSE=1")
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: c1.main.so in the compiler's cache is damaged (file too short), ")
    assert line.endswith("Delete the folder /a b, and start again.")
    with pytest.raises(RuntimeError, match="undefined"), compilation.compiler_cache_errors():
        raise RuntimeError("ImportError: /a/cx/c1.main.so: undefined symbol")


def _choose_with_a_compiler_that_fails(local_ranks: list[int]) -> tuple[bool, str]:
    compilation.local_rank = lambda: local_ranks[rank()]
    compilation.find_compiler_failure = lambda _: "it is gone"  # the first rank of each node looks
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        return compilation.compiles_on_all_ranks("auto", _CPU, num_steps=10**9), stderr.getvalue()


@pytest.mark.parametrize(("local_ranks", "named"), [([0, 1], "rank 0"), ([0, 0], "ranks 0, 1")])
def test_all_ranks_compile_or_none_and_one_says_why(local_ranks, named):
    first, second = run_ranks(_choose_with_a_compiler_that_fails, 2, local_ranks)
    told = f"warning (rank 0): blocks are not compiled, because on {named} the compiler fails (it is gone). "
    assert not first[0]
    assert first[1].startswith(told)
    assert second == (False, "")


@pytest.fixture
def sizes(monkeypatch) -> list[int]:
    """Collects the batch size of every call of a compiled graph."""
    collected, compile_module = [], torch.nn.Module.compile

    def backend(graph, _):
        def run(*arguments):
            tensors = [each for each in arguments if torch.is_tensor(each) and each.ndim == 3]
            collected.extend(len(each) for each in tensors if each.shape[-1] == 32)
            return graph(*arguments)

        return run

    def compile_with_backend(module, *, dynamic, options):
        assert options is COMPILER_OPTIONS
        compile_module(module, backend=backend, dynamic=dynamic)

    monkeypatch.setattr(torch.nn.Module, "compile", compile_with_backend)
    torch.compiler.reset()
    return collected


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # torch's compiler warns of its own doings
def test_only_whole_batches_are_compiled(sizes):
    """Else how many slots stop, and when, would choose the kernels, and a resumed run other ones."""
    model, batch, num_stopping = tiny_model(q_target="deferred").train(), random_batch(12), []
    compile_blocks(model)
    carry = model.initial_carry(batch)
    steps = torch.tensor([3] * 6 + [2] * 3 + [1] * 2 + [0], dtype=torch.int32)
    carry = carry._replace(steps=steps, halted=torch.zeros_like(carry.halted))
    late = {"min_steps": torch.full((12,), 4)}  # all stop at the last step
    for _ in range(4):
        output, losses = run_losses(model, carry, batch, arrays=late)
        losses()
        carry = output.carry
        num_stopping.append(int(carry.halted.sum()))
    assert num_stopping == [6, 3, 2, 1]
    assert set(sizes) == {12}


@pytest.mark.filterwarnings("default")
def test_blocks_that_torch_compiles_wrongly_are_not_compiled():
    """torch 2.13 transposes bfloat16 wrongly: here the outputs of the compiled block were NaN."""
    block = Block(mlp=SwiGLU(32, expansion=1), eps=1e-5, mlp_t=SwiGLU(64, expansion=1))
    level, x = Level([block]), torch.randn(64, 64, 32).bfloat16()
    with torch.inference_mode():
        expected = level(x, 0, None)
        compile_blocks(level)
        assert level(x, 0, None).equal(expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_what_is_left_of_an_evaluation_is_not_compiled(sizes):
    """Each of its sizes would be compiled, and torch compiles a function for eight sizes, then no more."""
    model = tiny_model().eval()
    compile_blocks(model)
    batches = [random_batch(6, seed=seed) for seed in range(2)]
    batches[1].rows[4:] = -1  # padding
    act = model.eval_reasoning("act")
    with torch.inference_mode():
        options = {"draw": lambda _: None, "on_step": lambda *_: None}
        answers = list(answer_batches(model, iter(batches), act, **options))
    assert sum(len(each.carry.steps) for each in answers) == 10
    assert set(sizes) == {6}
