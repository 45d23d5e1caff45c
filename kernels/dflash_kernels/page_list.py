# SPDX-License-Identifier: Apache-2.0
"""Pages of a batch as one list: block table and lengths in, FlashInfer's (indptr, pages, last page length) out.

FlashInfer reads the pages of request r at `pages[indptr[r] : indptr[r + 1]]`, the last one filled up to `last_page_len[r]`.
Its planner makes these arrays on the host from lengths that it copies back; here they follow from tensors on the device, so a
CUDA graph can record it and nothing waits.

Grid (R, column tiles). Every program sums the pages of the requests before its own, which is one load of at most a few thousand
lengths and spares a scan between launches. CUDA graphs: the grid follows from R and the table's width, outputs keep their
addresses; one variant is compiled per capacity and page size, and none while serving.

Cost (H200): 128 requests of 1,024 tokens in pages of 16 write 33 kB, launch-bound at some 2 us.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

__all__ = ["PageList", "page_list"]

_BLOCK_PAGES = 1024


@dataclass(frozen=True, slots=True)
class PageList:
    """Outputs of `page_list`, allocated once for `max_num_reqs` requests after graph padding.

    Attributes:
        indptr: int32 `[max_num_reqs + 1]`, where the pages of each request begin.
        pages: int32 `[capacity]`, page ids request by request.
        last_page_len: int32 `[max_num_reqs]`, keys in the last page, 1 to the page size; 0 for a request without keys.
    """

    indptr: torch.Tensor
    pages: torch.Tensor
    last_page_len: torch.Tensor

    @classmethod
    def empty(cls, max_num_reqs: int, max_pages_per_req: int, device: torch.device | str) -> "PageList":
        """Zeroed outputs: whoever reads them too early sees requests without keys."""
        sizes = (max_num_reqs + 1, max_num_reqs * max_pages_per_req, max_num_reqs)
        return cls(*(torch.zeros(size, dtype=torch.int32, device=device) for size in sizes))

    @property
    def nbytes(self) -> int:
        """Bytes of device memory held."""
        return self.indptr.nbytes + self.pages.nbytes + self.last_page_len.nbytes


# Batch sizes are not specialised: slices of one table and one length tensor share a compiled kernel.
@triton.jit(do_not_specialize=["num_reqs"], do_not_specialize_on_alignment=["table_ptr", "seq_lens_ptr"])
def _page_list_kernel(  # type: ignore[no-untyped-def]  # Triton pointers have no Python type
    table_ptr, table_stride, seq_lens_ptr, indptr_ptr, pages_ptr, last_page_len_ptr, num_reqs,
    COLUMNS: tl.constexpr, PAGE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    others = tl.arange(0, BLOCK_R)
    # A length beyond the table has no pages to read: it is cut, as nothing behind the row may be taken for a page.
    lengths = tl.minimum(tl.load(seq_lens_ptr + others, mask=others <= request, other=0), COLUMNS * PAGE)
    counts = tl.cdiv(lengths, PAGE)
    start = tl.sum(tl.where(others < request, counts, 0), 0)
    count = tl.sum(tl.where(others == request, counts, 0), 0)
    column = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    row_ptr = table_ptr + request.to(tl.int64) * table_stride
    pages = tl.load(row_ptr + column, mask=column < count, other=0)
    tl.store(pages_ptr + start + column, pages, mask=column < count)
    if tl.program_id(1) == 0:
        length = tl.sum(tl.where(others == request, lengths, 0), 0)
        tl.store(last_page_len_ptr + request, length - tl.maximum(count - 1, 0) * PAGE)
        tl.store(indptr_ptr + request, start)
        if request == num_reqs - 1:
            tl.store(indptr_ptr + num_reqs, start + count)


def page_list(block_table: torch.Tensor, seq_lens: torch.Tensor, kv_block_size: int, out: PageList) -> None:
    """Write the pages that hold the first `seq_lens[r]` keys of each of R requests, side by side.

    Args:
        block_table: int32 `[>= R, columns]`, unit column stride; row r lists the pages of request r. Rows of requests without
            keys are never read.
        seq_lens: int32 `[R]`, contiguous; keys of each request, 0 for padding. At most `columns * kv_block_size`.
        kv_block_size: keys per page.
        out: entries behind the R requests and behind their pages keep their values.

    Raises:
        ValueError: a shape, dtype or stride that the kernel does not take, or outputs too small for R full rows.
    """
    num_reqs, columns = seq_lens.shape[0], block_table.shape[-1]
    _check(block_table, seq_lens, kv_block_size, out)
    if num_reqs == 0:
        return
    _page_list_kernel[(num_reqs, triton.cdiv(columns, _BLOCK_PAGES))](
        block_table, block_table.stride(0), seq_lens, out.indptr, out.pages, out.last_page_len, num_reqs,
        COLUMNS=columns, PAGE=kv_block_size, BLOCK_R=triton.next_power_of_2(out.last_page_len.shape[0]), BLOCK_P=_BLOCK_PAGES,
    )  # fmt: skip


def _check(block_table: torch.Tensor, seq_lens: torch.Tensor, kv_block_size: int, out: PageList) -> None:
    num_reqs = seq_lens.shape[0]
    for name, tensor, ndim in (("block_table", block_table, 2), ("seq_lens", seq_lens, 1)):
        if tensor.dtype != torch.int32 or tensor.ndim != ndim or tensor.stride(-1) != 1 or tensor.shape[0] < num_reqs:
            raise ValueError(
                f"{name} must be int32 with {ndim} dimension(s), at least {num_reqs} rows and last stride 1; got {tensor.dtype} "
                f"{list(tensor.shape)} stride {tensor.stride()}."
            )
    if kv_block_size < 1:
        raise ValueError(f"kv_block_size must be at least 1; got {kv_block_size}.")
    if num_reqs > out.last_page_len.shape[0] or num_reqs * block_table.shape[1] > out.pages.shape[0]:
        raise ValueError(
            f"outputs hold {out.last_page_len.shape[0]} requests and {out.pages.shape[0]} pages; {num_reqs} requests of up to "
            f"{block_table.shape[1]} pages were given. Make the PageList for the largest padded batch and the table's width."
        )
