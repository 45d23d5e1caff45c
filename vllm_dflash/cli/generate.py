# SPDX-License-Identifier: Apache-2.0
"""`vllm-dflash generate`: one answer, streamed, with the tokens that the draft guessed visibly marked."""

import sys
from typing import Annotated, Any

import typer
from rich.console import Console

from vllm_dflash.cli.engine_run import Arm, Engine, engine_spec
from vllm_dflash.cli.failure import UserError, one_sentence
from vllm_dflash.cli.marks import MarkedText
from vllm_dflash.cli.models import Pair, checked_pair, chosen_names


@one_sentence
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; read from stdin when left out.")] = None,
    target: Annotated[str | None, typer.Option(help="Folder or hub name of the model; the demo pair when left out.")] = None,
    draft: Annotated[str | None, typer.Option(help="Folder or hub name of its DFlash draft.")] = None,
    k: Annotated[int | None, typer.Option("--k", help="Drafts per step; the draft's own value by default.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Nucleus sampling.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Generate without speculation too, and compare.")] = False,
    marks: Annotated[bool, typer.Option(help="Mark accepted drafts: colour on a terminal, [brackets] elsewhere.")] = True,
) -> None:
    """Stream an answer and show which tokens the draft guessed; figures follow on stderr."""
    text = read_prompt(prompt)
    notes = Console(stderr=True, soft_wrap=True)
    pair = checked_pair(*chosen_names(target, draft, notes), k)
    sampling = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens}
    if seed is not None:
        sampling["seed"] = seed
    shown = MarkedText(Console(soft_wrap=True), enabled=marks)
    ours = _run("ours", pair, dtype, text, sampling, shown, notes)
    notes.print(_figures(ours, pair), highlight=False)
    if marks and ours["accepted"]:
        notes.print(f"({shown.legend()})", style="dim", markup=False, highlight=False)
    if compare:
        _compare(ours, pair, dtype, text, sampling, notes)


def read_prompt(prompt: str | None) -> str:
    """The argument, or all of stdin.

    Raises:
        UserError: neither holds any text.
    """
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read()
    if not prompt or not prompt.strip():
        raise UserError("the prompt is empty; expected some text as argument or on stdin.")
    return prompt.strip()


def _run(
    arm: Arm, pair: Pair, dtype: str, prompt: str, sampling: dict[str, Any], shown: MarkedText | None, notes: Console
) -> dict[str, Any]:
    with Engine(engine_spec(arm, pair, dtype)) as engine:
        with notes.status("loading the models"):
            engine.ready()
        for event in engine.run([prompt], stream=shown is not None, **sampling):
            if shown is not None and event["event"] == "step":
                for output in event["outputs"]:
                    shown.step(output["pieces"])
        if shown is not None:
            shown.end()
    return event


def _figures(result: dict[str, Any], pair: Pair) -> str:
    tokens = len(result["outputs"][0]["token_ids"])
    speed = f"{tokens} tokens in {result['seconds']:.1f} s: {tokens / result['seconds']:.1f} tokens/s"
    if not result["drafts"]:
        return f"{speed} (too short an answer for any draft)"
    length = 1 + result["accepted"] / result["drafts"]
    return (
        f"{speed}, acceptance length {length:.2f} (K = {pair.k}: {result['drafts']} drafts, {result['accepted']} tokens accepted)"
    )


def _compare(ours: dict[str, Any], pair: Pair, dtype: str, prompt: str, sampling: dict[str, Any], notes: Console) -> None:
    plain = _run("none", pair, dtype, prompt, sampling, None, notes)
    found, wanted = ours["outputs"][0]["token_ids"], plain["outputs"][0]["token_ids"]
    ours_speed, plain_speed = len(found) / ours["seconds"], len(wanted) / plain["seconds"]
    notes.print(
        f"without speculation: {len(wanted)} tokens in {plain['seconds']:.1f} s: {plain_speed:.1f} tokens/s; "
        f"speed-up {ours_speed / plain_speed:.2f}x",
        highlight=False,
    )
    notes.print(verdict(found, wanted, greedy=sampling["temperature"] == 0), highlight=False)


def verdict(found: list[int], wanted: list[int], *, greedy: bool) -> str:
    """One sentence on whether the tokens are the same, and what it means if they are not."""
    if found == wanted:
        return f"tokens identical: all {len(wanted)}"
    pairs = zip(found, wanted, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(found), len(wanted)))
    if not greedy:
        return f"tokens differ from number {first + 1} on: sampled answers share a distribution, not their tokens"
    return f"tokens differ from number {first + 1} on: use --dtype float32 to rule out rounding (near ties in bfloat16)"
