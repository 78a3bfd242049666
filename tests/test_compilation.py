"""When a run is compiled."""

import pytest
import torch

from models.compilation import should_compile

_CPU, _CUDA, _MPS = (torch.device(name) for name in ("cpu", "cuda", "mps"))


@pytest.fixture
def without_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)


@pytest.fixture
def with_compiler(monkeypatch, tmp_path):
    compiler = tmp_path / "some_c++"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "some_c++")


def test_auto_compiles_where_it_pays_off(with_compiler):
    assert not should_compile("auto", _CPU, num_steps=1500)  # the demo
    assert should_compile("auto", _CPU, num_steps=26_000)
    assert not should_compile("auto", _MPS, num_steps=10**9)


def test_without_a_compiler_auto_does_not_and_true_says_what_is_missing(without_compiler, monkeypatch):
    assert not should_compile("auto", _CPU, num_steps=10**9)
    assert not should_compile(False, _CPU, num_steps=10**9)
    with pytest.raises(ValueError, match=r"compile=true needs the C\+\+ compiler (g|clang)\+\+ .*install it"):
        should_compile(True, _CPU, num_steps=1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(ValueError, match="compile=true needs a C compiler, such as gcc"):
        should_compile(True, _CUDA, num_steps=1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not should_compile("auto", _CUDA, num_steps=10**9)
    with pytest.raises(ValueError, match="compile=true needs triton"):
        should_compile(True, _CUDA, num_steps=1)


def test_the_compiler_is_the_one_that_torch_would_take(with_compiler, monkeypatch, tmp_path):
    (tmp_path / "g++").symlink_to(tmp_path / "some_c++")
    monkeypatch.setenv("CXX", "nothing")
    with pytest.raises(ValueError, match=r"needs the C\+\+ compiler nothing"):
        should_compile(True, _CPU, num_steps=1)


def test_it_needs_the_headers_of_python(with_compiler, monkeypatch, tmp_path):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert not should_compile("auto", _CPU, num_steps=10**9)
    with pytest.raises(ValueError, match=r"needs Python\.h"):
        should_compile(True, _CPU, num_steps=1)


def test_it_is_as_asked_for(with_compiler):
    assert should_compile(True, _CPU, num_steps=1)
    assert not should_compile(False, _CPU, num_steps=10**9)
