# SPDX-License-Identifier: Apache-2.0
"""The child of :mod:`vllm_dflash.bench.vllm_sets`: prompts of one of vLLM's benchmark data sets.

vLLM's parser fills in the options of `vllm bench` that are not asked for, and its ``get_samples`` reads the set.
"""

import json
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

from vllm_dflash.cli.engine_child import claim_stdout, emit, follow_parent, report_error

SYNTHETIC = ("random", "prefix_repetition")
"""Sets of made-up text: no chat template around it."""


def main() -> None:
    """One question, one answer; every error becomes an ``error`` event."""
    follow_parent()
    channel = claim_stdout()
    question = json.loads(sys.stdin.readline())
    try:
        emit(channel, "prompts", prompts=_prompts(question))
    except Exception as error:
        report_error(channel, ValueError(_sentence(question, error)))
        raise SystemExit(1) from error


def _prompts(question: dict[str, Any]) -> list[str] | list[list[int]]:
    from vllm.benchmarks.datasets import add_dataset_parser, get_samples
    from vllm.tokenizers import get_tokenizer
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_dataset_parser(parser)
    names = next(action.choices for action in parser._actions if action.dest == "dataset_name")  # no public way
    if question["name"] not in names:
        raise ValueError(f"found {question['name']!r}; expected one of {', '.join(names)}.")
    tokens, path = str(question["tokens"]), question["path"]
    arguments = ["--dataset-name", question["name"], "--num-prompts", str(question["count"]), "--no-oversample"]
    arguments += ["--skip-chat-template", "--random-input-len", tokens, "--prefix-repetition-suffix-len", tokens]
    arguments += ["--prefix-repetition-num-prefixes", str(min(10, question["count"]))]
    if path is not None:
        arguments += ["--dataset-path", path if question["name"] == "hf" else str(Path(path).expanduser())]
    options = parser.parse_args(arguments)
    options.backend = "openai"  # which `vllm bench` names beside the data set
    tokenizer = get_tokenizer(question["target"])
    samples = get_samples(options, tokenizer)
    found = [sample.prompt for sample in samples]
    if any(not isinstance(prompt, str) or sample.multi_modal_data for prompt, sample in zip(found, samples, strict=True)):
        raise ValueError("its prompts are not plain text; expected a set of texts.")
    if question["name"] in SYNTHETIC:
        return [list(tokenizer.encode(prompt, add_special_tokens=False)) for prompt in found]
    return found


def _sentence(question: dict[str, Any], error: BaseException) -> str:
    name = ":".join(filter(None, (question["name"], question["path"])))
    missing = _missing_module(error)
    if missing is not None:
        return f"--prompts vllm:{name}: vLLM reads this set with {missing}, which is not installed: pip install {missing}"
    hint = " Is the hub reachable? Give the path of a file otherwise." if question["name"] == "hf" else ""
    return f"--prompts vllm:{name}: {(' '.join(str(error).split()) or type(error).__name__)[:400]}{hint}"


def _missing_module(error: BaseException | None) -> str | None:
    """What could not be imported; vLLM looks for the extra that has it, which fails for builds of another name."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and not isinstance(error, PackageNotFoundError):
            return error.name
        error = error.__cause__ or error.__context__
    return None


if __name__ == "__main__":
    main()
