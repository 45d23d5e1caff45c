# SPDX-License-Identifier: Apache-2.0
"""The work of `vllm-dflash bench`: start the engines, let them take turns, write and show what they did."""

import json
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from vllm_dflash.bench.arms import BenchArm, parse_arms
from vllm_dflash.bench.dummy import ENGINE, dummy_prompts, synthetic, write_dummy_pair
from vllm_dflash.bench.gate import DEFAULT_PAIR, GSM8K, pass_gate, read_questions
from vllm_dflash.bench.hold import need_planner, planning_arm, widths_to_hold
from vllm_dflash.bench.loads import numbers, parse_cells
from vllm_dflash.bench.plots import need_matplotlib
from vllm_dflash.bench.prompts import RANDOM, load_set, split_name
from vllm_dflash.bench.record import load, provenance
from vllm_dflash.bench.rounds import Player
from vllm_dflash.bench.study import Measured, Output, Study, judge, measure, show, warm_up
from vllm_dflash.cli.engine_run import Engine, engine_spec
from vllm_dflash.cli.failure import UserError
from vllm_dflash.cli.machine import on_cpu
from vllm_dflash.cli.models import Pair, checked_pair, chosen_names

TABLE_WIDTH = 160
GPU_SHARE = 0.88  # of the memory, over all arms
_ALSO_PATHS = {"out": "out", "plots": "plots", "html": "page"}
_ALSO_NUMBERS = {"repeat_run", "prompt_tokens"}
_ALSO_TEXTS = {"concurrency", "prompts", "temperature", "max_tokens", "repeats", "hold"}


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
    max_tokens: str | None
    repeats: str
    repeat_run: int
    stop_after: float | None
    hold: str | None
    also: list[str] | None
    stop_at_end: bool
    engine_args: str
    out: Path
    plots: Path | None
    page: Path | None
    show: Path | None
    gate: str | None
    min_accuracy: float
    min_acceptance: float
    questions: int


def run(asked: BenchRequest) -> None:
    """Measure, or judge where a gate was given, or show what was measured before.

    Raises:
        UserError: an option cannot be used.
        Exit: the gate closed (status 1).
    """
    begin, console = time.monotonic(), _wide_console()
    requests = [asked, *(_further(text, asked) for text in asked.also or [])]
    _distinct([request.out for request in requests])
    if any(request.plots or request.page for request in requests):
        need_matplotlib()
    if asked.show is not None:
        rows, origin = load(asked.show)
        show(rows, origin, Output(asked.show, asked.plots, asked.page), console)
        return
    common = _object("--engine-args", asked.engine_args)
    if asked.gate is not None:
        _judge(asked, common, console)
        return
    compared = [replace(arm, engine=common | arm.engine) for arm in parse_arms(asked.arms, asked.arm or [])]
    in_process = any(request.hold is not None for request in requests) and need_planner(compared)
    pair = _pair(asked, console)
    studies = [_study(request, pair, compared, begin) for request in requests]
    if asked.dummy is not None:
        common = ENGINE | common
        compared = [replace(arm, speculative=synthetic(asked.survival, pair.k) | arm.speculative) for arm in compared]
    with ExitStack() as stack:
        engines = _start(compared, pair, asked.dtype, common, console, stack, in_process=in_process)
        _measure_all(studies, engines, compared, pair, console)


def _measure_all(
    studies: Sequence[Study], engines: Mapping[str, Engine], arms: Sequence[BenchArm], pair: Pair, console: Console
) -> None:
    """The first run of every study, then the second of those that want one: what is cut off by a deadline is a repetition."""
    everything = [Measured(study, _players(engines, arms, study.hold, pair.k, console)) for study in studies]
    warm: set[tuple[str, int, bool]] = set()
    for number in range(max(study.runs for study in studies)):
        for done in everything:
            if number < done.study.runs:
                with console.status("warming up"):
                    warm_up(done.players, done.study, warm)
                measure(done, console)
    for done in everything:
        if done.rows:
            judge(done, console)
            show(done.all_rows, done.study.origin, done.study.output, console)
            console.print(f"written to {done.study.output.out}", style="dim", highlight=False)


def _further(text: str, asked: BenchRequest) -> BenchRequest:
    """The request of one ``--also``: what it names, the rest as asked; pictures and pages only where it names them."""
    known = {*_ALSO_PATHS, *_ALSO_NUMBERS, *_ALSO_TEXTS}
    given = {key.replace("-", "_"): value for key, value in _object("--also", text).items()}
    if "out" not in given or not given.keys() <= known:
        raise UserError(f'--also: found {text}; expected an object with "out", and at most {", ".join(sorted(known - {"out"}))}.')
    changes: dict[str, Any] = {"plots": None, "page": None}
    changes |= {field: _path(f"--also {key}", given[key]) for key, field in _ALSO_PATHS.items() if key in given}
    changes |= {key: _count(f"--also {key}", given[key]) for key in sorted(_ALSO_NUMBERS & given.keys())}
    changes |= {key: None if given[key] is None else str(given[key]) for key in _ALSO_TEXTS & given.keys()}
    return replace(asked, **changes)


def _count(option: str, given: Any) -> int:
    if type(given) is not int or given < 1:
        raise UserError(f"{option}: found {given!r}; expected an integer from 1 on.")
    return given


def _path(option: str, given: Any) -> Path:
    if not isinstance(given, str) or not given:
        raise UserError(f"{option}: found {given!r}; expected a path.")
    return Path(given)


def _distinct(files: Sequence[Path]) -> None:
    for number, file in enumerate(files):
        if file.resolve() in [earlier.resolve() for earlier in files[:number]]:
            raise UserError(f"--also out: found {file} twice, or as --out, too; expected a file of its own for each list.")


def _study(asked: BenchRequest, pair: Pair, arms: Sequence[BenchArm], begin: float) -> Study:
    names = [part.strip() for part in asked.prompts.split(",") if part.strip()]
    if asked.dummy is not None:
        names = [f"{RANDOM}@{heat:g}" for heat in numbers("--temperature", asked.temperature, float)]
    length = asked.max_tokens or "64"
    cells = parse_cells(
        names, temperature=asked.temperature, concurrency=asked.concurrency, max_tokens=length, repeats=asked.repeats
    )
    if not cells:
        raise UserError(f"--prompts: found {asked.prompts!r}; expected names separated by commas, for example chat,code.")
    hold = widths_to_hold(asked.hold, pair, arms)
    origin = {"model": _described(asked, pair), "dtype": asked.dtype, "k": pair.k, "max_tokens": length}
    return Study(
        cells=cells,
        sets=_sets(names, asked, pair, max(cell.concurrency * cell.repeats for cell in cells)),
        ignore_eos=not asked.stop_at_end,
        runs=asked.repeat_run,
        hold=hold,
        compare=asked.dummy is None and not any("rejection_sample_method" in arm.speculative for arm in arms),
        output=Output(asked.out, asked.plots, asked.page),
        origin=provenance(**origin, ignore_eos=not asked.stop_at_end),
        deadline=math.inf if asked.stop_after is None else begin + asked.stop_after,
    )


def _sets(names: Sequence[str], asked: BenchRequest, pair: Pair, count: int) -> dict[str, Sequence[Any]]:
    if asked.dummy is not None:
        return {RANDOM: dummy_prompts(asked.dummy, asked.prompt_tokens)}
    plain = dict.fromkeys(name for name, _ in map(split_name, names))
    return {name: load_set(name, pair, tokens=asked.prompt_tokens, count=count) for name in plain}


def _pair(asked: BenchRequest, console: Console) -> Pair:
    if asked.dummy is None:
        return checked_pair(*_names(asked, console), asked.k)
    if asked.target or asked.draft or asked.widen:
        raise UserError("--dummy: needs no models; leave out --target, --draft and --widen.")
    if on_cpu():
        raise UserError("--dummy: vLLM's CPU builds do not draw synthetic acceptance; expected a GPU. Use the demo pair here.")
    folder = Path(tempfile.mkdtemp(prefix="vllm-dflash-"))
    return checked_pair(*write_dummy_pair(asked.dummy, folder), asked.k)


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


def _judge(asked: BenchRequest, common: dict[str, Any], console: Console) -> None:
    concurrency = max(numbers("--concurrency", asked.concurrency, int))
    length = numbers("--max-tokens", asked.max_tokens or "512", int)[0]
    questions = read_questions(asked.gate or "", asked.questions)
    pair = checked_pair(*_gate_names(asked, console), asked.k)
    with ExitStack() as stack:
        engine = _start([BenchArm("ours", "ours")], pair, asked.dtype, common, console, stack)["ours"]
        verdict = pass_gate(
            engine,
            questions,
            min_accuracy=asked.min_accuracy,
            min_acceptance=asked.min_acceptance,
            max_tokens=length,
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


def _object(option: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UserError(f"{option}: {text!r} is not JSON ({error}).") from error
    if not isinstance(found, dict):
        raise UserError(f"{option}: found {text!r}; expected an object.")
    return found


def _start(
    arms: list[BenchArm],
    pair: Pair,
    dtype: str,
    common: dict[str, Any],
    console: Console,
    stack: ExitStack,
    *,
    in_process: bool = False,
) -> dict[str, Engine]:
    """Load all arms; at the same time where none has to measure a GPU's free memory (``kv_cache_memory_bytes`` is given).

    Then they capture their graphs, and time them, one after the other (``engine_turns``).
    """
    share: dict[str, Any] = {"enable_prefix_caching": False}
    together = on_cpu() or "kv_cache_memory_bytes" in common
    if not together:
        share["gpu_memory_utilization"] = round(GPU_SHARE / len(arms), 3)
    engines = {}
    turns = None if on_cpu() or not together else (stack.enter_context(tempfile.TemporaryDirectory()), len(arms))
    with console.status(f"starting {len(arms)} engines"):
        for arm in arms:
            settings = share | common | arm.engine
            spec = engine_spec(arm.kind, pair, dtype, speculative=arm.speculative, **settings)
            engines[arm.name] = stack.enter_context(Engine(replace(spec, turns=turns, in_process=in_process)))
            if not together:
                engines[arm.name].ready()
        for name, engine in engines.items():
            if not engine.ready()["in_turn"]:
                console.print(
                    f"✗ {name}: its engine core was not forked, and timed passes while other engines computed: what it plans by "
                    "is off. Set VLLM_WORKER_MULTIPROC_METHOD=fork.",
                    style="bold red",
                    highlight=False,
                )
    return engines


def _players(
    engines: Mapping[str, Engine], arms: Sequence[BenchArm], hold: Sequence[int], k: int, console: Console
) -> dict[str, Player]:
    """The arms, and behind the one with a planner an arm for each width that it can be told to keep.

    Raises:
        UserError: the planner keeps none of them.
    """
    players = {}
    for arm in arms:
        own = 0 if arm.kind == "none" else int(arm.speculative.get("num_speculative_tokens", k))
        adaptive = bool(engines[arm.name].ready()["adaptive"])
        players[arm.name] = Player(engines[arm.name], own, adaptive=adaptive)
        if hold and arm == planning_arm(arms):
            held = engines[arm.name].ask("widths", widths=list(hold))
            if not held["possible"]:
                raise UserError(f"--hold: {held['complaints'][0]}")
            for complaint in held["complaints"]:
                console.print(f"--hold: {complaint} Left out.", style="yellow", highlight=False)
            for width in held["possible"]:
                players[f"{arm.name} K={width}"] = Player(engines[arm.name], width, hold=width, adaptive=adaptive)
    return players
