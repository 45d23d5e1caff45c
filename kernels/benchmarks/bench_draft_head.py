# SPDX-License-Identifier: Apache-2.0
"""Time of `draft_head` against a full-logits argmax: Qwen3-8B's head (151,936 x 4096, bf16), 7 to 1,920 sample rows.

Bytes are the weights once, the hidden states and the winners: logits are not needed, so whoever writes them loses. Above
some 180 rows the product is compute-bound, and its share of the matmul ceiling counts.
Both methods are timed up to 192 rows, to place `FUSED_MAX_ROWS`, and with the odds against each winner. `--sweep` compares
tiles of the fused kernel and of the argmax.
"""

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # a bare checkout has the package beside this folder
from dflash_kernels import draft_head as module
from dflash_kernels import reference
from dflash_kernels.draft_head import HeadWorkspace, Temperatures, Winner, draft_head, pick_winner
from harness import Case, main

VOCAB, WIDTH = 151_936, 4096


def _cases(num_rows: int, weight: torch.Tensor) -> Iterator[Case]:
    device = weight.device
    hidden = torch.randn(num_rows, WIDTH, device=device, dtype=weight.dtype)
    # 128 rows at least, so that the matmul method has its buffer at every size.
    rows = max(num_rows, 128)
    workspace = HeadWorkspace(max_rows=rows, vocab_rows=VOCAB, dtype=weight.dtype, device=device, fused_rows=rows, odds=True)
    out = Winner.empty(num_rows, device, odds=True)
    states = torch.arange(num_rows, device=device)
    temperatures = Temperatures(states, torch.linspace(0, 2, num_rows, device=device))
    num_bytes = (weight.numel() + hidden.numel()) * weight.element_size() + 12 * num_rows
    name, flops = f"rows={num_rows}", 2 * num_rows * weight.numel()
    for method in ("fused", "matmul") if num_rows <= 192 else ("matmul",):
        for warmth, suffix in ((None, ""), (temperatures, ", odds")):

            def run(method: str = method, warmth: Temperatures | None = warmth) -> None:
                draft_head(hidden, weight, workspace=workspace, method=method, temperatures=warmth, out=out)

            yield Case("draft_head", name, method + suffix, run, num_bytes, flops=flops)

    def full_logits() -> None:
        torch.argmax(hidden @ weight.T, dim=-1)

    yield Case("draft_head", name, "torch", full_logits, num_bytes, flops=flops)
    expected, found = reference.draft_head(hidden[:4], weight), draft_head(hidden[:4], weight, workspace=workspace)
    near = (found.values - expected.values).abs().max().item()
    assert near < 2.0, f"rows={num_rows}: winners' logits differ by {near} from plain torch"


def cases(thorough: bool) -> Iterator[Case]:
    """K = 15 at batch 1, 8 and 64, and the size of the switch; thorough: K = 7, more batches and sizes around the switch."""
    weight = torch.randn(VOCAB, WIDTH, device="cuda", dtype=torch.bfloat16) * 0.02
    for num_rows in (7, 15, 32, 64, 120, 128, 192, 240, 480, 960, 1920) if thorough else (15, 64, 120, 960):
        yield from _cases(num_rows, weight)


# (vocabulary, rows, depth, warps, stages); the first of each number of rows is the table's, which ends at 64.
_TILES = (
    (128, 16, 128, 4, 3), (128, 16, 64, 4, 5), (256, 16, 64, 8, 3), (128, 16, 64, 8, 5),
    (128, 32, 64, 4, 5), (128, 32, 128, 4, 2), (256, 32, 64, 8, 3),
    (128, 64, 128, 8, 4), (128, 64, 64, 4, 4), (128, 64, 64, 8, 4), (256, 64, 64, 8, 5),
    (128, 128, 64, 8, 3), (128, 128, 64, 8, 6), (256, 128, 64, 8, 4),
)  # fmt: skip
_ARGMAX = ((8192, 8), (4096, 4), (4096, 8), (8192, 16), (16384, 16))  # (tokens per program, warps)


def _sweep_tiles(weight: torch.Tensor) -> Iterator[Case]:
    workspace = HeadWorkspace(max_rows=128, vocab_rows=VOCAB, dtype=weight.dtype, device=weight.device, fused_rows=128)
    for num_rows, rows in ((15, 16), (32, 32), (64, 64), (96, 128), (120, 128)):
        hidden = torch.randn(num_rows, WIDTH, device=weight.device, dtype=weight.dtype)
        num_bytes = (weight.numel() + hidden.numel()) * weight.element_size() + 12 * num_rows
        run = functools.partial(draft_head, hidden, weight, workspace=workspace, out=Winner.empty(num_rows, weight.device))
        matmul = functools.partial(run, method="matmul")
        yield Case("draft_head", f"rows={num_rows}", "matmul", matmul, num_bytes)
        expected = matmul().values.clone()
        for tile in _TILES:
            if tile[1] == rows:
                with mock.patch.object(module, "_FUSED_TILES", (module._Tile(*tile),)):
                    fused = functools.partial(run, method="fused")
                    assert (fused().values - expected).abs().max() < 0.1, f"tile {tile} differs from matmul"
                    yield Case("draft_head", f"rows={num_rows}", "/".join(map(str, tile)), fused, num_bytes)


def _sweep_argmax(device: torch.device) -> Iterator[Case]:
    for num_rows in (120, 480, 960):
        logits = torch.randn(num_rows, VOCAB, device=device, dtype=torch.bfloat16)
        workspace = HeadWorkspace(max_rows=num_rows, vocab_rows=VOCAB, dtype=logits.dtype, device=device)
        out, num_bytes = Winner.empty(num_rows, device), logits.numel() * logits.element_size()
        name = f"argmax rows={num_rows}"
        yield Case("draft_head", name, "torch", functools.partial(torch.argmax, logits, dim=-1), num_bytes)

        def run(logits: torch.Tensor = logits, workspace: HeadWorkspace = workspace, out: Winner = out) -> None:
            module._logit_tiles(logits, workspace, logits.shape[0], 0, VOCAB)
            pick_winner(workspace.values, workspace.indices, -(-VOCAB // module.LOGIT_TILE), logits.shape[0], out=out)

        for tile, warps in _ARGMAX:
            with mock.patch.multiple(module, LOGIT_TILE=tile, LOGIT_WARPS=warps):
                run()
                assert torch.equal(out.values, logits.amax(-1).float()), f"tile {tile} finds another maximum"
                yield Case("draft_head", name, f"{tile}/{warps}", run, num_bytes)


def sweep() -> Iterator[Case]:
    """Tiles of the fused kernel against the matmul method around the switch, then tiles of the argmax alone."""
    weight = torch.randn(VOCAB, WIDTH, device="cuda", dtype=torch.bfloat16) * 0.02
    yield from _sweep_tiles(weight)
    yield from _sweep_argmax(weight.device)


if __name__ == "__main__":
    main(cases, sweep)
