# SPDX-License-Identifier: Apache-2.0
"""A small draft head with rows for tokens in use, under CUDA graphs: whose rows they are, and what they hold."""

import torch
from gpu_engine import prompts_for

LISTED, GUESTS = 64, 512


def test_drafts_come_from_listed_rows_and_tokens_in_use(pair, engine_of):
    """Breaks if a replayed graph does not see new guests, or a row is another token's after concurrent programs took places."""
    from dflash_kernels.fp8_linear import quantise_rows

    plugin = {"draft_head": "small", "draft_head_rows": LISTED, "draft_head_guests": GUESTS}
    engine = engine_of(*pair, plugin=plugin)
    used, listed = set(), set(range(LISTED))
    for count in (1, 5, 40):
        prompts = prompts_for(count)
        proposals = engine.watch(prompts)
        answers = engine.generate(prompts, 24)
        used |= {token for text in (*prompts, *answers) for token in text}
        proposed = {token for drafts in proposals.values() for token in drafts}
        # The last step's tokens behind an answer's end were in use, too, and are not in it.
        assert len(proposed - listed - used) <= 0.02 * len(proposed)
        assert proposed & used - listed
    private = engine.speculator.model.private_head
    guests = private._guests
    owners = guests._owner.cpu()
    taken = (owners >= 0).nonzero()[:, 0]
    assert len(taken) > 100
    assert len(owners[taken].unique()) == len(taken)
    rows = private.num_listed + taken.to(private.weight.device)
    tokens = owners[taken].long().to(private.weight.device)
    assert torch.equal(rows + private.offsets[rows], tokens)
    numbers, scales = quantise_rows(engine.runner.model.lm_head.weight[tokens])
    torch.testing.assert_close(private.scale[rows], scales)
    different = private.weight[rows].float() != numbers.float()
    assert different.float().mean() < 1e-3  # a division that rounds otherwise, at the edge between two numbers
