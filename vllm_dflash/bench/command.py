# SPDX-License-Identifier: Apache-2.0
"""The work of `vllm-dflash bench`: start the engines, let them take turns, write and show what they did."""

import json
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from vllm_dflash.bench.arms import BenchArm, parse_arms
from vllm_dflash.bench.dummy import ENGINE, dummy_prompts, synthetic, write_dummy_pair
from vllm_dflash.bench.figures import Row
from vllm_dflash.bench.gate import DEFAULT_PAIR, GSM8K, pass_gate, read_questions
from vllm_dflash.bench.page import write_page
from vllm_dflash.bench.plots import plot_acceptance, plot_speedup
from vllm_dflash.bench.prompts import prompt_set
from vllm_dflash.bench.record import provenance, save
from vllm_dflash.bench.report import print_table
from vllm_dflash.bench.rounds import Cell, Workload, rows_of_cell, run_cell
from vllm_dflash.cli.engine_run import Engine, engine_spec
from vllm_dflash.cli.failure import UserError
from vllm_dflash.cli.machine import on_cpu
from vllm_dflash.cli.models import Pair, checked_pair, chosen_names

TABLE_WIDTH = 132
GPU_SHARE = 0.88  # of the memory, over all arms
WARM_UP = {"max_tokens": 32, "temperature": 0, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """What was asked for; the options of the command, which documents them."""

    target: str | None
    draft: str | None
    widen: str | None
    dummy: str | None
    survival: float
    prompt_tokens: int
    k: int | None
    dtype: str
    arms: str
    arm: list[str] | None
    concurrency: str
    prompts: str
    temperature: str
    max_tokens: int | None
    repeats: int
    stop_at_end: bool
    engine_args: str
    out: Path
    plots: Path | None
    page: Path | None
    gate: str | None
    min_accuracy: float
    min_acceptance: float
    questions: int


def run(asked: BenchRequest) -> None:
    """Measure, or judge where a gate was given.

    Raises:
        UserError: an option cannot be used.
        Exit: the gate closed (status 1).
    """
    console = _wide_console()
    common, requests = _object("--engine-args", asked.engine_args), _numbers("--concurrency", asked.concurrency, int)
    if asked.gate is not None:
        _judge(asked, common, max(requests), console)
        return
    compared = parse_arms(asked.arms, asked.arm or [])
    pair, sets = _models(asked, console)
    if asked.dummy is not None:
        common = ENGINE | common
        compared = [replace(arm, speculative=synthetic(asked.survival, pair.k) | arm.speculative) for arm in compared]
    work = Workload(sets, asked.max_tokens or 64, asked.repeats, ignore_eos=not asked.stop_at_end)
    heats = _numbers("--temperature", asked.temperature, float)
    cells = [Cell(name, count, heat) for heat in heats for name in sets for count in requests]
    origin = provenance(
        model=_described(asked, pair), dtype=asked.dtype, k=pair.k, max_tokens=work.max_tokens, ignore_eos=work.ignore_eos
    )
    with ExitStack() as stack:
        engines = _start(compared, pair, asked.dtype, common, console, stack)
        rows = _compare(engines, compared, pair.k, cells, work, asked.out, origin, console)
    print_table(console, rows)
    _draw(rows, origin, asked.plots, asked.page)
    console.print(f"written to {asked.out}", style="dim", highlight=False)


def _models(asked: BenchRequest, console: Console) -> tuple[Pair, dict[str, Sequence[Any]]]:
    """The pair and its prompts by set."""
    if asked.dummy is None:
        names = [name.strip() for name in asked.prompts.split(",")]
        return checked_pair(*_names(asked, console), asked.k), {name: prompt_set(name) for name in names}
    if asked.target or asked.draft or asked.widen:
        raise UserError("--dummy: needs no models; leave out --target, --draft and --widen.")
    if on_cpu():
        raise UserError("--dummy: vLLM's CPU builds do not draw synthetic acceptance; expected a GPU. Use the demo pair here.")
    folder = Path(tempfile.mkdtemp(prefix="vllm-dflash-"))
    pair = checked_pair(*write_dummy_pair(asked.dummy, folder), asked.k)
    return pair, {"random": dummy_prompts(asked.dummy, asked.prompt_tokens)}


def _described(asked: BenchRequest, pair: Pair) -> str:
    if asked.dummy:
        return f"dummy weights of {asked.dummy} shape, {asked.prompt_tokens} prompt tokens, acceptance {asked.survival:g}^n"
    if asked.target:
        return f"{Path(pair.target).name} and {Path(pair.draft).name}"
    return f"the demo pair widened to {asked.widen}" if asked.widen else "the demo pair"


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
    _warm_up(engines, work, {cell.concurrency for cell in cells})
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


def _judge(asked: BenchRequest, common: dict[str, Any], concurrency: int, console: Console) -> None:
    questions = read_questions(asked.gate or "", asked.questions)
    pair = checked_pair(*_gate_names(asked, console), asked.k)
    with ExitStack() as stack:
        engine = _start([BenchArm("ours", "ours")], pair, asked.dtype, common, console, stack)["ours"]
        verdict = pass_gate(
            engine,
            questions,
            min_accuracy=asked.min_accuracy,
            min_acceptance=asked.min_acceptance,
            max_tokens=asked.max_tokens or 512,
            concurrency=concurrency,
        )
    console.print(
        f"{verdict.questions} questions: accuracy {verdict.accuracy:.3f}, acceptance length {verdict.acceptance_length:.3f}",
        highlight=False,
    )
    for complaint in verdict.complaints:
        console.print(f"✗ {complaint}", style="bold red", highlight=False)
    if any(verdict.complaints):
        raise typer.Exit(1)


def _gate_names(asked: BenchRequest, console: Console) -> tuple[str, str]:
    if asked.gate == GSM8K and not (asked.target or asked.draft or asked.widen):
        return DEFAULT_PAIR
    return _names(asked, console)


def _names(asked: BenchRequest, console: Console) -> tuple[str, str]:
    if asked.widen is None:
        return chosen_names(asked.target, asked.draft, console)
    if asked.target or asked.draft:
        raise UserError("--widen: embeds the demo pair; leave out --target and --draft.")
    from vllm_dflash.bench.wide_pair import prepared_wide_pair

    return prepared_wide_pair(asked.widen, console)


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


def _warm_up(engines: dict[str, Engine], work: Workload, loads: Collection[int]) -> None:
    """Every load once: no kernel is compiled and no cache is filled in a measured run."""
    texts = list(next(iter(work.sets.values())))
    for engine in engines.values():
        for requests in sorted(loads):
            engine.measure([texts[i % len(texts)] for i in range(requests)], **WARM_UP)


def _measure(
    engines: dict[str, Engine], arms: list[BenchArm], cells: list[Cell], work: Workload, console: Console
) -> Iterator[list[Row]]:
    # Synthetic acceptance takes drafts unseen: there is nothing to compare.
    synthetic_law = any("rejection_sample_method" in arm.speculative for arm in arms)
    plain = None if synthetic_law else next((arm.name for arm in arms if arm.kind == "none"), None)
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
