"""The start of the programs: ranks wait for each other, and freed memory is kept."""

import contextlib
import errno
import io
import json
import os
import platform
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpointing.finding import SHIPPED, find_checkpoint
from config.compose import config_with
from config.programs import EvaluateConfig
from config.schema import PretrainConfig
from distributed import launch, world
from distributed.world import local_rank, local_world_size, num_nodes, rank
from evaluate import evaluate_checkpoint
from runtime.writing import write_json
from tests.ranks import call_each, run_code, run_program, run_ranks
from tests.sudoku_source import build_sets
from tests.tiny import tiny_config
from training.data import open_data


def _start(others_code: dict[int, dict[str, str]]) -> str:
    """Starts; some ranks have other code. Returns stderr."""
    code = launch._code()
    launch._code = lambda: code | others_code.get(rank(), {})
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        launch.wait_for_all_ranks("cpu", timeout_seconds=30.0)
    return stderr.getvalue()


def test_what_is_compared():
    code = launch._code()
    assert {"pretrain.py", "models/hrm.py", "dataset/metadata.py"} <= code.keys()
    assert not any(name.startswith(("tests", "benchmarks", ".venv")) for name in code)
    assert sum(name.startswith("torch ") for name in code) == 1


@pytest.mark.slow
def test_other_code_is_one_warning():
    others_code = {2: {"models/hrm.py": "x"}, 3: {"models/hrm.py": "x"}, 4: {"torch 1.0": ""}}
    others_code[5] = {f"models/{name}.py": "x" for name in "abcde"}
    text, *others = run_ranks(_start, 6, others_code)
    assert others == [""] * 5
    told = {"ranks 2, 3": "models/hrm.py. Use the same", "rank 4": "torch 1.0. Use the same"}
    told["rank 5"] = "models/a.py, models/b.py, models/c.py and 2 more"
    for line, (ranks, named) in zip(text.splitlines(), told.items(), strict=True):
        assert line.startswith(f"warning (rank 0): {ranks} on ")
        assert named in line


def _start_on_processors(capabilities: list[str]) -> str:
    """Starts on a host for each rank, with a processor of its own kind: what torch finds there."""
    used = capabilities[rank()]
    launch.socket.gethostname = lambda: f"node{rank()}"
    torch.backends.cpu.get_cpu_capability = lambda: "AVX512" if "512" in used or "amx" in used else "AVX2"
    torch.cpu.get_capabilities = lambda: {used: True}
    return _start({})


@pytest.mark.parametrize(
    ("capabilities", "line"),
    [
        (["avx512_bf16", "amx_bf16", "avx512_bf16"], ""),
        (["avx2", "avx512", "avx2"], ""),
        (
            ["avx512_bf16", "avx2", "avx2"],
            "warning (rank 0): bfloat16 is slow on node1, node2: torch finds no bfloat16 instructions "
            "(avx2). All ranks compute in the same format. Set arch.forward_dtype to choose it.\n",
        ),
        (
            ["avx2", "avx2", "avx512_bf16"],
            "warning (rank 0): bfloat16 is fast on node2, but not on node0 (rank 0): torch finds no bfloat16 "
            "instructions (avx2). All ranks compute in the same format. Set arch.forward_dtype to "
            "choose it.\n",
        ),
    ],
)
def test_processors_of_another_kind_are_one_warning(capabilities, line):
    assert run_ranks(_start_on_processors, 3, capabilities) == [line, "", ""]


def _lack_the_device() -> str:
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        launch.torch.cuda.is_available = lambda: False
        launch.wait_for_all_ranks("cuda", timeout_seconds=30.0)
    return stderr.getvalue()


def test_a_missing_device_is_left_to_choose_device():
    assert run_ranks(_lack_the_device, 2) == ["", ""]


def _start_on_nodes(has_agent_store: list[bool]) -> str:
    os.environ |= {"GROUP_WORLD_SIZE": "3", "TORCHELASTIC_MAX_RESTARTS": "3"}
    launch.socket.gethostname = lambda: f"node{rank()}"
    launch.agent_serves_store = lambda: has_agent_store[rank()]
    return _start({})


@pytest.mark.parametrize("has_agent_store", [[False, True, True], [False, False, False]])
def test_restarts_that_would_not_survive_the_loss_of_a_node(has_agent_store):
    """torch 2.13 tells a node that comes back where to meet only with the variable that the warning names."""
    line, *_ = run_ranks(_start_on_nodes, 3, has_agent_store)
    named = [f"node{number}" for number in range(3) if has_agent_store[number]]
    assert line == (
        "warning (rank 0): restarts would fail after the loss of a node. Set "
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, and pass --rdzv-backend c10d to torchrun, "
        f"on {', '.join(named)}.\n"
        if named
        else ""
    )


@pytest.mark.slow
def test_a_mistake_is_told_to_all_before_the_store_ends_with_rank_0(tmp_path, free_port):
    environment = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(free_port)}
    finished = run_program("pretrain", "lr=fast", folder=tmp_path, world_size=3, **environment)
    assert finished.statuses == [1, 1, 1]
    assert len(finished.error_lines) == 1, finished.stderr
    assert "lr='fast' should be a valid number" in finished.stderr


def _node_variables() -> tuple[int, int, int]:
    """Of four ranks on two nodes, as a person starts them who sets nothing but what torch asks for."""
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"):
        os.environ.pop(name, None)
    launch.socket.gethostname = lambda: f"node{rank() % 2}"
    launch.wait_for_all_ranks("cpu", timeout_seconds=30.0)
    return local_rank(), local_world_size(), num_nodes()


def test_nodes_and_local_ranks_are_counted_where_no_torchrun_says_them():
    assert run_ranks(_node_variables, 4) == [(0, 2, 2), (0, 2, 2), (1, 2, 2), (1, 2, 2)]


@pytest.mark.parametrize(
    ("environment", "line"),
    [
        (
            {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "node[0-1]", "SLURM_JOB_ID": "7"}
            | {"PATH": ""},
            "scontrol show hostnames node[0-1] failed ([Errno 2]",
        ),
        (
            {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "RANK": "0", "WORLD_SIZE": "2"},
            "several processes have the same rank: RANK=0, but SLURM_PROCID=1. srun started 2 processes. Set "
            "RANK=$SLURM_PROCID in each process",
        ),
        (
            {"OMPI_COMM_WORLD_SIZE": "2"},
            "mpirun started 2 processes, but WORLD_SIZE is not set. Start one torchrun",
        ),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0' is not an integer from 1 to"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two' is not an integer from 1 to"),
        ({"RANK": "x"}, "RANK='x' is not an integer from 0 to"),
        ({"RANK": "1"}, "RANK='1' is not an integer from 0 to 0. Correct it, or use torchrun."),
        (
            {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "65536"},
            "MASTER_PORT='65536' is not an integer from 1 to 65535.",
        ),
        (
            {"WORLD_SIZE": "2", "RANK": "0"},
            "WORLD_SIZE=2 needs MASTER_ADDR, MASTER_PORT. Set them, or use torchrun.",
        ),
        (
            {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "taken"},
            "is in use on localhost. Choose another port.",
        ),
        (
            {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "1"},
            "cannot resolve MASTER_ADDR=nowhere.invalid on",
        ),
    ],
)
def test_a_launcher_without_torchrun_is_right_or_one_line(monkeypatch, capsys, environment, line):
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(world, "_NAME_SECONDS", 0)
    world._rendezvous_store.cache_clear()
    with socket.create_server(("", 0)) as taken:
        for name, value in environment.items():
            monkeypatch.setenv(name, value.replace("taken", str(taken.getsockname()[1])))
        with pytest.raises(SystemExit) as ended, launch.launch(PretrainConfig, lambda: None):
            pass
    printed = ended.value.code if isinstance(ended.value.code, str) else capsys.readouterr().err
    (told,) = printed.splitlines()
    assert line in told


@pytest.mark.parametrize("given", [{}, {"WORLD_SIZE": "4", "MASTER_ADDR": "node5", "MASTER_PORT": "1234"}])
def test_srun_says_which_rank_a_process_is(monkeypatch, tmp_path, given):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames node[3-4]" ] && echo node3 node4\n')
    scontrol.chmod(0o755)
    step = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "node[3-4]", "SLURM_JOB_ID": "1012345"}
    step |= {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    expected = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}
    expected |= {"MASTER_ADDR": "node3", "MASTER_PORT": "22345"} | given
    for name in expected:
        monkeypatch.setenv(name, "")  # so that the test leaves none behind
        monkeypatch.delenv(name)
    for name, value in (step | given).items():
        monkeypatch.setenv(name, value)
    world.read_launcher()
    assert {name: os.environ[name] for name in expected} == expected


@pytest.mark.parametrize(("threads", "is_told"), [(2, False), (3, True)])
def test_more_threads_than_cores_are_told(monkeypatch, capsys, threads, is_told):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(launch, "num_cores", lambda: 4)
    launch._warn_of_threads(threads)
    assert ("4 processes with 3 threads each share only 4 cores" in capsys.readouterr().err) == is_told


def _look_for_the_folder(folder: Path) -> tuple[str | None, str]:
    """On two nodes; the second one may not read the folder."""
    os.environ["GROUP_WORLD_SIZE"] = "2"
    stat, error = os.stat, None

    def fail(path: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(f"{folder}/.start_"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return stat(path, **options)

    os.stat = fail if rank() == 1 else stat
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        try:
            launch.check_folder_is_shared(folder)
        except BaseException as raised:
            error = type(raised).__name__
    return error, stderr.getvalue()


def test_a_run_folder_that_one_node_cannot_read_ends_all(tmp_path):
    first, second = run_ranks(_look_for_the_folder, 2, tmp_path)
    assert first[1].startswith(f"error: rank 0's run folder {tmp_path} is not visible on rank 1 (")
    assert (first[0], second) == ("SystemExit", ("SystemExit", ""))
    assert list(tmp_path.iterdir()) == []


def _open_the_data(program: str, folder: Path) -> str:
    """Opens data as two nodes, which have another folder of one name. Returns the error of rank 0."""
    os.environ["LOCAL_RANK"] = "0"
    os.chdir(folder / f"node{rank()}")
    with contextlib.redirect_stderr(io.StringIO()) as stderr, contextlib.suppress(SystemExit):
        if program == "pretrain":
            open_data(
                tiny_config(data_path=[str(folder / "train")], test_data_path=["data"], evaluators=None)
            )
        else:
            checkpoint = SimpleNamespace(arch=SimpleNamespace(has_puzzle_embeddings=False))
            config = config_with(EvaluateConfig, checkpoint="run", data_path=["data"], evaluators=None)
            evaluate_checkpoint(config, checkpoint, ("float32", ""), torch.device("cpu"))
    return stderr.getvalue()


def test_test_data_that_differs_between_nodes_ends_all(tmp_path):
    """Other puzzles, or no manifest. The manifest turns an evaluator on, so a rank would wait for another."""

    def differs() -> list[bool]:
        cases = [(program, tmp_path) for program in ("pretrain", "evaluate")]
        errors = run_ranks(call_each, 2, _open_the_data, cases)[0]
        return ["data differs from the data on rank 1 (" in error for error in errors]

    for seed, folder in enumerate(("train", "node0/data", "node1/data")):
        words = ("--box", "2x2", "--generate", 30, "--num-test", 3, "--seed", seed)
        build_sets("sudoku", tmp_path / folder, *words)
    assert differs() == [True, True]
    shutil.rmtree(tmp_path / "node1" / "data")
    shutil.copytree(tmp_path / "node0" / "data", tmp_path / "node1" / "data")
    assert differs() == [False, False]
    manifest = tmp_path / "node0" / "data" / "manifest.json"
    write_json(manifest, json.loads(manifest.read_text()) | {"several_solutions": ["test"]})
    assert differs() == [True, True]


def _evaluate_the_demo(folder: Path) -> tuple[str, bool]:
    """Evaluates a checkpoint as two nodes, which have another file of one name. Returns stderr of rank 0."""
    os.environ.update(LOCAL_RANK="0", GROUP_WORLD_SIZE="2")
    os.chdir(folder / f"node{rank()}")
    config = config_with(EvaluateConfig, checkpoint="demo", data_path=[str(folder / "data")])
    with contextlib.redirect_stderr(io.StringIO()) as stderr, contextlib.suppress(SystemExit):
        evaluate_checkpoint(config, find_checkpoint("demo"), ("float32", ""), torch.device("cpu"))
    return stderr.getvalue(), Path("demo", "evaluation").exists()


def test_a_checkpoint_that_differs_between_nodes_ends_all(tmp_path):
    build_sets("sudoku", tmp_path / "data", "--box", "2x2", "--generate", 30, "--num-test", 3)
    for node in ("node0", "node1"):
        shutil.copytree(SHIPPED / "demo", tmp_path / node / "demo")
    ((seen, is_written), _) = run_ranks(_evaluate_the_demo, 2, tmp_path)
    assert ("differs" in seen, is_written) == (False, True)
    shutil.rmtree(tmp_path / "node0" / "demo" / "evaluation")
    file = tmp_path / "node1" / "demo" / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {"H_init": torch.zeros_like(weights["H_init"])}, file)
    ((seen, is_written), _) = run_ranks(_evaluate_the_demo, 2, tmp_path)
    assert "rank 0's checkpoint in demo/model.safetensors differs from the checkpoint on rank 1 (" in seen
    assert not is_written


_KEEPS = """
import ctypes
from types import SimpleNamespace
from distributed.launch import keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]

def keeps(size):
    # Do four blocks come from the heap, which stays as large without them?
    blocks = [libc.malloc(size) for _ in range(4)]
    is_mapped = any(ctypes.c_size_t.from_address(block - 8).value & 2 for block in blocks)
    end = libc.sbrk(0)
    for block in blocks:
        libc.free(block)
    return not is_mapped and libc.sbrk(0) == end

keep_freed_memory(SimpleNamespace(type="cuda"))
as_it_is = keeps(2**24)
keep_freed_memory(SimpleNamespace(type="cpu"))
print(as_it_is, keeps(2**24 + 2**23))  # glibc keeps what is no larger than it has seen
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc gives freed memory back")
def test_freed_memory_is_kept():
    run = run_code(_KEEPS)
    assert run.stdout.splitlines()[-1] == "False True"
