# SPDX-License-Identifier: Apache-2.0
"""Two ranks on Model Runner V2: tensor parallel and an idle data-parallel rank draft and answer as one rank does."""

import copy

import pytest
import tiny_models
import torch
from ranks import LAUNCHED, run_ranks, stay_idle
from tiny_models import Draft, Target

from vllm_dflash.token_frequency import RowList

pytestmark = pytest.mark.slow  # five interpreted engines, two at a time: 110 CPU seconds

K = 3
TARGET = Target(kv_heads=1, vocab=161)  # fewer KV heads than ranks, a vocabulary that two ranks cannot halve
DRAFT = Draft(kv_heads=1, block=K + 1, draft_vocab=91, own_embedding=True)
PROMPTS = [[3, 17, 44, 8, 21], [60, 2, 9]]
TOKENS = 5


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    target = tiny_models.write_target(folder / "target", TARGET)
    return str(target), str(tiny_models.write_draft(folder / "draft", DRAFT, TARGET))


def serve(engine):
    """(answers, drafts) of one rank."""
    proposals = engine.watch(PROMPTS)
    answers = engine.generate(PROMPTS, TOKENS)
    # Behind the last token vLLM leaves drafting out, but only where no rank needs drafts.
    return answers, {(n, anchor): drafts for (n, anchor), drafts in proposals.items() if anchor < len(PROMPTS[n]) + TOKENS - 1}


def top_tokens(engine):
    """Drafts for random hidden states by the fused head over this rank's shard, and by plain logits of all ranks."""
    from dflash_kernels.draft_head import HeadWorkspace
    from vllm_dflash.engine.fused_head import FusedHead

    model = engine.speculator.model
    hidden = torch.randn(7, TARGET.hidden, generator=torch.Generator().manual_seed(1))
    weight, shard = model.lm_head.weight, model.lm_head.shard_indices
    workspace = HeadWorkspace(max_rows=64, vocab_rows=weight.shape[0], dtype=weight.dtype, device=weight.device)
    fused = FusedHead(model, workspace, shard.org_vocab_start_index, shard.num_org_elements)
    return fused(hidden).tolist(), model.compute_logits(hidden).argmax(dim=-1).tolist(), model.get_top_tokens(hidden).tolist()


def small_head(engine):
    """Drafts for random hidden states by a small head over both ranks, and the best logits among its tokens."""
    from vllm_dflash.engine.private_head import build_private_head

    model, config = engine.speculator.model, copy.copy(engine.speculator.vllm_config)
    # Only the first rank's list counts: the two may have read a file that another engine adds to.
    rows = 40 if torch.distributed.get_rank() == 0 else 30
    config.additional_config = {"vllm_dflash": {"draft_head": "small", "draft_head_rows": 40}}
    with pytest.MonkeyPatch.context() as patch:
        listed = RowList(tuple(range(rows, TARGET.vocab)), TARGET.vocab, "a test", calibrated=True)
        patch.setattr("vllm_dflash.engine.head_rows.find_rows", lambda *_: listed)
        private = build_private_head(model, config)
    known = set(model.draft_to_target.tolist())
    tokens = torch.tensor([token for token in range(40, TARGET.vocab) if token in known][:40]).sort().values
    hidden = torch.randn(7, TARGET.hidden, generator=torch.Generator().manual_seed(2))
    return private(hidden).tolist(), tokens[model.compute_logits(hidden)[:, tokens].argmax(dim=-1)].tolist()


def test_tensor_and_data_parallel(folders, engine_of):
    """Breaks if a shard, or a small head's part of it, is cut or put together wrongly.

    Or (by waiting) if an idle step takes part in fewer collectives.
    """
    single = serve(engine_of(*folders))
    engine_class = engine_of.__self__
    engine_class.close()

    def sharded(rank):
        engine = engine_class(*folders, **LAUNCHED, tensor_parallel_size=2)
        return serve(engine), top_tokens(engine), small_head(engine)

    def idle(rank):
        engine = engine_class(*folders, **LAUNCHED, data_parallel_size=2)
        return stay_idle(engine.llm, 1) if rank else serve(engine)

    first, second = run_ranks(2, sharded)
    served, steps = run_ranks(2, idle)
    assert first == second
    assert first[0] == served == single
    assert steps >= TOKENS / (K + 1)
    fused, logits, gathered = first[1]
    assert fused == logits == gathered
    private, best = first[2]
    assert private == best
    assert len(set(best)) > 2
