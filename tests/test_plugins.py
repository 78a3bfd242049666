"""Plugins: what a file may add, what is refused, and runs with the examples of docs/extend.md."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from checkpointing.finding import find_checkpoint
from config.architecture import architectures
from config.compose import compose_config, compose_overrides
from config.programs import EvaluateConfig, SolveConfig
from config.schema import PretrainConfig
from dataset.build import build_dataset
from dataset.kinds.kind import find_kind, kind_names
from optimizers.weights import state_numbers_per_weight
from runtime import plugins
from runtime.plugins import load_plugins, plugin_files
from share.card import _build_command
from tests.checkpoints import blank_state
from tests.own_files import write_plugins
from tests.ranks import complete_program, run_program
from tests.tiny import FACTS, OVERRIDES, logged_rows, tiny_config
from training.loggers import LoggedRun, Loggers

_GRU = ("plugins=[mine/gru.py]", "--config-dir=mine", "arch=gru", "arch.hidden_size=32", "arch.num_heads=2")
_OWN = tuple(
    word for word in OVERRIDES if not word.startswith(("arch.H_layers", "arch.hidden", "arch.num_heads"))
)


_OF_RULE = "name='own', check_options=None"


def _part(part, attributes="name='own'"):
    return f"import types\n{part} = types.SimpleNamespace({attributes})\n"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "plugin one.py does not exist. Check the path."),
        ({"one.txt": ""}, "plugin one.txt is not a Python file"),
        ({"one.py": "x = (\n"}, r"plugin one.py, line 1: SyntaxError: "),
        (
            {"one.py": "import torch\n\nx = torch.nothing\n"},
            r"plugin one.py, line 3: AttributeError: .*nothing",
        ),
        ({"one.py": "import sys\nsys.exit(0)\n"}, "plugin one.py, line 2: SystemExit: 0"),
        ({"one.py": "KINDS = 1\n"}, "plugin one.py defines none of NETWORK, KIND, OPTIMIZER, LOGGER"),
        ({"one.py": "NETWORK = 1\n"}, "plugin one.py: a model needs both NETWORK and Config"),
        ({"one.py": "KIND = 1\n"}, "plugin one.py: KIND lacks name. Add it"),
        ({"one.py": _part("OPTIMIZER")}, "plugin one.py: OPTIMIZER lacks check_options. Add it"),
        (
            {"one.py": _part("KIND"), "two/one.py": _part("KIND")},
            "plugin two/one.py: another plugin is called one too",
        ),
    ],
)
def test_what_is_not_a_plugin(files, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    with pytest.raises(ValueError, match=f"^{message}") as caught:
        load_plugins(list(files) or ["one.py"])
    assert "\n" not in str(caught.value)


def test_a_file_that_was_no_plugin_may_be_corrected(tmp_path, monkeypatch):
    """In the same process, as in a notebook."""
    monkeypatch.chdir(tmp_path)
    for text, message in (("KINDS = 1", "defines none of"), ("NETWORK = 1  #", "needs both NETWORK and")):
        Path("one.py").write_text(text)
        with pytest.raises(ValueError, match=message):
            load_plugins(["one.py"])
    Path("one.py").write_text(_part("KIND", "name='corrected'"))
    load_plugins(["one.py"])
    assert [each.name for each in plugins.defined("KIND")] == ["corrected"]


def test_a_plugin_is_imported_once_and_needs_no_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    Path("mine/__init__.py").write_text("from plugin_mine.part import OPTIMIZER\n")
    Path("mine/part.py").write_text("print('imported')\n" + _part("OPTIMIZER", _OF_RULE))
    load_plugins(["mine", "./mine", str(tmp_path / "mine")])
    load_plugins(["mine"])
    assert [each.name for each in plugins.defined("OPTIMIZER")] == ["own"]
    assert [name for name, _ in plugin_files()] == [
        "plugin_mine/mine/__init__.py",
        "plugin_mine/mine/part.py",
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [("pass", "the name trm of"), ("name: Literal['hrm']", "the name hrm of"), ("name: str", "no name")],
)
def test_a_model_needs_a_name_of_its_own(line, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = ("from typing import Literal", "from config.architecture import TRMConfig as Base")
    lines += ("class Config(Base):", f"    {line}", "NETWORK = 1")
    Path("one.py").write_text("\n".join(lines))
    load_plugins(["one.py"])
    with pytest.raises(ValueError, match=f"^plugin one.py: Config has {words}"):
        architectures()


@pytest.mark.slow
def test_the_keys_of_a_model_are_checked_like_ours(tmp_path, monkeypatch):
    monkeypatch.chdir(write_plugins(tmp_path).parent)
    config = compose_overrides(PretrainConfig, _GRU)
    assert (config.arch.name, config.arch.L_cycles, config.arch.title) == ("gru", 3, "GRU")
    assert PretrainConfig.model_validate_json(config.model_dump_json()) == config
    for word, message in (
        ("arch.L_cycles=0", "arch.L_cycles=0 should be greater than 0"),
        ("arch.H_cycles=2", "does not belong to the chosen arch"),
        (
            "~arch.L_layers",
            "'arch.L_layers' is missing. Set it in the YAML file of gru. To read older checkp",
        ),
        ("+arch.L_cycle=2", "unknown key 'arch.L_cycle', did you mean 'arch.L_cycles'"),
    ):
        with pytest.raises(ValueError, match=message):
            compose_overrides(PretrainConfig, [*_GRU, word])
    of_experiment = compose_overrides(PretrainConfig, [*_GRU, "experiment=demo"])
    assert (of_experiment.arch.name, of_experiment.arch.mlp_t) == ("gru", True)
    assert of_experiment.arch.heading() == "GRU"  # it has no title
    monkeypatch.setattr(type(config.arch), "cycle_keys", ("H_cycles", "L_cycles"))  # without gradient_cycles
    assert compose_overrides(PretrainConfig, [*_GRU, "curriculum=[{share: 0.3, H_cycles: 1}]"]).curriculum
    monkeypatch.setattr(plugins, "_loaded", {})
    with pytest.raises(
        ValueError,
        match=r"arch.name='gru' should be one of 'hrm', .*'ldt'\. For a model of yours, add plugins=",
    ):
        compose_overrides(PretrainConfig, _GRU[1:])


def test_a_wrong_key_of_a_model_is_compared_with_its_keys_and_help_shows_them(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(write_plugins(tmp_path).parent)
    monkeypatch.setenv("HOME", str(tmp_path))
    words = ["plugins=[~/mine/gru.py]", *_GRU[1:]]
    for file in ("mine/gru.py", "mine/arch/gru.yaml"):
        Path(file).write_text(Path(file).read_text().replace("L_layers", "num_blocks"))
    with pytest.raises(ValueError, match="unknown key 'arch.num_block', did you mean 'arch.num_blocks'"):
        compose_overrides(PretrainConfig, [*words, "arch.num_block=2"])
    assert compose_overrides(PretrainConfig, [*words, "experiment=demo"]).arch.name == "gru"
    with pytest.raises(
        ValueError, match="config/arch has no gru. For a file of yours, add --config-dir FOLD"
    ):
        compose_config(PretrainConfig, ["--help", "arch=gru"])
    assert compose_config(PretrainConfig, ["--help", "arch=gru", "--config-dir=mine"]) is None
    shown = capsys.readouterr().out
    assert re.search("arch.num_blocks=2 +blocks of the level\n", shown)
    assert "arch.rope_theta=10000.0 " in shown, "a key of config/arch/shared/token.yaml"
    assert re.search("arch.hidden_size=128 +features of every vector", shown), "its comment of token.yaml"


def test_one_plugin_needs_no_brackets(tmp_path, monkeypatch):
    monkeypatch.chdir(write_plugins(tmp_path).parent)
    config = compose_overrides(PretrainConfig, ["plugins=mine/lion.py", "optimizer=lion"])
    assert (config.plugins, config.optimizer) == (["mine/lion.py"], "lion")
    assert compose_overrides(SolveConfig, ["plugins=mine/lion.py", "checkpoint=x", "puzzle=1"]).plugins
    assert compose_overrides(EvaluateConfig, ["plugins=[]", "checkpoint=x"]).plugins == []


def test_the_options_of_an_optimizer_are_checked_by_its_class(tmp_path, monkeypatch):
    monkeypatch.chdir(write_plugins(tmp_path).parent)
    words = ["plugins=[mine/lion.py]", "optimizer=lion"]
    assert compose_overrides(PretrainConfig, [*words, "optimizer_options={beta2: 0.5}"]).optimizer == "lion"
    for word, message in (
        ("optimizer_options={beta3: 0.5}", "lion has no option beta3. Its options are"),
        ("optimizer_options={beta1: 2.0}", r"beta1 and beta2 are in \[0, 1\)"),
        ("optimizer=lino", "optimizer='lino' should be one of adam_.*, lion. For an opt.* add plugins="),
    ):
        with pytest.raises(ValueError, match=message):
            compose_overrides(PretrainConfig, [*words, word])
    with pytest.raises(ValueError, match="optimizer_options has no effect with optimizer=muon"):
        compose_overrides(PretrainConfig, ["optimizer=muon", "+optimizer_options={beta1: 0.5}"])


@pytest.mark.parametrize("state", [{}, {"step": 0}, {"step": torch.zeros(1)}])
def test_an_optimizer_into_whose_state_no_checkpoint_can_be_read_is_refused(monkeypatch, state):
    class Late(torch.optim.SGD):
        name = "late"

        def __init__(self, parameters, **options):
            super().__init__(parameters, momentum=0.0 if state else 0.9, **options)
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter].update(state)

    monkeypatch.setattr("optimizers.weights.find_optimizer", lambda _: Late)
    name = next(iter(state), "momentum_buffer")
    with pytest.raises(
        ValueError, match=f"^optimizer=late: a checkpoint cannot be read into its state '{name}'"
    ):
        state_numbers_per_weight(tiny_config())


def test_every_parameter_group_of_an_optimizer_gets_the_rate_of_the_step(monkeypatch):
    class Halves(torch.optim.SGD):
        def __init__(self, parameters, *, lr, weight_decay):
            first, *rest = parameters
            groups = [{"params": [first]}, {"params": rest, "weight_decay": 0.0}]
            super().__init__(groups[: 1 + bool(rest)], lr=lr, weight_decay=weight_decay)

        def step(self):
            assert all(settings["step"] == 0 for settings in self.param_groups)
            super().step()

    monkeypatch.setattr("optimizers.weights.find_optimizer", lambda _: Halves)
    weights = blank_state().weights
    weights.update_(0.25, step=1)
    (group,) = weights.groups
    assert [settings["lr"] for settings in group.optimizer.param_groups] == [0.25, 0.25]


def test_a_kind_of_a_plugin_is_a_kind(tmp_path, monkeypatch):
    monkeypatch.chdir(write_plugins(tmp_path).parent)
    assert "jigsaw" not in kind_names()
    metadata = dataclasses.replace(FACTS, augmentation="jigsaw")
    (mistake,) = metadata.mistakes()
    assert mistake.startswith("augmentation='jigsaw' is not one of arc, ")
    assert "If a plugin adds it, add plugins=[FILE]." in mistake
    with pytest.raises(
        ValueError, match=r"'jigsaw' is not a builder\. .* For a kind of yours, add --plugin FILE after"
    ):
        build_dataset("jigsaw", [])
    (mistake,) = metadata.mistakes()
    assert "If a plugin adds it, add --plugin FILE." in mistake
    with pytest.raises(ValueError, match=r"--plugin is before the name of a builder\. Pass one of arc"):
        build_dataset("--plugin", ["mine/jigsaw.py", "jigsaw"])
    load_plugins(["mine/jigsaw.py"])
    assert not list(metadata.mistakes())
    kind = find_kind(kind_names()[-1])
    assert kind.groups(None)[8:] == [[0, 4, 5, 8], [1, 2, 3, 6], [7, 10, 11, 15], [9, 12, 13, 14]]
    answer = np.array([2, 3, 4, 5, 4, 5, 2, 3, 3, 2, 5, 4, 5, 4, 3, 2])
    board = np.where(range(16), 1, answer)  # one given cell
    evaluator = kind.evaluator(Path("data/jigsaw"), metadata)  # by `accepts`
    is_valid = evaluator.are_valid(np.tile(board, (2, 1)), np.stack([answer, np.roll(answer, 1)]))
    assert is_valid.tolist() == [True, False]


def test_the_command_of_a_plugins_builder_has_the_plugin(tmp_path, monkeypatch):
    monkeypatch.chdir(write_plugins(tmp_path).parent)
    builder = {"name": "jigsaw", "arguments": {"generate": 5}}
    Path("manifest.json").write_text(json.dumps({"builder": builder}))
    load_plugins(["mine/jigsaw.py"])
    load_plugins(["mine/lion.py"])
    command = _build_command(Path(), name="data/jigsaw")
    options = "--output-dir data/jigsaw --plugin jigsaw.py --generate 5"
    assert command == f"python -m dataset.build jigsaw {options}"


@pytest.mark.slow
def test_a_run_of_a_model_resumes_and_is_evaluated_with_its_plugin_only(tmp_path, sudoku_folder):
    write_plugins(tmp_path)
    words = (*_GRU, *_OWN, f"data_path={sudoku_folder}", "checkpoint_path=run")
    complete_program("pretrain", *words, "max_steps=9", folder=tmp_path, world_size=2)
    words = (words[0].replace("]", ",mine/spoken.py]"), *words[1:])
    complete_program("pretrain", *words, folder=tmp_path, world_size=2)
    run = tmp_path / "run"
    assert logged_rows(run)[-1]["train/lm_loss"] < logged_rows(run)[0]["train/lm_loss"]
    starts = [json.loads(line) for line in (run / "starts.jsonl").read_text().splitlines()]
    files = ["plugin_gru/gru.py", "plugin_spoken/spoken.py"]
    assert [list(start["plugins"]) for start in starts] == [files[:1], files]
    refused = run_program("evaluate", "checkpoint=run", folder=tmp_path, world_size=1)
    assert refused.statuses == [1]
    assert refused.error_lines == [
        "error: run/step_32/config.yaml: the model 'gru' is defined by a plugin. If you trust the plugin, "
        "add 'plugins=[mine/gru.py,mine/spoken.py]'."
    ]
    complete_program("evaluate", "checkpoint=run", "plugins=[mine/gru.py]", folder=tmp_path)
    shared = ("push", "--plugin", "mine/gru.py", "run", "owner/gru", "--dry-run", "shared")
    complete_program("share/__main__", *shared, folder=tmp_path, world_size=None)
    card = (tmp_path / "shared" / "README.md").read_text()
    assert re.search(
        r"\npython pretrain.py --config-dir FOLDER arch=gru .* 'plugins=\[gru.py, spoken.py\]'", card
    )
    assert "\npython evaluate.py 'plugins=[gru.py]' checkpoint=hf://owner/gru " in card
    assert (
        "\nThese commands need plugins: `gru.py`. The training used plugins: `gru.py`, `spoken.py`. " in card
    )
    shared_run = json.loads((tmp_path / "shared" / "config.json").read_text())["run"]
    assert shared_run["plugins"] == ["gru.py"]
    with pytest.raises(ValueError, match=r"model 'gru' is defined by a plugin.* add 'plugins=\[gru.py\]'"):
        find_checkpoint(tmp_path / "shared")
    with pytest.raises(ValueError, match="is defined by a plugin"):
        find_checkpoint(run)
    assert "gru" not in architectures()


def test_a_logger_of_a_plugin_gets_the_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(write_plugins(tmp_path).parent)
    load_plugins(["mine/spoken.py"])
    loggers = Loggers(LoggedRun(tiny_config(checkpoint_path=".", loggers=["spoken"]), range(9)))
    loggers.log(3, {"eval/all/exact_accuracy": 0.25})
    loggers.close()
    assert capsys.readouterr().out == "After 3 of 9 steps, the model solves 25%.\nThe run is over.\n"


def test_updates_of_lion_are_those_of_a_loop_in_float64(tmp_path, monkeypatch):
    monkeypatch.chdir(write_plugins(tmp_path).parent)
    load_plugins(["mine/lion.py"])
    (lion,) = plugins.defined("OPTIMIZER")
    torch.manual_seed(0)
    weight, gradients = torch.randn(7, requires_grad=True), torch.randn(3, 7)
    expected, momentum = weight.detach().double(), torch.zeros(7, dtype=torch.float64)
    rule = lion([weight], lr=0.1, weight_decay=0.5)
    for gradient in gradients:
        weight.grad = gradient.clone()
        rule.step()
        expected = expected * (1 - 0.05) - 0.1 * (0.9 * momentum + 0.1 * gradient.double()).sign()
        momentum = 0.99 * momentum + 0.01 * gradient.double()
    torch.testing.assert_close(weight.detach().double(), expected, rtol=1e-5, atol=1e-6)
    # A dry run counts one number for each weight, and two for AdamW.
    config = tiny_config(optimizer="lion", optimizer_options={"beta2": 0.98})
    assert state_numbers_per_weight(config) == 1
    assert state_numbers_per_weight(tiny_config(optimizer="adamw")) == 2
