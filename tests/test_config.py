"""The config: published defaults, every YAML composes, and earlier configs mean what they meant."""

import collections
import itertools
import re

import pytest
import yaml

import evaluate
import pretrain
from config.architecture import architectures
from config.compose import compose_config
from config.files import FOLDER, fill_defaults, load_defaults
from config.messages import _entries, check_data_folders
from config.programs import EvaluateConfig, SolveConfig
from config.schema import PretrainConfig, keys_that_may_change, validate_config
from models import network_class
from models.network import Network
from tests.ranks import REPOSITORY
from tests.tiny import tiny_config
from training.run_config import compose_run

_EXPERIMENTS = sorted(path.stem for path in (REPOSITORY / "config" / "experiment").glob("*.yaml"))


def _compose(*overrides: str, schema=PretrainConfig):
    return compose_config(schema, overrides)


def test_bytes_that_the_locale_cannot_decode_are_named(monkeypatch):
    monkeypatch.setenv("LC_ALL", "C")
    line = r"^cannot read 'run_name=\\udcc3\\udca9' in the encoding .* \(LC_ALL=C\). Set LC_ALL=C.UTF-8"
    with pytest.raises(ValueError, match=line):
        compose_config(PretrainConfig, ["run_name=\udcc3\udca9"])


def test_published_defaults():
    config = _compose()
    published = {"data_path": ["data/arc-aug-1000"], "global_batch_size": 768, "seed": 0, "max_steps": None}
    published |= {"epochs": 100000, "eval_interval": 10000, "checkpoint_every_eval": True, "log_interval": 10}
    published |= {"lr": 1e-4, "lr_min_ratio": 1.0, "lr_warmup_steps": 2000, "beta1": 0.9, "beta2": 0.95}
    published |= {"weight_decay": 0.1, "puzzle_emb_lr": 1e-2, "puzzle_emb_weight_decay": 0.1}
    assert {name: getattr(config, name) for name in published} == published
    arch = {"name": "hrm", "hidden_size": 512, "num_heads": 8, "expansion": 4, "puzzle_emb_ndim": 512}
    arch |= {"H_cycles": 2, "L_cycles": 2, "H_layers": 4, "L_layers": 4}
    arch |= {"halt_max_steps": 16, "eval_halt_max_steps": None, "halt_exploration_prob": 0.1}
    arch |= {"pos_encodings": "rope", "rope_theta": 10000.0, "rms_norm_eps": 1e-5}
    loss = {"loss_type": "stablemax_cross_entropy", "halting_weight": 0.5}
    ours = {"gradient_cycles": 0, "mlp_t": False, "conv": "none", "no_ACT_continue": False, "damping": 1.0}
    ours |= {"puzzle_emb_len": 0, "q_target": "exact", "init_noise": 0.0, "state_noise": 0.0}
    loss |= {"label_smoothing": 0.0, "supervision_decay": 1.0}
    for part, known in ((config.arch, arch | ours), (config.arch.loss, loss)):  # others may come
        assert {name: getattr(part, name) for name in known} == known


def test_the_command_of_the_field():
    words = ("data_path=data/sudoku-extreme-1k-aug-1000", "epochs=20000", "eval_interval=2000", "lr=1e-4")
    words += ("puzzle_emb_lr=1e-4", "weight_decay=1.0", "puzzle_emb_weight_decay=1.0", "evaluators=[sudoku]")
    assert _compose(*words) == _compose("experiment=sudoku_extreme")


@pytest.mark.slow
@pytest.mark.parametrize("experiment", _EXPERIMENTS)
def test_every_experiment_composes_and_can_be_overridden(experiment):
    words = ("arch.hidden_size=96", "arch.num_heads=4", "seed=5")
    config = _compose(f"experiment={experiment}", *words)
    assert (config.arch.hidden_size, config.seed) == (96, 5)


@pytest.mark.parametrize("experiment", _EXPERIMENTS)
def test_every_experiment_says_what_to_expect_and_leans_on_one_other(experiment):
    folder = REPOSITORY / "config" / "experiment"
    header, _, rest = (folder / f"{experiment}.yaml").read_text().partition("\n\n")
    assert header.startswith("# @package _global_\n")
    for word in ("Command:", "Data:", "Hardware:"):
        assert word in header, word
    bases = re.findall(r"^  - (?!_self_|override)(\S+)$", header + rest, re.MULTILINE)
    assert ("# Like " in header) == bool(bases), "what differs from the base"
    for base in bases:
        assert not re.findall(r"^  - (?!override|{)", (folder / f"{base}.yaml").read_text(), re.MULTILINE)


@pytest.mark.slow
def test_runs_of_an_experiment_are_a_group_unless_they_have_another():
    groups = {("experiment=demo",): "demo", ("experiment=demo", "wandb_group=mine"): "mine", (): None}
    for given, group in groups.items():
        assert compose_run(["data_path=.", *given]).wandb_group == group


@pytest.mark.slow
def test_every_arch_has_its_values_its_types_and_its_network():
    names = {path.stem for path in (REPOSITORY / "config" / "arch").glob("*.yaml")}
    assert names == set(architectures())
    for name in names:
        arch = _compose(f"arch={name}").arch
        assert arch.name == name
        assert arch == type(arch)(**load_defaults(f"arch/{name}")), "the same without Hydra"
        network = network_class(name)
        assert issubclass(network, Network)
        assert network.__module__ == f"models.{name}"


# Keys with a meaning of their own in some models.
_MEAN_SOMETHING_ELSE = {
    *("H_cycles", "L_cycles", "gradient_cycles", "num_layers", "pos_encodings", "dropout"),
    *("halt_max_steps", "eval_halt_max_steps", "halt_exploration_prob", "puzzle_emb_ndim", "q_target"),
}


def test_keys_that_models_share_have_one_comment():
    """A key with the same values in several models has the same meaning, except for keys of recursion."""
    comments = collections.defaultdict(set)
    for name, schema in architectures().items():
        for key, _, comment, _ in _entries(FOLDER / "arch" / f"{name}.yaml"):
            field = schema.model_fields[key.partition(".")[0]]
            if key not in _MEAN_SOMETHING_ELSE:
                comments[key, str(field.annotation), str(field.metadata)].add(comment)
    assert {key: texts for key, texts in comments.items() if len(texts) > 1} == {}


def test_old_configs_with_a_gate_are_of_infiloop():
    gated = {**load_defaults("arch/trm"), "update": "gate", "hidden_size": 64}
    filled = fill_defaults({"arch": gated})["arch"]
    assert validate_config(architectures()["infiloop"], filled).hidden_size == 64
    assert fill_defaults({"arch": gated | {"update": "plain"}})["arch"]["name"] == "trm"
    one_state = {**load_defaults("arch/trm"), "single_z": True, "hidden_size": 64}
    one_state = fill_defaults({"arch": one_state})["arch"]
    assert validate_config(architectures()["trm_singlez"], one_state).hidden_size == 64
    for wrong in ({"single_z": True}, {"name": "hrm"}):
        with pytest.raises(ValueError, match="^arch.update=gate or arch.single_z=true: only TRM"):
            fill_defaults({"arch": gated | wrong})


def test_puzzle_embedding_follows_the_hidden_size():
    assert _compose("arch.hidden_size=64").arch.puzzle_emb_ndim == 64
    assert _compose("arch.hidden_size=64", "arch.puzzle_emb_ndim=0").arch.puzzle_emb_ndim == 0


@pytest.mark.parametrize("schema", [PretrainConfig, EvaluateConfig, SolveConfig])
def test_help_shows_every_key_with_its_comment(capsys, schema):
    assert _compose("--help", "all", schema=schema) is None
    text = capsys.readouterr().out
    assert _compose("--help", "lrr=1", schema=schema) is None
    first = capsys.readouterr().out
    assert (first == text) == (schema is not PretrainConfig)
    assert f"{schema.YAML}.py [KEY=VALUE ...]" in text
    assert max(map(len, text.splitlines())) <= 110
    for key in schema.model_fields.keys() - {"arch"}:
        assert re.search(rf"^  {key}=\S+\s+\w", text, re.MULTILINE), key
    if schema is PretrainConfig:
        assert "  lr=1e-4                               peak learning rate of the dense weights" in text
        for name in architectures():
            assert f"arch={name}: " in text
            keys = load_defaults(f"arch/{name}").keys() - {"name", "loss"}
            for key in keys | {"loss.halting_weight", "loss.label_smoothing"}:
                assert re.search(rf"^  arch.{key}=\S+\s+\w", text, re.MULTILINE), key
        for experiment in _EXPERIMENTS:
            assert f"\n  experiment={experiment} " in text or f"\n  experiment={experiment}\n" in text


def test_help_has_the_keys_that_people_use_and_more_on_request(capsys):
    assert _compose("experiment=demo", "--help") is None
    text = capsys.readouterr().out
    assert len(re.findall(r"^  \w+=\S+ +\w", text, re.MULTILINE)) == 25
    assert len(text.splitlines()) <= 70
    topics = {"arch=fprm": "  arch.forward_dtype=", "arch.H_cycles": "trm", "lr": "peak"}
    all_but_ldt = ", ".join(sorted(architectures().keys() - {"ldt"}))
    topics |= {"hidden_size": "ldt:\n  arch.hidden_size=128"}
    topics |= {"arch.loss": f"{all_but_ldt}:\nThe loss\n  arch.loss.loss_type="}
    for topic, part in topics.items():
        assert _compose("--help", topic) is None
        assert part in capsys.readouterr().out
    assert _compose("--help", "experiment=demo") is None
    assert capsys.readouterr().out.startswith("# @package _global_\n# A small HRM that learns 4x4 Sudoku")
    assert _compose("--help", "experiment") is None
    listed = capsys.readouterr().out
    assert all(f"\n  experiment={name}" in listed for name in _EXPERIMENTS)
    with pytest.raises(ValueError, match="unknown key 'keep_bst'. Run --help all"):
        _compose("--help", "keep_bst")
    with pytest.raises(ValueError, match="--help arch=hmr: config/arch has no hmr"):
        _compose("--help", "arch=hmr")


def test_the_composed_config_can_be_shown(capsys):
    assert _compose("--cfg", "job", "arch=trm", "raw=true") is None
    shown = yaml.safe_load(capsys.readouterr().out)
    assert (shown["arch"]["name"], shown["arch"]["puzzle_emb_len"], shown["raw"]) == ("trm", 16, True)


@pytest.mark.parametrize(
    ("name", "defaults"),
    [
        ("hrm", {"no_ACT_continue": False, "gradient_cycles": 0, "puzzle_emb_len": 0}),
        ("trm", {"no_ACT_continue": True, "gradient_cycles": 1, "puzzle_emb_len": 16}),
    ],
)
def test_what_a_config_leaves_out_has_the_published_value(name, defaults):
    """Public code and older runs do not have every key, and have others, which are dropped where off."""
    defaults |= {"q_target": "exact", "mlp_t": False, "forward_dtype": "bfloat16", "rms_norm_eps": 1e-5}
    whole = load_defaults(f"arch/{name}") | {"hidden_size": 64}
    arch = {key: value for key, value in whole.items() if key not in defaults}
    arch["loss"] = {"loss_type": "softmax_cross_entropy", "halting_weight": 2.0}
    filled = fill_defaults({"arch": arch | {"old": 0.0}, "lr": 3.0, "of_old": [], "on": True})
    loss = whole["loss"] | arch["loss"]
    assert {"label_smoothing": 0.0, "supervision_decay": 1.0}.items() <= loss.items()
    assert filled["arch"] == arch | defaults | {"loss": loss}
    assert (filled["optimizer"], filled["ema"], filled["lr"]) == ("adam_atan2", None, 3.0)
    assert filled.keys() & {"data_path", "of_old", "on"} == {"on"}


def test_keys_that_may_change_on_resume():
    may_change = keys_that_may_change(PretrainConfig)
    assert {"max_steps", "device", "run_name", "data_path", "step_timeout_seconds"} <= may_change
    assert not {"arch", "lr", "seed", "ema", "curriculum", "sync_dtype", "global_batch_size"} & may_change
    assert not {"halting", "local_steps", "outer_lr", "outer_momentum"} & may_change


@pytest.mark.parametrize("schema", [PretrainConfig, EvaluateConfig])
def test_published_programs_names_of_keys_are_taken(schema):
    more = ["checkpoint=x"] if schema is EvaluateConfig else []
    if schema is PretrainConfig:
        words = ("arch=trm_singlez", "ema=True", "+load_checkpoint=x", "freeze_weights=True", "+run_name=r")
        config = _compose(*words)
        assert (config.arch.name, config.ema, config.init_from) == ("trm_singlez", 0.999, "x")
        assert (config.train_only, config.run_name) == ("puzzle_embeddings", "r")
    config = _compose("data_paths=[a,b]", "eval_save_outputs=[preds]", *more, schema=schema)
    assert (config.data_path, config.save_outputs) == (["a", "b"], ["preds"])
    with pytest.raises(ValueError, match="unknown key 'eval_raw'"):
        _compose("eval_raw=true", *more, schema=schema)


def test_mistakes_of_runs_from_python_start_nothing():
    for run in (pretrain.run, evaluate.run):
        with pytest.raises(ValueError, match="lr_minimum"):
            run(["data_path=.", "lr_minimum=1"])
        is_text = (
            r"^the overrides are a text, 'experiment=demo'. Pass a list, such as \['experiment=demo'\].$"
        )
        with pytest.raises(ValueError, match=is_text):
            run("experiment=demo")
    with pytest.raises(ValueError, match="checkpoint: evaluate.run returns"):
        evaluate.run(["checkpoint=[one,two]"])


def test_a_puzzle_on_the_command_line_is_any_text():
    """Hydra would read numbers, lists and mappings in it."""
    for text in ("0012", "1..4 .... .... 4..1", "S #\n##G", '{"train": []}', "a=b", "null", ""):
        config = _compose(f"puzzle={text}", "steps=3", schema=SolveConfig)
        assert (config.puzzle, config.steps) == (text, 3)


@pytest.mark.slow
def test_names_and_paths_are_texts_as_typed(monkeypatch, tmp_path):
    """YAML and Hydra would take some for numbers, others for their own grammar."""
    monkeypatch.setenv("HOME", "/home/me")
    texts = ["1234_51", "12345_1", "007", "1e5", "12e4567", "2026", "0x1F", "true", "on", "12:30", "1.50"]
    for text, name in itertools.pairwise(text for text in texts if ":" not in text):
        words = (f"+wandb_group={text}", f"run_name={name}", f"data_path=[{','.join(texts)}]")
        config = _compose(*words)
        assert (config.wandb_group, config.run_name, config.data_path) == (text, name, texts)
    (tmp_path / "experiment").mkdir()
    for number, text in enumerate(("12345_1", "1e5", "0x1F", "12:30")):
        file = f"# @package _global_\nrun_name: 'a'\nwandb_group: \"{text}\"\nlr: 1e-3\n"
        (tmp_path / "experiment" / "2026_11.yaml").write_text(file)
        config = _compose("--config-dir", str(tmp_path), "experiment=2026_11")
        assert (config.wandb_group, config.lr) == (text, 1e-3)
        key = ("wandb_group", "run_name")[number % 2]
        # A text in a file needs quotes, if YAML reads something else.
        (tmp_path / "experiment" / "2026_11.yaml").write_text(f"# @package _global_\n{key}: {text}\n")
        with pytest.raises(ValueError, match=rf"^config: {key}=.* should be a text, in quotes$"):
            _compose("--config-dir", str(tmp_path), "experiment=2026_11")
    for typed, paths in {
        "data/lr=3,x": ["data/lr=3,x"], "d\u00e4ta/~#": ["d\u00e4ta/~#"], "'a,b'": ["a,b"], "a\\": ["a\\"],
        "['a,b',\"c]\"]": ["a,b", "c]"], "~/x": ["/home/me/x"], "[$HOME/x,b]": ["/home/me/x", "b"],
        "run_${seed}": ["run_0"], "a b": ["a b"],
    }.items():  # fmt: skip
        assert _compose(f"data_path={typed}").data_path == paths
    (stage,) = _compose("curriculum=[{data_path: ['~/x', $HOME/y], epochs: 1}]").curriculum
    assert stage.data_path == ["/home/me/x", "/home/me/y"]
    assert _compose("checkpoint_path=null").checkpoint_path is None


@pytest.mark.slow
def test_an_experiment_with_another_arch():
    """What it sets for its own arch is left out, with one notice; what is typed stays."""
    for experiment, arch, left_out in (
        ("demo", "trm", "arch.H_layers=2, arch.q_target=deferred."),
        ("serrm_sudoku", "hrm", "arch.dropout=0.2"),
        ("demo", "transformer", "arch.L_layers=2"),
    ):
        told, words = [], [f"experiment={experiment}", f"arch={arch}", "arch.hidden_size=96"]
        config = compose_config(PretrainConfig, words, notice=told.append)
        assert (config.arch.name, config.arch.hidden_size, len(told)) == (arch, 96, 1)
        assert left_out in told[0]
        stays = told[0].partition(" Values that stay: ")[2]
        assert ("arch.mlp_t=True" in stays) == (experiment == "demo")
    config = _compose("experiment=queens_8x8", "arch=flow", "arch.x0_std=1")  # TRM has no x0_std
    assert (config.arch.name, config.arch.x0_std) == ("flow", 1)
    with pytest.raises(ValueError, match=r"arch\.loss\.label_smoothing=7 should be less than 1"):
        _compose("experiment=ldt_sudoku", "arch=trm", "arch.loss.label_smoothing=7")  # LDT has no arch.loss


def test_the_missing_data_of_an_experiment_is_told_with_its_command(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for experiment, command in {
        "maze_hard": "maze-30x30-hard-1k --source hf://datasets/sapientinc/maze-30x30-hard-1k",
        "serrm_sudoku": "python -m dataset.build sudoku --output-dir data/sudoku-extreme-1k",
        "own_task": "python -m dataset.build pairs",
    }.items():
        with pytest.raises(ValueError, match=r"^data folder data/\S+ does not exist\. Build it: ") as caught:
            compose_run([f"experiment={experiment}"])
        assert command in str(caught.value)
    mine = r"^data folder data/mine .* The data of experiment=own_task: python"
    with pytest.raises(ValueError, match=mine):
        compose_run(["experiment=own_task", "data_path=data/mine"])
    with pytest.raises(ValueError, match="arc-mini does not exist. Build it: python .* --generate 40 "):
        check_data_folders(["data/arc-mini"], experiment=None)  # as of a model in weights/
    default = r"\(the default of data_path\) does .* experiment=demo, and first build its data: python"
    with pytest.raises(ValueError, match=default):
        compose_run(["arch=trm"])


def test_only_trainings_can_be_searched():
    for schema, advice in ((PretrainConfig, " Use search.py "), (EvaluateConfig, "$")):
        message = rf"'seed=1,2' has several values\. Write a list as \[1,2\]\.{advice}"
        with pytest.raises(ValueError, match=message):
            compose_config(schema, ["seed=1,2"])


def test_numbers_are_not_guessed_from_other_types():
    for key, value in (("seed", True), ("lr", "1e-4"), ("epochs", "10"), ("checkpoint_every_eval", 1)):
        with pytest.raises(ValueError, match=key):
            validate_config(PretrainConfig, {**tiny_config().model_dump(), key: value})
    assert tiny_config(lr=1).lr == 1.0
