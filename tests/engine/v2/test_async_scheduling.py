# SPDX-License-Identifier: Apache-2.0
"""Asynchronous scheduling, what GPUs run: the scheduler is a step ahead, and draft tokens never leave the device.

vLLM turns it off on CPUs. Its stand-ins for streams and events make every copy immediate, so it runs here when it is left on.
"""

import sys
from pathlib import Path

import pytest
import vllm

sys.path.append(str(Path(__file__).parents[1] / "v1"))  # reference_check
from reference_check import Reference

pytestmark = pytest.mark.skipif(vllm.__version__.startswith("0.32"), reason="dear under the interpreter; GPUs run newer vLLMs")

K = 3
CROWD = [[(7 * i * i + 3 * i + 11 + n) % 90 for i in range(n)] for n in (90, 60, 28)]  # each needs another page very soon


def test_a_step_ahead_with_preemption(allowed, target, draft, engine_of):
    """Breaks if our drafts make vLLM schedule step by step, or if a request that was pushed out with drafts under way resumes
    with them, or over holes in its context.
    """
    reference = Reference(Path(target), Path(draft))
    expected = reference.answers(CROWD, 12)
    engine = engine_of(target, draft, block_size=32, num_gpu_blocks_override=8)
    assert engine.llm.llm_engine.vllm_config.scheduler_config.async_scheduling
    assert type(engine.llm.llm_engine.engine_core.engine_core.scheduler).__name__ == "AsyncScheduler"
    proposals = engine.watch(CROWD)
    assert engine.generate(CROWD, 12) == expected
    metrics = {m.name: m.value for m in engine.llm.get_metrics() if hasattr(m, "value")}
    assert metrics["vllm:num_preemptions"] > 0
    texts = [p + e for p, e in zip(CROWD, expected, strict=True)]
    assert reference.wrong_drafts(texts, [(n, anchor + 1, d) for (n, anchor), d in proposals.items()]) == []
    engine.watch(CROWD[:1], replay=expected)
    drafted, accepted, outputs = engine.acceptance_of(lambda: engine.generate(CROWD[:1], 9))
    assert outputs == [expected[0][:9]]
    assert accepted == 6  # 1 token from the prefill, then two steps of K + 1
    assert drafted <= accepted + 2 * K  # steps that were under way when the answer was complete
