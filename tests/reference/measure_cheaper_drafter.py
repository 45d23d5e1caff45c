# SPDX-License-Identifier: Apache-2.0
"""What fp8 weights, int8 weights and a small head cost a draft in acceptance, fp32 otherwise, at two temperatures; writes a JSON.

The target answers every prompt once per temperature. Each variant of the draft is then walked over the answer: where the decode
loop would stand, it drafts, and the drafts that agree with the answer are accepted. Drafts are argmax tokens, accepted with the
target's probability of them, which is how often a sampled answer agrees. The row list is counted on other prompts.

    python tests/reference/measure_cheaper_drafter.py --target T --draft D --prompts a.jsonl b.jsonl --out OUT.json
"""

import argparse
import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure_compact import provenance, read_prompts, summary
from torch import nn
from transformers import AutoTokenizer

from dflash_kernels.fp8_linear import quantise_rows
from vllm_dflash.reference.decode import load_pair
from vllm_dflash.reference.model import DFlashDraft
from vllm_dflash.token_frequency import count, coverage, merge_order, ranked

BLOCK = 128  # activations that share a scale
SHARE = 32768 / 151936  # rows of the default small head in the vocabulary of an 8B model


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """To e4m3 and back, one scale per row."""
    numbers, scales = quantise_rows(weight)
    return numbers.float() * scales[:, None]


class Fp8Linear(nn.Module):
    """Weights e4m3 per output channel, activations e4m3 per token and 128 values, as on a GPU with few rows."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = rounded(linear.weight.data), linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        blocks = nn.functional.pad(x, (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
        scales = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 448
        x = ((blocks / scales).to(torch.float8_e4m3fn).float() * scales).flatten(-2)[..., : x.shape[-1]]
        return nn.functional.linear(x, self.weight, self.bias)


class Int8Linear(nn.Module):
    """Weights int8 per output channel, activations int8 per token, both symmetric, as on a CPU."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scales = linear.weight.data.abs().amax(1, keepdim=True) / 127
        self.weight, self.bias = (linear.weight.data / scales).round() * scales, linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scales = x.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
        return nn.functional.linear((x / scales).round() * scales, self.weight, self.bias)


def with_layers(draft: DFlashDraft, change: Callable[[str, nn.Linear], nn.Module]) -> DFlashDraft:
    """A copy of `draft` with every linear layer changed and no head: `block_logits` then gives hidden states."""
    changed = copy.deepcopy(draft, {id(t): t for t in (draft.head, draft.embedding)})
    for module in list(changed.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, change(name, child))
    changed.head = torch.eye(draft.head.shape[1])
    return changed


def answers(model: Any, tokenizer: Any, prompts: list[str], temperature: float, length: int) -> list[tuple[list[int], int]]:
    """(prompt and answer as ids, length of the prompt) per prompt; an end token is the last one."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    batch = tokenizer.apply_chat_template(chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True)
    how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {"do_sample": False}
    rows = model.generate(**batch, max_new_tokens=length, **how)
    width, found = batch["input_ids"].shape[1], []
    for row, mask in zip(rows.tolist(), batch["attention_mask"], strict=True):
        prompt, answer = row[width - int(mask.sum()) : width], row[width:]
        end = answer.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in answer else len(answer)
        found.append((prompt + answer[:end], len(prompt)))
    return found


class Proposals:
    """Drafts of every (layers, head) at the places of one answer, each computed once."""

    def __init__(self, bodies: dict[str, DFlashDraft], heads: dict[str, torch.Tensor], rows: dict[str, torch.Tensor]) -> None:
        self._bodies, self._heads, self._rows = bodies, heads, rows

    def start(self, aux: torch.Tensor, ids: list[int]) -> None:
        self._ids, self._logits, self._contexts = ids, {}, {}
        for name, body in self._bodies.items():
            self._contexts[name] = body.new_context()
            body.extend_context(self._contexts[name], aux)

    def __call__(self, body: str, head: str, num_known: int, num_drafts: int) -> torch.Tensor:
        """Argmax drafts [K] behind `num_known` known tokens; a head that is a list of rows takes its logits from "fp8"."""
        numbers = "fp8" if head in self._rows else head
        key = (body, numbers, num_known)
        if key not in self._logits:
            context = self._contexts[body].prefix(num_known - 1)
            states = self._bodies[body].block_logits(context, self._ids[num_known - 1], num_drafts)
            self._logits[key] = nn.functional.linear(states, self._heads[numbers])
        rows = self._rows.get(head)
        return self._logits[key].argmax(-1) if rows is None else rows[self._logits[key][:, rows].argmax(-1)]


def walk(proposals: Proposals, body: str, head: str, ids: list[int], num_known: int, num_drafts: int) -> list[int]:
    """Accepted drafts of each step; the last step is one whose drafts can all be compared."""
    accepted = []
    while num_known + num_drafts <= len(ids):
        agrees = proposals(body, head, num_known, num_drafts) == torch.tensor(ids[num_known : num_known + num_drafts])
        accepted.append(int(agrees.long().cumprod(dim=0).sum()))
        num_known += accepted[-1] + 1
    return accepted


VARIANTS = {
    "checkpoint": ("plain", "plain"),
    "fp8": ("fp8", "plain"),
    "int8": ("int8", "plain"),
    "fp8, fp8 head of all rows": ("fp8", "fp8"),
    "fp8, small fp8 head, calibrated": ("fp8", "calibrated"),
    "fp8, small fp8 head, merge order": ("fp8", "merge order"),
}
"""Name -> (layers, head)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--per-file", type=int, default=18, help="every third one is for the row list")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.manual_seed(0)
    target, draft = load_pair(options.target, options.draft)
    tokenizer = AutoTokenizer.from_pretrained(options.target, padding_side="left")
    prompts = {path.stem: read_prompts(path, options.per_file) for path in options.prompts}
    counted = [
        (ids, start)
        for texts in prompts.values()
        for ids, start in answers(target.model, tokenizer, texts[::3], 0.0, 2 * options.max_new_tokens)
    ]
    order = merge_order(json.loads((options.target / "tokenizer.json").read_text(encoding="utf-8")))
    num_rows = round(SHARE * draft.head.shape[0])
    counts = count(ids for ids, _ in counted).times
    lists = {"merge order": order[:num_rows], "calibrated": ranked(counts, order)[:num_rows]}
    bodies = {
        "plain": with_layers(draft, lambda _, linear: linear),
        "fp8": with_layers(draft, lambda _, linear: Fp8Linear(linear)),
        "int8": with_layers(draft, lambda name, linear: linear if name == "fc" else Int8Linear(linear)),
    }
    num_drafts = draft.config.max_num_speculative_tokens
    rows_of = {name: torch.tensor(sorted(rows)) for name, rows in lists.items()}
    proposals = Proposals(bodies, {"plain": draft.head, "fp8": rounded(draft.head)}, rows_of)
    keys = {f"temperature {temperature:g}": temperature for temperature in options.temperatures}
    steps: dict[str, dict[str, list[list[int]]]] = {key: {name: [] for name in VARIANTS} for key in keys}
    seen: dict[str, list[list[int]]] = {key: [] for key in keys}
    for number, (stem, texts) in enumerate(prompts.items(), 1):
        for key, temperature in keys.items():
            held_out = [text for i, text in enumerate(texts) if i % 3]
            for ids, start in answers(target.model, tokenizer, held_out, temperature, options.max_new_tokens):
                target.reset()
                proposals.start(target.forward(ids)[1], ids)
                seen[key].append(ids[start:])
                for name, (body, head) in VARIANTS.items():
                    steps[key][name].append(walk(proposals, body, head, ids, start + 1, num_drafts))
            print(key, stem, {name: r["loss_percent"] for name, r in results(steps[key]).items()}, flush=True)  # noqa: T201 - a script that shows how far it is
        said = {key: count(s).times for key, s in seen.items()}
        covered = {key: {name: round(coverage(c, rows), 4) for name, rows in lists.items()} for key, c in said.items()}
        report = {
            "what": "acceptance length of one draft with smaller weights and heads over the target's answers, bonus included",
            "prompts": (options.per_file - len(range(0, options.per_file, 3))) * number,
            "max_new_tokens": options.max_new_tokens,
            "num_speculative_tokens": num_drafts,
            "head": {"rows": num_rows, "of": draft.head.shape[0], "tokens_counted": sum(counts.values()), "coverage": covered},
            "results": {key: results(found) for key, found in steps.items()},
            "provenance": provenance("tests/reference/measure_cheaper_drafter.py"),
        }
        options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")  # after every file: it takes a while


def results(found: dict[str, list[list[int]]]) -> dict[str, dict[str, float | int]]:
    """Summaries, with the loss against the checkpoint's own weights."""
    summaries = {name: summary([a for a in answers if a]) for name, answers in found.items()}
    base = summaries["checkpoint"]["acceptance_length"]
    return {name: s | {"loss_percent": round(100 * (1 - s["acceptance_length"] / base), 2)} for name, s in summaries.items()}


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
