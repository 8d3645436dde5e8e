"""GELU, exact and by tanh: values against the standard library, gradients by differences, dtypes, tails, errors."""

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tinygrad_gpu as tg
from tests.ops.helpers import ROUNDING, assert_near, check_dtype, check_kernel, gradients, layouts, leaf
from tinygrad_gpu.ops import gelu
from tinygrad_gpu.testing import strategies


def exact(x):
    return x * math.erfc(-x / math.sqrt(2)) / 2


def exact_slope(x):
    return math.erfc(-x / math.sqrt(2)) / 2 + x * math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def by_tanh(x):
    return x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


FORMS = {"none": exact, "tanh": by_tanh}


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=20)
@given(data=st.data())
def test_gelu(device, form, data):
    shape = data.draw(strategies.shapes(max_side=5) | strategies.shapes(min_dims=1, max_dims=1, max_side=33))
    x = leaf(data.draw(strategies.arrays(shape, min_value=-6, max_value=6)), data.draw(layouts))
    expected = np.vectorize(FORMS[form], otypes=[np.float64])(x.numpy()) if x.size else x.numpy()
    assert_near(x.gelu(form).numpy(), expected, rtol=1e-15, atol=1e-15)
    assert tg.testing.gradcheck(lambda x: x.gelu(form), x)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_dtypes(backend, form, dtype):
    """The slope of the tanh form has the rounding of 1 - t times x u', about 5 where it matters."""
    for shape in ((40, 5), (), (0, 3)):
        check_dtype(
            lambda x: x.gelu(form),
            [np.random.default_rng(0).uniform(-6, 6, shape)],
            dtype,
            floor=1 if form == "none" else 5,
        )


# The largest errors of the normal distribution's tail, absolute and relative, up to |x| = 5.
@pytest.mark.parametrize(("dtype", "atol", "rtol"), [(tg.float64, 1e-15, 2e-10), (tg.float32, 2.5e-7, 4e-6)], ids=str)
def test_exact_form_to_the_last_digits(device, dtype, atol, rtol):
    x = np.concatenate([np.linspace(-5, 5, 4001), np.linspace(-40, 40, 801), 2.0 ** np.arange(-60, 3)]).astype(dtype)
    y, dx = gradients(lambda x: x.gelu(), leaf(x))
    for found, reference in ((y, exact), (dx, exact_slope)):
        expected = np.array([reference(float(v)) for v in x])
        error = abs(found.numpy() - expected)
        assert error.max() <= atol
        body = (abs(x) <= 5) & (abs(expected) > 1e-3 * atol)
        near_zero = reference is exact_slope and abs(expected) < 0.1  # dx has a zero at -0.75: there it is absolute
        assert (error <= rtol * abs(expected) + atol * near_zero)[body].all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [tg.float16, tg.bfloat16, tg.float32, tg.float64], ids=str)
def test_far_out(backend, form, dtype):
    """x or 0, with the slope 1 or 0, up to the largest numbers, whose cubes overflow, and at 0 exactly 1/2."""
    largest = 65504 if dtype == tg.float16 else 3e38
    x = leaf([-math.inf, -largest, -1e4, -40, -0.0, 0.0, 40, 1e4, largest, math.nan], dtype=dtype)
    y, dx = gradients(lambda x: x.gelu(form), x)
    assert y.numpy()[:-1].tolist() == x.maximum(0).numpy()[:-1].tolist()
    assert dx.numpy()[:-1].tolist() == [0, 0, 0, 0, 0.5, 0.5, 1, 1, 1]
    assert np.isnan([y.numpy()[-1], dx.numpy()[-1]]).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n", [2**15 - 1, 2**15, 2**15 + 1])
def test_block_edges(device, form, n):
    x = np.random.default_rng(0).uniform(-6, 6, n).astype(np.float32)
    whole = gradients(lambda x: x.gelu(form), leaf(x))
    parts = [gradients(lambda x: x.gelu(form), leaf(x[half])) for half in (slice(n // 2), slice(n // 2, n))]
    for a, pieces in zip(whole, zip(*parts, strict=True), strict=True):
        assert_near(a.numpy(), np.concatenate([p.numpy() for p in pieces]), rtol=3e-7, atol=1e-9)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@settings(max_examples=10)
@given(data=st.data())
def test_kernels(kernels, form, dtype, data):
    """Any size, beginning at any element: an address that is no multiple of 16 takes no vector load."""
    n = data.draw(st.sampled_from([1, 3, 7, 8, 9, 255, 256, 257, 2047, 2048, 2049]) | st.integers(0, 5000))
    skipped = data.draw(st.integers(0, 2))
    x, dy = np.random.default_rng(n).uniform(-6, 6, (2, n + skipped))

    def cut(f):
        return lambda *arrays: f(*(a[skipped:] for a in arrays), form)

    check_kernel(cut(gelu.fwd), cut(gelu.fwd_kernel), [x], dtype, floor=4)
    check_kernel(cut(gelu.bwd), cut(gelu.bwd_kernel), [dy, x], dtype, floor=32)


ERRORS = {
    'gelu: approximate must be "none" or "tanh", got \'erf\'': (ValueError, lambda: tg.ones(2).gelu("erf")),
    "gelu: x must have a floating dtype, got int64": (TypeError, lambda: tg.arange(2).gelu()),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors(device, message):
    error, call = ERRORS[message]
    with pytest.raises(error, match=re.escape(message)):
        call()
