# SPDX-License-Identifier: Apache-2.0
"""Faults that cost acceptance and nothing else, put into a loaded draft of the V1 engine: ``fault(engine, swap)``.

Each is something that an implementation of DFlash got wrong in public, and none of them raises an error anywhere.
"""

import copy
import dataclasses

import torch

from vllm_dflash.engine import proposer as proposer_module


class Swap:
    """``swap(owner, name, value)`` sets attributes, modules and buffers included, until the ``with`` block ends."""

    def __enter__(self):
        self._old = []
        return self

    def __call__(self, owner, name, value):
        held = [vars(owner)]
        if isinstance(owner, torch.nn.Module):
            held += [owner._modules, owner._buffers, owner._parameters]
        self._old.append((owner, name, any(name in place for place in held), getattr(owner, name)))
        setattr(owner, name, value)

    def __exit__(self, *_):
        for owner, name, held, value in reversed(self._old):
            if held:
                setattr(owner, name, value)
            else:
                delattr(owner, name)


def _attentions(engine):
    return [layer.self_attn for layer in engine.proposer.model.model.layers]


# -- reading the checkpoint ----------------------------------------------------------------------------------------------


def _rope(change):
    """All layers rotate with a changed copy of their rotary embedding (the target may share the original)."""

    def fault(engine, swap):
        rope = copy.deepcopy(_attentions(engine)[0].rotary_emb)
        change(rope)
        for attention in _attentions(engine):
            swap(attention, "rotary_emb", rope)

    return fault


def _flip_layout(rope):
    rope.is_neox_style = not rope.is_neox_style


def _theta(factor):
    def change(rope):
        rope.base *= factor
        rope.cos_sin_cache = rope._compute_cos_sin_cache()

    return change


def _without_yarn(rope):
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    rope.cos_sin_cache = RotaryEmbedding._compute_cos_sin_cache(rope)


def _other_attention_factor(rope):
    rope.cos_sin_cache = rope.cos_sin_cache * 1.1


def _capture(shift):
    def fault(engine, swap):
        target = engine.runner.get_model().model
        swap(target, "aux_hidden_state_layers", tuple(i + shift for i in target.aux_hidden_state_layers))

    return fault


def _states(change):
    """``change`` the captured states [n, layers, H] before ``fc``."""

    def fault(engine, swap):
        model = engine.proposer.model
        combine, layers = model.combine_hidden_states, len(model.captured_layers)

        def changed(states):
            return combine(change(states.view(states.shape[0], layers, -1)).reshape(states.shape))

        swap(model, "combine_hidden_states", changed)

    return fault


def _exchange_last(blocks):
    return torch.cat([blocks[:, :-2], blocks[:, -1:], blocks[:, -2:-1]], dim=1)


def _mask_token(engine, swap):
    swap(engine.proposer, "draft", dataclasses.replace(engine.proposer.draft, mask_token_id=0))


def _causality(engine, swap):
    groups = [dataclasses.replace(group, causal=not group.causal) for group in engine.proposer._groups]
    swap(engine.proposer, "_groups", groups)


def _window(change):
    def fault(engine, swap):
        for attention in _attentions(engine):
            swap(attention.attn.impl, "sliding_window", change(attention.window))

    return fault


def _attribute(path, name, value):
    def fault(engine, swap):
        swap(engine.proposer.model.get_submodule(path), name, value)

    return fault


def _without_value_scale(engine, swap):
    for owner in (engine.proposer.model.context_kv, *_attentions(engine)):
        swap(owner, "value_scale", None)


def _without_sinks(engine, swap):
    for attention in _attentions(engine):
        swap(attention.attn.impl, "sinks", None)


def _next_vocabulary_id(engine, swap):
    model = engine.proposer.model
    table = torch.arange(model.target_vocab_size) if model.draft_to_target is None else model.draft_to_target
    swap(model, "draft_to_target", (table + 1) % model.target_vocab_size)


def _initial_norm(path):
    def fault(engine, swap):
        norm = engine.proposer.model.get_submodule(path)
        swap(norm, "weight", torch.nn.Parameter(torch.ones_like(norm.weight), requires_grad=False))

    return fault


# -- numerics --------------------------------------------------------------------------------------------------------------


def _first_k_norm(engine, swap):
    context = engine.proposer.model.context_kv
    swap(context, "k_norm_weight", context.k_norm_weight[:1].expand_as(context.k_norm_weight).contiguous())


def context_kv(change):
    """``change`` the context's K and V [n, layers, 2, kv heads * head_dim] before K norm and rotation."""

    def fault(engine, swap):
        context = engine.proposer.model.context_kv
        project = context.project

        def changed(states):
            kv = project(states)
            return change(kv.view(kv.shape[0], context.num_layers, 2, -1)).reshape(kv.shape)

        swap(context, "project", changed)

    return fault


def _float16_overflow(engine, swap):
    """The first token's states overflow, as they do in float16 where a target's are a little larger than this one's (24894)."""
    _states(lambda blocks: torch.where(blocks.abs() > torch.finfo(torch.float16).max / 4, torch.inf, blocks))(engine, swap)


# -- bookkeeping -----------------------------------------------------------------------------------------------------------


def _committed(change):
    """``change(committed rows, width, span length, row in its span)``, the last two by committed row."""

    def fault(engine, swap):
        real = proposer_module.committed_rows

        def changed(starts, seq_lens, slots, rejected, **options):
            committed = real(starts, seq_lens, slots, rejected, **options)
            rows = torch.arange(slots.shape[0]) if committed.rows is None else committed.rows
            lengths = starts.long().diff()
            length, start = (torch.repeat_interleave(values, lengths)[rows] for values in (lengths, starts[:-1].long()))
            width = engine.proposer.num_speculative_tokens + 1
            return change(committed, width, length, rows - start)

        swap(proposer_module, "committed_rows", changed)

    return fault


def _lose(committed, lost):
    return dataclasses.replace(committed, slots=torch.where(lost, -1, committed.slots))


def _last_chunk_only(engine, swap):
    real = proposer_module.committed_rows

    def changed(starts, seq_lens, slots, rejected, **options):
        committed = real(starts, seq_lens, slots, rejected, **options)
        rows = torch.arange(slots.shape[0]) if committed.rows is None else committed.rows
        unfinished = torch.tensor(engine.runner.discard_request_mask.np[: len(starts) - 1])
        return _lose(committed, torch.repeat_interleave(unfinished, starts.long().diff())[rows])

    swap(proposer_module, "committed_rows", changed)


def _shifted(committed):
    return dataclasses.replace(committed, positions=committed.positions + 1)


def _keep_rejected(engine, swap):  # a fault's signature
    real = proposer_module.committed_rows

    def changed(starts, seq_lens, slots, rejected, **options):
        return real(starts, seq_lens, slots, None if rejected is None else torch.zeros_like(rejected), **options)

    swap(proposer_module, "committed_rows", changed)


def _query(change):
    """``change(anchor positions, anchor tokens, mask token)`` -> what the query block is built from."""

    def fault(engine, swap):
        real = proposer_module.query_block

        def changed(anchors, tokens, *args, **options):
            return real(*change(anchors, tokens, engine.proposer.draft.mask_token_id), *args, **options)

        swap(proposer_module, "query_block", changed)

    return fault


def _shift_queries(engine, swap):
    real = proposer_module.query_block

    def changed(*args, **options):
        block = real(*args, **options)
        return dataclasses.replace(block, positions=block.positions + 1)

    swap(proposer_module, "query_block", changed)


LOUD = {
    "rope of the other layout": _rope(_flip_layout),
    "fc reads the layers in another order": _states(lambda blocks: blocks.roll(1, dims=1)),
    "fc reads two layers exchanged": _states(_exchange_last),
    "mask token 0": _mask_token,
    "final norm never loaded": _initial_norm("model.norm"),
    "vocabulary map off by one": _next_vocabulary_id,
    "keys and values exchanged": context_kv(lambda kv: kv.flip(2)),
    "mask token in the anchor's row": _query(lambda anchors, tokens, mask: (anchors, torch.full_like(tokens, mask))),
    "anchor of the neighbour": _query(lambda anchors, tokens, _: (anchors, tokens.roll(1))),
    "rejected rows kept": _keep_rejected,
    "context of prompts not stored": _committed(lambda c, width, length, _row: _lose(c, length > width)),
}
"""Seen in the acceptance of the trained pair, and in the drafts of any pair."""

ACCEPTANCE_FAULTS = LOUD | {
    "embeddings scaled like Gemma's": _attribute("model", "embedding_scale", 24.0),
    "float16 overflows": _float16_overflow,
    "context of a prompt's last chunk only": _last_chunk_only,  # out of the reach of the other pair's window
    "a window on full layers": _window(lambda _: 6),
    "context of accepted drafts not stored": _committed(lambda c, width, length, row: _lose(c, (length <= width) & (row > 0))),
}
"""What the trained pair shows."""

EXACT_FAULTS = LOUD | {
    "rope theta ten times too low": _rope(_theta(0.1)),
    "YaRN ignored": _rope(_without_yarn),
    "YaRN with another attention factor": _rope(_other_attention_factor),
    "layer ids one too high": _capture(1),
    "layer ids one too low": _capture(-1),
    "causality inverted": _causality,
    "window ignored": _window(lambda _: -1),
    "window one too large": _window(lambda window: window + 1),
    "window one too small": _window(lambda window: window - 1),
    "mask embedding ignored": _attribute("model", "mask_embedding", None),
    "embedding scale missing": _attribute("model", "embedding_scale", 1.0),
    "value scale missing": _without_value_scale,
    "value scale missing in the context": _attribute("context_kv", "value_scale", None),
    "sinks ignored": _without_sinks,
    "draft ids taken for target ids": _attribute("", "draft_to_target", None),
    "norm of one layer never loaded": _initial_norm("model.layers.1.input_layernorm"),
    "norm of the context never loaded": _initial_norm("hidden_norm"),
    "K norm of the first layer in all layers": _first_k_norm,
    "K/V rounded to float8_e5m2": context_kv(lambda kv: kv.to(torch.float8_e5m2).float()),
    "context positions one too high": _committed(lambda c, *_: _shifted(c)),
    "query positions one too high": _shift_queries,
    "anchor counted twice": _query(lambda anchors, tokens, _: (anchors + 1, tokens)),
}
"""What every comparison with the reference shows, on a pair that has all of these features."""
