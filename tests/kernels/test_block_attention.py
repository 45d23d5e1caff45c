# SPDX-License-Identifier: Apache-2.0
"""`block_attention` against the dense oracle: odd shapes, every mask, poisoned memory, and what a CUDA graph relies on."""

import pytest
import torch

from dflash_kernels import reference_compute as reference
from dflash_kernels.block_attention import AttentionWorkspace, Tuning, block_attention

NUM_PAGES = 48
ONE_SPLIT, MANY_SPLITS = 1, 1000  # multiprocessors to pretend: decides whether keys are split


def make_case(
    lens, q=3, heads=4, kv_heads=2, head_dim=64, page=16, dtype=torch.float32, device="cpu", sms=ONE_SPLIT, seed=0, tuning=None
):
    """Positional and keyword arguments of a call; pages are scattered, and every slot holds finite numbers."""
    generator = torch.Generator().manual_seed(seed)
    per_req = max(1, -(-max(lens) // page))
    num_pages = max(NUM_PAGES, per_req * len(lens))
    order = torch.randperm(num_pages, generator=generator)[: per_req * len(lens)]
    query = torch.randn(len(lens) * q, heads, head_dim, generator=generator)
    kv = torch.randn(2, num_pages, page, kv_heads, head_dim, generator=generator)
    table = order.view(len(lens), per_req).int().to(device)
    args = [query.to(device, dtype), *kv.to(device, dtype), table, torch.tensor(lens, dtype=torch.int32, device=device)]
    geometry = {"num_query_per_req": q, "num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}
    geometry |= {"max_num_reqs": len(lens), "max_seq_len": max(256, *lens)}
    workspace = AttentionWorkspace(device=device, num_sms=sms, tuning=tuning or Tuning(), **geometry)
    # Scratch is garbage at first: whatever reads a split that nobody wrote turns into NaN.
    workspace.partial.fill_(float("nan"))
    workspace.lse.fill_(float("nan"))
    return args, {"workspace": workspace, "num_query_per_req": q, "scale": head_dim**-0.5}


def to_double(value):
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def check(args, kwargs, assert_accurate):
    """Run kernel, plain torch and fp64 on the same inputs; returns the kernel's output."""
    out = block_attention(*args, **kwargs)
    double = {name: to_double(value) for name, value in kwargs.items()}
    truth = reference.block_attention(*map(to_double, args), **double)
    assert out.isfinite().all()
    assert_accurate(out, reference.block_attention(*args, **kwargs), truth)
    return out


@pytest.mark.parametrize("sms", [ONE_SPLIT, MANY_SPLITS])
@pytest.mark.parametrize(
    ("q", "heads", "kv_heads", "head_dim", "page", "lens", "dtype"),
    [
        (2, 1, 1, 64, 1, (2, 17), torch.float32),
        (3, 9, 3, 80, 16, (3, 131), torch.float32),
        (7, 3, 1, 96, 128, (130, 7), torch.float16),
        (16, 4, 1, 128, 16, (200,), torch.bfloat16),
        (11, 2, 2, 64, 528, (12, 300), torch.bfloat16),
        (5, 2, 2, 256, 16, (64, 65), torch.bfloat16),
        (17, 9, 1, 64, 16, (150,), torch.float16),  # 153 packed rows: two row tiles
    ],
)
def test_matches_dense_attention(q, heads, kv_heads, head_dim, page, lens, dtype, sms, device, assert_accurate):
    """Breaks on a wrong packed row, page, head or padding of the head dimension, and on a wrong merge of splits."""
    check(*make_case(lens, q, heads, kv_heads, head_dim, page, dtype, device, sms), assert_accurate)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [1, 2, 29, 30, 31, 33, 1000])
def test_window_edges(window, causal, device, assert_accurate):
    """Breaks when a window is off by one on either side, or when its first tile starts at the wrong key."""
    args, kwargs = make_case((33, 5, 140), q=4, heads=2, kv_heads=1, device=device)
    check(args, kwargs | {"window": window, "causal": causal}, assert_accurate)


def test_split_window(device, assert_accurate):
    """Breaks when splits cut the whole length instead of the windowed part of it."""
    args, kwargs = make_case((250, 140), q=4, heads=2, kv_heads=1, device=device, sms=MANY_SPLITS)
    assert kwargs["workspace"].num_splits(2, window=200) > 1
    check(args, kwargs | {"window": 200, "causal": True}, assert_accurate)


def test_merge_of_more_splits_than_one_step(device, assert_accurate):
    """Breaks when the merge stops after its first step or weighs a later one by its own maximum."""
    tuning = Tuning(merge_splits=2)
    args, kwargs = make_case((250, 70), q=2, heads=5, kv_heads=1, device=device, sms=MANY_SPLITS, tuning=tuning)
    assert kwargs["workspace"].num_splits(2) > 2
    check(args, kwargs, assert_accurate)


@pytest.mark.parametrize(
    "tuning", [Tuning(keys=64, stages=2, warps=8, min_keys=128), Tuning(short_scratch=False, merge_splits=4, merge_heads=1)]
)
def test_other_launch_parameters(tuning, device, assert_accurate):
    """Breaks when a launch parameter changes more than rounding, so that a sweep compares different results."""
    args, kwargs = make_case(
        (140,), q=3, heads=2, kv_heads=1, dtype=torch.bfloat16, device=device, sms=MANY_SPLITS, tuning=tuning
    )
    assert kwargs["workspace"].num_splits(1) > 1
    check(args, kwargs, assert_accurate)


def test_splits_must_hold_whole_tiles():
    """Breaks when keys between two splits are read by both."""
    with pytest.raises(ValueError, match="multiple of keys; got 96 and 64"):
        make_case((20,), tuning=Tuning(keys=64, min_keys=96))


def test_causal_rows_ignore_later_rows(device):
    """Breaks when `causal` is ignored (or always on): the last key must reach every row or the last row alone."""
    args, kwargs = make_case((20,), q=4, device=device)
    before = {causal: block_attention(*args, **kwargs, causal=causal) for causal in (False, True)}
    page, slot = args[3][0, 19 // 16], 19 % 16
    args[2][page, slot] += 1.0
    after = {causal: block_attention(*args, **kwargs, causal=causal) for causal in (False, True)}
    assert (before[True][:3] == after[True][:3]).all()
    assert (before[True][3] != after[True][3]).all()
    assert (before[False] != after[False]).all()


def test_causal_rows_without_keys_are_zero(device, assert_accurate):
    """Breaks (NaN) when a request shorter than its query block divides by an empty softmax."""
    args, kwargs = make_case((2,), q=4, device=device)
    out = check(args, kwargs | {"causal": True}, assert_accurate)
    assert (out[:2] == 0).all()


@pytest.mark.parametrize("sms", [ONE_SPLIT, MANY_SPLITS])
@pytest.mark.parametrize("window", [None, 8])
def test_poisoned_slots_are_never_read(window, sms, device):
    """Breaks when a slot that no row sees is multiplied by zero instead of masked: freed pages may hold NaN."""
    args, kwargs = make_case((37, 130), q=3, heads=2, kv_heads=1, device=device, sms=sms)
    clean = block_attention(*args, **kwargs, window=window)
    for cache in args[1:3]:
        poisoned = torch.full_like(cache, float("nan"))
        for request, length in enumerate(args[4].tolist()):
            for key in range(0 if window is None else max(0, length - 3 - window + 1), length):
                page = args[3][request, key // 16]
                poisoned[page, key % 16] = cache[page, key % 16]
        cache.copy_(poisoned)
    assert torch.equal(block_attention(*args, **kwargs, window=window), clean)


@pytest.mark.parametrize("sms", [ONE_SPLIT, MANY_SPLITS])
def test_padded_requests_write_zeros_and_disturb_nobody(sms, device):
    """Breaks when a padded request (length 0, a block-table row of garbage) faults, leaves output unwritten or leaks."""
    args, kwargs = make_case((33, 130), q=2, heads=2, kv_heads=1, device=device, sms=sms)
    alone = block_attention(*args, **kwargs)
    padded, more = make_case((33, 130, 0, 0), q=2, heads=2, kv_heads=1, device=device, sms=sms)
    padded[0][:4], padded[0][4:] = args[0], float("nan")
    padded[1:3] = args[1:3]
    padded[3] = torch.cat([args[3], torch.full_like(args[3], 2**30)])
    out = block_attention(*padded, **more, out=torch.full_like(padded[0], float("nan")))
    assert (out[4:] == 0).all()
    torch.testing.assert_close(out[:4], alone)


@pytest.mark.parametrize("sms", [ONE_SPLIT, MANY_SPLITS])
@pytest.mark.parametrize("options", [{"softcap": 1.5}, {"sinks": True}, {"softcap": 2.0, "sinks": True, "causal": True}])
def test_softcap_and_sinks(options, sms, device, assert_accurate):
    """Breaks when a sink joins once per split instead of once per row, or when the cap is applied after the mask."""
    args, kwargs = make_case((33, 140), q=3, heads=4, kv_heads=2, device=device, sms=sms)
    if options.get("sinks"):
        options = options | {"sinks": torch.tensor([-2.0, 0.5, 3.0, 8.0], device=device)}
    check(args, kwargs | options, assert_accurate)


def test_large_scores_do_not_overflow(device, assert_accurate):
    """Breaks when the running maximum is not subtracted, or when tanh of a large score becomes inf / inf."""
    args, kwargs = make_case((70,), q=2, device=device, sms=MANY_SPLITS)
    check(args, kwargs | {"scale": 300.0}, assert_accurate)
    check(args, kwargs | {"scale": 300.0, "softcap": 5.0}, assert_accurate)


@pytest.mark.parametrize("sms", [ONE_SPLIT, MANY_SPLITS])
@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_cache(fp8, sms, device, assert_accurate):
    """Breaks when a scale is dropped, swapped between K and V, or applied once per split too often."""
    args, kwargs = make_case((40, 140), q=3, heads=4, kv_heads=2, dtype=torch.bfloat16, device=device, sms=sms)
    args[1], args[2] = args[1].to(fp8), args[2].to(fp8)
    scales = {"k_scale": torch.tensor([1.7], device=device), "v_scale": torch.tensor([0.3], device=device)}
    out = block_attention(*args, **kwargs, **scales)
    doubled = [args[0].double(), *args[1:]]
    truth = reference.block_attention(*doubled, **kwargs, **{name: scale.double() for name, scale in scales.items()})
    assert_accurate(out, reference.block_attention(*args, **kwargs, **scales), truth)


@pytest.mark.parametrize("layout", ["interleaved", "hnd"])
def test_strided_inputs(layout, device):
    """Breaks when a kernel assumes dense rows: q is a slice of the fused projection, caches are views."""
    args, kwargs = make_case((40, 37), q=3, heads=4, kv_heads=2, device=device)
    dense = block_attention(*args, **kwargs)
    fused = torch.randn(6, 8, 64, device=device)
    fused[:, :4] = args[0]
    if layout == "interleaved":  # [num_blocks, 2, kv_block_size, Hkv, hd]
        both = torch.stack(args[1:3], dim=1)
        keys, values = both[:, 0], both[:, 1]
    else:  # [num_blocks, Hkv, kv_block_size, hd]
        keys, values = (cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in args[1:3])
    wide = torch.zeros(6, 5, 64, device=device)
    table = torch.cat([args[3], args[3]], dim=1)[:, : args[3].shape[1]]
    out = block_attention(fused[:, :4], keys, values, table, args[4], **kwargs, out=wide[:, :4])
    assert torch.equal(out, dense)
    assert (wide[:, 4] == 0).all()


def test_splits_follow_capacity_and_scratch_fits():
    """Breaks when a batch size could need more scratch than was allocated, or when small batches leave the GPU idle."""
    workspace = AttentionWorkspace(
        max_num_reqs=40, num_query_per_req=16, num_heads=32, num_kv_heads=8, head_dim=128, max_seq_len=8192,
        device="meta", num_sms=132,
    )  # fmt: skip
    splits = [workspace.num_splits(reqs) for reqs in range(1, 41)]
    assert splits[0] == 32
    assert splits == sorted(splits, reverse=True)
    assert splits[-1] == 1
    for reqs, count in enumerate(splits, 1):
        assert count == 1 or reqs * 16 * 32 * count <= workspace.lse.numel()
    assert workspace.partial.numel() == workspace.lse.numel() * 128
    assert workspace.num_splits(1, window=200) == 4  # 215 keys at most, 64 per split


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a device")
def test_graph_replay_follows_new_lengths(device):
    """Breaks when lengths, pages or the number of splits are baked into a captured graph."""
    args, kwargs = make_case((250, 33, 0), q=16, heads=8, kv_heads=2, dtype=torch.bfloat16, device=device, sms=132)
    out = torch.empty_like(args[0])
    block_attention(*args, **kwargs, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        block_attention(*args, **kwargs, out=out)
    for lens in ((17, 256, 130), (0, 0, 16)):
        args[4].copy_(torch.tensor(lens))
        args[3].copy_(args[3].flip(0))
        graph.replay()
        assert torch.equal(out, block_attention(*args, **kwargs))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 0}, "window must be at least 1"),
        ({"num_query_per_req": 2}, "num_query_per_req is 2, the workspace was made for 3"),
        ({"q": torch.zeros(3, 4, 32)}, r"q must be \[rows, 4, 64\]"),
        ({"q": torch.zeros(4, 4, 64)}, "q has 4 rows"),
        ({"q": torch.zeros(3, 4, 64, dtype=torch.float64)}, "bf16, fp16 or fp32; got torch.float64"),
        ({"q": torch.zeros(3, 64, 4).transpose(1, 2)}, "last stride 1"),
        ({"k_cache": torch.zeros(8, 2, 16, 64)}, "k_cache and v_cache must both be"),
        ({"k_cache": torch.zeros(48, 16, 2, 64, dtype=torch.uint8)}, "float8_e4m3fn"),
        ({"seq_lens": torch.tensor([20])}, "seq_lens must be int32"),
        ({"block_table": torch.zeros(0, 2, dtype=torch.int32)}, "at least 1 rows"),
        ({"sinks": torch.zeros(2)}, r"sinks must be contiguous \[4\]"),
        ({"k_scale": torch.ones(1)}, "come together"),
        ({"k_scale": torch.ones(2), "v_scale": torch.ones(1)}, "k_scale must be one fp32 number"),
    ],
)
def test_errors_say_what_was_needed(change, message):
    """Breaks when a bad argument reaches the kernel (which assumes) instead of a sentence."""
    args, kwargs = make_case((20,))
    names = ("q", "k_cache", "v_cache", "block_table", "seq_lens")
    with pytest.raises(ValueError, match=message):
        block_attention(**(dict(zip(names, args, strict=True)) | kwargs | change))


def test_head_counts_must_divide():
    """Breaks when heads that cannot be grouped are accepted: packed rows would mix KV heads."""
    with pytest.raises(ValueError, match="multiple of num_kv_heads; got 6 and 4"):
        AttentionWorkspace(
            max_num_reqs=1, num_query_per_req=2, num_heads=6, num_kv_heads=4, head_dim=64, max_seq_len=64, device="cpu"
        )
