# SPDX-License-Identifier: Apache-2.0
"""`vllm-dflash bench`: how much faster on this model, at this load, and where it loses; all arms in one run, taking turns."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from vllm_dflash.bench.arms import BenchArm, parse_arms
from vllm_dflash.bench.figures import Row
from vllm_dflash.bench.gate import DEFAULT_PAIR, GSM8K, Question, pass_gate, read_questions
from vllm_dflash.bench.page import write_page
from vllm_dflash.bench.plots import plot_acceptance, plot_speedup
from vllm_dflash.bench.prompts import prompt_set
from vllm_dflash.bench.record import provenance, save
from vllm_dflash.bench.report import print_table
from vllm_dflash.bench.rounds import Cell, Workload, rows_of_cell, run_cell
from vllm_dflash.cli.engine_run import Engine, engine_spec
from vllm_dflash.cli.failure import UserError, one_sentence
from vllm_dflash.cli.machine import on_cpu
from vllm_dflash.cli.models import Pair, checked_pair, chosen_names

TABLE_WIDTH = 132
GPU_SHARE = 0.88  # of the memory, over all arms
WARM_UP = {"max_tokens": 32, "temperature": 0, "ignore_eos": True}


@one_sentence
def bench(
    target: Annotated[str | None, typer.Option(help="Folder or hub name of the model; the demo pair by default.")] = None,
    draft: Annotated[str | None, typer.Option(help="Folder or hub name of its DFlash draft.")] = None,
    widen: Annotated[str | None, typer.Option(help="Embed the demo pair in a model of this size: 1b, 8b or 30b.")] = None,
    k: Annotated[int | None, typer.Option("--k", help="Drafts per step; the draft's own value by default.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    arms: Annotated[str, typer.Option(help="Engines to compare.")] = "none,builtin,ours",
    arm: Annotated[list[str] | None, typer.Option(help='One more: NAME=KIND:{"speculative": {..}, "engine": {..}}.')] = None,
    concurrency: Annotated[str, typer.Option(help="Requests at the same time, for example 1,8,32.")] = "1,4",
    prompts: Annotated[str, typer.Option(help="Kinds (chat, code, maths, list, copy, all), files or folders.")] = "all",
    temperature: Annotated[str, typer.Option(help="For example 0,0.7.")] = "0",
    max_tokens: Annotated[int, typer.Option(min=4, help="Tokens per answer.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Groups of prompts per cell.")] = 3,
    stop_at_end: Annotated[bool, typer.Option(help="Let answers end where the model ends them.")] = False,
    engine_args: Annotated[str, typer.Option(help="Engine arguments of every arm, as a JSON object.")] = "{}",
    out: Annotated[Path, typer.Option(help="JSON file for the result.")] = Path("bench.json"),
    plots: Annotated[Path | None, typer.Option(help="Folder for PNG pictures (needs matplotlib).")] = None,
    page: Annotated[Path | None, typer.Option("--html", help="One self-contained HTML page (needs matplotlib).")] = None,
    gate: Annotated[str | None, typer.Option(help="gsm8k, or JSON lines with question and answer; judges ours alone.")] = None,
    min_accuracy: Annotated[float, typer.Option(help="Of the gate.")] = 0.75,
    min_acceptance: Annotated[float, typer.Option(help="Acceptance length that the gate wants.")] = 2.8,
    questions: Annotated[int, typer.Option(min=1, help="Of the gate.")] = 200,
) -> None:
    """Measure speed, latency and acceptance of several engines side by side; writes a JSON file and prints a table.

    With --gate: answer questions with ours, exit code 1 if accuracy or acceptance length stays below its limit.
    """
    console = _wide_console()
    common, requests = _object("--engine-args", engine_args), _numbers("--concurrency", concurrency, int)
    if gate is not None:
        asked = read_questions(gate, questions)
        pair = checked_pair(*_gate_names(gate, target, draft, widen, console), k)
        limits = {"min_accuracy": min_accuracy, "min_acceptance": min_acceptance, "max_tokens": max_tokens}
        _judge(pair, dtype, common, asked, max(requests), limits, console)
        return
    compared = parse_arms(arms, arm or [])
    pair = checked_pair(*_names(target, draft, widen, console), k)
    names = [name.strip() for name in prompts.split(",")]
    work = Workload({name: prompt_set(name) for name in names}, max_tokens, repeats, ignore_eos=not stop_at_end)
    heats = _numbers("--temperature", temperature, float)
    cells = [Cell(name, count, heat) for heat in heats for name in names for count in requests]
    model = f"{pair.target} and {pair.draft}" if target else f"the demo pair{f' widened to {widen}' if widen else ''}"
    origin = provenance(model=model, dtype=dtype, k=pair.k, max_tokens=max_tokens, ignore_eos=work.ignore_eos)
    with ExitStack() as stack:
        engines = _start(compared, pair, dtype, common, console, stack)
        rows = _compare(engines, compared, pair.k, cells, work, out, origin, console)
    print_table(console, rows)
    _draw(rows, origin, plots, page)
    console.print(f"written to {out}", style="dim", highlight=False)


def _wide_console() -> Console:
    console = Console()
    narrow_log = not console.is_terminal and console.width < TABLE_WIDTH
    return Console(width=TABLE_WIDTH) if narrow_log else console


def _compare(
    engines: dict[str, Engine],
    arms: list[BenchArm],
    k: int,
    cells: list[Cell],
    work: Workload,
    out: Path,
    origin: Row,
    console: Console,
) -> list[Row]:
    """All cells; the file is complete up to the cell that was finished last."""
    _warm_up(engines, work, max(cell.concurrency for cell in cells))
    rows: list[Row] = []
    for finished in _measure(engines, arms, cells, work, console):
        rows += [row | {"k": 0 if row["arm"] == "none" else k} for row in finished]
        save(out, rows, origin)
    return rows


def _draw(rows: list[Row], origin: Row, plots: Path | None, page: Path | None) -> None:
    if plots is not None:
        plots.mkdir(parents=True, exist_ok=True)
        plot_speedup(rows, plots / "speedup.png")
        plot_acceptance(rows, plots / "acceptance.png")
    if page is not None:
        write_page(page, rows, origin)


def _judge(
    pair: Pair,
    dtype: str,
    common: dict[str, Any],
    asked: list[Question],
    concurrency: int,
    limits: dict[str, Any],
    console: Console,
) -> None:
    with ExitStack() as stack:
        engine = _start([BenchArm("ours", "ours")], pair, dtype, common, console, stack)["ours"]
        verdict = pass_gate(engine, asked, concurrency=concurrency, **limits)
    console.print(
        f"{verdict.questions} questions: accuracy {verdict.accuracy:.3f}, acceptance length {verdict.acceptance_length:.3f}",
        highlight=False,
    )
    for complaint in verdict.complaints:
        console.print(f"✗ {complaint}", style="bold red", highlight=False)
    if any(verdict.complaints):
        raise typer.Exit(1)


def _gate_names(gate: str, target: str | None, draft: str | None, widen: str | None, console: Console) -> tuple[str, str]:
    if gate == GSM8K and target is None and draft is None and widen is None:
        return DEFAULT_PAIR
    return _names(target, draft, widen, console)


def _names(target: str | None, draft: str | None, widen: str | None, console: Console) -> tuple[str, str]:
    if widen is None:
        return chosen_names(target, draft, console)
    if target or draft:
        raise UserError("--widen: embeds the demo pair; leave out --target and --draft.")
    from vllm_dflash.bench.wide_pair import prepared_wide_pair

    return prepared_wide_pair(widen, console)


def _numbers(option: str, text: str, kind: type) -> list[Any]:
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < (1 if kind is int else 0):
        raise UserError(f"{option}: found {text!r}; expected numbers separated by commas, for example 1,8.")
    return found


def _object(option: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UserError(f"{option}: {text!r} is not JSON ({error}).") from error
    if not isinstance(found, dict):
        raise UserError(f"{option}: found {text!r}; expected an object.")
    return found


def _start(
    arms: list[BenchArm], pair: Pair, dtype: str, common: dict[str, Any], console: Console, stack: ExitStack
) -> dict[str, Engine]:
    """Load all arms; at the same time where none has to measure a GPU's free memory (``kv_cache_memory_bytes`` is given)."""
    share: dict[str, Any] = {"enable_prefix_caching": False}
    together = on_cpu() or "kv_cache_memory_bytes" in common
    if not together:
        share["gpu_memory_utilization"] = round(GPU_SHARE / len(arms), 3)
    engines = {}
    with console.status(f"starting {len(arms)} engines"):
        for arm in arms:
            settings = share | common | arm.engine
            spec = engine_spec(arm.kind, pair, dtype, speculative=arm.speculative, **settings)
            engines[arm.name] = stack.enter_context(Engine(spec))
            if not together:
                engines[arm.name].ready()
        for engine in engines.values():
            engine.ready()
    return engines


def _warm_up(engines: dict[str, Engine], work: Workload, largest: int) -> None:
    texts = list(next(iter(work.sets.values())))
    for engine in engines.values():
        for requests in {1, largest}:
            engine.measure([texts[i % len(texts)] for i in range(requests)], **WARM_UP)


def _measure(
    engines: dict[str, Engine], arms: list[BenchArm], cells: list[Cell], work: Workload, console: Console
) -> Iterator[list[Row]]:
    plain = next((arm.name for arm in arms if arm.kind == "none"), None)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("measuring", total=len(cells) * len(engines) * work.repeats)
        for number, cell in enumerate(cells):
            results: dict[str, list[Row]] = {name: [] for name in engines}
            bar.update(task, description=f"{cell.prompts}, {cell.concurrency} at a time, temperature {cell.temperature:g}")
            for name, result in run_cell(engines, cell, work, number):
                results[name].append(result)
                bar.advance(task)
            yield rows_of_cell(results, cell, plain)
