# SPDX-License-Identifier: Apache-2.0
"""`vllm-dflash calibrate`: which rows a small draft head should have, counted on text or on the target's own answers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from vllm_dflash.cli.demo import chosen_prompts
from vllm_dflash.cli.engine_run import Engine, engine_spec
from vllm_dflash.cli.failure import UserError, one_sentence
from vllm_dflash.cli.models import Pair, checked_pair, chosen_names, hub_file, locate, read_json
from vllm_dflash.token_frequency import (
    LIST_FILE,
    RowList,
    TokenCounts,
    count,
    coverage,
    expected_coverage,
    merge_order,
    ranked,
    write_list,
)

TEMPERATURES = (0.0, 0.7)
BATCH = 8
PIECE = 32  # lines; about as long as an answer
Texts = Annotated[list[Path] | None, typer.Option(help="Text files to count; without any, the target answers the prompts.")]
Prompts = Annotated[
    Path | None, typer.Option(help='Prompts, one per line, or JSON lines with "turns" or "prompt"; built-in ones by default.')
]


@one_sentence
def calibrate(
    target: Annotated[str | None, typer.Option(help="Folder or hub name; the demo pair by default.")] = None,
    draft: Annotated[str | None, typer.Option(help="The draft that was trained for the target.")] = None,
    text: Texts = None,
    prompts: Prompts = None,
    rows: Annotated[int, typer.Option(min=16, help="Rows of the small head.")] = 32768,
    max_tokens: Annotated[int, typer.Option(min=8, max=4096, help="Tokens per answer.")] = 128,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, or auto.")] = "auto",
    output: Annotated[Path | None, typer.Option(help=f"Where to write; {LIST_FILE} beside the draft by default.")] = None,
    compare: Annotated[bool, typer.Option(help="Measure acceptance with and without the small head.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Choose the rows of a small draft head (option draft_head) and say what it costs in acceptance.

    Counts tokens of --text files, or of the target's answers to every second prompt; the other prompts are for the comparison.
    Writes the list beside the draft, where a small head finds it.
    """
    console = Console(stderr=as_json)
    pair = checked_pair(*chosen_names(target, draft, console))
    questions = read_prompts(prompts) if prompts is not None else chosen_prompts(28)
    if len(questions) < 2:
        raise UserError(f"--prompts: found {len(questions)}; expected at least 2, half of them to count and half to compare.")
    place = output or _beside(pair)
    counts = count_files(pair, text) if text else _count_answers(pair, questions[::2], dtype, max_tokens, console)
    chosen = choose(pair, counts, rows, are_answers=not text)
    write_list(place, chosen, counts.times, {"coverage": round(coverage(counts.times, chosen.token_ids[:rows]), 5)})
    arms = _compare(pair, questions[1::2], dtype, max_tokens, rows, place, console) if compare else []
    report: dict[str, Any] = {"list": str(place), "rows": chosen.num_rows, "tokens_counted": counts.total, "arms": arms}
    report["expected_coverage"] = chosen.coverage
    if as_json:
        typer.echo(json.dumps(report))
    else:
        _print(console, report)


def read_prompts(path: Path) -> list[str]:
    """Prompts of a text or JSON-lines file.

    Raises:
        UserError: a line of a JSON-lines file has no prompt.
    """
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if path.suffix != ".jsonl":
        return lines
    return [_prompt(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]


def _prompt(line: str, where: str) -> str:
    try:
        entry = json.loads(line)
        return str(entry["turns"][0] if "turns" in entry else entry["prompt"])
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(f'{where}: expected an object with "turns" or "prompt"; {error!r}.') from error


def choose(pair: Pair, counts: TokenCounts, rows: int, *, are_answers: bool) -> RowList:
    """The `rows` most frequent tokens: counted ones first, then the order of the tokenizer's merges."""
    vocab_size = int(pair.target_config["vocab_size"])
    path = hub_file(locate(pair.target, "target"), pair.target, "tokenizer.json")
    order = [] if path is None else merge_order(read_json(path, "target"))
    every = [token for token in dict.fromkeys([*order, *range(vocab_size)]) if token < vocab_size]
    source, rows = f"{counts.total} counted tokens, then merge order", min(rows, vocab_size)
    # Text tells how much of such text the rows hold, which says too much: 98 % where they hold 91 % of the answers.
    expected = expected_coverage(counts, every, rows) if are_answers else None
    return RowList(tuple(ranked(counts.times, every)[:rows]), vocab_size, source, True, expected, rows)


def count_files(pair: Pair, paths: Sequence[Path]) -> TokenCounts:
    """Tokens of text files, with the target's tokenizer.

    Raises:
        UserError: the target has no tokenizer.json.
    """
    from tokenizers import Tokenizer

    path = hub_file(locate(pair.target, "target"), pair.target, "tokenizer.json")
    if path is None:
        raise UserError(f"target {pair.target!r}: no tokenizer.json, which counting text needs. Leave --text out.")
    tokenizer = Tokenizer.from_file(str(path))
    pieces = []
    for file in paths:
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        pieces += ["".join(lines[i : i + PIECE]) for i in range(0, len(lines), PIECE)]
    return count(tokenizer.encode(piece, add_special_tokens=False).ids for piece in pieces)


def _beside(pair: Pair) -> Path:
    folder = Path(pair.draft).expanduser()
    if not folder.is_dir():
        raise UserError(
            f"--output is missing: the draft {pair.draft!r} comes from the hub, so there is no folder of yours beside it. Give a "
            "file, and name it in the option draft_head_list."
        )
    return folder / LIST_FILE


def _options(**given: Any) -> dict[str, Any]:
    return {"vllm_dflash": {"planner": "off"} | given}  # every step drafts: acceptance is what is measured


def _count_answers(pair: Pair, questions: Sequence[str], dtype: str, max_tokens: int, console: Console) -> TokenCounts:
    """Tokens of the target's answers, drafted for as usual: speculation does not change them."""
    counts = TokenCounts()
    with (
        console.status("counting tokens of the target's answers"),
        Engine(engine_spec("ours", pair, dtype, additional_config=_options(draft_head="full"))) as engine,
    ):
        engine.ready()
        for temperature in TEMPERATURES:
            result = _answers(engine, questions, temperature, max_tokens)
            counts.update(count(ids for ids, _, _ in result))
    return counts


def _answers(engine: Engine, questions: Sequence[str], temperature: float, max_tokens: int) -> list[tuple[list[int], int, int]]:
    """(answer, drafts, accepted) of every question; the two numbers are those of its batch, on the first answer only."""
    found = []
    for start in range(0, len(questions), BATCH):
        group = list(questions[start : start + BATCH])
        result = engine.generate(group, temperature=temperature, max_tokens=max_tokens, seed=start)
        numbers = [(result["drafts"], result["accepted"])] + [(0, 0)] * (len(group) - 1)
        found += [(o["token_ids"], *n) for o, n in zip(result["outputs"], numbers, strict=True)]
    return found


def _compare(
    pair: Pair, questions: Sequence[str], dtype: str, max_tokens: int, rows: int, place: Path, console: Console
) -> list[dict[str, Any]]:
    """Acceptance length and coverage of the full and the small head on questions that were not counted."""
    ids = json.loads(place.read_text(encoding="utf-8"))["token_ids"][:rows]
    arms = []
    for head in ("full", "small"):
        config = _options(draft_head=head, draft_head_rows=rows, draft_head_list=str(place.resolve()))
        with console.status(f"{head} head"), Engine(engine_spec("ours", pair, dtype, additional_config=config)) as engine:
            engine.ready()
            for temperature in TEMPERATURES:
                result = _answers(engine, questions, temperature, max_tokens)
                drafts, accepted = sum(d for _, d, _ in result), sum(a for _, _, a in result)
                covered = 1.0 if head == "full" else coverage(count(answer for answer, _, _ in result).times, ids)
                length = 1 + accepted / drafts if drafts else 1.0
                arms.append({"head": head, "temperature": temperature, "acceptance_length": length, "coverage": covered})
    return arms


def _print(console: Console, report: dict[str, Any]) -> None:
    console.print(f"{report['tokens_counted']} tokens counted; {report['rows']} rows written to {report['list']}")
    if report["expected_coverage"] is not None:
        console.print(f"they are expected to hold {report['expected_coverage']:.2%} of further answers' tokens")
    if not report["arms"]:
        return
    table = Table("draft head", "temperature", "acceptance length", "change", "tokens covered")
    full = {arm["temperature"]: arm["acceptance_length"] for arm in report["arms"] if arm["head"] == "full"}
    for arm in sorted(report["arms"], key=lambda arm: arm["temperature"]):
        length = arm["acceptance_length"]
        change = "" if arm["head"] == "full" else f"{100 * (length / full[arm['temperature']] - 1):+.1f} %"
        table.add_row(arm["head"], f"{arm['temperature']:g}", f"{length:.3f}", change, f"{arm['coverage']:.2%}")
    console.print(table)
