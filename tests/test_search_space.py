"""The space of a search: what may be varied, how it is written, and the experiment file of a trial."""

import shutil
import sys

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

import config.compose
from config.compose import compose_overrides
from config.files import FOLDER
from config.schema import PretrainConfig
from config.texts import quoted
from tests.refusals import cases, check
from tuning.space import compose_search, experiment_yaml, read_space


@pytest.mark.parametrize(
    ("word", "parameter"),
    [
        ("lr=tag(log,interval(1e-4,1e-2))", ("lr", FloatDistribution(1e-4, 1e-2, log=True))),
        ("lr=interval(0,1)", ("lr", FloatDistribution(0.0, 1.0))),
        ("epochs=int(interval(2,9))", ("epochs", IntDistribution(2, 8))),
        ("epochs=tag(log,int(interval(2,9)))", ("epochs", IntDistribution(2, 8, log=True))),
        ("arch.L_cycles=range(1,4)", ("arch.L_cycles", IntDistribution(1, 3))),
        ("arch.L_cycles=range(9,1,-3)", ("arch.L_cycles", IntDistribution(3, 9, step=3))),
        ("ema=range(0.5,0.9,0.1)", ("ema", FloatDistribution(0.5, 0.8, step=0.1))),
        ("ema=null,0.5,0.5", ("ema", CategoricalDistribution(("null", "0.5")))),
        ("evaluators=choice([sudoku],[])", ("evaluators", CategoricalDistribution(("[sudoku]", "[]")))),
        ("raw=choice(true,false)", ("raw", CategoricalDistribution(("True", "False")))),
    ],
)
def test_the_space_is_written_in_hydras_sweep_grammar(word, parameter):
    space = read_space([word, "seed=3"])
    key, of = parameter
    assert (space.parameters, space.fixed) == ({key: of}, ("seed=3",))
    last = of.choices[-1] if isinstance(of, CategoricalDistribution) else of.high
    trial = optuna.trial.FixedTrial({key: last})
    assert space.written(trial.params) == {}
    space.draw(trial)
    assert space.written(trial.params) == {key: str(last)}


@pytest.mark.slow
@cases("search command lines", "given")
def test_mistakes_on_the_command_line_are_one_line(monkeypatch, given, words):
    monkeypatch.setattr(sys, "argv", ["search.py", *given.split()])
    with pytest.raises(ValueError, match="^config: ") as caught:
        compose_search()
    check(str(caught.value), words)


def test_a_grid_has_the_highest_value_of_a_range():
    space = read_space(["lr=range(0.1,0.4,0.1)"])
    written = [space.written(values) for values in space.combinations()]
    assert written == [{"lr": "0.1"}, {"lr": "0.2"}, {"lr": "0.3"}]


def test_a_text_of_a_list_may_contain_spaces():
    space = read_space(["data_path=my data,[my data,b]"])
    texts = [space.written(values) for values in space.combinations()]
    composed = [compose_overrides(PretrainConfig, space.overrides(text)) for text in texts]
    assert [config.data_path for config in composed] == [["my data"], ["my data", "b"]]


@pytest.mark.slow
def test_values_that_only_some_combinations_can_have_are_no_mistake():
    read_space(["arch.hidden_size=64,96", "arch.num_heads=2,3"]).check()
    with pytest.raises(ValueError, match="num_heads 7"):
        read_space(["arch.hidden_size=64,96", "arch.num_heads=2,7"]).check()


@pytest.mark.parametrize(
    "words",
    [
        ["experiment=demo", "lr=0.00123", "evaluators=[sudoku]", "checkpoint_interval=null"],
        ["arch.L_cycles=2"],
        ["arch=trm", "arch.loss.halting_weight=0.25", f"data_path={quoted(chr(39) + 'a b, c=1')}"],
        ["experiment=demo", "arch=trm", "data_path=" + quoted("'a b, \xfc=1")],
        ["experiment=demo", "arch=trm", "wandb_group=5"],  # TRM has no H_layers, which the experiment sets
        ["experiment=trm_sudoku_mlp", "curriculum=[{share:0.3,H_cycles:1}]", "ema=1e-05"],
    ],
)
def test_the_file_of_an_experiment_composes_to_the_same_run(monkeypatch, tmp_path, words):
    copied = shutil.copytree(FOLDER, tmp_path / "config")
    text = experiment_yaml(words, "A title.\nMeasured:  nothing")
    assert text.startswith("# @package _global_\n# A title.\n# Measured:  nothing\n")
    (copied / "experiment" / "found.yaml").write_text(text)
    expected = compose_overrides(PretrainConfig, words)
    monkeypatch.setattr(config.compose, "FOLDER", copied)
    assert compose_overrides(PretrainConfig, ["experiment=found"]) == expected
