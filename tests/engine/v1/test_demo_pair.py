# SPDX-License-Identifier: Apache-2.0
"""The real trained pair: greedy answers unchanged, and acceptance as good as the reference loop's."""

import pytest
from reference_check import Reference

pytestmark = pytest.mark.demo

QUESTIONS = (
    "What is the capital of Peru?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "List five fruits and their colours.",
    "Give me a recipe for pancakes with steps.",
)
K, TOKENS = 7, 48


@pytest.fixture(scope="module")
def pair():
    from vllm_dflash.demo_pair.prepare import prepare

    return prepare()


@pytest.fixture(scope="module")
def prompts(pair):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(pair.target)
    chats = ([{"role": "user", "content": q}] for q in QUESTIONS)
    return [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]


def test_answers_and_acceptance_length(pair, prompts, engine_of):
    """Breaks if any layer of a *trained* draft is served wrongly: random drafts cannot show lost acceptance."""
    from vllm_dflash.reference.decode import speculative_decode

    options = {"max_model_len": 512, "kv_cache_memory_bytes": 256 << 20, "block_size": 128, "max_num_batched_tokens": 512}
    plain = engine_of(pair.target, **options).generate(prompts, TOKENS)
    engine = engine_of(pair.target, pair.draft, speculative={"num_speculative_tokens": K}, **options)
    answers, grown = engine.counted(lambda: engine.generate(prompts, TOKENS))
    assert answers == plain
    reference = Reference(pair.target, pair.draft)
    runs = [speculative_decode(reference.target, reference.draft, p, TOKENS, num_speculative_tokens=K) for p in prompts]
    assert [r.tokens for r in runs] == plain
    steps, accepted = sum(len(r.accepted) for r in runs), sum(sum(r.accepted) for r in runs)
    ours = 1 + grown["num_accepted_tokens"] / grown["num_drafts"]
    assert ours == pytest.approx(1 + accepted / steps, rel=0.005)
    assert ours > 2.2
