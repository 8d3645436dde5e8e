"""Matrix products and the linear layer: values against NumPy, gradients by differences, dtypes, empty sides, errors."""

import itertools
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tinygrad_gpu as tg
import tinygrad_gpu.functional as F
from tests.ops.helpers import ROUNDING, as_float64, assert_near, check_dtype, gradients, layouts, leaf, returned_by
from tinygrad_gpu.autograd import Place
from tinygrad_gpu.device import array_module
from tinygrad_gpu.ops import gemm
from tinygrad_gpu.ops.gemm import Linear, MatMul, column_sum, product, product_into
from tinygrad_gpu.testing import strategies

rng = np.random.default_rng


def linear(x, weight, bias=None):
    return Linear.apply(x, weight, bias)


@settings(max_examples=100)
@given(operands=strategies.matmul_operands(), data=st.data())
def test_matmul(device, operands, data):
    a, b = (leaf(x, data.draw(layouts)) for x in operands)
    assert_near((a @ b).numpy(), np.asarray(a.numpy() @ b.numpy()), rtol=1e-13, atol=1e-13)
    assert tg.testing.gradcheck(tg.matmul, a, b)


@given(data=st.data())
def test_linear(device, data):
    """x (..., C), W (O, C), with and without b (O,); each length may be 0."""
    lead = data.draw(strategies.shapes(max_dims=2, max_side=5))
    width, out = data.draw(st.tuples(st.sampled_from((0, 1, 3, 7)), st.sampled_from((0, 1, 2, 5))))
    shapes = ((*lead, width), (out, width), (out,))[: data.draw(st.sampled_from((2, 3)))]
    operands = [leaf(data.draw(strategies.arrays(s)), data.draw(layouts)) for s in shapes]
    x, weight, *bias = (t.numpy() for t in operands)
    assert_near(linear(*operands).numpy(), x @ weight.T + (bias[0] if bias else 0), rtol=1e-13, atol=1e-13)
    assert tg.testing.gradcheck(linear, *operands)


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
    check_dtype(linear, [sample(x), sample((5, 33), seed=1), sample((5,), seed=2)], dtype, floor=0, terms=max(x))


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


@pytest.mark.parametrize("dtype", [tg.float64, tg.float32, tg.float16], ids=str)
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


# What a kernel meets: sizes about its tiles (64 and 128, 8 to 32 deep) and vectors, and none.
SIDES = st.sampled_from([0, 1, 3, 8, 16, 31, 33, 63, 64, 65, 130])
PLACES = {  # a matrix (m, n) within the memory of one of another shape
    "rows": lambda m, n: np.empty((m, n)),
    "columns": lambda m, n: np.empty((n, m)).T,
    "wide": lambda m, n: np.empty((m, n + 8))[:, :n],
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


@pytest.mark.parametrize("engine", ["kernel", pytest.param("blas", marks=needs_gpu)])
@settings(max_examples=40)
@given(data=st.data())
def test_kernels(kernels, engine, data):
    """alpha a b + beta c + bias in any layout, sizes about the tiles, halves into float32 or their own type; c is read
    only if beta is not 0."""
    dtype = data.draw(st.sampled_from([tg.float32, tg.float16, tg.bfloat16]))
    out = data.draw(st.sampled_from([dtype, tg.float32]))
    m, n, k = (data.draw(SIDES) for _ in range(3))
    batch = data.draw(st.sampled_from([(), (), (3,), (2, 3)]))
    beta, alpha, biased = data.draw(st.sampled_from([(0.0, 1.0, False), (1.0, 1.0, False), (0.5, -2.0, True)]))
    draw = np.random.default_rng(0).uniform
    a, b, c = (
        placed(draw(-1, 1, (*batch, *s)).astype(t), data.draw(st.sampled_from(sorted(PLACES))), t)
        for s, t in (((m, k), dtype), ((k, n), dtype), ((m, n), out))
    )
    bias = tg.Tensor(draw(-1, 1, n), dtype=dtype).data if biased else None
    exact = alpha * (as_float64(a) @ as_float64(b)) + beta * as_float64(c)
    exact += 0 if bias is None else as_float64(bias)
    if not beta:
        c[...] = math.nan
    tg.config.gemm = engine
    try:
        found = product(a, b, out=c, alpha=alpha, beta=beta, bias=bias)
    finally:
        tg.config.gemm = "auto"
    assert found is c
    scale = abs(alpha) * (abs(as_float64(a)) @ abs(as_float64(b))) + 3
    error = abs(as_float64(c) - exact) / scale
    assert error.max(initial=0) <= 2 * ROUNDING[out] + 2 * ROUNDING[tg.float32] * (k + 1) ** 0.5


@pytest.mark.parametrize("form", ["none", "tanh"])
@settings(max_examples=10)
@given(data=st.data())
def test_linear_with_gelu(backend, form, data):
    """Is a GELU of the linear layer, its result rounded: values and gradients, with a bias and without, frozen inputs
    too."""
    dtype = data.draw(st.sampled_from(list(ROUNDING)))
    lead, width, out = data.draw(st.sampled_from([((), 1, 1), ((0,), 3, 2), ((5,), 8, 16), ((2, 33), 17, 65)]))
    arrays = [rng(i).uniform(-1, 1, s) for i, s in enumerate([(*lead, width), (out, width), (out,)])]
    arrays = arrays[: data.draw(st.sampled_from([2, 3]))]
    frozen = data.draw(st.sampled_from([None, 0, 1]))
    results = []
    for op in (lambda *t: F.linear(*t, gelu=form), lambda *t: F.linear(*t).gelu(form)):
        leaves = [leaf(a, dtype=dtype, requires_grad=i != frozen) for i, a in enumerate(arrays)]
        y = op(*leaves)
        y.backward(tg.ones_like(y))
        results.append([y, *(t.grad for t in leaves)])
    for a, b in zip(*results, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert_near(as_float64(a.data), as_float64(b.data), rtol=2 * ROUNDING[dtype], atol=1e-6)


def test_linear_with_gelu_by_differences(device):
    leaves = [leaf(rng(i).standard_normal(s)) for i, s in enumerate([(3, 4), (5, 4), (5,)])]
    for form in ("none", "tanh"):
        assert tg.testing.gradcheck(lambda *t, form=form: F.linear(*t, gelu=form), *leaves)
    with pytest.raises(ValueError, match='linear: gelu must be None, "none" or "tanh", got True'):
        F.linear(*leaves, gelu=True)


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


def test_config():
    """A large tile only where it fills the GPU, and an error where the blocks of a launch cannot be counted."""
    layouts = [(True, 4)] * 3
    f4 = np.dtype(np.float32)
    tiles = {
        mn: dict(gemm.config("gemm", *mn, 1, f4, f4, *layouts, 132).defines)["TILE_M"]
        for mn in [(128, 128), (8192, 8192), (1408, 1536), (1407, 1408)]
    }
    assert tiles == {(128, 128): 64, (8192, 8192): 128, (1408, 1536): 128, (1407, 1408): 64}
    with pytest.raises(ValueError, match=r"2\^31 or more"):
        gemm.config("gemm", 1, 1, 2**31, f4, f4, *layouts, 132)


def test_switches(monkeypatch):
    for name, value in {"gemm": "cublas", "allow_tf32": None}.items():
        with pytest.raises(ValueError, match=f"config: {name} must be one of"):
            setattr(tg.config, name, value)
    with pytest.raises(AttributeError, match="config: there is no tf32"):
        tg.config.tf32 = True


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("x", [(4, 3), (2, 4, 3)])
def test_frozen_inputs_cost_no_work(device, monkeypatch, frozen, x):
    for function, shapes in ((Linear, (x, (5, 3), (5,))), (MatMul, (x, (3, 5))), (MatMul, (x, (*x[:-2], 3, 5)))):
        operands = [leaf(sample(s), requires_grad=i not in frozen) for i, s in enumerate(shapes)]
        if not any(t.requires_grad for t in operands):
            continue
        with monkeypatch.context() as patch:
            returned = returned_by(patch, function)
            y = function.apply(*operands)
            saved = y._node.saved_arrays
            y.sum().backward()
        assert [g is None for g in returned] == [i in frozen for i in range(len(operands))]
        assert [t.grad is None for t in operands] == [i in frozen for i in range(len(operands))]
        assert [s is None for s in saved] == [1 in frozen, 0 in frozen]  # each factor is for the other's gradient


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
}  # fmt: skip


@pytest.mark.parametrize("message", ERRORS)
def test_errors(device, message):
    error, call = ERRORS[message]
    with pytest.raises(error, match=re.escape(message)):
        call()
