# SPDX-License-Identifier: Apache-2.0
"""The command that `vllm-dflash serve` becomes."""

import json
import sys

import pytest
from pair_folders import write_pair

from vllm_dflash.cli import machine
from vllm_dflash.cli.models import checked_pair
from vllm_dflash.cli.serve import is_given, server_command, split_target


def command(tmp_path, rest=(), k=None) -> list[str]:
    return server_command(checked_pair(*write_pair(tmp_path), k), list(rest))


def test_it_is_vllms_own_server_with_speculation(tmp_path):
    """Breaks when the server is anything but vLLM's, or K and draft get lost on the way."""
    found = command(tmp_path, ["--port", "8001"], k=7)
    assert found[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    assert found[found.index("--model") + 1] == str(tmp_path / "target")
    assert json.loads(found[found.index("--speculative-config") + 1]) == {
        "method": "dflash",
        "model": str(tmp_path / "draft"),
        "num_speculative_tokens": 7,
    }
    assert found[-2:] == ["--port", "8001"]


def test_k_defaults_to_what_the_draft_was_trained_for(tmp_path):
    """Breaks when the default is the block size."""
    found = command(tmp_path)
    assert json.loads(found[found.index("--speculative-config") + 1])["num_speculative_tokens"] == 15


def test_cpu_defaults_give_way_to_what_the_user_says(tmp_path, monkeypatch):
    """Breaks when a default overrides an option, in either spelling, or an environment variable."""
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    found = command(tmp_path)
    assert "--enforce-eager" in found
    assert found[found.index("--max-model-len") + 1] == "2048"
    assert found[found.index("--kv-cache-memory-bytes") + 1] == str(1 << 30)
    (tmp_path / "again").mkdir()
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    found = command(tmp_path / "again", ["--max_model_len=512", "--no-enforce-eager"])
    assert not {"--enforce-eager", "--max-model-len", "--kv-cache-memory-bytes"} & set(found)


def test_a_gpu_gets_vllms_defaults(tmp_path, monkeypatch):
    """Breaks when the CPU's small cache reaches a GPU."""
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)
    monkeypatch.setattr(machine, "version", lambda name: {"vllm": "0.33.0"}[name])  # no GPU build can be installed here
    found = command(tmp_path, ["--port", "1"])
    assert not [option for option in found if option.startswith(("--enforce", "--max-model", "--kv-cache"))]


@pytest.mark.parametrize(
    ("args", "target", "rest"),
    [([], None, []), (["t", "--port", "1"], "t", ["--port", "1"]), (["--port", "1"], None, ["--port", "1"])],
)
def test_target_is_the_first_argument(args, target, rest):
    """Breaks when the value of an option is taken for the target."""
    assert split_target(args) == (target, rest)


def test_is_given():
    """Breaks when vLLM's underscore spelling, or an equals sign, hides an option."""
    assert is_given("--max-model-len", ["--max_model_len=5"])
    assert is_given("--max-model-len", ["--max-model-len", "5"])
    assert not is_given("--max-model-len", ["--max-model-len-x", "5"])
