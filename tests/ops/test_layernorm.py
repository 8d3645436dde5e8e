"""Layer norm, its fusion with an addition, RMS norm: values against NumPy, gradients by differences, dtypes, hard rows."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tinygrad_gpu as tg
import tinygrad_gpu.functional as F
from tests.ops.helpers import ROUNDING, assert_near, check_dtype, gradients, layouts, leaf
from tinygrad_gpu.testing import strategies


def layer_norm(x, w=1.0, b=0.0, eps=1e-5):
    x = x.astype(np.float64)
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * w + b


def rms_norm(x, w=1.0, eps=1e-6):
    x = x.astype(np.float64)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * w


# Name: the op, its definition, how many arrays (..., C) and how many (C,) it takes.
OPS = {
    "layer_norm": (F.layer_norm, layer_norm, 1, 2),
    "layer_norm, no bias": (F.layer_norm, layer_norm, 1, 1),
    "layer_norm, plain": (F.layer_norm, layer_norm, 1, 0),
    "rms_norm": (F.rms_norm, rms_norm, 1, 1),
    "rms_norm, plain": (F.rms_norm, rms_norm, 1, 0),
    "add_layer_norm": (lambda *a: F.add_layer_norm(*a)[0], lambda x, r, *a: layer_norm(x + r, *a), 2, 2),
    "add_layer_norm, plain": (lambda *a: F.add_layer_norm(*a)[0], lambda x, r, *a: layer_norm(x + r, *a), 2, 0),
    "add_layer_norm, both results": (
        lambda *a: tg.concat(F.add_layer_norm(*a)),
        lambda x, r, *a: np.concatenate([layer_norm(x + r, *a), x + r]),
        2,
        2,
    ),
    "add_layer_norm, the sum": (lambda *a: F.add_layer_norm(*a)[1], lambda x, r, *a: x + r, 2, 2),
}


@pytest.mark.parametrize("name", OPS)
@settings(max_examples=15)
@given(data=st.data())
def test_values_and_gradients(device, name, data):
    op, reference, wide, narrow = OPS[name]
    shape = data.draw(
        strategies.shapes(min_dims=1, max_side=7) | strategies.shapes(min_dims=1, max_dims=1, max_side=33)
    )
    shapes = [shape] * wide + [shape[-1:]] * narrow
    inputs = [leaf(data.draw(strategies.arrays(s)), data.draw(layouts)) for s in shapes]
    if shape[-1]:
        assert_near(op(*inputs).numpy(), reference(*(x.numpy() for x in inputs)), rtol=1e-11, atol=1e-11)
    # A row of equal numbers has rstd = 1 / sqrt(eps): differences of 1e-6 would be far from straight there.
    spread = np.arange(shape[-1]) * 0.5
    for x in inputs[:wide]:
        x.data += tg.Tensor(spread).data
    assert tg.testing.gradcheck(op, *inputs, rtol=1e-3)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("name", [name for name in OPS if name != "add_layer_norm, the sum"])  # an addition alone
def test_dtypes(device, name, dtype):
    op, _, wide, narrow = OPS[name]
    rng = np.random.default_rng(0)
    arrays = [rng.uniform(-2, 2, (5, 12)) for _ in range(wide)] + [rng.uniform(0.5, 1.5, 12) for _ in range(narrow)]
    floor = 12 if wide == 2 else 6  # the sum x + residual is rounded first; dw and db sum five rows
    check_dtype(op, arrays, dtype, floor=floor)


def test_variance_counts_the_row_and_no_padding(device):
    x = np.random.default_rng(0).normal(5, 1, (3, 48)).astype(np.float32)
    assert_near(F.layer_norm(tg.Tensor(x)).numpy().astype(float), layer_norm(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("row", "dtype", "expected"),
    [
        ([1024, 1025, 1026, 1027], tg.float16, [-1.3416, -0.4472, 0.4472, 1.3416]),
        ([4096, 4097, 4098, 4099], tg.float32, [-1.3416, -0.4472, 0.4472, 1.3416]),
        ([100000, 100001, 100002, 100003], tg.float32, [-1.3416, -0.4472, 0.4472, 1.3416]),
    ],
)
def test_a_large_mean_does_not_cancel(device, row, dtype, expected):
    assert_near(F.layer_norm(tg.Tensor(row, dtype=dtype)).numpy().astype(float), np.array(expected), rtol=1e-3)


def test_sums_of_half_rows_do_not_overflow(device):
    x = tg.full((2, 1000), 250.0, dtype=tg.float16)  # squares sum to 6.25e7
    assert_near(F.rms_norm(x).numpy().astype(float), np.ones((2, 1000)), rtol=1e-3)
    assert (F.layer_norm(x).numpy() == 0).all()


@pytest.mark.parametrize("rows", [65_537, 100_003])
def test_many_rows(device, rows):
    x = np.random.default_rng(0).normal(size=(rows, 3)).astype(np.float32)
    y, gradient = gradients(F.layer_norm, leaf(x), cotangent=np.ones((rows, 3)))
    assert_near(y.numpy().astype(float), layer_norm(x), rtol=1e-4, atol=1e-5)
    assert abs(gradient.numpy()).max() < 1e-2


def test_frozen_inputs_get_nothing(device):
    for kept in range(3):
        inputs = [tg.randn(2, 4), tg.randn(4), tg.randn(4)]
        inputs[kept].requires_grad_()
        F.layer_norm(*inputs).sum().backward()
        assert [x.grad is not None for x in inputs] == [i == kept for i in range(3)]


def test_inputs_stay_as_they_were(device):
    inputs = [tg.randn(2, 4, requires_grad=True) for _ in range(2)] + [
        tg.randn(4, requires_grad=True) for _ in range(2)
    ]
    before = [x.numpy().copy() for x in inputs]
    y, s = F.add_layer_norm(*inputs)
    (y * s).sum().backward()
    assert all((x.numpy() == b).all() for x, b in zip(inputs, before, strict=True))


BAD = {
    "weight": (lambda: F.layer_norm(tg.ones(2, 768), tg.ones(512)), ValueError,
               "layer_norm: weight must have shape (C,) = (768,), got (512,)"),
    "bias": (lambda: F.layer_norm(tg.ones(2, 3), None, tg.ones(1)), ValueError,
             "layer_norm: bias must have shape (C,) = (3,), got (1,)"),
    "no axis": (lambda: F.layer_norm(tg.ones()), ValueError, "layer_norm: x must have at least one axis, got shape ()"),
    "integers": (lambda: F.layer_norm(tg.arange(3)), TypeError, "layer_norm: x must have a floating dtype, got int64"),
    "two dtypes": (lambda: F.layer_norm(tg.ones(3), tg.ones(3).half()), TypeError, "layer_norm: weight must have dtype float32"),
    "residual": (lambda: F.add_layer_norm(tg.ones(2, 3), tg.ones(3)), ValueError,
                 "add_layer_norm: residual must have shape (2, 3) like x, got (3,)"),
    "rms weight": (lambda: F.rms_norm(tg.ones(2, 3), tg.ones(3, 1)), ValueError,
                   "rms_norm: weight must have shape (C,) = (3,), got (3, 1)"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_errors(device, name):
    call, error, message = BAD[name]
    with pytest.raises(error, match=re.escape(message)):
        call()
