# SPDX-License-Identifier: Apache-2.0
"""Acceptance length of several copies of one draft over the same greedy answers of the target, fp32; writes a JSON.

The answers are generated once. Each draft is then walked over them step by step: where the decode loop would stand, it drafts,
and the drafts that agree with the answer are accepted. In fp32 that gives the loop's own counts (`test_decode.py` compares).

    python tests/reference/measure_compact.py --target T --draft bf16=D1 --draft int8=D2 \
        --prompts a.jsonl b.jsonl --per-file 10 --out docs/results/compact_draft.json

A prompt file has one {"turns": [first user turn, ...]} per line.
"""

import argparse
import datetime as dt
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from vllm_dflash.reference.decode import load_pair
from vllm_dflash.reference.model import DFlashDraft, load_draft


def read_prompts(path: Path, count: int) -> list[str]:
    turns = [json.loads(line)["turns"][0] for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [turns[i * len(turns) // count] for i in range(count)]


def without_folders(word: str) -> str:
    """Where files lie on this machine says nothing about the figures."""
    name, equals, path = word.rpartition("=")
    return name + equals + (Path(path).name if "/" in path else path)


def provenance(script: str = "tests/reference/measure_compact.py") -> dict[str, object]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    cpu = next((s for s in Path("/proc/cpuinfo").read_text().splitlines() if s.startswith("model name")), ": unknown")
    return {
        "versions": {name: version(name) for name in ("torch", "transformers", "vllm-dflash")},
        "command": " ".join(["python", script, *map(without_folders, sys.argv[1:])]),
        "commit": commit.stdout.strip() or "not committed yet",
        "date": dt.datetime.now(dt.timezone.utc).date().isoformat(),
        "hardware": {
            "cpu": cpu.split(":", 1)[1].strip(),
            "threads": torch.get_num_threads(),
            "machine": platform.machine(),
        },
    }


def summary(accepted: list[list[int]]) -> dict[str, float | int]:
    steps = [count for answer in accepted for count in answer]
    return {"acceptance_length": round(1 + sum(steps) / len(steps), 4), "steps": len(steps), "accepted": sum(steps)}


def greedy_answers(model: Any, tokenizer: Any, prompts: list[str], max_new_tokens: int) -> list[tuple[list[int], int]]:
    """One batch -> (prompt and answer as ids, length of the prompt) per prompt; an end token is the last one."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    batch = tokenizer.apply_chat_template(chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True)
    rows = model.generate(**batch, do_sample=False, max_new_tokens=max_new_tokens)
    width, answers = batch["input_ids"].shape[1], []
    for row, mask in zip(rows.tolist(), batch["attention_mask"], strict=True):
        prompt, answer = row[width - int(mask.sum()) : width], row[width:]
        end = answer.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in answer else len(answer)
        answers.append((prompt + answer[:end], len(prompt)))
    return answers


def walk(draft: DFlashDraft, aux: torch.Tensor, ids: list[int], num_known: int) -> list[int]:
    """Accepted drafts of each step; the last step is one whose drafts can all be compared."""
    accepted, num_drafts = [], draft.config.max_num_speculative_tokens
    context = draft.new_context()
    draft.extend_context(context, aux)
    while num_known + num_drafts <= len(ids):
        drafts = draft.block_logits(context.prefix(num_known - 1), ids[num_known - 1], num_drafts).argmax(dim=-1)
        agrees = drafts == torch.tensor(ids[num_known : num_known + num_drafts])
        accepted.append(int(agrees.long().cumprod(dim=0).sum()))
        num_known += accepted[-1] + 1
    return accepted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", action="append", required=True, help="NAME=FOLDER; the first is the baseline")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--per-file", type=int, default=10)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    folders = {name: Path(folder) for name, folder in (entry.split("=", 1) for entry in options.draft)}
    target, first = load_pair(options.target, next(iter(folders.values())))
    drafts = {name: load_draft(folder, target.model) for name, folder in folders.items()}
    tokenizer = AutoTokenizer.from_pretrained(options.target, padding_side="left")
    accepted: dict[str, dict[str, list[list[int]]]] = {name: {} for name in drafts}
    for path in options.prompts:
        prompts = read_prompts(path, options.per_file)
        for ids, num_prompt in greedy_answers(target.model, tokenizer, prompts, options.max_new_tokens):
            target.reset()
            aux = target.forward(ids)[1]
            for name, draft in drafts.items():
                accepted[name].setdefault(path.stem, []).append(walk(draft, aux, ids, num_prompt + 1))
        print(path.stem, {name: summary(sets[path.stem]) for name, sets in accepted.items()}, flush=True)  # noqa: T201 - a script that shows how far it is
    results = {
        name: {
            "all": summary([a for answers in sets.values() for a in answers]),
            "by_file": {stem: summary(answers) for stem, answers in sets.items()},
        }
        for name, sets in accepted.items()
    }
    baseline, *others = (result["all"]["acceptance_length"] for result in results.values())
    report = {
        "what": "acceptance length of copies of one draft over the target's greedy answers, fp32, bonus token included",
        "prompts_per_file": options.per_file,
        "max_new_tokens": options.max_new_tokens,
        "num_speculative_tokens": first.config.max_num_speculative_tokens,
        "relative_to_first": [round(other / baseline, 5) for other in others],
        "results": results,
        "provenance": provenance(),
    }
    options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
