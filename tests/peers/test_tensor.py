"""Tensor against torch.Tensor: values, gradients and dtypes of every method, and the promotion table."""

import itertools
import operator

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import tinygrad_gpu as tg  # noqa: E402
from tinygrad_gpu.dtypes import promote  # noqa: E402

FLOATS = [tg.float64, tg.float32, tg.float16, tg.bfloat16]
DTYPES = [*FLOATS, tg.int64, tg.int32, tg.bool]
ARITHMETIC = {op.__name__: op for op in (operator.add, operator.sub, operator.mul, operator.truediv)}
IN_PLACE = {op.__name__: op for op in (operator.iadd, operator.isub, operator.imul, operator.itruediv)}
MASK = np.array([[True, False, True], [False, True, True], [True, True, False], [False, False, True]])
IDS = np.array([[0, 2, 1], [3, 3, 0]])  # rows of a (4, 3) tensor, one of them twice in a column

# What reads the same in both libraries; `c` makes a tensor of an array.
SAME = {
    **{
        name: (lambda c, x, name=name: getattr(x, name)(), [(4, 3)])
        for name in ("exp", "tanh", "sigmoid", "relu", "sin", "cos", "abs", "clone", "contiguous", "squeeze", "flatten")
    },
    **{name: (lambda c, x, name=name: getattr(x * x + 0.5, name)(), [(4, 3)]) for name in ("log", "sqrt", "rsqrt")},
    **{name: (lambda c, x, y, op=op: op(x, y), [(4, 3), (4, 3)]) for name, op in ARITHMETIC.items()},
    **{f"{name}_broadcast": (lambda c, x, y, op=op: op(x, y), [(4, 1), (2, 1, 3)]) for name, op in ARITHMETIC.items()},
    **{f"{name}_number": (lambda c, x, op=op: op(x, 3), [(4, 3)]) for name, op in ARITHMETIC.items()},
    **{f"number_{name}": (lambda c, x, op=op: op(2.5, x), [(4, 3)]) for name, op in ARITHMETIC.items()},
    "neg": (lambda c, x: -x, [(4, 3)]),
    "pow_2": (lambda c, x: x**2, [(4, 3)]),
    "pow_3": (lambda c, x: x.pow(3), [(4, 3)]),
    "pow_0": (lambda c, x: x**0, [(4, 3)]),
    "pow_minus": (lambda c, x: (x * x + 0.5) ** -1.5, [(4, 3)]),
    "pow_tensor": (lambda c, x, y: (x * x + 0.5) ** y, [(4, 3), (3,)]),
    "number_pow": (lambda c, x: 2.5**x, [(4, 3)]),
    "maximum": (lambda c, x, y: x.maximum(y), [(4, 3), (3,)]),
    "minimum": (lambda c, x, y: x.minimum(y), [(4, 3), (3,)]),
    "clamp": (lambda c, x: x.clamp(min=-0.5, max=0.5), [(4, 3)]),
    "clamp_min": (lambda c, x: x.clamp(0.1), [(4, 3)]),
    "clamp_max": (lambda c, x: x.clamp(max=0.1), [(4, 3)]),
    "masked_fill": (lambda c, x: x.masked_fill(c(MASK), 2.0), [(4, 3)]),
    "sum": (lambda c, x: x.sum(), [(4, 3)]),
    "mean": (lambda c, x: x.mean(), [(4, 3)]),
    "var": (lambda c, x: x.var(), [(4, 3)]),
    "std": (lambda c, x: x.std(), [(4, 3)]),
    "max": (lambda c, x: x.max(), [(4, 3)]),
    "min": (lambda c, x: x.min(), [(4, 3)]),
    "matmul": (lambda c, x, y: x @ y, [(4, 3), (3, 2)]),
    "matmul_batches": (lambda c, x, y: x @ y, [(2, 1, 4, 3), (5, 3, 2)]),
    "matmul_weight": (lambda c, x, y: x @ y, [(2, 4, 3), (3, 2)]),
    "matmul_vectors": (lambda c, x, y: x @ y, [(3,), (3,)]),
    "matvec": (lambda c, x, y: x.matmul(y), [(2, 4, 3), (3,)]),
    "vecmat": (lambda c, x, y: x.matmul(y), [(3,), (2, 3, 4)]),
    "reshape": (lambda c, x: x.reshape(2, -1), [(4, 3)]),
    "reshape_of_a_copy": (lambda c, x: x.T.reshape(2, 6), [(4, 3)]),
    "view": (lambda c, x: x.view(3, 4), [(4, 3)]),
    "flatten_some": (lambda c, x: x.flatten(1, -1), [(4, 3, 2)]),
    "squeeze_one": (lambda c, x: x.squeeze(1), [(4, 1, 1)]),
    "unsqueeze": (lambda c, x: x.unsqueeze(-2), [(4, 3)]),
    "T": (lambda c, x: x.T, [(4, 3)]),
    "transpose": (lambda c, x: x.transpose(0, -1), [(4, 3, 2)]),
    "permute": (lambda c, x: x.permute(2, 0, 1), [(4, 3, 2)]),
    "expand": (lambda c, x: x.expand(2, -1, 3), [(4, 1)]),
    "split": (lambda c, x: x.split(3), [(4, 3)]),
    "split_sizes": (lambda c, x: x.split([1, 3]), [(4, 3)]),
    "chunk": (lambda c, x: x.chunk(3), [(7, 3)]),
    "gather": (lambda c, x: x.gather(0, c(IDS)), [(4, 3)]),
    "tril": (lambda c, x: x.tril(-1), [(4, 3)]),
    "triu": (lambda c, x: x.triu(1), [(2, 4, 3)]),
    "index_int": (lambda c, x: x[-1], [(4, 3)]),
    "index_slices": (lambda c, x: x[1:, ::2], [(4, 3)]),
    "index_new_axis": (lambda c, x: x[..., None, 1], [(4, 3)]),
    "index_array": (lambda c, x: x[c(IDS)], [(4, 3)]),
    "index_arrays": (lambda c, x: x[c(IDS), c(IDS % 3)], [(4, 3)]),
    "index_mask": (lambda c, x: x[c(MASK)], [(4, 3)]),
    "index_mixed": (lambda c, x: x[:, c(np.array([2, 0, 2]))], [(4, 3)]),
    "setitem_slice": (lambda c, x, y: assigned(x, slice(1, 3), y), [(4, 3), (3,)]),
    "setitem_mask": (lambda c, x: assigned(x, c(MASK), 2.0), [(4, 3)]),
    "setitem_array": (lambda c, x, y: assigned(x, c(np.array([3, 0])), y), [(4, 3), (2, 3)]),
    "setitem_column": (lambda c, x, y: assigned(x, (Ellipsis, 1), y), [(4, 3), (4,)]),
    **{name: (lambda c, x, y, op=op: op(x * 1, y), [(4, 3), (3,)]) for name, op in IN_PLACE.items()},
    "fan_out": (lambda c, x: (x + x) * (x + x), [(4, 3)]),
}

# Where the names differ, ours and PyTorch's.
DIFFERENT = {
    "gelu": (lambda c, x: x.gelu(), lambda c, x: torch.nn.functional.gelu(x), [(4, 3)]),
    "gelu_tanh": (
        lambda c, x: x.gelu(approximate="tanh"),
        lambda c, x: torch.nn.functional.gelu(x, approximate="tanh"),
        [(4, 3)],
    ),
    "silu": (lambda c, x: x.silu(), lambda c, x: torch.nn.functional.silu(x), [(4, 3)]),
    "softmax": (lambda c, x: x.softmax(axis=0), lambda c, x: x.softmax(dim=0), [(4, 3)]),
    "log_softmax": (lambda c, x: x.log_softmax(), lambda c, x: x.log_softmax(-1), [(4, 3)]),
    "where": (lambda c, x, y: tg.where(c(MASK), x, y), lambda c, x, y: torch.where(c(MASK), x, y), [(4, 3), (3,)]),
    "concat": (lambda c, x, y: tg.concat([x, y, x], 1), lambda c, x, y: torch.cat([x, y, x], 1), [(4, 3), (4, 1)]),
    "stack": (lambda c, x, y: tg.stack([x, y], -1), lambda c, x, y: torch.stack([x, y], -1), [(4, 3), (4, 3)]),
    "max_function": (lambda c, x, y: tg.maximum(x, y), lambda c, x, y: torch.maximum(x, y), [(4, 3), (4, 3)]),
    "min_function": (lambda c, x, y: tg.minimum(x, y), lambda c, x, y: torch.minimum(x, y), [(4, 3), (4, 3)]),
    "matmul_function": (lambda c, x, y: tg.matmul(x, y), lambda c, x, y: torch.matmul(x, y), [(4, 3), (3, 2)]),
    "logsumexp_all": (lambda c, x: x.logsumexp(), lambda c, x: x.flatten().logsumexp(0), [(4, 3)]),
    "split_axis": (lambda c, x: x.split(2, axis=1), lambda c, x: x.split(2, dim=1), [(4, 3)]),
    "chunk_axis": (lambda c, x: x.chunk(2, axis=-1), lambda c, x: x.chunk(2, dim=-1), [(4, 3)]),
    "setitem_step": (
        lambda c, x, y: assigned(x, (slice(None, None, 2), 0), y),
        lambda c, x, y: assigned(x, (slice(None, None, 2), 0), y),
        [(4, 3), (2,)],
    ),
}


def add_reductions():
    for name, axis, keepdims in itertools.product(
        ("sum", "mean", "var", "std", "amax", "amin", "logsumexp"), (1, -1, (0, 2)), (False, True)
    ):
        ours = {"amax": "max", "amin": "min"}.get(name, name)
        more = {"correction": 0} if name == "var" and keepdims else {}
        DIFFERENT[f"{ours}_{axis}_{keepdims}"] = (
            lambda c, x, name=ours, a=axis, k=keepdims, more=more: getattr(x, name)(axis=a, keepdims=k, **more),
            lambda c, x, name=name, a=axis, k=keepdims, more=more: getattr(x, name)(dim=a, keepdim=k, **more),
            [(4, 3, 2)],
        )


def assigned(x, key, value):
    """A copy of x with x[key] = value."""
    x = x.clone()
    x[key] = value
    return x


add_reductions()
CASES = {**{name: (fn, fn, shapes) for name, (fn, shapes) in SAME.items()}, **DIFFERENT}


def torch_dtype(dtype):
    return getattr(torch, dtype.name)


def as_tuple(x):
    return x if isinstance(x, tuple) else (x,)


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name, device):
    """float64 to 1e-12 and float32 to 1e-5; half types, against PyTorch in float64 on the same rounded numbers, to some
    roundings: a case has several ops."""
    ours, theirs, shapes = CASES[name]
    for dtype, tolerance in ((tg.float64, 1e-12), (tg.float32, 1e-5), (tg.float16, 2**-8), (tg.bfloat16, 2**-5)):
        draw = np.random.default_rng(1)
        arrays = [draw.standard_normal(shape).astype(dtype) for shape in shapes]
        wide = torch.float32 if dtype == tg.float32 else torch.float64
        x = [tg.Tensor(a, requires_grad=True) for a in arrays]
        y = [torch.tensor(a.astype(np.float64), dtype=wide, requires_grad=True) for a in arrays]
        found, expected = as_tuple(ours(tg.Tensor, *x)), as_tuple(theirs(torch.tensor, *y))
        assert all(f.dtype == dtype for f in found)
        upstream = [draw.standard_normal(f.shape).astype(dtype) for f in found]
        found_grads = tg.autograd.grad(found, x, [tg.Tensor(g) for g in upstream])
        expected_grads = torch.autograd.grad(
            expected, y, [torch.tensor(g.astype(np.float64), dtype=wide) for g in upstream]
        )
        for what, a, b in (
            *(("output", *pair) for pair in zip(found, expected, strict=True)),
            *(("gradient", *pair) for pair in zip(found_grads, expected_grads, strict=True)),
        ):
            assert a.shape == tuple(b.shape)
            np.testing.assert_allclose(
                a.numpy().astype(np.float64),
                b.detach().numpy(),
                rtol=tolerance,
                atol=tolerance * float(b.detach().abs().max()),
                err_msg=f"{what} in {dtype}",
            )


EXCHANGE = {"numpy", "item", "tolist", "detach", "to", "float", "half", "bfloat16", "cpu", "cuda", "argmax", "argmin"}
GRADIENTS = {"backward", "requires_grad_", "retain_grad", "register_hook", "register_post_accumulate_grad_hook"}


def test_every_method_is_compared():
    methods = {name for name, value in vars(tg.Tensor).items() if not name.startswith("_") and callable(value)}
    compared = {method for method in methods for name in CASES if name.startswith(method)}
    assert methods - compared == EXCHANGE | GRADIENTS


# Dtypes

SIDES = [*itertools.product(DTYPES, ((), (1,))), True, 1, 1.0]  # tensors without and with an axis, Python numbers


def one(side, library):
    """The number 1 as a tensor of a library, or as it is."""
    return library.full(side[1], 1, dtype=getattr(library, side[0].name)) if isinstance(side, tuple) else side


def promoted(library):
    """Ops of a library that promote their operands, and how many of those must be tensors."""
    condition = library.full((1,), True)
    return {
        **{name: (getattr(operator, name), 1) for name in ("add", "mul", "truediv", "eq", "lt")},
        "where": (lambda a, b: library.where(condition, a, b), 1),
        "maximum": (library.maximum, 2),
        "concat": (lambda a, b: library.concat([a[None], b[None]]), 2),
    }


@pytest.mark.parametrize("name", promoted(torch))
def test_promotion_table(name, device):
    """Every pair of dtypes and ranks, Python numbers too: the dtype and value are PyTorch's."""
    (ours, least), (theirs, _) = promoted(tg)[name], promoted(torch)[name]
    for left, right in itertools.product(SIDES, repeat=2):
        if isinstance(left, tuple) + isinstance(right, tuple) < least or (name == "concat" and left[1] != right[1]):
            continue
        found = ours(one(left, tg), one(right, tg))
        expected = theirs(one(left, torch), one(right, torch))
        assert torch_dtype(found.dtype) == expected.dtype, (left, right)
        assert found.tolist() == expected.tolist(), (left, right)


def test_promotion_is_result_type():
    """`tg.dtypes.promote` itself, on what has no op in common."""
    for left, right in itertools.product(SIDES, repeat=2):
        expected = torch.result_type(one(left, torch), one(right, torch))
        assert torch_dtype(promote(one(left, tg), one(right, tg))) == expected, (left, right)


REAL = ("exp", "log", "sqrt", "rsqrt", "tanh", "sigmoid", "sin", "cos")
WHOLE = ("sum", "argmax", "argmin", "max", "min", "relu", "abs")


@pytest.mark.parametrize("name", REAL + WHOLE)
def test_dtypes_of_results(name, device):
    """Integers and bools give what they give in PyTorch: int64 sums, float32 for functions with real values."""
    for dtype in DTYPES:
        if dtype == tg.bool and name in ("relu", "abs", "argmax", "argmin"):  # PyTorch has none
            continue
        found = getattr(tg.Tensor([1, 1, 0, 1], dtype=dtype), name)()
        expected = getattr(torch.tensor([1, 1, 0, 1], dtype=torch_dtype(dtype)), name)()
        assert torch_dtype(found.dtype) == expected.dtype, dtype
        np.testing.assert_allclose(found.float().numpy(), expected.float().numpy(), rtol=2**-8)


def test_casts(device):
    for source, target in itertools.product(DTYPES, repeat=2):
        x = tg.Tensor([0, 1, 3], dtype=source, requires_grad=source in FLOATS)
        y = torch.tensor([0, 1, 3]).to(torch_dtype(source)).requires_grad_(source in FLOATS)
        found, expected = x.to(target), y.to(torch_dtype(target))
        assert found.tolist() == expected.tolist(), (source, target)
        assert found.requires_grad == expected.requires_grad, (source, target)


@pytest.mark.parametrize("op", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_comparisons(op, device):
    a, b = np.array([[1.0], [2.0], [np.nan]]), np.array([1.0, 2.0, np.nan, np.inf])
    compare = getattr(operator, op)
    assert compare(tg.Tensor(a), tg.Tensor(b)).tolist() == compare(torch.tensor(a), torch.tensor(b)).tolist()
    assert compare(tg.Tensor(b), 2).tolist() == compare(torch.tensor(b), 2).tolist()
    assert compare(tg.Tensor([1, 2]), 1.5).tolist() == compare(torch.tensor([1, 2]), 1.5).tolist()
