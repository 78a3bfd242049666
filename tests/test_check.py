"""python -m launch.check: what it prints for one process, and how it names the rank that is out of reach."""

import re
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.backend import choose_backend
from distributed.number_format import choose_format, instruction_set
from distributed.watchdog import EXIT_HANG
from launch import check, links, rates
from launch.links import listen_like_gloo, pairs_to_measure
from launch.rates import RATES, Rates
from tests.ranks import Finished, run_program

_CPU = torch.device("cpu")
_VALUES = r" +\d+ us +\d+ Mbit/s"


def _check(folder: Path, size: int, *arguments: str, **options: Any) -> Finished:
    return run_program("launch/check", *arguments, folder=folder, world_size=size, **options)


def _lines(finished: Finished, level: str) -> list[str]:
    """The errors or warnings of ours, without what C++ code prints."""
    return [line for line in finished.error_lines if line.startswith(level)]


@pytest.mark.slow
def test_one_process(tmp_path):
    finished = _check(tmp_path, 1)
    assert (finished.statuses, finished.stderr) == ([0], "")
    told = dict(line.split(maxsplit=1) for line in finished.stdout.splitlines())
    assert told["torch"].startswith(torch.__version__)
    assert told["backends"].startswith("gloo")
    assert told["WORLD_SIZE"] == "1"
    assert told["memory"].endswith("GiB")
    assert {"python", "host", "threads"} <= told.keys()
    assert told["cpu"].endswith(f"({instruction_set(_CPU)})")
    for name in RATES:
        assert re.fullmatch(r"\d+ +GFLOP/s", told[name])
    assert finished.stdout.splitlines()[-1].startswith(_rule())
    assert "WANDB_MODE" not in told, "it is set, and does not concern processes"


def _rule() -> str:
    name, reason = choose_format(_CPU)
    return f"arch.forward_dtype=auto means {name} here, because {reason}. "


def _contradict() -> None:
    rates._rate = lambda device, dtype: 3e9 if str(dtype) == f"torch.{choose_format(device).name}" else 2e11


@pytest.mark.slow
def test_all_ranks_reach_each_other_and_measure_their_rates(tmp_path, free_port):
    """Where rank 0 holds the store, as across nodes."""
    held = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(free_port)}
    finished = _check(tmp_path, 3, "--quick", "--device=cpu", spoil=_contradict, **held)
    assert (finished.statuses, _lines(finished, "error"), _lines(finished, "warning")) == ([0] * 3, [], [])
    row = r"^(\d) +(\S+) +(\d+) +cpu +\d+ +\w+ +\S+ +\d+ +(\d+) +(\d+)$"
    rows = re.findall(row, finished.stdout, flags=re.MULTILINE)
    assert [(number, host) for number, host, *_ in rows] == [(n, socket.gethostname()) for n in "012"]
    assert len({pid for _, _, pid, *_ in rows}) == 3
    assert set(rows[2][3:]) == {"3", "200"}
    assert "bfloat16 GFLOP/s  float32 GFLOP/s\n" in finished.stdout
    assert f"{_rule()}The measurement contradicts the rule. Set " in finished.stdout
    pairs = re.findall(rf"^(\d) <-> (\d){_VALUES}$", finished.stdout, flags=re.MULTILINE)
    assert sorted(pairs) == [("0", "1"), ("0", "2"), ("1", "2")]
    assert re.search(rf"^all-reduce{_VALUES} \(bus bandwidth\)$", finished.stdout, flags=re.MULTILINE)
    assert finished.stdout.endswith("all 3 ranks can reach each other\n")


def test_rates_of_one_process_are_compared_with_the_rule(tmp_path):
    finished = _check(tmp_path, 1, "--device=cpu", spoil=_contradict)
    *_, bfloat16, float32, told = finished.stdout.splitlines()
    is_bfloat16_fast = choose_format(_CPU).name == "float32"
    assert bfloat16.split() == ["bfloat16", "200" if is_bfloat16_fast else "3", "GFLOP/s"]
    assert float32.split() == ["float32", "3" if is_bfloat16_fast else "200", "GFLOP/s"]
    other = "bfloat16" if is_bfloat16_fast else "float32"
    assert told == f"{_rule()}The measurement contradicts the rule. Set arch.forward_dtype={other}."


def test_small_differences_contradict_nothing():
    assert Rates(1.0, 1.2, "bfloat16", "why").compare().endswith("agrees with the rule.")
    assert Rates(1.0, 1.3, "bfloat16", "why").compare().endswith("Set arch.forward_dtype=float32.")
    assert Rates(1.3, 1.0, "float32", "why").compare().endswith("Set arch.forward_dtype=bfloat16.")


def test_ranks_of_another_kind_have_a_line_of_their_own(monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(check.log, "info", told.append)
    fast, slow = Rates(9.0, 1.0, "bfloat16", "why"), Rates(1.0, 9.0, "bfloat16", "why")
    check._compare_rates([fast, fast])
    check._compare_rates([fast, slow, slow])
    assert told == [fast.compare(), f"rank 0: {fast.compare()}", f"ranks 1, 2: {slow.compare()}"]


def test_one_pair_for_each_two_nodes():
    assert pairs_to_measure(["a", "a", "a"]) == [(0, 1), (0, 2), (1, 2)]
    assert pairs_to_measure(["a", "a", "b", "b", "c"]) == [(0, 2), (0, 4), (2, 4)]
    assert len(pairs_to_measure(list("abcdefghij"))) == 9 + 8


def _have_an_unknown_name_and_a_dead_address() -> None:
    def bind_only() -> socket.socket:
        dead = socket.socket()
        dead.bind(("127.0.0.1", 0))
        return dead

    links.listen_like_gloo = bind_only
    socket.gethostname = lambda: "nowhere.invalid"


@pytest.mark.slow
def test_a_rank_out_of_reach_and_a_name_that_does_not_resolve_are_named(tmp_path):
    spoil = _have_an_unknown_name_and_a_dead_address
    finished = _check(tmp_path, 3, "--quick", "--device=cpu", spoil=spoil)
    name, address = _lines(finished, "warning")
    hosts = f"{socket.gethostname()}, nowhere.invalid"
    assert name.startswith(f"warning (rank 0): host name nowhere.invalid does not resolve on {hosts}. ")
    assert "--local-addr" in name
    assert address.startswith(
        "warning (rank 0): rank 2 (nowhere.invalid, lo 127.0.0.1) cannot be reached by ranks 0, 1, 2 on "
        f"{hosts} (Connection refused). "
    )
    assert finished.statuses == [0, 0, 0], "gloo may come through where the other one calls"


def _hang(*_, **__) -> None:
    time.sleep(1000)


def _hang_in_messages() -> None:
    torch.distributed.recv = _hang


def _fail_to_listen() -> None:
    def fail() -> socket.socket:
        raise OSError("no more sockets")

    links.listen_like_gloo = fail


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "status", "expected"),
    [
        (sys.exit, 1, r"error: rank 2 of 3 did not start within 5 s .*"),
        (_hang_in_messages, EXIT_HANG, r"error \(rank \d\): .*\brank 2: in step 3, .*\(_hang\).*"),
        (_fail_to_listen, 1, r"error: rank 2 of 3 could not set up: OSError: no more sockets"),
    ],
    ids=["absent", "messages", "failure"],
)
def test_a_rank_that_hangs_or_fails_is_named_and_all_end(tmp_path, spoil, status, expected):
    started = time.monotonic()
    finished = _check(tmp_path, 3, "--quick", "--device=cpu", "--timeout=5", spoil=spoil)
    assert time.monotonic() - started < 60
    assert finished.statuses == [status, status, 0 if spoil is sys.exit else status]
    errors = _lines(finished, "error")
    assert errors, finished.stderr
    for line in errors:
        assert re.fullmatch(expected, line)
    assert len(errors) == 1 or status == EXIT_HANG, "of a hang every rank tells"


@pytest.mark.parametrize(
    ("argument", "status", "text"),
    [
        ("--backend=nccl", 1, "error: ranks 0, 1 of 2 could not set up: backend=nccl needs device=cuda"),
        ("--timeout=0", 2, "python -m launch.check: error: --timeout 0"),
        ("--timeout=inf", 2, "python -m launch.check: error: --timeout inf"),
    ],
)
def test_mistakes_are_printed_once(tmp_path, argument, status, text):
    finished = _check(tmp_path, 2, argument, "--device=cpu")
    assert finished.statuses == [status] * 2
    assert (finished.stdout + finished.stderr).count(text) == 1
    assert finished.stderr.count("error") == 1


def test_addresses_are_those_of_the_chosen_interface(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-one")
    unknown = "GLOO_SOCKET_IFNAME=no-such-one: No such device. Choose one of .*'lo'"
    with pytest.raises(ValueError, match=unknown):
        listen_like_gloo()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="GLOO_SOCKET_IFNAME: no interface no-such-one. Choose among .*lo"):
        choose_backend("gloo", torch.device("cpu"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,lo")
    with listen_like_gloo() as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    with listen_like_gloo() as listener:
        socket.create_connection(listener.getsockname()[:2], timeout=5).close()
