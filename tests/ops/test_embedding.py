"""Embedding and the scatter-add: values against NumPy, gradients by differences, duplicates, determinism, errors."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

import tinygrad_gpu as tg
from tests.ops.helpers import ROUNDING, assert_near, check_dtype, gradients, layouts, leaf
from tinygrad_gpu.ops.embedding import Embedding, segment_sum
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
def test_dtypes(device, dtype, n):
    """Sums of up to n duplicates, in float32 and rounded once; in their own dtype halves would stop growing."""
    ids = tg.Tensor(np.random.default_rng(0).integers(0, 3, (2, n // 2)))
    check_dtype(lambda w: embed(ids, w), [np.random.default_rng(1).uniform(-1, 1, (5, 4))], dtype, floor=2**-14)


def test_gradient_of_a_half_parameter(device):
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


def test_segment_sum_is_pairwise_and_repeatable(device):
    """2^16 rows of one id: the error is that of log2 additions, and the bits are the same every time."""
    n = 2**16
    rows = np.random.default_rng(0).uniform(0, 1, (n, 2)).astype(np.float32)
    arguments = tg.Tensor(rows).data, tg.zeros(n, dtype=tg.int64).data, 2
    found = tg.Tensor(segment_sum(*arguments)).numpy()
    assert_near(found.astype(np.float64), np.stack([rows.sum(0, dtype=np.float64), np.zeros(2)]), rtol=4 * 2**-24)
    for _ in range(5):
        assert tg.Tensor(segment_sum(*arguments)).numpy().tobytes() == found.tobytes()


def test_gradients_are_repeatable(device):
    rng = np.random.default_rng(0)
    ids, cotangent = tg.Tensor(rng.integers(0, 7, 5000)), rng.standard_normal((5000, 3))
    runs = [
        gradients(lambda w: embed(ids, w), leaf(np.zeros((9, 3)), dtype=tg.float32), cotangent=cotangent)
        for _ in range(3)
    ]
    assert len({dw.numpy().tobytes() for _, dw in runs}) == 1


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
