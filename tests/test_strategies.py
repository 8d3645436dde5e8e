"""The strategies stay within their bounds, reach what they should, and shrink to simple examples."""

import numpy as np
import pytest
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes

from tinygrad_gpu.testing import strategies

quick = settings(database=None, max_examples=2000, suppress_health_check=list(HealthCheck), derandomize=True)


def shrunk(strategy, condition=lambda x: True):
    return find(strategy, condition, settings=quick)


def test_shapes_stay_within_their_bounds():
    @given(st.data(), st.integers(0, 2), st.integers(0, 2), st.integers(0, 40), st.integers(0, 40))
    def check(data, min_dims, more_dims, min_side, more_side):
        bounds = {
            "min_dims": min_dims,
            "max_dims": min_dims + more_dims,
            "min_side": min_side,
            "max_side": min_side + more_side,
        }
        shape = data.draw(strategies.shapes(**bounds))
        assert isinstance(shape, tuple)
        assert min_dims <= len(shape) <= min_dims + more_dims
        assert all(min_side <= n <= min_side + more_side for n in shape)

    check()


@pytest.mark.parametrize("side", [0, 1, 7, 8, 9])
def test_shapes_reach_the_lengths_at_which_kernels_go_wrong(side):
    assert shrunk(strategies.shapes(), lambda shape: side in shape) == (side,)


def test_shapes_reach_bounds_that_are_no_special_length():
    assert shrunk(strategies.shapes(min_dims=1, min_side=10, max_side=14)) == (10,)
    assert shrunk(strategies.shapes(max_side=100), lambda shape: 100 in shape) == (100,)


def test_shapes_shrink_to_few_short_axes():
    assert shrunk(strategies.shapes()) == ()
    assert shrunk(strategies.shapes(), lambda shape: len(shape) == 2) == (0, 0)
    assert shrunk(strategies.shapes(), lambda shape: np.prod(shape) >= 4) in [(5,), (7,)]


@given(st.data(), strategies.shapes(), st.sampled_from([np.float64, np.float32, np.float16]), st.booleans())
def test_arrays_have_their_shape_dtype_and_bounds(data, shape, dtype, distinct):
    low = data.draw(st.integers(-5, 0))
    a = data.draw(strategies.arrays(shape, dtype, low, low + 20.0, distinct=distinct))
    assert (a.shape, a.dtype) == (shape, dtype)
    assert ((low <= a) & (a <= low + 20)).all()
    assert (a * 64 == np.round(a * 64)).all()
    assert not distinct or len(np.unique(a)) == a.size


def test_arrays_of_a_strategy_of_shapes():
    a = shrunk(strategies.arrays(array_shapes(min_dims=2, max_dims=2)), lambda a: a.size > 1)
    assert a.tolist() in ([[0, 0]], [[0], [0]])


@pytest.mark.parametrize(
    ("options", "condition", "expected"),
    [
        ({}, lambda a: True, {0}),
        ({}, lambda a: (a > 1).any(), {1 + 1 / 64}),
        ({"min_value": 0.5}, lambda a: True, {0.5}),
        ({"distinct": True}, lambda a: True, {0, 1 / 64}),
    ],
)
def test_arrays_shrink_to_simple_numbers(options, condition, expected):
    assert set(shrunk(strategies.arrays((2,), **options), condition).tolist()) == expected


@given(st.integers(1, 4), st.data())
def test_broadcastable_shapes_broadcast(n, data):
    shapes = data.draw(strategies.broadcastable_shapes(n, max_dims=2, max_side=4))
    assert len(shapes) == n
    np.broadcast_shapes(*shapes)
    assert all(len(shape) <= 2 and max(shape, default=0) <= 4 for shape in shapes)


def test_broadcastable_shapes_are_not_all_the_same():
    shapes = strategies.broadcastable_shapes()
    assert shrunk(shapes) == ((), ())
    assert shrunk(shapes, lambda s: s[0] != s[1]) in [((), (1,)), ((1,), ()), ((), (0,)), ((0,), ())]
    assert shrunk(shapes, lambda s: 1 in s[0] and 3 in s[1]) in [((1,), (3,)), ((1,), (0, 3))]


@given(strategies.matmul_operands(max_side=3))
def test_matmul_operands_multiply(operands):
    a, b = operands
    np.matmul(a, b)
    assert max(a.shape + b.shape) <= 3


@pytest.mark.parametrize(
    "condition",
    [
        lambda a, b: a.ndim == 1 and b.ndim == 3,
        lambda a, b: a.ndim == 4 and b.ndim == 2,
        lambda a, b: a.ndim == b.ndim == 3 and len(a) != len(b),
        lambda a, b: a.ndim == b.ndim == 2 and a.shape[1] == 0,
    ],
    ids=["vector and stack", "stack and matrix", "broadcast stacks", "K is 0"],
)
def test_matmul_operands_reach_every_kind(condition):
    a, b = shrunk(strategies.matmul_operands(max_side=2), lambda operands: condition(*operands))
    assert max(a.shape + b.shape) <= 2
    assert not a.any()
    assert not b.any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: strategies.shapes(min_side=3, max_side=2),
            "shapes: lengths must satisfy 0 <= min_side <= max_side, got 3 and 2",
        ),
        (lambda: strategies.shapes(min_side=-1), "shapes: lengths must satisfy"),
        (lambda: strategies.arrays((2,), min_value=1, max_value=0), r"arrays: no multiple of 1/64 lies in \[1, 0\]"),
        (lambda: strategies.arrays((2,), min_value=0.1, max_value=0.105), "arrays: no multiple of 1/64 lies in"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
