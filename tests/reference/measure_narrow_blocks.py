# SPDX-License-Identifier: Apache-2.0
"""Acceptance by position for blocks of several lengths behind the same anchors, over greedy answers of the target, fp32; a JSON.

The answers are generated once. Behind every second of their tokens each width drafts a block, and the drafts that agree with the
answer are accepted. Same anchors: steps of a decode loop would not compare, as a wide block passes easy text in fewer of them.

    python tests/reference/measure_narrow_blocks.py --target T --draft D --widths 1,3,5,7 \
        --prompts a.jsonl b.jsonl --per-file 10 --out docs/results/narrow_blocks.json

A prompt file has one {"turns": [first user turn, ...]} per line.
"""

import argparse
import json
import math
import os
from pathlib import Path

import torch
from measure_compact import greedy_answers, provenance, read_prompts
from transformers import AutoTokenizer

from vllm_dflash.reference.decode import load_pair
from vllm_dflash.reference.model import DFlashDraft

EVERY = 2


def accepted_by_position(draft: DFlashDraft, aux: torch.Tensor, ids: list[int], num_known: int, width: int) -> torch.Tensor:
    """int64 [anchors, width]: 1 where a draft and all before it agree with the answer."""
    context = draft.new_context()
    draft.extend_context(context, aux)
    found = []
    for known in range(num_known, len(ids) - draft.config.max_num_speculative_tokens + 1, EVERY):
        drafts = draft.block_logits(context.prefix(known - 1), ids[known - 1], width).argmax(dim=-1)
        found.append((drafts == torch.tensor(ids[known : known + width])).long().cumprod(dim=0))
    return torch.stack(found) if found else torch.zeros(0, width, dtype=torch.int64)


def summary(accepted: torch.Tensor, full: torch.Tensor) -> dict[str, object]:
    """Of one width, [anchors, width], beside the widest of the same anchors: what its drafts lose, in log-odds by position."""
    width = accepted.shape[1]
    rates, usual = (_conditional(found[:, :width]) for found in (accepted, full))
    return {
        "anchors": len(accepted),
        "accepted_by_position": [round(rate, 4) for rate in accepted.double().mean(0).tolist()],
        "over_full": round(float(accepted.sum() / full[:, :width].sum()), 4),
        "lost_log_odds": [round(_odds(b) - _odds(a), 3) for a, b in zip(rates, usual, strict=True)],
    }


def _conditional(accepted: torch.Tensor) -> list[float]:
    """Acceptance of each position where all before it were accepted."""
    hits = accepted.sum(0).tolist()
    return [hit / max(before, 1) for hit, before in zip(hits, [len(accepted), *hits], strict=False)]


def _odds(rate: float) -> float:
    inside = min(max(rate, 1e-3), 1 - 1e-3)
    return math.log(inside / (1 - inside))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--widths", default="1,3,5,7")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--per-file", type=int, default=10)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    target, draft = load_pair(options.target, options.draft)
    full = draft.config.max_num_speculative_tokens
    widths = sorted({full, *map(int, options.widths.split(","))})
    tokenizer = AutoTokenizer.from_pretrained(options.target, padding_side="left")
    accepted: dict[str, dict[int, torch.Tensor]] = {}
    for path in options.prompts:
        of_file: dict[int, list[torch.Tensor]] = {width: [] for width in widths}
        prompts = read_prompts(path, options.per_file)
        for ids, num_prompt in greedy_answers(target.model, tokenizer, prompts, options.max_new_tokens):
            target.reset()
            aux = target.forward(ids)[1]
            for width in widths:
                of_file[width].append(accepted_by_position(draft, aux, ids, num_prompt + 1, width))
        accepted[path.stem] = {width: torch.cat(parts) for width, parts in of_file.items()}
        shares = {width: summary(each, accepted[path.stem][full])["over_full"] for width, each in accepted[path.stem].items()}
        print(path.stem, shares, flush=True)  # noqa: T201 - a script that shows how far it is
    together = {width: torch.cat([sets[width] for sets in accepted.values()]) for width in widths}
    report = {
        "what": "drafts accepted by position, blocks of several lengths behind the same anchors of greedy answers, fp32",
        "prompts_per_file": options.per_file,
        "max_new_tokens": options.max_new_tokens,
        "num_speculative_tokens": full,
        "results": {str(width): summary(together[width], together[full]) for width in widths},
        "by_file": {stem: {str(width): summary(sets[width], sets[full]) for width in widths} for stem, sets in accepted.items()},
        "provenance": provenance("tests/reference/measure_narrow_blocks.py"),
    }
    options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
