# SPDX-License-Identifier: Apache-2.0
"""The watchdog and the self-check in a running V1 engine: what they count, when they speak, and what they say."""

import functools
import itertools
import logging
import re

import pytest
import torch
from faults import EXACT_FAULTS, Swap
from tiny_models import VOCAB, Draft

from vllm_dflash.acceptance import AcceptanceWatch, Class, Limits

K = 3


@pytest.fixture(scope="module")
def engine(write_pair, engine_of):
    return engine_of(
        *write_pair(Draft(layer_ids=(2, 0), block=K + 1)),
        speculative={"num_speculative_tokens": K},
        enable_prefix_caching=True,
        max_num_batched_tokens=64,
        additional_config={"vllm_dflash": {"self_check": True}},
    )


@pytest.fixture
def said():
    """Lines that the plugin logs during a test, with their levels."""
    lines, handler = [], logging.Handler()
    handler.emit = lambda record: lines.append((record.levelname, record.getMessage()))
    logger = logging.getLogger("vllm.plugins.dflash")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)


def texts(count, length, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(8, VOCAB, (length,), generator=generator).tolist() for _ in range(count)]


def scheduler_of(engine):
    return engine.llm.llm_engine.engine_core.engine_core.scheduler


def watch_anew(engine, monkeypatch, **limits):
    """A watchdog without history, with limits that a test reaches."""
    watch = functools.partial(AcceptanceWatch, limits=Limits(**limits))
    monkeypatch.setattr("vllm_dflash.engine.watchdog.AcceptanceWatch", watch)
    vars(scheduler_of(engine)).pop("_dflash_watchdog", None)


def test_self_check_by_option(engine, said):
    """The first cold request is checked; breaks if the option does nothing, or a sound engine is called faulty."""
    engine.generate(texts(2, 70, seed=1), 16)
    line = next(text for _, text in said if "self-check" in text)
    assert line.startswith(
        "DFlash self-check OK: hidden states finite; 9 of 9 drafts equal when drafted again, 9 when the K/V of"
    )
    assert "propose" not in vars(engine.proposer)  # and costs nothing from here on


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("context of prompts not stored", "with the K/V of its context computed again"),
        ("K norm of the first layer in all layers", None),
        ("float16 overflows", "hidden states of target layers [2] hold NaN or infinity"),
        ("drafts that change with every pass", "run twice on the same inputs, 0 of 9 drafts are equal"),
    ],
)
def test_self_check_names_a_fault(fault, problem, engine, said):
    """Breaks if a damaged cache passes. What is wrong in every computation alike cannot be seen this way, only by acceptance."""
    from vllm_dflash.engine.watchdog_self_check import V1Steps, attach

    attach(engine.proposer, engine.proposer.vllm_config, V1Steps)
    with Swap() as swap:
        if fault == "float16 overflows":
            real = engine.proposer.propose

            def overflowing(**call):
                call["target_hidden_states"][:, -1] = float("inf")
                return real(**call)

            swap(engine.proposer, "propose", overflowing)
        elif fault == "drafts that change with every pass":
            pick, passes = engine.proposer._pick, itertools.count()
            swap(engine.proposer, "_pick", lambda *call: (pick(*call) + next(passes)) % VOCAB)
        else:
            EXACT_FAULTS[fault](engine, swap)
        engine.generate(texts(1, 40, seed=len(fault)), 16)
    vars(engine.proposer).pop("propose", None)  # the swap has put a check back that was through
    level, line = next(entry for entry in said if "self-check" in entry[1])
    assert (level, problem is None or problem in line) == ("INFO" if problem is None else "WARNING", True)


def params(max_tokens):
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


def test_a_request_that_starts_over_is_checked_from_there(engine, said, monkeypatch):
    """Preempted after a few steps; breaks if rows of its first life are taken for its context, or nobody marks it as resumed."""
    from vllm_dflash.engine.watchdog_self_check import V1Steps, attach

    watch_anew(engine, monkeypatch)
    attach(engine.proposer, engine.proposer.vllm_config, V1Steps)
    served, prompt = engine.llm.llm_engine, texts(1, 40, seed=8)[0]
    served.add_request("over again", {"prompt_token_ids": prompt}, params(20))
    for _ in range(4):
        served.step()
    served.reset_prefix_cache(reset_running_requests=True)
    while served.has_unfinished_requests():
        served.step()
    (line,) = (text for _, text in said if "self-check" in text)
    rows = int(re.search(r"OK: .* K/V of (\d+) tokens", line).group(1))
    assert 40 <= rows <= 40 + 20
    bits = set(scheduler_of(engine).__dict__["_dflash_watchdog"].watch._cells)
    assert bits == {0, int(Class.RESUMED)}


def test_a_request_that_begins_with_cached_tokens_is_not_checked(engine, said):
    """Breaks if the check goes on without the hidden states of those tokens."""
    from vllm_dflash.engine.watchdog_self_check import V1Steps, attach

    prompt = texts(1, 70, seed=9)
    engine.generate(prompt, 1)
    attach(engine.proposer, engine.proposer.vllm_config, V1Steps)
    engine.generate(prompt, 16)
    vars(engine.proposer).pop("propose")
    assert [text for _, text in said if "self-check" in text] == []


def test_a_fault_of_the_watchdog_ends_itself_only(engine, said, monkeypatch):
    """Breaks if an exception of a statistic reaches vLLM's scheduler, or is told with every step."""
    watch_anew(engine, monkeypatch)
    monkeypatch.setattr("vllm_dflash.engine.watchdog.Watchdog.verified", lambda *_: 1 // 0)
    assert [len(answer) for answer in engine.generate(texts(2, 9, seed=10), 12)] == [12, 12]
    vars(scheduler_of(engine)).pop("_dflash_watchdog")
    warnings = [text for level, text in said if level == "WARNING"]
    assert len(warnings) == 1
    assert "the acceptance watchdog stopped (ZeroDivisionError" in warnings[0]


def test_a_useless_draft_is_named_once_with_figures_and_causes(engine, said, monkeypatch):
    """A random draft; breaks if nothing is counted, or if the warning comes again with every window."""
    watch_anew(engine, monkeypatch, window=64)
    _, grown = engine.counted(lambda: engine.generate(texts(32, 9, seed=2), 24))
    assert grown["num_accepted_tokens"] < 0.1 * grown["num_drafts"]
    warnings = [text for level, text in said if level == "WARNING"]
    assert len(warnings) == 1
    assert warnings[0].startswith("DFlash: acceptance length is 1.0")
    for part in (
        "near 1, so drafting costs more than it gives (below 1.20)",
        "of 16 requests",
        "trained for another target",
        "rope",
    ):
        assert part in warnings[0]


def test_every_verification_is_counted_in_its_class(engine, monkeypatch, prompts):
    """Breaks if the scheduler's figures are read wrongly, or if a prefix-cache hit or a long context is missed."""
    watch_anew(engine, monkeypatch, window=4)
    monkeypatch.setattr("vllm_dflash.engine.watchdog.LONG_CONTEXT", 70)
    cold = texts(3, 70, seed=3)
    _, grown = engine.counted(lambda: engine.generate(cold, 13) and engine.generate([*cold[:1], *prompts[:1]], 13))
    assert grown["prefix_cache_hits"] >= 32  # of two blocks; 0.32 recomputes the last one
    watch = scheduler_of(engine).__dict__["_dflash_watchdog"].watch
    seen = {None: watch._total} | watch._of_class
    counted = {
        of: (profile.verifications, sum(n * count for n, count in enumerate(profile.accepted))) for of, profile in seen.items()
    }
    assert grown["num_drafts"] - counted[None][0] < 4  # not yet judged
    assert grown["num_accepted_tokens"] >= counted[None][1]
    assert 8 <= counted[Class.CACHED][0] <= 12
    assert 0 < counted[Class.FEW][0] <= counted[None][0]  # the last request may end up alone
    assert 0 < counted[Class.LONG][0] < counted[None][0]  # the last request has fewer tokens
    assert counted[Class.RESUMED] == counted[Class.MANY] == (0, 0)


def test_bad_drafts_after_cache_hits_are_named_as_such(engine, said, monkeypatch):
    """Cold requests get perfect drafts, warm ones none; breaks if classes are judged by the mean of all requests."""
    cold = texts(30, 70, seed=4)
    answers = engine.generate(cold, 17)
    engine.llm.reset_prefix_cache()
    said.clear()
    watch_anew(engine, monkeypatch, window=48, requests=2, history=1)
    engine.generate(cold[:1], 1)
    first = engine.llm.request_counter.counter
    order = [n for round_ in range(1, 15) for n in (0, 2 * round_, 2 * round_ + 1)]  # one warm, two cold

    def replace(number, known, width):
        prompt = order[number - first]
        return answers[prompt][known - 70 :][:width] if prompt else [2] * width

    engine.record(monkeypatch, replace)
    for start in range(0, len(order), 3):
        engine.generate([cold[n] for n in order[start : start + 3]], 17)
    warnings = [text for level, text in said if level == "WARNING"]
    assert len(warnings) == 1
    assert warnings[0].startswith("DFlash: acceptance length after prefix-cache hits is 1.")
    assert "cached blocks that lack the draft's K/V" in warnings[0]


def test_switched_off_nothing_is_counted(engine, said, monkeypatch):
    """Breaks if the option is ignored."""
    watch_anew(engine, monkeypatch, window=16)
    monkeypatch.setattr(engine.proposer.vllm_config, "additional_config", {"vllm_dflash": {"watchdog": False}})
    engine.generate(texts(10, 5, seed=6), 20)
    assert said == []
