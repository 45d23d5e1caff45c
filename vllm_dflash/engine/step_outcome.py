# SPDX-License-Identifier: Apache-2.0
"""What a finished step says of its drafts, read off vLLM's ``SchedulerOutput`` and ``ModelRunnerOutput``."""

from collections.abc import Mapping, Sequence
from typing import Any


def acceptance_of(output: Any, names: list[str], sampled: Sequence[Sequence[int]]) -> tuple[list[str], list[int], list[int]]:
    """Requests of a step, how many drafts of each were verified (0 for none), and how many were accepted."""
    drafts: Mapping[str, Sequence[int]] = output.scheduled_spec_decode_tokens
    lengths = [len(drafts.get(name, ())) for name in names]
    invalid: Mapping[str, int] = getattr(output, "num_invalid_spec_tokens", None) or {}  # of a grammar
    if invalid:
        lengths = [max(length - invalid.get(name, 0), 0) for name, length in zip(names, lengths, strict=True)]
    new = list(map(len, sampled))
    if 0 in new:  # a prefill
        lengths = [length if count else 0 for length, count in zip(lengths, new, strict=True)]
    return names, lengths, [count - 1 if count else 0 for count in new]
