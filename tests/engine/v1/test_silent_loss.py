# SPDX-License-Identifier: Apache-2.0
"""The suite notices lost acceptance: the assertion that the trained pair passes fails with each of these faults in its draft.

All of them leave the output as it is. Faults that cost a trained draft too little to be seen in a few hundred tokens (a layer
beside the right one, another rope theta, a shifted position) are in ``test_silent_loss_exact.py``.
"""

import pytest
from acceptance import assert_acceptance
from faults import ACCEPTANCE_FAULTS, Swap

from vllm_dflash.hooks import vllm_version

pytestmark = pytest.mark.demo
proven_once = pytest.mark.skipif(
    vllm_version().startswith("0.33"), reason="what a test notices does not depend on vLLM's version"
)

K, TOKENS = 3, 16
PROMPTS = (6, 7, 12, 16, 17)  # code, code, maths, maths, list
LEAST = 2.6  # clean 2.89; the mildest fault (context of a prompt's last chunk only) 2.39


@pytest.fixture(scope="module")
def served(engine_of):
    """(engine, prompts): one engine for all; prompts of 42 to 54 tokens are prefilled in chunks of at most 24."""
    from transformers import AutoTokenizer

    from vllm_dflash.demo_pair import prompts
    from vllm_dflash.demo_pair.prepare import prepare

    pair = prepare()
    tokenizer = AutoTokenizer.from_pretrained(pair.target)
    chats = ([{"role": "user", "content": prompts.PROMPTS[i].text}] for i in PROMPTS)
    engine = engine_of(
        pair.target,
        pair.draft,
        speculative={"num_speculative_tokens": K},
        max_model_len=256,
        kv_cache_memory_bytes=128 << 20,
        block_size=128,
        max_num_batched_tokens=24,
        enable_prefix_caching=False,
    )
    return engine, [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]


@pytest.fixture(scope="module")
def answers(served):
    """Answers of the clean engine, whose acceptance length is as it should be."""
    return assert_acceptance(*served, TOKENS, least=LEAST)


def test_clean(answers):
    """Breaks if any part of the trained draft is served wrongly enough to cost acceptance."""
    assert [len(answer) for answer in answers] == [TOKENS] * len(PROMPTS)


@proven_once
@pytest.mark.parametrize("fault", ACCEPTANCE_FAULTS)
def test_a_fault_fails_the_assertion_and_changes_nothing_else(fault, served, answers):
    """Breaks if the assertion above is too weak for this fault, or if a fault of the draft can reach the output."""
    engine, prompts = served
    with Swap() as swap:
        ACCEPTANCE_FAULTS[fault](engine, swap)
        with pytest.raises(AssertionError, match="acceptance length"):
            assert_acceptance(engine, prompts, TOKENS, least=LEAST, answers=answers)


def test_all_faults_are_gone(served, answers):
    """Breaks if a fault stays behind, so that the ones after it prove nothing."""
    assert_acceptance(*served, TOKENS, least=LEAST, answers=answers)
