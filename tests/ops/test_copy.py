"""Copies between memory layouts: every element where it belongs, whatever the strides."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tinygrad_gpu as tg
from tests.ops.helpers import ROUNDING, poisoned
from tinygrad_gpu.device import array_module
from tinygrad_gpu.ops import copy

rng = np.random.default_rng


@st.composite
def layouts(draw, shape):
    """A function that gives a new array of `shape`: axes in any order in memory, with gaps, reversed or misaligned."""
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.sampled_from([1, 1, 1, 2, -1])) for _ in shape]
    skipped = draw(st.sampled_from([0, 0, 1]))

    def new(xp, dtype):
        sizes = [shape[i] * abs(steps[i]) for i in order]
        memory = xp.zeros(int(np.prod(sizes)) + skipped + 8, dtype)
        a = memory[skipped : skipped + int(np.prod(sizes))].reshape(sizes)
        a = a.transpose([order.index(i) for i in range(len(shape))])
        return a[(*(slice(None, None, step) for step in steps), ...)]

    return new


@pytest.mark.parametrize("dtype", [*ROUNDING, tg.int64], ids=str)
@settings(max_examples=25)
@given(data=st.data())
def test_copied(kernels, dtype, data):
    shape = data.draw(st.lists(st.sampled_from([0, 1, 2, 3, 8, 16, 24]), max_size=4).map(tuple))
    xp = array_module(tg.zeros(1).data)
    x, out = (data.draw(layouts(shape))(xp, dtype) for _ in range(2))
    x[...] = xp.asarray(rng(0).integers(-100, 100, shape).astype(dtype))
    with poisoned(xp):
        found = copy.copied(x)
    assert found.flags.c_contiguous
    assert (found == x).all()
    assert copy.copied(x, out) is out
    assert (out == x).all()


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("columns", [1, 7, 64])
def test_repeated_rows(kernels, dtype, columns):
    """One row, or one column, for all: a stride of 0, into memory with gaps between rows too."""
    xp = array_module(tg.zeros(1).data)
    row = xp.asarray(rng(0).standard_normal(columns).astype(dtype))
    out = xp.zeros((5, columns + 8), dtype)
    copy.copied(xp.broadcast_to(row, (5, columns)), out[:, :columns])
    assert (out[:, :columns] == row).all()
    assert (out[:, columns:] == 0).all()
    assert (copy.copied(xp.broadcast_to(row[:, None], (columns, 9))) == row[:, None]).all()


def test_more_axes_than_a_kernel_takes(kernels):
    """Those that cannot be merged with their neighbours: NumPy or CuPy copies."""
    x = tg.Tensor(rng(0).standard_normal((2,) * 7), dtype=tg.float32).data.transpose()
    assert (copy.copied(x) == x).all()


@pytest.mark.parametrize(
    ("shape", "order", "expected"),
    [
        ((2, 3, 4), (0, 1, 2), (24,)),
        ((2, 3, 4), (1, 0, 2), (2, 3, 4)),
        ((2, 1, 4), (1, 0, 2), (8,)),
        ((2, 3, 4), (2, 0, 1), (6, 4)),
        ((2, 3, 4), (2, 1, 0), (2, 3, 4)),
        ((1, 1), (0, 1), ()),
        ((), (), ()),
    ],
)
def test_merged(shape, order, expected):
    """Axes become one where both arrays can step over them at once."""
    x = np.empty([shape[i] for i in order], np.float32).transpose([order.index(i) for i in range(len(shape))])
    found, to, source = copy.merged(shape, np.empty(shape, np.float32).strides, x.strides)
    assert found == expected
    assert len(found) == len(to) == len(source)


def test_reshaped(backend):
    """A view where it can be one, a copy where not."""
    x = tg.Tensor(rng(0).standard_normal((4, 6, 8)), dtype=tg.float32).data
    turned = x.transpose(1, 0, 2)
    assert np.shares_memory(*[a.view() for a in (x, copy.reshaped(x[:, :, ::2], (2, 2, 6, 4)))]) or backend == "cuda"
    assert (copy.reshaped(turned, (6, 32)) == turned.reshape(6, 32)).all()
    assert (copy.reshaped(turned, (-1,)) == turned.reshape(-1)).all()


def test_empty_like_strides():
    x = np.empty((2, 5, 3), np.float32).transpose(2, 0, 1)
    y = copy.empty_like_strides(np, x.shape, x.strides, x.dtype)
    assert (y.shape, y.strides) == (x.shape, x.strides)
