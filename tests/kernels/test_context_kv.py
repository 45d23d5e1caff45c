# SPDX-License-Identifier: Apache-2.0
"""`context_kv` against fp64 and plain torch, over cache layouts and types, with every other byte of the caches guarded."""

import pytest
import torch

from dflash_kernels import reference
from dflash_kernels.context_kv import LayerCaches, context_kv

EPS = 1e-6
NUM_POSITIONS = 50
FP8 = torch.float8_e4m3fn


def make_inputs(num_rows, num_layers, num_heads, head_dim, rot_dim, dtype, seed=0):
    """Projection output, positions, cos/sin cache and K-norm weights, all on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(num_rows, num_layers * 2 * num_heads * head_dim, generator=generator).to(dtype)
    positions = torch.randint(0, NUM_POSITIONS, (num_rows,), generator=generator)
    angles = torch.rand(NUM_POSITIONS, rot_dim // 2, generator=generator) * 6.3
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
    weight = (1 + 0.3 * torch.randn(num_layers, head_dim, generator=generator)).to(dtype)
    return kv, positions, cos_sin, weight


def make_caches(layer_groups, kv_block_sizes, num_heads, head_dim, dtype, device, kind="NHD", num_pages=4):
    """Caches of one layout; every element starts as NaN-free noise, so that a stray store shows."""
    keys, values = [], []
    for layer, group in enumerate(layer_groups):
        size = kv_block_sizes[group]
        shape, axis = {
            "NHD": ((num_pages, 2, size, num_heads, head_dim), 1),
            "HND": ((num_pages, 2, num_heads, size, head_dim), 1),
            "planes": ((2, num_pages, size, num_heads, head_dim), 0),
            "packed": ((num_pages, num_heads, size, 2, head_dim), 3),  # K and V side by side, FlashAttention's since 0.32
        }[kind]
        generator = torch.Generator().manual_seed(layer)
        cache = torch.randn(shape, generator=generator).to(dtype).to(device)
        for views, part in ((keys, 0), (values, 1)):
            view = cache.select(axis, part)
            views.append(view.transpose(1, 2) if kind in ("HND", "packed") else view)
    return LayerCaches.build(keys, values, layer_groups)


def copy_of(caches, dtype=None, device="cpu"):
    """The same contents as a fresh contiguous NHD set of caches."""
    copies = [
        [cache.to(dtype or cache.dtype).to(device).contiguous().clone() for cache in side]
        for side in (caches.k_caches, caches.v_caches)
    ]
    return LayerCaches.build(copies[0], copies[1], caches.layer_groups)


def make_slots(num_rows, kv_block_sizes, num_pages=4, seed=0, rejected=()):
    """Distinct slots per group, none in the null page; rejected rows are negative."""
    generator = torch.Generator().manual_seed(seed)
    rows = [size + torch.randperm((num_pages - 1) * size, generator=generator)[:num_rows] for size in kv_block_sizes]
    slots = torch.stack(rows)
    slots[:, list(rejected)] = -1
    return slots


def rows_of(cache, slots):
    """Stored rows [m, heads, hd] at non-negative slots."""
    kept = slots[slots >= 0].to(cache.device)
    return cache[kept // cache.shape[1], kept % cache.shape[1]].float().cpu()


def raw(cache):
    """The cache's bytes, so that comparison does not depend on the float type."""
    return cache.cpu().contiguous().view(torch.uint8)


def assert_guarded(before, after, slots, num_rows):
    """Every byte of every cache outside the stored rows is what it was."""
    for side in ("k_caches", "v_caches"):
        for layer, group in enumerate(after.layer_groups):
            old, new = getattr(before, side)[layer], getattr(after, side)[layer].cpu()
            size = old.shape[1]
            kept = slots[group, :num_rows][slots[group, :num_rows] >= 0]
            untouched = torch.ones(old.shape[0] * size, dtype=torch.bool)
            untouched[kept] = False
            old_rows = raw(old).reshape(old.shape[0] * size, -1)[untouched]
            new_rows = raw(new).reshape(old.shape[0] * size, -1)[untouched]
            assert torch.equal(old_rows, new_rows), f"{side}[{layer}] changed outside its rows"


def check(device, assert_accurate, caches, inputs, slots, is_neox=True, norm=True, scales=None, num_rows=None):
    """Kernel on `device`, plain torch in the input's dtype, and fp64; errors and untouched bytes compared."""
    kv, positions, cos_sin, weight = inputs
    weight = weight if norm else None
    scales = scales or {}
    before = copy_of(caches)
    plain, truth = copy_of(caches), copy_of(caches, torch.float64)

    def to_device(tensor):
        return None if tensor is None else tensor.to(device)

    context_kv(
        caches, to_device(kv), to_device(positions), to_device(slots), to_device(cos_sin), to_device(weight),
        eps=EPS, is_neox=is_neox, **{name: to_device(scale) for name, scale in scales.items()},
    )  # fmt: skip
    reference.context_kv(plain, kv, positions, slots, cos_sin, weight, eps=EPS, is_neox=is_neox, **scales)
    double_weight = None if weight is None else weight.double()
    reference.context_kv(
        truth, kv.double(), positions, slots, cos_sin.double(), double_weight, eps=EPS, is_neox=is_neox, **scales
    )
    for side in ("k_caches", "v_caches"):
        for layer, group in enumerate(caches.layer_groups):
            picked = [rows_of(getattr(c, side)[layer], slots[group, : kv.shape[0]]) for c in (caches, plain, truth)]
            assert_accurate(*picked)
    assert_guarded(before, caches, slots, kv.shape[0])


@pytest.mark.parametrize("kind", ["NHD", "HND", "planes", "packed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_layouts_and_types(device, assert_accurate, kind, dtype):
    """FlashAttention's cache layouts differ only in strides; a wrong one lands in another head or page."""
    caches = make_caches([0, 0, 0], [16], 2, 32, dtype, device, kind)
    inputs = make_inputs(9, 3, 2, 32, 32, dtype)
    check(device, assert_accurate, caches, inputs, make_slots(9, [16], rejected=[3, 4, 8]))


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(("head_dim", "rot_dim"), [(32, 32), (32, 16), (48, 12), (80, 80)])
@pytest.mark.parametrize("norm", [True, False])
def test_rotary_layouts_and_sizes(device, assert_accurate, is_neox, head_dim, rot_dim, norm):
    """Both pairings, partial rotary and sizes that are not powers of two, with and without K norm."""
    caches = make_caches([0], [8], 3, head_dim, torch.bfloat16, device)
    inputs = make_inputs(5, 1, 3, head_dim, rot_dim, torch.bfloat16)
    check(device, assert_accurate, caches, inputs, make_slots(5, [8], rejected=[0]), is_neox=is_neox, norm=norm)


def test_groups_of_different_page_sizes(device, assert_accurate):
    """Each layer must use the slots and the page size of its own group; 528 and 784 are pages of hybrid models."""
    sizes = [528, 1, 784]
    caches = make_caches([2, 0, 1, 0], sizes, 1, 16, torch.bfloat16, device, num_pages=13)
    inputs = make_inputs(11, 4, 1, 16, 16, torch.bfloat16)
    slots = make_slots(11, sizes, num_pages=13)
    slots[0, 2] = -1  # evicted in one group only
    check(device, assert_accurate, caches, inputs, slots)


def test_layers_of_different_layouts(device, assert_accurate):
    """Layers that differ in strides still share one launch."""
    first = make_caches([0], [4], 2, 16, torch.float32, device, "NHD")
    second = make_caches([0], [4], 2, 16, torch.float32, device, "HND")
    caches = LayerCaches.build(first.k_caches + second.k_caches, first.v_caches + second.v_caches, [0, 0])
    check(device, assert_accurate, caches, make_inputs(6, 2, 2, 16, 16, torch.float32), make_slots(6, [4]))


def test_scales_are_per_layer(device, assert_accurate):
    """The built-in takes layer 0's value scale for every layer."""
    caches = make_caches([0, 0], [4], 2, 16, torch.bfloat16, device)
    scales = {"value_scale": torch.tensor([0.5, 3.0])}
    check(device, assert_accurate, caches, make_inputs(6, 2, 2, 16, 16, torch.bfloat16), make_slots(6, [4]), scales=scales)


needs_fp8 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="Triton has no e4m3 below sm_89"
)


@needs_fp8
def test_fp8_cache_is_scaled_and_saturated(device):
    """An unsaturated cast would store NaN, which attention spreads over the whole request."""
    caches = make_caches([0, 0], [4], 2, 16, FP8, device)
    before = copy_of(caches)
    slots = make_slots(6, [4], rejected=[4])
    # Halves up to 7.5, scales that are powers of two, rotations by 0: e4m3 holds every result exactly, as a normal number
    # (the interpreter's casts of rounded and of subnormal values are wrong).
    halves = torch.randint(-8, 8, (6, 2 * 2 * 2 * 16), generator=torch.Generator().manual_seed(3)) + 0.5
    values = halves.to(torch.bfloat16)
    values[0] *= 2.0**20
    cos_sin = torch.cat([torch.ones(9, 8), torch.zeros(9, 8)], dim=-1)
    scales = {"k_scale": torch.tensor([0.25, 2.0]), "v_scale": torch.tensor([4.0, 0.5])}
    args = [values, torch.arange(6), slots, cos_sin]
    context_kv(caches, *[t.to(device) for t in args], None, eps=EPS, **{n: s.to(device) for n, s in scales.items()})
    expected = copy_of(before)
    reference.context_kv(expected, *args, None, eps=EPS, **scales)
    for side in ("k_caches", "v_caches"):
        for layer in range(2):
            actual, wanted = (rows_of(getattr(c, side)[layer], slots[0]) for c in (caches, expected))
            torch.testing.assert_close(actual, wanted, rtol=0, atol=0)
            assert actual.abs().max() == 448
    assert_guarded(before, caches, slots, 6)


@needs_fp8
def test_fp8_rounding(device, assert_accurate):
    """One rounding from fp32, where plain torch rounds to bf16 first."""
    caches = make_caches([0, 0], [4], 2, 16, FP8, device)
    scales = {"k_scale": torch.tensor([0.01, 0.5]), "v_scale": torch.tensor([0.03, 2.0])}
    check(device, assert_accurate, caches, make_inputs(7, 2, 2, 16, 16, torch.bfloat16), make_slots(7, [4]), scales=scales)


def test_rejected_rows_are_not_read(device):
    """A padded row holds whatever the graph left there; reading NaN is harmless only if nothing is stored."""
    caches = make_caches([0], [4], 2, 16, torch.bfloat16, device)
    before = copy_of(caches)
    kv, positions, cos_sin, weight = make_inputs(6, 1, 2, 16, 16, torch.bfloat16)
    kv[:] = float("nan")
    positions[:] = 10**9
    args = [kv, positions, torch.full((1, 6), -1), cos_sin, weight]
    context_kv(caches, *[arg.to(device) for arg in args], eps=EPS)
    assert_guarded(before, caches, args[2], 6)


def test_empty_context_and_wider_views(device, assert_accurate):
    """Zero rows launch nothing; row strides of the projection and of the slots may exceed their widths."""
    caches = make_caches([0], [8], 2, 16, torch.float32, device)
    before = copy_of(caches)
    kv, positions, cos_sin, weight = make_inputs(5, 1, 2, 16, 16, torch.float32)
    slots = make_slots(5, [8])
    moved = [t.to(device) for t in (positions, slots, cos_sin, weight)]
    context_kv(caches, kv[:0].to(device), *moved, eps=EPS)
    assert_guarded(before, caches, slots, 0)
    wide_kv = torch.zeros(5, kv.shape[1] + 32)
    wide_kv[:, : kv.shape[1]] = kv
    wide_slots = torch.full((1, 40), -1)
    wide_slots[:, :5] = slots
    check(device, assert_accurate, caches, (wide_kv[:, : kv.shape[1]], positions, cos_sin, weight), wide_slots)
    assert not torch.equal(before.k_caches[0], caches.k_caches[0].cpu())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")
def test_graph_replay_stores_new_rows_only(device, compile_counter):
    """A replay must follow slots and positions that changed after capture; other row counts must not compile again."""
    caches = make_caches([0, 0], [16], 2, 32, torch.bfloat16, device)
    kv, positions, cos_sin, weight = (t.to(device) for t in make_inputs(9, 2, 2, 32, 32, torch.bfloat16))
    slots = torch.full((1, 9), -1, device=device)
    context_kv(caches, kv, positions, slots, cos_sin, weight, eps=EPS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        context_kv(caches, kv, positions, slots, cos_sin, weight, eps=EPS)
    before = copy_of(caches)
    new_slots = make_slots(9, [16], rejected=[2, 3])
    slots.copy_(new_slots)
    positions.copy_(positions.flip(0))
    graph.replay()
    eager = make_caches([0, 0], [16], 2, 32, torch.bfloat16, device)
    context_kv(eager, kv, positions, slots, cos_sin, weight, eps=EPS)
    for layer in range(2):
        assert torch.equal(caches.k_caches[layer], eager.k_caches[layer])
        assert torch.equal(caches.v_caches[layer], eager.v_caches[layer])
    assert_guarded(before, caches, new_slots, 9)
    compiled = compile_counter()
    for num_rows in (1, 3, 8):
        context_kv(caches, kv[:num_rows], positions[:num_rows], slots[:, :num_rows], cos_sin, weight, eps=EPS)
    assert compile_counter() == compiled


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"kv": torch.zeros(4, 63)}, "kv must be"),
        ({"slots": torch.zeros(1, 3, dtype=torch.int64)}, "slots must be"),
        ({"cos_sin": torch.zeros(9, 18)}, "cos_sin_cache must be"),
    ],
)
def test_wrong_shapes_are_refused(device, change, field):
    """On a GPU these would be stores out of place."""
    caches = make_caches([0], [4], 2, 16, torch.float32, device)
    args = {"kv": torch.zeros(4, 64), "slots": torch.zeros(1, 4, dtype=torch.int64), "cos_sin": torch.zeros(9, 16)} | change
    with pytest.raises(ValueError, match=field):
        context_kv(caches, args["kv"], torch.zeros(4).long(), args["slots"], args["cos_sin"], None, eps=EPS)


def test_caches_that_do_not_fit_say_why():
    """The caller falls back layer by layer and logs this sentence."""
    cache = torch.zeros(2, 4, 1, 8)
    with pytest.raises(ValueError, match="layer 1"):
        LayerCaches.build([cache, cache.half()], [cache, cache.half()], [0, 0])
    with pytest.raises(ValueError, match="unit stride"):
        LayerCaches.build([cache.transpose(2, 3)], [cache.transpose(2, 3)], [0])
    with pytest.raises(ValueError, match="uint8"):
        LayerCaches.build([cache.to(torch.uint8)], [cache.to(torch.uint8)], [0])
