"""The page of a model in a browser: a model must solve a puzzle, and every control does what it says."""

import functools
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from config.files import load_defaults
from config.programs import PageConfig
from config.schema import validate_config
from dataset.files import open_split
from dataset.loader import choose_rows
from share.browser import write_page
from tests.checkpoints import save_on
from tests.report_runs import SEARCHING, make_searching
from tests.system.serving import served

_STEPS, _PUZZLES = 2, 4


def _misprint(question: torch.Tensor | list[int]) -> list[int]:
    """Writes another digit in the place of the first clue."""
    tokens = list(map(int, question))
    first = next(cell for cell, token in enumerate(tokens) if token > 1)
    return [*tokens[:first], 2 + (tokens[first] - 1) % 4, *tokens[first + 1 :]]


def _overfit(state, *, data: Path) -> None:
    """Teaches a tiny model a few of the test puzzles by heart, and its Q head that it is right.

    The first of them also with a misprint, which the model is to mend.
    """
    test = open_split(data, "test").sets["all"]
    rows = choose_rows(test, _PUZZLES)  # those that the page offers
    inputs, labels = (torch.from_numpy(each[rows].astype(np.int64)) for each in (test.inputs, test.labels))
    inputs, labels = (
        torch.cat([inputs, torch.tensor([_misprint(inputs[0])])]),
        torch.cat([labels, labels[:1]]),
    )
    network, identifiers = state.model.network, torch.zeros(len(inputs), dtype=torch.int64)
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    for _ in range(1000):
        kept = network.initial_state(len(inputs), seq_len=inputs.shape[1])
        loss = 0
        for _ in range(_STEPS):
            kept, prediction = network(kept, inputs, identifiers, reasoning=state.model.reasoning)
            loss = loss + cross_entropy(prediction.logits.flatten(0, 1), labels.flatten())
        is_right = (prediction.logits.argmax(-1) == labels).all(-1)
        loss = loss + (prediction.q_halt - 6).square().mean() / 100
        if is_right.all() and loss < 0.02:
            return
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    pytest.fail(f"the puzzles are not learned: loss {loss.item()}")


@pytest.fixture(scope="module")
def page(tmp_path_factory, sudoku_folder) -> Path:
    """The page of an HRM that knows four puzzles by heart."""
    if shutil.which("npm") is None:
        pytest.skip("there is no npm on this machine")
    folder = tmp_path_factory.mktemp("page")
    arch = {"H_cycles": 1, "L_cycles": 1, "gradient_cycles": 0, "halt_max_steps": _STEPS}
    train = functools.partial(_overfit, data=sudoku_folder)
    run = save_on(sudoku_folder, folder / "run", train=train, **arch)
    return _write(run)


def _write(*checkpoints: Path | str, folder: Path | None = None) -> Path:
    output = (folder or checkpoints[0].parent) / "page"
    given = {"checkpoint": [*map(str, checkpoints)], "output": str(output), "puzzles": _PUZZLES}
    try:
        write_page(validate_config(PageConfig, load_defaults("page") | given))
    except ValueError as error:
        if "npm cannot download" in str(error):
            pytest.skip(str(error))
        raise
    return output


@pytest.fixture
def address(page) -> Iterator[str]:
    with served(page) as address:
        yield address


def _open(visit, address: str, **options):
    visited = visit(address, **options)
    visited.page.wait_for_selector("body[data-ready]", timeout=120_000)
    visited.page.select_option("#speed", label="fast")
    return visited


def _cells(page) -> list[str]:
    labels = page.locator("#board .hit").evaluate_all("hits => hits.map(hit => hit.ariaLabel)")
    shown = [re.fullmatch(r"row \d+, column \d+: (\w+)(, \d\.\d\d sure)?", label)[1] for label in labels]
    return ["" if text == "empty" else text for text in shown]


def _play(page) -> None:
    page.click("#play")
    page.wait_for_selector("#play:text-is('Play again')", timeout=60_000)  # its policy forbids to evaluate


def _digits(tokens: list[int]) -> list[str]:
    return [str(token - 1) if token > 1 else "" for token in tokens]


def _paste(page, text: str) -> None:
    page.evaluate(
        """text => document.dispatchEvent(new ClipboardEvent("paste", {clipboardData:
            (() => { const data = new DataTransfer(); data.setData("text", text); return data; })()}))""",
        text,
    )


def test_a_puzzle_is_solved_step_by_step(visit, address, page):
    puzzles = json.loads((page / "run" / "page.json").read_text())["puzzles"]
    visited = _open(visit, address)
    shown = visited.page
    assert "HRM" in shown.inner_text("#facts")
    for number, puzzle in enumerate(puzzles[:2], 1):
        assert shown.inner_text("#where") == f"Puzzle {number} of {_PUZZLES}"
        assert _cells(shown) == _digits(puzzle["inputs"])
        _play(shown)
        assert _cells(shown) == _digits(puzzle["labels"])
        assert shown.inner_text("#verdict") == "solved"
        assert shown.locator("#board .clue-ground").count() == sum(token > 1 for token in puzzle["inputs"])
        assert re.search(r"The model would halt after step \d\.", shown.inner_text("#halting"))
        shown.click("#next")
    assert (visited.errors, visited.requests) == ([], [])


def test_shipped_models_share_a_page_and_links_carry_puzzles(visit, tmp_path):
    with served(_write("demo", "sudoku_6x6", folder=tmp_path)) as address:
        visited = _open(visit, f"{address}#puzzle=1.....3..4.....2")
        shown = visited.page
        assert shown.input_value("#model") == "demo"
        assert "".join(cell or "." for cell in _cells(shown)) == "1.....3..4.....2"
        _play(shown)
        assert shown.inner_text("#verdict") == "solved"
        _paste(shown, "..1.3. .4.... ...5.. 1..... 5.642. ..43.5")
        shown.wait_for_selector("#facts:has-text('TRM')")
        shown.wait_for_selector("body[data-ready]", timeout=120_000)
        assert shown.url == f"{address}#model=sudoku_6x6&puzzle=..1.3..4.......5..1.....5.642...43.5"
        _play(shown)
        assert shown.inner_text("#verdict") == "solved"
        shown.select_option("#model", "demo")
        shown.wait_for_selector("#facts:has-text('HRM')")
        number = shown.inner_text("#where")
        shown.reload()
        shown.wait_for_selector("body[data-ready]", timeout=120_000)
        assert shown.inner_text("#where") == number
        assert (visited.errors, visited.requests) == ([], [])


def test_a_search_shows_the_rounds_of_the_chain_that_answers(visit, tmp_path, sudoku_folder):
    def train(state):
        make_searching(state.model.network)

    page = _write(save_on(sudoku_folder, tmp_path / "run", train=train, name="ldt", **SEARCHING))
    facts = json.loads((page / "run" / "page.json").read_text())
    for sees_contradictions in (False, True):
        facts["search"]["conflict_threshold"] = 1e-9 if sees_contradictions else 1 - 1e-9
        (page / "run" / "page.json").write_text(json.dumps(facts))
        with served(page) as address:
            visited = _open(visit, address)
            _watch_search(visited.page, facts, sees_contradictions=sees_contradictions)
            assert (visited.errors, visited.requests) == ([], [])


def _watch_search(page, facts: dict, *, sees_contradictions: bool) -> None:
    assert "LDT" in page.inner_text("#facts")
    entered = 4 * facts["puzzles"][0]["inputs"].count(1)
    _play(page)
    last = int(page.get_attribute("body", "data-step"))
    assert page.inner_text("#where").startswith(f"Thinking step {last} of {last} ")
    assert (page.inner_text("#verdict") == "undecided") == (not all(_cells(page)))
    assert last == facts["steps"] or not sees_contradictions
    left = entered
    for step in range(1, last + 1):
        page.locator("#slider").fill(str(step))
        page.wait_for_selector(f"body[data-step='{step}']")
        before, left = left, page.locator("#board .candidate:not(.struck)").count()
        began_anew = page.locator("#board .anew").count() == 1
        assert began_anew == sees_contradictions == ("the search restarts" in page.inner_text("#where"))
        assert left == entered if began_anew else left < before or not before
        assert page.locator("#board .guess").count() == (not began_anew and before > 0 and step < last)


def test_own_symbols_are_what_can_be_put_and_what_stays_is_given(visit, address):
    shown = _open(visit, address)
    facts = {"kind": "pairs", "rows": 1, "columns": 3, "vocab_size": 5, "symbols": ["", "", "#", "*", "."]}
    facts["puzzles"] = [{"inputs": [2, 4, 4], "labels": [2, 3, 4]}]
    look = """async (facts) => {
        const kind = (await import("./kinds.js")).kindOf(facts);
        return [kind.tokens, kind.blank, kind.tokens.map((token) => Boolean(kind.isClue(token)))];
    }"""
    assert shown.page.evaluate(look, facts) == [[2, 3, 4], 4, [True, False, False]]
    facts |= {"kind": "queens", "vocab_size": 3, "symbols": ["", "", "Q"], "first_of_field": None}
    facts["puzzles"] = [{"inputs": [1, 2, 1], "labels": [1, 2, 2]}]
    assert shown.page.evaluate(look, facts) == [[2, 1], 1, [True, False]], "1 is an empty cell"


def test_only_a_maze_has_the_buttons_wall_start_and_goal(visit, page, tmp_path):
    copy = shutil.copytree(page, tmp_path / "page")
    facts = json.loads((copy / "run" / "page.json").read_text()) | {"groups": None}
    rules, known = "breaks the rules", "differs from the known answer"
    for kind, symbols, words, wrong in (
        ("maze", ["", "#", "", "S", "G", "*"], ["wall", "start", "goal"], rules),
        ("coloring", ["", "", *"#RGB"], ["", "", "", "", "×"], rules),  # four colors, and an empty cell
        ("own", ["", "", *"#RGB"], ["", "", "", "", "×"], known),
    ):
        colors = ["#3f9d6b" if symbol else None for symbol in symbols]
        facts |= {"kind": kind, "symbols": symbols, "colors": colors}
        (copy / "run" / "page.json").write_text(json.dumps(facts))
        with served(copy) as address:
            shown = _open(visit, address).page
            assert shown.inner_text("#wrong-words") == wrong
            buttons = shown.locator("#palette button")
            assert [text.strip() for text in buttons.all_inner_texts()] == words


def test_slider_keys_and_steps(visit, address):
    visited = _open(visit, address, color_scheme="dark")
    shown = visited.page
    question = _cells(shown)
    shown.keyboard.press(".")
    shown.wait_for_selector("body[data-step='1']")
    assert re.match(rf"Thinking step 1 of {_STEPS} · \d+ changed", shown.inner_text("#where"))
    num_open = question.count("")
    assert shown.locator("#board .ring").count() == num_open
    assert 0.04 < float(shown.locator("#board .cell").first.get_attribute("fill-opacity")) <= 0.3
    shown.keyboard.press(",")
    shown.wait_for_selector("body[data-step='0']")
    assert _cells(shown) == question
    shown.locator("#slider").fill("2")
    shown.wait_for_selector("body[data-step='2']")
    shown.select_option("#steps", label=str(4 * _STEPS))
    assert shown.locator("#bars button").count() == 1 + 4 * _STEPS
    _play(shown)
    assert shown.get_attribute("body", "data-step") == str(4 * _STEPS)
    assert visited.errors == []


def test_puzzles_are_typed_pasted_and_made_up(visit, address):
    visited = _open(visit, address)
    shown = visited.page
    shown.click("#generate")
    made = _cells(shown)
    assert shown.inner_text("#verdict") == ""  # exactly one answer
    assert 4 <= sum(map(bool, made)) <= 8  # no clue too many
    shown.click("#clear")
    assert _cells(shown) == [""] * 16
    shown.locator("#board .hit").nth(5).click()
    shown.keyboard.press("3")
    shown.keyboard.press("ArrowRight")
    shown.locator("#palette button").nth(2).click()
    assert _cells(shown)[5:7] == ["3", "3"]
    assert shown.inner_text("#verdict") == "two clues contradict each other"
    shown.keyboard.press("Backspace")
    assert _cells(shown)[5:7] == ["3", ""]
    hint = shown.inner_text("#hint")
    _paste(shown, "1..4 .... ..2. 4..")
    assert shown.inner_text("#hint").startswith("The pasted text is not such a puzzle. Paste 16 cells")
    assert _cells(shown)[5:7] == ["3", ""]
    _paste(shown, "1..4 .... ..2. 4..1")
    assert shown.inner_text("#hint") == hint
    assert _cells(shown) == _digits([2, 1, 1, 5, 1, 1, 1, 1, 1, 1, 3, 1, 5, 1, 1, 2])
    _play(shown)
    assert shown.inner_text("#verdict") in ("solved", *(f"{count} cells wrong" for count in range(2, 17)))
    assert visited.errors == []


def test_a_clue_that_the_model_overrules_looks_like_its_own_thought(visit, address, page):
    puzzle, shown = (
        json.loads((page / "run" / "page.json").read_text())["puzzles"][0],
        _open(visit, address).page,
    )
    question, labels = _misprint(puzzle["inputs"]), puzzle["labels"]
    _paste(shown, "".join(digit or "." for digit in _digits(question)))
    assert shown.locator("#board .clue-ground").count() == sum(token > 1 for token in question)
    _play(shown)
    assert _cells(shown) == _digits(labels)
    classes = shown.locator("#board text").evaluate_all(
        "texts => texts.map(text => text.getAttribute('class'))"
    )
    kept = [asked == answer for asked, answer in zip(question, labels, strict=True)]
    assert [name == "clue" for name in classes] == kept
    assert shown.locator("#board .cell").count() == kept.count(False)


@pytest.mark.parametrize(("width", "height"), [(360, 740), (390, 844), (768, 1024)])
def test_it_fits_a_phone_and_a_tablet(visit, address, width, height):
    viewport = {"width": width, "height": height}
    shown = _open(visit, address, viewport=viewport, is_mobile=True, has_touch=True).page

    def look() -> dict[str, float]:
        assert shown.evaluate("[document.documentElement.scrollWidth, scrollY]") == [width, 0]
        play, board = (shown.locator(name).bounding_box() for name in ("#play", "#board"))
        assert play["y"] + play["height"] <= height, "Play is visible without scrolling"
        assert board["width"] > 0.85 * width
        assert board["height"] == pytest.approx(board["width"], abs=2)
        return board

    before = look()
    _play(shown)  # the words above the grid are longest then
    assert look() == before, "the board keeps its place"


def test_opened_as_a_file_it_says_what_to_do(visit, page):
    visited = visit(page / "index.html")
    assert "python -m http.server" in visited.page.inner_text("#notice")
    assert visited.page.is_hidden("#app")
