"""The config: published defaults, every YAML composes, and every mistake in it is one clear line."""

import sys

import pytest

from config.architecture import HRMConfig
from config.compose import compose_config
from config.schema import EvaluateConfig, PretrainConfig, validate_config
from tests.ranks import REPOSITORY
from tests.tiny import tiny_arch, tiny_config

_EXPERIMENTS = sorted(path.stem for path in (REPOSITORY / "config" / "experiment").glob("*.yaml"))


def _compose(monkeypatch, *overrides: str, schema=PretrainConfig, name: str = "pretrain"):
    monkeypatch.setattr(sys, "argv", ["program.py", *overrides])
    return compose_config(schema, config_name=name)


def test_published_defaults(monkeypatch):
    config = _compose(monkeypatch)
    published = {
        "data_path": ["data/arc-aug-1000"],
        "global_batch_size": 768,
        "epochs": 100000,
        "eval_interval": 10000,
        "checkpoint_every_eval": True,
        "lr": 1e-4,
        "lr_min_ratio": 1.0,
        "lr_warmup_steps": 2000,
        "beta1": 0.9,
        "beta2": 0.95,
        "weight_decay": 0.1,
        "puzzle_emb_lr": 1e-2,
        "puzzle_emb_weight_decay": 0.1,
        "seed": 0,
        "save_outputs": [],
        "max_steps": None,
        "log_interval": 10,
    }
    assert {name: getattr(config, name) for name in published} == published
    assert config.arch == HRMConfig(
        name="hrm",
        hidden_size=512,
        num_heads=8,
        expansion=4,
        H_cycles=2,
        L_cycles=2,
        H_layers=4,
        L_layers=4,
        halt_max_steps=16,
        halt_exploration_prob=0.1,
        pos_encodings="rope",
        puzzle_emb_ndim=512,
        forward_dtype="bfloat16",
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
        loss={"loss_type": "stablemax_cross_entropy"},
        q_target="exact",
    )


def test_the_command_of_the_field(monkeypatch):
    config = _compose(
        monkeypatch,
        "data_path=data/sudoku-extreme-1k-aug-1000",
        "epochs=20000",
        "eval_interval=2000",
        "lr=1e-4",
        "puzzle_emb_lr=1e-4",
        "weight_decay=1.0",
        "puzzle_emb_weight_decay=1.0",
        "evaluators=[sudoku]",
    )
    assert config == _compose(monkeypatch, "experiment=sudoku_extreme")


@pytest.mark.parametrize("experiment", _EXPERIMENTS)
def test_every_experiment_composes_and_can_be_overridden(monkeypatch, experiment):
    config = _compose(
        monkeypatch, f"experiment={experiment}", "arch.hidden_size=96", "arch.num_heads=4", "seed=5"
    )
    assert (config.arch.hidden_size, config.seed) == (96, 5)


@pytest.mark.parametrize("experiment", ["arc1", "arc2", "maze_hard", "sudoku_extreme", "sudoku_full"])
def test_experiments_of_the_paper_have_its_target(monkeypatch, experiment):
    assert _compose(monkeypatch, "experiment=demo").arch.q_target == "deferred"
    assert _compose(monkeypatch, f"experiment={experiment}").arch.q_target == "exact"


@pytest.mark.parametrize("experiment", _EXPERIMENTS)
def test_every_experiment_says_what_to_expect(experiment):
    header = (REPOSITORY / "config" / "experiment" / f"{experiment}.yaml").read_text().split("\n\n")[0]
    assert header.startswith("# @package _global_\n")
    for word in ("Command:", "Data:", "Hardware:", "Measured:"):
        assert word in header, word


def test_every_arch_composes(monkeypatch):
    for path in (REPOSITORY / "config" / "arch").glob("*.yaml"):
        assert _compose(monkeypatch, f"arch={path.stem}").arch.name == path.stem


def test_every_key_has_a_comment():
    for path in [*(REPOSITORY / "config").glob("*.yaml"), *(REPOSITORY / "config" / "arch").glob("*.yaml")]:
        for line in path.read_text().splitlines():
            is_key = line[:1].isalpha() and ":" in line and not line.rstrip().endswith(":")
            assert not is_key or "#" in line or line.startswith("name:") or "loss_type" in line, (
                f"{path}: {line}"
            )


def test_puzzle_embedding_follows_the_hidden_size(monkeypatch):
    assert _compose(monkeypatch, "arch.hidden_size=64").arch.puzzle_emb_ndim == 64
    assert _compose(monkeypatch, "arch.hidden_size=64", "arch.puzzle_emb_ndim=0").arch.puzzle_emb_ndim == 0


def test_config_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        tiny_config().lr = 1.0


def test_help_is_no_config(monkeypatch, capsys):
    assert _compose(monkeypatch, "--help") is None
    assert "puzzle_emb_lr" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["lrr=1"], ["unknown key 'lrr'", "'lr'"]),
        (["arch.hiden_size=8"], ["unknown key 'arch.hiden_size'", "'arch.hidden_size'"]),
        (["arch.loss.loss_typ=x"], ["'arch.loss.loss_typ'", "'arch.loss.loss_type'"]),
        (["hidden_size=8"], ["unknown key 'hidden_size'", "'arch.hidden_size'"]),
        (["+foo=1"], ["unknown key 'foo'"]),
        (["+arch.foo=1"], ["unknown key 'arch.foo'"]),
        (["~lr"], ["'lr' is missing"]),
        (["arch=hrmm"], ["arch/hrmm", "hrm"]),
        (["experiment=dem"], ["experiment/dem", "demo"]),
        (["arch.name=trmm"], ["arch.name='trmm'", "'hrm', 'trm', 'transformer'"]),
        (["arch.loss.loss_type=mse"], ["arch.loss.loss_type='mse'", "softmax_cross_entropy"]),
        (["arch.pos_encodings=ropee"], ["arch.pos_encodings='ropee'", "'rope'"]),
        (["arch.num_heads=7"], ["hidden_size 512", "num_heads 7"]),
        (["arch.hidden_size=24", "arch.num_heads=8"], ["even head dimension"]),
        (["lr=-1"], ["lr=-1", "greater than or equal to 0"]),
        (["lr=nan"], ["lr=nan", "finite"]),
        (["puzzle_emb_lr=inf"], ["puzzle_emb_lr=inf", "finite"]),
        (["weight_decay=-0.5"], ["weight_decay=-0.5"]),
        (["beta1=1.0"], ["beta1=1.0", "less than 1"]),
        (["lr=fast"], ["lr='fast'", "number"]),
        (["epochs=1.5"], ["epochs=1.5", "integer"]),
        (["epochs=0"], ["epochs=0"]),
        (["eval_interval=3"], ["eval_interval 3", "epochs 100000"]),
        (["compile=maybe"], ["compile='maybe'", "'auto'", "boolean"]),
        (["cpu_threads=0"], ["cpu_threads=0"]),
        (["device=tpu"], ["device='tpu'", "'cuda'"]),
        (["curriculum=[{epochs:3,eval_interval:2}]"], ["eval_interval 2 does not divide epochs 3"]),
        (["curriculum=[{epochs:0}]"], ["curriculum[0].epochs=0"]),
        (["curriculum=[{epochs:1,lr:2}]"], ["unknown key 'curriculum[0].lr'"]),
        (["curriculum=[{epochs:1,H_cycles:1}]", "arch=transformer"], ["arch=transformer has no cycles"]),
        (["curriculum=[{epochs:1,H_cycles:1}]", "arch.gradient_cycles=2"], ["less than gradient_cycles 2"]),
        (["ema=1.0"], ["ema=1.0", "less than 1"]),
        (["raw=true"], ["raw=true needs ema", "drop raw"]),
        (["train_only=puzzle_embeddings", "sync=ddp"], ["leaves nothing for sync=ddp"]),
        (["train_only=puzzle_embeddings", "optimizer=muon"], ["leaves nothing for optimizer=muon"]),
        (["arch=trm", "arch.q_target=deferred"], ["q_target=deferred needs no_ACT_continue=false"]),
        (["train_only=puzzle_embeddings", "arch.puzzle_emb_ndim=0"], ["puzzle_emb_ndim is 0"]),
        (["evaluators=[chess]"], ["evaluators[0]='chess'", "'sudoku'"]),
        (["arch=trm", "arch.H_layers=2"], ["arch.H_layers=2", "0"]),
        (["arch.num_layers=2"], ["'arch.num_layers'", "another arch"]),
        (["arch.gradient_cycles=3"], ["gradient_cycles 3", "H_cycles 2"]),
        (["data_path=[]"], ["data_path"]),
        (["gradient_accumulation_steps=0"], ["gradient_accumulation_steps=0", "greater than 0"]),
        (["grad_clip_norm=0"], ["grad_clip_norm=0", "greater than 0"]),
        (["grad_clip_norm=nan"], ["grad_clip_norm=nan", "finite"]),
        (["activation_checkpointing=all"], ["activation_checkpointing='all'", "'block'"]),
        (["sync=fsdp"], ["sync='fsdp'", "'flat'", "'ddp'"]),
        (["bucket_size_mb=0"], ["bucket_size_mb=0", "'auto'", "greater than 0"]),
        (["gradient_dtype=float16"], ["gradient_dtype='float16'", "'bfloat16'"]),
        (["gradient_dtype=bfloat16", "sync=ddp"], ["gradient_dtype=bfloat16 needs sync=flat"]),
        (["replica_check_interval=0"], ["replica_check_interval=0"]),
        (["lr_scaling=cubic"], ["lr_scaling='cubic'", "'sqrt'"]),
        (["puzzle_emb_lr_scaling=1"], ["puzzle_emb_lr_scaling=1", "'linear'"]),
        (["lr_reference_batch_size=0"], ["lr_reference_batch_size=0"]),
        (["backend=ucc"], ["backend='ucc'", "'nccl'", "'gloo'"]),
        (["init_timeout_seconds=0"], ["init_timeout_seconds=0"]),
        (["step_timeout_seconds=inf"], ["step_timeout_seconds=inf", "finite"]),
        (["profile=maybe"], ["profile='maybe'", "boolean"]),
        (["checkpoint_interval=0"], ["checkpoint_interval=0"]),
        (["keep_checkpoints=1"], ["keep_checkpoints=1", "greater than or equal to 2"]),
        (["keep_best="], ["keep_best"]),
        (["checkpoint_async=maybe"], ["checkpoint_async='maybe'", "boolean"]),
        (["resume="], ["resume"]),
        (["run_name=a/b"], ["run_name='a/b'"]),
        (["save_outputs=[foo]"], ["save_outputs[0]='foo'", "preds"]),
        (["lr=["], ["'lr=['"]),
        (["lr"], ["lr"]),
        (["lr=${nope}"], ["nope"]),
        (["--multirun", "seed=1,2"], ["--multirun"]),
    ],
    ids=lambda value: " ".join(value) if "=" in str(value) else "",
)
def test_mistakes_name_the_key(monkeypatch, overrides, parts):
    with pytest.raises(ValueError, match="^config") as caught:
        _compose(monkeypatch, *overrides)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_options_that_need_another_are_taken_with_it(monkeypatch):
    assert _compose(monkeypatch, "raw=true", "ema=0.9").raw


def test_old_names_of_keys_are_taken(monkeypatch):
    old = ("eval_save_outputs=[preds]", "eval_halting=act", "eval_raw=true", "ema=0.9")
    config = _compose(monkeypatch, *old)
    assert (config.save_outputs, config.halting, config.raw) == (["preds"], "act", True)
    config = _compose(monkeypatch, "checkpoint=x", old[0], schema=EvaluateConfig, name="evaluate")
    assert config.save_outputs == ["preds"]


def test_evaluation_needs_a_checkpoint(monkeypatch):
    with pytest.raises(ValueError, match="checkpoint=PATH is needed"):
        _compose(monkeypatch, schema=EvaluateConfig, name="evaluate")
    config = _compose(monkeypatch, "checkpoint=x", "data_path=[d]", schema=EvaluateConfig, name="evaluate")
    assert (config.checkpoint, config.data_path) == (["x"], ["d"])


def test_numbers_are_not_guessed_from_other_types():
    for key, value in (("seed", True), ("lr", "1e-4"), ("epochs", "10"), ("checkpoint_every_eval", 1)):
        with pytest.raises(ValueError, match=key):
            validate_config(PretrainConfig, {**tiny_config().model_dump(), key: value})
    assert tiny_config(lr=1).lr == 1.0


def test_positions_of_the_puzzle_embedding():
    assert [tiny_arch(puzzle_emb_ndim=ndim).puzzle_emb_positions for ndim in (0, 1, 32, 33)] == [0, 1, 1, 2]
    given = [tiny_arch("trm", puzzle_emb_ndim=ndim, puzzle_emb_len=3) for ndim in (0, 1, 96)]
    assert [arch.puzzle_emb_positions for arch in given] == [0, 3, 3]
    with pytest.raises(ValueError, match="puzzle_emb_ndim 97 does not fit into puzzle_emb_len 3"):
        tiny_arch("trm", puzzle_emb_ndim=97, puzzle_emb_len=3)


def test_cycles_with_gradient_are_among_the_cycles():
    with pytest.raises(ValueError, match="gradient_cycles 3 is more than H_cycles 2"):
        tiny_arch("hrm", gradient_cycles=3)
