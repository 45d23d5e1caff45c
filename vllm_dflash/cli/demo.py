# SPDX-License-Identifier: Apache-2.0
"""`vllm-dflash demo`: the demo pair without speculation, with vLLM's built-in DFlash and with ours, and the reference loop.

The three engines live side by side and each prompt goes to each of them in turn, so that a machine that slows down slows all
three. Only one computes at a time.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from vllm_dflash.cli.demo_report import Arms, DemoResult, print_report
from vllm_dflash.cli.engine_run import Arm, Child, Engine, engine_spec
from vllm_dflash.cli.failure import UserError, one_sentence
from vllm_dflash.cli.machine import engine_environment, on_cpu
from vllm_dflash.cli.models import Pair, checked_pair, prepared_demo_pair

ORDER: tuple[Arm, ...] = ("none", "builtin", "ours")
DTYPES = ("float32", "bfloat16")
WARM_UP = "Say hello."
GPU_SHARE, GPU_MAX_MODEL_LEN = 0.28, 2048  # of three engines on one GPU


@one_sentence
def demo(
    k: Annotated[int | None, typer.Option("--k", help="Drafts per step; the draft's own value by default.")] = None,
    dtype: Annotated[str, typer.Option(help="float32 (outputs must be identical) or bfloat16.")] = "float32",
    max_tokens: Annotated[int, typer.Option(min=1, max=512, help="Tokens per answer.")] = 48,
    batch: Annotated[int, typer.Option(min=1, max=64, help="Prompts generated at the same time.")] = 1,
    prompts: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Watch vLLM generate with DFlash on this machine: same text, accepted drafts, tokens per second.

    Prepares a small target and its trained draft (93 MB are downloaded once), then compares three engines.
    Exit code 1 if the text differs or acceptance is not what the reference loop reaches (both judged in float32; on a CPU
    acceptance only with --batch 1, as more requests draft fewer tokens).
    """
    if dtype not in DTYPES:
        raise UserError(f"--dtype: found {dtype!r}; expected one of {', '.join(DTYPES)}.")
    texts = chosen_prompts(prompts)
    console = Console(stderr=as_json)
    target, draft = prepared_demo_pair(console)
    pair = checked_pair(target, draft, k)
    result = compare(pair, texts, dtype=dtype, max_tokens=max_tokens, batch=batch, console=console)
    if as_json:
        typer.echo(json.dumps(result.to_json()))
    else:
        print_report(console, result)
    if not result.good:
        raise typer.Exit(1)


def chosen_prompts(count: int) -> list[str]:
    """`count` of the built-in prompts, spread over their kinds.

    Raises:
        UserError: there are not that many.
    """
    from vllm_dflash.demo_pair.prompts import PROMPTS

    if count > len(PROMPTS):
        raise UserError(f"--prompts: found {count}; expected at most {len(PROMPTS)}, as many as there are.")
    return [PROMPTS[i * len(PROMPTS) // count].text for i in range(count)]


def compare(pair: Pair, texts: list[str], *, dtype: str, max_tokens: int, batch: int, console: Console) -> DemoResult:
    """Run the three arms interleaved, then the reference loop on the same prompts."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        arms: Arms = {arm: [] for arm in ORDER}
        with ExitStack() as stack:
            planned = on_cpu() and batch > 1
            engines, stop_token_ids = _start(pair, dtype, bar, stack, planned=planned)
            task = bar.add_task("generating", total=len(texts) * len(ORDER))
            for arm, outcome, size in interleaved(engines, texts, max_tokens, batch):
                arms[arm].append(outcome)
                bar.advance(task, size)
        prompt_ids = [output["prompt_token_ids"] for batch_result in arms["none"] for output in batch_result["outputs"]]
        task = bar.add_task("reference loop", total=len(texts))
        request = {"dtype": dtype, "max_tokens": max_tokens, "k": pair.k, "stop_token_ids": stop_token_ids, "prompts": prompt_ids}
        reference = []
        for answer in _reference(pair, request):
            reference.append(answer)
            bar.advance(task)
    return DemoResult(texts, arms, reference, k=pair.k, dtype=dtype, max_tokens=max_tokens, batch=batch, planned=planned)


def _start(pair: Pair, dtype: str, bar: Progress, stack: ExitStack, *, planned: bool) -> tuple[dict[Arm, Engine], list[int]]:
    """Load the three engines and warm each one up: on a CPU all at the same time, on a GPU one after the other.

    vLLM measures the memory of a GPU while it starts, and three engines have to share it. ``planned``: ours drafts as many
    tokens as pay. The reference loop, which acceptance is compared with, drafts K in every step.
    """
    task = bar.add_task("starting three engines", total=len(ORDER))
    shared: dict[str, Any] = {} if on_cpu() else {"gpu_memory_utilization": GPU_SHARE, "max_model_len": GPU_MAX_MODEL_LEN}
    engines = {}
    ours: dict[str, Any] = {"additional_config": {"vllm_dflash": {"planner": "on" if planned else "off"}}}
    for arm in ORDER:
        options = ours if arm == "ours" else {}
        engines[arm] = stack.enter_context(Engine(engine_spec(arm, pair, dtype, **shared, **options)))
        if shared:
            engines[arm].ready()
    for engine in engines.values():
        stop_token_ids: list[int] = engine.ready()["stop_token_ids"]
        bar.advance(task)
    for engine in engines.values():
        engine.generate([WARM_UP], temperature=0, max_tokens=16)
    return engines, stop_token_ids


def interleaved(
    engines: dict[Arm, Engine], texts: list[str], max_tokens: int, batch: int
) -> Iterator[tuple[Arm, dict[str, Any], int]]:
    """Each group of prompts through each arm; which arm comes first rotates."""
    for number, start in enumerate(range(0, len(texts), batch)):
        group = texts[start : start + batch]
        turn = number % len(ORDER)
        for arm in ORDER[turn:] + ORDER[:turn]:
            yield arm, engines[arm].generate(group, temperature=0, max_tokens=max_tokens), len(group)


def _reference(pair: Pair, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    request = {"target": pair.target, "draft": pair.draft, **request}
    environment = engine_environment(plugin=False, local_models=pair.local)
    with Child("vllm_dflash.cli.reference_child", request, environment) as child:
        for _ in request["prompts"]:
            yield child.receive()
