"""Tensor: what it is made of, what comes out of it, indexing and shapes against NumPy, errors."""

import copy
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

import tinygrad_gpu as tg
from tinygrad_gpu.testing import strategies

DTYPES = [tg.float64, tg.float32, tg.float16, tg.bfloat16, tg.int64, tg.int32, tg.bool]


def same(tensor, array):
    """A tensor has the shape, dtype and values of an array."""
    assert (tensor.shape, tensor.dtype) == (np.shape(array), array.dtype)
    np.testing.assert_array_equal(tensor.numpy(), array)


# Making one


@pytest.mark.parametrize(
    ("data", "dtype", "shape"),
    [
        (1.5, tg.float32, ()),
        (3, tg.int64, ()),
        (True, tg.bool, ()),
        ([1.5, 2], tg.float32, (2,)),
        ([1, 2], tg.int64, (2,)),
        ([True, 2], tg.int64, (2,)),
        ([[True], [False]], tg.bool, (2, 1)),
        ((1, (2)), tg.int64, (2,)),
        ([], tg.float32, (0,)),
        ([[], []], tg.float32, (2, 0)),
        (range(3), tg.int64, (3,)),
        (np.float64(1), tg.float64, ()),
        (np.float16([1, 2]), tg.float16, (2,)),
        (np.int32(3), tg.int32, ()),
        ([np.float64(1), np.float64(2)], tg.float32, (2,)),
        ([np.ones(2), np.zeros(2)], tg.float32, (2, 2)),
        ([tg.ones(2, dtype=tg.float64, device="cpu"), [3, 4]], tg.float32, (2, 2)),
        ([tg.Tensor(1, device="cpu"), 2], tg.int64, (2,)),
        (tg.ones(2, dtype=tg.bfloat16, device="cpu"), tg.bfloat16, (2,)),
        (np.ones((3, 2), order="F"), tg.float64, (3, 2)),
    ],
)
def test_data_and_the_dtypes_they_get(device, data, dtype, shape):
    x = tg.Tensor(data)
    assert (x.dtype, x.shape, x.ndim, x.size) == (dtype, shape, len(shape), math.prod(shape))
    assert x.device.startswith(device)
    assert (x.is_leaf, x.requires_grad, x.grad) == (True, False, None)
    for other in DTYPES:
        assert tg.Tensor(data, dtype=other).dtype == other


def test_data_are_copied(device):
    array, tensor = np.ones(2), tg.ones(2, dtype=tg.float64)
    copies = [tg.Tensor(array), tg.Tensor(array, dtype=tg.float64), tg.Tensor(tensor), tg.Tensor(tensor.data)]
    array += 1
    tensor += 1
    assert [x.tolist() for x in copies] == [[1, 1]] * 4


@pytest.mark.parametrize(
    ("data", "options", "error", "message"),
    [
        (None, {}, TypeError, "Tensor: data must be real numbers, got object"),
        ("12", {}, TypeError, "must be real numbers, got <U2"),
        (["1", "2"], {"dtype": tg.float32}, TypeError, "must be real numbers, got <U1"),
        (1j, {}, TypeError, "must be real numbers, got complex128"),
        (np.ones(2, complex), {"dtype": tg.float32}, TypeError, "must be real numbers, got complex128"),
        ({1: 2}, {}, TypeError, "must be real numbers"),
        ([1, None], {}, TypeError, "must be real numbers"),
        (2**70, {}, TypeError, "must be real numbers, got object"),
        ([[1, 2], [3]], {}, ValueError, "Tensor: nested lists must have one length at each depth"),
        ([tg.ones(2), tg.ones(3)], {}, ValueError, "nested lists must have one length"),
        (np.ones(2, np.uint8), {}, TypeError, r"dtype must be one of .*, got dtype\('uint8'\)"),
        (2**40, {"dtype": tg.int32}, ValueError, "data must fit in int32, got 1099511627776 to 1099511627776"),
        ([2**63], {}, ValueError, "data must fit in int64"),
        ([1.0, float("nan")], {"dtype": tg.int64}, ValueError, "data must fit in int64, got nan to nan"),
        ([1], {"requires_grad": True}, TypeError, "only floating tensors have gradients, got int64"),
        ([1.0], {"device": "gpu"}, ValueError, 'Tensor: device must be "cpu", "cuda" or "cuda:N", got \'gpu\''),
        ([1.0], {"device": ""}, ValueError, "device must be"),
        ([1.0], {"device": 0}, ValueError, "device must be .*, got 0"),
    ],
)
def test_errors_of_data(data, options, error, message):
    with pytest.raises(error, match=message):
        tg.Tensor(data, **options)


# What comes out


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (lambda: tg.Tensor([1.0, 2.5]), "tensor([1. , 2.5])"),
        (lambda: tg.Tensor(3), "tensor(3)"),
        (lambda: tg.Tensor([[1], [2]]), "tensor([[1],\n        [2]])"),
        (lambda: tg.Tensor([True]), "tensor([ True])"),
        (lambda: tg.Tensor([1.0], dtype=tg.float64), "tensor([1.], dtype=float64)"),
        (lambda: tg.Tensor([1], dtype=tg.int32), "tensor([1], dtype=int32)"),
        (lambda: tg.ones(1, requires_grad=True), "tensor([1.], requires_grad=True)"),
        (lambda: tg.zeros(0), "tensor([])"),
        (lambda: tg.zeros(0, 3), "tensor([], shape=(0, 3))"),
        (lambda: tg.Tensor([float("nan"), float("-inf")]), "tensor([ nan, -inf])"),
        (lambda: tg.arange(2000), "tensor([   0,    1,    2, ..., 1997, 1998, 1999])"),
    ],
)
def test_repr(device, x, text):
    assert repr(x()) == text


def test_format(device):
    x = tg.Tensor(1.23456)
    assert f"{x:.2f} {x}" == "1.23 tensor(1.2346)"
    assert f"{tg.Tensor(7):03d}" == "007"
    with pytest.raises(TypeError):
        format(tg.ones(2), ".2f")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_come_out_as_pythons(device, dtype):
    kind = {"f": float, "V": float, "i": int, "b": bool}[np.dtype(dtype).kind]
    x = tg.Tensor([[1, 0]], dtype=dtype)
    assert x.tolist() == [[1, 0]]
    assert type(x.tolist()[0][0]) is type(x[0, 0].item()) is type(x[0, 0].tolist()) is kind
    assert (float(x[0, 0]), int(x[0, 0]), bool(x[0, 0]), bool(x[0, 1])) == (1.0, 1, True, False)
    assert x.numpy().dtype == dtype
    assert tg.Tensor([[[5]]]).item() == 5


@pytest.mark.parametrize("x", [lambda: tg.ones(2), lambda: tg.zeros(0)])
def test_only_one_element_is_a_number(x):
    for use in (lambda x: x.item(), float, int, bool):
        with pytest.raises(ValueError, match=r"item: the tensor must have one element, got shape \((2|0),\)"):
            use(x())


def test_len_iteration_and_membership(device):
    x = tg.Tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], requires_grad=True)
    assert len(x) == 3
    assert [row.tolist() for row in x] == x.tolist()
    first, *_ = x
    first.sum().backward()
    assert x.grad.tolist() == [[1, 1], [0, 0], [0, 0]]
    assert 2 in tg.arange(3)
    for use in (len, iter):
        with pytest.raises(TypeError, match="len: a tensor with no axes has no length"):
            use(tg.Tensor(1.0))


def test_hash_is_by_identity_and_equality_by_element(device):
    x, y = tg.ones(2), tg.ones(2)
    assert len({x, y, x}) == 2
    assert (x == y).tolist() == [True, True]
    assert (x == None, x != None) == (False, True)  # noqa: E711
    assert x != "abc"
    for compare in (lambda: x < "abc", lambda: x >= None):
        with pytest.raises(TypeError, match="not supported between"):
            compare()


COMPARISONS = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}


@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons(device, name):
    compare = COMPARISONS[name]
    a, b = np.array([[1.0], [2.0], [np.nan]]), np.array([1.0, 2.0, np.inf])
    x, y = tg.Tensor(a, requires_grad=True), tg.Tensor(b)
    for left, right, expected in (
        (x, y, compare(a, b)),
        (x, b, compare(a, b)),
        (x, 2, compare(a, 2)),
        (2, x, compare(2, a)),
    ):
        result = compare(left, right)
        same(result, expected)
        assert not result.requires_grad
    same(compare(tg.arange(3), 1.5), compare(np.arange(3), 1.5))
    same(compare(tg.Tensor(1), 1), np.asarray(compare(1, 1)))
    assert (~compare(x, y)).tolist() == (~compare(a, b)).tolist()
    with pytest.raises(ValueError, match=rf"{name}: shapes must broadcast, got \(3, 1\) and \(2, 1\)"):
        compare(x, tg.ones(2, 1))


def test_the_complement_is_for_bools():
    assert (~tg.Tensor(True)).item() is False
    with pytest.raises(TypeError, match="invert: only a bool tensor has a complement, got int64"):
        ~tg.arange(3)


# Other libraries


def test_numpy_shares_memory_on_the_cpu():
    x = tg.ones(3, device="cpu", requires_grad=True)
    assert np.shares_memory(x.numpy(), x.data)
    assert np.shares_memory(np.asarray(x), x.data)
    copied = np.array(x)
    assert not np.shares_memory(copied, x.data)
    assert np.asarray(x, np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="__array__: a float32 tensor as float64 needs a copy"):
        np.asarray(x, np.float64, copy=False)
    assert np.add(x.numpy(), 1).tolist() == [2, 2, 2]


def test_arrays_of_numpy_on_either_side(device):
    a, x = np.array([1.0, 2.0]), tg.Tensor([3.0, 5.0], requires_grad=True)
    for result, expected in (
        (a + x, [4, 7]),
        (x + a, [4, 7]),
        (a - x, [-2, -3]),
        (a * x, [3, 10]),
        (a / x, [1 / 3, 0.4]),
        (a**x, [1, 32]),
        (x**a, [3, 25]),
        (np.float64(2) * x, [6, 10]),
        ([1.0, 2.0] * x, [3, 10]),
    ):
        assert isinstance(result, tg.Tensor)
        assert result.requires_grad
        np.testing.assert_allclose(result.numpy(), expected, rtol=1e-6)
    assert (a.astype(np.float32) @ x).item() == (x @ a.astype(np.float32)).item() == 13


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dlpack_of_numpy(dtype):
    x = tg.Tensor([[1, 0], [1, 1]], dtype=dtype, device="cpu").T
    if dtype == tg.bfloat16:
        with pytest.raises(BufferError):
            np.from_dlpack(x)
        return
    array = np.from_dlpack(x)
    assert np.shares_memory(array, x.data)
    same(x, array)
    back = tg.from_dlpack(array)
    assert np.shares_memory(back.data, x.data)
    same(back, array)


def test_from_dlpack_of_a_tensor_knows_of_changes():
    w = tg.ones(2, requires_grad=True)
    x = w * 1.0
    y = x * x
    shared = tg.from_dlpack(x)
    assert not shared.requires_grad
    shared *= 2.0
    assert x.tolist() == [2, 2]
    with pytest.raises(RuntimeError, match="changed in place"):
        y.sum().backward()


def test_exchange_with_torch():
    torch = pytest.importorskip("torch")
    x = tg.Tensor([[1.0, 2.0], [3.0, 4.0]], device="cpu")
    t = torch.from_dlpack(x)
    t[0, 0] = 9
    assert x[0, 0].item() == 9
    back = tg.from_dlpack(t.T)
    back[0, 1] = 7.0
    assert x[1, 0].item() == t[1, 0].item() == 7
    assert torch.as_tensor(np.asarray(x)).shape == (2, 2)
    assert tg.Tensor(t).dtype == tg.float32
    for other in ({"dtype": torch.int8}, {"dtype": torch.bfloat16}, {"requires_grad": True}):
        with pytest.raises(TypeError, match="from_dlpack: "):
            tg.from_dlpack(torch.ones(2, **other))


@pytest.mark.parametrize("x", [1.0, [1.0], "a", None])
def test_from_dlpack_needs_the_protocol(x):
    with pytest.raises(TypeError, match="from_dlpack: expected an object with __dlpack__, got"):
        tg.from_dlpack(x)


def test_the_interface_of_cuda_arrays():
    assert not hasattr(tg.ones(2, device="cpu"), "__cuda_array_interface__")
    if tg.cuda.is_available():
        x = tg.ones(2, device="cuda")
        assert x.__cuda_array_interface__["data"][0] == x.data.data.ptr
        with pytest.raises(TypeError, match="__array__: the tensor is on cuda:"):
            np.asarray(x)


def test_copies_of_leaves(device):
    x = tg.Tensor([1.0, 2.0], requires_grad=True)
    x.register_hook(lambda g: g * 2.0)
    (x * x).sum().backward()
    for new in (copy.deepcopy(x), copy.deepcopy([x, x])[1], pickle.loads(pickle.dumps(tg.Tensor(x)))):
        same(new, x.numpy())
        new.detach()[0] = 9.0
        assert x.tolist() == [1, 2]
    new, again = copy.deepcopy([x, x])
    assert new is again
    assert new.requires_grad
    assert new.grad.tolist() == x.grad.tolist() == [4, 8]
    new.grad[0] = 7.0
    (new * 1.0).sum().backward()
    assert new.grad.tolist() == [8, 9]
    assert x.grad.tolist() == [4, 8]
    with pytest.raises(RuntimeError, match="deepcopy: only leaves can be copied so"):
        copy.deepcopy(x * 1.0)


# Leaves and the graph


def test_requires_grad():
    x = tg.ones(2)
    x.requires_grad = True
    assert (x * 2.0).requires_grad
    x.requires_grad_(False)
    assert not (x * 2.0).requires_grad
    assert x.requires_grad_() is x
    y = x * 2.0
    for use in (lambda: y.requires_grad_(False), lambda: setattr(y, "requires_grad", False)):
        with pytest.raises(RuntimeError, match="only a leaf can stop requiring its gradient; use detach"):
            use()
    for use in (lambda: tg.arange(2).requires_grad_(), lambda: setattr(tg.Tensor([True]), "requires_grad", True)):
        with pytest.raises(TypeError, match="only floating tensors have gradients, got"):
            use()


def test_leaves_results_detach_and_clone():
    x = tg.ones(2, requires_grad=True)
    y = x * 2.0
    assert (x.is_leaf, y.is_leaf, y.detach().is_leaf, tg.ones(2).is_leaf) == (True, False, True, True)
    assert y.detach().data is y.data
    c = y.clone()
    assert c.data is not y.data
    c.sum().backward()
    assert x.grad.tolist() == [2, 2]
    assert x.contiguous() is x


def test_casts_and_moves(device):
    x = tg.Tensor([1.25, -2.0], requires_grad=True)
    assert x.to(tg.float32) is x
    assert x.float() is x
    assert x.to(device) is x
    for cast, dtype in (
        (lambda x: x.half(), tg.float16),
        (lambda x: x.bfloat16(), tg.bfloat16),
        (lambda x: x.to(tg.float64), tg.float64),
    ):
        y = cast(x)
        assert y.dtype == dtype
        assert y.tolist() == [1.25, -2]
        x.grad = None
        (y * 3.0).sum().backward()
        assert x.grad.dtype == tg.float32
        assert x.grad.tolist() == [3, 3]
    assert not x.to(tg.int64).requires_grad
    assert x.cpu().device == "cpu"
    assert (x.cpu() is x) == (device == "cpu")
    for target in ("gpu", 3, "float8"):
        with pytest.raises(TypeError, match=f"to: dtype must be one of .*, got {target!r}"):
            x.to(target)


# Mathematics, against NumPy

UNARY = {
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
    "rsqrt": lambda a: 1 / np.sqrt(a),
    "tanh": np.tanh,
    "sigmoid": lambda a: 1 / (1 + np.exp(-a)),
    "relu": lambda a: np.maximum(a, 0),
    "silu": lambda a: a / (1 + np.exp(-a)),
    "sin": np.sin,
    "cos": np.cos,
    "abs": np.abs,
    "gelu": lambda a: np.array([v * 0.5 * (1 + math.erf(v / 2**0.5)) for v in a.flat]).reshape(a.shape),
}


@pytest.mark.parametrize("name", UNARY)
def test_functions_of_each_element(device, name):
    a = np.array([[0.25, 1.0], [2.5, 7.0]])
    np.testing.assert_allclose(getattr(tg.Tensor(a), name)().numpy(), UNARY[name](a), rtol=1e-14)
    x = tg.Tensor(a.T, requires_grad=True)
    assert tg.testing.gradcheck(lambda x: getattr(x, name)(), x)
    assert getattr(tg.zeros(0, 3), name)().shape == (0, 3)


def test_operators(device):
    a, b = np.array([[1.0, -2.0, 3.0]]), np.array([[2.0], [4.0]])
    x, y = tg.Tensor(a), tg.Tensor(b)
    for op in (
        lambda a, b: a + b,
        lambda a, b: a - b,
        lambda a, b: a * b,
        lambda a, b: a / b,
        lambda a, b: a**b,
        lambda a, b: -a + abs(b),
        lambda a, b: 2 + a * 3 - 1,
        lambda a, b: 1 - b / 4,
        lambda a, b: 2 / b - 2.0**b + b**2 - b**-1 + b**0.5,
    ):
        np.testing.assert_allclose(op(x, y).numpy(), op(a, b), rtol=1e-15)
    assert x.pow(2).tolist() == (x**2).tolist()
    assert (tg.arange(3) / 2).tolist() == [0, 0.5, 1]
    assert (tg.arange(3) ** 2).tolist() == [0, 1, 4]
    assert (tg.arange(3) * True).tolist() == [0, 1, 2]


def test_clamp(device):
    x = tg.Tensor([-2.0, -1.0, 0.0, 1.0, float("nan")], requires_grad=True)
    y = x.clamp(-1, 0.5)
    np.testing.assert_array_equal(y.numpy(), np.float32([-1, -1, 0, 0.5, np.nan]))
    y.backward(tg.ones(5))
    assert x.grad.tolist()[:4] == [0, 1, 1, 0]
    assert x.clamp(max=0).tolist()[:4] == [-2, -1, 0, 0]
    assert x.clamp(min=0.0).tolist()[:4] == [0, 0, 0, 1]
    assert tg.arange(4).clamp(1, 2).dtype == tg.int64
    assert tg.arange(4).clamp(min=1.5).tolist() == [1.5, 1.5, 2, 3]  # a float bound, so a float result
    assert tg.zeros(2).clamp(2, 1).tolist() == [1, 1]
    assert tg.ones(1, dtype=tg.float16).clamp(max=1e9).item() == 1


def test_masked_fill_and_where(device):
    x = tg.Tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    mask = tg.Tensor([True, False])
    y = x.masked_fill(mask, -math.inf)
    assert y.tolist() == [[-math.inf, 2], [-math.inf, 4]]
    y.exp().sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), [[0, math.e**2], [0, math.e**4]], rtol=1e-6)
    same(tg.arange(2).masked_fill(mask, 7), np.array([7, 1]))
    same(tg.where(mask, 1, 2), np.array([1, 2]))
    same(tg.where(mask, 1.0, x.detach()), np.float32([[1, 2], [1, 4]]))
    same(tg.where(mask, tg.Tensor([1.0]), [[5.0], [6.0]]), np.float32([[1, 5], [1, 6]]))


# Reductions, against NumPy

REDUCTIONS = {
    "sum": np.sum,
    "mean": np.mean,
    "max": np.max,
    "min": np.min,
    "var": lambda a, axis, keepdims: np.var(a, axis, ddof=1, keepdims=keepdims),
    "std": lambda a, axis, keepdims: np.std(a, axis, ddof=1, keepdims=keepdims),
    "logsumexp": lambda a, axis, keepdims: np.log(np.exp(a).sum(axis, keepdims=keepdims)),
}


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axis", [None, 0, -1, (0, 2), (-1, 1), (0, 1, 2)])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(device, name, axis, keepdims):
    a = np.random.default_rng(0).permutation(24).reshape(2, 3, 4) / 8
    x = tg.Tensor(a.swapaxes(0, 1), requires_grad=True).transpose(0, 1)
    y = getattr(x, name)(axis=list(axis) if isinstance(axis, tuple) else axis, keepdims=keepdims)
    expected = REDUCTIONS[name](a, axis=axis, keepdims=keepdims)
    assert y.shape == expected.shape
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-13)
    assert tg.testing.gradcheck(
        lambda x: getattr(x, name)(axis=axis, keepdims=keepdims), tg.Tensor(x, requires_grad=True)
    )


@pytest.mark.parametrize("name", ["sum", "mean", "max", "min", "logsumexp"])
def test_reductions_over_no_axis_change_nothing(device, name):
    x = tg.rand(2, 3, dtype=tg.float64)
    np.testing.assert_allclose(getattr(x, name)(axis=()).numpy(), x.numpy(), rtol=1e-15)


@pytest.mark.parametrize("name", ["argmax", "argmin"])
@pytest.mark.parametrize("axis", [None, 0, 1, -1])
def test_where_the_extremes_are(device, name, axis):
    a = np.array([[3.0, 1.0, 3.0], [1.0, 5.0, 1.0]])
    for keepdims in (False, True):
        same(getattr(tg.Tensor(a), name)(axis, keepdims), np.asarray(getattr(np, name)(a, axis, keepdims=keepdims)))


def test_std_of_equal_elements_has_gradient_0(device):
    x = tg.ones(3, requires_grad=True)
    x.std().backward()
    assert x.grad.tolist() == [0, 0, 0]


# Shapes, against NumPy

SHAPES = {
    "reshape": (lambda x: x.reshape(4, -1), lambda a: a.reshape(4, -1)),
    "reshape of a tuple": (lambda x: x.reshape((3, 8)), lambda a: a.reshape(3, 8)),
    "reshape to nothing less": (lambda x: x.reshape([24]), lambda a: a.reshape(24)),
    "view": (lambda x: x.view(6, 4), lambda a: a.reshape(6, 4)),
    "flatten": (lambda x: x.flatten(), lambda a: a.reshape(-1)),
    "flatten from": (lambda x: x.flatten(1), lambda a: a.reshape(2, 12)),
    "flatten between": (lambda x: x.flatten(-3, 1), lambda a: a.reshape(6, 4)),
    "squeeze": (lambda x: x.unsqueeze(0).unsqueeze(2).squeeze(), lambda a: a),
    "squeeze one": (lambda x: x.unsqueeze(0).unsqueeze(0).squeeze(1), lambda a: a[None]),
    "squeeze none": (lambda x: x.squeeze(0), lambda a: a),
    "unsqueeze": (lambda x: x.unsqueeze(1), lambda a: a[:, None]),
    "unsqueeze last": (lambda x: x.unsqueeze(-1), lambda a: a[..., None]),
    "T": (lambda x: x.T, lambda a: a.T),
    "transpose": (lambda x: x.transpose(0, -1), lambda a: a.swapaxes(0, -1)),
    "permute": (lambda x: x.permute(1, 2, 0), lambda a: a.transpose(1, 2, 0)),
    "permute of a list": (lambda x: x.permute([-1, 0, 1]), lambda a: a.transpose(-1, 0, 1)),
    "expand": (lambda x: x[:, :1].expand(5, -1, 3, 4), lambda a: np.broadcast_to(a[:, :1], (5, 2, 3, 4))),
    "split": (lambda x: x.split(3, axis=2)[1], lambda a: a[:, :, 3:]),
    "split sizes": (lambda x: x.split([1, 0, 2], 1)[2], lambda a: a[:, 1:]),
    "chunk": (lambda x: x.chunk(2, -1)[0], lambda a: a[..., :2]),
    "concat": (lambda x: tg.concat([x, x[:, 1:]], 1), lambda a: np.concatenate([a, a[:, 1:]], 1)),
    "stack": (lambda x: tg.stack([x, x], -1), lambda a: np.stack([a, a], -1)),
    "gather": (
        lambda x: x.gather(1, tg.Tensor([[[2, 0]], [[1, 1]]])),
        lambda a: np.take_along_axis(a[:, :, :2], np.array([[[2, 0]], [[1, 1]]]), 1),
    ),
    "tril": (lambda x: x.tril(-1), lambda a: np.tril(a, -1)),
    "triu": (lambda x: x.triu(2), lambda a: np.triu(a, 2)),
    "contiguous": (lambda x: x.T.contiguous(), lambda a: a.T),
}
VIEWS = {name for name in SHAPES if name not in ("concat", "stack", "gather", "tril", "triu", "contiguous")}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(device, name):
    ours, numpys = SHAPES[name]
    a = np.arange(24.0).reshape(2, 3, 4)
    x = tg.Tensor(a)
    y = ours(x)
    same(y, numpys(a))
    if name in VIEWS:
        x[...] = x * 2.0 + 1.0
        same(y, numpys(a * 2 + 1))
    else:
        x[...] = 0.0
        same(y, numpys(a))
    assert tg.testing.gradcheck(ours, tg.Tensor(a, requires_grad=True))


def test_a_view_never_copies():
    x = tg.ones(2, 3)
    with pytest.raises(ValueError, match=r"view: shape \(6,\) of a tensor with strides .* needs a copy; use reshape"):
        x.T.view(6)
    assert x.T.reshape(6).shape == (6,)
    assert x[:, 1:].view(2, 1, 2).shape == (2, 1, 2)
    assert tg.zeros(0, 3).T.view(0).shape == (0,)


@pytest.mark.parametrize(("n", "size", "lengths"), [(5, 2, [2, 2, 1]), (4, 2, [2, 2]), (3, 7, [3]), (0, 2, [0])])
def test_split_by_size(n, size, lengths):
    assert [len(piece) for piece in tg.zeros(n).split(size)] == lengths


@pytest.mark.parametrize(("n", "chunks", "lengths"), [(5, 2, [3, 2]), (4, 3, [2, 2]), (2, 5, [1, 1]), (0, 2, [0])])
def test_chunk(n, chunks, lengths):
    assert [len(piece) for piece in tg.zeros(n).chunk(chunks)] == lengths


@given(st.data())
def test_matmul_takes_what_numpy_takes(data):
    a, b = data.draw(strategies.matmul_operands())
    np.testing.assert_allclose((tg.Tensor(a) @ tg.Tensor(b)).numpy(), a @ b, atol=1e-12)


# Indexing, against NumPy


def positions(shape):
    return np.arange(math.prod(shape), dtype=np.float64).reshape(shape)


def check_key(shape, key):
    """x[key] and its gradient are NumPy's; where NumPy has none, an IndexError."""
    a = positions(shape)
    x = tg.Tensor(a, requires_grad=True)
    try:
        expected = a[key]
    except IndexError:
        with pytest.raises(IndexError, match="getitem"):
            x[key]
        return
    y = x[key]
    same(y, np.asarray(expected))
    upstream = positions(y.shape) + 1
    y.backward(tg.Tensor(upstream))
    dx = np.zeros(shape)
    np.add.at(dx, key, upstream)
    np.testing.assert_allclose(x.grad.numpy(), dx)


basic_shapes = npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)


@given(st.data())
def test_basic_keys(data):
    shape = data.draw(basic_shapes)
    key = data.draw(npst.basic_indices(shape, allow_newaxis=True))
    check_key(shape, key)
    # The same memory as NumPy's view has, numbers too.
    x, a = tg.Tensor(positions(shape)), positions(shape)
    y = x[key]
    x[...] = x + 1.0
    same(y, np.asarray((a + 1)[key]))


@given(st.data())
def test_keys_with_arrays(data):
    shape = data.draw(npst.array_shapes(min_dims=1, max_dims=3, max_side=4))
    result = data.draw(npst.broadcastable_shapes((), max_dims=2, min_side=0, max_side=3))
    parts = []
    for n in shape[: data.draw(st.integers(1, len(shape)))]:
        index = npst.arrays(np.int64, result, elements=st.integers(-n, n - 1))
        parts.append(data.draw(st.one_of(index, st.integers(-n, n - 1), st.slices(n))))
    if data.draw(st.booleans()):
        parts.insert(data.draw(st.sampled_from([0, len(parts)])), data.draw(st.sampled_from([None, ...])))
    check_key(shape, tuple(parts))


@given(st.data())
def test_keys_with_masks(data):
    shape = data.draw(basic_shapes)
    axes = data.draw(st.integers(0, len(shape)))
    mask = data.draw(npst.arrays(bool, shape[:axes]))
    check_key(shape, mask)
    check_key(shape, (mask, ...))


KEYS = [
    (tg.Tensor([1, 0]), np.array([1, 0])),
    (tg.Tensor(1), np.array(1)),
    (tg.Tensor([1], dtype=tg.int32), np.array([1])),
    (tg.Tensor([True, False, True]), np.array([True, False, True])),
    ([[0, 1], [2, 0]], np.array([[0, 1], [2, 0]])),
    ([], np.array([], int)),
    ([tg.Tensor(1), 2], np.array([1, 2])),
    (np.int64(2), 2),
    ((np.array([0, 2]), tg.Tensor([1, 3])), ([0, 2], [1, 3])),
    ((slice(None), [True, False, True, False]), (slice(None), np.array([True, False, True, False]))),
    ((slice(None, None, -2), slice(-1, 0, -1)), (slice(None, None, -2), slice(-1, 0, -1))),
    ((None, ..., None, 0), (None, ..., None, 0)),
]


@pytest.mark.parametrize(("key", "numpys"), KEYS, ids=str)
def test_kinds_of_keys(device, key, numpys):
    a = positions((3, 4))
    same(tg.Tensor(a)[key], a[numpys])


@pytest.mark.parametrize(
    "key",
    [
        3,
        -4,
        (0, 4),
        (0, 0, 0),
        (..., ...),
        1.0,
        "a",
        True,
        {0},
        [1.5],
        ["a"],
        [slice(0, 1)],
        [[0], [1, 2]],
        tg.Tensor([1.0]),
        np.array([0.5]),
        [True, False],
        slice(0.5, 1),
        slice(None, "a"),
        slice(tg.Tensor(0, device="cpu"), 1),
        ([0, 1], [0, 1, 2]),
        (np.ones((3, 3), bool),),
    ],
    ids=str,
)
def test_keys_that_are_none(key):
    x = tg.ones(3, 4)
    with pytest.raises(IndexError, match="getitem"):
        x[key]


@pytest.mark.parametrize("key", [[3], [-4], [[0, 1], [2, 7]]])
def test_integers_out_of_range(device, key):
    with pytest.raises(IndexError, match="getitem"):
        tg.ones(3, 4)[key].numpy()


# Errors of methods

X = (2, 3)
ERRORS = [
    (lambda x: x.reshape(4), ValueError, r"reshape: shape must hold 6 elements, got \(4,\)"),
    (lambda x: x.reshape(-1, -1), ValueError, "reshape: "),
    (lambda x: x.reshape(-2, -3), ValueError, "reshape: "),
    (lambda x: x.reshape(2.0, 3), TypeError, "reshape: expected ints, got 2.0"),
    (lambda x: x.reshape("a"), TypeError, "reshape: expected ints, got 'a'"),
    (lambda x: x.flatten(1, 0), ValueError, "flatten: start_axis must not be after end_axis, got 1 and 0"),
    (lambda x: x.flatten(2), IndexError, r"flatten: axis must be in \[-2, 2\), got 2"),
    (lambda x: x.squeeze(2), IndexError, "squeeze: axis"),
    (lambda x: x.unsqueeze(3), IndexError, r"unsqueeze: axis must be in \[-3, 3\), got 3"),
    (lambda x: x.unsqueeze(0.5), TypeError, "unsqueeze: axis must be an int, got 0.5"),
    (lambda x: x.transpose(0, 2), IndexError, "transpose: axis"),
    (lambda x: x.permute(0), ValueError, "permute: axes must name each of 2 axes once, got"),
    (lambda x: x.permute(0, 0), ValueError, "permute: axes must name each of 2 axes once"),
    (lambda x: x.permute(0, 2), IndexError, "permute: axis"),
    (lambda x: x.expand(3, 3), ValueError, r"expand: shape must be one that \(2, 3\) broadcasts to, got \(3, 3\)"),
    (lambda x: x.expand(3), ValueError, "expand: "),
    (lambda x: x.expand(-1, 2, 3), ValueError, "expand: "),
    (lambda x: x.split(0), ValueError, "split: size must be at least 1, got 0"),
    (lambda x: x.split([1, 2]), ValueError, "split: sizes must be lengths that sum to 2"),
    (lambda x: x.split([3, -1]), ValueError, "split: sizes must be lengths"),
    (lambda x: x.split([]), ValueError, "split: "),
    (lambda x: x.split("a"), TypeError, "split: "),
    (lambda x: x.split(1.5), TypeError, "split: "),
    (lambda x: x.split(1, 2), IndexError, "split: axis"),
    (lambda x: x.chunk(0), ValueError, "chunk: chunks must be a positive int, got 0"),
    (lambda x: x.chunk(1.0), ValueError, "chunk: chunks must be a positive int, got 1.0"),
    (lambda x: x.gather(0, tg.ones(1, 1)), TypeError, "gather: index must have an integer dtype, got float32"),
    (lambda x: x.gather(0, tg.Tensor([0])), ValueError, "gather: index must have 2 axes"),
    (lambda x: x.gather(0, tg.zeros(1, 4, dtype=tg.int64)), ValueError, "gather: index must have 2 axes"),
    (lambda x: x.gather(2, tg.zeros(1, 1, dtype=tg.int64)), IndexError, "gather: axis"),
    (
        lambda x: x.gather(0, tg.Tensor([[2, -1]])).numpy(),
        IndexError,
        r"gather: index must be in \[0, 2\), got 2 at position",
    ),
    (lambda x: x[0].tril(), ValueError, r"tril: x must have at least 2 axes, got shape \(3,\)"),
    (lambda x: x[0].triu(), ValueError, "triu: x must have at least 2 axes"),
    (lambda x: x @ x, ValueError, r"matmul: shapes must be .* got \(2, 3\) and \(2, 3\)"),
    (lambda x: x @ 2.0, ValueError, "matmul: operands need at least one axis"),
    (lambda x: x @ x.half().T, TypeError, "matmul: b must have dtype float32 like the others, got float16"),
    (lambda x: tg.matmul(2.0, x), TypeError, "matmul: operands must be Tensors, got float"),
    (lambda x: x + tg.ones(2, 2), ValueError, r"add: shapes must broadcast, got \(2, 3\) and \(2, 2\)"),
    (lambda x: x + "a", TypeError, "add: operands must be Tensors, arrays or numbers, got str"),
    (lambda x: None * x, TypeError, "mul: operands must be Tensors, arrays or numbers, got NoneType"),
    (lambda x: x ** "a", TypeError, "pow: operands"),
    (lambda x: tg.Tensor([True]) - tg.Tensor([True]), TypeError, "sub: bool tensors cannot be subtracted"),
    (lambda x: tg.maximum(1.0, 2.0), TypeError, "maximum: one operand must be a Tensor, got float and float"),
    (lambda x: tg.minimum(np.ones(2), 2.0), TypeError, "minimum: one operand must be a Tensor, got ndarray and float"),
    (lambda x: x.clamp(), ValueError, "clamp: min or max must be given, got neither"),
    (lambda x: x.clamp("a"), TypeError, "clamp: min and max must be numbers or None, got str"),
    (lambda x: x.clamp(max=tg.ones(1)), TypeError, "clamp: min and max must be numbers or None, got Tensor"),
    (lambda x: x.gelu("erf"), ValueError, 'gelu: approximate must be "none" or "tanh", got \'erf\''),
    (lambda x: x.masked_fill(x, 1.0), TypeError, "masked_fill: mask must be a bool Tensor, got float32"),
    (lambda x: x.masked_fill([True], 1.0), TypeError, "masked_fill: mask must be a bool Tensor, got list"),
    (lambda x: x.masked_fill(x > 0, "a"), TypeError, "masked_fill: value must be a number, got str"),
    (lambda x: tg.arange(2).masked_fill(tg.Tensor([True, False]), 0.5), TypeError, "a int64 tensor cannot hold 0.5"),
    (lambda x: x.masked_fill(tg.Tensor([True, False]), 1.0), ValueError, "where: shapes must broadcast"),
    (lambda x: tg.where(x, x, x), TypeError, "where: condition must have dtype bool, got float32"),
    (lambda x: tg.where([True], x, x), TypeError, "where: condition must be a Tensor, got list"),
    (lambda x: x.sum(2), IndexError, r"sum: axis must be in \[-2, 2\), got 2"),
    (lambda x: x.sum((0, 0)), ValueError, r"sum: each axis may be named once, got \(0, 0\)"),
    (lambda x: x.sum((0, -2)), ValueError, "sum: each axis may be named once"),
    (lambda x: x.mean(1.5), TypeError, "mean: axis must be an int, got 1.5"),
    (lambda x: tg.arange(3).mean(), TypeError, "mean: x must have a floating dtype, got int64"),
    (lambda x: tg.arange(3).var(), TypeError, "var: x must have a floating dtype, got int64"),
    (lambda x: tg.arange(3).logsumexp(), TypeError, "logsumexp: x must have a floating dtype"),
    (lambda x: tg.arange(3).softmax(), TypeError, "softmax: x must have a floating dtype"),
    (lambda x: x.softmax(2), IndexError, "softmax: axis"),
    (lambda x: tg.zeros(0).max(), ValueError, r"max: cannot reduce over no element, got shape \(0,\), axis None"),
    (lambda x: tg.zeros(2, 0).min(1), ValueError, "min: cannot reduce over no element"),
    (lambda x: tg.zeros(0).argmax(), ValueError, "argmax: cannot reduce over no element"),
    (lambda x: x.argmin(2), IndexError, "argmin: axis"),
    (lambda x: tg.concat([]), ValueError, "concat: needs at least one tensor, got none"),
    (lambda x: tg.concat(x), TypeError, "concat: expected a list or tuple of Tensors, got Tensor"),
    (lambda x: tg.concat([x, np.ones((2, 3))]), TypeError, "concat: expected Tensors, got ndarray"),
    (
        lambda x: tg.concat([x, x[:1]], 1),
        ValueError,
        r"concat: shapes must agree but for axis 1, got \(2, 3\) and \(1, 3\)",
    ),
    (lambda x: tg.concat([x], 2), IndexError, "concat: axis"),
    (lambda x: tg.stack(()), ValueError, "stack: needs at least one tensor, got none"),
    (lambda x: tg.stack([x, x[0]]), ValueError, r"stack: shapes must be the same, got \(2, 3\) and \(3,\)"),
    (lambda x: tg.stack([x, 1.0]), TypeError, "stack: expected Tensors, got float"),
    (lambda x: tg.stack([x], 3), IndexError, r"stack: axis must be in \[-3, 3\), got 3"),
]


@pytest.mark.parametrize(("call", "error", "message"), ERRORS)
def test_errors(device, call, error, message):
    with pytest.raises(error, match=message):
        call(tg.ones(*X))


@pytest.mark.skipif(not tg.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "op", [lambda a, b: a + b, lambda a, b: a == b, lambda a, b: a @ b, lambda a, b: tg.concat([a, b])]
)
def test_tensors_of_two_devices_do_not_meet(op):
    with pytest.raises(ValueError, match="all tensors must be on one device, got cuda:0 and cpu"):
        op(tg.ones(2, 2, device="cuda"), tg.ones(2, 2, device="cpu"))
