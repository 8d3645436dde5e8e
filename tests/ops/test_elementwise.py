"""The elementwise ops: values against NumPy, gradients by differences, dtypes, kinks and extremes, errors."""

import functools
import math
import operator
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tinygrad_gpu as tg
from tests.ops.helpers import (
    ROUNDING,
    assert_near,
    check_dtype,
    check_kernel,
    gradients,
    layouts,
    leaf,
    returned_by,
)
from tinygrad_gpu import kernel
from tinygrad_gpu.ops import elementwise
from tinygrad_gpu.testing import strategies


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


# name: op on tensors, the same on NumPy arrays, where inputs lie; these are odd multiples of 1/128, so none is a kink.
UNARY = {
    "neg": (lambda x: -x, np.negative, (-3, 3)),
    "abs": (lambda x: abs(x), np.abs, (-3, 3)),
    "exp": (lambda x: x.exp(), np.exp, (-3, 3)),
    "log": (lambda x: x.log(), np.log, (0.25, 4)),
    "sqrt": (lambda x: x.sqrt(), np.sqrt, (0.25, 4)),
    "rsqrt": (lambda x: x.rsqrt(), lambda x: 1 / np.sqrt(x), (0.25, 4)),
    "tanh": (lambda x: x.tanh(), np.tanh, (-3, 3)),
    "sigmoid": (lambda x: x.sigmoid(), sigmoid, (-8, 8)),
    "silu": (lambda x: x.silu(), lambda x: x * sigmoid(x), (-8, 8)),
    "relu": (lambda x: x.relu(), lambda x: np.maximum(x, 0), (-3, 3)),
    "sin": (lambda x: x.sin(), np.sin, (-4, 4)),
    "cos": (lambda x: x.cos(), np.cos, (-4, 4)),
    "clamp": (lambda x: x.clamp(-1, 0.5), lambda x: np.clip(x, -1, 0.5), (-3, 3)),
    "clamp min": (lambda x: x.clamp(min=0.25), lambda x: np.maximum(x, 0.25), (-3, 3)),
    "clamp max": (lambda x: x.clamp(max=0.25), lambda x: np.minimum(x, 0.25), (-3, 3)),
    "maximum of number": (lambda x: tg.maximum(0.5, x), lambda x: np.maximum(0.5, x), (-3, 3)),
    "minimum of number": (lambda x: x.minimum(-1), lambda x: np.minimum(x, -1), (-3, 3)),
    "add number": (lambda x: x + 0.3, lambda x: x + 0.3, (-3, 3)),
    "sub number": (lambda x: x - 0.3, lambda x: x - 0.3, (-3, 3)),
    "number sub": (lambda x: 0.3 - x, lambda x: 0.3 - x, (-3, 3)),
    "mul number": (lambda x: 0.3 * x, lambda x: 0.3 * x, (-3, 3)),
    "div number": (lambda x: x / 0.3, lambda x: x / 0.3, (-3, 3)),
    "number div": (lambda x: 0.3 / x, lambda x: 0.3 / x, (0.25, 4)),
    "pow 2": (lambda x: x**2, lambda x: x**2, (-3, 3)),
    "pow 3": (lambda x: x.pow(3), lambda x: x**3, (-3, 3)),
    "pow 0": (lambda x: x**0, lambda x: x**0, (-3, 3)),
    "pow -1": (lambda x: x**-1, lambda x: x**-1, (0.25, 4)),
    "pow 0.3": (lambda x: x**0.3, lambda x: x**0.3, (0.25, 4)),
    "number pow": (lambda x: 1.7**x, lambda x: 1.7**x, (-3, 3)),
    "where with number": (lambda x: tg.where(x.detach() > 1, x, 2.5), lambda x: np.where(x > 1, x, 2.5), (-3, 3)),
    "masked_fill": (lambda x: x.masked_fill(x.detach() > 1, -9.0), lambda x: np.where(x > 1, -9.0, x), (-3, 3)),
}
BINARY = {
    "add": (operator.add, operator.add, (-3, 3)),
    "sub": (operator.sub, operator.sub, (-3, 3)),
    "mul": (operator.mul, operator.mul, (-3, 3)),
    "div": (operator.truediv, operator.truediv, (0.25, 4)),
    "pow": (operator.pow, operator.pow, (0.25, 4)),
    "maximum": (tg.maximum, np.maximum, (-3, 3)),
    "minimum": (lambda a, b: a.minimum(b), np.minimum, (-3, 3)),
    "where": (lambda a, b: tg.where(a.detach() > b.detach(), a, b), lambda a, b: np.where(a > b, a, b), (-3, 3)),
}


# What the rules of these subtract from 1, or a result from a number, bounds their error; others keep relative precision
# down to the smallest normal float16.
SUBTRACTS = ("tanh", "sigmoid", "silu", "add number", "sub number", "number sub")


def inputs(shape, domain, offset=1 / 128):
    return strategies.arrays(shape, min_value=domain[0], max_value=domain[1] - 1 / 64).map(lambda a: a + offset)


def sample(shape, domain, seed=0):
    return np.random.default_rng(seed).uniform(*domain, shape)


@pytest.mark.parametrize("name", UNARY)
@settings(max_examples=8)
@given(data=st.data())
def test_unary(device, name, data):
    op, reference, domain = UNARY[name]
    shape = data.draw(strategies.shapes(max_side=5) | strategies.shapes(min_dims=1, max_dims=1, max_side=33))
    x = leaf(data.draw(inputs(shape, domain)), data.draw(layouts))
    assert_near(op(x).numpy(), np.asarray(reference(x.numpy())), rtol=1e-14)
    assert tg.testing.gradcheck(op, x)


@pytest.mark.parametrize("name", BINARY)
@settings(max_examples=10)
@given(data=st.data())
def test_binary(device, name, data):
    op, reference, domain = BINARY[name]
    shapes = data.draw(strategies.broadcastable_shapes())
    offsets = (1 / 128, 1 / 256)  # the operands lie on two grids: they are never equal
    a, b = (leaf(data.draw(inputs(s, domain, o)), data.draw(layouts)) for s, o in zip(shapes, offsets, strict=True))
    assert_near(op(a, b).numpy(), np.asarray(reference(a.numpy(), b.numpy())), rtol=1e-14)
    assert tg.testing.gradcheck(op, a, b)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("name", [*UNARY, *BINARY])
def test_dtypes(device, name, dtype):
    op, _, domain = (UNARY | BINARY)[name]
    for shape in ((13, 17), (), (0, 3)):
        operands = [sample(shape, domain)] + [sample(shape[1:], domain, seed=1)] * (name in BINARY)
        check_dtype(op, operands, dtype, floor=1 if name in SUBTRACTS else 2**-14)


@pytest.mark.parametrize("source", [*ROUNDING, tg.float64], ids=str)
@pytest.mark.parametrize("target", [*ROUNDING, tg.float64], ids=str)
def test_cast(device, source, target):
    x = tg.Tensor([1 / 3, -2.0], dtype=source, requires_grad=True)
    y, dx = gradients(lambda x: x.to(target), x, cotangent=[1 / 3, 4])
    assert (y.dtype, dx.dtype) == (target, source)
    assert y.tolist() == x.numpy().astype(target).tolist()
    assert dx.tolist() == np.asarray([1 / 3, 4], target).astype(source).tolist()


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_operand_costs_no_work(device, monkeypatch, name, frozen):
    cls = {"pow": elementwise.Pow, "where": elementwise.Where, "minimum": elementwise.Minimum}.get(name)
    cls = cls or getattr(elementwise, name.capitalize())
    returned = returned_by(monkeypatch, cls)
    op, _, domain = BINARY[name]
    operands = [leaf(sample((3, 2), domain, seed), requires_grad=seed != frozen) for seed in (0, 1)]
    op(*operands).sum().backward()
    assert [g is None for g in returned[-2:]] == [i == frozen for i in (0, 1)]
    assert operands[frozen].grad is None


def test_a_product_saves_only_what_its_rule_needs(device):
    a, b = leaf(np.ones(2)), leaf(np.ones(2), requires_grad=False)
    assert [s is None for s in (a * b)._node.saved_arrays] == [True, False]


# Kinks, ties and extremes: op, inputs, the result, the gradients for dL/dy = 1.
inf, nan = math.inf, math.nan
EDGES = {
    "maximum ties": (tg.maximum, ([1, 2, 5], [1, 3, 4]), [1, 3, 5], ([0.5, 0, 1], [0.5, 1, 0])),
    "minimum ties": (tg.minimum, ([1, 2, 5], [1, 3, 4]), [1, 2, 4], ([0.5, 1, 0], [0.5, 0, 1])),
    "maximum broadcast tie": (tg.maximum, ([2], [2, 2, 1]), [2, 2, 2], ([2], [0.5, 0.5, 0])),
    "maximum of NaN": (tg.maximum, ([nan, 1], [1, nan]), [nan, nan], ([0, 0], [1, 1])),
    "maximum of infinities": (tg.maximum, ([-inf, inf], [-inf, 1]), [-inf, inf], ([0.5, 1], [0.5, 0])),
    "relu at 0": (lambda x: x.relu(), ([0.0, -0.0, nan],), [0, 0, nan], ([0, 0, 0],)),
    "abs at 0": (abs, ([0.0, -0.0],), [0, 0], ([0, 0],)),
    "clamp at its bounds": (lambda x: x.clamp(-1, 1), ([-1, 1, -2, 2, nan],), [-1, 1, -1, 1, nan], ([1, 1, 0, 0, 0],)),
    "clamp with crossed bounds": (lambda x: x.clamp(1, -1), ([0, 5],), [-1, -1], ([0, 0],)),
    "pow at 0": (operator.pow, ([0, 0, 0, 0], [0, 1, 2, 3]), [1, 0, 0, 0], ([0, 1, 0, 0], [0, 0, 0, 0])),
    "pow of infinity": (operator.pow, ([inf, inf], [0, 1]), [1, inf], ([0, 1], [inf, inf])),
    "pow 1 at 0": (lambda x: x**1, ([0],), [0], ([1],)),
    "pow 0 at 0": (lambda x: x**0, ([0, inf],), [1, 1], ([0, 0],)),
    "pow -1 at 0": (lambda x: x**-1, ([0],), [inf], ([-inf],)),
    "pow of negative bases": (lambda x: x**3, ([-2, -1],), [-8, -1], ([12, 3],)),
    "pow by whole exponents": (operator.pow, ([-2, -2], [2, 3]), [4, -8], ([-4, 12], [nan, nan])),
    "root of a negative base": (lambda x: x**0.5, ([-4],), [nan], ([nan],)),
    "pow of base 0": (lambda x: 0**x, ([0, 1],), [1, 0], ([0, 0],)),
    "quotient of tiny numbers": (operator.truediv, ([1e-25], [1e-25]), [1], ([1e25], [-1e25])),
    "quotient of huge numbers": (operator.truediv, ([1e25], [1e25]), [1], ([1e-25], [-1e-25])),
    "sigmoid far out": (lambda x: x.sigmoid(), ([-1000, 1000, -inf, inf],), [0, 1, 0, 1], ([0, 0, 0, 0],)),
    "silu far out": (lambda x: x.silu(), ([-1000, 1000, 3e38],), [0, 1000, 3e38], ([0, 1, 1],)),
    "tanh far out": (lambda x: x.tanh(), ([-1000, inf],), [-1, 1], ([0, 0],)),
    "sqrt at 0": (lambda x: x.sqrt(), ([0],), [0], ([inf],)),
    # The infinite gradient of sqrt or log at 0 stays out of the branch that was not taken.
    "relu before sqrt": (lambda x: x.relu().sqrt(), ([-1, 4],), [0, 2], ([0, 0.25],)),
    "clamp before sqrt": (lambda x: x.clamp(min=0).sqrt(), ([-1, 4],), [0, 2], ([0, 0.25],)),
    "maximum before log": (lambda a, b: tg.maximum(a, b).log(), ([-1], [0]), [-inf], ([0], [inf])),
    "where before log": (
        lambda a, b: tg.where(tg.Tensor([True, False]), a, b).log(),
        ([1, 5], [5, 0]), [0, -inf], ([1, 0], [0, inf]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EDGES)
@pytest.mark.parametrize("dtype", [tg.float32, tg.float64], ids=str)
def test_edges(backend, name, dtype):
    op, arrays, result, grads = EDGES[name]
    found = gradients(op, *(leaf(np.float64(a), dtype=dtype) for a in arrays))
    for a, expected in zip(found, (result, *grads), strict=True):
        assert_near(a.numpy(), np.asarray(expected, dtype), rtol=1e-6)


# In half precision: op, input, dL/dy, result, gradient. A number beside a half tensor is not rounded to its dtype, and
# products on the way to a gradient may leave its range.
HALF_EDGES = {
    "number out of range": (tg.float16, lambda x: x + 70000, -60000, 1, 10000, 1),
    "precise factor": (tg.bfloat16, lambda x: x * 1.003, 200, 200, 201, 201),
    "precise divisor": (tg.bfloat16, lambda x: x / 0.997, 200, 200, 201, 201),
    "precise exponent": (tg.float16, lambda x: x**0.9, 60000, 1, 19968, 0.299554),
    "square of the divisor": (tg.float16, lambda x: 300 / x, 300, 300, 1, -1),
    "power out of range": (tg.float16, lambda x: x**3, 200, 1e-4, inf, 12),
    "reciprocal root of a tiny number": (tg.float16, lambda x: x.rsqrt(), 2**-24, 2**-24, 4096, -(2**11)),
    "sigmoid of the largest": (tg.float16, lambda x: x.sigmoid(), -65504, 1, 0, 0),
    "silu of the largest": (tg.float16, lambda x: x.silu(), 65504, 1, 65504, 1),
}


@pytest.mark.parametrize("name", HALF_EDGES)
def test_half_edges(backend, name):
    dtype, op, x, cotangent, result, grad = HALF_EDGES[name]
    y, dx = gradients(op, leaf([x], dtype=dtype), cotangent=[cotangent])
    assert y.dtype == dx.dtype == dtype
    assert_near(y.numpy().astype(np.float64), np.float64([result]), rtol=ROUNDING[dtype])
    assert_near(dx.numpy().astype(np.float64), np.float64([grad]), rtol=ROUNDING[dtype])


def test_half_products_are_summed_before_they_are_rounded(device):
    """Those of a broadcast operand: terms of 90000 do not fit in float16, their sum does."""
    a, b = leaf([1.0], dtype=tg.float16), leaf([300.0, -299.0], dtype=tg.float16)
    assert gradients(operator.mul, a, b, cotangent=[300, 300])[1].tolist() == [300]
    a.grad = None
    assert gradients(operator.truediv, b, a, cotangent=[300, 300])[2].tolist() == [-300]


def test_a_half_parameter_gets_the_exact_sum_of_a_broadcast(device):
    """257 rows of ones: the sum is no bfloat16 number, but a Parameter's gradient is float32."""
    bias = tg.nn.Parameter(tg.zeros(3, dtype=tg.bfloat16))
    (tg.zeros(257, 3, dtype=tg.bfloat16) + bias).sum().backward()
    assert bias.grad.tolist() == [257] * 3


@pytest.mark.parametrize("name", ["tanh", "sigmoid", "silu"])
@pytest.mark.parametrize("n", [2**15 - 1, 2**15, 2**15 + 1])
def test_block_edges(device, name, n):
    """Chains of steps run in blocks of 2^15: the result is that of the halves, whichever way it was cut."""
    op, _, domain = UNARY[name]
    x, cotangent = sample(n, domain).astype(np.float32), sample(n, (0.5, 1.5), seed=1)
    whole = gradients(op, leaf(x), cotangent=cotangent)
    parts = [gradients(op, leaf(x[half]), cotangent=cotangent[half]) for half in (slice(n // 2), slice(n // 2, n))]
    for a, pieces in zip(whole, zip(*parts, strict=True), strict=True):
        assert_near(a.numpy(), np.concatenate([p.numpy() for p in pieces]), rtol=3e-7, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, tg.float32) for name in elementwise.FORMULAS]
    + [(name, half) for name in ("add", "silu_bwd") for half in (tg.float16, tg.bfloat16)],
    ids=str,
)
@settings(max_examples=8)
@given(data=st.data())
def test_kernels(kernels, name, dtype, data):
    """Any size; in sums and products the second operand may be repeated along the first, or be a number."""
    widths = st.sampled_from((1, 3, 4, 8, 255, 256, 257, 1023, 1024, 1025, 1028))
    period, repeats = data.draw(widths), data.draw(st.integers(0, 3))
    a = sample((repeats, period), (-8, 8))
    operands = [a] if name in ("relu", "tanh", "sigmoid", "silu") else [a, a[::-1] / 8]
    if name in ("add", "sub", "mul"):
        operands[1] = data.draw(st.sampled_from((operands[1], sample(period, (-1, 1), seed=1), 0.7)))
    check_kernel(elementwise.FORMULAS[name], functools.partial(elementwise.compute_kernel, name), operands, dtype)


# Operands of a sum or product, and whether a kernel computes it.
OPERANDS = {
    "one shape": (lambda a: (a, a + 1), True),
    "a row": (lambda a: (a, a[0, 0]), True),
    "a table": (lambda a: (a, a[1]), True),
    "a table first": (lambda a: (a[1], a), True),
    "a single number": (lambda a: (a, a[0, 0, 0, ...]), True),
    "a number first": (lambda a: (0.1, a), True),
    "a misaligned row": (lambda a: (a, a.reshape(-1)[1:9]), True),
    "misaligned both": (lambda a: (a.reshape(-1)[1:], a.reshape(-1)[:-1]), True),
    "a column": (lambda a: (a, a[:, :1]), False),
    "a transposed operand": (lambda a: (a, a.swapaxes(0, 1)), False),
    "every second row": (lambda a: (a[:, ::2], a[:, 1::2]), False),
    "no elements": (lambda a: (a[:0], a[0]), True),
}


@pytest.mark.parametrize("dtype", [tg.float32, tg.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPERANDS)
def test_what_kernels_take(kernels, monkeypatch, name, dtype):
    """And that it has the bits of the mathematics, either way."""
    cut, expected = OPERANDS[name]
    a, b = cut(tg.Tensor(sample((4, 4, 8), (-3, 3)), dtype=dtype).data)
    launched, launch = [], kernel.launch
    monkeypatch.setattr(kernel, "launch", lambda what, *arguments: launched.append(what) or launch(what, *arguments))
    for op in ("add", "mul"):
        found, formula = elementwise.compute(op, a, b), elementwise.FORMULAS[op](a, b)
        assert found.dtype == dtype
        assert found.tolist() == formula.tolist()
    assert len(launched) == 2 * expected


@pytest.mark.parametrize(
    ("base", "exponent", "expected"),
    [([2, 3], 2, [4, 9]), ([2, 3], [3, 0], [8, 1]), (2, [0, 5], [1, 32]), ([], 2, [])],
)
def test_powers_of_integers(device, base, exponent, expected):
    operands = [tg.Tensor(x, dtype=tg.int64) if isinstance(x, list) else x for x in (base, exponent)]
    y = operands[0] ** operands[1]
    assert y.dtype == tg.int64
    assert y.tolist() == expected


ERRORS = {
    "add: shapes must broadcast, got (2,) and (3,)": (ValueError, lambda: tg.ones(2) + tg.ones(3)),
    "sub: shapes must broadcast, got (2, 2) and (3,)": (ValueError, lambda: tg.ones(2, 2) - tg.ones(3)),
    "mul: shapes must broadcast, got (2,) and (0,)": (ValueError, lambda: tg.ones(2) * tg.ones(0)),
    "div: shapes must broadcast, got (2,) and (3,)": (ValueError, lambda: tg.ones(2) / tg.ones(3)),
    "pow: shapes must broadcast, got (2,) and (3,)": (ValueError, lambda: tg.ones(2) ** tg.ones(3)),
    "maximum: shapes must broadcast, got (2,) and (3,)": (ValueError, lambda: tg.maximum(tg.ones(2), tg.ones(3))),
    "minimum: shapes must broadcast, got (2,) and (3,)": (ValueError, lambda: tg.ones(2).minimum(tg.ones(3))),
    "where: shapes must broadcast, got (2,) and (3,) and ()": (
        ValueError, lambda: tg.where(tg.ones(2) > 0, tg.ones(3), 0.0),
    ),
    "where: condition must have dtype bool, got float32": (TypeError, lambda: tg.where(tg.ones(2), tg.ones(2), 0.0)),
    "pow: the exponents of integers must not be negative, got -1": (ValueError, lambda: tg.Tensor([2]) ** -1),
    "pow: the exponents of integers must not be negative, got -2": (
        ValueError, lambda: tg.Tensor([2, 2]) ** tg.Tensor([1, -2]),
    ),
    "neg: x must hold numbers, got bool": (TypeError, lambda: -tg.Tensor([True])),
    "clamp: min or max must be given, got neither": (ValueError, lambda: tg.ones(2).clamp()),
}  # fmt: skip


@pytest.mark.parametrize("message", ERRORS)
def test_errors(device, message):
    error, call = ERRORS[message]
    with pytest.raises(error, match=re.escape(message)):
        call()
