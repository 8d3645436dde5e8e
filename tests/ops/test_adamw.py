"""AdamW's kernels against its mathematics: steps, skipped steps, sums of squares and their order."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tinygrad_gpu as tg
from tests.ops.helpers import as_float64, check_kernel, poisoned
from tinygrad_gpu.device import array_module
from tinygrad_gpu.ops import adamw

OPTIONS = {"grad_scale": 1.0, "max_norm": math.inf, "lr": 0.1, "b1": 0.9, "b2": 0.999, "eps": 1e-8, "decay": 0.1}


def after(step, w, m, v, g, *, copy=None, t=0, parameters=1, total=1.0, start=0, **options):
    """Copies of w, m, v and copy, and the step counts, after a step of all but the first `start` elements."""
    xp = array_module(w)
    w, m, v, copy = (None if a is None else a.copy()[start:] for a in (w, m, v, copy))
    steps, total = xp.full(parameters, t, "int32"), xp.full(1, total, "float64")
    step(w, m, v, copy, g[start:], steps, xp.asarray(list({**OPTIONS, **options}.values())), total)
    return w, m, v, copy, steps


def drawn(n):
    """w, m, v and g."""
    rng = np.random.default_rng(n)
    w, m, g = rng.standard_normal((3, n))
    return w, 0.1 * m, 1e-6 * rng.uniform(0.5, 1.5, n), g


@settings(max_examples=20)
@given(
    n=st.sampled_from([0, 1, 3, 4, 127, 128, 129, 1023, 1024, 1025]) | st.integers(0, 3000),
    start=st.sampled_from([0, 128, 1]),
    t=st.sampled_from([0, 1, 299, 10**6]),
    grad_scale=st.sampled_from([1.0, 1024.0]),
    max_norm=st.sampled_from([math.inf, 0.5, 1e6]),
    lr=st.sampled_from([0.0, 1e-3, 0.1]),
    betas=st.sampled_from([(0.9, 0.99999), (0.0, 0.0), (0.5, 0.9)]),
    eps=st.sampled_from([1e-8, 1e-3]),
    decay=st.sampled_from([0.0, 0.1]),
)
def test_step(kernels, n, grad_scale, betas, **options):
    """Any size, from any element of a buffer on, at any time: in float32, 1 - 0.99999^1 would be 0.1 % off."""
    w, m, v, g = drawn(options["start"] + n)
    options |= {"grad_scale": grad_scale, "b1": betas[0], "b2": betas[1], "total": grad_scale**2 * n}
    mathematics, launcher = (
        lambda *arrays, step=step: after(step, *arrays, **options) for step in (adamw.step, adamw.step_kernel)
    )
    check_kernel(mathematics, launcher, [w, m, v, g * grad_scale], tg.float32, floor=4)


def given_to_kernels(*arrays):
    """The arrays in float32, where kernels run."""
    return [tg.Tensor(a, dtype=tg.float32).data for a in arrays]


@pytest.mark.parametrize("dtype", [tg.float16, tg.bfloat16], ids=str)
def test_copy_is_the_rounded_weight(kernels, dtype):
    """And nothing else changes by it; each of the parameters counts the step."""
    arrays = given_to_kernels(*drawn(1030))
    arrays[0][:3] = array_module(arrays[0]).asarray([1e5, -1e6, 1 + 2**-8])  # float16 has no 1e5
    alone = after(adamw.step_kernel, *arrays, parameters=3, t=7)
    *found, copy, steps = after(adamw.step_kernel, *arrays, copy=tg.zeros(1030, dtype=dtype).data, parameters=3, t=7)
    with np.errstate(over="ignore"):
        expected = [*alone[:3], alone[0].astype(dtype)]
    for a, b in zip([*found, copy], expected, strict=True):
        np.testing.assert_array_equal(as_float64(a), as_float64(b))
    assert steps.tolist() == [8, 8, 8]


@pytest.mark.parametrize("step", [adamw.step, adamw.step_kernel])
@pytest.mark.parametrize(("total", "grad_scale"), [(math.inf, 1.0), (math.nan, 1.0), (1e308, 1e-200)])
def test_a_norm_that_is_not_finite_changes_nothing(kernels, step, total, grad_scale):
    *before, g = given_to_kernels(*drawn(300))
    before.append(before[0].astype(tg.bfloat16) + 1)
    w, m, v, copy = before
    *found, steps = after(step, w, m, v, g, copy=copy, total=total, grad_scale=grad_scale, parameters=2, t=5)
    for a, b in zip(found, before, strict=True):
        np.testing.assert_array_equal(as_float64(a), as_float64(b))
    assert steps.tolist() == [5, 5]


@pytest.mark.parametrize("dtype", [tg.float32, tg.float16, tg.bfloat16], ids=str)
@settings(max_examples=6)
@given(data=st.data())
def test_square_sum(kernels, dtype, data):
    """Of several arrays of any sizes, also where blocks take more than one turn; the same bits from blocks in another
    order; squares of 1e20 are no infinities."""
    sizes = data.draw(st.lists(st.sampled_from([0, 1, 255, 4095, 4096, 4097]) | st.integers(0, 13000), max_size=3))
    start, most = data.draw(st.sampled_from([0, 1, 128])), data.draw(st.sampled_from([1, 2, 1024]))
    size = 1e20 if dtype == tg.float32 else 1.0
    values = [size * np.random.default_rng(n).standard_normal(n + start) for n in (*sizes, 1)]
    arrays = [tg.Tensor(a, dtype=dtype).data[start:] for a in values]
    with poisoned(array_module(arrays[0])):
        first, second = (adamw.square_sum_kernel(arrays, most) for _ in range(2))
    exact = math.fsum((as_float64(a) ** 2).sum() for a in arrays)
    assert first.item() == second.item() == pytest.approx(exact, rel=1e-13)
    assert first.item() == pytest.approx(adamw.square_sum(arrays).item(), rel=1e-13)


@pytest.mark.parametrize("dtype", [tg.float32, tg.float16], ids=str)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_square_sum_of_what_is_not_finite(kernels, dtype, bad):
    for at in (0, 4999):
        g = tg.ones(5000, dtype=dtype).data
        g[at] = bad
        assert adamw.square_sum_kernel([g]).item() == pytest.approx(bad * bad, nan_ok=True)
