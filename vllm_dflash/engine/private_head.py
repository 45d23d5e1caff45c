# SPDX-License-Identifier: Apache-2.0
"""A private LM head for drafting: a copy of the rows that matter, in fp8 on GPUs, mapped back to target ids.

The full head of an 8B model in 16 bits is a quarter of a draft step at batch 1. Only argmax drafts come from the copy; a token
without a row can never be drafted, which costs acceptance and never correctness. The target's own head is only read.

Under tensor parallelism chosen rows are dealt out in turn, since frequent tokens have low ids and would all sit on the first
rank; a copy of the whole head keeps the target's shards. Weight updates mark the copy stale, and the next step fills the same
memory again, which captured graphs hold.
"""

import copy
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from vllm.distributed import get_tp_group
from vllm.logger import init_logger
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.platforms import current_platform

from dflash_kernels.draft_head import HeadWorkspace, Temperatures, Winner, combine_shards
from dflash_kernels.draft_head_fp8 import FUSED_MAX_ROWS, draft_head_fp8, winner_of_logits
from dflash_kernels.fp8_linear import quantise_rows
from vllm_dflash.engine.buffers import MIB
from vllm_dflash.engine.draft_quantization import many_rows
from vllm_dflash.engine.guest_rows import GuestRows
from vllm_dflash.engine.head_rows import Shortlist, rows_on_all_ranks, shortlist_of
from vllm_dflash.options import PluginOptions, read_options

logger = init_logger("vllm.plugins.dflash")

_ALIGN = 16  # rows of the platform's fp8 product
_CHUNK = 2048  # rows of the head that a rank asks for at once: 17 MB at hidden 4096 in bf16, times ranks
_LOGIT_BYTES = 320 << 20
PROBABILISTIC = "probabilistic"


class PrivateHead:
    """Rows of an LM head with their target ids; callable in the place of ``get_top_tokens``.

    Args:
        head: vLLM's head module, read again at every :meth:`fill`.
        rows: int64 [R], rows of the whole head (all ranks) to copy, by falling frequency; None for all.
        table: int64 [V_draft] target id of every row of a reduced head; None where rows are target ids.
        is_a_guess: the user left the choice open; it is dropped where it is not faster.
        shortlist: where ``rows`` come from; of a guess with all rows, those that a small head would have instead.
        num_guests: rows for tokens that requests have just used, besides ``rows``.
        fp8: e4m3 numbers; otherwise the head's own dtype, rounded to e4m3 first where ``rounded``.
    """

    def __init__(
        self,
        head: Any,  # vLLM's module
        rows: torch.Tensor | None,
        table: torch.Tensor | None,
        *,
        fp8: bool,
        rounded: bool = False,
        is_a_guess: bool = False,
        shortlist: Shortlist | None = None,
        num_guests: int = 0,
    ) -> None:
        group = get_tp_group()
        shard = head.shard_indices
        weight = head.weight
        self._head, self._fp8, self._rounded = head, fp8, rounded
        self._first, self._valid = shard.org_vocab_start_index, shard.num_org_elements
        self._every_row = rows is None
        self.is_a_guess, self.shortlist = is_a_guess, shortlist
        mine = torch.arange(self._first, self._first + self._valid) if rows is None else rows.cpu()
        self._wanted = mine  # of all ranks, where rows were chosen
        mine = mine if rows is None else mine[group.rank_in_group :: group.world_size]
        mine = mine.sort().values  # ties then go to the lowest id, as in an argmax over the whole head
        self._mine = mine
        self.num_listed = len(mine)
        self.num_rows = self.num_listed + (0 if rows is None or not len(mine) else num_guests)
        self._table, self.num_guests = table, num_guests
        self.token_ids = torch.zeros(self.num_listed, dtype=torch.int64, device=weight.device)  # of this rank
        padded = -(-self.num_rows // _ALIGN) * _ALIGN
        dtype = torch.float8_e4m3fn if fp8 else weight.dtype
        self.weight = torch.zeros(padded, weight.shape[1], dtype=dtype, device=weight.device)
        self.scale = torch.ones(padded, dtype=torch.float32, device=weight.device)
        self.offsets = torch.zeros(padded, dtype=torch.int64, device=weight.device)
        self.workspace: HeadWorkspace | None = None
        self._odds = self.stale = False
        self._plain: Any = nn.Module()
        self._guests = self._make_guests() if self.num_rows > self.num_listed else None
        self.fill()

    def _make_guests(self) -> GuestRows:
        """Rows of this rank's shard that are not listed, on any rank."""
        others = torch.arange(self._first, self._first + self._valid)
        others = others[~torch.isin(others, self._wanted)]
        tokens = others if self._table is None else self._table.cpu()[others]
        return GuestRows(self, self.num_rows - self.num_listed, others - self._first, tokens)

    def follow(self, token_ids: torch.Tensor | None) -> None:
        """Before a step: copy updated weights, and take in the rows of ``token_ids`` (int [n]) where this head has guests."""
        if self.stale:
            self.fill()
        if self._guests is not None and token_ids is not None:
            self._guests.admit(token_ids, self._head.weight.data, fp8=self._fp8, rounded=self._rounded)

    @property
    def on_gpu(self) -> bool:
        """Whether the argmax is fused with the product: the call can be captured."""
        return self._fp8

    @property
    def nbytes(self) -> int:
        """Bytes of memory for rows, scales and the map, on this rank; the workspace counts itself."""
        maps = 0 if self._guests is None else self._guests.nbytes
        return maps + sum(t.numel() * t.element_size() for t in (self.weight, self.scale, self.offsets))

    def fill(self) -> None:
        """Copy the rows from the head as it is now, into the same memory; nothing in it needs to be left from before.

        A deep sleep of the engine drops all of it, the map to target ids included.
        """
        self.stale = False
        self._map_rows()
        for start, rows in self._source():
            part = slice(start, start + rows.shape[0])
            if self._fp8:
                self.weight[part], self.scale[part] = quantise_rows(rows)
            elif self._rounded:
                numbers, scales = quantise_rows(rows)
                self.weight[part] = (numbers.float() * scales[:, None]).to(rows.dtype)
            else:
                self.weight[part] = rows
        if not self._fp8:
            self._plain.weight = nn.Parameter(self.weight[: self.num_listed], requires_grad=False)
            dispatch_cpu_unquantized_gemm(self._plain, remove_weight=False)
        if self._guests is not None:
            self._guests.reset(fp8=self._fp8)
            self.follow(torch.full((1,), -1, dtype=torch.int32, device=self.weight.device))  # compiled before it is needed

    def _map_rows(self) -> None:
        ids = self._mine.to(self.token_ids.device)
        self.token_ids.copy_(ids if self._table is None else self._table.to(ids.device)[ids])
        self.offsets.zero_()
        self.offsets[: self.num_listed] = self.token_ids - torch.arange(self.num_listed, device=ids.device)

    def _source(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(first row of ours, rows of the head) in pieces; a collective where rows were chosen from several ranks."""
        weight, group = self._head.weight.data, get_tp_group()
        alone = self._every_row or group.world_size == 1
        most = len(self._mine) if alone else -(-len(self._wanted) // group.world_size)  # equally many exchanges on every rank
        for start in range(0, most, _CHUNK):
            mine = self._mine[start : start + _CHUNK]
            yield start, weight[(mine - self._first).to(weight.device)] if alone else self._exchange(weight, mine)

    def _exchange(self, weight: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
        """The rows ``mine`` from whichever ranks hold them; every rank asks for as many."""
        group = get_tp_group()
        wanted = nn.functional.pad(mine + 1, (0, _CHUNK - len(mine))).to(weight.device)  # 0 asks for nothing
        asked = group.all_gather(wanted, dim=0) - 1 - self._first
        held = (asked >= 0) & (asked < self._valid)
        rows = weight[asked.clamp(0, max(self._valid - 1, 0))] * held.unsqueeze(1)
        found: torch.Tensor = group.all_reduce(rows).view(group.world_size, _CHUNK, -1)
        return found[group.rank_in_group, : len(mine)]

    def leading(self, num_rows: int) -> "PrivateHead":
        """A head of as many rows as a small one of ``num_rows`` has on this rank, in this one's memory: to be timed only."""
        part = copy.copy(self)
        part.num_rows = min(self.num_rows, -(-num_rows // get_tp_group().world_size) + self.num_guests)
        padded = -(-part.num_rows // _ALIGN) * _ALIGN
        part.weight, part.scale, part.offsets = self.weight[:padded], self.scale[:padded], self.offsets[:padded]
        part.workspace = None
        return part

    def shortened(self) -> "PrivateHead":
        """The small head of :attr:`shortlist`."""
        assert self.shortlist is not None
        listed, guests = self.shortlist, self.num_guests
        return PrivateHead(self._head, listed.rows, self._table, fp8=self._fp8, shortlist=listed, num_guests=guests)

    def bind(self, max_rows: int, *, odds: bool = False) -> "PrivateHead":
        """Allocate scratch for ``max_rows`` sample rows; ``odds``: :meth:`winner` will be called with temperatures."""
        self._odds = odds
        self._allocate(max_rows)
        return self

    def _allocate(self, max_rows: int) -> HeadWorkspace:
        self.workspace = HeadWorkspace(
            max_rows=max_rows,
            vocab_rows=self.weight.shape[0],
            dtype=torch.bfloat16,
            device=self.weight.device,
            logit_bytes=0,
            odds=self._odds,
        )
        return self.workspace

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[m, H] -> most likely target ids among the rows, int64 [m]."""
        return self.winner(hidden_states).tokens

    def winner(self, hidden_states: torch.Tensor, temperatures: Temperatures | None = None) -> Winner:
        """The same with logits, and with the odds against each token (among the rows) where ``temperatures`` are given."""
        return across_ranks(self._winner(hidden_states, temperatures), temperatures)

    def _winner(self, hidden: torch.Tensor, temperatures: Temperatures | None = None) -> Winner:
        if not self._fp8:
            assert temperatures is None
            logits = self._plain.cpu_linear(hidden, self._plain.weight, None)
            if self._guests is not None:  # the product above has packed its weight
                logits = torch.cat([logits, hidden @ self.weight[self.num_listed : self.num_rows].T], dim=-1)
            values, places = logits.max(dim=-1)
            return Winner(places + self.offsets[places], values.float())
        workspace = self.workspace
        if workspace is None or workspace.max_rows < hidden.shape[0]:  # never where graphs are captured: bound before
            workspace = self._allocate(max(hidden.shape[0], FUSED_MAX_ROWS))
        options: dict[str, Any] = {"workspace": workspace, "num_valid": self.num_rows}
        if hidden.shape[0] <= FUSED_MAX_ROWS:
            return draft_head_fp8(hidden, self.weight, self.scale, self.offsets, temperatures=temperatures, **options)
        out = Winner.empty(hidden.shape[0], hidden.device, odds=temperatures is not None)
        size = max(1, _LOGIT_BYTES // (self.weight.shape[0] * hidden.element_size()))
        for start in range(0, hidden.shape[0], size):
            part = slice(start, start + size)
            logits = many_rows(hidden[part], self.weight, self.scale)
            warmth = None if temperatures is None else temperatures.rows(part)
            winner_of_logits(logits, self.offsets, temperatures=warmth, out=out.rows(part), **options)
        return out

    def describe(self) -> str:
        """For the start-up line."""
        dtype = "fp8" if self._fp8 else str(self.weight.dtype).removeprefix("torch.")
        kept = "all" if self._every_row else len(self._wanted)
        guests = "" if self._guests is None else f" and {self._guests.count} for tokens in use"
        listed = "" if self._every_row or self.shortlist is None else f" ({self.shortlist.describe()})"
        return f"private draft head of {kept} rows{guests} in {dtype}, {self.nbytes / MIB:.1f} MiB{listed}"


def across_ranks(
    winner: Winner, temperatures: Temperatures | None = None, *, target_ids: torch.Tensor | None = None, group: Any = None
) -> Winner:
    """The best of all tensor-parallel ranks' winners, whose tokens are target ids or become such by ``target_ids``."""
    group = get_tp_group() if group is None else group
    if group.world_size == 1:
        return winner
    # One collective of int32: the bits of the value and of the odds, and the token, which fits.
    parts = [winner.values.view(torch.int32), winner.tokens.to(torch.int32)]
    if winner.against is not None:
        parts.append(winner.against.view(torch.int32))
    gathered = group.all_gather(torch.stack(parts), dim=0).view(group.world_size, len(parts), -1)
    against = None if winner.against is None else gathered[:, 2].contiguous().view(torch.float32)
    values, tokens = gathered[:, 0].contiguous().view(torch.float32), gathered[:, 1].to(torch.int64).contiguous()
    return combine_shards(values, tokens, target_ids=target_ids, against=against, temperatures=temperatures)


def build_private_head(model: Any, vllm_config: Any) -> PrivateHead | str:
    """The private head that the options ask for, or the reason against it.

    Args:
        model: our draft model, after ``share()``.
        vllm_config: with resolved options.

    Raises:
        RowListError: the row list cannot be used.
    """
    options = read_options(vllm_config.additional_config)
    head = model.lm_head
    reason = _why_full(model, vllm_config, options)
    if reason is not None:
        if options.draft_head == "small":
            logger.warning_once(f"vllm-dflash: draft_head small is not used, drafts come from the full head: {reason}.")
        return reason
    on_cpu, open_choice = head.weight.device.type == "cpu", options.draft_head == "auto"
    found = rows_on_all_ranks(vllm_config, options)
    # A list that was only guessed is not worth the risk: keep every token unless told otherwise.
    listed = shortlist_of(found, model.draft_to_target, options.draft_head_rows) if found.calibrated or not open_choice else None
    private = PrivateHead(
        head,
        None if open_choice or listed is None else listed.rows,  # an open choice falls when the heads have been timed
        model.draft_to_target,
        fp8=not on_cpu,
        rounded=on_cpu and options.draft_weights == "fp8",
        is_a_guess=open_choice,
        shortlist=listed,
        num_guests=options.draft_head_guests,
    )
    logger.info_once(f"DFlash draft: {private.describe()}")
    return private


def _why_full(model: Any, vllm_config: Any, options: PluginOptions) -> str | None:
    """Why drafts come from the full head; None if a private one can stand in."""
    head = model.lm_head
    if options.draft_head == "full":
        return "draft_head is full"
    if vllm_config.speculative_config.draft_sample_method == PROBABILISTIC:
        return "probabilistic drafts need the whole distribution"
    if not isinstance(getattr(head, "quant_method", None), UnquantizedEmbeddingMethod):
        return f"the LM head is quantised ({type(getattr(head, 'quant_method', None)).__name__})"
    if getattr(head, "bias", None) is not None:
        return "the LM head has a bias"
    if model.logits_processor.scale <= 0:  # a negative scale would turn the order around
        return f"logit_scale {model.logits_processor.scale} is not positive"
    if head.weight.device.type == "cpu" and options.draft_head == "auto":
        return "a CPU keeps the full head unless asked"
    if options.draft_head == "auto" and vllm_config.model_config.enable_sleep_mode:
        return "in sleep mode heads cannot be timed while loading"
    if head.weight.device.type not in ("cpu", "cuda") or torch.version.hip:
        return f"no kernels for {head.weight.device.type}"
    least = 89 if model.hidden_norm.weight.dtype == torch.float32 else 80
    if head.weight.device.type == "cuda" and not current_platform.has_device_capability(least):
        return f"no fp8 kernel for {model.hidden_norm.weight.dtype} on this GPU"
    if options.draft_head == "auto" and getattr(vllm_config, "weight_transfer_config", None) is not None:
        return "weights are updated in place, and a copy of the head would not follow"
    return None


def watch_updates(target: Any, model: Any) -> None:
    """Mark ``model``'s private head stale whenever ``target`` loads weights: its rows are copies of the target's."""
    load = getattr(target, "load_weights", None)
    if load is None or model.private_head is None:
        return

    @functools.wraps(load)
    def load_weights(*args: Any, **kwargs: Any) -> Any:
        loaded = load(*args, **kwargs)
        if model.private_head is not None:
            model.private_head.stale = True
        return loaded

    target.load_weights = load_weights
