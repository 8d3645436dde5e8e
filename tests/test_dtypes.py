"""Element types: PyTorch's promotion, written out; half types through every method."""

import numpy as np
import pytest

import tinygrad_gpu as tg
from tinygrad_gpu import dtypes

SHORT = {
    "b": tg.bool,
    "i4": tg.int32,
    "i8": tg.int64,
    "f2": tg.float16,
    "bf": tg.bfloat16,
    "f4": tg.float32,
    "f8": tg.float64,
}

# Row: the first operand, column: the second, both with axes or both without.
SAME_RANK = """
    b   i4  i8  f2  bf  f4  f8
b   b   i4  i8  f2  bf  f4  f8
i4  i4  i4  i8  f2  bf  f4  f8
i8  i8  i8  i8  f2  bf  f4  f8
f2  f2  f2  f2  f2  f4  f4  f8
bf  bf  bf  bf  f4  bf  f4  f8
f4  f4  f4  f4  f4  f4  f4  f8
f8  f8  f8  f8  f8  f8  f8  f8
"""

# Row: an operand with axes, column: one without; bool, int and float are Python's numbers.
LOWER_RANK = """
    b   i4  i8  f2  bf  f4  f8  bool  int  float
b   b   i4  i8  f2  bf  f4  f8  b     i8   f4
i4  i4  i4  i4  f2  bf  f4  f8  i4    i4   f4
i8  i8  i8  i8  f2  bf  f4  f8  i8    i8   f4
f2  f2  f2  f2  f2  f2  f2  f2  f2    f2   f2
bf  bf  bf  bf  bf  bf  bf  bf  bf    bf   bf
f4  f4  f4  f4  f4  f4  f4  f4  f4    f4   f4
f8  f8  f8  f8  f8  f8  f8  f8  f8    f8   f8
"""


def table(text):
    head, *rows = (line.split() for line in text.strip().splitlines())
    return [(row[0], column, result) for row in rows for column, result in zip(head, row[1:], strict=True)]


NUMBERS = {"bool": True, "int": 1, "float": 1.0}


def operand(name, shape=None):
    return NUMBERS[name] if name in NUMBERS else tg.ones(*shape, dtype=SHORT[name])


BINARY = [
    lambda a, b: a + b,
    lambda a, b: a * b,
    lambda a, b: tg.maximum(a, b),
    lambda a, b: tg.minimum(a, b),
    lambda a, b: tg.where(tg.Tensor([True, False]), a, b),
]


@pytest.mark.parametrize(("first", "second", "expected"), table(SAME_RANK))
def test_promotion_of_one_rank(first, second, expected):
    a, b = operand(first, (2,)), operand(second, (2,))
    for op in BINARY:
        assert op(a, b).dtype == SHORT[expected]
    assert tg.concat([a, b]).dtype == tg.stack([a, b]).dtype == SHORT[expected]
    assert (operand(first, ()) * operand(second, ())).dtype == SHORT[expected]
    for result in (a == b, a < b, a >= b):
        assert result.dtype == tg.bool
    quotient = tg.float32 if expected in ("b", "i4", "i8") else SHORT[expected]
    assert (a / b).dtype == quotient
    if expected != "b":
        assert (a - b).dtype == SHORT[expected]


@pytest.mark.parametrize(("first", "second", "expected"), table(LOWER_RANK))
def test_promotion_with_a_lower_rank(first, second, expected):
    a, b = operand(first, (2,)), operand(second, ())
    for op in BINARY:
        assert op(a, b).dtype == op(b, a).dtype == SHORT[expected]
        assert op(a, b).tolist() == op(b, a).tolist()


def test_promotion_of_three_ranks():
    def of(*names):
        return dtypes.promote(*(operand(n, shape) for n, shape in zip(names, ((2,), (), ()), strict=False)))

    assert of("i4", "f2", "float") == tg.float16
    assert of("b", "i4", "float") == tg.float32
    assert of("b", "b", "int") == tg.int64
    assert of("f2", "f8", "float") == tg.float16
    assert dtypes.promote(1.0) == tg.float32
    assert dtypes.promote(True, 2) == tg.int64


@pytest.mark.parametrize("number", [np.float64(2), np.float32(2), np.int64(2), np.int32(2), np.bool_(True)])
def test_numbers_of_numpy_never_widen_an_array(number):
    for dtype in (tg.float16, tg.bfloat16, tg.float32, tg.float64):
        x = tg.ones(2, dtype=dtype)
        for result in (x + number, number + x, x * number, number * x, x - number, number - x, x / number, number / x):
            assert result.dtype == dtype
            assert isinstance(result, tg.Tensor)


def test_sums_of_integers_are_int64():
    for dtype in (tg.bool, tg.int32, tg.int64):
        assert tg.ones(3, dtype=dtype).sum().dtype == tg.int64
        assert tg.ones(3, dtype=dtype).argmax().dtype == tg.int64


def test_mathematics_of_integers_is_float32():
    for name in ["exp", "log", "sqrt", "rsqrt", "tanh", "sigmoid", "silu", "sin", "cos"]:
        for dtype in (tg.bool, tg.int32, tg.int64):
            assert getattr(tg.ones(2, dtype=dtype), name)().dtype == tg.float32


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("float32", tg.float32),
        ("bfloat16", tg.bfloat16),
        (np.float16, tg.float16),
        (np.dtype("int32"), tg.int32),
        (float, tg.float64),
        (int, tg.int64),
        (bool, tg.bool),
    ],
)
def test_names_of_dtypes(dtype, expected):
    assert tg.zeros(1, dtype=dtype).dtype == expected
    assert tg.zeros(1).to(dtype).dtype == expected


@pytest.mark.parametrize("dtype", ["int8", np.uint8, complex, "half precision", object(), ">f4", np.dtype("S3")])
@pytest.mark.parametrize(
    "call",
    [
        lambda d: tg.zeros(1, dtype=d),
        lambda d: tg.Tensor([1.0], dtype=d),
        lambda d: tg.ones(1).to(d),
        lambda d: tg.arange(3, dtype=d),
        lambda d: tg.full((1,), 1, dtype=d),
        lambda d: tg.rand(1, dtype=d),
        lambda d: tg.randint(0, 2, (1,), dtype=d),
        lambda d: tg.zeros_like(tg.ones(1), dtype=d),
    ],
)
def test_other_dtypes_are_refused(call, dtype):
    with pytest.raises(
        TypeError, match=r"(zeros|Tensor|to|arange|full|rand|randint): dtype must be one of float16, bf"
    ):
        call(dtype)


def test_none_is_no_dtype():
    with pytest.raises(TypeError, match=r"to: dtype must be one of .*, got None"):
        tg.ones(1).to(None)


# Half types

HALVES = [tg.float16, tg.bfloat16]
ROUNDING = {tg.float16: 2**-11, tg.bfloat16: 2**-8}

METHODS = {
    "exp": lambda x: x.exp(),
    "log": lambda x: x.log(),
    "sqrt": lambda x: x.sqrt(),
    "rsqrt": lambda x: x.rsqrt(),
    "tanh": lambda x: x.tanh(),
    "sigmoid": lambda x: x.sigmoid(),
    "relu": lambda x: x.relu(),
    "gelu": lambda x: x.gelu(),
    "gelu tanh": lambda x: x.gelu("tanh"),
    "silu": lambda x: x.silu(),
    "sin": lambda x: x.sin(),
    "cos": lambda x: x.cos(),
    "abs": lambda x: abs(x),
    "neg": lambda x: -x,
    "clamp": lambda x: x.clamp(0.5, 1.5),
    "pow": lambda x: x**3,
    "pow float": lambda x: x.pow(1.5),
    "pow of": lambda x: 2.0**x,
    "pow tensor": lambda x: x**x,
    "add": lambda x: x + 0.3,
    "sub": lambda x: 0.3 - x,
    "mul": lambda x: x * 0.3,
    "div": lambda x: x / 0.3,
    "rdiv": lambda x: 0.3 / x,
    "add tensor": lambda x: x + x.T,
    "mul tensor": lambda x: x * x.T,
    "div tensor": lambda x: x / x.T,
    "maximum": lambda x: x.maximum(x.T),
    "minimum": lambda x: x.minimum(1.0),
    "where": lambda x: tg.where(x > 1.0, x, 0.0),
    "masked_fill": lambda x: x.masked_fill(x > 1.0, 0.25),
    "sum": lambda x: x.sum(),
    "sum axis": lambda x: x.sum(axis=1, keepdims=True),
    "mean": lambda x: x.mean(axis=0),
    "var": lambda x: x.var(axis=1),
    "std": lambda x: x.std(axis=1),
    "max": lambda x: x.max(axis=1),
    "min": lambda x: x.min(),
    "logsumexp": lambda x: x.logsumexp(axis=1),
    "softmax": lambda x: x.softmax(),
    "log_softmax": lambda x: x.log_softmax(axis=0),
    "matmul": lambda x: x @ x.T,
    "reshape": lambda x: x.reshape(-1),
    "view": lambda x: x.view(2, -1),
    "flatten": lambda x: x.flatten(),
    "squeeze": lambda x: x.squeeze(),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "transpose": lambda x: x.transpose(0, 1),
    "permute": lambda x: x.permute(1, 0),
    "expand": lambda x: x.expand(2, -1, -1),
    "split": lambda x: x.split(3)[1],
    "chunk": lambda x: x.chunk(2, axis=1)[0],
    "gather": lambda x: x.gather(0, tg.Tensor([[1, 0]])),
    "tril": lambda x: x.tril(),
    "triu": lambda x: x.triu(1),
    "getitem": lambda x: x[1, ::2],
    "take": lambda x: x[[0, 0, 2]],
    "concat": lambda x: tg.concat([x, x]),
    "stack": lambda x: tg.stack([x, x], axis=1),
    "clone": lambda x: x.clone(),
    "contiguous": lambda x: x.T.contiguous(),
}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_half_types_keep_their_dtype_and_round_once(device, name, dtype):
    values = (tg.rand(4, 4, dtype=tg.float64) * 2 + 0.25).to(dtype)
    exact = values.to(tg.float64).requires_grad_()
    x = exact.detach().to(dtype).requires_grad_()
    y, expected = METHODS[name](x), METHODS[name](exact)
    assert y.dtype == dtype
    assert y.shape == expected.shape
    # Half a unit in the last place of y, and float32's error of the largest term.
    bound = 1.01 * ROUNDING[dtype] * abs(expected.numpy()) + 1e-5
    assert (abs(y.to(tg.float64).numpy() - expected.numpy()) <= bound).all()
    upstream = (tg.rand(*y.shape, dtype=tg.float64) + 0.5).to(dtype)
    y.backward(upstream)
    expected.backward(upstream.to(tg.float64))
    assert x.grad.dtype == dtype
    # A rule may use the rounded y, rounds once, and each further part of a sum rounds again.
    scale = abs(exact.grad.numpy()).max() + 1
    assert abs(x.grad.to(tg.float64).numpy() - exact.grad.numpy()).max() <= 6 * ROUNDING[dtype] * scale


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_reductions_of_half_types_are_summed_in_float32(device, dtype):
    ones = tg.ones(4096, dtype=dtype)
    assert ones.sum().item() == 4096
    assert (ones * 7).mean().item() == 7
    assert (ones.reshape(1, -1) @ ones.reshape(-1, 1)).item() == 4096
    assert abs(ones.logsumexp().item() - np.log(4096 * np.e)) < 0.05
    assert ones.softmax().to(tg.float32).sum().item() == pytest.approx(1)
    row = tg.Tensor([-300.0, 300.0], dtype=dtype)
    assert row.std(correction=0).item() == 300  # its variance, 90000, is out of float16's range
    big = tg.full((70_000,), 1.0, dtype=dtype, requires_grad=True)
    big.mean().backward(tg.Tensor(1024.0, dtype=dtype))
    assert big.grad[0].item() == pytest.approx(1024 / 70_000, rel=2 * ROUNDING[dtype])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_types_print_and_come_out(dtype):
    x = tg.Tensor([[1.5, -2.0]], dtype=dtype)
    assert repr(x) == f"tensor([[ 1.5, -2. ]], dtype={dtype.name})"
    assert x.tolist() == [[1.5, -2.0]]
    assert isinstance(x.tolist()[0][0], float)
    assert x[0, 0].item() == 1.5
    assert x.numpy().dtype == dtype
    assert (x == 1.5).tolist() == [[True, False]]
    assert f"{x[0, 1]:.1f}" == "-2.0"


def test_casts_round_to_nearest_even_and_overflow_to_infinity(device):
    x = tg.Tensor([1 + 2**-11, 1 + 3 * 2**-11, 65520.0, 1e9, -1e9, 2**-25], dtype=tg.float64)
    assert x.half().tolist() == [1, 1 + 2**-9, np.inf, np.inf, -np.inf, 0]
    y = tg.Tensor([1 + 2**-8, 1 + 3 * 2**-8, 3e38, 3.4e38], dtype=tg.float64)
    assert y.bfloat16().tolist() == [1, 1 + 2**-6, pytest.approx(3e38, rel=2**-8), np.inf]
    assert tg.Tensor([1e9], dtype=tg.float16).item() == np.inf
    assert tg.full((1,), 1e9, dtype=tg.float16).item() == np.inf
    assert tg.Tensor([2.7, -2.7]).to(tg.int32).tolist() == [2, -2]
    assert tg.Tensor([0.0, 0.1, float("nan")]).to(tg.bool).tolist() == [False, True, True]
