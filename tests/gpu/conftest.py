# SPDX-License-Identifier: Apache-2.0
"""Tests that need one CUDA device; engines run in this process, over tiny random models in bf16.

An engine takes a minute to start and asks are cheap, so ``engine_of`` hands out the current engine again to whoever wants the
same configuration: tests of one configuration stand next to each other, the most telling first.
"""

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent)]  # gpu_engine
import gpu_engine  # noqa: E402  # may choose Triton's interpreter, before anything imports Triton
from gpu_engine import Engine, K  # noqa: E402


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA device")  # evidence.py runs without the project's configuration


def pytest_collection_modifyitems(items):
    if gpu_engine.DRY:
        gpu_engine.interpreted._complete_interpreter()
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not gpu_engine.DRY:
                item.add_marker(gpu_engine.needs_gpu)


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    """Folders of a random target and draft whose shapes FlashAttention takes."""
    import tiny_models
    from tiny_models import Draft, Target

    target = Target(layers=4, hidden=256, heads=8, kv_heads=2, head_dim=64, mlp=512, vocab=2048)
    draft = Draft(layers=3, heads=8, kv_heads=2, head_dim=64, mlp=512, block=K + 1, layer_ids=(0, 1, 3))
    folder = tmp_path_factory.mktemp("pair")
    return (
        str(tiny_models.write_target(folder / "target", target)),
        str(tiny_models.write_draft(folder / "draft", draft, target)),
    )


@pytest.fixture(scope="session")
def engine_of():
    yield Engine.of
    Engine.close()
