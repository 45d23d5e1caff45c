# SPDX-License-Identifier: Apache-2.0
"""`query_kv` against fp64 and plain torch over head shapes, cache layouts and types, with every other byte guarded."""

import pytest
import torch

from dflash_kernels import reference
from dflash_kernels.query_kv import query_kv

EPS = 1e-6
NUM_POSITIONS = 50
FP8 = torch.float8_e4m3fn


def make_inputs(num_rows, shape, rot_dim, dtype, norm=True, seed=0):
    """The launcher's positional inputs before the slots and after them, on the CPU; shape = (heads, kv heads, head size)."""
    num_heads, num_kv_heads, head_dim = shape
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(num_rows, (num_heads + 2 * num_kv_heads) * head_dim, generator=generator).to(dtype)
    positions = torch.randint(0, NUM_POSITIONS, (num_rows,), generator=generator)
    angles = torch.rand(NUM_POSITIONS, rot_dim // 2, generator=generator) * 6.3
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
    weights = [(1 + 0.3 * torch.randn(head_dim, generator=generator)).to(dtype) if norm else None for _ in "qk"]
    return qkv, positions, cos_sin, *weights


def make_caches(shape, kv_block_size, dtype, device, kind="NHD", num_pages=4):
    """K and V views [pages, kv_block_size, kv heads, head size] of one cache full of noise, so that a stray store shows."""
    _, num_heads, head_dim = shape
    sizes = {
        "NHD": (num_pages, 2, kv_block_size, num_heads, head_dim),
        "HND": (num_pages, 2, num_heads, kv_block_size, head_dim),
        "planes": (2, num_pages, kv_block_size, num_heads, head_dim),
        "packed": (num_pages, num_heads, kv_block_size, 2, head_dim),  # K and V side by side, FlashAttention's since 0.32
    }[kind]
    axis = {"NHD": 1, "HND": 1, "planes": 0, "packed": 3}[kind]
    whole = torch.randn(sizes, generator=torch.Generator().manual_seed(1)).to(dtype).to(device)
    views = whole.unbind(axis)
    return tuple(view.transpose(1, 2) if kind in ("HND", "packed") else view for view in views)


def copies(caches, dtype=None):
    """The same contents on the CPU, contiguous."""
    return [cache.cpu().to(dtype or cache.dtype).contiguous().clone() for cache in caches]


def make_slots(num_rows, kv_block_size, pads=(), num_pages=4, seed=0):
    """Distinct slots, none in the null page; pad rows are negative."""
    generator = torch.Generator().manual_seed(seed)
    slots = kv_block_size + torch.randperm((num_pages - 1) * kv_block_size, generator=generator)[:num_rows]
    slots[list(pads)] = -1
    return slots


def stored_rows(cache, slots):
    """Rows [m, heads, hd] at non-negative slots."""
    kept = slots[slots >= 0].to(cache.device)
    return cache[kept // cache.shape[1], kept % cache.shape[1]].double().cpu()


def assert_guarded(before, after, slots):
    """Every byte of both caches outside the stored rows is what it was."""
    for old, new in zip(before, after, strict=True):
        untouched = torch.ones(old.shape[0] * old.shape[1], dtype=torch.bool)
        untouched[slots[slots >= 0]] = False
        old_rows, new_rows = (
            cache.cpu().contiguous().view(torch.uint8).reshape(len(untouched), -1)[untouched] for cache in (old, new)
        )
        assert torch.equal(old_rows, new_rows), "the cache changed outside its rows"


def moved(tensors, device):
    return [None if tensor is None else tensor.to(device) for tensor in tensors]


def check(device, assert_accurate, caches, inputs, slots, shape, **options):
    """Kernel on `device`, plain torch in the input's type, and fp64: errors of Q, K, V and untouched bytes compared."""
    options |= {"num_heads": shape[0], "num_kv_heads": shape[1], "head_dim": shape[2], "eps": EPS}
    qkv, positions, *constants = inputs
    before = copies(caches)
    on_device = {name: value.to(device) if torch.is_tensor(value) else value for name, value in options.items()}
    actual = query_kv(*moved([qkv, positions, slots, *constants], device), *caches, **on_device)
    plain, truth = copies(caches), copies(caches, torch.float64)
    expected = reference.query_kv(qkv, positions, slots, *constants, *plain, **options)
    double = [None if tensor is None else tensor.double() for tensor in constants]
    exact = reference.query_kv(qkv.double(), positions, slots, *double, *truth, **options)
    assert actual.dtype == qkv.dtype
    assert actual.shape == (len(qkv), shape[0] * shape[2])
    assert_accurate(actual.cpu(), expected, exact)
    for picked in zip(caches, plain, truth, strict=True):
        assert_accurate(*(stored_rows(cache, slots[: len(qkv)]) for cache in picked))
    assert_guarded(before, caches, slots[: len(qkv)])


@pytest.mark.parametrize("kind", ["NHD", "HND", "planes", "packed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_layouts_and_types(device, assert_accurate, kind, dtype):
    """FlashAttention's cache layouts differ only in strides; a wrong one lands in another head or page."""
    shape = (4, 2, 32)
    caches = make_caches(shape, 16, dtype, device, kind)
    check(device, assert_accurate, caches, make_inputs(9, shape, 32, dtype), make_slots(9, 16, pads=[3, 4, 8]), shape)


@pytest.mark.parametrize("shape", [(4, 1, 64), (6, 3, 80), (8, 2, 96), (4, 4, 128), (5, 1, 128)])
@pytest.mark.parametrize("is_neox", [True, False])
def test_head_shapes(device, assert_accurate, shape, is_neox):
    """Grouped and multi-head attention, head sizes and counts that are not powers of two: no head may be lost or doubled."""
    caches = make_caches(shape, 16, torch.bfloat16, device)
    inputs = make_inputs(19, shape, shape[2], torch.bfloat16)
    check(device, assert_accurate, caches, inputs, make_slots(19, 16, pads=[0]), shape, is_neox=is_neox)


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(("head_dim", "rot_dim"), [(64, 32), (80, 20), (96, 64)])
@pytest.mark.parametrize("norm", [True, False])
def test_partial_rotary_and_no_norm(device, assert_accurate, is_neox, head_dim, rot_dim, norm):
    """Elements behind the rotary size are normed but not turned."""
    shape = (4, 2, head_dim)
    caches = make_caches(shape, 8, torch.bfloat16, device)
    inputs = make_inputs(5, shape, rot_dim, torch.bfloat16, norm)
    check(device, assert_accurate, caches, inputs, make_slots(5, 8, pads=[1]), shape, is_neox=is_neox)


def test_norm_of_only_one_side(device, assert_accurate):
    """Q and K have a weight each, and either may be missing."""
    shape = (4, 2, 32)
    for missing in (3, 4):
        inputs = list(make_inputs(4, shape, 32, torch.float32))
        inputs[missing] = None
        caches = make_caches(shape, 4, torch.float32, device)
        check(device, assert_accurate, caches, inputs, make_slots(4, 4), shape)


@pytest.mark.parametrize("kv_block_size", [1, 16, 528, 784])
def test_page_sizes(device, assert_accurate, kv_block_size):
    """528 and 784 are pages of hybrid models: no power of two may be assumed."""
    shape = (2, 1, 16)
    caches = make_caches(shape, kv_block_size, torch.float32, device, num_pages=12)
    slots = make_slots(11, kv_block_size, num_pages=12)
    check(device, assert_accurate, caches, make_inputs(11, shape, 16, torch.float32), slots, shape)


def test_value_scale_scales_values_only(device, assert_accurate):
    """A draft trained with a value scale accepts little without it."""
    shape = (4, 2, 32)
    caches = make_caches(shape, 4, torch.float32, device)
    inputs = make_inputs(6, shape, 32, torch.float32)
    check(device, assert_accurate, caches, inputs, make_slots(6, 4), shape, value_scale=0.3)


def test_cache_in_another_type(device, assert_accurate):
    """An fp32 cache under a bf16 draft keeps what one rounding to bf16 would lose."""
    shape = (2, 1, 32)
    caches = make_caches(shape, 4, torch.float32, device)
    inputs = make_inputs(6, shape, 32, torch.bfloat16)
    check(device, assert_accurate, caches, inputs, make_slots(6, 4), shape)


needs_fp8 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="Triton has no e4m3 below sm_89"
)


@needs_fp8
@pytest.mark.parametrize("is_neox", [True, False])
def test_fp8_cache_is_scaled_and_saturated(device, is_neox):
    """An unsaturated cast would store NaN, which attention spreads over the whole request; Q must not be scaled at all."""
    shape = (2, 2, 16)
    caches = make_caches(shape, 4, FP8, device)
    before, expected = copies(caches), copies(caches)
    # Halves up to 7.5, scales that are powers of two, rotations by 0: e4m3 holds every result exactly, as a normal number
    # (the interpreter's casts of rounded and of subnormal values are wrong).
    qkv = (torch.randint(-8, 8, (6, 6 * 16), generator=torch.Generator().manual_seed(3)) + 0.5).to(torch.bfloat16)
    qkv[0] *= 2.0**20
    slots, cos_sin = make_slots(6, 4, pads=[4]), torch.cat([torch.ones(9, 8), torch.zeros(9, 8)], dim=-1)
    arguments = [qkv, torch.arange(6), slots, cos_sin]
    sizes = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 16, "eps": EPS, "is_neox": is_neox}
    scales = {"k_scale": torch.tensor([0.25]), "v_scale": torch.tensor(4.0)}
    on_device = {name: scale.to(device) for name, scale in scales.items()}
    queries = query_kv(*moved(arguments, device), None, None, *caches, **sizes, **on_device)
    reference.query_kv(*arguments, None, None, *expected, **sizes, **scales)
    assert torch.equal(queries.cpu(), qkv[:, :32])
    for actual, wanted in zip(caches, expected, strict=True):
        assert torch.equal(stored_rows(actual, slots), stored_rows(wanted, slots))
        assert stored_rows(actual, slots).abs().max() == 448
    assert_guarded(before, caches, slots)


@needs_fp8
@pytest.mark.parametrize("is_neox", [True, False])
def test_fp8_rounding(device, assert_accurate, is_neox):
    """One rounding from fp32, where plain torch rounds to bf16 first."""
    shape = (4, 2, 64)
    caches = make_caches(shape, 4, FP8, device)
    scales = {"k_scale": torch.tensor([0.01]), "v_scale": torch.tensor([0.03])}
    inputs = make_inputs(7, shape, 64, torch.bfloat16)
    check(device, assert_accurate, caches, inputs, make_slots(7, 4), shape, is_neox=is_neox, **scales)


def test_pad_rows_have_queries_but_store_nothing(device, assert_accurate):
    """A batch of pads, as at capture: attention still reads their Q, so it must be finite, and no page may change."""
    shape = (4, 2, 32)
    caches = make_caches(shape, 8, torch.bfloat16, device)
    check(device, assert_accurate, caches, make_inputs(6, shape, 32, torch.bfloat16), torch.full((6,), -1), shape)


def test_positions_out_of_range_do_not_fault(device):
    """A stale position of a pad row must not read behind the rotary table."""
    shape = (2, 1, 16)
    caches = make_caches(shape, 4, torch.float32, device)
    qkv, positions, *constants = make_inputs(3, shape, 16, torch.float32)
    positions[:] = torch.tensor([10**9, -(10**9), 1])
    arguments = moved([qkv, positions, torch.full((3,), -1), *constants], device)
    queries = query_kv(*arguments, *caches, num_heads=2, num_kv_heads=1, head_dim=16, eps=EPS)
    assert queries.isfinite().all()


def test_wider_views_and_given_output(device, assert_accurate):
    """Row strides of the projection and the output may exceed their widths; rows and columns beside them keep their bytes."""
    shape = (2, 1, 16)
    caches = make_caches(shape, 8, torch.float32, device)
    qkv, positions, *constants = make_inputs(5, shape, 16, torch.float32)
    wide = torch.zeros(5, qkv.shape[1] + 24)
    wide[:, : qkv.shape[1]] = qkv
    longer = [torch.cat([positions, positions]), make_slots(10, 8)]
    check(device, assert_accurate, caches, (wide[:, : qkv.shape[1]], longer[0], *constants), longer[1], shape)
    canvas = torch.full((7, 50), -5.0, device=device)
    arguments = moved([wide[:, : qkv.shape[1]], *longer, *constants], device)
    sizes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "eps": EPS}
    returned = query_kv(*arguments, *caches, q_out=canvas[1:6, 9:41], **sizes)
    assert returned.data_ptr() == canvas[1:6, 9:41].data_ptr()
    assert torch.equal(returned, query_kv(*arguments, *caches, **sizes))
    canvas[1:6, 9:41] = -5
    assert (canvas == -5).all()


def test_no_rows(device):
    """An empty step of a data-parallel rank; breaks if a grid of no programs is launched."""
    shape = (2, 1, 16)
    caches = make_caches(shape, 4, torch.float32, device)
    qkv, positions, *constants = make_inputs(0, shape, 16, torch.float32)
    arguments = moved([qkv, positions, positions, *constants], device)
    queries = query_kv(*arguments, *caches, num_heads=2, num_kv_heads=1, head_dim=16, eps=EPS)
    assert queries.shape == (0, 32)


def test_registered_op_is_well_formed(device):
    """Schema, fake implementation and dispatch must agree, or compiled layers attend over stale pages."""
    shape = (2, 1, 16)
    caches = [cache.contiguous() for cache in make_caches(shape, 4, torch.float32, device)]
    qkv, positions, *constants = make_inputs(4, shape, 16, torch.float32)
    arguments = moved([qkv, positions, make_slots(4, 4), *constants], device)
    options = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "eps": EPS, "value_scale": 0.5}
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    out = torch.zeros(4, 32, device=device)
    torch.library.opcheck(torch.ops.dflash.query_kv.default, (*arguments, *caches, out), options, test_utils=checks)


def test_compiled_layer_stores_before_attention_reads(device):
    """torch.compile must keep the op, whose result nobody returns, and its order; K and V are views of one allocation."""
    shape = (2, 1, 16)
    qkv, positions, *constants = make_inputs(4, shape, 16, torch.float32)
    slots = make_slots(4, 4)
    sizes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "eps": EPS}
    arguments = moved([qkv, positions, slots, *constants], device)
    caches = make_caches(shape, 4, torch.float32, device, "packed")
    expected = copies(caches)
    queries = reference.query_kv(qkv, positions, slots, *constants, *expected, **sizes)

    def layer(qkv, k_cache, v_cache):
        q_out = qkv.new_empty(qkv.shape[0], 32)
        torch.ops.dflash.query_kv(qkv, *arguments[1:], k_cache, v_cache, q_out, **sizes)
        return q_out.sum(), k_cache.sum(), v_cache.sum()

    with torch.inference_mode():
        sums = torch.compile(layer, backend="aot_eager", fullgraph=True)(arguments[0], *caches)
    for actual, wanted in zip(sums, (queries, *expected), strict=True):
        torch.testing.assert_close(actual.cpu(), wanted.sum(), rtol=1e-4, atol=1e-4)
    for actual, wanted in zip(caches, expected, strict=True):
        torch.testing.assert_close(actual.cpu(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")
def test_graph_replay_follows_slots_and_positions(device, compile_counter):
    """A replay must follow what changed after capture; other row counts must not compile again."""
    shape = (4, 2, 32)
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "eps": EPS}
    caches = make_caches(shape, 16, torch.bfloat16, device, "packed")
    qkv, positions, *constants = moved(make_inputs(9, shape, 32, torch.bfloat16), device)
    slots = torch.full((9,), -1, device=device)
    q_out = query_kv(qkv, positions, slots, *constants, *caches, **sizes)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        query_kv(qkv, positions, slots, *constants, *caches, q_out=q_out, **sizes)
    before = copies(caches)
    new_slots = make_slots(9, 16, pads=[2, 3])
    slots.copy_(new_slots)
    positions.copy_(positions.flip(0))
    graph.replay()
    eager = make_caches(shape, 16, torch.bfloat16, device, "packed")
    queries = query_kv(qkv, positions, slots, *constants, *eager, **sizes)
    assert torch.equal(q_out, queries)
    assert all(torch.equal(replayed, fresh) for replayed, fresh in zip(caches, eager, strict=True))
    assert_guarded(before, caches, new_slots)
    compiled = compile_counter()
    for num_rows in (1, 3, 8):
        query_kv(qkv[:num_rows], positions[:num_rows], slots[1 : num_rows + 1], *constants, *caches, **sizes)
    assert compile_counter() == compiled


CACHE = torch.zeros(2, 4, 1, 16)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"qkv": torch.zeros(4, 63)}, "qkv must be"),
        ({"qkv": torch.zeros(64, 4).T}, "qkv must be .* strides"),
        ({"positions": torch.zeros(3).long()}, "positions must be"),
        ({"slots": torch.zeros(4).int()}, "slots must be .*int32"),
        ({"cos_sin_cache": torch.zeros(9, 18)}, "cos_sin_cache must be"),
        ({"q_norm_weight": torch.zeros(64)}, "q_norm_weight must be"),
        ({"k_norm_weight": torch.zeros(15)}, "k_norm_weight must be"),
        ({"k_cache": CACHE.transpose(1, 2)}, "k_cache must be"),
        ({"v_cache": CACHE.half()}, "v_cache must be"),
        ({"k_cache": CACHE.to(torch.uint8)}, "uint8"),
        ({"k_scale": torch.ones(2)}, "k_scale must be"),
        ({"q_out": torch.zeros(3, 32)}, "q_out must be"),
    ],
)
def test_wrong_arguments_are_refused(change, sentence):
    """On a GPU these would be loads or stores out of place."""
    arguments = {
        "qkv": torch.zeros(4, 64),
        "positions": torch.zeros(4).long(),
        "slots": torch.zeros(4).long(),
        "cos_sin_cache": torch.zeros(9, 16),
        "q_norm_weight": None,
        "k_norm_weight": None,
        "k_cache": CACHE.clone(),
        "v_cache": CACHE.clone(),
    }
    with pytest.raises(ValueError, match=sentence):
        query_kv(**(arguments | change), num_heads=2, num_kv_heads=1, head_dim=16, eps=EPS)
