"""Philox4x32-10 and what is drawn from it."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tinygrad_gpu as tg
from tinygrad_gpu import device as devices
from tinygrad_gpu import random

# From Random123's kat_vectors: counter (four words), key (two words), result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text):
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(device, counter, key, expected):
    c, k = words(counter), words(key)
    with devices.on(device, "test") as xp:
        block = xp.asarray([c[1] << 32 | c[0]], dtype=xp.uint64)
        found = random.philox_block(xp, block, c[3] << 32 | c[2], k[1] << 32 | k[0])
        assert [int(word[0]) for word in found] == words(expected)


def test_the_words_of_a_draw_are_those_of_its_blocks():
    seed, draw = 0x299F31D0A4093822, 0x0370734413198A2E
    found = random.philox(np, seed, draw, 12)
    assert found.dtype == np.uint32
    for i in range(3):
        block = random.philox_block(np, np.array([i], np.uint64), draw, seed)
        assert found[4 * i : 4 * i + 4].tolist() == [int(word[0]) for word in block]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(0, 30), st.integers(0, 30))
def test_an_element_depends_on_nothing_but_seed_draw_and_its_index(seed, draw, start, n):
    assert random.philox(np, seed, draw, n, start).tolist() == random.philox(np, seed, draw, start + n)[start:].tolist()


DRAWS = {
    "rand": lambda n, dtype: tg.rand(n, dtype=dtype),
    "randn": lambda n, dtype: tg.randn(n, dtype=dtype),
    "randint": lambda n, dtype: tg.randint(-5, 10**6, (n,)),
    "randint of a long range": lambda n, dtype: tg.randint(-(2**40), 2**40, (n,)),
}
FLOATS = [tg.float64, tg.float32, tg.float16, tg.bfloat16]


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_elements_do_not_depend_on_how_many_are_drawn(device, name, dtype):
    drawn = []
    for n in (0, 1, 3, 4, 5, 17, 100):
        tg.manual_seed(7)
        drawn.append(DRAWS[name](n, dtype).tolist())
    for few in drawn:
        assert few == drawn[-1][: len(few)]


@pytest.mark.parametrize("name", DRAWS)
def test_a_call_advances_the_draw_number_by_one(device, name):
    generator = tg.manual_seed(7)
    first, second = DRAWS[name](50, None), DRAWS[name](50, None)
    assert generator.state_dict() == {"seed": 7, "draw": 2}
    assert first.tolist() != second.tolist()
    generator.load_state_dict({"seed": 7, "draw": 1})
    assert DRAWS[name](50, None).tolist() == second.tolist()
    tg.manual_seed(8)
    assert DRAWS[name](50, None).tolist() != first.tolist()


def test_a_call_that_fails_draws_nothing():
    generator = tg.manual_seed(7)
    for call in (
        lambda: tg.rand(-1),
        lambda: tg.rand(2, dtype=tg.int64),
        lambda: tg.randn("a"),
        lambda: tg.randint(3, 3, (2,)),
        lambda: tg.rand(2, device="gpu"),
    ):
        with pytest.raises((ValueError, TypeError)):
            call()
    assert generator.draw == 0


@pytest.mark.skipif(not tg.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", DRAWS)
def test_a_gpu_draws_what_the_cpu_draws(name):
    drawn = []
    for where in ("cpu", "cuda"):
        tg.set_default_device(where)
        tg.manual_seed(3)
        drawn.append(DRAWS[name](1001, tg.float32).numpy())
    tg.set_default_device(None)
    np.testing.assert_allclose(*drawn, rtol=1e-5, atol=1e-6)


# Distributions: with 10^5 numbers a Kolmogorov-Smirnov distance of 0.01 has probability 4e-9.

N = 100_000


def distance(values, cdf):
    """The largest distance between the empirical distribution function of `values` and a continuous one."""
    p = cdf(np.sort(values))
    steps = np.arange(len(p) + 1) / len(p)
    return max((steps[1:] - p).max(), (p - steps[:-1]).max())


def normal_cdf(x):
    return np.array([0.5 + 0.5 * math.erf(v) for v in x / math.sqrt(2)])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rand_is_uniform_and_never_1(device, dtype):
    x = tg.rand(N, dtype=dtype).to(tg.float64).numpy()
    assert 0 <= x.min() < 0.01
    assert 0.99 < x.max() < 1
    assert abs(x.mean() - 0.5) < 0.01
    assert abs(x.var() - 1 / 12) < 0.005
    assert distance(x, lambda v: v) < 0.012  # the grid of bfloat16 alone is 2^-8
    assert abs(np.corrcoef(x[:-1], x[1:])[0, 1]) < 0.02


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_largest_word_gives_less_than_1(monkeypatch, dtype):
    monkeypatch.setattr(random, "philox", lambda xp, seed, draw, n: xp.full(n, 2**32 - 1, xp.uint32))
    x = random.uniform(np, 3, np.dtype(dtype), (0, 0))
    assert (x < 1).all()
    assert np.isfinite(random.normal(np, 3, np.dtype(dtype), (0, 0)).astype(np.float64)).all()


def test_the_smallest_word_gives_0(monkeypatch):
    monkeypatch.setattr(random, "philox", lambda xp, seed, draw, n: xp.zeros(n, xp.uint32))
    for dtype in map(np.dtype, FLOATS):
        assert (random.uniform(np, 3, dtype, (0, 0)) == 0).all()
        assert np.isfinite(random.normal(np, 3, dtype, (0, 0)).astype(np.float64)).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_randn_is_normal(device, dtype):
    x = tg.randn(N, dtype=dtype).to(tg.float64).numpy()
    assert abs(x.mean()) < 0.02
    assert abs(x.var() - 1) < 0.03
    assert abs((x**4).mean() - 3) < 0.15
    assert distance(x, normal_cdf) < 0.012
    assert abs((x[0::2] * x[1::2]).mean()) < 0.02  # the two numbers of a pair


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3, 4), (0, 1000), (-(2**31), 2**31), (2**62 - 7, 2**62)])
def test_randint_is_uniform_within_its_bounds(device, low, high):
    x = tg.randint(low, high, (20_000,)).numpy()
    assert low <= x.min()
    assert x.max() < high
    if high - low < 10:
        counts = np.bincount(x - low, minlength=high - low)
        assert abs(counts / len(x) - 1 / (high - low)).max() < 0.015
    else:
        assert distance((x - low + 0.5) / (high - low), lambda v: v) < 0.015


@pytest.mark.parametrize(("low", "high"), [(0, 2**33), (-(2**63), 2**63), (-(2**63), -(2**63) + 2), (2**63 - 1, 2**63)])
def test_randint_of_the_longest_ranges(device, low, high):
    x = tg.randint(low, high, (5000,)).tolist()
    assert low <= min(x)
    assert max(x) < high
    assert distance(np.array([(v - low) / (high - low - 1 or 1) for v in x]), lambda v: v) < 0.03 or high - low < 10


# Errors


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1, np.int64(5), np.uint64(2**63)])
def test_seeds(seed):
    assert tg.manual_seed(seed).seed == int(seed)
    assert 0 <= tg.rand(1).item() < 1


@pytest.mark.parametrize(
    ("seed", "error", "message"),
    [
        (-1, ValueError, r"manual_seed: seed must be in \[0, 2\*\*64\), got -1"),
        (2**64, ValueError, "seed must be in"),
        (1.0, TypeError, "manual_seed: seed must be an int, got float"),
        ("1", TypeError, "got str"),
        (None, TypeError, "got NoneType"),
        (True, TypeError, "got bool"),
    ],
)
def test_other_seeds_are_refused(seed, error, message):
    tg.manual_seed(3)
    with pytest.raises(error, match=message):
        tg.manual_seed(seed)
    assert random.default_generator.seed == 3
