"""What the tests of ops share: leaves in any memory layout, and results of a narrow dtype against those of float64."""

import contextlib

import numpy as np
from hypothesis import strategies as st

import tinygrad_gpu as tg
from tinygrad_gpu import kernel
from tinygrad_gpu.device import array_module

# The relative error of rounding once: half the distance from 1 to the next number.
ROUNDING = {tg.float16: 2**-11, tg.bfloat16: 2**-8, tg.float32: 2**-24}

LAYOUTS = {
    "plain": lambda xp, a: a,
    "transposed": lambda xp, a: xp.asfortranarray(a),
    "sliced": lambda xp, a: xp.repeat(a, 2, -1)[..., ::2],
    "reversed": lambda xp, a: a[..., ::-1].copy()[..., ::-1],
}
layouts = st.sampled_from(sorted(LAYOUTS))


def leaf(array, layout="plain", *, dtype=None, requires_grad=True):
    """A leaf with the values of `array`, its memory in one of LAYOUTS."""
    x = tg.Tensor(array, dtype=dtype, requires_grad=requires_grad)
    if x.ndim:
        x.data = LAYOUTS[layout](array_module(x.data), x.data)
    return x


def gradients(op, *leaves, cotangent=None):
    """The result of op on leaves, and the gradient of each, for dL/dy = cotangent (an array; ones by default)."""
    y = op(*leaves)
    y.backward(tg.ones_like(y) if cotangent is None else tg.Tensor(cotangent, dtype=y.dtype))
    return y, *(x.grad for x in leaves)


def returned_by(monkeypatch, function):
    """A list that grows by the gradients that the rule of a Function returns from now on."""
    rule, returned = function.backward, []

    def backward(ctx, *grads):
        results = rule(ctx, *grads)
        returned.extend(results if isinstance(results, tuple) else [results])
        return results

    monkeypatch.setattr(function, "backward", backward)
    return returned


def check_dtype(op, arrays, dtype, floor=1.0, terms=1):
    """Values and gradients of op in `dtype` against those in float64 at the same, rounded arrays.

    Each has the dtype, and an error of at most k u (|exact| + floor). u is the dtype's rounding; k is 2, and 8 in
    float32, whose exp, sin … are right to a few u, or 2 sqrt(terms), for `terms` summed one after another; floor is the
    size of what the op subtracts on its way to a result.
    """
    rounded = [tg.Tensor(a, dtype=dtype).to(tg.float64) for a in arrays]
    weights = np.random.default_rng(0).uniform(0.5, 1.5, op(*rounded).shape)
    weights = tg.Tensor(weights, dtype=dtype).to(tg.float64).numpy()
    found = gradients(op, *(leaf(x, dtype=dtype) for x in rounded), cotangent=weights)
    exact = gradients(op, *(leaf(x) for x in rounded), cotangent=weights)
    names = ["the result", *(f"the gradient of input {i}" for i in range(len(arrays)))]
    for name, a, b in zip(names, found, exact, strict=True):
        assert a.dtype == dtype, f"{name} has dtype {a.dtype}"
        bound = (max(8, 2 * terms**0.5) if dtype == tg.float32 else 2) * ROUNDING[dtype]
        assert_near(a.numpy().astype(np.float64), b.numpy(), rtol=bound, atol=bound * floor, name=name)


def assert_near(found, exact, rtol, atol=0.0, name="the result"):
    """|found - exact| <= rtol |exact| + atol everywhere; NaN and inf must be the same. Names the worst element."""
    assert found.shape == exact.shape, f"{name} has shape {found.shape}, expected {exact.shape}"
    if not found.size:
        return
    with np.errstate(invalid="ignore"):
        excess = np.where(found == exact, 0, abs(found - exact) / (rtol * abs(exact) + atol + 1e-300))
    excess = np.where(np.isnan(found) & np.isnan(exact), 0, np.where(np.isnan(excess), np.inf, excess))
    at = np.unravel_index(excess.argmax(), excess.shape)
    worst = f"{found[at]:.9g} at {tuple(map(int, at))}, expected {exact[at]:.9g}"
    assert excess[at] <= 1, f"{name} is off by {excess[at]:.3g} times the bound: {worst}"


def check_kernel(mathematics, launcher, arrays, dtype, floor=1.0):
    """The results of launcher(*arrays), a kernel's, against mathematics(*arrays) in float64.

    arrays: NumPy arrays; the floating ones are rounded to `dtype` first, others and None pass as they are. An error may
    be twice the largest that the same mathematics makes in `dtype`, plus `floor` times the dtype's rounding. The
    launcher's outputs hold NaN where they were not written: its allocations are poisoned.
    """
    xp = array_module(tg.zeros(1).data)

    def cast(a, to):
        is_float = isinstance(a, np.ndarray) and a.dtype.kind == "f"
        return a.astype(dtype).astype(to) if is_float else a

    def tuple_of(results):
        results = results if isinstance(results, tuple) else (results,)
        return [None if a is None else as_float64(a) for a in results]

    with host_kernels_off():  # the mathematics of one op may call another op's kernels
        exact, same = (tuple_of(mathematics(*(cast(a, to) for a in arrays))) for to in (np.float64, dtype))
    given = [xp.asarray(cast(a, dtype)) if isinstance(a, np.ndarray) else a for a in arrays]
    with poisoned(xp):
        found = tuple_of(launcher(*given))
    assert len(found) == len(exact)
    for i, (a, b, c) in enumerate(zip(found, same, exact, strict=True)):
        if c is None:
            assert a is None
            continue
        finite = np.isfinite(c)
        size = abs(b - c)[finite].max(initial=0) * 2 + floor * ROUNDING[dtype]
        assert_near(a, c, rtol=ROUNDING[dtype], atol=size, name=f"result {i}")


def as_float64(a):
    return np.asarray(a if isinstance(a, np.ndarray) else a.get()).astype(np.float64)


@contextlib.contextmanager
def host_kernels_off():
    before, kernel._host = kernel._host, None
    try:
        yield
    finally:
        kernel._host = before


@contextlib.contextmanager
def poisoned(xp):
    """Within it what xp.empty and xp.empty_like give holds NaN (integers: their largest number)."""
    empty, empty_like = xp.empty, xp.empty_like

    def fill(a):
        a.fill(
            np.nan
            if a.dtype.kind == "f" or a.dtype == tg.bfloat16
            else np.iinfo(a.dtype).max
            if a.dtype.kind in "iu"
            else 1
        )
        return a

    xp.empty, xp.empty_like = lambda *a, **k: fill(empty(*a, **k)), lambda *a, **k: fill(empty_like(*a, **k))
    try:
        yield
    finally:
        xp.empty, xp.empty_like = empty, empty_like
