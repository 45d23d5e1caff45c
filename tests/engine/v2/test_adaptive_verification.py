# SPDX-License-Identifier: Apache-2.0
"""``enable_adaptive_verification``: vLLM checks fewer drafts than were made, by their confidence.

vLLM decides by step times of its CUDA graphs, which a CPU has not: its manager gets a cost per checked token instead, and its
demand for graphs is lifted. Everything else is vLLM's and ours.
"""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "v1"))  # reference_check
from reference_check import Reference

K = 3


pytestmark = pytest.mark.slow  # a profile of step costs in Triton's interpreter: 60 CPU seconds


@pytest.fixture
def adaptive(target, draft, baseline, engine_of):  # the baseline's engine has to come first
    """An engine that checks about half of the drafts; ``engine.checked`` lists (drafts made, drafts checked) by step."""
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification as vllms

    from vllm_dflash.engine.draft_budget import prepare_cut

    def manager(**arguments):
        names = ("req_states", "query_start_loc", "num_bonus_tokens")
        built = vllms.AdaptiveVerificationManager(**{n: arguments[n] for n in names}, max_total_logits=1 << 20)
        built.cost_tables = np.zeros(1 << 10), 4.0 + np.arange(1 << 10)
        return built

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VllmConfig, "_validate_adaptive_verification", lambda _: None)
        patch.setattr(model_runner, "maybe_create_adaptive_verification_manager", manager)
        patch.setattr(model_runner, "resolve_adaptive_cudagraph_mode", lambda mode, **_: mode)
        patch.setattr(vllms, "_assign_draft_token_budget_compiled", pytest.fail)  # our cut stands for it
        engine = engine_of(target, draft, speculative={"enable_adaptive_verification": True})
        trimmer, engine.checked = engine.runner.adaptive_verification, []
        prepare_cut(trimmer)
        count = trimmer.get_num_tokens

        def get_num_tokens(tokens, drafts):
            total = count(tokens, drafts)
            made = sum(map(len, drafts.values()))
            engine.checked.append((made, total - sum(tokens.values()) + made))
            return total

        patch.setattr(trimmer, "get_num_tokens", get_num_tokens)
        yield engine


def test_unchecked_drafts_leave_no_trace(adaptive, target, draft, prompts, baseline):
    """Breaks if rows of drafts that were not checked count as context: later proposals would differ."""
    expected = baseline(prompts, 10)
    proposals = adaptive.watch(prompts)
    assert adaptive.generate(prompts, 10) == expected
    made, checked = np.array(adaptive.checked).sum(axis=0)
    assert 0 < checked < made
    texts = [p + e for p, e in zip(prompts, expected, strict=True)]
    log = [(number, anchor + 1, drafts) for (number, anchor), drafts in proposals.items()]
    assert Reference(Path(target), Path(draft)).wrong_drafts(texts, log) == []


def test_perfect_drafts_are_accepted_where_checked(adaptive, prompts, baseline):
    """Breaks if the anchor is looked for behind drafts that were cut off."""
    expected = baseline(prompts[:2], 13)
    adaptive.watch(prompts[:2], replay=expected)
    _, accepted, outputs = adaptive.acceptance_of(lambda: adaptive.generate(prompts[:2], 13))
    assert outputs == expected
    assert accepted == sum(checked for _, checked in adaptive.checked)


def test_confidences_of_a_batch_picked_in_chunks(adaptive, prompts):
    """vLLM reads confidences by batch row; breaks if a second chunk of requests writes over the first one's."""
    speculator, seen = adaptive.speculator, []
    record = type(adaptive.runner.adaptive_verification).record_confidences

    def run(chunk):
        seen.clear()
        speculator.draft_pass._chunk = chunk
        adaptive.generate(prompts, 3)
        return np.concatenate(seen)

    whole = speculator.draft_pass._chunk
    with pytest.MonkeyPatch.context() as patch:

        def watched(manager, confidence, batch):
            seen.append(confidence[: batch.num_reqs].numpy().copy())
            record(manager, confidence, batch)

        patch.setattr(type(adaptive.runner.adaptive_verification), "record_confidences", watched)
        patch.setattr(speculator.acceptance_estimator, "REFIT_INTERVAL", 1 << 30)  # the same coefficients for both
        at_once, in_chunks = run(whole), run(K)
    speculator.draft_pass._chunk = whole
    assert len(np.unique(at_once)) > len(prompts)
    np.testing.assert_allclose(in_chunks, at_once, rtol=1e-4)
