# SPDX-License-Identifier: Apache-2.0
"""`vllm-dflash bench`: how much faster on this model, at this load, and where it loses; all arms in one run, taking turns.

The work is in :mod:`vllm_dflash.bench.command`, which the other commands never import.
"""

from pathlib import Path
from typing import Annotated

import typer

from vllm_dflash.cli.failure import one_sentence

_PROMPTS = (
    "Kinds (chat, code, maths, list, copy, all), files, folders, random (token ids, answered at temperature 2 as greedy answers "
    "would soon repeat themselves; random@0 wants those), or vllm:NAME[:PATH], a data set of `vllm bench`."
)
_MAX_TOKENS = (
    "Tokens per answer: 64, or 512 for --gate. One number, or one for each --concurrency. Answers go on until the last has as "
    "many, so that all requests decode all the time."
)
_ALSO = (
    'One more list of loads on the same engines: {"out": FILE, ...} with any of concurrency, prompts, temperature, max_tokens, '
    "repeats, repeat_run, hold, prompt_tokens, plots, html; the rest is as above."
)


@one_sentence
def bench(
    target: Annotated[str | None, typer.Option(help="Folder or hub name of the model; the demo pair by default.")] = None,
    draft: Annotated[str | None, typer.Option(help="Folder or hub name of its DFlash draft.")] = None,
    widen: Annotated[str | None, typer.Option(help="Embed the demo pair in a model of this size: 1b, 8b or 30b.")] = None,
    dummy: Annotated[str | None, typer.Option(help="No weights: this shape (1b, 8b, 32b) and synthetic acceptance.")] = None,
    survival: Annotated[float, typer.Option(help="With --dummy: chance that one more draft is accepted.")] = 0.861,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of made-up prompts: random, vllm:random, --dummy.")] = 128,
    k: Annotated[int | None, typer.Option("--k", help="Drafts per step; the draft's own value by default.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    arms: Annotated[str, typer.Option(help="Engines to compare.")] = "none,builtin,ours",
    arm: Annotated[list[str] | None, typer.Option(help='One more: NAME=KIND:{"speculative": {..}, "engine": {..}}.')] = None,
    concurrency: Annotated[str, typer.Option(help="Requests at the same time, for example 1,8,32.")] = "1,4",
    prompts: Annotated[str, typer.Option(help=_PROMPTS)] = "all",
    temperature: Annotated[str, typer.Option(help="For example 0,0.7; a set that is named NAME@T has its own.")] = "0",
    max_tokens: Annotated[str | None, typer.Option(help=_MAX_TOKENS)] = None,
    repeats: Annotated[str, typer.Option(help="Groups of prompts; one number, or one for each --concurrency.")] = "3",
    repeat_run: Annotated[int, typer.Option(min=1, help="Measure everything so often; says how far the ratios move.")] = 1,
    stop_after: Annotated[float | None, typer.Option(help="Seconds after which no further load begins.")] = None,
    hold: Annotated[str | None, typer.Option(help="One more arm for each of these draft widths, kept by ours' planner.")] = None,
    also: Annotated[list[str] | None, typer.Option(help=_ALSO)] = None,
    stop_at_end: Annotated[bool, typer.Option(help="Let answers end where the model ends them.")] = False,
    engine_args: Annotated[str, typer.Option(help="Engine arguments of every arm, as a JSON object.")] = "{}",
    out: Annotated[Path, typer.Option(help="JSON file for the result.")] = Path("bench.json"),
    plots: Annotated[Path | None, typer.Option(help="Folder for PNG pictures, named after --out (needs matplotlib).")] = None,
    page: Annotated[Path | None, typer.Option("--html", help="One self-contained HTML page (needs matplotlib).")] = None,
    show: Annotated[Path | None, typer.Option(help="Measure nothing: table, --plots and --html of this result.")] = None,
    gate: Annotated[str | None, typer.Option(help="gsm8k, or JSON lines with question and answer; judges ours alone.")] = None,
    min_accuracy: Annotated[float, typer.Option(help="Of the gate.")] = 0.75,
    min_acceptance: Annotated[float, typer.Option(help="Acceptance length that the gate wants.")] = 2.8,
    questions: Annotated[int, typer.Option(min=1, help="Of the gate.")] = 200,
) -> None:
    """Measure speed, latency and acceptance of several engines side by side; writes a JSON file and prints a table.

    With --gate: answer questions with ours, exit code 1 if accuracy or acceptance length stays below its limit.
    """
    given = dict(locals())
    from vllm_dflash.bench.command import BenchRequest, run

    run(BenchRequest(**given))
