# SPDX-License-Identifier: Apache-2.0
"""The gate: questions with known answers through one engine; accuracy and acceptance length must reach their limits.

Greedy, through the chat template. An answer counts when the last number of the text equals the expected one, so that no
grading model is needed; a question asks for the number at the end.
"""

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from vllm_dflash.cli.engine_run import Engine
from vllm_dflash.cli.failure import UserError

GSM8K = "gsm8k"
DEFAULT_PAIR = ("meta-llama/Llama-3.1-8B-Instruct", "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat")
_INSTRUCTION = "\nReason step by step, and end with the answer as a number."
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """A question and the number that answers it."""

    text: str
    answer: float


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """What came out, and the limits."""

    questions: int
    right: int
    acceptance_length: float
    min_accuracy: float
    min_acceptance: float

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return self.right / self.questions

    @property
    def complaints(self) -> Iterator[str]:
        """What fell short, one sentence each."""
        if self.accuracy < self.min_accuracy:
            yield f"accuracy is {self.accuracy:.3f} ({self.right} of {self.questions}); expected at least {self.min_accuracy:g}"
        if self.acceptance_length < self.min_acceptance:
            yield f"acceptance length is {self.acceptance_length:.3f}; expected at least {self.min_acceptance:g}"


def read_questions(source: str, count: int) -> list[Question]:
    """The first ``count`` questions of a ``.jsonl`` file with ``question`` and ``answer``, or of GSM8K's test set.

    Raises:
        UserError: the file or the data set is not to be had, or a line lacks a question or a number as answer.
    """
    path = Path(source).expanduser()
    if source == GSM8K:
        lines = _gsm8k()
    elif path.is_file():
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    else:
        raise UserError(f"--gate: found {source!r}; expected {GSM8K}, or a file of JSON lines with question and answer.")
    if not lines:
        raise UserError(f"--gate {source}: no questions in it; expected JSON lines with question and answer.")
    return [_question(line, f"{source}, question {number}") for number, line in enumerate(lines[:count], 1)]


def _question(line: dict[str, object], where: str) -> Question:
    text, answer = line.get("question"), last_number(str(line.get("answer", "")))
    if not isinstance(text, str) or answer is None:
        raise UserError(f'--gate: {where}: expected "question" as text and "answer" ending in a number; found {line}.')
    return Question(text, answer)


def _gsm8k() -> list[dict[str, object]]:
    """GSM8K's test questions from the hub or its cache; 1,319 of them."""
    try:
        import pyarrow.parquet
        from huggingface_hub import hf_hub_download

        path = hf_hub_download("openai/gsm8k", "main/test-00000-of-00001.parquet", repo_type="dataset")
        found: list[dict[str, object]] = pyarrow.parquet.read_table(path).to_pylist()
    except ImportError as error:
        raise UserError(f"--gate {GSM8K}: needs {error.name}: pip install pyarrow, or give a file of JSON lines.") from error
    except Exception as error:
        raise UserError(
            f"--gate {GSM8K}: the hub does not give openai/gsm8k ({type(error).__name__}). Check the network, or give a file of "
            "JSON lines with question and answer."
        ) from error
    return found


def last_number(text: str) -> float | None:
    """The last number of a text; thousands separators and a final full stop do not count."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def pass_gate(
    engine: Engine,
    questions: Sequence[Question],
    *,
    min_accuracy: float,
    min_acceptance: float,
    max_tokens: int,
    concurrency: int,
) -> Verdict:
    """Ask everything, ``concurrency`` questions at a time."""
    right = drafts = accepted = 0
    for first in range(0, len(questions), concurrency):
        group = questions[first : first + concurrency]
        result = engine.generate([q.text + _INSTRUCTION for q in group], temperature=0, max_tokens=max_tokens)
        texts = ["".join(text for text, _ in output["pieces"]) for output in result["outputs"]]
        right += sum(last_number(text) == question.answer for text, question in zip(texts, group, strict=True))
        drafts, accepted = drafts + result["drafts"], accepted + result["accepted"]
    length = 1 + accepted / max(1, drafts)
    return Verdict(len(questions), right, length, min_accuracy, min_acceptance)
