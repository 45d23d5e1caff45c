# SPDX-License-Identifier: Apache-2.0
"""What a small draft head costs in acceptance by where its row list comes from, and why; fp32, writes a JSON.

Every place of every answer is drafted once with the full head. Of each draft row it keeps the tokens that beat the answer's: with
a list, the row is right where the answer's token is listed and none of those is. So any list can be walked over the answers.

    python tests/reference/measure_head_rows.py --target T --draft D --prompts a.jsonl ... --store STORE.pkl --out OUT.json

Counted answers (bfloat16, vLLM) are those to prompts that are not walked over. ``--store`` keeps both for another run.
"""

import argparse
import json
import os
import pickle
import pydoc_data.topics
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from measure_cheaper_drafter import answers, with_layers
from measure_compact import provenance
from transformers import AutoTokenizer

from vllm_dflash.reference.decode import load_pair
from vllm_dflash.token_frequency import TokenCounts, count, coverage, expected_coverage, merge_order, ranked

HELD_OUT, WALKED, COUNTED = 24, 6, 110  # prompts of a file: not counted, walked over, counted
COUNTED_TOKENS, WALKED_TOKENS = 192, 96
TEMPERATURES = (0.0, 0.7)
SHARE = 32768 / 151936  # rows of the default small head in the vocabulary of an 8B model
MOST = 200  # tokens that beat the answer's; with more of them a row counts as wrong
SERVED = (8_000, 32_000, 80_000)


def split(path: Path) -> tuple[list[str], list[str]]:
    """(walked over, counted) prompts of a file; the first are spread over it."""
    turns = [json.loads(line)["turns"][0] for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    held = {i * len(turns) // HELD_OUT for i in range(HELD_OUT)}
    rest = [turn for i, turn in enumerate(turns) if i not in held]
    return [turns[i] for i in sorted(held)][:WALKED], rest[:COUNTED]


def counted_answers(target: Path, prompts: list[str]) -> list[list[int]]:
    """Answers to ``prompts`` in a mixed order, half of them at each temperature."""
    from vllm import LLM, SamplingParams

    llm = LLM(str(target), dtype="bfloat16", enforce_eager=True, max_model_len=1024, max_num_seqs=96, enable_prefix_caching=False)
    random.Random(0).shuffle(prompts)
    found = []
    for number, temperature in enumerate(TEMPERATURES):
        how = SamplingParams(temperature=temperature, max_tokens=COUNTED_TOKENS, seed=1 if temperature else None)
        chats: Any = [[{"role": "user", "content": text}] for text in prompts[number::2]]
        found += [list(result.outputs[0].token_ids) for result in llm.chat(chats, how, use_tqdm=False)]
    random.Random(1).shuffle(found)
    return found


def drafted(target_folder: Path, draft_folder: Path, files: list[Path]) -> Iterator[dict[str, Any]]:
    """Per answer: temperature, ids, where the answer starts, and by number of known tokens what beats each of the next K."""
    target, draft = load_pair(target_folder, draft_folder)
    tokenizer = AutoTokenizer.from_pretrained(target_folder, padding_side="left")
    body, width = with_layers(draft, lambda _, linear: linear), draft.config.max_num_speculative_tokens
    for temperature in TEMPERATURES:
        for path in files:
            for ids, start in answers(target.model, tokenizer, split(path)[0], temperature, WALKED_TOKENS):
                target.reset()
                context = body.new_context()
                body.extend_context(context, target.forward(ids)[1])
                places = range(start + 1, len(ids) - width + 1)
                if not places:
                    continue
                states = torch.cat([body.block_logits(context.prefix(n - 1), ids[n - 1], width) for n in places])
                logits = states @ draft.head.T
                wanted = torch.tensor([ids[n + i] for n in places for i in range(width)])
                better = [row.nonzero()[:, 0].tolist() for row in logits > logits.gather(1, wanted[:, None])]
                beaten = [tokens if len(tokens) <= MOST else None for tokens in better]
                steps = {n: beaten[i * width : (i + 1) * width] for i, n in enumerate(places)}
                yield {"temperature": temperature, "ids": ids, "start": start, "steps": steps}


def walk(answer: dict[str, Any], rows: set[int], added: str) -> Iterator[tuple[int, int, int, int, int]]:
    """Per step: accepted drafts; target tokens up to the full head's first wrong one, listed ones of them; right ones, listed."""
    ids, known = answer["ids"], answer["start"] + 1
    if added:
        rows = rows | set(ids[: answer["start"]])
    while known in answer["steps"]:
        if added == "prompt and output":
            rows |= set(ids[:known])
        beaten = answer["steps"][known]
        right = next((i for i, tokens in enumerate(beaten) if tokens or tokens is None), len(beaten))
        wanted = ids[known : known + min(right + 1, len(beaten))]
        agrees = [ids[known + i] in rows and tokens is not None and rows.isdisjoint(tokens) for i, tokens in enumerate(beaten)]
        accepted = next((i for i, good in enumerate(agrees) if not good), len(agrees))
        listed = [token in rows for token in wanted]
        yield accepted, len(wanted), sum(listed), right, sum(listed[:right])
        known += accepted + 1


def figures(found: list[dict[str, Any]], rows: set[int], added: str = "") -> dict[str, float]:
    """Acceptance length, and how many of the tokens that count the rows hold."""
    steps = [step for answer in found for step in walk(answer, rows, added)]
    accepted, wanted, listed, right, right_listed = (sum(column) for column in zip(*steps, strict=True))
    return {
        "acceptance_length": round(1 + accepted / len(steps), 4),
        "target_tokens_listed": round(listed / wanted, 4),
        "right_drafts_listed": round(right_listed / right, 4),
    }


def lists(order: list[int], text: TokenCounts, served: list[list[int]]) -> Iterator[tuple[str, TokenCounts]]:
    """(name, counts) of every list."""
    yield "merge order", TokenCounts()
    yield f"text of another kind, {text.total} tokens", text
    for least in SERVED:
        counts = TokenCounts()
        for answer in served:
            counts.add(answer)
            if counts.total >= least:
                break
        yield f"counted while serving, {counts.total} tokens", counts


def table(found: list[dict[str, Any]], order: list[int], text: TokenCounts, served: list[list[int]]) -> list[dict[str, Any]]:
    """One row per size, list and temperature."""
    rows_of_table = []
    by_heat = {heat: [answer for answer in found if answer["temperature"] == heat] for heat in TEMPERATURES}
    full = {heat: figures(group, set(order))["acceptance_length"] for heat, group in by_heat.items()}
    for num_rows in (32768, round(SHARE * len(order))):
        for name, counts in lists(order, text, served):
            rows = set(ranked(counts.times, order)[:num_rows])
            expected = expected_coverage(counts, order, num_rows) if counts.total else None
            for heat, group in by_heat.items():
                by_added = {added: figures(group, rows, added) for added in ("", "prompt", "prompt and output")}
                losses = {added: round(100 * (1 - f["acceptance_length"] / full[heat]), 2) for added, f in by_added.items()}
                entry = {"rows": num_rows, "list": name, "temperature": heat, **by_added[""], "loss_percent": losses[""]}
                entry |= {f"loss_percent_with_tokens_of_{a.replace(' ', '_')}": losses[a] for a in losses if a}
                said = count(answer["ids"][answer["start"] :] for answer in group).times
                entry |= {"output_tokens_listed": round(coverage(said, rows), 4), "expected_coverage": expected}
                rows_of_table.append(entry)
    return rows_of_table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    if options.store is not None and options.store.exists():
        served, found = pickle.loads(options.store.read_bytes())  # our own file
    else:
        served = counted_answers(options.target, [text for path in options.prompts for text in split(path)[1]])
        found = list(drafted(options.target, options.draft, options.prompts))
        if options.store is not None:
            options.store.write_bytes(pickle.dumps((served, found)))
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    merges = merge_order(json.loads((options.target / "tokenizer.json").read_text(encoding="utf-8")))
    order = list(dict.fromkeys([*merges, *range(len(tokenizer))]))
    # Documentation of Python: English prose about code, and none of the prompts' kinds.
    text = count(tokenizer.encode(page, add_special_tokens=False) for page in pydoc_data.topics.topics.values())
    results = table(found, order, text, served)
    report = {
        "what": "acceptance length with draft heads of some rows over the target's answers, bonus included, by the rows' origin",
        "answers": len(found),
        "max_new_tokens": WALKED_TOKENS,
        "vocabulary": len(order),
        "results": results,
        "provenance": provenance("tests/reference/measure_head_rows.py"),
    }
    options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
