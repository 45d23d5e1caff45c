# SPDX-License-Identifier: Apache-2.0
"""Greedy output with drafts is the output without, and perfect drafts are all accepted, on every path a request can take."""

K = 3


def replayed(engine, prompts, expected, **options):
    """Generate with perfect drafts; returns (drafted, accepted, outputs)."""
    engine.watch(prompts, replay=expected)
    tokens = len(expected[0])
    return engine.acceptance_of(lambda: engine.generate(prompts, tokens, **options))


def test_tokens_equal_no_speculation(engine, prompts, baseline):
    """Breaks if a draft can change the output at all."""
    engine.watch(prompts)
    assert engine.generate(prompts) == baseline(prompts)
    assert engine.counters()["num_drafts"] > 0
    assert engine.speculator.counters.eager > 0


def test_perfect_drafts_are_all_accepted(engine, prompts, baseline):
    """Breaks on any off-by-one in anchor, position or slot that a random draft never reaches."""
    expected = baseline(prompts[:1], 25)  # 1 token from the prefill, then 6 steps of K + 1
    drafted, accepted, outputs = replayed(engine, prompts[:1], expected)
    assert outputs == expected
    assert (drafted, accepted) == (18, 18)


def test_perfect_drafts_in_a_mixed_batch(engine, prompts, baseline):
    """Requests of different lengths finish at different steps; breaks if one row reads another's state."""
    expected = baseline(prompts, 25)
    drafted, accepted, outputs = replayed(engine, prompts, expected)
    assert outputs == expected
    assert drafted == accepted == 4 * 6 * K


def test_proposals_do_not_depend_on_neighbours(engine, prompts):
    """Breaks if a request's draft context holds another request's keys, or misses its own."""
    together = engine.watch(prompts)
    engine.generate(prompts, 14)
    for number, prompt in enumerate(prompts):
        alone = engine.watch([prompt])
        engine.generate([prompt], 14)
        assert {a: d for (n, a), d in together.items() if n == number} == {a: d for (_, a), d in alone.items()}


def test_stop_token_inside_a_block(engine, prompts, baseline):
    """The block goes on behind the stop token; breaks if tokens behind it leak into the output."""
    expected = baseline(prompts[:1], 24)
    stop = expected[0][10]
    cut = expected[0].index(stop)
    _, _, outputs = replayed(engine, prompts[:1], expected, stop_token_ids=[stop])
    assert outputs[0] == expected[0][: cut + 1]


def test_up_to_the_end_of_the_context_window(engine, last_prompt, baseline):
    """Drafts run past max_model_len; breaks if one is stored into an earlier page, or generation stops short."""
    expected = baseline([last_prompt], 30)
    assert len(last_prompt) + len(expected[0]) == engine.runner.max_model_len
    _, _, outputs = replayed(engine, [last_prompt], expected)
    assert outputs == expected


def test_no_drafts_keep_the_draft_in_step(engine, prompts, baseline):
    """Steps with K = 0 store context KV without a query pass; breaks if later proposals lack those positions."""
    expected = baseline(prompts[:1], 18)
    always = engine.watch(prompts[:1])
    engine.generate(prompts[:1], 18)
    speculator = engine.speculator
    sometimes = engine.watch(prompts[:1])
    recorded, calls = speculator.propose, []

    def propose(*args, **kwargs):
        calls.append(0)
        if len(calls) % 3 == 0:
            return recorded(*args, **kwargs)
        return recorded(*args, **{**kwargs, "num_speculative_tokens": 0}).fill_(0)

    speculator.propose = propose
    before = speculator.counters.context_only
    assert engine.generate(prompts[:1], 18) == expected
    assert speculator.counters.context_only > before
    common = sometimes.keys() & always.keys()
    assert len(common) > 3
    assert {key: sometimes[key] for key in common} == {key: always[key] for key in common}


def test_second_set_attn_starts_clean(engine, prompts, baseline):
    """Memory profiling binds the speculator to a KV cache that is then replaced; breaks if anything keeps the first one."""
    expected = baseline(prompts, 13)
    runner, speculator = engine.runner, engine.speculator
    first = speculator.attention
    speculator.graphs = None  # as memory profiling leaves it
    runner.initialize_kv_cache(runner.kv_cache_config)
    assert speculator.attention is not first
    assert speculator.graphs is not None
    drafted, accepted, outputs = replayed(engine, prompts, expected)
    assert outputs == expected
    assert drafted == accepted
