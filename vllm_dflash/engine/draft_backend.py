# SPDX-License-Identifier: Apache-2.0
"""How the draft's attention sees its query block: metadata of R requests x Q rows, non-causal where the draft says so.

The block is uniform, so metadata follows from R alone plus tensors with fixed addresses (sequence lengths, block tables,
slots). It is built once per captured graph, never read from the CPU afterwards, and what a replay must recompute is recorded
in the graph by :meth:`DraftAttention.refresh`. Works over vLLM's own backends (FlashAttention, Triton, CPU) and over ours
(``block_backend.py``, ``flashinfer_backend.py``).

Differences from the built-in speculator: causality is per layer, not per KV group; the block table of a backend with smaller
kernel blocks is mapped again on every replay; FlashAttention's split count follows the number of requests; and the draft's
groups leave the target's list, which would otherwise build their metadata in every target step.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.utils import AttentionGroup

from vllm_dflash.engine.buffers import DraftBuffers

# A tile of FlashAttention 3 holds the packed query heads of one KV head. From this many tiles on, one split is fastest and needs
# neither the combine kernel nor its fp32 scratch (1 GB at 128 requests with vLLM's fixed 32 splits). On an H200, 16 rows, 32/8
# heads of 128, us per layer with one split / several: 8 requests, 640 keys 11.4 / 14.7, 4,096 keys 45.3 / 43.8; 128 requests
# 97.7 / 109.5 and 484 / 500. At 4 requests and 4,096 keys one split loses: 43.6 / 28.0.
_TILES_WITHOUT_SPLITS = 64


def separate_by_causality(
    groups: list[list[AttentionGroup]], layer_causal: Mapping[str, bool], vllm_config: VllmConfig, device: torch.device
) -> list[list[AttentionGroup]]:
    """Split attention groups whose layers differ in causality; each part gets metadata builders of its own.

    Such groups exist when the hybrid KV cache manager is off and windowed and full layers share a group.
    """
    return [[part for group in row for part in _parts(group, layer_causal, vllm_config, device)] for row in groups]


def _parts(
    group: AttentionGroup, layer_causal: Mapping[str, bool], vllm_config: VllmConfig, device: torch.device
) -> list[AttentionGroup]:
    by_causality: dict[bool, list[str]] = {}
    for name in group.layer_names:
        by_causality.setdefault(layer_causal[name], []).append(name)
    if len(by_causality) == 1:
        return [group]
    kernel_block_size = group.get_metadata_builder().kv_cache_spec.block_size
    parts = []
    for names in by_causality.values():
        part = dataclasses.replace(group, layer_names=names, metadata_builders=[])
        part.create_metadata_builders(vllm_config, device, kernel_block_size)
        parts.append(part)
    return parts


def release_target_groups(target_groups: list[list[AttentionGroup]], draft_layer_names: set[str]) -> int:
    """Take groups that hold only draft layers out of the runner's list, in place; returns how many.

    The runner builds metadata for every group in its list on every target step, and nothing reads the draft's.
    """
    removed = 0
    for row in target_groups:
        keep = [group for group in row if not draft_layer_names.issuperset(group.layer_names)]
        removed += len(row) - len(keep)
        row[:] = keep
    return removed


class DraftAttention:
    """Builds and refreshes the attention metadata of the draft layers.

    Args:
        groups: attention groups of the draft by KV group id, one causality each (:func:`separate_by_causality`).
        layer_names: KV-cache names of the draft's layers, in layer order.
        layer_causal: causality by layer name.
        buffers: query block, bound to the same block tables.
    """

    def __init__(
        self,
        groups: list[list[AttentionGroup]],
        layer_names: list[str],
        layer_causal: Mapping[str, bool],
        buffers: DraftBuffers,
        block_tables: BlockTables,
        vllm_config: VllmConfig,
    ) -> None:
        self.groups = [group for row in groups for group in row]
        self.group_ids = [gid for gid, row in enumerate(groups) if row]
        self.buffers = buffers
        self._block_tables = block_tables
        self._causal = layer_causal
        self._num_query = buffers.shape.num_query_per_req
        self._row_of_group = {gid: row for row, gid in enumerate(self.group_ids)}
        row_of_layer = {name: self._row_of_group[group.kv_cache_group_id] for group in self.groups for name in group.layer_names}
        self.layer_rows = [row_of_layer[name] for name in layer_names]
        """Row of ``context_slots`` for each draft layer."""
        self.refreshes_in_graph = all(group.supports_draft_decode_metadata_update for group in self.groups)
        layers = vllm_config.compilation_config.static_forward_context
        # Builders of FlashAttention 3, the only version whose split count a graph may fix.
        self._flash3 = [group.get_metadata_builder() for group in self.groups if self._tune(group, layers)]

    @property
    def backend_names(self) -> tuple[str, ...]:
        """Distinct backends of the draft layers, in group order."""
        return tuple(dict.fromkeys(getattr(group.backend, "draft_name", group.backend.get_name()) for group in self.groups))

    @staticmethod
    def _tune(group: AttentionGroup, layers: Mapping[str, Any]) -> bool:
        """Decide FlashAttention 3's ahead-of-time schedule for this group alone; False for other builders, left as they are.

        vLLM enables it from the windows of *all* layers of the engine. It is wrong for windowed draft layers, and a full
        draft beside a windowed target can keep it.
        """
        builder = group.get_metadata_builder()
        if not getattr(builder, "aot_schedule", False):
            return False
        windowed = any(getattr(layers[name], "sliding_window", None) is not None for name in group.layer_names)
        builder.aot_schedule = not windowed
        builder.aot_sliding_window = (-1, -1)
        # Keeps the schedule in the tensor that the refresh allocates inside the graph instead of two more copies per step.
        builder.use_full_cuda_graph = False
        return True

    def build(
        self, num_reqs: int, max_seq_len: int, lengths_bound: torch.Tensor, *, capture: bool, num_query: int | None = None
    ) -> dict[str, Any]:
        """Metadata by layer name.

        Args:
            num_reqs: requests of the step, padding included.
            max_seq_len: no request is longer; ``max_model_len`` at capture, so that a replay never outgrows it.
            lengths_bound: int32 [num_reqs] on the CPU, for backends that plan on the host.
            capture: build for recording into a CUDA graph.
            num_query: rows of a request in this step; None for the widest.
        """
        metadata: dict[str, Any] = {}
        for group in self.groups:
            common = self._common(group, num_reqs, max_seq_len, lengths_bound, num_query or self._num_query)
            if capture:
                built = group.build_metadata_for_cudagraph_capture(common)
                self._bound_splits(group, built, num_reqs)
            else:
                built = group.build_metadata(common)
            metadata.update(dict.fromkeys(group.layer_names, built))
        return metadata

    def _common(
        self, group: AttentionGroup, num_reqs: int, max_seq_len: int, lengths_bound: torch.Tensor, num_query: int
    ) -> CommonAttentionMetadata:
        query = self.buffers.query
        rows = num_reqs * num_query
        gid = group.kv_cache_group_id
        return CommonAttentionMetadata(
            query_start_loc=query.query_start_loc[: num_reqs + 1],
            query_start_loc_cpu=torch.arange(0, rows + 1, num_query, dtype=torch.int32),
            seq_lens=query.seq_lens[:num_reqs],
            num_reqs=num_reqs,
            num_actual_tokens=rows,
            max_query_len=num_query,
            max_seq_len=max_seq_len,
            block_table_tensor=self._block_tables.input_block_tables[gid][:num_reqs],
            slot_mapping=query.slots[self._row_of_group[gid], :rows],
            causal=self._causal[group.layer_names[0]],
            positions=query.positions[:rows],
            is_prefilling=torch.zeros(num_reqs, dtype=torch.bool),
            seq_lens_cpu_upper_bound=lengths_bound,
        )

    def _bound_splits(self, group: AttentionGroup, built: Any, num_reqs: int) -> None:
        """FlashAttention 3 only: cap the KV splits recorded in a graph by the tiles that R requests bring along."""
        builder = group.get_metadata_builder()
        if builder not in self._flash3 or built.max_num_splits == 1:
            return  # batch-invariant mode wants exactly one split
        if num_reqs * builder.num_heads_kv >= _TILES_WITHOUT_SPLITS:
            built.max_num_splits = 1

    def refresh(self, metadata: dict[str, Any], num_reqs: int) -> None:
        """Recompute what depends on this step's lengths and block tables. Recorded in the graph: no sync, fixed outputs."""
        for group in self.groups:
            if group.kernel_block_size is not None:
                group.map_to_kernel_block_table(self._block_tables.input_block_tables[group.kv_cache_group_id][:num_reqs])
            if group.supports_draft_decode_metadata_update:
                group.update_draft_decode_metadata(metadata)

    def query_slots(self, rows: int) -> dict[str, torch.Tensor]:
        """Slots of the query rows by layer name, int64 [rows] each."""
        slots = self.buffers.query.slots
        return {
            name: slots[self._row_of_group[group.kv_cache_group_id], :rows] for group in self.groups for name in group.layer_names
        }

    def by_layer(self, slots: torch.Tensor) -> list[torch.Tensor]:
        """``slots`` int64 [G, n] of context rows for each draft layer, int64 [n] each."""
        return [slots[row] for row in self.layer_rows]
