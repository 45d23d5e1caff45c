# SPDX-License-Identifier: Apache-2.0
"""What this draft, target, backend and parallel layout can do together: decided once per engine, asked by everything else.

Each ability is a :data:`Verdict`: None where it is used, else the reason why not. The object prints itself as the start-up line,
so that what decides speed or acceptance can be read there.
"""

import dataclasses
from collections import Counter
from typing import Any

from vllm.v1.attention.backend import AttentionCGSupport

from vllm_dflash.draft_config import DraftConfig
from vllm_dflash.engine.announce import describe
from vllm_dflash.engine.query_rows import why_separate

MIB = 1 << 20
Verdict = str | None
"""None: yes. Text: no, and why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Capability:
    """Facts that hold until the engine stops; see the module's docstring.

    ``needs_cpu_lengths`` is about the draft's attention metadata: planned on the host in every step, or computed in the graph.
    ``longest_context`` is None where no request can be too long. Bytes are those of this rank, without weights and KV cache.
    """

    draft: DraftConfig
    dtype: str
    """Of activations; and which weights and head are smaller than the checkpoint's."""
    num_speculative_tokens: int
    runner: str
    backends: tuple[str, ...]
    """Attention backend of each draft layer."""
    needs_cpu_lengths: bool
    num_kv_groups: int
    graphs: Verdict
    largest_graph: int
    """Requests of the largest captured draft step; 0 without graphs."""
    num_graphs: int
    capture: str
    """How aux hidden states of the target arrive: natively, through hooks, or stored in place by the target."""
    fused_context: Verdict
    fused_query_rows: Verdict
    fused_head: Verdict
    longest_context: int | None
    sampling: str
    buffer_bytes: int
    logit_bytes: int
    parallel: str
    deferred_rows: int = 0
    """Context rows of steps without drafts that wait to be stored together; 0: each step stores its own."""

    @property
    def facts(self) -> tuple[str, ...]:
        """One phrase each, for :func:`vllm_dflash.engine.announce.announce`."""
        causal = [layer.causal for layer in self.draft.layers]
        reach = "every context" if self.longest_context is None else f"contexts up to {self.longest_context} tokens"
        graphs = f"{self.num_graphs} CUDA graphs for 1 to {self.largest_graph} requests" if self.graphs is None else self.graphs
        waits = (f"context of up to {self.deferred_rows} rows waits in steps without drafts",) if self.deferred_rows else ()
        return (
            self.dtype,
            f"attention {_counted(self.backends)}",
            f"{causal.count(False)} of {len(causal)} layers non-causal",
            f"{self.num_kv_groups} KV group(s)",
            self.capture,
            f"metadata {'built every step' if self.needs_cpu_lengths else 'in the graph'}",
            graphs,
            *waits,
            f"{self.sampling} drafts for {reach}",
            self.parallel,
            f"buffers {self.buffer_bytes / MIB:.1f} MiB",
            f"draft logits {self.logit_bytes / MIB:.1f} MiB",
        )

    def __str__(self) -> str:
        """Everything in one line."""
        return f"{', '.join((describe(self.draft), *self.facts))}; {self.fusions}"

    @property
    def fusions(self) -> str:
        """Which kernels are fused, and why the others are not."""
        parts = {"context KV": self.fused_context, "query rows": self.fused_query_rows, "head": self.fused_head}
        fused = [name for name, why in parts.items() if why is None]
        reasons: dict[str, list[str]] = {}
        for name, why in parts.items():
            if why is not None:
                reasons.setdefault(why, []).append(name)
        told = [f"fused {', '.join(fused)}"] if fused else []
        return "; ".join(told + [f"not fused {', '.join(names)} ({why})" for why, names in reasons.items()])


def graph_verdict(wanted: bool, support: AttentionCGSupport, backend: str | None) -> Verdict:
    """Whether the draft step can be captured: ``support`` and ``backend`` are those of its weakest attention group."""
    if not wanted:
        return "no CUDA graphs"
    if support.value >= AttentionCGSupport.UNIFORM_BATCH.value:
        return None
    return f"no CUDA graphs (attention backend {backend} supports only {support.name})"


def backend_name(backend: Any) -> str:
    """The name that says something: ours are registered as CUSTOM."""
    return str(getattr(backend, "draft_name", None) or backend.get_name())


def parallel_layout(vllm_config: Any) -> str:
    """Sizes of the parallel dimensions that are more than one, as vLLM's options spell them."""
    parallel = vllm_config.parallel_config
    names = ("tensor", "pipeline", "data", "decode_context", "prefill_context")
    sizes = {name: getattr(parallel, f"{name}_parallel_size", 1) for name in names}
    return ", ".join(f"{name.replace('_', '-')} parallel {size}" for name, size in sizes.items() if size > 1) or "one rank"


def query_rows_verdict(model: Any, vllm_config: Any) -> Verdict:
    """Why query rows of ``model`` keep vLLM's chain of kernels; one answer for all layers."""
    reasons = (why_separate(attention, vllm_config) for attention in model.model.attentions)
    return next((reason for reason in reasons if reason is not None), None)


def of_speculator(speculator: Any) -> Capability:
    """What a V2 speculator can do that knows its attention groups; ``fused_context`` is answered when KV caches are bound."""
    draft, model, attention = speculator.draft, speculator.model, speculator.attention
    head = speculator._fused_head
    names = model.get_draft_kv_cache_layer_names()
    backend_of = {name: backend_name(group.backend) for group in attention.groups for name in group.layer_names}
    grid = speculator.graphs.grid
    workspace = getattr(head, "workspace", None)
    return Capability(
        draft=draft,
        dtype=str(speculator.dtype).removeprefix("torch.") + model.variants,
        num_speculative_tokens=speculator.num_speculative_steps,
        runner="V2",
        backends=tuple(backend_of[name] for name in names),
        needs_cpu_lengths=not attention.refreshes_in_graph,
        num_kv_groups=len(attention.group_ids),
        graphs=speculator._graph_verdict,
        largest_graph=grid[-1] if grid else 0,
        num_graphs=len(grid),
        capture=speculator._aux_fact,
        fused_context="no KV cache yet",
        fused_query_rows=query_rows_verdict(model, speculator.vllm_config),
        fused_head=head if isinstance(head, str) else None,
        longest_context=speculator.gate.limit,
        sampling=speculator.speculative_config.draft_sample_method,
        buffer_bytes=speculator.buffers.num_bytes
        + speculator._attention_bytes
        + (0 if workspace is None else workspace.nbytes)
        + (0 if speculator.deferred is None else speculator.deferred.num_bytes),
        deferred_rows=0 if speculator.deferred is None else speculator.deferred.max_rows,
        logit_bytes=0 if speculator.draft_logits is None else speculator.draft_logits.nbytes,
        parallel=parallel_layout(speculator.vllm_config),
    )


def of_proposer(proposer: Any) -> Capability:
    """What a V1 proposer can do that knows its attention groups."""
    model = proposer.model
    names = model.get_draft_kv_cache_layer_names()
    backend_of = {name: backend_name(entry.group.backend) for entry in proposer._groups for name in entry.group.layer_names}
    buffers = (proposer.input_ids, proposer.positions, proposer._slot_mapping_buffer)
    return Capability(
        draft=proposer.draft,
        dtype=str(proposer.dtype).removeprefix("torch.") + model.variants,
        num_speculative_tokens=proposer.num_speculative_tokens,
        runner="V1",
        backends=tuple(backend_of[name] for name in names),
        needs_cpu_lengths=True,
        num_kv_groups=1,
        graphs="no CUDA graphs of the whole step (V1 runner)",
        largest_graph=0,
        num_graphs=0,
        capture=proposer._aux_fact,
        fused_context="V1 runner",
        fused_query_rows=query_rows_verdict(model, proposer.vllm_config),
        fused_head="V1 runner",
        longest_context=proposer._limit,
        sampling=proposer.speculative_config.draft_sample_method,
        buffer_bytes=sum(buffer.nbytes for buffer in buffers),
        logit_bytes=0,
        parallel=parallel_layout(proposer.vllm_config),
    )


def _counted(names: tuple[str, ...]) -> str:
    """``FLASH_ATTN`` or, where layers differ, ``4 x FLASH_ATTN + 1 x CUSTOM``."""
    counts = Counter(names)
    return names[0] if len(counts) == 1 else " + ".join(f"{count} x {name}" for name, count in counts.items())
