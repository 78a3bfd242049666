"""Records: how the runs of a rung are counted, kept and shown."""

import re
from pathlib import Path

import pytest

from evaluation.intervals import goal_p, mean_interval, t_tail
from records import __main__ as records
from records import page, record, seeds
from records.rungs import RUNGS, Rung
from tests.refusals import cases, check


@pytest.mark.parametrize(
    ("freedom", "t", "p"),  # of a table of critical values
    [
        *((1, 6.3138, 0.05), (2, 2.9200, 0.05), (3, 4.5407, 0.01), (4, 2.1318, 0.05), (5, 3.3649, 0.01)),
        *((9, 2.8214, 0.01), (30, 1.6973, 0.05)),
    ],
)
def test_the_tail_is_students(freedom, t, p):
    assert t_tail(t, freedom) == pytest.approx(p, rel=1e-4)
    assert t_tail(-t, freedom) == pytest.approx(1 - p, rel=1e-4)
    assert t_tail(0.0, freedom) == pytest.approx(0.5)


def test_a_goal_is_held_by_the_mean():
    # t = (0.98 - 0.97) sqrt(3) / 0.01 = sqrt(3); with 2 degrees p = 1/2 - t / (2 sqrt(2 + t t))
    assert goal_p([0.98, 0.97, 0.99], 0.97) == pytest.approx(0.5 - 3**0.5 / (2 * 5**0.5))
    assert goal_p([0.98, 0.97, 0.99], 0.98) == pytest.approx(0.5)
    assert goal_p([0.98, 0.98], 0.97) == 0.0
    assert goal_p([0.97, 0.97], 0.97) == 1.0
    assert goal_p([0.98], 0.97) is None
    half = 4.302653 * 0.01 / 3**0.5
    assert mean_interval([0.98, 0.97, 0.99]) == pytest.approx((0.98 - half, 0.98 + half))
    assert mean_interval([0.98]) is None


def _rows(count: int, *, every: int) -> list[dict]:
    rows = [
        {"step": step, "seconds": step / 10, "train/lm_loss": 1 / step, "lr": 0}
        for step in range(1, count + 1)
    ]
    for row in rows[every - 1 :: every]:
        row["eval/all/exact_accuracy"] = row["step"] / count
    return rows


@pytest.mark.parametrize(("count", "every"), [(1, 1), (150, 40), (1000, 7)])
def test_a_log_is_thinned(count, every):
    thin = record.thin(_rows(count, every=every))
    steps = [row["step"] for row in thin]
    evaluated = {*range(every, count + 1, every)}
    assert steps == sorted({*steps, 1, count} | evaluated)
    assert len({*steps} - evaluated) <= 201
    gaps = [after - before for before, after in zip(steps, steps[1:], strict=False)]
    assert max(gaps, default=0) <= -(-count // 200)
    assert not any("lr" in row for row in thin)


_BFLOAT16 = {"cpu": "AN EPYC", "cores": 2, "torch": "2.13", "instruction_set": "unknown"}
_BFLOAT16 |= {"forward_dtype": "bfloat16"}
_FLOAT32 = _BFLOAT16 | {"cpu": "A XEON", "instruction_set": "avx2", "forward_dtype": "float32"}


def _result(*shares: float, on: dict = _BFLOAT16, **changes) -> dict:
    common = {"data_seconds": 3.0, "steps": 40, "interruptions": 0, "other_cores": 0.0}
    common |= {"petaflops": 0.25, "processor_hours": 1.5}
    runs = [
        {"seed": seed, "exact_accuracy": share, "seconds": 50.0 + seed, **common, **changes}
        for seed, share in enumerate(shares)
    ]
    return records.summarize(RUNGS["demo"], runs) | on | {"runs": runs}


def _write(result: dict, change: str, folder: Path) -> Path:
    rows = {run["seed"]: _rows(40, every=10) for run in result["runs"]}
    return record.write_record(result, rows, change=change, command="COMMAND", folder=folder)


def _pages(tmp_path: Path) -> dict[str, str]:
    """Returns {name: content} of the pages about the records in `tmp_path`, and writes them there."""
    for name in ("records/README.md", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n")
    contents = page.pages(root=tmp_path, folder=tmp_path / "records")
    for path, content in contents.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    return {str(path.relative_to(tmp_path)): content for path, content in contents.items()}


def test_a_final_evaluation_is_the_mean_over_its_sets():
    rows = [{"step": 1, "eval/a/arc/pass@2": 0.5, "eval/b/arc/pass@2": 0.25, "eval/a/arc/pass@1": 0.0}]
    assert seeds.final_evaluation(rows, "arc/pass@2") == 0.375
    assert seeds.final_evaluation(rows, "exact_accuracy") is None
    assert [_result(0.9, other_cores=cores)["is_busy"] for cores in (0.0, 0.5)] == [False, True]


def test_records_are_written_and_shown(tmp_path):
    where = {"root": tmp_path, "folder": tmp_path / "records"}
    found = ((8, 4, 0.99), (16, 1, 0.995))
    longer = [dict(zip(("steps", "samples", "exact_accuracy"), each, strict=True)) for each in found]
    better = _result(0.98, 0.985, 0.99, test_time=longer)
    for change, result in (("First.", _result(0.9, 0.8, test_time=longer[:1])), ("Better.", better)):
        for _ in range(2):  # the same again is no new record
            _write(result, change, where["folder"])
    contents = _pages(tmp_path)
    text = contents["records/README.md"]
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    row = next(line for line in text.splitlines() if line.startswith("| `demo` |"))
    cells = "0.985 +- 0.005 [0.973, 0.997], 3 seeds | 0.980 | 0.018: not held | 52 | 1.5 | 0.25 |"
    assert f"{cells} 0.995 (16 steps) | AN EPYC (instruction set unknown), bfloat16 |" in row
    assert text.count("First.") == 1
    assert "0.850 in 51 s (2 seeds, AN EPYC). First." in text
    assert "    COMMAND\n" in text
    short = "| exact 0.97 in 1 min | 0.985 +- 0.005 [0.973, 0.997], 3 seeds | 52 | AN EPYC (instruction set"
    assert short in contents["README.md"]
    picture = page.draw_curves(RUNGS["demo"], better, tmp_path / "records/demo")
    assert ">goal 0.97 in 1 min<" in picture
    assert ">exact accuracy, 3 seeds; faint lines: during training<" in picture
    assert page.pages(**where) == {path: path.read_text() for path in page.pages(**where)}
    path = tmp_path / "records/demo/record.json"  # as an older version wrote it
    path.write_text(re.sub(r'"(petaflops|processor_hours(_max)?)": [\d.]+,', "", path.read_text()))
    assert "0.018: not held | 52 |  |  | 0.995 (16 steps) |" in _pages(tmp_path)["records/README.md"]
    (tmp_path / "README.md").write_text("nothing")
    with pytest.raises(ValueError, match=r"README.md lacks the lines"):
        page.pages(**where)


def test_an_entry_leaves_those_of_other_machines_alone(tmp_path):
    folder = tmp_path / "records"
    logs = _write(_result(0.99, 0.98, 0.97), "First.", folder)
    assert logs == folder / "demo/unknown_bfloat16"
    files = {path: path.read_bytes() for path in logs.iterdir()}
    (kept,) = record.read_entries(folder / "demo")
    for change, shares in (("On AVX2.", (0.9,)), ("Faster.", (0.96,))):
        slow = _result(*shares, on=_FLOAT32, seconds=61.0)
        assert _write(slow, change, folder) == folder / "demo/avx2_float32"
    assert {path: path.read_bytes() for path in logs.iterdir()} == files
    entries = record.read_entries(folder / "demo")
    assert entries[0] == kept
    assert [entry["forward_dtype"] for entry in entries] == ["bfloat16", "float32"]
    assert [each["change"] for each in entries[1]["history"]] == ["On AVX2."]

    contents = _pages(tmp_path)
    rows = [line for line in contents["records/README.md"].splitlines() if line.startswith("| `demo` |")]
    assert ["(instruction set unknown), bfloat16" in row for row in rows] == [True, False]
    assert "| 0.960, 1 seed: missed | 0.960 | one seed | 61: missed |" in rows[1]
    assert "| A XEON (avx2), float32 |" in rows[1]
    assert "](demo/avx2_float32/seed_0.jsonl)" in contents["records/README.md"]
    assert "\nA XEON (avx2), float32, 2 cores," in contents["records/README.md"]
    assert contents["README.md"].count("`demo`") == 1
    assert "3 seeds | 52 | AN EPYC (instruction set unknown), bfloat16 |" in contents["README.md"]

    more = [{"seeds": seeds, "date": date} for seeds, date in ((1, "2"), (3, "0"), (3, "1"), (2, "3"))]
    assert record.best_entry(more) == {"seeds": 3, "date": "1"}


def test_the_committed_pages_show_the_committed_records():
    """Written by python -m records --table. Versions of matplotlib place things a little apart."""
    number = re.compile(r"-?\d+\.\d+")
    for path, content in page.pages().items():
        there, told = path.read_text(), f"{path} is not what its records say"
        assert number.sub("", there) == number.sub("", content), told
        off_by = 0.5 if path.suffix == ".svg" else 0
        for one, other in zip(number.findall(there), number.findall(content), strict=True):
            assert abs(float(one) - float(other)) <= off_by, told


@cases("records command lines", "given")
def test_mistakes_are_one_line(given, words, monkeypatch, capsys):
    laptop = Rung("laptop", "", "sudoku --source {source}", goal=1, seconds=1, test_time="")
    monkeypatch.setitem(RUNGS, "laptop", laptop)
    with pytest.raises((SystemExit, ValueError)) as refused:
        records.main(given.split())
    check(capsys.readouterr().err.removesuffix("\n") or str(refused.value), words)


def test_a_rung_without_a_source_uses_its_public_dataset(monkeypatch, tmp_path):
    monkeypatch.delenv("RECORDS_SOURCE", raising=False)
    for given, source in (([], "hf://datasets/sapientinc/sudoku-extreme"), (["--source", "."], ".")):
        arguments = records._read(["--rung", "sudoku_extreme_search", *given])
        commands = RUNGS["sudoku_extreme_search"].build_commands(tmp_path, arguments.source)
        assert [command[command.index("--source") + 1] for command in commands] == [source, source]


def test_a_stored_command_has_all_options_that_change_the_result():
    given = "--rung demo --seeds 2 --first-seed 5 --processes 1 --dtype float32 --test-time"
    arguments = records._read([*given.split(), "--write", "New."])
    assert records._command(arguments, forward_dtype="float32") == f"python -m records {given}"
