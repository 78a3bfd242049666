"""Published checkpoints, as users have them: what is read, and what is refused in one line."""

import pytest
import torch
import yaml

from checkpointing.finding import find_checkpoint
from checkpointing.loading import load_trained_model
from tests.tiny import FACTS, tiny_arch, tiny_model


def test_a_published_checkpoint_of_one_latent_is_read(tmp_path):
    """Its file has L_init for the one latent, and no H_init."""
    model = tiny_model("trm_singlez")
    weights = {f"_orig_mod.model.inner.{name}": value for name, value in model.network.state_dict().items()}
    weights["_orig_mod.model.inner.L_init"] = weights.pop("_orig_mod.model.inner.H_init")
    torch.save(weights, tmp_path / "step_7")
    arch = tiny_arch("trm_singlez").model_dump()
    arch["name"] = "recursive_reasoning.trm_singlez@TinyRecursiveReasoningModel_ACTV1"
    config = {"arch": arch, "data_paths": ["data"], "global_batch_size": 8}
    (tmp_path / "all_config.yaml").write_text(yaml.safe_dump(config))
    checkpoint = find_checkpoint(tmp_path / "step_7")
    assert checkpoint.arch == tiny_arch("trm_singlez")
    loaded = load_trained_model(checkpoint, FACTS).network.state_dict()
    for name, value in model.network.state_dict().items():
        assert torch.equal(loaded[name], value), name


_CALL = b"\x80\x02cposix\nsystem\nX\x04\x00\x00\x00true\x85R."  # of posix.system, in a pickle


@pytest.mark.parametrize(
    "content", [b"", b"arch: 1\n", b"\x80\x02.", b"PK\x03\x04", b"\x80\x02]q\x00K\x01.", b"\x80\x04N.", _CALL]
)
def test_a_damaged_published_checkpoint_is_refused_in_one_line(tmp_path, content):
    """torch's unpickler has errors of many types, some without a word."""
    (tmp_path / "step_7").write_bytes(content)
    arch = tiny_arch("hrm").model_dump() | {"name": "hrm.hrm_act_v1@HierarchicalReasoningModel_ACTV1"}
    config = {"arch": arch, "data_path": "data", "global_batch_size": 8}
    (tmp_path / "all_config.yaml").write_text(yaml.safe_dump(config))
    refusal = r"step_7 (cannot be read \(.+\)\. Use another one\.|is not a state dict.*)$"
    with pytest.raises(ValueError, match=refusal) as raised:
        load_trained_model(find_checkpoint(tmp_path / "step_7"), FACTS)
    assert not [part for part in ("\n", "\x1b", "weights_only") if part in str(raised.value)]
    (tmp_path / "step_7").rename(tmp_path / "last.ckpt")
    for path in (tmp_path, tmp_path / "last.ckpt"):
        with pytest.raises(ValueError, match=r"last.ckpt was written by PyTorch Lightning"):
            find_checkpoint(path)


@pytest.mark.parametrize("name", [None, ["hrm"], {"x": 1}, "hrm", "os@system"])
def test_an_unknown_published_model_is_refused_in_one_line(tmp_path, name):
    (tmp_path / "step_7").touch()
    (tmp_path / "all_config.yaml").write_text(yaml.safe_dump({"arch": {"name": name, "loss": {}}}))
    with pytest.raises(
        ValueError, match=r"all_config.yaml: unknown architecture .*\. Known architectures: hrm\.hrm_act"
    ):
        find_checkpoint(tmp_path / "step_7")
    (tmp_path / "all_config.yaml").unlink()
    with pytest.raises(ValueError, match=r"all_config.yaml is missing$"):
        find_checkpoint(tmp_path / "step_7")
