"""Matrix products, the linear layer and the MLP: values against NumPy, gradients by differences, dtypes, empty sides,
how a product is planned, its kernels against float64, errors."""

import collections
import functools
import itertools
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tinygrad_gpu as tg
import tinygrad_gpu.functional as F
from tests.conftest import needs_compiler
from tests.ops.helpers import (
    ROUNDING,
    as_float64,
    assert_near,
    check_dtype,
    gradients,
    layouts,
    leaf,
    poisoned,
    returned_by,
)  # fmt: skip
from tests.variants import TARGETS
from tinygrad_gpu import kernel
from tinygrad_gpu.autograd import Place
from tinygrad_gpu.device import array_module
from tinygrad_gpu.ops import gelu, gemm, gemm_config
from tinygrad_gpu.ops.gemm import GeluMLP, Linear, MatMul, column_sum, product, product_into, product_kernel
from tinygrad_gpu.ops.gemm_config import ADD, GELU, PLAIN, SLOPE, TILES, Layout, config, cuts, layout
from tinygrad_gpu.testing import strategies

rng = np.random.default_rng
F2, BF, F4 = tg.float16, tg.bfloat16, tg.float32


def linear(x, weight, bias=None, residual=None):
    return Linear.apply(x, weight, bias, residual)


def mlp(x, fc_weight, proj_weight, *, fc_bias=None, proj_bias=None, residual=None, form="none"):
    return F.mlp(x, fc_weight, fc_bias, proj_weight, proj_bias, approximate=form, residual=residual)


def composed(x, fc_weight, proj_weight, *, fc_bias=None, proj_bias=None, residual=None, form="none"):
    """What `mlp` is, of a product, a GELU and a product."""
    h = F.linear(x, fc_weight, fc_bias).gelu(form)
    return F.linear(h, proj_weight, proj_bias, residual=residual)


def mlp_shapes(lead, width, hidden, out):
    fc = {"x": (*lead, width), "fc_weight": (hidden, width), "fc_bias": (hidden,)}
    return fc | {"proj_weight": (out, hidden), "proj_bias": (out,), "residual": (*lead, out)}


MAY_LACK = st.sets(st.sampled_from(["bias", "fc_bias", "proj_bias", "residual"]))


def drawn(data, shapes, lacks):
    """Leaves of the shapes by name, but for those that are lacking."""
    shapes = {name: shape for name, shape in shapes.items() if name not in lacks}
    return {name: leaf(data.draw(strategies.arrays(shape)), data.draw(layouts)) for name, shape in shapes.items()}


@settings(max_examples=100)
@given(operands=strategies.matmul_operands(), data=st.data())
def test_matmul(device, operands, data):
    a, b = (leaf(x, data.draw(layouts)) for x in operands)
    assert_near((a @ b).numpy(), np.asarray(a.numpy() @ b.numpy()), rtol=1e-13, atol=1e-13)
    assert tg.testing.gradcheck(tg.matmul, a, b)


@given(data=st.data(), lacks=MAY_LACK)
def test_linear(device, data, lacks):
    """x (..., C), W (O, C), with and without b (O,) and a residual (..., O); each length may be 0."""
    lead = data.draw(strategies.shapes(max_dims=2, max_side=5))
    width, out = data.draw(st.tuples(st.sampled_from((0, 1, 3, 7)), st.sampled_from((0, 1, 2, 5))))
    shapes = {"x": (*lead, width), "weight": (out, width), "bias": (out,), "residual": (*lead, out)}
    operands = drawn(data, shapes, lacks)
    x, weight, *others = (t.numpy() for t in operands.values())
    assert_near(linear(**operands).numpy(), x @ weight.T + sum(others), rtol=1e-13, atol=1e-13)
    assert tg.testing.gradcheck(lambda *t: linear(**dict(zip(operands, t, strict=True))), *operands.values())


@pytest.mark.parametrize("form", ["none", "tanh"])
@settings(max_examples=25)
@given(data=st.data(), lacks=MAY_LACK)
def test_mlp_by_differences(device, form, data, lacks):
    lead = data.draw(strategies.shapes(max_dims=2, max_side=3))
    shapes = mlp_shapes(lead, *(data.draw(st.sampled_from((0, 1, 3))) for _ in range(3)))
    operands = drawn(data, shapes, lacks)
    exact = composed(**{name: t.detach() for name, t in operands.items()}, form=form)
    assert_near(mlp(**operands, form=form).numpy(), exact.numpy(), rtol=1e-13, atol=1e-13)
    assert tg.testing.gradcheck(lambda *t: mlp(**dict(zip(operands, t, strict=True)), form=form), *operands.values())


# Shapes in which blocks of BLAS and of kernels end, and rows, columns and vectors.
SHAPES = [
    ((31, 17), (17, 33)), ((65, 64), (64, 63)), ((1, 129), (129, 1)), ((5,), (5,)), ((5,), (5, 3)), ((3, 5), (5,)),
    ((2, 3, 5), (5, 4)), ((2, 3, 5), (2, 5, 4)), ((3, 5), (2, 5, 4)), ((5,), (2, 5, 4)), ((2, 1, 3, 5), (4, 5, 2)),
    ((2, 3, 5), (5,)),
]  # fmt: skip


def sample(shape, seed=0):
    return np.random.default_rng(seed).uniform(0.5, 1.5, shape)


@pytest.mark.parametrize(("a", "b"), SHAPES, ids=str)
def test_matmul_as_numpy(device, a, b):
    x, y = sample(a), sample(b, seed=1)
    assert_near((tg.Tensor(x) @ tg.Tensor(y)).numpy(), np.asarray(x @ y), rtol=1e-14)
    assert_near((tg.Tensor(x).matmul(y)).numpy(), np.asarray(x @ y), rtol=1e-14)
    assert_near((x @ tg.Tensor(y)).numpy(), np.asarray(x @ y), rtol=1e-14)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize(("a", "b"), [*SHAPES, ((2, 2000), (2000, 3))], ids=str)
def test_matmul_dtypes(backend, a, b, dtype):
    """Positive terms, so that errors are relative; halves are rounded once, after the sum over a broadcast batch."""
    check_dtype(tg.matmul, [sample(a), sample(b, seed=1)], dtype, floor=0, terms=max(a + b))


LINEAR = [
    *itertools.product([(65, 33), (2, 3, 33), (33,)], ROUNDING),
    ((3000, 33), tg.float16),
    ((3000, 33), tg.bfloat16),
]


@pytest.mark.parametrize(("x", "dtype"), LINEAR, ids=str)
def test_linear_dtypes(backend, x, dtype):
    arrays = [sample(s, seed) for seed, s in enumerate([x, (5, 33), (5,), (*x[:-1], 5)])]
    for some in (arrays[:3], arrays):
        check_dtype(linear, some, dtype, floor=0, terms=max(x))


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)], ids=["linear", "matmul"])
def test_gradients_of_half_parameters(backend, shape):
    """Are float32 and not rounded on their way, where a second use adds to them too: 257 is no bfloat16 number."""
    weight, bias = (tg.nn.Parameter(tg.ones(*s, dtype=tg.bfloat16)) for s in (shape, (2,)))
    x = tg.ones(257, 1, dtype=tg.bfloat16)
    for uses in (1, 2):
        y = linear(x, weight, bias) if shape == (2, 1) else x @ weight * bias
        y.sum().backward()
        assert weight.grad.dtype == bias.grad.dtype == tg.float32
        assert (weight.grad == 257 * uses).numpy().all()
        assert (bias.grad == 257 * uses).numpy().all()


def test_float16_products_that_leave_its_range(backend):
    """Terms of 90000 and partial sums of 2^17 do not fit in float16; the results do."""
    a = tg.Tensor([[300, 300]], dtype=tg.float16)
    assert (a @ tg.Tensor([[300], [-299]], dtype=tg.float16)).tolist() == [[300]]
    assert (tg.full((1, 4096), 8.0, dtype=tg.float16) @ tg.ones(4096, 1, dtype=tg.float16)).tolist() == [[32768]]
    assert (tg.ones(1, 4097, dtype=tg.float16) @ tg.ones(4097, 1, dtype=tg.float16)).tolist() == [[4096]]


VIEWS = {
    "transposed": lambda x: x.T,
    "every second row": lambda x: x[::2],
    "every second column": lambda x: x[:, ::2],
    "from the second column": lambda x: x[:, 1:],
    "rows reversed": lambda x: x[::-1],
    "columns reversed": lambda x: x[:, ::-1],
    "expanded": lambda x: x[:1].expand(12, 12),
    "one row": lambda x: x[3:4],
    "one column": lambda x: x[:, 3:4],
}


@pytest.mark.parametrize("dtype", [tg.float64, tg.float16], ids=str)
@pytest.mark.parametrize("left", VIEWS)
def test_views(backend, left, dtype):
    """Products of views, misaligned ones included, are those of copies, and so are the gradients."""
    whole = tg.Tensor(np.random.default_rng(0).integers(-4, 5, (2, 12, 12)), dtype=dtype)
    for right in VIEWS.values():
        a, b = VIEWS[left](whole[0]), right(whole[1])
        b = b if b.shape[0] == a.shape[1] else b.T
        if b.shape[0] != a.shape[1]:
            continue
        operands = [t.detach().requires_grad_() for t in (a, b)]
        copies = [leaf(t.numpy(), dtype=dtype) for t in (a, b)]
        cotangent = np.random.default_rng(1).integers(-4, 5, (a.shape[0], b.shape[1]))
        found, exact = (gradients(tg.matmul, *t, cotangent=cotangent) for t in (operands, copies))
        assert (
            found[0].tolist() == (a.numpy().astype(np.float64) @ b.numpy().astype(np.float64)).tolist()
        )  # small integers
        assert [f.tolist() for f in found] == [e.tolist() for e in exact]


@pytest.mark.parametrize(
    ("a", "b"), [((3, 0), (0, 4)), ((0,), (0, 4)), ((3, 0), (0,)), ((2, 3, 0), (2, 0, 4))], ids=str
)
def test_a_product_over_nothing_is_zeros(device, a, b):
    y, da, db = gradients(tg.matmul, leaf(np.zeros(a)), leaf(np.zeros(b)))
    assert y.shape == np.matmul(np.zeros(a), np.zeros(b)).shape
    assert (y == 0).numpy().all()
    assert (da.shape, db.shape) == (a, b)


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("dtype", [tg.float32, tg.bfloat16], ids=str)
def test_product_into_a_place(backend, dtype, k, filled):
    """Into memory that holds 7s: written with = where it is not filled, over nothing too, and else added."""
    out = tg.full((3, 4), 7.0, dtype=tg.float32)
    place = Place(out.data, filled)
    product_into(place, tg.ones(3, k, dtype=dtype).data, tg.ones(k, 4, dtype=dtype).data)
    assert place.filled
    assert (out == k + 7 * filled).numpy().all()


@pytest.mark.parametrize("dtype", [tg.float64, *ROUNDING], ids=str)
@pytest.mark.parametrize("shape", [(0, 3), (5, 0), (8, 0), (33, 3), (2, 3, 4), (256, 5)])
def test_column_sum(backend, shape, dtype):
    x = tg.Tensor(sample(shape), dtype=dtype)
    found, exact = tg.Tensor(column_sum(x.data)), x.numpy().astype("f8").reshape(math.prod(shape[:-1]), shape[-1])
    assert found.dtype == (tg.float64 if dtype == tg.float64 else tg.float32)
    assert_near(found.numpy(), exact.sum(0), rtol=1e-14 if dtype == tg.float64 else 1e-6)


@settings(max_examples=12)
@given(data=st.data(), lacks=MAY_LACK, form=st.sampled_from(["none", "tanh"]))
def test_mlp(backend, data, lacks, form):
    """Against product, GELU and product: values and gradients, of a size, with no more error than twice theirs."""
    dtype = data.draw(st.sampled_from([F4, BF]))
    shapes = mlp_shapes(*data.draw(st.sampled_from([((0,), 3, 2, 5), ((8,), 8, 16, 8), ((2, 33), 17, 65, 9)])))
    arrays = {n: rng(i).uniform(-1, 1, s).astype(dtype) for i, (n, s) in enumerate(shapes.items()) if n not in lacks}
    frozen = data.draw(st.sets(st.sampled_from(sorted(arrays)), max_size=len(arrays) - 1))
    results = []
    for op, kind in ((mlp, dtype), (composed, dtype), (composed, tg.float64)):
        leaves = {n: leaf(as_float64(a), dtype=kind, requires_grad=n not in frozen) for n, a in arrays.items()}
        y = op(**leaves, form=form)
        y.backward(tg.ones_like(y))
        results.append({"the result": y, **{n: t.grad for n, t in leaves.items()}})
    for name, found, same, exact in zip(results[0], *(r.values() for r in results), strict=True):
        assert (found is None) == (name in frozen)
        if found is not None:
            assert found.dtype == dtype
            found, same, exact = (as_float64(t.data) for t in (found, same, exact))
            size = abs(same - exact).max(initial=0) * 2 + 2 * ROUNDING[dtype] * abs(exact).max(initial=0)
            assert_near(found, exact, rtol=0, atol=size, name=name)


# What a kernel meets: sizes about its tiles (64 and 128, 8 to 32 deep) and vectors, and none.
SIDES = [0, 1, 3, 8, 16, 31, 33, 63, 64, 65, 130]


def padded(n):
    """The next multiple of 8 and 8 more: rows as far apart begin where vectors may."""
    return -(-n // 8) * 8 + 8


PLACES = {  # a matrix (m, n) within the memory of one of another shape
    "rows": lambda m, n: np.empty((m, n)),
    "columns": lambda m, n: np.empty((n, m)).T,
    "wide": lambda m, n: np.empty((m, padded(n)))[:, :n],
    "tall": lambda m, n: np.empty((n, padded(m)))[:, :m].T,
    "late": lambda m, n: np.empty(m * n + 1)[1:].reshape(m, n),
    "misaligned": lambda m, n: np.empty((m, n + 3))[:, 1 : n + 1],
    "sparse": lambda m, n: np.empty((2 * m, 3 * n))[::2, ::3],
    "backwards": lambda m, n: np.empty((m, n))[::-1, ::-1],
}
needs_gpu = pytest.mark.skipif(not tg.cuda.is_available(), reason="needs a GPU")


def placed(values, place, dtype):
    """values (..., m, n) as an array of the default device in one of PLACES, the batch axes before it."""
    *batch, m, n = values.shape
    shape = PLACES[place](m, n)
    base = shape if shape.base is None else shape.base
    offset = (shape.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // 8
    xp = array_module(tg.zeros(1).data)
    memory = xp.zeros((math.prod(batch), base.size + 8), dtype)
    size = memory.itemsize
    strides = [s // 8 * size for s in shape.strides]
    view = xp.lib.stride_tricks.as_strided(
        memory.reshape(-1)[offset:], (math.prod(batch), m, n), (memory.strides[0], *strides)
    )
    view = view.reshape(*batch, m, n) if len(batch) != 1 else view
    view[...] = xp.asarray(values.astype(dtype))
    return view


@pytest.mark.parametrize("dtype", [tg.float64, F4, BF], ids=str)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
def test_residual(backend, batch, place, dtype):
    """Of any strides and address; all numbers are small integers."""
    a, b, residual = (rng(i).integers(-2, 3, (*batch, *s)) for i, s in enumerate([(9, 12), (12, 16), (9, 16)]))
    bias, (x, y) = np.arange(16), (placed(z, "rows", dtype) for z in (a, b))
    options = {"bias": tg.Tensor(bias, dtype=dtype).data, "residual": placed(residual, place, dtype), "dtype": dtype}
    with poisoned(array_module(x)):
        found = product(x, y, alpha=2.0, **options)
    assert found.dtype == dtype
    assert (as_float64(found) == 2 * (a @ b) + bias + residual).all()


# What kernels are compiled for, few of all there could be: dtypes, the places of a, b and c, and what becomes of sums.
CASES = [
    (F4, F4, "wide", "wide", "wide", "plain"),
    (F4, F4, "tall", "misaligned", "columns", "add"),
    (F2, F2, "wide", "tall", "wide", "gelu"),
    (F2, F4, "tall", "wide", "wide", "row sums"),
    (BF, BF, "wide", "wide", "wide", "slope"),
    (BF, BF, "tall", "tall", "tall", "residual"),
    (BF, F4, "sparse", "backwards", "wide", "add"),
    (F4, F4, "backwards", "tall", "misaligned", "slope"),
    (F2, F2, "misaligned", "wide", "sparse", "residual"),
    (BF, F4, "wide", "tall", "rows", "gelu"),
    (F4, F4, "tall", "wide", "tall", "row sums"),
    (BF, BF, "tall", "wide", "tall", "plain"),
]


def runs():
    """(backend, kernel, tile, cases), and what `product` chooses. Matrix cores' kernels need warps of 32, sm_90's a
    GPU. A host's compiler is slow, so that there each tile has only every other case or every third."""
    for backend, names, every in (("host32", ("gemm", "gemm_sm80"), 2), ("host64", ("gemm",), 3), ("cuda", TILES, 1)):
        found = []
        for name in names:
            for i, label in enumerate(TILES[name]):
                cases = CASES[i % every :: every]
                found.append((name, label, [case for case in cases if name != "gemm_sm90" or case[0] != F4]))
        for engine in {"host32": ["kernel"], "cuda": ["kernel", "blas"]}.get(backend, []):
            found.append(("product", engine, [case for case in CASES if case[-1] in ("plain", "add")]))
        mark = needs_gpu if backend == "cuda" else needs_compiler
        yield from (pytest.param(backend, *what, marks=mark, id="-".join((backend, *what[:2]))) for what in found)


def limits_for(name, kernels):
    """The Limits of the default device, if it can run that kernel."""
    limits = kernel.limits(tg.zeros(1).data)
    if kernels == "cuda" and name not in ("gemm", "product", *chosen(limits=limits)):
        pytest.skip(f"{limits.target} cannot run {name}")
    return limits


def take_cut(monkeypatch, i):
    """Have `config` take the i-th of the cuts, whatever it should take; there are at most six."""
    monkeypatch.setattr(gemm_config, "cuts", lambda *of: [(found := [*cuts(*of)])[i % len(found)]])
    config.cache_clear()


@pytest.mark.parametrize(("kernels", "name", "label", "cases"), [*runs()], indirect=["kernels"])
@settings(max_examples=16)
@given(data=st.data())
def test_kernels(kernels, name, label, cases, monkeypatch, data):
    """Every tile of every kernel, whole and in pieces: all that may become of sums, in any layout, with sizes about the
    tiles. What is not read holds NaN."""
    limits = limits_for(name, kernels)
    by_vectors = name == "gemm_sm90" or (name, label) == ("gemm", "128x128")
    dtype, out, *places, what = data.draw(st.sampled_from(cases))
    if by_vectors:
        places[:2] = (place if place in ("wide", "tall") else "wide" for place in places[:2])
    if name == "gemm_sm90":
        places[2] = "wide"

    # About the edges of a tile and of vectors; and some tiles, deep enough to be cut.
    many = [130, 300, 520] if kernels == "cuda" else [65, 130]
    sides = data.draw(st.sampled_from([many, [s for s in SIDES if s >= 8 * by_vectors]]))
    m, n = (data.draw(st.sampled_from(sides)) for _ in range(2))
    k = data.draw(st.sampled_from([s for s in sides if s or name in ("gemm", "product")]))
    batch = data.draw(st.sampled_from([(), (), (3,), (2, 3)])) if what != "row sums" else ()
    alpha, biased = data.draw(st.sampled_from([(1.0, True), (-2.0, False)]))
    beta = {"add": 0.5, "residual": 1.0, "row sums": data.draw(st.sampled_from([0.0, 1.0]))}.get(what, 0.0)
    form, keeps = "tanh" if out == F4 else "none", data.draw(st.booleans())
    shapes, dtypes = ((m, k), (k, n), (m, n), (m, n), (m, n)), (dtype, dtype, out, out, out)
    a, b, c, other, pre = (
        placed(rng(i).uniform(-1, 1, (*batch, *s)), place, t)
        for i, (s, place, t) in enumerate(zip(shapes, (*places, places[2], places[2]), dtypes, strict=True))
    )
    bias, sums = (tg.Tensor(rng(9).uniform(-1, 1, s), dtype=t).data for s, t in ((n, dtype), (m, F4)))
    left, right, old = (as_float64(x) for x in (a, b, other if what == "residual" else c))
    sums[...] = pre[...] = math.nan
    if what not in ("add", "row sums") or not beta:
        c[...] = math.nan

    options = {
        "gelu": {"epilogue": GELU, "pre": pre if keeps else None, "TANH": int(form == "tanh")},
        "slope": {"epilogue": SLOPE, "other": other, "TANH": int(form == "tanh")},
        "residual": {"epilogue": ADD, "other": other},
        "row sums": {"sums": sums},
    }.get(what, {})
    if name == "product":
        monkeypatch.setattr(tg.config, "gemm", label)
        assert product(a, b, out=c, alpha=alpha, beta=beta, bias=bias if biased else None) is c
    else:
        limits = limits._replace(processors=data.draw(st.sampled_from([1, 2, 3, 5, 7, 1000])))
        options |= {"limits": limits, "choices": ((name, label),)}
        take_cut(monkeypatch, data.draw(st.integers(0, 5)))
        with poisoned(array_module(c)):
            product_kernel(c, a, b, alpha, beta, bias if biased else None, **options)

    # Of float32 sums one after another; matrix cores round a float32 factor to 11 bits.
    share = 2 * ROUNDING[F4] * (k + 1) ** 0.5 + (2 * 2**-11 if name == "gemm_sm80" and dtype == F4 else 0)
    error = (abs(alpha) * (abs(left) @ abs(right)) + 3) * share
    exact = alpha * (left @ right) + (as_float64(bias) if biased else 0) + (beta * old if beta else 0)
    if what == "gelu" and keeps:
        assert_near(as_float64(pre), exact, rtol=2 * ROUNDING[out], atol=error, name="pre")
        error, exact = 2**-20 * abs(as_float64(pre)), gelu.fwd(as_float64(pre), form)
    elif what == "gelu":
        error, exact = 1.2 * (error + 2 * ROUNDING[out] * abs(exact)), gelu.fwd(exact, form)
    if what == "slope":
        error, exact = 1.2 * error + 2**-20 * abs(exact), gelu.bwd(exact, as_float64(other), form)
    if what == "row sums" and n:  # else there are no tiles to make them
        assert_near(as_float64(sums), left.sum(1), rtol=0, atol=abs(left).sum(1) * share, name="sums")
    assert_near(as_float64(c), exact, rtol=2 * ROUNDING[out], atol=error + 2**-24)  # half of float16's smallest number


ROWS_OF = [pytest.param("host32", name, "64x64", marks=needs_compiler) for name in ("gemm", "gemm_sm80")]
ROWS_OF += [pytest.param("cuda", name, label, marks=needs_gpu) for name, tiles in TILES.items() for label in tiles]


@pytest.mark.parametrize(("kernels", "name", "label"), ROWS_OF, indirect=["kernels"])
def test_row_sums_of_every_cut(kernels, name, label, monkeypatch):
    """Whichever tiles and pieces add up rows of a, each element counts once. All numbers are small integers."""
    limits = limits_for(name, kernels)
    m, n, k = (520, 584, 1160) if kernels == "cuda" else (72, 200, 104)
    x, y = (rng(i).integers(-2, 3, s) for i, s in enumerate([(k, m), (k, n)]))
    a, b = tg.Tensor(x, dtype=F2).data.T, tg.Tensor(y, dtype=F2).data
    c, sums = array_module(a).empty((m, n), F4), array_module(a).empty(m, F4)
    for processors, cut in itertools.product((1, 2, 3, 6, 10, 14, 132), range(6)):
        take_cut(monkeypatch, cut)
        c[...] = sums[...] = math.nan
        product_kernel(c, a, b, sums=sums, limits=limits._replace(processors=processors), choices=((name, label),))
        assert (as_float64(c) == x.T @ y).all(), (processors, cut)
        assert (as_float64(sums) == x.sum(0)).all(), (processors, cut)


@pytest.mark.parametrize("out", [F4, None], ids=["into float32", "into its own"])
@pytest.mark.parametrize("dtype", [F4, F2, BF], ids=str)
def test_errors_beside_the_mathematics(kernels, monkeypatch, dtype, out):
    """The largest error of sums of positive terms, in parts of the sum, is at most twice that of the mathematics, or on
    a GPU, of which the matrix cores cut sums off, twice that of the library, and one rounding."""
    out, errors, draw = out or dtype, collections.defaultdict(list), rng(0)
    by = functools.partial(monkeypatch.setattr, tg.config, "gemm")
    for _ in range(6):
        m, n, k = (8 * int(draw.integers(1, most)) for most in (10, 10, 90))
        a, b = (draw.uniform(0, 1, s).astype(dtype) for s in ((m, k), (k, n)))
        exact, (x, y) = as_float64(a) @ as_float64(b), (tg.Tensor(z).data for z in (a, b))
        found = {}
        for engine in ("kernel", "blas") if kernels == "cuda" else ("kernel",):
            by(engine)
            found[engine] = product(x, y, dtype=out)
        found.setdefault("blas", gemm._mathematics(a, b, None, 1, 0, None, None, out))
        for name, c in found.items():
            errors[name].append((abs(as_float64(c) - exact) / exact).max())
    worst = {name: max(each) for name, each in errors.items()}
    assert worst["kernel"] <= 2 * worst["blas"] + ROUNDING[out]


@pytest.mark.parametrize("dtype", [F2, BF], ids=str)
@pytest.mark.parametrize("k", [130, 2000])
def test_halves_are_rounded_once(kernels, monkeypatch, dtype, k):
    """A bias that takes all of the product but its rounding leaves just that, which a library that rounds sums of parts
    along K, as cuBLAS may, gives as zeros."""
    side = 520 if kernels == "cuda" else 40
    a, b = (rng(i).uniform(-1, 1, s).astype(dtype) for i, s in enumerate([(1, k), (k, side)]))
    exact = as_float64(a) @ as_float64(b)
    bias = -exact[0].astype(dtype)
    exact += as_float64(bias)
    for engine in ("kernel", "blas") if kernels == "cuda" else ("kernel",):
        monkeypatch.setattr(tg.config, "gemm", engine)
        x, y, z = (tg.Tensor(each).data for each in (np.repeat(a, side, 0), b, bias))
        found = as_float64(product(x, y, bias=z, dtype=dtype))
        assert_near(found, np.repeat(exact, side, 0), rtol=2 * ROUNDING[dtype], atol=k * ROUNDING[F4], name=engine)


@pytest.mark.parametrize(
    ("a", "b"),
    [((2, 1, 3, 5), (4, 5, 2)), ((2, 1, 3, 1, 3, 5), (3, 2, 5, 4)), ((1, 2, 1, 2, 1, 5), (2, 1, 2, 1, 5, 1))],
    ids=str,
)
def test_batches_that_broadcast(kernels, a, b):
    """More axes than a kernel takes go one by one; those that lie behind one another in memory are merged."""
    x, y = sample(a).astype("f4"), sample(b, 1).astype("f4")
    found = product(tg.Tensor(x).data, tg.Tensor(y).data)
    assert_near(as_float64(found), x.astype("f8") @ y, rtol=1e-6)
    x = tg.Tensor(x).data[..., ::-1, :, :]
    assert_near(as_float64(product(x, tg.Tensor(y).data)), as_float64(x) @ y, rtol=1e-6)


def test_a_kernel_adds_in_one_order(kernels):
    """The same bits every time, whatever order the blocks run in."""
    a, b = (tg.Tensor(np.random.default_rng(i).standard_normal((130, 130)).astype("f4")).data for i in range(2))
    first, second = (as_float64(product(a, b)) for _ in range(2))
    assert (first == second).all()


ALIGNED, ACROSS, ODD = Layout(True, 8, True), Layout(False, 8, True), Layout(True, 1, False)
PLAINLY = {"EPILOGUE": PLAIN, "ROW_SUMS": 0}
LAYOUTS_OF = [  # shape, strides in elements, the address past a multiple of 16 bytes; what is found of halves
    ((9, 16), (16, 1), 0, (True, 8, True)),
    ((16, 9), (1, 16), 0, (False, 8, True)),
    ((9, 13), (16, 1), 0, (True, 8, True)),
    ((9, 13), (13, 1), 0, (True, 1, False)),
    ((1, 13), (13, 1), 0, (True, 8, True)),
    ((9, 16), (16, 1), 2, (True, 1, False)),
    ((9, 16), (32, 2), 0, (True, 1, False)),
    ((9, 16), (-16, 1), 0, (True, 8, False)),
    ((9, 16), (16, -1), 0, (True, 1, False)),
    ((9, 16), (0, 1), 0, (True, 8, False)),
    ((9, 4), (16, 1), 0, (True, 1, False)),
    ((2, 9, 16), (0, 16, 1), 0, (True, 8, True)),
    ((2, 9, 16), (150, 16, 1), 0, (True, 1, False)),
    ((2, 9, 16), (-160, 16, 1), 0, (True, 8, False)),
]


@pytest.mark.parametrize(("shape", "strides", "misplaced", "expected"), LAYOUTS_OF, ids=str)
def test_layout(shape, strides, misplaced, expected):
    assert layout(shape, tuple(2 * s for s in strides), 2, misplaced) == expected


def test_layout_of_several_arrays():
    """What is laid out as a result has a part in how many elements of it an access takes."""
    c, late = (placed(np.zeros((8, 16)), place, F2) for place in ("rows", "late"))
    assert [gemm._layout(*x).vector for x in ((c,), (late,), (c, None), (c, c), (c, None, late))] == [8, 1, 8, 8, 1]


def chosen(dtype=F2, k=64, a=ALIGNED, b=ALIGNED, c=ALIGNED, limits=kernel.H200, tf32=False):
    """The kernels that may multiply, the first of them also the one that `config` takes for a large product."""
    names = gemm_config.kernels_for(dtype, k, a, b, c, limits, tf32)
    assert config(8192, 8192, k, 1, dtype, dtype, a, b, c, limits, tf32=tf32, **PLAINLY).launch.name == names[0]
    return names


def test_kernels_chosen():
    assert chosen() == chosen(BF) == chosen(a=ACROSS) == ("gemm_sm90", "gemm_sm80")
    halves = [{"limits": TARGETS[target]} for target in ("sm_80", "sm_86", "sm_89", "sm_100", "sm_120")]
    odd = [{"a": ODD}, {"b": ODD}, {"c": ODD}, {"c": ACROSS}, {"a": ALIGNED._replace(tiled=False)}]
    for options in (*halves, *odd, {"dtype": F4, "tf32": True}):
        assert chosen(**options) == ("gemm_sm80",), options
    others = [{"limits": TARGETS[target]} for target in ("sm_75", "gfx90a", "gfx1030")]
    for options in (*others, {"limits": kernel.Limits("cpu", 32, 4, 48 << 10)}, {"dtype": F4}, {"k": 0}):
        assert chosen(**options) == ("gemm",), options


def test_config():
    """A large tile only where it fills the GPU; pieces along K where tiles do not; an error for too many tiles."""

    def plan(m, n, k, dtype=F4, batch=1, limits=kernel.H200, **options):
        return config(m, n, k, batch, dtype, dtype, ALIGNED, ALIGNED, ALIGNED, limits, **PLAINLY, **options)

    assert dict(plan(128, 128, 64).launch.defines)["TILE_M"] == 64
    assert dict(plan(8192, 8192, 8192).launch.defines)["TILE_M"] == 128
    assert plan(8192, 8192, 64).sum is None
    assert all(plan(256, 256, 8192, dtype).sum for dtype in (F4, BF))
    with pytest.raises(ValueError, match=r"matmul: 2147483648 products \(1, 1\) .*, 2\^31 or more"):
        plan(1, 1, 1, batch=2**31)
    for limits in TARGETS.values():
        for m, n, dtype, tf32 in itertools.product((1, 64, 4096), (64, 4096), (F4, F2), (False, True)):
            found = plan(m, n, 4096, dtype, limits=limits, tf32=tf32)
            assert found.launch.shared <= limits.shared_memory


def pieces(cut, tiles, steps):
    """(tile, first step, steps, slot or -1) of all that workers do, as Work of gemm.cuh has it."""
    blocks, several = -(-steps // cut.slices), cut.slices > 1
    for u in range(cut.whole):
        yield u % tiles, u // tiles * blocks, blocks, u if several else -1
    for r in range(cut.ranges):
        at, end = r * cut.per, min((r + 1) * cut.per, (tiles * cut.slices - cut.whole) * blocks)
        slot = several * cut.whole + 2 * r
        while at < end:
            u, first = cut.whole + at // blocks, at % blocks
            count = min(blocks - first, end - at)
            yield u % tiles, u // tiles * blocks + first, count, slot if several or count < blocks else -1
            at, slot = at + count, slot + 1


def slots_of(cut, tiles, steps, tile):
    """The slots that gemm_sum adds for a tile."""
    blocks, several = -(-steps // cut.slices), cut.slices > 1
    for u in range(tile, tiles * cut.slices, tiles):
        if u < cut.whole:
            yield from [u] * several
            continue
        begin = (u - cut.whole) * blocks
        r0, r1 = begin // cut.per, (begin + blocks - 1) // cut.per
        if several or r0 < r1:
            yield from (several * cut.whole + 2 * r + (r == r0 and begin > r * cut.per) for r in range(r0, r1 + 1))


@settings(max_examples=200)
@given(tiles=st.integers(0, 70), steps=st.integers(0, 40), workers=st.integers(1, 20))
def test_cuts(tiles, steps, workers):
    """Every step of every tile is made once; slots are the pieces' own and those that are added, in the order of K."""
    for cut in cuts(tiles, steps, workers, 0.1, 1.0, 1.0):
        made, slots = collections.Counter(), collections.defaultdict(list)
        for tile, first, count, slot in sorted(pieces(cut, tiles, steps)):
            made.update((tile, step) for step in range(first, min(first + count, steps)))
            if slot >= 0:
                slots[tile].append(slot)
            else:
                assert (first, count) == (0, steps)
        assert made == dict.fromkeys(itertools.product(range(tiles), range(steps)), 1)
        assert [slots[tile] for tile in range(tiles)] == [[*slots_of(cut, tiles, steps, tile)] for tile in range(tiles)]
        used = [slot for each in slots.values() for slot in each]
        assert len(set(used)) == len(used)
        assert max(used, default=-1) < cut.slots
        assert cut.ranges <= workers
        assert cut.per <= -(-steps // cut.slices)
        assert not cut.ranges or cut.whole % workers == 0


def test_small_products_are_cut():
    """What test_kernels draws from: cuts into slices, ranges, both and neither, for the tiles that it has."""
    sizes = itertools.product((1, 2, 4, 9), (5, 9), (2, 4, 6, 10, 14))
    found = {(cut.slices > 1, cut.ranges > 0) for size in sizes for cut in cuts(*size, 0.1, 1.0, 1.0)}
    assert found == set(itertools.product((False, True), repeat=2))


def test_switches(monkeypatch):
    for name, value in {"gemm": "cublas", "allow_tf32": None}.items():
        with pytest.raises(ValueError, match=f"config: {name} must be one of"):
            setattr(tg.config, name, value)
    with pytest.raises(AttributeError, match="config: there is no tf32"):
        tg.config.tf32 = True


# A rule, the shapes of its inputs for the x of one, and of which inputs' gradients each array that it saves is part.
FROZEN = {
    "linear": (Linear, lambda x: [x, (5, 3), (5,), (*x[:-1], 5)], [{1}, {0}], {}),
    "matmul": (MatMul, lambda x: [x, (3, 5)], [{1}, {0}], {}),
    "matmul of batches": (MatMul, lambda x: [x, (*x[:-2], 3, 5)], [{1}, {0}], {}),
    "mlp": (
        GeluMLP, lambda x: list(mlp_shapes(x[:-1], 3, 7, 5).values()), [{1}, {0}, {0, 1, 2}, {0, 1, 2}, {3}],
        {"approximate": "tanh"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FROZEN)
@pytest.mark.parametrize("x", [(4, 3), (2, 4, 3)], ids=str)
def test_frozen_inputs_cost_no_work(device, monkeypatch, name, x):
    """No gradient, no memory and no product: each gradient of a factor is one, and so is that between two layers."""
    function, shapes, saved_for, options = FROZEN[name]
    shapes, made = shapes(x), []
    returned, multiply = returned_by(monkeypatch, function), gemm.product
    monkeypatch.setattr(gemm, "product", lambda *a, **k: made.append(1) or multiply(*a, **k))
    for wanted in itertools.product((False, True), repeat=len(shapes)):
        if not any(wanted):
            continue
        operands = [leaf(sample(s), requires_grad=w) for s, w in zip(shapes, wanted, strict=True)]
        y = function.apply(*operands, **options)
        needed = [any(wanted[i] for i in inputs) for inputs in saved_for]
        assert [a is not None for a in y._node.saved_arrays] == needed
        made.clear(), returned.clear()
        y.sum().backward()
        assert [g is not None for g in returned] == [t.grad is not None for t in operands] == [*wanted]
        assert len(made) == len({frozenset(s) for s, n in zip(saved_for, needed, strict=True) if n})


ERRORS = {
    "matmul: shapes must be (..., M, K) and (..., K, N) with axes before these that broadcast, got (2, 3) and (2, 3)": (
        ValueError, lambda: tg.ones(2, 3) @ tg.ones(2, 3),
    ),
    "with axes before these that broadcast, got (2, 3, 4) and (3, 4, 5)": (
        ValueError, lambda: tg.ones(2, 3, 4) @ tg.ones(3, 4, 5),
    ),
    "got (3,) and (4,)": (ValueError, lambda: tg.ones(3) @ tg.ones(4)),
    "matmul: operands need at least one axis, got shapes () and (3,)": (ValueError, lambda: tg.ones() @ tg.ones(3)),
    "matmul: b must have dtype float32 like the others, got float64": (
        TypeError, lambda: tg.ones(2, 2) @ tg.ones(2, 2, dtype=tg.float64),
    ),
    "matmul: a must have a floating dtype, got int64": (TypeError, lambda: tg.arange(2) @ tg.arange(2)),
    "matmul: operands must be Tensors, got list": (TypeError, lambda: tg.matmul([1.0], tg.ones(1))),
    "linear: weight must have shape (out, in), got (3,)": (ValueError, lambda: linear(tg.ones(2, 3), tg.ones(3))),
    "linear: x must have shape (..., in) = (..., 4), got (2, 3)": (
        ValueError, lambda: linear(tg.ones(2, 3), tg.ones(5, 4)),
    ),
    "linear: x must have shape (..., in) = (..., 4), got ()": (ValueError, lambda: linear(tg.ones(), tg.ones(5, 4))),
    "linear: bias must have shape (out,) = (5,), got (4,)": (
        ValueError, lambda: linear(tg.ones(2, 4), tg.ones(5, 4), tg.ones(4)),
    ),
    "linear: weight must have dtype float32 like the others, got float16": (
        TypeError, lambda: linear(tg.ones(2, 4), tg.ones(5, 4, dtype=tg.float16)),
    ),
    "linear: bias must have a floating dtype, got int64": (
        TypeError, lambda: linear(tg.ones(2, 4), tg.ones(5, 4), tg.arange(5)),
    ),
    "linear: residual must have shape (2, 5), got (5,)": (
        ValueError, lambda: linear(tg.ones(2, 4), tg.ones(5, 4), None, tg.ones(5)),
    ),
    "linear: residual must have dtype float32 like the others, got float16": (
        TypeError, lambda: linear(tg.ones(2, 4), tg.ones(5, 4), None, tg.ones(2, 5, dtype=tg.float16)),
    ),
    "linear: residual must be a Tensor or None, got float": (
        TypeError, lambda: F.linear(tg.ones(2, 4), tg.ones(5, 4), residual=1.0),
    ),
    "mlp: fc_weight must have shape (hidden, in), got (7,)": (
        ValueError, lambda: mlp(tg.ones(2, 4), tg.ones(7), tg.ones(5, 7)),
    ),
    "mlp: x must have shape (..., in) = (..., 3), got (2, 4)": (
        ValueError, lambda: mlp(tg.ones(2, 4), tg.ones(7, 3), tg.ones(5, 7)),
    ),
    "mlp: fc_bias must have shape (hidden,) = (7,), got (5,)": (
        ValueError, lambda: mlp(tg.ones(2, 4), tg.ones(7, 4), tg.ones(5, 7), fc_bias=tg.ones(5)),
    ),
    "mlp: proj_weight must have shape (out, hidden) = (out, 7), got (7, 5)": (
        ValueError, lambda: mlp(tg.ones(2, 4), tg.ones(7, 4), tg.ones(7, 5)),
    ),
    "mlp: proj_weight must have shape (out, hidden) = (out, 7), got (7,)": (
        ValueError, lambda: mlp(tg.ones(2, 4), tg.ones(7, 4), tg.ones(7)),
    ),
    "mlp: proj_bias must have shape (out,) = (5,), got (7,)": (
        ValueError, lambda: mlp(tg.ones(2, 4), tg.ones(7, 4), tg.ones(5, 7), proj_bias=tg.ones(7)),
    ),
    "mlp: residual must have shape (2, 5), got (2, 4)": (
        ValueError, lambda: mlp(tg.ones(2, 4), tg.ones(7, 4), tg.ones(5, 7), residual=tg.ones(2, 4)),
    ),
    "mlp: proj_bias must have dtype float32 like the others, got float16": (
        TypeError, lambda: mlp(tg.ones(2, 4), tg.ones(7, 4), tg.ones(5, 7), proj_bias=tg.ones(5, dtype=tg.float16)),
    ),
    "mlp: proj_weight must be a Tensor, got NoneType": (TypeError, lambda: mlp(tg.ones(2, 4), tg.ones(7, 4), None)),
    'mlp: approximate must be "none" or "tanh", got True': (
        ValueError, lambda: mlp(tg.ones(2, 4), tg.ones(7, 4), tg.ones(5, 7), form=True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", ERRORS)
def test_errors(device, message):
    error, call = ERRORS[message]
    with pytest.raises(error, match=re.escape(message)):
        call()
