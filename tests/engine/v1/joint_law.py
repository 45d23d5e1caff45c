# SPDX-License-Identifier: Apache-2.0
"""A target with a dozen tokens, unsure of each, and the exact law of the second and third token of its answers.

The first token comes from the prefill; the two after it are verified ones. A peaked target would reject nearly every draft of a
random draft model.
"""

import torch
from safetensors.torch import load_file
from tiny_models import Target, edit_weights

VOCAB = 12
SMALL = Target(vocab=VOCAB, hidden=48, heads=2, kv_heads=1, layers=3, mlp=64)
PROMPT = [3, 9, 7, 2]


def unsure_pair(write_pair, draft):
    """Folders of the target and of ``draft``."""
    folders = write_pair(draft, SMALL)
    head = load_file(folders[0] / "model.safetensors")["lm_head.weight"]
    return edit_weights(folders[0], {"lm_head.weight": 0.3 * head}), folders[1]


def joint_law(target, law):
    """P(second token, third token), float64 [V * V]; ``law(logits [V], outputs so far)`` gives P(next token) [V]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64).eval()

    def after(texts):
        with torch.no_grad():
            logits = model(torch.tensor([[*PROMPT, *text] for text in texts])).logits[:, -1]
        return torch.stack([law(row, list(text)) for row, text in zip(logits, texts, strict=True)])

    every = range(VOCAB)
    first, second = after([[]])[0], after([[a] for a in every])
    third = after([[a, b] for a in every for b in every]).view(VOCAB, VOCAB, VOCAB)
    return torch.einsum("a,ab,abc->bc", first, second, third).flatten()
