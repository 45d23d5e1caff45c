# SPDX-License-Identifier: Apache-2.0
"""The plain-PyTorch reference loop over given prompts, in a process of its own; wire as in :mod:`vllm_dflash.cli.engine_run`.

It is the yardstick for acceptance: an engine that feeds its draft wrongly still writes the right text, only slower.
"""

import json
import sys
from pathlib import Path
from typing import Any, TextIO

from vllm_dflash.cli.engine_child import claim_stdout, emit, follow_parent, report_error


def main() -> None:
    """Answer one request and end."""
    follow_parent()
    channel = claim_stdout()
    try:
        _decode(json.loads(sys.stdin.readline()), channel)
    except Exception as error:
        report_error(channel, error)
        raise SystemExit(1) from error


def _decode(request: dict[str, Any], channel: TextIO) -> None:
    import torch

    from vllm_dflash.reference.decode import load_pair, speculative_decode

    target, draft = load_pair(Path(request["target"]), Path(request["draft"]), getattr(torch, request["dtype"]))
    for prompt_ids in request["prompts"]:
        done = speculative_decode(
            target,
            draft,
            prompt_ids,
            request["max_tokens"],
            num_speculative_tokens=request["k"],
            stop_ids=request["stop_token_ids"],
        )
        emit(channel, "answer", token_ids=done.tokens, drafts=len(done.accepted), accepted=sum(done.accepted))


if __name__ == "__main__":
    main()
