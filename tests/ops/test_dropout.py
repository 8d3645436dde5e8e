"""Dropout: the mask's statistics, its one draw a call, the same mask in backward and on every device, errors."""

import numpy as np
import pytest

import tinygrad_gpu as tg
import tinygrad_gpu.functional as F
from tests.ops.helpers import gradients
from tinygrad_gpu import random


@pytest.mark.parametrize("dtype", [tg.float64, tg.float32, tg.float16, tg.bfloat16], ids=str)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_statistics(device, p, dtype):
    n = 40_000
    y = F.dropout(tg.ones(n, dtype=dtype), p).numpy().astype(float)
    kept = y != 0
    assert np.unique(y[kept]).tolist() == [float(np.asarray(1 / (1 - p)).astype(dtype))]
    assert abs(kept.mean() - (1 - p)) < 5 * np.sqrt(p * (1 - p) / n)
    assert abs(np.corrcoef(kept[1:], kept[:-1])[0, 1]) < 5 / np.sqrt(n)  # neighbours drop independently


def test_gradient_has_the_mask_of_the_result(device):
    x = tg.full((7, 9), 2.0, dtype=tg.float64, requires_grad=True)
    y, dx = gradients(lambda x: F.dropout(x, 0.4), x)
    assert (y.numpy() == 2 * dx.numpy()).all()
    assert 0 < (dx.numpy() == 0).sum() < x.size


@pytest.mark.parametrize(("p", "training", "expected"), [(0, True, 1), (0.7, False, 1), (1, True, 0), (1.0, True, 0)])
def test_ends(device, p, training, expected):
    x = tg.ones(5, requires_grad=True)
    y, dx = gradients(lambda x: F.dropout(x, p, training), x) if training and p else (F.dropout(x, p, training), None)
    assert (y.numpy() == expected).all()
    assert dx is None or (dx.numpy() == 0).all()
    if not (training and p):
        assert y is x


def test_each_call_draws_once(device):
    generator = random.default_generator
    x = tg.ones(100)
    first = F.dropout(x, 0.5).numpy()
    assert generator.state_dict()["draw"] == 1
    assert (F.dropout(x, 0.5).numpy() != first).any()
    F.dropout(x, 0.5, training=False)
    assert generator.state_dict()["draw"] == 2
    tg.manual_seed(0)
    assert (F.dropout(x, 0.5).numpy() == first).all()


def test_a_mask_depends_on_seed_draw_and_element_alone(device):
    """Element i drops where word i of Philox is below p 2^32, in any shape, on every device."""
    words = random.philox(np, 0, 0, 24)
    expected = np.where(words < round(0.3 * 2**32), 0, np.float32(1 / 0.7))
    for shape in ((24,), (4, 6), (2, 3, 4)):
        tg.manual_seed(0)
        assert (F.dropout(tg.ones(*shape), 0.3).numpy().ravel() == expected).all()
    tg.manual_seed(0)
    assert (F.dropout(tg.ones(7), 0.3).numpy() == expected[:7]).all()


def test_empty(device):
    assert F.dropout(tg.ones(0, 3), 0.5).shape == (0, 3)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: F.dropout(tg.ones(2), 1.5), ValueError, r"dropout: the probability must be in \[0, 1\], got 1.5"),
        (lambda: F.dropout(tg.ones(2), -0.1), ValueError, r"dropout: the probability must be in \[0, 1\], got -0.1"),
        (
            lambda: F.dropout(tg.ones(2), float("nan")),
            ValueError,
            r"dropout: the probability must be in \[0, 1\], got nan",
        ),
        (lambda: F.dropout(tg.ones(2), "half"), TypeError, "dropout: the probability must be a number, got str"),
        (lambda: F.dropout(tg.arange(2), 0.5), TypeError, "dropout: x must have a floating dtype, got int64"),
        (lambda: F.dropout(3.0, 0.5), TypeError, "dropout: x must be a Tensor, got float"),
    ],
)
def test_errors(device, call, error, message):
    before = random.default_generator.state_dict()
    with pytest.raises(error, match=message):
        call()
    assert random.default_generator.state_dict() == before
