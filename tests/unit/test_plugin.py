# SPDX-License-Identifier: Apache-2.0
"""`register()` in a process of its own, as vLLM starts them: what it changes, and that it never breaks vLLM."""

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
from draft_configs import zlab

PRELUDE = """
import dataclasses, functools, json, logging, os, pickle, sys, time
import vllm.config, vllm.envs
from vllm.config.speculative import SpeculativeConfig
lines = []
class Keep(logging.Handler):
    def emit(self, record):
        if "vllm-dflash" in record.getMessage():
            lines.append([record.levelname, record.getMessage()])
logging.getLogger("vllm").addHandler(Keep())
from vllm_dflash import hooks, plugin
from vllm_dflash.patching import MARK, Hook
result = {}
def outcome(name):
    import vllm.v1.worker.gpu.spec_decode as v2
    symbols = {"v2": v2.init_speculator, "config": SpeculativeConfig.hf_config_override}
    patched = [which for which, symbol in symbols.items() if hasattr(symbol, MARK)]
    twice = [which for which, symbol in symbols.items() if hasattr(getattr(symbol, MARK, None), MARK)]
    result[name] = {"patched": patched, "twice": twice, "lines": list(lines)}
    lines.clear()
"""

# The first three leave vLLM untouched, so that one process can show them all.
REGISTRATION = """
original = hooks.problems
def explode(moment=None):
    raise MemoryError("boom")
hooks.problems = explode
plugin.register()
hooks.problems = original
outcome("raises")

table = hooks.HOOKS
hooks.HOOKS = (dataclasses.replace(hooks.V2_FACTORY, params=("somebody", "else")), *table[1:])
plugin.register()
hooks.HOOKS = table
outcome("differs")

os.environ["VLLM_DFLASH"] = "0"
plugin.register()
del os.environ["VLLM_DFLASH"]
outcome("switched off")

before, start = set(sys.modules), time.process_time()
plugin.register()
plugin.register()
seconds = time.process_time() - start
outcome("registered")
result["registered"] |= {
    "seconds": seconds,
    "imported": sorted(set(sys.modules) - before),
    "variable known": "VLLM_DFLASH" in vllm.envs.environment_variables,
}

from transformers import Qwen3Config
override = pickle.loads(pickle.dumps(functools.partial(SpeculativeConfig.hf_config_override)))
def read(changes):
    try:
        return getattr(override(Qwen3Config.from_dict(changes)), "n_predict", None)
    except ValueError as error:
        return str(error)
result["n_predict"] = [read(config) for config in CONFIGS]
"""

USE = """
plugin.register()
import vllm.v1.worker.gpu_model_runner as runner
from vllm.v1.spec_decode.dflash import DFlashProposer
result["v1 name"] = {
    "replaced": runner.DFlashProposer is not DFlashProposer,
    "sees vLLM's own": isinstance(object.__new__(DFlashProposer), runner.DFlashProposer),
    "sees a stranger": isinstance(7, runner.DFlashProposer),
    "imported ours": "vllm_dflash.engine.proposer" in sys.modules,
}

hooks.HOOKS += (Hook(path="vllm.config:NotThere", moment="v1", why="", until=""),)
try:
    plugin._take_over("v1")
except RuntimeError as error:
    result["error"] = str(error)
from vllm import ModelRegistry
result["model registered"] = "vllm_dflash" in str(ModelRegistry.models.get("DFlashDraftModel"))
"""


def in_a_process(body: str) -> dict:
    """What `body` put into `result`."""
    env = {name: value for name, value in os.environ.items() if name not in ("VLLM_DFLASH", "VLLM_PLUGINS")}
    code = f"{PRELUDE}\n{body}\nprint('RESULT' + json.dumps(result))"
    env["VLLM_LOGGING_LEVEL"] = "INFO"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.rpartition("RESULT")[2])


CONFIGS = {
    "trained for 15": (zlab(), 15),
    "trained for 7": (zlab(block_size=8), 7),
    "stored by the writer": (zlab(n_predict=3), 3),
    "not a plain draft": (zlab(architectures=["DFlash2DraftModel"]), None),
    "unreadable": (zlab("dflash_config__mask_token_id"), "mask_token_id: missing"),
}


@pytest.fixture(scope="module")
def registration():
    """Outcomes of `register()` under four circumstances."""
    return in_a_process(f"CONFIGS = {[config for config, _ in CONFIGS.values()]!r}\n{REGISTRATION}")


@pytest.fixture(scope="module")
def use():
    """What happens once a runner is there."""
    return in_a_process(USE)


def test_the_entry_point_is_ours():
    """Breaks when the name that users type in VLLM_PLUGINS changes."""
    (found,) = entry_points(group="vllm.general_plugins", name="dflash")
    assert found.value == "vllm_dflash.plugin:register"


def test_register_never_raises(registration):
    """Breaks when an error of ours reaches vLLM, whose every command would fail."""
    assert registration["raises"]["patched"] == []
    ((level, line),) = registration["raises"]["lines"]
    assert level == "ERROR"
    assert "MemoryError: boom" in line


def test_a_hook_that_differs_gives_one_error_and_the_built_in(registration):
    """Breaks when a part is patched although another part does not fit, or nothing is said."""
    assert registration["differs"]["patched"] == []
    ((level, line),) = registration["differs"]["lines"]
    assert level == "ERROR"
    assert "init_speculator: expected parameters beginning with ('somebody', 'else')" in line
    assert "supported: 0.32 and 0.33" in line
    assert "vllm-dflash doctor" in line
    assert "vLLM's own DFlash stays in use" in line


def test_the_kill_switch_changes_nothing(registration):
    """Breaks when VLLM_DFLASH=0 still replaces something, or complains."""
    assert registration["switched off"] == {"patched": [], "twice": [], "lines": []}


def test_register_twice_patches_once_and_is_light(registration):
    """Breaks when registration wraps a wrapper, says anything, imports a runner or our engine, or takes long."""
    found = registration["registered"]
    assert found["patched"] == ["v2", "config"]
    assert found["twice"] == found["lines"] == []
    assert found["variable known"]
    heavy = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner", "vllm_dflash.engine", "vllm_dflash.reference")
    assert [module for module in found["imported"] if module.startswith(heavy)] == []
    assert found["seconds"] < 0.5


@pytest.mark.parametrize("number", range(len(CONFIGS)), ids=list(CONFIGS))
def test_k_defaults_to_what_the_draft_was_trained_for(registration, number):
    """Breaks when K must be given by hand, a stored K is overruled, a foreign draft is touched, or a draft without a mask
    token is found out only after its target was loaded. The override is pickled on its way: worker processes get it so."""
    expected = list(CONFIGS.values())[number][1]
    found = registration["n_predict"][number]
    assert found == expected or (isinstance(expected, str) and found.startswith(expected))


def test_the_v1_name_is_replaced_and_still_recognises_vllms_own(use):
    """Breaks when the runner's isinstance tests no longer see vLLM's own proposer, or import ours for other methods."""
    assert use["v1 name"] == {
        "replaced": True,
        "sees vLLM's own": True,
        "sees a stranger": False,
        "imported ours": False,
    }


def test_a_hook_that_differs_at_use_raises_and_registers_nothing(use):
    """Breaks when a runner whose base class changed is taken over all the same, or half of us stays registered."""
    assert "vllm.config:NotThere: expected this name, found none" in use["error"]
    assert "VLLM_DFLASH=0" in use["error"]
    assert not use["model registered"]
