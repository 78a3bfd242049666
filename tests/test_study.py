"""Study: the trials of a search, their pruning, their settings and their page, without trainings."""

import sys

import pytest

from config.files import load_defaults
from config.programs import SearchConfig
from config.schema import validate_config
from distributed.number_format import Choice
from report.study import write_page
from tuning.space import compose_search, read_space
from tuning.study import Study
from tuning.trial import share_of_cores


def test_trials_at_a_time_share_the_cores(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 2, 3, 5, 7}, raising=False)
    assert share_of_cores(0, 1) is None
    assert [share_of_cores(slot, 2) for slot in range(2)] == [[0, 2], [3, 5]]
    assert [share_of_cores(slot, 7) for slot in (0, 4, 6)] == [[0], [7], [2]]


def test_a_search_refuses_other_data_unless_the_folder_was_moved(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["search.py", "study=s", f"folder={tmp_path}", "lr=2,3", "data_path=x"])
    config, space, run = compose_search()

    def open_study(data: str, **changes) -> None:
        changed = run.model_copy(update={"data_path": [f"{tmp_path}/{data}"]} | changes)
        Study(tmp_path / "study.db", config, space, changed)

    (tmp_path / "data").mkdir()
    (tmp_path / "same").symlink_to("data")
    for name in ("data", "same"):
        open_study(name)
    for name, changes in (("other", {}), ("data", {"test_data_path": ["other"]})):
        with pytest.raises(ValueError, match=r"is another search \((test_)?data_path: .* -> .*other"):
            open_study(name, **changes)
    (tmp_path / "data").rename(tmp_path / "moved")
    open_study("moved")


@pytest.mark.slow
def test_the_values_of_trials_depend_on_the_sampler_seed(tmp_path):
    space = read_space(["lr=interval(1,2)", "epochs=2", "eval_interval=1"])
    values = []
    for number, seed in enumerate((0, 0, 1)):
        options = load_defaults("search") | {"study": "s", "sampler_seed": seed}
        config = validate_config(SearchConfig, options)
        values.append(Study(tmp_path / f"{number}.db", config, space, space.check()).begin()[1])
    assert values[0] == values[1] != values[2]


@pytest.mark.slow
def test_the_page_of_a_study_shows_what_there_is(tmp_path, monkeypatch):
    """Of no trial, of one that has drawn nothing yet, and of some that are equally good."""
    words = (
        "lr=tag(log,interval(1e-4,1e-2))",
        "arch.L_cycles=range(1,4)",
        "optimizer=choice(adam_atan2,muon)",
    )
    monkeypatch.setattr(sys, "argv", ["search.py", "study=s", f"folder={tmp_path}", *words])
    config, space, run = compose_search()
    study, page = Study(tmp_path / "study.db", config, space, run), tmp_path / "study.html"
    write_page(study, page)
    assert "All trials" in page.read_text()
    for value in (0.5, 0.5, 0.75):
        drawn, _ = study.begin()
        study.report(drawn, [value])
        study.optuna.tell(drawn, value)
    study.report(study.begin()[0], [float("nan"), float("inf")])
    study.optuna.ask()
    (tmp_path / "trial_1").mkdir()
    (tmp_path / "trial_1" / "report.html").touch()
    write_page(study, page)
    text = page.read_text()
    assert text.count('<tr><th scope="row">') == 5
    assert '<a href="trial_1/report.html">1</a>' in text
    for part in ("the best so far 0.75 at 2 trial", "1: adam_atan2, 2: muon", "It explains "):
        assert part in text
    assert "://" not in text
    assert "NaN" not in text  # JSON.parse of the page would fail


@pytest.mark.slow
def test_a_search_killed_before_it_prunes_a_trial_prunes_it_later_but_not_at_its_last_evaluation(tmp_path):
    space = read_space(["lr=choice(1,2)", "epochs=3", "eval_interval=1"])
    config = validate_config(SearchConfig, load_defaults("search") | {"study": "s", "startup_trials": 1})
    study = Study(tmp_path / "s.db", config, space, space.check())
    good, _ = study.begin()
    assert not any(study.report(good, [0.8, 0.9, 0.9][:number]) for number in (1, 2, 3))
    study.optuna.tell(good, 0.9)
    bad, _ = study.begin()
    assert [study.report(bad, [0.1]) for _ in range(2)] == [True, False]

    study = Study(tmp_path / "s.db", config, space, space.check())
    (number,) = study.unfinished()
    resumed, _ = study.begin(number)
    assert [study.report(resumed, values) for values in ([], [0.1], [0.1])] == [False, True, False]
    assert [study.report(resumed, [0.1] * number) for number in (2, 3)] == [True, False]


@pytest.mark.slow
def test_a_study_keeps_the_number_format_that_it_began_with(tmp_path, monkeypatch):
    """Also a study of e5cd7107, which stored bfloat16. A format that is searched is left to the search."""
    config = validate_config(SearchConfig, load_defaults("search") | {"study": "s", "startup_trials": 1})
    space = read_space(["lr=choice(1,2)", "epochs=2", "eval_interval=1"])
    run, words = space.check(), []
    monkeypatch.setattr("training.run_config.choose_format", lambda _: chosen)
    for name, chosen in (("of bfloat16", Choice("bfloat16", "")), ("of float32", Choice("float32", ""))):
        for _ in range(2):
            study = Study(tmp_path / name, config, space, run)
            words.append(study.overrides({"lr": "1"})[-1])
            study.begin()
            chosen = Choice("float32", "")  # on another machine
    assert words == ["arch.forward_dtype=bfloat16"] * 2 + ["arch.forward_dtype=float32"] * 2

    space = read_space(["arch.forward_dtype=bfloat16,float32", "epochs=2", "eval_interval=1"])
    study = Study(tmp_path / "of both", config, space, space.check())
    of_trial = study.overrides({"arch.forward_dtype": "float32"})
    assert [word for word in of_trial if "forward_dtype" in word] == ["arch.forward_dtype=float32"]
