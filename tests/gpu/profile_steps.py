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
import json
import os
import shlex
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]  # a bare checkout runs without an install
EQUAL = {"additional_config": {"vllm_dflash": {"planner": "on", "verify_lengths": "equal"}}}
PLANNED = {"additional_config": {"vllm_dflash": {"planner": "on"}}}  # small targets plan only when asked to
ARMS = {  # engine of the bench, speculative config, engine arguments
    "none": ("none", {}, {}),
    "builtin": ("builtin", {}, {}),
    "adaptive": ("builtin", {"enable_adaptive_verification": True}, {}),
    "equal": ("ours", {}, EQUAL),
    "ours": ("ours", {}, PLANNED),
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
PROMPT_TOKENS, WARM, LEAST_US = 48, 24, 1.0


def start_engine(arm, options):
    """An ``LLMEngine`` of the arm on the pair that was asked for, all in this process."""
    import dataclasses

    from rich.console import Console

    from vllm_dflash.bench.wide_pair import prepared_wide_pair
    from vllm_dflash.cli.engine_child import _build_engine
    from vllm_dflash.cli.engine_run import engine_spec
    from vllm_dflash.cli.models import checked_pair, prepared_demo_pair

    console = Console(stderr=True)
    names = prepared_demo_pair(console) if options.widen == "none" else prepared_wide_pair(options.widen, console)
    engine_of, speculative, more = ARMS[arm]
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_DFLASH=str(int(engine_of == "ours")))
    if engine_of == "ours":
        from vllm_dflash.plugin import register

        register()
    settings = ENGINE | more | json.loads(options.engine_args)
    spec = engine_spec(engine_of, checked_pair(*names), options.dtype, speculative=speculative, **settings)
    return _build_engine(dataclasses.asdict(spec))


class Steps:
    """Steps of one engine, of batches of random prompts."""

    def __init__(self, engine):
        self.engine, self.number = engine, 0

    def begin(self, requests):
        """So many requests, past their prompts and the first steps after them."""
        from vllm import SamplingParams

        from vllm_dflash.bench.prompts import random_prompts

        prompts = random_prompts(self.engine.model_config.get_vocab_size(), PROMPT_TOKENS, requests)
        self.names = [f"{self.number}-{place}" for place in range(requests)]
        self.number += 1
        for name, prompt in zip(self.names, prompts, strict=True):
            sampling = SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True)
            self.engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        self.run(WARM)

    def run(self, steps):
        """Milliseconds a step, host and GPU."""
        wait()
        began = time.perf_counter()
        for _ in range(steps):
            self.engine.step()
        wait()
        return 1e3 * (time.perf_counter() - began) / steps

    def end(self):
        """Leave the rest of the answers; how many requests had not ended."""
        alive = self.engine.get_num_unfinished_requests()
        self.engine.abort_request(self.names)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return alive


def wait():
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(steps, requests, count):
    """``step_ms`` without a profiler; with one ``busy_ms``, ``idle_ms`` and kernels by name: [microseconds, launches] a step."""
    import torch

    steps.begin(requests)
    row = {"step_ms": round(steps.run(count), 4)}
    if torch.cuda.is_available():
        for length in (2, count):  # the first profiler of a process takes its time
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                steps.run(length)
        on_gpu = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        row |= of_events([(event.name, event.time_range.start, event.time_range.end) for event in on_gpu], count)
    if (alive := steps.end()) < requests:
        raise SystemExit(f"{requests} requests: {alive} were left at the end; expected all of them: lower --steps.")
    return row


def of_events(events, steps):
    """The figures of (name, start, end) in microseconds; kernels of several streams may overlap."""
    if not events:
        raise SystemExit("the profiler saw no kernel; expected CUPTI to work on this machine.")
    busy, until, first = 0.0, float("-inf"), min(start for _, start, _ in events)
    kernels = defaultdict(lambda: [0.0, 0])
    for name, start, end in sorted(events, key=lambda event: event[1]):
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
        kernels[name][0] += end - start
        kernels[name][1] += 1
    dear = sorted(
        ((name, [round(us / steps, 2), count / steps]) for name, (us, count) in kernels.items()), key=lambda k: -k[1][0]
    )
    shown = {name: found for name, found in dear if found[0] >= LEAST_US}
    return {"busy_ms": round(busy / steps / 1e3, 4), "idle_ms": round((until - first - busy) / steps / 1e3, 4), "kernels": shown}


def child(arm, options):
    """Start, say so, wait for a line, and answer with one row for each load."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints
    engine = start_engine(arm, options)
    steps = Steps(engine)
    steps.begin(2)
    steps.end()
    channel.write("ready\n")
    channel.flush()
    if not sys.stdin.readline():
        return  # whoever would ask has ended
    rows, same = [], {}
    for requests, width in options.loads:
        row = {"arm": arm, "concurrency": requests, "width": width}
        if ARMS[arm][0] == "ours":
            from vllm_dflash.engine.planner_access import hold_width

            hold_width(engine, width)
        if arm == "none":  # whatever others draft
            same[requests] = same.get(requests) or measure(steps, requests, options.steps)
            rows.append(row | same[requests])
        elif not (width == 0 and ARMS[arm][0] == "builtin"):
            rows.append(row | measure(steps, requests, options.steps))
    channel.write(json.dumps(rows) + "\n")
    channel.flush()


def all_arms(options):
    """Lists of rows, arm by arm: engines start together and are measured in turn."""
    command = [sys.executable, __file__, *sys.argv[1:], "--child"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    children = {arm: subprocess.Popen([*command, arm], **pipes) for arm in options.arms}
    try:
        for arm, process in children.items():
            if process.stdout.readline() != "ready\n":
                raise SystemExit(f"{arm}: its engine did not start; what it said stands above.")
        for arm, process in children.items():
            if process.poll() is None:
                process.stdin.write("go\n")
                process.stdin.flush()
            if not (answer := process.stdout.readline()):
                raise SystemExit(f"{arm}: its engine did not go on; what it said stands above.")
            yield json.loads(answer)
    finally:
        for process in children.values():
            process.kill()
            process.wait()


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arms", default="none,equal,ours", help=", ".join(ARMS))
    parser.add_argument("--loads", default="256:0,32:7,8:7")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--engine-args", default="{}", help=f"JSON, on top of {json.dumps(ENGINE)}")
    parser.add_argument("--widen", default="8b", help="a preset of vllm-dflash bench; none: the demo pair as it is")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.arms = options.arms.split(",")
    if unknown := [arm for arm in options.arms if arm not in ARMS]:
        parser.error(f"--arms: found {', '.join(unknown)}; expected some of {', '.join(ARMS)}")
    options.loads = [tuple(map(int, load.split(":"))) for load in options.loads.split(",")]
    return options


def main():
    options = parse()
    if options.child:
        child(options.child, options)
        return
    from rich.console import Console

    from vllm_dflash.bench.record import provenance, save, without_folders
    from vllm_dflash.bench.wide_pair import prepared_wide_pair
    from vllm_dflash.cli.models import prepared_demo_pair

    console = Console(stderr=True)  # prepared once, not by every child
    _ = prepared_demo_pair(console) if options.widen == "none" else prepared_wide_pair(options.widen, console)
    command = shlex.join(["python", "tests/gpu/profile_steps.py", *map(without_folders, sys.argv[1:])])
    model = "the demo pair" if options.widen == "none" else f"the demo pair widened to {options.widen}"
    rows, origin = [], provenance(command=command, model=model, dtype=options.dtype, steps=options.steps)
    for found in all_arms(options):
        rows += found
        save(options.out, rows, origin)
    for row in rows:
        figures = ", ".join(f"{key} {row[key]:.3f}" for key in ("step_ms", "busy_ms", "idle_ms") if key in row)
        sys.stdout.write(f"{row['concurrency']} requests, width {row['width']}, {row['arm']}: {figures}\n")


if __name__ == "__main__":
    main()
