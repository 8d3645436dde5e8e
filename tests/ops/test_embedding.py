"""Embedding and the scatter-add: values against NumPy, gradients by differences, duplicates, determinism, errors."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

import tinygrad_gpu as tg
from tests.ops.helpers import ROUNDING, as_float64, assert_near, check_dtype, gradients, layouts, leaf, poisoned
from tinygrad_gpu.device import array_module
from tinygrad_gpu.ops.embedding import Embedding, fwd_kernel, scatter_add, segment_sum
from tinygrad_gpu.testing import strategies


def embed(ids, weight):
    return Embedding.apply(ids, weight)


@given(data=st.data(), integer=st.sampled_from([tg.int64, tg.int32]))
def test_embedding(device, data, integer):
    rows, width = data.draw(st.tuples(st.sampled_from((1, 2, 5, 17)), st.sampled_from((0, 1, 3, 8))))
    ids = data.draw(npst.arrays(np.int64, strategies.shapes(max_side=3), elements=st.integers(0, rows - 1)))
    weight = leaf(data.draw(strategies.arrays((rows, width))), data.draw(layouts))
    index = leaf(ids, data.draw(layouts), dtype=integer, requires_grad=False)
    assert embed(index, weight).numpy().tolist() == weight.numpy()[ids].tolist()
    assert tg.testing.gradcheck(lambda weight: embed(index, weight), weight)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("n", [200, 3000])
def test_dtypes(backend, dtype, n):
    """Sums of up to n duplicates, in float32 and rounded once; in their own dtype halves would stop growing."""
    ids = tg.Tensor(np.random.default_rng(0).integers(0, 3, (2, n // 2)))
    check_dtype(lambda w: embed(ids, w), [np.random.default_rng(1).uniform(-1, 1, (5, 8))], dtype, floor=2**-14)


def test_gradient_of_a_half_parameter(backend):
    """Is float32 and not rounded on its way: 257 is no bfloat16 number."""
    weight = tg.nn.Parameter(tg.ones(2, 3, dtype=tg.bfloat16))
    embed(tg.zeros(257, dtype=tg.int64), weight).sum().backward()
    assert weight.grad.dtype == tg.float32
    assert weight.grad.tolist() == [[257] * 3, [0] * 3]


@given(
    ids=npst.arrays(np.int64, st.sampled_from((0, 1, 2, 3, 31, 32, 33)), elements=st.integers(0, 4)),
    width=st.sampled_from((0, 1, 3)),
)
def test_segment_sum(device, ids, width):
    rows = np.random.default_rng(0).uniform(-1, 1, (len(ids), width))
    expected = np.zeros((6, width))
    np.add.at(expected, ids, rows)
    found = segment_sum(tg.Tensor(rows).data, tg.Tensor(ids, dtype=tg.int64).data, 6)
    assert_near(tg.Tensor(found).numpy(), expected, rtol=1e-15, atol=1e-15)


def test_segment_sum_is_exact_and_repeatable(backend):
    """2^14 rows of one id: the error is that of a few additions, and the bits are the same every time."""
    n = 2**14
    rows = np.random.default_rng(0).uniform(0, 1, (n, 2)).astype(np.float32)
    arguments = tg.Tensor(rows).data, tg.zeros(n, dtype=tg.int64).data, 2
    found = tg.Tensor(segment_sum(*arguments)).numpy()
    assert_near(found.astype(np.float64), np.stack([rows.sum(0, dtype=np.float64), np.zeros(2)]), rtol=4 * 2**-24)
    for _ in range(2):
        assert tg.Tensor(segment_sum(*arguments)).numpy().tobytes() == found.tobytes()


def test_gradients_are_repeatable(backend):
    rng = np.random.default_rng(0)
    ids, cotangent = tg.Tensor(rng.integers(0, 7, 5000)), rng.standard_normal((5000, 3))
    runs = [
        gradients(lambda w: embed(ids, w), leaf(np.zeros((9, 3)), dtype=tg.float32), cotangent=cotangent)
        for _ in range(3)
    ]
    assert len({dw.numpy().tobytes() for _, dw in runs}) == 1


@pytest.mark.parametrize("dtype", [tg.float32, tg.bfloat16], ids=str)
@pytest.mark.parametrize("make", [tg.nn.Parameter, leaf])
def test_a_tied_table_gets_all_its_gradients(backend, make, dtype):
    """Two lookups and a product: those that come later are added to what is there."""
    w = make(tg.zeros(7, 4, dtype=dtype))
    for _ in range(2):
        (embed(tg.Tensor([0, 1, 1]), w).sum() + w.sum() + 2 * embed(tg.Tensor([1, 6]), w).sum()).backward()
    assert w.grad.numpy().astype(float).tolist() == [[2 * n] * 4 for n in (2, 5, 1, 1, 1, 1, 3)]


# Widths and numbers of rows around what threads, parts and batches of the kernels take at once.
WIDTHS = {tg.float32: (0, 1, 3, 4, 127, 128, 132), tg.float16: (0, 8, 136), tg.bfloat16: (0, 8, 136)}
LENGTHS = st.sampled_from((0, 1, 15, 16, 17, 64, 65, 1040, 1100)) | st.integers(0, 200)


@pytest.mark.parametrize(
    ("dtype", "integer"),
    [(tg.float32, tg.int64), (tg.float16, tg.int64), (tg.bfloat16, tg.int64), (tg.float32, tg.int32)],
    ids=str,
)
@settings(max_examples=8)
@given(data=st.data())
def test_kernels(kernels, dtype, integer, data):
    """With and without vector loads, with runs of one id of any length; the rows are small whole numbers, so that each
    sum is exact. An id that is out of range reads nothing that is not there, and writes nothing."""
    xp, rng = array_module(tg.zeros(1).data), np.random.default_rng(data.draw(st.integers(0, 99)))
    n, width, skipped = (
        data.draw(LENGTHS),
        data.draw(st.sampled_from(WIDTHS[dtype])),
        data.draw(st.sampled_from((0, 4))),
    )
    vocabulary = data.draw(st.sampled_from((1, 2, 5, 300)))
    low, high = data.draw(st.sampled_from([(0, vocabulary), (-1, vocabulary + 1)]))
    ids = rng.integers(low, high, n).astype(integer)
    if n:
        ids[: rng.integers(n)] = rng.integers(vocabulary)

    def whole(rows, dtype):
        flat = rng.integers(-3, 4, skipped + rows * width).astype(dtype)
        return xp.asarray(flat)[skipped:].reshape(rows, width)

    weight, dy, out = whole(vocabulary, dtype), whole(n, dtype), whole(vocabulary, np.float32)
    inside = (ids >= 0) & (ids < vocabulary)
    expected = as_float64(out)
    np.add.at(expected, ids[inside], as_float64(dy)[inside])
    with poisoned(xp):
        y = fwd_kernel(xp.asarray(ids), weight)
        scatter_add(out, dy, xp.asarray(ids))
    assert (as_float64(y) == as_float64(weight)[np.where(inside, ids, 0)]).all()
    assert (as_float64(out) == expected).all()


def test_frozen_table_costs_no_work(device):
    y = embed(tg.Tensor([0, 1]), tg.ones(3, 2))
    assert not y.requires_grad


def test_ids_changed_before_backward_are_an_error(device):
    ids, weight = tg.Tensor([0, 1]), leaf(np.ones((3, 2)))
    y = embed(ids, weight)
    ids[0] = 2
    with pytest.raises(RuntimeError, match=r"Embedding saved .* was changed in place"):
        y.sum().backward()
    assert weight.grad is None


ERRORS = {
    "embedding: ids must have an integer dtype, got float32": (TypeError, [0.0], (3, 2)),
    "embedding: ids must have an integer dtype, got bool": (TypeError, [True], (3, 2)),
    "embedding: weight must have shape (V, C), got (3,)": (ValueError, [0], (3,)),
    "embedding: ids must be in [0, 3), got 3 at position (0, 1)": (IndexError, [[0, 3]], (3, 2)),
    "embedding: ids must be in [0, 3), got -1 at position (2,)": (IndexError, [0, 1, -1], (3, 2)),
    "embedding: ids must be in [0, 0), got 0 at position ()": (IndexError, 0, (0, 2)),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors(device, message):
    error, ids, shape = ERRORS[message]
    with pytest.raises(error, match=re.escape(message)):
        embed(tg.Tensor(ids), tg.ones(*shape)).numpy()  # a GPU tells of a range error when values leave it


def test_weight_must_be_floating(device):
    with pytest.raises(TypeError, match="embedding: weight must have a floating dtype, got int64"):
        embed(tg.Tensor([0]), tg.ones(2, 2, dtype=tg.int64))
