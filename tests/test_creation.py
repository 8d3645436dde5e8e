"""Functions that make tensors."""

import math

import numpy as np
import pytest

import tinygrad_gpu as tg

FLOATS = [tg.float64, tg.float32, tg.float16, tg.bfloat16]
DTYPES = [*FLOATS, tg.int64, tg.int32, tg.bool]
BY_SHAPE = {"zeros": tg.zeros, "ones": tg.ones, "rand": tg.rand, "randn": tg.randn}


@pytest.mark.parametrize("name", BY_SHAPE)
@pytest.mark.parametrize(
    ("args", "shape"),
    [((), ()), ((2, 3), (2, 3)), (((2, 3),), (2, 3)), (([4],), (4,)), ((np.int64(2), 0), (2, 0)), (((),), ())],
)
def test_shapes(device, name, args, shape):
    x = BY_SHAPE[name](*args)
    assert (x.shape, x.dtype, x.requires_grad, x.is_leaf) == (shape, tg.float32, False, True)
    assert x.device.startswith(device)
    assert BY_SHAPE[name](*args, requires_grad=True).requires_grad


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_dtypes(device, dtype):
    for x, expected in (
        (tg.zeros(2, dtype=dtype), [0, 0]),
        (tg.ones(2, dtype=dtype), [1, 1]),
        (tg.full((2,), 1, dtype=dtype), [1, 1]),
        (tg.arange(2, dtype=dtype), [0, 1]),
        (tg.zeros_like(tg.ones(2, dtype=dtype)), [0, 0]),
        (tg.ones_like(tg.zeros(2, dtype=dtype)), [1, 1]),
        (tg.randint(0, 1, (2,), dtype=dtype), [0, 0]),
    ):
        assert x.dtype == dtype
        assert x.tolist() == expected


@pytest.mark.parametrize(
    ("shape", "value", "dtype"),
    [((2,), 7, tg.int64), (2, 7.5, tg.float32), ([2, 1], True, tg.bool), ((), -math.inf, tg.float32)],
)
def test_full(device, shape, value, dtype):
    x = tg.full(shape, value)
    assert x.dtype == dtype
    assert x.shape == (shape if isinstance(shape, tuple) else (shape,) if isinstance(shape, int) else tuple(shape))
    assert set(x.flatten().tolist()) == {value}


@pytest.mark.parametrize(
    "args",
    [
        (5,),
        (0,),
        (-3,),
        (2, 7),
        (7, 2),
        (7, 2, -2),
        (0, 7, 3),
        (0, 6, 3),
        (0.5, 3.5),
        (0, 1, 0.25),
        (1, 0, -0.25),
        (2.0,),
        (0, 2.5),
        (5, 0.0, -1),
        (2**53, 2**53 + 3),
        (0, 2**60 + 1, 2**59),
        (-(2**63), -(2**63) + 2),
        (2**63 - 2, 2**63),
    ],
)
def test_arange(device, args):
    integers = all(isinstance(n, int) for n in args)
    x = tg.arange(*args)
    assert x.dtype == (tg.int64 if integers else tg.float32)
    assert x.tolist() == (list(range(*args)) if integers else np.arange(*args).tolist())


def test_arange_of_a_half_type_is_rounded_once(device):
    expected = np.arange(0, 3000, 7)
    for dtype in (tg.float16, tg.bfloat16):
        np.testing.assert_array_equal(tg.arange(0, 3000, 7, dtype=dtype).numpy(), expected.astype(dtype))
    assert tg.arange(2**31 - 2, 2**31, dtype=tg.int32).tolist() == [2**31 - 2, 2**31 - 1]


def test_like(device):
    x = tg.rand(2, 0, dtype=tg.float16, requires_grad=True).T
    for like in (tg.zeros_like, tg.ones_like):
        y = like(x)
        assert (y.shape, y.dtype, y.device, y.requires_grad) == ((0, 2), tg.float16, x.device, False)
        assert like(x, dtype=tg.int32).dtype == tg.int32
        assert like(x, requires_grad=True).requires_grad
        assert like(x, device="cpu").device == "cpu"
        assert like(tg.Tensor(3.0)).shape == ()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        *[
            case
            for name, make in BY_SHAPE.items()
            for case in (
                (lambda make=make: make(-1), ValueError, rf"{name}: lengths must not be negative, got \(-1,\)"),
                (lambda make=make: make(2, 1.5), TypeError, f"{name}: expected ints, got 1.5"),
                (lambda make=make: make("ab"), TypeError, f"{name}: expected ints, got 'ab'"),
                (lambda make=make: make(True), TypeError, f"{name}: expected ints, got True"),
                (lambda make=make: make((2, 3), 4), TypeError, rf"{name}: expected ints, got \(2, 3\)"),
                (lambda make=make: make(2, dtype="int7"), TypeError, f"{name}: dtype must be one of"),
                (lambda make=make: make(2, device="gpu"), ValueError, f"{name}: device must be"),
            )
        ],
        (
            lambda: tg.zeros(2, dtype=tg.int64, requires_grad=True),
            TypeError,
            "only floating tensors have gradients, got int64",
        ),
        (lambda: tg.rand(2, dtype=tg.int64), TypeError, "rand: dtype must be a floating one, got int64"),
        (lambda: tg.randn(2, dtype=tg.bool), TypeError, "randn: dtype must be a floating one, got bool"),
        (lambda: tg.full(2.0, 1), TypeError, "full: expected ints, got 2.0"),
        (lambda: tg.full((-2,), 1), ValueError, "full: lengths must not be negative"),
        (lambda: tg.full((2,), "1"), TypeError, "full: fill_value must be a number, got str"),
        (lambda: tg.full((2,), tg.ones(1)), TypeError, "full: fill_value must be a number, got Tensor"),
        (lambda: tg.full((2,), 2**31, dtype=tg.int32), ValueError, "full: numbers must fit in int32, got 2147483648"),
        (lambda: tg.full((2,), math.nan, dtype=tg.int64), ValueError, "full: numbers must fit in int64, got nan"),
        (lambda: tg.arange("3"), TypeError, "arange: stop must be a number, got str"),
        (lambda: tg.arange(0, None, "a"), TypeError, "arange: step must be a number, got str"),
        (lambda: tg.arange(tg.ones(1)), TypeError, "arange: stop must be a number, got Tensor"),
        (
            lambda: tg.arange(0, 3, 0),
            ValueError,
            "arange: needs finite numbers and a step other than 0, got 0, 3 and 0",
        ),
        (lambda: tg.arange(math.inf), ValueError, "arange: needs finite numbers"),
        (lambda: tg.arange(0, 1, math.nan), ValueError, "arange: needs finite numbers"),
        (lambda: tg.arange(2**31 + 1, dtype=tg.int32), ValueError, "arange: numbers must fit in int32, got 2147483648"),
        (lambda: tg.arange(2**63, 2**63 + 1), ValueError, "arange: numbers must fit in int64"),
        (lambda: tg.randint(0.0, 2, (1,)), TypeError, "randint: low must be an int, got 0.0"),
        (lambda: tg.randint(0, True, (1,)), TypeError, "randint: high must be an int, got True"),
        (lambda: tg.randint(2, 2, (1,)), ValueError, "randint: low must be below high, got 2 and 2"),
        (
            lambda: tg.randint(0, 2**31 + 1, (1,), dtype=tg.int32),
            ValueError,
            "randint: numbers must fit in int32, got 2147483648",
        ),
        (lambda: tg.randint(0, 2**64, (1,)), ValueError, "randint: numbers must fit in int64"),
        (lambda: tg.randint(0, 2, (1.5,)), TypeError, "randint: expected ints, got 1.5"),
        (lambda: tg.randint(0, 2, (1,), device="gpu"), ValueError, "randint: device must be"),
        (lambda: tg.zeros_like([1.0]), TypeError, "zeros_like: x must be a Tensor, got list"),
        (lambda: tg.ones_like(np.ones(2)), TypeError, "ones_like: x must be a Tensor, got ndarray"),
        (lambda: tg.from_dlpack([1.0]), TypeError, "from_dlpack: expected an object with __dlpack__, got list"),
        (lambda: tg.from_dlpack(np.ones(2, np.uint8)), TypeError, "from_dlpack: dtype must be one of"),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
