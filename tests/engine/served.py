# SPDX-License-Identifier: Apache-2.0
"""What requests may bring along besides a prompt: an adapter, a grammar, a priority. Shared by the tests of both runners."""

import json
import string

import torch
from safetensors.torch import load_file, save_file

RANK, ALPHA = 4, 16
ADAPTED = {"self_attn.q_proj": "q_proj", "self_attn.o_proj": "o_proj", "mlp.down_proj": "down_proj"}
GRAMMARS = (
    {"regex": "[ab]{2,7}-[0-9]{3}"},
    {"choice": ["alpha", "beta", "gamma"]},
    {
        "json": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "maximum": 999}},
            "required": ["name", "age"],
            "additionalProperties": False,
        }
    },
)


def write_tokenizer(folder, vocab):
    """A token per printable character, then made-up words: enough for a grammar."""
    from tokenizers import Tokenizer, models

    tokens = ["<s>", "</s>", *string.printable[:95]]
    tokens += [f"w{i}" for i in range(len(tokens), vocab)]
    Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token="<s>")).save(str(folder / "tokenizer.json"))
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))


def write_adapter(folder, target, merged):
    """A random LoRA adapter for the checkpoint in ``target``, and ``merged``: that checkpoint with the adapter in its weights."""
    folder.mkdir()
    merged.mkdir()
    generator = torch.Generator().manual_seed(21)
    weights, adapter = load_file(target / "model.safetensors"), {}
    for name in [n for n in weights if any(part in n for part in ADAPTED)]:
        rows, columns = weights[name].shape
        down = torch.randn(RANK, columns, generator=generator) * columns**-0.5
        up = torch.randn(rows, RANK, generator=generator) * 0.3
        adapter[f"base_model.model.{name.replace('.weight', '.lora_A.weight')}"] = down
        adapter[f"base_model.model.{name.replace('.weight', '.lora_B.weight')}"] = up
        weights[name] = weights[name] + ALPHA / RANK * up @ down
    save_file(adapter, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": [*ADAPTED.values()], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(weights, merged / "model.safetensors")
    (merged / "config.json").write_text((target / "config.json").read_text())


def options(**more):
    """Engine options under which adapters, grammars and priorities are served."""
    return {"enable_lora": True, "max_lora_rank": 8, "scheduling_policy": "priority", "skip_tokenizer_init": False} | more


def generate(engine, prompts, max_tokens, *, adapter=None, grammars=None, priorities=None):
    """Greedy answers; ``adapter`` by prompt (a folder or None), ``grammars`` and ``priorities`` likewise."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import StructuredOutputsParams

    each = range(len(prompts))
    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=grammars is None,
            detokenize=False,
            structured_outputs=None if grammars is None else StructuredOutputsParams(**grammars[i]),
        )
        for i in each
    ]
    adapters = [LoRARequest("adapter", 1, str(a)) if a else None for a in adapter or [None] * len(prompts)]
    outputs = engine.llm.generate(
        [{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False, lora_request=adapters, priority=priorities
    )
    return [list(o.outputs[0].token_ids) for o in outputs]
