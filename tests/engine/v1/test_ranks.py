# SPDX-License-Identifier: Apache-2.0
"""Two ranks: tensor and data parallel engines draft and answer as one rank does, a pipeline is refused."""

import pytest
import vllm
from ranks import LAUNCHED, run_ranks, stay_idle
from tiny_models import Draft, Target

pytestmark = [
    pytest.mark.slow,  # two engines at a time, 90 CPU seconds
    pytest.mark.skipif(not vllm.__version__.startswith("0.32"), reason="newer vLLMs have no CPU build that starts ranks"),
]

K = 3
TARGET = Target(kv_heads=1, vocab=161, layers=4)  # fewer KV heads than ranks, a vocabulary that two ranks cannot halve
DRAFT = Draft(kv_heads=1, block=K + 1, layer_ids=(3, 0))  # a head of its own, and a reduced one: tests/engine/v2/test_ranks.py
TOKENS, LIMIT = 8, 64
BATCHES = [[[1, 40, 50, 22], [9, 8, 7]], [list(range(60, 60 + LIMIT - TOKENS))]]  # the last one fills its context


def serve(engine):
    """(answers, drafts) of one rank."""
    patch = pytest.MonkeyPatch()
    log, top = engine.record(patch), engine.proposer.model.get_top_tokens

    def get_top_tokens(rows):
        assert len(rows) > 0  # vLLM's CPU operator for gathering over ranks divides by it
        return top(rows)

    patch.setattr(engine.proposer.model, "get_top_tokens", get_top_tokens)
    return [engine.generate(prompts, TOKENS) for prompts in BATCHES], sorted(log)


@pytest.fixture(scope="module")
def folders(write_pair):
    return write_pair(DRAFT, TARGET)


@pytest.fixture(scope="module")
def single(folders, engine_of):
    """(answers, drafts) of an engine with one rank."""
    return serve(engine_of(*folders, max_model_len=LIMIT))


@pytest.fixture
def two_ranks(folders, single, engine_of):
    """Results of ``work(rank, engine)`` on two ranks of an engine with these options."""

    def run(work, **options):
        engine_of.shut_down()
        return run_ranks(2, lambda rank: work(rank, engine_of.engine(*folders, **LAUNCHED, max_model_len=LIMIT, **options)))

    return run


def test_tensor_parallel(two_ranks, single):
    """Breaks if a shard of the draft, of its context KV or of a vocabulary is cut or put together wrongly.

    Or if a step at the end of the context, with an anchor and no room behind it, goes to the head with no rows.
    """
    assert two_ranks(lambda _, engine: serve(engine), tensor_parallel_size=2) == [single, single]


def test_an_idle_data_parallel_rank(two_ranks, single):
    """Breaks (by waiting for ever) if a step takes part in fewer collectives because it has no requests, or none to draft for."""
    served, steps = two_ranks(lambda rank, engine: stay_idle(engine.llm, 2) if rank else serve(engine), data_parallel_size=2)
    assert steps >= TOKENS / (K + 1)
    assert served == single


def test_a_pipeline_is_refused(folders):
    """Breaks if it ends in vLLM's "no attribute 'drafter'" on the first stage."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_dflash.engine.pair import resolve_draft

    speculative = {"method": "dflash", "model": str(folders[1])}
    arguments = EngineArgs(str(folders[0]), speculative_config=speculative, pipeline_parallel_size=2, skip_tokenizer_init=True)
    with pytest.raises(ValueError, match=r"pipeline_parallel_size: found 2; .* needs 1"):
        resolve_draft(arguments.create_engine_config())
