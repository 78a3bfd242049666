"""The report in a browser, as a person uses it."""

import pytest

from dataset.description import with_candidates
from dataset.files import open_dataset
from models.lattice import RESET
from report.compare import write_comparison
from report.page import write_report
from report.trace import trace_puzzles
from tests.report_runs import random_traces, searching_model, write_run

PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}


@pytest.fixture(scope="module")
def report(tmp_path_factory, sudoku_folder):
    """The page of a run that answers 4 cells at random."""
    run = write_run(
        tmp_path_factory.mktemp("system") / "a_run_of_a_long_name", sudoku_folder, has_checkpoint=False
    )
    return write_report(run, traced=random_traces())


@pytest.fixture(scope="module")
def comparison(tmp_path_factory, sudoku_folder):
    folder = tmp_path_factory.mktemp("system")
    keys = {f"r{number}": {"seed": number // 2, "lr": 10.0 ** -(number % 2)} for number in range(4)}
    runs = [write_run(folder / name, sudoku_folder, has_checkpoint=False, **of) for name, of in keys.items()]
    return write_comparison(runs, output=folder / "comparison.html", warn=print)


def _facts(page) -> dict[str, str]:
    names, values = (page.locator(f"#facts {tag}").all_inner_texts() for tag in ("dt", "dd"))
    return dict(zip(names, values, strict=True))


def _is_fine(visited) -> bool:
    return (visited.errors, visited.requests) == ([], [])


def test_the_slider_the_keys_and_the_map_move_through_the_thoughts(visit, report):
    visited = visit(report)
    page = visited.page
    page.wait_for_selector("#map button")
    assert page.locator("#step-name").inner_text() == "thinking step 1 of 3"
    pictures = [page.inner_html("#answer")]
    page.locator("#step").fill("2")
    assert page.locator("#step-name").inner_text() == "thinking step 2 of 3"
    pictures.append(page.inner_html("#answer"))
    page.keyboard.press("ArrowRight")
    assert page.locator("#step-name").inner_text() == "thinking step 3 of 3"
    pictures.append(page.inner_html("#answer"))
    page.keyboard.press("ArrowRight")  # there is no further one
    assert page.locator("#step-name").inner_text() == "thinking step 3 of 3"
    page.keyboard.press("ArrowLeft")
    assert page.inner_html("#answer") == pictures[1]
    assert len(set(pictures)) == 3
    assert page.locator("#answer .ring").count() == int(_facts(page)["cells just changed"]) > 0

    order = [button.get_attribute("title").split(":")[0] for button in page.locator("#map button").all()]
    shown = _facts(page)["puzzle"]
    page.keyboard.press("k")
    assert _facts(page)["puzzle"] == order[order.index(shown) - 1]
    page.keyboard.press("j")
    assert _facts(page)["puzzle"] == shown
    page.locator("#map button").first.click()
    assert _facts(page)["puzzle"] == order[0]
    assert page.locator("#map [aria-selected=true]").get_attribute("title").startswith(f"{order[0]}:")
    assert page.locator("#answer .wrong").count() == 0
    page.get_by_role("button", name="Wrong").click()
    assert page.locator("#map button").count() == page.locator("#map .failed").count() > 0
    page.keyboard.press("ArrowRight")
    assert page.locator("#answer .wrong").count() > 0
    right = _facts(page)["cells right"].split()
    assert page.locator("#answer .wrong").count() == int(right[2]) - int(right[0])
    assert _is_fine(visited)


def test_a_search_shows_candidates_guesses_and_where_it_begins_anew(visit, tmp_path, sudoku_folder):
    data = with_candidates(open_dataset(sudoku_folder, read_everything=False))
    run = write_run(tmp_path / "run", sudoku_folder, has_checkpoint=False)
    traced = trace_puzzles(searching_model(data), data, num_puzzles=8, batch_size=8, path=tmp_path)
    visited, kinds = visit(write_report(run, traced=traced)), set()
    page = visited.page
    page.wait_for_selector("#map button")
    for _ in range(8 * 20):
        puzzle, step = page.evaluate("[now.puzzle, now.step]")
        guess, board = puzzle["guesses"][step - 1], puzzle["candidates"][step - 1]
        shown = sum(bits.bit_count() for bits in board if bits.bit_count() > 1)
        assert page.locator("#answer .candidate:not(.struck)").count() == shown
        assert int(_facts(page)["candidates"]) == sum(bits.bit_count() for bits in board)
        assert page.locator("#answer .guess").count() == (guess >= 0)
        assert page.locator("#answer .anew").count() == (guess == RESET)
        struck = page.locator("#answer .struck").count()
        kinds |= {"struck"} if struck else {"anew"} if guess == RESET else set()
        page.keyboard.press("ArrowRight" if step < 20 else "j")
        if step == 20:
            page.locator("#step").fill("1")
    assert kinds == {"struck", "anew"}
    assert _is_fine(visited)


def test_search_and_play(visit, report):
    visited = visit(report)
    page = visited.page
    page.get_by_role("button", name="Wrong").click()
    page.locator("#search").fill("117")
    assert _facts(page)["puzzle"] == "117"
    page.keyboard.type("jk")  # letters of the search, no keys of the page
    assert page.locator("#found").inner_text() == "Puzzle not found on this page: 117jk."
    assert _facts(page)["puzzle"] == "117"
    page.locator("#search").fill("199")
    assert page.locator("#no-solution").is_visible()
    page.locator("h1").click()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    page.locator("#play").click()
    page.locator("#step-name", has_text="thinking step 3 of 3").wait_for(timeout=10_000)
    page.wait_for_selector("#play:not(.playing)", timeout=10_000)
    page.hover(".chart .plot")
    assert " at " in page.locator(".tip").inner_text()
    assert _is_fine(visited)


@pytest.mark.parametrize("name", ["report", "comparison"])
def test_a_phone_needs_no_scrolling_aside(visit, request, name):
    visited = visit(request.getfixturevalue(name), **PHONE)
    assert visited.page.evaluate("document.documentElement.scrollWidth") <= 390
    assert _is_fine(visited)


@pytest.mark.parametrize("name", ["report", "comparison"])
def test_light_and_dark(visit, request, name):
    paper = "getComputedStyle(document.documentElement).backgroundColor"
    colors = {}
    for scheme in ("light", "dark"):
        visited = visit(request.getfixturevalue(name), color_scheme=scheme)
        before = visited.page.evaluate(paper)
        visited.page.click(".theme")
        colors[scheme] = (before, visited.page.evaluate(paper))
        visited.page.reload()
        assert visited.page.evaluate(paper) == colors[scheme][1]  # it is remembered
        assert _is_fine(visited)
    assert colors["light"] == colors["dark"][::-1]
    assert len(set(colors["light"])) == 2


def test_a_comparison_changes_its_axis(visit, comparison):
    visited = visit(comparison)
    page = visited.page
    assert page.locator(".comparison tbody tr").count() == 2
    for axis in ("seconds", "examples", "training steps"):
        page.get_by_role("button", name=f"over {axis}").click()
        shown = [part.get_attribute("data-over") for part in page.locator("[data-over]:visible").all()]
        assert shown == [axis]
    assert page.locator("[data-over='training steps'] svg").count() > 3
    assert _is_fine(visited)


def test_it_prints(visit, report, tmp_path):
    page = visit(report).page
    page.wait_for_selector("#map button")
    page.emulate_media(media="print")
    assert not page.locator("#search").is_visible()
    assert page.locator("#answer").is_visible()
    page.pdf(path=tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")


def test_a_visit_tells_errors_and_requests(visit, tmp_path):
    page = tmp_path / "page.html"
    page.write_text("<h1>title</h1><img src='http://127.0.0.1:9/a.png'><script>missing()</script>")
    visited = visit(page)
    assert visited.page.inner_text("h1") == "title"
    assert visited.requests == ["http://127.0.0.1:9/a.png"]
    assert any("missing is not defined" in error for error in visited.errors)
