# SPDX-License-Identifier: Apache-2.0
"""A small draft head with rows for tokens in use, under CUDA graphs: whose rows they are, and what they hold."""

import torch
from gpu_engine import DRY, prompts_for

LISTED, GUESTS = 64, 512


def watch_shown(speculator, monkeypatch):
    """Set of the tokens that steps show the head from now on; it grows."""
    shown, refresh = set(), speculator.model.refresh_head

    def refresh_head(token_ids=None):
        if token_ids is not None:
            shown.update(token_ids.tolist())
        refresh(token_ids)

    monkeypatch.setattr(speculator.model, "refresh_head", refresh_head)
    return shown


def test_drafts_come_from_listed_rows_and_tokens_in_use(pair, engine_of, monkeypatch):
    """Breaks if a replayed graph does not see new guests, or a row is another token's after concurrent programs took places."""
    from dflash_kernels.fp8_linear import quantise_rows

    plugin = {"draft_head": "small", "draft_head_rows": LISTED, "draft_head_guests": GUESTS}
    engine = engine_of(*pair, plugin=plugin)
    shown = watch_shown(engine.speculator, monkeypatch)
    listed, guests_drafted = set(range(LISTED)), set()
    for count in (1, 5, 40):
        prompts = prompts_for(count)
        proposals = engine.watch(prompts)
        answers = engine.generate(prompts, 24)
        proposed = {token for drafts in proposals.values() for token in drafts}
        assert proposed <= listed | shown
        guests_drafted |= proposed - listed
        # What the target wrote is shown in the step that reads it, so all but an answer's last token.
        assert {token for text in (*prompts, *(answer[:-1] for answer in answers)) for token in text} <= shown
    assert guests_drafted
    private = engine.speculator.model.private_head
    guests = private._guests
    owners = guests._owner.cpu()
    taken = (owners >= 0).nonzero()[:, 0]
    assert len(taken) > (20 if DRY else 100)
    assert len(owners[taken].unique()) == len(taken)
    rows = private.num_listed + taken.to(private.weight.device)
    tokens = owners[taken].long().to(private.weight.device)
    assert torch.equal(rows + private.offsets[rows], tokens)
    whole = engine.runner.model.lm_head.weight[tokens]
    if DRY:  # CPUs keep the head's own numbers
        assert torch.equal(private.weight[rows], whole)
        return
    numbers, scales = quantise_rows(whole)
    torch.testing.assert_close(private.scale[rows], scales)
    different = private.weight[rows].float() != numbers.float()
    assert different.float().mean() < 1e-3  # a division that rounds otherwise, at the edge between two numbers
