# SPDX-License-Identifier: Apache-2.0
"""A user's mistake ends in one sentence on stderr and exit code 1, never in a traceback."""

import functools
import os
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import typer

P = ParamSpec("P")
R = TypeVar("R")


class UserError(ValueError):
    """What the user must change; the message is the sentence that is printed."""


def one_sentence(command: Callable[P, R]) -> Callable[P, R]:
    """Turn `ValueError` (ours and vLLM's for users) and `OSError` of a command into a sentence and exit code 1."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except BrokenPipeError:  # `vllm-dflash generate | head`: the reader has gone, there is nobody to tell
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except (ValueError, OSError) as error:
            typer.echo(f"vllm-dflash: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(1) from None

    return run
