"""The matrix cores' functions of mma.cuh and the product gemm_sm80, which is made of them, on the host build."""

import numpy as np
import pytest

import tinygrad_gpu as tg
from tests.conftest import needs_compiler
from tinygrad_gpu import kernel
from tinygrad_gpu.kernel import Launch, Strided
from tinygrad_gpu.ops import gelu
from tinygrad_gpu.testing import KernelError, host

pytestmark = needs_compiler
REAL = kernel.folder()
TYPES = {"bfloat16": tg.bfloat16, "float16": tg.float16, "tf32": tg.float32}
rng = np.random.default_rng(0)


@pytest.fixture(params=TYPES)
def dtype(request):
    return TYPES[request.param]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(body, parameters, arguments, shared, **defines) runs a kernel of that body by one warp."""
    for shared in ("common.cuh", "mma.cuh", "host"):
        (tmp_path / shared).symlink_to(REAL / shared)
    monkeypatch.setattr(kernel, "folder", lambda: tmp_path)
    host._load.cache_clear()

    def run(body, parameters, *arguments, **defines):
        head = f'#include "mma.cuh"\nextern "C" __global__ void warp({parameters}) {{\n    int t = threadIdx.x;\n'
        (tmp_path / "warp.cu").write_text(f"{head}{body}\n}}\n")
        host._load.cache_clear()
        with tg.testing.host_kernels(sanitize=True):
            kernel.launch(Launch("warp.cu", "warp", (1,), (32,), 1024, **defines), *arguments)

    yield run
    host._load.cache_clear()


def tf32(x):
    """Rounded to 11 bits, ties away from zero."""
    u = x.view(np.uint32)
    return np.where(np.isfinite(x), (u + np.uint32(0x1000)) & ~np.uint32(0x1FFF), u).view(np.float32)


def multiplied(x):
    """What a matrix core takes x for, in float64."""
    return (tf32(x) if x.dtype == np.float32 else x).astype(np.float64)


# ---- the functions


def words(x):
    """The fragment of 16 rows by 32 bytes, (16, 32 / itemsize), as (lane, word)."""
    x, lane, r = x.view(np.uint32), np.arange(32)[:, None], np.arange(4)
    return x[lane // 4 + r % 2 * 8, lane % 4 + r // 2 * 4]


def normal(shape, dtype):
    return rng.normal(size=shape).astype(np.float32).astype(dtype)


def test_add_product(run, dtype):
    """C += A B: fragments as the manual's figures have them."""
    depth = 32 // dtype.itemsize
    a, b = normal((16, depth), dtype), normal((16, depth), dtype)  # b along K, sixteen columns of it
    c, lane, e = np.empty((2, 32, 4), np.float32), np.arange(32)[:, None], np.arange(4)
    body = """for (int j = 0; j < 2; j++) {
        float sum[4] = {1.0f, 2.0f, 3.0f, 4.0f};
        unsigned left[4] = {a[4 * t], a[4 * t + 1], a[4 * t + 2], a[4 * t + 3]};
        add_product<T>(sum, left, b[4 * t + j], b[4 * t + j + 2]);
        for (int e = 0; e < 4; e++) c[j * 128 + t * 4 + e] = sum[e];
    }"""
    run(body, "float *c, const unsigned *a, const unsigned *b", c, words(a), words(b), T=dtype)
    truncated = [(x.view(np.uint32) & ~np.uint32(0x1FFF)).view(x.dtype) if x.itemsize == 4 else x for x in (a, b)]
    left, right = (x.astype(np.float64) for x in truncated)
    for j in range(2):
        expected = 1 + e + (left @ right[j * 8 : j * 8 + 8].T)[lane // 4 + e // 2 * 8, lane % 4 * 2 + e % 2]
        np.testing.assert_allclose(c[j], expected, rtol=1e-6, atol=1e-5)


def test_a_fragment_of_ones(run, dtype):
    a, c = normal((16, 32 // dtype.itemsize), dtype), np.empty((32, 4), np.float32)
    body = """float sum[4] = {};
    unsigned left[4] = {a[4 * t], a[4 * t + 1], a[4 * t + 2], a[4 * t + 3]};
    for (int r = 0; r < 4; r++) left[r] = rounded<T>(left[r]);
    add_product<T>(sum, left, ones<T>(), ones<T>());
    for (int e = 0; e < 4; e++) c[t * 4 + e] = sum[e];"""
    run(body, "float *c, const unsigned *a", c, words(a), T=dtype)
    rows = np.arange(32)[:, None] // 4 + np.arange(4) // 2 * 8
    np.testing.assert_allclose(c, multiplied(a).sum(1)[rows], rtol=1e-6, atol=1e-5)


def test_rounding_to_tf32(run):
    ties = 1 + np.arange(8, dtype=np.float32) / 2**11
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, np.finfo(np.float32).max], np.float32)
    bits = rng.integers(0, 2**32, 42, dtype=np.uint32).view(np.float32)
    x, y = np.concatenate([ties, -ties, special, bits]), np.empty((2, 64), np.uint32)
    body = "for (int i = t; i < 64; i += 32) y[i] = rounded<float>(x[i]), y[64 + i] = rounded<bfloat16>(x[i]);"
    run(body, "unsigned *y, const unsigned *x", y, x.view(np.uint32))
    away = 1 + np.ceil(np.arange(8) / 2) / 2**10
    assert y[0, :16].view(np.float32).tolist() == [*away, *-away]
    assert (y[0] == tf32(x).view(np.uint32)).all()
    assert (y[1] == x.view(np.uint32)).all()


@pytest.mark.parametrize("transposed", [False, True])
def test_load_matrices(run, transposed):
    x, y = rng.integers(0, 2**16, (4, 8, 8)).astype(np.uint16), np.empty((32, 4), np.uint32)
    body = f"""DYNAMIC_SHARED(unsigned, tile);
    for (int i = 0; i < 4; i++) tile[4 * t + i] = x[4 * t + i];
    __syncthreads();
    unsigned v[4];
    load_matrices<{str(transposed).lower()}>(v, tile + 4 * t);
    for (int i = 0; i < 4; i++) y[4 * t + i] = v[i];"""
    run(body, "unsigned *y, const unsigned *x", y, x.view(np.uint32).reshape(-1))
    lane, matrix = np.arange(32)[:, None], np.arange(4)
    if transposed:
        x = x.swapaxes(1, 2)
    pairs = np.ascontiguousarray(x).view(np.uint32)  # (matrix, row, pair of elements)
    assert (y == pairs[matrix, lane // 4, lane % 4]).all()


def test_quad_transpose(run):
    x, y = np.arange(32 * 8, dtype=np.float32).reshape(8, 4, 4, 2), np.empty((8, 4, 4, 2), np.float32)
    body = """float v[4][2];
    for (int i = 0; i < 8; i++) v[i / 2][i % 2] = x[8 * t + i];
    quad_transpose(v);
    for (int i = 0; i < 8; i++) y[8 * t + i] = v[i / 2][i % 2];"""
    run(body, "float *y, const float *x", y, x)
    assert (y == x.swapaxes(1, 2)).all()


COPY = """DYNAMIC_SHARED(float16, tile);
    Copies copies;
    const float16 *from = x + 8 * t;
    copies.add(tile + 8 * t, from, 2 * max(0, min(8, n - 8 * t)));
    copies.commit();
    copies.add(tile + 256 + 8 * t, x, t ? 0 : 2);
    copies.commit();
    <wait>
    __syncthreads();
    for (int i = 0; i < 16; i++) y[32 * i + t] = tile[32 * i + t];"""
COPIED = "float16 *y, const float16 *x, int n"


@pytest.mark.parametrize("n", [1, 7, 8, 33, 256])
def test_copies(run, n):
    """Nothing beyond the bytes is read; the rest of a chunk is zeros."""
    x, y = normal(n, tg.float16), np.empty(512, tg.float16)
    run(COPY.replace("<wait>", "copies.wait<0>();"), COPIED, y, x, n)
    assert y.tolist() == [*x.tolist(), *[0] * (256 - n), x[0], *[0] * 255]


def test_copies_are_waited_for(run):
    """Of two groups the first has arrived, the second not; with no barrier after the wait a lane reads too soon."""
    x, y = normal(256, tg.float16), np.empty(512, tg.float16)
    run(COPY.replace("<wait>", "copies.wait<1>();"), COPIED, y, x, 256)
    assert y[:256].tolist() == x.tolist()
    assert np.isnan(y[256:]).all()
    late = COPY.replace("<wait>", "").replace("__syncthreads();", "__syncthreads(); copies.wait<0>();")
    with pytest.raises(KernelError, match=r"of dynamic shared memory, which .* with no barrier between"):
        run(late, COPIED, y, x, 256)


# ---- the product

PLAIN, ADD, GELU, SLOPE = range(4)
LAYOUTS = [(1, 1), (1, 0), (0, 1), (0, 0)]
SIZES = [1, 7, 8, 33, 65, 130]
SHAPES = [*zip(SIZES, SIZES[1:] + SIZES[:1], SIZES[2:] + SIZES[:2], strict=True), (130, 130, 130), (64, 128, 96)]


def matrix(shape, dtype, along_last, vec):
    """A matrix, or a batch, whose neighbours in memory lie along its last axis or the one before, with gaps at their
    ends, and whose address and strides suit accesses of 16 bytes, or if vec is 1, do not."""
    *batch, rows, columns = shape
    outer, inner = (rows, columns) if along_last else (columns, rows)
    width = -(-inner // vec) * vec + vec if vec > 1 else inner + 1
    memory = normal((*batch, outer, width + (vec == 1)), dtype)
    x = memory[..., vec == 1 :][..., :inner]
    return x if along_last else x.swapaxes(-1, -2)


def multiply(c, a, b, *, alpha=1.0, beta=0.0, bias=None, pre=None, other=None, sums=None, whole=None, per=0,
             a_along_k=1, b_along_k=1, vec=None, vec_c=None, tile=(64, 64), depth=64, stages=3, warps=(2, 2),
             epilogue=PLAIN, **defines):  # fmt: skip
    """c = a b by gemm_sm80: the first `whole` tiles each by a block, the others in ranges of `per` steps."""
    (*batch, m, n), k, size = c.shape, a.shape[-1], a.dtype.itemsize
    batch = (1, 1, 1, *batch)[-3:]
    vec, vec_c, depth = vec or 16 // size, vec_c or 16 // c.dtype.itemsize, depth // size
    tiles, blocks = int(np.prod(batch)) * -(-m // tile[0]) * -(-n // tile[1]), -(-k // depth)
    whole = tiles if whole is None else min(whole, tiles)
    ranges = -(-(tiles - whole) * blocks // per) if per else 0
    parts = np.empty(max(2 * ranges, 1) * (tile[0] * tile[1] + tile[0]), np.float32)
    defines |= {"T": a.dtype, "OUT": c.dtype, "EPILOGUE": epilogue, "ROW_SUMS": int(sums is not None), "GROUP": 2}
    defines |= {"TILE_M": tile[0], "TILE_N": tile[1], "TILE_K": depth, "STAGES": stages}
    defines |= {"WARPS_M": warps[0], "WARPS_N": warps[1], "A_ALONG_K": a_along_k, "B_ALONG_K": b_along_k}
    defines |= {"VEC_A": vec, "VEC_B": vec, "VEC_C": vec_c}
    shared = stages * depth * sum(tile) * size
    sizes = m, n, k, int(np.prod(batch)), *batch[1:], 1, whole, per, alpha, beta
    pre, other = (None if x is None else Strided(x) for x in (pre, other))
    threads = 32 * warps[0] * warps[1]
    if whole + ranges:
        what = Launch("gemm_sm80.cu", "gemm_sm80", (whole + ranges,), (threads,), shared, **defines)
        kernel.launch(what, Strided(c), pre, sums, parts, Strided(a), Strided(b), bias, other, *sizes)
    if ranges:
        grid = ((tiles - whole) * tile[0] * tile[1] // 2048,)
        what = Launch("gemm_sm80.cu", "gemm_sum", grid, (256,), **defines)
        kernel.launch(what, Strided(c), pre, sums, parts, bias, other, *sizes)


def assert_near(y, expected, scale):
    """Within the rounding of y's type, and that of float32's sums of numbers of that scale."""
    limit = np.abs(expected) * float(np.spacing(y.dtype.type(1))) + scale * 2.0**-20 + 1e-6
    error = np.abs(y.astype(np.float64) - expected)
    worst = np.unravel_index(np.argmax(np.where(np.isnan(error), np.inf, error - limit)), y.shape)
    assert (error <= limit).all(), f"{worst}: {y[worst]}, not {expected[worst]}"


def operands(m, n, k, dtype, a_along_k, b_along_k, vec, batch=()):
    a, b = matrix((*batch, m, k), dtype, a_along_k, vec), matrix((*batch, k, n), dtype, not b_along_k, vec)
    return a, b, multiplied(a) @ multiplied(b), np.abs(multiplied(a)) @ np.abs(multiplied(b))


@pytest.mark.parametrize("wide", [True, False], ids=["chunks", "elements"])
@pytest.mark.parametrize(("a_along_k", "b_along_k"), LAYOUTS)
def test_sizes_and_layouts(dtype, a_along_k, b_along_k, wide):
    """Every edge, each operand along K or the other axis, by chunks of 16 bytes or element by element; sums of rows."""
    vec = 16 // dtype.itemsize if wide else 1
    for number, shape in enumerate(SHAPES):
        m, n, k = shape
        a, b, expected, scale = operands(m, n, k, dtype, a_along_k, b_along_k, vec)
        c, sums = np.full((m, n), np.nan, dtype), np.full(m, np.nan, np.float32)
        with tg.testing.host_kernels(sanitize=number in (3, 5)):
            multiply(c, a, b, sums=sums, a_along_k=a_along_k, b_along_k=b_along_k, vec=vec, vec_c=1)
        assert_near(c, expected, scale)
        assert_near(sums, multiplied(a).sum(1), np.abs(multiplied(a)).sum(1))


TILES = [
    # tile, bytes along K, stages, warps
    ((128, 128), 64, 3, (2, 4)),
    ((128, 256), 128, 2, (2, 4)),
    ((64, 128), 256, 4, (1, 4)),
    ((32, 64), 128, 4, (2, 1)),
]


@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize(("a_along_k", "b_along_k"), [(1, 1), (0, 0)])
def test_tiles(dtype, tiles, a_along_k, b_along_k):
    tile, depth, stages, warps = tiles
    a, b, expected, scale = operands(130, 270, 200, dtype, a_along_k, b_along_k, 16 // dtype.itemsize)
    c = np.full((130, 272), np.nan, np.float32)[:, :270]
    with tg.testing.host_kernels(sanitize=tile[0] == 32):
        multiply(c, a, b, a_along_k=a_along_k, b_along_k=b_along_k, tile=tile, depth=depth, stages=stages, warps=warps)
    assert_near(c, expected, scale)


@pytest.mark.parametrize("sanitize", [False, True])
@pytest.mark.parametrize("per", [1, 2, 3, 4, 5, 7, 50])
@pytest.mark.parametrize("whole", [0, 4])
def test_ranges(whole, per, sanitize):
    """Nine tiles of five steps: cut in up to five pieces, in the middle of a tile and between two, or not at all."""
    a, b, expected, scale = operands(130, 136, 130, tg.bfloat16, 1, 0, 8)
    if sanitize and (per not in (2, 7) or whole):
        pytest.skip("the others say it all")
    c, sums = np.full((130, 136), np.nan, np.float32), np.full(130, np.nan, np.float32)
    bias = normal(136, tg.bfloat16)
    with tg.testing.host_kernels(sanitize=sanitize):
        multiply(c, a, b, bias=bias, sums=sums, whole=whole, per=per, b_along_k=0)
    assert_near(c, expected + bias.astype(np.float64), scale)
    assert_near(sums, multiplied(a).sum(1), np.abs(multiplied(a)).sum(1))


@pytest.mark.parametrize("per", [0, 2])
@pytest.mark.parametrize("out", ["float32", "own"])
@pytest.mark.parametrize("epilogue", [PLAIN, ADD, GELU, SLOPE], ids=["plain", "add", "gelu", "slope"])
def test_epilogues(dtype, epilogue, out, per):
    out = tg.float32 if out == "float32" else dtype
    m, n, k = 70, 72, 130
    a, b, expected, scale = operands(m, n, k, dtype, 1, 1, 16 // dtype.itemsize)
    bias = normal(n, dtype)
    v = 0.25 * expected + bias.astype(np.float64)
    c, pre, other = np.full((m, n), np.nan, out), np.full((m, n), np.nan, out), normal((m, n), out)
    options = {"alpha": 0.25, "bias": bias, "epilogue": epilogue, "per": per, "whole": 0 if per else None}
    if epilogue == ADD:
        c[...] = other
        options |= {"other": c, "beta": 0.5}
        v += 0.5 * other.astype(np.float64)
    elif epilogue == GELU:
        options |= {"pre": pre, "TANH": 1}
    elif epilogue == SLOPE:
        options |= {"other": other, "TANH": 1}
        v *= gelu.bwd(np.ones((m, n)), other.astype(np.float64), "tanh")
    with tg.testing.host_kernels(sanitize=out == tg.float32 and epilogue != ADD):
        multiply(c, a, b, **options)
    if epilogue == GELU:
        assert_near(pre, v, scale)
        v = gelu.fwd(pre.astype(np.float64), "tanh")
    assert_near(c, v, scale)


@pytest.mark.parametrize("layout", ["every other", "odd", "transposed"])
def test_results_of_any_layout(layout):
    memory = np.zeros((150, 300), tg.float16)
    c = {"every other": memory[::2, ::3][:70, :90], "odd": memory[1:71, 1:91], "transposed": memory[:90, :70].T}[layout]
    a, b, expected, scale = operands(70, 90, 40, tg.float16, 1, 0, 8)
    before = np.count_nonzero(memory)
    with tg.testing.host_kernels(sanitize=True):
        multiply(c, a, b, b_along_k=0, vec_c=1)
    assert_near(c, expected, scale)
    c[...] = 0
    assert np.count_nonzero(memory) == before


@pytest.mark.parametrize("per", [0, 2])
def test_batches(per):
    """Three batch axes, over which an operand is repeated by strides of 0."""
    a, b = matrix((3, 1, 2, 20, 40), tg.bfloat16, True, 8), matrix((2, 1, 40, 24), tg.bfloat16, True, 8)
    a, b = np.broadcast_to(a, (3, 2, 2, 20, 40)), np.broadcast_to(b, (3, 2, 2, 40, 24))
    c = np.full((3, 2, 2, 20, 24), np.nan, tg.bfloat16)
    with tg.testing.host_kernels(sanitize=True):
        multiply(c, a, b, b_along_k=0, whole=5 if per else None, per=per)
    assert_near(c, multiplied(a) @ multiplied(b), np.abs(multiplied(a)) @ np.abs(multiplied(b)))


def test_nothing_to_sum():
    """K = 0."""
    a, b, bias = np.empty((5, 0), tg.bfloat16), np.empty((0, 8), tg.bfloat16), normal(8, tg.bfloat16)
    c = np.full((5, 8), np.nan, np.float32)
    with tg.testing.host_kernels(sanitize=True):
        multiply(c, a, b, bias=bias, b_along_k=0, vec=1)
    assert (c == bias.astype(np.float32)).all()
