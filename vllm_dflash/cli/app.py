# SPDX-License-Identifier: Apache-2.0
"""The command line `vllm-dflash`: each command lives in the module of its name."""

from typing import Annotated

import typer

from vllm_dflash import __version__
from vllm_dflash.cli import bench, calibrate, demo, doctor, generate, serve

app = typer.Typer(
    name="vllm-dflash",
    help="DFlash speculative decoding for vLLM: try it, check it, serve with it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(demo.demo)
app.command("generate")(generate.generate)
app.command("bench")(bench.bench)
app.command("calibrate")(calibrate.calibrate)
app.command("doctor")(doctor.doctor)
app.command("serve", context_settings=serve.PASS_THROUGH)(serve.serve)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"vllm-dflash {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """DFlash speculative decoding for vLLM: try it, check it, serve with it."""


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
