# SPDX-License-Identifier: Apache-2.0
"""Speed of the draft step on one GPU: no speculation, vLLM's built-in DFlash, and ours, on the shape of Qwen3-8B.

    python tests/gpu/bench_speculator.py --arm all --out gpu_speculator_bf16.json         # about 9 minutes on an H200
    python tests/gpu/bench_speculator.py --arm ours --concurrency 1 33 --profile --out ours.json

Weights are dummies and acceptance is synthetic (rates 0.861^k, about 6.5 tokens per step at K = 15): the rejection kernel still
reads all logits, so the time is real; nothing that depends on draft quality can be judged. Each arm runs in a process of its
own, over one engine. Requests: 512 prompt tokens, 256 output tokens, all submitted at once. Rows hold

* ``tok_s``, ``step_ms``: steady state, from the step where all requests decode to the first that finishes;
* ``tok_s_wall``: all output tokens over the whole time, prefill included;
* ``draft_ms``: GPU time between entry and exit of ``propose`` in steady state (CUDA events); with ``--profile`` also
  ``draft_kernel_ms``, the sum of its kernels, and the kernels by name;
* ``graph_steps`` / ``eager_steps`` of the draft, and ``jit_compiles``: Triton kernels compiled after warm-up.

Values are medians over repetitions; ``*_spread`` is (max - min) / median.
"""

import argparse
import datetime as dt
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from meter import DRAFT_RANGE, Meter

ROOT = Path(__file__).resolve().parents[2]
ARMS = ("none", "builtin", "ours")
K, PROMPT, OUTPUT = 15, 512, 256
RATES = [0.861**k for k in range(1, K + 1)]
HIDDEN, VOCAB, TARGET_LAYERS, DRAFT_LAYERS = 4096, 151_936, 36, 5


def say(line):
    """Progress on standard output, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def write_models(folder, target_layers=TARGET_LAYERS):
    """Folders of target and draft: config.json only, shapes of Qwen3-8B and its 5-layer draft."""
    common = {
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": 12_288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 40_960,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    target = common | {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": target_layers}
    draft = common | {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": DRAFT_LAYERS,
        "block_size": K + 1,
        "num_target_layers": target_layers,
        "layer_types": ["full_attention"] * DRAFT_LAYERS,
        "dflash_config": {
            "mask_token_id": VOCAB - 267,
            "target_layer_ids": [1 + i * (target_layers - 4) // (DRAFT_LAYERS - 1) for i in range(DRAFT_LAYERS)],
        },
    }
    paths = []
    for name, config in (("target", target), ("draft", draft)):
        path = Path(folder) / name
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config))
        paths.append(str(path))
    return paths


def submit(engine, concurrency, seed, output):
    """Add ``concurrency`` random prompts; returns their request names."""
    import torch
    from vllm import SamplingParams

    generator = torch.Generator().manual_seed(seed)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=output, detokenize=False)
    names = [f"{seed}-{i}" for i in range(concurrency)]
    for name in names:
        ids = torch.randint(0, VOCAB - 1000, (PROMPT,), generator=generator).tolist()
        engine.add_request(name, {"prompt_token_ids": ids}, params)
    return names


def run_batch(meter, concurrency, seed, output=OUTPUT):
    """Generate for ``concurrency`` requests at once; returns one repetition's figures."""
    import torch

    engine = meter.llm.llm_engine
    submit(engine, concurrency, seed, output)
    meter.spans.clear()
    first_drafts, first_accepted = meter.accepted()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    lengths, trace = {}, []  # trace: time, steps, proposals, tokens, requests decoding, finished
    finished = 0
    while engine.has_unfinished_requests():
        for out in engine.step():
            lengths[out.request_id] = len(out.outputs[0].token_ids)
            finished += out.finished
        trace.append((time.perf_counter(), meter.steps, meter.proposals, sum(lengths.values()), len(lengths), finished))
    torch.cuda.synchronize()
    wall = time.perf_counter() - begin
    drafts, accepted = meter.accepted()
    # Two steps of margin: the step that ends the prefill is not a decode step, and results arrive one step late.
    steady = [t for t in trace if t[4] == concurrency and t[5] == 0][2:-2]
    row = {"tok_s_wall": sum(lengths.values()) / wall}
    if len(steady) > 4:
        (t0, s0, p0, n0, *_), (t1, s1, p1, n1, *_) = steady[0], steady[-1]
        row |= {"step_ms": (t1 - t0) / (s1 - s0) * 1e3, "tok_s": (n1 - n0) / (t1 - t0), "steady_steps": s1 - s0}
        spans = [start.elapsed_time(end) for number, start, end in meter.spans if p0 < number <= p1]
        if spans:
            row["draft_ms"] = statistics.median(spans)
    if drafts > first_drafts:
        row["acceptance_length"] = 1 + (accepted - first_accepted) / (drafts - first_drafts)
    return row


def profile_draft(meter, concurrency, seed):
    """Kernel time of the draft step from the profiler, over about 8 decode steps."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    engine = meter.llm.llm_engine
    names = submit(engine, concurrency, seed, OUTPUT)
    started = set()
    while len(started) < concurrency:
        started |= {out.request_id for out in engine.step()}
    for _ in range(4):
        engine.step()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(8):
            engine.step()
        torch.cuda.synchronize()
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    ranges = [(e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "gpu_user_annotation" and e["name"] == DRAFT_RANGE]
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    inside = [e for e in kernels if any(lo <= e["ts"] < hi for lo, hi in ranges)]
    by_name = {}
    for e in inside:
        count, total = by_name.get(e["name"], (0, 0.0))
        by_name[e["name"]] = (count + 1, total + e["dur"])
    steps = max(1, len(ranges))
    table = [
        {"kernel": name[:120], "per_step": round(count / steps, 2), "us_per_step": round(total / steps, 2)}
        for name, (count, total) in sorted(by_name.items(), key=lambda item: -item[1][1])
    ]
    return {
        "draft_kernel_ms": sum(e["dur"] for e in inside) / steps / 1e3,
        "draft_span_ms": sum(hi - lo for lo, hi in ranges) / steps / 1e3,
        "draft_kernels": round(len(inside) / steps, 1),
        "kernels": table,
    }


def start_engine(arm, options):
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_DFLASH="0" if arm == "builtin" else "1")
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]  # a bare checkout runs without an install
    from vllm import LLM

    from vllm_dflash.plugin import register

    register()
    target, draft = write_models(tempfile.mkdtemp(), options.target_layers)
    speculative = None
    if arm != "none":
        speculative = {
            "method": "dflash",
            "model": draft,
            "num_speculative_tokens": K,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": RATES,
        }
        if options.attention_backend:
            speculative["attention_backend"] = options.attention_backend
    return LLM(
        model=target,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=max(options.concurrency),
        max_num_batched_tokens=8192,
        gpu_memory_utilization=0.85,
        enable_prefix_caching=False,
        disable_log_stats=False,
        seed=0,
        speculative_config=speculative,
    )


def run_arm(arm, options):
    """All rows of one arm, over one engine."""
    began = time.perf_counter()
    llm = start_engine(arm, options)
    meter = Meter(llm)
    started = time.perf_counter() - began
    if arm != "none":
        kind = type(meter.speculator).__module__
        assert kind.startswith("vllm_dflash") == (arm == "ours"), f"arm {arm} runs {kind}"
    run_batch(meter, min(8, max(options.concurrency)), seed=10_000, output=32)  # first requests, autotuning, caches
    rows = []
    for concurrency in options.concurrency:
        compiled, graphs, proposals = len(meter.jit_compiles), meter.graph_steps, meter.proposals
        repeats = options.repeats + 2 if concurrency <= 8 else options.repeats
        runs = [run_batch(meter, concurrency, seed=concurrency * 100 + i) for i in range(repeats)]
        row = {"arm": arm, "concurrency": concurrency, "k": 0 if arm == "none" else K, "engine_start_s": round(started, 1)}
        for key in dict.fromkeys(k for run in runs for k in run):
            values = [run[key] for run in runs if key in run]
            row[key] = statistics.median(values)
            row[f"{key}_spread"] = (max(values) - min(values)) / row[key] if row[key] else 0.0
        row["graph_steps"] = meter.graph_steps - graphs
        row["eager_steps"] = meter.proposals - proposals - row["graph_steps"]
        row["jit_compiles"] = meter.jit_compiles[compiled:]
        if options.profile and arm != "none":
            row |= profile_draft(meter, concurrency, seed=concurrency)
        rows.append(row)
        shown = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items() if k != "kernels" and "spread" not in k}
        say(json.dumps(shown))
    counters = getattr(meter.speculator, "counters", None)
    if counters is not None:
        say(f"counters: {counters}")
    return rows


def provenance(model):
    """Versions, device, command, commit; ``model`` says what ran. The commit is DFLASH_COMMIT where there is no history."""
    import torch
    import triton
    import vllm

    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "gpu": torch.cuda.get_device_name(),
        "command": "python " + " ".join([str(Path(sys.argv[0]).name), *sys.argv[1:]]),
        "commit": os.environ.get("DFLASH_COMMIT") or commit or "unknown",
        "date": dt.datetime.now(tz=dt.timezone.utc).isoformat(timespec="seconds"),
        "model": model,
    }


def save(path, rows, provenance):
    """Merge ``rows`` into the file: an arm that ran again replaces its earlier rows."""
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    done = {(r["arm"], r["concurrency"]) for r in rows}
    kept = [r for r in old if (r["arm"], r["concurrency"]) not in done]
    path.write_text(json.dumps({"provenance": provenance, "rows": kept + rows}, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arm", choices=(*ARMS, "all"), default="all")
    parser.add_argument("--out", type=Path, required=True, help="JSON file; arms merge into it")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32, 33, 64, 128])
    parser.add_argument("--repeats", type=int, default=3, help="repetitions per cell; two more up to 8 requests")
    parser.add_argument("--profile", action="store_true", help="kernel table of the draft step for every cell")
    parser.add_argument("--attention-backend", default="", help="of the draft; CUSTOM is our block attention (arm ours)")
    parser.add_argument("--target-layers", type=int, default=TARGET_LAYERS, help="fewer layers for a quick look")
    options = parser.parse_args()
    if options.arm != "all":
        model = (
            f"Qwen3-8B shape, {options.target_layers} layers, dummy weights, bf16; draft {DRAFT_LAYERS} layers, K = {K}; "
            f"{PROMPT} prompt + {OUTPUT} output tokens; synthetic acceptance 0.861^k"
        )
        save(options.out, run_arm(options.arm, options), provenance(model))
        return
    for arm in ARMS:  # a process each: engines leave memory behind, and the plugin decides at start-up
        command = [sys.executable, __file__, "--arm", arm, "--out", str(options.out), "--repeats", str(options.repeats)]
        command += ["--concurrency", *map(str, options.concurrency), "--target-layers", str(options.target_layers)]
        if arm == "ours" and options.attention_backend:
            command += ["--attention-backend", options.attention_backend]
        subprocess.run(command + ["--profile"] * options.profile, check=True)


if __name__ == "__main__":
    main()
