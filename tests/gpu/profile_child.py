# SPDX-License-Identifier: Apache-2.0
"""The child of ``profile_steps.py``: one vLLM engine in its process, and what its steps do on the GPU.

Speaks as ``vllm_dflash.cli.engine_child`` does: an ``EngineSpec`` comes first; then {"loads": [[requests, width]], "steps": n} is
answered with {"rows": [...]}.
"""

import json
import sys
import time
from collections import defaultdict

PROMPT_TOKENS, WARM, LEAST_US = 48, 24, 1.0


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
        raise ValueError(f"{requests} requests: {alive} were left at the end; expected all of them: lower --steps.")
    return row


def of_events(events, steps):
    """The figures of (name, start, end) in microseconds; kernels of several streams may overlap."""
    if not events:
        raise ValueError("the profiler saw no kernel; expected CUPTI to work on this machine.")
    busy, until, first = 0.0, float("-inf"), min(start for _, start, _ in events)
    kernels = defaultdict(lambda: [0.0, 0])
    for name, start, end in sorted(events, key=lambda event: event[1]):
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
        kernels[name][0] += end - start
        kernels[name][1] += 1
    dear = sorted(kernels.items(), key=lambda entry: -entry[1][0])
    shown = {name: [round(us / steps, 2), count / steps] for name, (us, count) in dear if us >= LEAST_US * steps}
    return {"busy_ms": round(busy / steps / 1e3, 4), "idle_ms": round((until - first - busy) / steps / 1e3, 4), "kernels": shown}


def rows_of(engine, arm, loads, count):
    """A row for each load; those that an engine cannot serve otherwise than others are left out."""
    from vllm_dflash.engine.planner_access import hold_width

    steps, rows, plain = Steps(engine), [], {}
    for requests, width in loads:
        if arm == "builtin" and width == 0:
            continue
        if arm == "ours":
            hold_width(engine, width)
        found = plain.get(requests) or measure(steps, requests, count)
        if arm == "none":  # whatever others draft
            plain[requests] = found
        rows.append({"concurrency": requests, "width": width} | found)
    return rows


def main():
    from vllm_dflash.cli.engine_child import _build_engine, claim_stdout, emit, follow_parent, report_error

    follow_parent()
    channel = claim_stdout()
    try:
        spec = json.loads(sys.stdin.readline())
        engine = _build_engine(spec)
        emit(channel, "ready")
        for line in sys.stdin:
            asked = json.loads(line)
            emit(channel, "result", rows=rows_of(engine, spec["arm"], asked["loads"], asked["steps"]))
    except Exception as error:
        report_error(channel, error)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
