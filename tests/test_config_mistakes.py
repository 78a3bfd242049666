"""Every mistake in a config is one clear line, with the key."""

import sys

import pytest
from omegaconf import OmegaConf

from config.compose import compose_config
from config.files import load_defaults
from config.schema import (
    PretrainConfig,
    validate_config,
)


def _assert_one_line_with(parts: list[str], error: ValueError) -> None:
    message = str(error)
    assert "\n" not in message
    for part in parts:
        assert part in message


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
        (["lr=nan"], ["lr=nan", "finite"]),
        (["puzzle_emb_lr=inf"], ["puzzle_emb_lr=inf", "finite"]),
        (["beta1=1.0"], ["beta1=1.0", "less than 1"]),
        (["curriculum=[{epochs:3,eval_interval:2}]"], ["eval_interval 2 does not divide epochs 3"]),
        (["curriculum=[{epochs:0}]"], ["curriculum[0].epochs=0"]),
        (["curriculum=[{epochs:1,share:0.5}]"], ["a stage has either epochs"]),
        (["curriculum=[{H_cycles:1}]"], ["a stage has either epochs"]),
        (["curriculum=[{share:1.5}]"], ["curriculum[0].share=1.5"]),
        (["curriculum=[{share:0.5,eval_interval:1}]"], ["a share of the main training has its data_path"]),
        (["curriculum=[{share:0.5},{share:0.6}]"], ["shares of the main training add up to 1.1"]),
        (["curriculum=[{share:0.5},{epochs:1}]"], ["stages with epochs come before the shares"]),
        (["validation_fraction=1"], ["validation_fraction=1"]),
        (["curriculum=[{epochs:1,lr:2}]"], ["unknown key 'curriculum[0].lr'"]),
        (["curriculum=[{epochs:1,H_cycles:1}]", "arch=transformer"], ["arch=transformer has no cycles"]),
        (["curriculum=[{epochs:1,H_cycles:1}]", "arch.gradient_cycles=2"], ["less than gradient_cycles 2"]),
        (["arch=trm", "arch.H_layers=2"], ["arch.H_layers=2", "0"]),
        (["arch.num_layers=2"], ["'arch.num_layers'", "another arch"]),
        (["grad_clip_norm=nan"], ["grad_clip_norm=nan", "finite"]),
        (["step_timeout_seconds=inf"], ["step_timeout_seconds=inf", "finite"]),
        (["keep_best="], ["keep_best"]),
        (["resume="], ["resume"]),
        (["evaluators.x=1"], ["a list has no keys", "'x'", "is given as a whole"]),
        (["curriculum.3.share=1"], ["cannot use 'curriculum.3.share=1' (", "index"]),
        (["lr=["], ["'lr=['"]),
        (["lr"], ["lr"]),
        (["lr=${nope}"], ["nope"]),
        (["--multirun", "seed=1,2"], ["--multirun is refused", "search.py"]),
        (["seed=1,2"], ["'seed=1,2' has several values", "search.py"]),
        (["lr=tag(log,interval(1e-4,1e-2))"], ["has several values", "search.py"]),
    ],
    ids=lambda value: " ".join(value) if "=" in str(value) else "",
)
def test_mistakes_on_the_command_line_name_the_key(monkeypatch, overrides, parts):
    monkeypatch.setattr(sys, "argv", ["pretrain.py", *overrides])
    with pytest.raises(ValueError, match="^config") as caught:
        compose_config(PretrainConfig)
    _assert_one_line_with(parts, caught.value)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (["arch.name=trmm"], ["arch.name='trmm'", "'hrm', 'trm', 'urm', 'serrm', 'transformer'"]),
        (["arch.loss.loss_type=mse"], ["arch.loss.loss_type='mse'", "softmax_cross_entropy"]),
        (["arch.pos_encodings=ropee"], ["arch.pos_encodings='ropee'", "'rope'"]),
        (["arch.num_heads=7"], ["hidden_size 512", "num_heads 7"]),
        (["arch.hidden_size=24", "arch.num_heads=8"], ["even head dimension"]),
        (["lr=-1"], ["lr=-1", "greater than or equal to 0"]),
        (["weight_decay=-0.5"], ["weight_decay=-0.5"]),
        (["lr=fast"], ["lr='fast'", "number"]),
        (["epochs=1.5"], ["epochs=1.5", "integer"]),
        (["epochs=0"], ["epochs=0"]),
        (["eval_interval=3"], ["eval_interval 3", "epochs 100000"]),
        (["compile=maybe"], ["compile='maybe'", "'auto'", "boolean"]),
        (["cpu_threads=0"], ["cpu_threads=0"]),
        (["device=tpu"], ["device='tpu'", "'cuda'"]),
        (["ema=1.0"], ["ema=1.0", "less than 1"]),
        (["raw=true"], ["raw=true needs ema", "drop raw"]),
        (["wandb_log_checkpoints=best", "keep_best=null"], ["wandb_log_checkpoints=best needs keep_best"]),
        (["train_only=puzzle_embeddings", "sync=ddp"], ["leaves nothing for sync=ddp"]),
        (["train_only=puzzle_embeddings", "optimizer=muon"], ["leaves nothing for optimizer=muon"]),
        (["arch=urm", "arch.q_target=deferred"], ["q_target=deferred needs no_ACT_continue=false"]),
        (["arch=serrm", "arch.add_tokens=0"], ["give arch.add_tokens=4, or arch.puzzle_emb_ndim=1"]),
        (["arch=serrm", "save_outputs=[q_continue_logits]"], ["arch=serrm has no q_continue_logits"]),
        (
            ["arch=serrm", "arch.head_dim=6"],
            ["head_dim 6 is no multiple of 4, as pos_encodings=rope2d needs"],
        ),
        (["arch=serrm", "arch.dropout=1"], ["dropout"]),
        (["arch=trm", "arch.q_target=deferred"], ["q_target=deferred needs no_ACT_continue=false"]),
        (["train_only=puzzle_embeddings", "arch.puzzle_emb_ndim=0"], ["puzzle_emb_ndim is 0"]),
        (["puzzle_emb_sharding=rows", "arch.puzzle_emb_ndim=0"], ["rows needs", "puzzle_emb_ndim is 0"]),
        (["arch.gradient_cycles=3"], ["gradient_cycles 3", "H_cycles 2"]),
        (["data_path=[]"], ["data_path"]),
        (["gradient_accumulation_steps=0"], ["gradient_accumulation_steps=0", "greater than 0"]),
        (["grad_clip_norm=0"], ["grad_clip_norm=0", "greater than 0"]),
        (["activation_checkpointing=all"], ["activation_checkpointing='all'", "'block'"]),
        (["sync=fsdp"], ["sync='fsdp'", "'flat'", "'ddp'"]),
        (["bucket_size_mb=0"], ["bucket_size_mb=0", "'auto'", "greater than 0"]),
        (["sync_dtype=float16"], ["sync_dtype='float16'", "'bfloat16'"]),
        (["sync_dtype=bfloat16", "sync=ddp"], ["sync_dtype=bfloat16 needs sync=flat"]),
        (["local_steps=0"], ["local_steps=0", "greater than 0"]),
        (["outer_momentum=0.9"], ["outer_momentum=0.9 needs local_steps above 1"]),
        (["local_steps=8", "sync=ddp"], ["local_steps above 1 needs sync=flat"]),
        (["local_steps=8", "puzzle_emb_sharding=rows"], ["puzzle_emb_sharding=replicated"]),
        (["local_steps=8", "optimizer_sharding=ranks"], ["optimizer_sharding=ranks needs", "local_steps=1"]),
        (["local_steps=8", "train_only=puzzle_embeddings"], ["nothing for local_steps"]),
        (["replica_check_interval=0"], ["replica_check_interval=0"]),
        (["lr_scaling=cubic"], ["lr_scaling='cubic'", "'sqrt'"]),
        (["lr_reference_batch_size=0"], ["lr_reference_batch_size=0"]),
        (["backend=ucc"], ["backend='ucc'", "'nccl'", "'gloo'"]),
        (["backend=mpi"], ["backend: mpi is in no published build"]),
        (["init_timeout_seconds=0"], ["init_timeout_seconds=0"]),
        (["profile=maybe"], ["profile='maybe'", "boolean"]),
        (["checkpoint_interval=0"], ["checkpoint_interval=0"]),
        (["keep_checkpoints=1"], ["keep_checkpoints=1", "greater than or equal to 2"]),
        (["checkpoint_async=maybe"], ["checkpoint_async='maybe'", "boolean"]),
        (["run_name=a/b"], ["run_name='a/b'"]),
        (["save_outputs=[foo]"], ["save_outputs[0]='foo'", "preds"]),
    ],
    ids=lambda value: " ".join(value) if "=" in str(value) else "",
)
def test_mistakes_in_the_values_name_the_key(changes, parts):
    chosen = dict(change.split("=", 1) for change in changes)
    values = load_defaults("pretrain") | {"arch": load_defaults(f"arch/{chosen.pop('arch', 'hrm')}")}
    changed = OmegaConf.merge(values, OmegaConf.from_dotlist([f"{key}={chosen[key]}" for key in chosen]))
    with pytest.raises(ValueError, match="^config") as caught:
        validate_config(PretrainConfig, OmegaConf.to_container(changed))
    _assert_one_line_with(parts, caught.value)
