# SPDX-License-Identifier: Apache-2.0
"""What a pair should answer and draft, by the plain-PyTorch reference."""

from vllm_dflash.reference.decode import block_proposals, load_pair, plain_decode


class Reference:
    """Expected answers and drafts of one pair of checkpoint folders."""

    def __init__(self, target, draft):
        self.target, self.draft = load_pair(target, draft)

    def answers(self, prompts, max_tokens):
        """Greedy answers without speculation."""
        return [plain_decode(self.target, prompt, max_tokens) for prompt in prompts]

    def wrong_drafts(self, texts, log):
        """Proposals in ``log`` that differ from the reference's: (request, known tokens, found, expected)."""
        wrong = []
        for number, text in enumerate(texts):
            mine = [(known, drafts) for n, known, drafts in log if n == number and known <= len(text)]
            width = max((len(drafts) for _, drafts in mine), default=0)
            if width:
                expected = block_proposals(self.target, self.draft, text, [known for known, _ in mine], width)
                pairs = zip(mine, expected, strict=True)
                wrong += [(number, known, found, e[: len(found)]) for (known, found), e in pairs if found != e[: len(found)]]
        return wrong
