# SPDX-License-Identifier: Apache-2.0
"""Write docs/options.md from ``vllm_dflash/options.py`` and the table below: python docs/make_options.py [--check].

``--check`` fails when the page is not what the code says.
"""

import dataclasses
import json
import sys
from pathlib import Path

from vllm_dflash.options import SECTION, PluginOptions

PAGE = Path(__file__).parent / "options.md"

SGLANG = {
    "--speculative-algorithm DFLASH": '`"method": "dflash"` in `--speculative-config`',
    "--speculative-draft-model-path": '`"model"`',
    "--speculative-draft-model-revision": '`"revision"`',
    "--speculative-dflash-block-size N": '`"num_speculative_tokens": N - 1`; left out, what the draft was trained for',
    "--speculative-num-draft-tokens N": "the same: N counts the anchor, `num_speculative_tokens` does not",
    "--speculative-num-steps, --speculative-eagle-topk": "none: DFlash drafts a whole block in one step, as one chain",
    "--speculative-dflash-draft-window-size N": "`draft_window`",
    "--speculative-draft-attention-backend": '`"attention_backend"`; a backend that cannot draft inside CUDA graphs is replaced, '
    "with a line in the log",
    "--speculative-draft-kv-cache-dtype": '`"kv_cache_dtype"`',
    "--speculative-draft-model-quantization": '`"quantization"`; a checkpoint that says how it is quantised needs nothing',
    "--speculative-draft-page-size": "none: pages of the draft are vLLM's `--block-size`, and any size works",
    "--enforce-piecewise-cuda-graph": "`--compilation-config` `cudagraph_mode`, for the target; the draft step is one graph of "
    "its own in every mode but NONE",
    "--cuda-graph-bs, --cuda-graph-max-bs": "none needed: draft graphs cover every number of requests that the engine allows",
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "none needed: the draft's length never limits the target's, see "
    "`draft_max_context`",
    "SGLANG_ENABLE_SPEC_V2, SGLANG_ENABLE_OVERLAP_PLAN_STREAM": "none needed: vLLM schedules asynchronously by default",
    "SGLANG_SIMULATE_ACC_LEN": '`"rejection_sample_method": "synthetic"` with `"synthetic_acceptance_length"`',
}
"""SGLang's arguments and variables for DFLASH."""

VLLM = {
    "method": '`"dflash"`',
    "model": "folder or hub name of the draft",
    "revision": "honoured",
    "code_revision": "none: no code of a checkpoint is ever run",
    "num_speculative_tokens": "K; optional here, at most what the draft was trained for",
    "num_speculative_tokens_per_batch_size": "honoured",
    "draft_sample_method": "honoured; `probabilistic` keeps draft logits of every request and gains little for these drafts, "
    "whose positions are drawn independently",
    "rejection_sample_method": "honoured: verification is vLLM's",
    "synthetic_acceptance_rates": "honoured",
    "synthetic_acceptance_length": "honoured",
    "fly_window_size": "honoured (vLLM 0.33); FLy is lossy by design",
    "fly_entropy_threshold": "honoured (vLLM 0.33)",
    "fly_entropy_top_k": "honoured (vLLM 0.33)",
    "enable_adaptive_verification": "honoured on Model Runner V2, beside fused heads and the planner",
    "attention_backend": "honoured; for non-causal drafts FLASHINFER runs with one plan per number of requests where it fits "
    "(16-bit, its head sizes, no sinks) and is replaced elsewhere, as FLEX_ATTENTION always is, with a line in the log",
    "kv_cache_dtype": "honoured, for the draft's layers only",
    "quantization": "honoured",
    "moe_backend": "no effect: drafts have no experts",
    "enforce_eager": "as vLLM: without graphs",
    "max_model_len": "as `draft_max_context`: longer requests are decoded without drafts, and the target keeps its length",
    "draft_tensor_parallel_size": "as vLLM: the draft runs at the target's tensor parallel size",
    "use_local_argmax_reduction": "no effect: greedy drafts are always picked without gathering logits",
    "disable_padded_drafter_batch": "honoured (V1 runner)",
    "disable_eagle_block_drop": "no effect: nothing is dropped for DFlash",
    "parallel_drafting": "always on",
    "draft_load_config": "honoured",
    "draft_lm_head_quantization": "refused by vLLM for DFlash",
}
"""Fields of vLLM's ``SpeculativeConfig`` that matter to users of this method."""

INTRODUCTION = f"""# Options

Written by `docs/make_options.py` from the code; do not edit.

## Options of this plugin

vLLM's speculative config takes no new fields, so the plugin's own options are given beside it; they are checked before weights
are loaded. `vllm-dflash doctor --options '{{...}}'` says what they do to a pair.

```sh
vllm serve TARGET --speculative-config '{{"method":"dflash","model":"DRAFT"}}' \\
                  --additional-config '{{"{SECTION}":{{"draft_window":4096}}}}'
```

In Python: `LLM(..., additional_config={{"{SECTION}": {{"draft_window": 4096}}}})`. There is one environment variable:
`VLLM_DFLASH=0` gives vLLM's own DFlash back.
"""


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def page() -> str:
    """The whole page."""
    options = [
        (f"`{field.name}`", field.metadata["values"], f"`{json.dumps(field.default)}`", field.metadata["doc"])
        for field in dataclasses.fields(PluginOptions)
    ]
    coming = [(", ".join(f"`{name}`" for name in names.split(", ")), meaning) for names, meaning in SGLANG.items()]
    return "\n".join(
        [
            INTRODUCTION,
            table(("option", "values", "default", "effect"), options),
            "## Fields of vLLM's speculative config\n",
            table(("field", "with this plugin"), [(f"`{name}`", meaning) for name, meaning in VLLM.items()]),
            "## Coming from SGLang\n",
            table(("there", "here"), coming),
        ]
    )


def main() -> None:
    """Write the page, or compare it."""
    if "--check" not in sys.argv:
        PAGE.write_text(page())
    elif not PAGE.exists() or PAGE.read_text() != page():
        sys.exit(f"{PAGE.name} is not what the code says: run python docs/make_options.py")


if __name__ == "__main__":
    main()
