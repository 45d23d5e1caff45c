# SPDX-License-Identifier: Apache-2.0
"""Where the time of a decoding step goes on the GPU, arm beside arm: kernels, and how long it has nothing to do.

    python tests/gpu/profile_steps.py --out step_profile.json [--arms none,equal,ours] [--loads 256:0,32:7,8:7] [--widen 8b]

A load is requests and the draft width that the planner is told to keep; arms without a planner draft at full width, or not at all
(``none``), and ``builtin`` and ``adaptive`` (its adaptive verification) are left out where nothing is to be drafted. Every arm is
an engine in one process, so that host and GPU are seen together: its steps wait for the output's processing too, and are longer
than those of engines as users run them. Engines start together and are measured one after the other. On a CPU there are no
kernels to see: ``--widen none --dtype float32 --loads 2:0,2:7 --steps 4``.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATHS = [str(ROOT / "tests" / "gpu"), str(ROOT), str(ROOT / "kernels")]  # a bare checkout runs without an install
sys.path[:0] = PATHS
ARMS = {  # engine of the bench, speculative config, options of the plugin
    "none": ("none", {}, {}),
    "builtin": ("builtin", {}, {}),
    "adaptive": ("builtin", {"enable_adaptive_verification": True}, {}),
    "equal": ("ours", {}, {"verify_lengths": "equal"}),
    "ours": ("ours", {}, {}),
}
ENGINE = {
    # A fixed cache: several processes share the GPU, and vLLM's memory profiling fails where another one frees memory.
    "kv_cache_memory_bytes": 14_000_000_000,
    "max_model_len": 1024,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
    "gpu_memory_utilization": 0.12,
    "enable_prefix_caching": False,
}


def start(arm, pair, options):
    """The child with an arm's engine, which may still be loading."""
    from vllm_dflash.cli.engine_run import Child, engine_spec
    from vllm_dflash.cli.machine import engine_environment

    engine_of, speculative, plugin = ARMS[arm]
    settings = ENGINE | json.loads(options.engine_args)
    if engine_of == "ours":  # small targets plan only when asked to
        settings["additional_config"] = {"vllm_dflash": {"planner": "on", **plugin}}
    spec = engine_spec(engine_of, pair, options.dtype, speculative=speculative, **settings)
    environment = engine_environment(plugin=engine_of == "ours", local_models=spec.local, in_process=True)
    environment["PYTHONPATH"] = os.pathsep.join([*PATHS, *filter(None, [environment.get("PYTHONPATH")])])
    return Child("profile_child", dataclasses.asdict(spec), environment)


def rows_by_arm(pair, options):
    """Lists of rows, arm by arm: engines start together and are measured in turn.

    Raises:
        UserError: an engine did not start, or did not go on.
    """
    with contextlib.ExitStack() as running:
        children = {arm: running.enter_context(start(arm, pair, options)) for arm in options.arms}
        for child in children.values():
            child.receive()
        for arm, child in children.items():
            child.send({"loads": options.loads, "steps": options.steps})
            yield [{"arm": arm} | row for row in child.receive()["rows"]]


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arms", default="none,equal,ours", help=", ".join(ARMS))
    parser.add_argument("--loads", default="256:0,32:7,8:7")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--engine-args", default="{}", help=f"JSON, on top of {json.dumps(ENGINE)}")
    parser.add_argument("--widen", default="8b", help="a preset of vllm-dflash bench; none: the demo pair as it is")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    options.arms = options.arms.split(",")
    if unknown := [arm for arm in options.arms if arm not in ARMS]:
        parser.error(f"--arms: found {', '.join(unknown)}; expected some of {', '.join(ARMS)}")
    options.loads = [tuple(map(int, load.split(":"))) for load in options.loads.split(",")]
    return options


def main():
    options = parse()
    from rich.console import Console

    from vllm_dflash.bench.record import provenance, save, without_folders
    from vllm_dflash.bench.wide_pair import prepared_wide_pair
    from vllm_dflash.cli.failure import UserError
    from vllm_dflash.cli.models import checked_pair, prepared_demo_pair

    console = Console(stderr=True)
    names = prepared_demo_pair(console) if options.widen == "none" else prepared_wide_pair(options.widen, console)
    command = shlex.join(["python", "tests/gpu/profile_steps.py", *map(without_folders, sys.argv[1:])])
    model = "the demo pair" if options.widen == "none" else f"the demo pair widened to {options.widen}"
    rows, origin = [], provenance(command=command, model=model, dtype=options.dtype, steps=options.steps)
    try:
        for found in rows_by_arm(checked_pair(*names), options):
            rows += found
            save(options.out, rows, origin)
    except UserError as error:
        raise SystemExit(str(error)) from None
    for row in rows:
        figures = ", ".join(f"{key} {row[key]:.3f}" for key in ("step_ms", "busy_ms", "idle_ms") if key in row)
        sys.stdout.write(f"{row['concurrency']} requests, width {row['width']}, {row['arm']}: {figures}\n")


if __name__ == "__main__":
    main()
