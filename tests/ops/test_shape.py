"""Ops that move elements: values against NumPy, gradients by differences, views, duplicates, every dtype, errors."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

import tinygrad_gpu as tg
from tests.ops.helpers import gradients, layouts, leaf, returned_by
from tinygrad_gpu.ops.shape import SetItem
from tinygrad_gpu.testing import strategies

DTYPES = [tg.float64, tg.float32, tg.float16, tg.bfloat16]
index = st.integers


def grid(*shape):
    return np.arange(np.prod(shape, dtype=int), dtype=np.float64).reshape(shape)


def check(op, reference, *operands):
    """op on leaves as `reference` on their arrays, with gradients."""
    found = op(*operands).numpy()
    expected = np.asarray(reference(*(x.numpy() for x in operands)))
    assert found.shape == expected.shape
    assert found.tolist() == expected.tolist()
    assert tg.testing.gradcheck(op, *operands)


# Each draws, for a shape of one axis or more, the arguments of an op: the op on a tensor, the same on a NumPy array.
@st.composite
def reshapes(draw, shape):
    new = list(draw(st.permutations(shape)))
    new = [*new[:-2], new[-2] * new[-1]] if len(new) > 1 and draw(st.booleans()) else [*new, 1]
    if np.prod(shape) and draw(st.booleans()):
        new[draw(index(0, len(new) - 1))] = -1
    return lambda x: x.reshape(*new), lambda a: a.reshape(new)


@st.composite
def permutes(draw, shape):
    axes = [a - len(shape) * draw(st.booleans()) for a in draw(st.permutations(range(len(shape))))]
    return lambda x: x.permute(axes), lambda a: a.transpose(axes)


@st.composite
def transposes(draw, shape):
    a, b = (draw(index(-len(shape), len(shape) - 1)) for _ in range(2))
    return lambda x: x.transpose(a, b), lambda array: array.swapaxes(a, b)


@st.composite
def expands(draw, shape):
    new = [*draw(strategies.shapes(max_dims=1, max_side=3)), 3, *shape]
    asked = [*new[:-1], -1]
    return lambda x: x.unsqueeze(0).expand(asked), lambda a: np.broadcast_to(a, new)


@st.composite
def squeezes(draw, shape):
    axis = draw(index(-len(shape) - 1, len(shape)))
    back = draw(st.sampled_from([None, axis]))
    squeezed = (lambda a: a.squeeze()) if back is None else (lambda a: a)
    return lambda x: x.unsqueeze(axis).squeeze(back), squeezed


@st.composite
def flattens(draw, shape):
    start = draw(index(0, len(shape) - 1))
    end = draw(index(start, len(shape) - 1))
    new = (*shape[:start], int(np.prod(shape[start : end + 1])), *shape[end + 1 :])
    return lambda x: x.flatten(start, end - len(shape)), lambda a: a.reshape(new)


@st.composite
def splits(draw, shape):
    axis = draw(index(-len(shape), len(shape) - 1))
    ends = sorted(draw(st.lists(index(0, shape[axis]), max_size=3)))
    sizes = np.diff([0, *ends, shape[axis]]).tolist()
    size, piece = draw(index(1, 4)), draw(index(0, len(ends)))
    if draw(st.booleans()):
        return lambda x: x.split(sizes, axis)[piece], lambda a: np.split(a, ends, axis)[piece]
    return lambda x: x.split(size, axis)[-1], lambda a: np.split(a, range(size, shape[axis], size), axis)[-1]


@st.composite
def triangles(draw, shape):
    k = draw(index(-4, 4))
    lower = draw(st.booleans())
    op, reference = (tg.Tensor.tril, np.tril) if lower else (tg.Tensor.triu, np.triu)
    return lambda x: op(x.unsqueeze(0), k), lambda a: reference(a[None], k)


def slices(shape):
    """Basic keys: ints, slices of any step, None and an Ellipsis."""
    return npst.basic_indices(shape, allow_newaxis=True)


@st.composite
def integers(draw, shape):
    """Arrays of integers, negative and repeated ones included, for some axes, with slices before, between and after."""
    parts = [slice(None)] * len(shape)
    form = draw(strategies.shapes(max_dims=2, max_side=3))
    for axis in draw(st.lists(index(0, len(shape) - 1), min_size=1, unique=True)):
        if shape[axis]:
            parts[axis] = draw(npst.arrays(np.int64, form, elements=index(-shape[axis], shape[axis] - 1)))
    return (*parts, ...) if draw(st.booleans()) else tuple(parts)


@st.composite
def masks(draw, shape):
    """A boolean array for the first axes."""
    return draw(npst.arrays(bool, shape[: draw(index(1, len(shape)))]))


def taken(keys):
    return lambda shape: keys(shape).map(lambda key: (lambda x: x[key], lambda a: a[key]))


@st.composite
def gathers(draw, shape):
    axis = draw(index(0, len(shape) - 1))
    form = tuple(draw(index(0, n)) if i != axis else draw(index(0, 4)) for i, n in enumerate(shape))
    form = form if shape[axis] else (*form[:axis], 0, *form[axis + 1 :])
    at = draw(npst.arrays(np.int64, form, elements=index(0, max(shape[axis] - 1, 0))))
    smaller = tuple(slice(n if i != axis else None) for i, n in enumerate(form))
    signed = axis - len(shape) * draw(st.booleans())
    return (
        lambda x: x.gather(signed, tg.Tensor(at, dtype=tg.int64)),
        lambda a: np.take_along_axis(a[smaller], at, axis),
    )


KEYS = {"slices": slices, "integers": integers, "masks": masks}
MOVES = {
    "reshape": reshapes, "permute": permutes, "transpose": transposes, "expand": expands, "squeeze": squeezes,
    "flatten": flattens, "split": splits, "triangle": triangles, "gather": gathers,
    **{f"getitem by {name}": taken(keys) for name, keys in KEYS.items()},
}  # fmt: skip


@pytest.mark.parametrize("name", MOVES)
@settings(max_examples=30)
@given(data=st.data())
def test_moves(device, name, data):
    shape = data.draw(strategies.shapes(min_dims=1, max_side=5))
    op, reference = data.draw(MOVES[name](shape))
    check(op, reference, leaf(grid(*shape), data.draw(layouts)))


@given(data=st.data())
def test_concat(device, data):
    shape = data.draw(strategies.shapes(min_dims=1, max_side=3))
    axis = data.draw(index(-len(shape), len(shape) - 1))
    lengths = data.draw(st.lists(index(0, 3), min_size=1, max_size=4))
    shapes = [tuple(n if i == axis % len(shape) else m for i, m in enumerate(shape)) for n in lengths]
    operands = [leaf(grid(*s) + 100 * i, data.draw(layouts)) for i, s in enumerate(shapes)]
    check(lambda *xs: tg.concat(xs, axis), lambda *arrays: np.concatenate(arrays, axis), *operands)


@given(data=st.data())
def test_stack(device, data):
    shape = data.draw(strategies.shapes(max_dims=2, max_side=3))
    axis = data.draw(index(-len(shape) - 1, len(shape)))
    operands = [leaf(grid(*shape) + 100 * i) for i in range(data.draw(index(1, 3)))]
    check(lambda *xs: tg.stack(xs, axis), lambda *arrays: np.stack(arrays, axis), *operands)


@pytest.mark.parametrize("kind", KEYS)
@given(data=st.data())
def test_setitem(device, kind, data):
    """x[key] = value for values that broadcast, of more axes too; the last of several values for an element stays."""
    shape = data.draw(strategies.shapes(min_dims=1, max_side=4))
    key = data.draw(KEYS[kind](shape))
    target = grid(*shape)[key].shape
    form = tuple(data.draw(st.sampled_from((1, n))) for n in target)[data.draw(index(0, len(target))) :]
    form = (*[1] * data.draw(index(0, 2)), *form)

    def assigned(x, value):
        y = x.clone()
        y[key] = value
        return y

    def expected(a, value):
        b = a.copy()
        b[key] = value.reshape(form[max(len(form) - len(target), 0) :])
        return b

    check(assigned, expected, leaf(grid(*shape), data.draw(layouts)), leaf(100 + grid(*form)))


# Results that are views of x: a change of the one is a change of the other.
VIEWS = {
    "reshape": lambda x: x.reshape(3, 2),
    "view": lambda x: x.view(6),
    "flatten": lambda x: x.flatten(),
    "squeeze": lambda x: x.unsqueeze(1).squeeze(),
    "permute": lambda x: x.permute(1, 0),
    "T": lambda x: x.T,
    "split": lambda x: x.split(1)[1],
    "chunk": lambda x: x.chunk(2, 1)[0],
    "slice": lambda x: x[:, ::-2],
    "element": lambda x: x[1, 2],
    "element of a row": lambda x: x[0][1],
    "everything": lambda x: x[...],
    "detach": lambda x: x.detach(),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_share_memory(device, name):
    x = tg.Tensor(grid(2, 3))
    view = VIEWS[name](x)
    view *= -1
    assert (x.numpy() < 0).sum() == (view.numpy() < 0).sum() > 0


def test_copies_share_none(device):
    x = leaf(grid(2, 3), requires_grad=False)
    for copy in (x.clone(), x.T.contiguous(), x[[0, 1]], x[x > -1], x.tril(), tg.concat([x]), tg.stack([x])):
        copy *= 0
        assert copy.data.flags.c_contiguous
    assert x.numpy().tolist() == grid(2, 3).tolist()


@pytest.mark.parametrize("dtype", [*DTYPES, tg.int64, tg.int32, tg.bool], ids=str)
def test_dtypes_are_kept(device, dtype):
    x = tg.Tensor([[0, 1, 1], [1, 0, 1]], dtype=dtype)
    y = x.clone()
    y[0] = x[1]
    y[1, 2] = 0
    at = tg.Tensor([[2], [1]])
    moved = [x.reshape(6), x.T, x.unsqueeze(1).expand(2, 2, 3), x[:, 1:], x[[1, 0]], x[x == 1], x.gather(1, at),
             x.tril(1), tg.concat([x, x]), tg.stack([x, x]), *x.split(1), x.contiguous(), y]  # fmt: skip
    assert {t.dtype for t in moved} == {np.dtype(dtype)}
    assert y.tolist() == [[1, 0, 1], [1, 0, 0]]
    assert x.tril(1).tolist() == [[0, 1, 0], [1, 0, 1]]


@pytest.mark.parametrize("dtype", [tg.float16, tg.bfloat16], ids=str)
def test_duplicates_are_summed_in_float32(device, dtype):
    """4096 gradients of 1 for each of two elements: in its own dtype, bfloat16 would stop at 256, float16 at 2048."""
    x = leaf(np.zeros((2, 2)), dtype=dtype)
    rows, columns = np.repeat([0, 1], 4096), np.repeat([1, 0], 4096)
    zeros = tg.zeros(2, 4096, dtype=tg.int64)
    for op in (lambda x: x[rows, columns], lambda x: x[rows][:, 1], lambda x: x.gather(1, zeros)):
        _, dx = gradients(op, x)
        assert dx.dtype == dtype
        assert sorted(dx.numpy().ravel().tolist()) == [0, 0, 4096, 4096]
        x.grad = None


def test_scatter_is_repeatable(device):
    rng = np.random.default_rng(0)
    key, cotangent = rng.integers(-7, 7, (2, 5000)), rng.standard_normal(5000)
    at = tg.Tensor(rng.integers(0, 7, (7, 5000)))
    for op, g in ((lambda x: x[tuple(key)], cotangent), (lambda x: x.gather(1, at), np.tile(cotangent, (7, 1)))):
        runs = [gradients(op, leaf(np.zeros((7, 7)), dtype=tg.float32), cotangent=g)[1].numpy() for _ in range(3)]
        assert len({dx.tobytes() for dx in runs}) == 1


def test_the_last_of_several_values_stays_and_has_the_gradient(device):
    x, value = leaf(np.zeros(3)), leaf([1.0, 2, 3, 4])
    y = x.clone()
    y[[1, 0, 1, -2]] = value
    assert y.tolist() == [2, 4, 0]
    y.backward(tg.Tensor([1.0, 10, 100], dtype=tg.float64))
    assert x.grad.tolist() == [0, 0, 100]
    assert value.grad.tolist() == [0, 1, 0, 10]


def test_an_index_changed_before_backward(device):
    x, at = leaf(np.zeros(3)), tg.Tensor([0, 1])
    y = x[at]
    at[0] = 2
    y.sum().backward()
    assert x.grad.tolist() == [1, 1, 0]
    y = x.gather(0, at)
    at[0] = 0
    with pytest.raises(RuntimeError, match=r"Gather saved .* was changed in place"):
        y.sum().backward()


def test_infinite_gradients_stay_out_of_what_was_left_out(device):
    x = leaf([[1.0, np.nan], [-1.0, 4.0]])
    y, dx = gradients(lambda x: x.tril(), x, cotangent=[[1, np.inf], [1, 1]])
    assert y.tolist() == [[1, 0], [-1, 4]]
    assert dx.tolist() == [[1, 0], [1, 1]]


def test_no_axes(device):
    x = leaf(3.0)
    for op in (lambda x: x.reshape(()), lambda x: x[()], lambda x: x[...], lambda x: x.permute(), lambda x: x.T,
               lambda x: x.squeeze(), lambda x: x.clone(), lambda x: x.expand()):  # fmt: skip
        y, dx = gradients(op, x)
        assert (y.shape, y.item(), dx.item()) == ((), 3, 1)
        x.grad = None
    for op in (
        lambda x: x.unsqueeze(0),
        lambda x: x[None],
        lambda x: x.flatten(),
        lambda x: x.reshape(-1),
        lambda x: x.expand(1),
    ):
        assert op(x).tolist() == [3]
    assert x.expand(2, 3).tolist() == [[3] * 3] * 2
    x = leaf(grid(4))
    assert x[tg.Tensor(2)].shape == ()
    assert tg.testing.gradcheck(lambda x: x[tg.Tensor(-1)], x)


def test_to_the_cpu_and_back(device):
    x = leaf(grid(2))
    y, dx = gradients(lambda x: x.to("cpu") * 2, x)
    assert y.device == "cpu"
    assert dx.device == x.device
    assert dx.tolist() == [2, 2]


@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_inputs_cost_no_work(device, monkeypatch, frozen):
    x, value = (leaf(np.ones(n), requires_grad=i != frozen) for i, n in enumerate((3, 2)))
    returned = returned_by(monkeypatch, SetItem)
    y = x.clone()
    y[1:] = value
    y.sum().backward()
    assert [g is None for g in returned] == [i == frozen for i in (0, 1)]
    tg.concat([x, value]).sum().backward()
    assert [t.grad is None for t in (x, value)] == [i == frozen for i in (0, 1)]


ERRORS = {
    "reshape: shape must hold 6 elements, got (4,)": (ValueError, lambda x: x.reshape(4)),
    "reshape: shape must hold 6 elements, got (-1, 4)": (ValueError, lambda x: x.reshape(-1, 4)),
    "reshape: shape must hold 6 elements, got (-1, -1)": (ValueError, lambda x: x.reshape(-1, -1)),
    "reshape: shape must hold 4 elements, got (-2, -2)": (ValueError, lambda x: x[:, 1:].reshape(-2, -2)),
    "reshape: shape must hold 0 elements, got (-1, 0)": (ValueError, lambda x: x[:0].reshape(-1, 0)),
    "reshape: expected ints, got 2.0": (TypeError, lambda x: x.reshape(2.0, 3)),
    "view: shape (6,) of a tensor with strides": (ValueError, lambda x: x.T.view(6)),
    "flatten: start_axis must not be after end_axis, got 1 and 0": (ValueError, lambda x: x.flatten(1, 0)),
    "flatten: axis must be in [-2, 2), got 2": (IndexError, lambda x: x.flatten(0, 2)),
    "squeeze: axis must be in [-2, 2), got 2": (IndexError, lambda x: x.squeeze(2)),
    "unsqueeze: axis must be in [-3, 3), got 3": (IndexError, lambda x: x.unsqueeze(3)),
    "permute: axes must name each of 2 axes once, got (0, 0)": (ValueError, lambda x: x.permute(0, 0)),
    "permute: axes must name each of 2 axes once, got (1,)": (ValueError, lambda x: x.permute(1)),
    "permute: axis must be in [-2, 2), got 2": (IndexError, lambda x: x.permute(0, 2)),
    "transpose: axis must be in [-2, 2), got -3": (IndexError, lambda x: x.transpose(0, -3)),
    "transpose: axis must be an int, got '0'": (TypeError, lambda x: x.transpose("0", 1)),
    "expand: shape must be one that (2, 3) broadcasts to, got (4, 3)": (ValueError, lambda x: x.expand(4, 3)),
    "expand: shape must be one that (2, 3) broadcasts to, got (-1, 2, 3)": (ValueError, lambda x: x.expand(-1, 2, 3)),
    "expand: shape must be one that (2, 3) broadcasts to, got (3,)": (ValueError, lambda x: x.expand(3)),
    "expand: shape must be one that (1, 3) broadcasts to, got (-2, 3)": (ValueError, lambda x: x[:1].expand(-2, 3)),
    "split: sizes must be lengths that sum to 3, that of axis 1, got [1]": (ValueError, lambda x: x.split([1], 1)),
    "split: sizes must be lengths that sum to 2, that of axis 0, got [3, -1]": (ValueError, lambda x: x.split([3, -1])),
    "split: sizes must be lengths that sum to 0, that of axis 0, got []": (ValueError, lambda x: x[:0].split([])),
    "split: sizes must be ints, got [1.5, 0.5]": (TypeError, lambda x: x.split([1.5, 0.5])),
    "split: axis must be in [-2, 2), got 2": (IndexError, lambda x: x.split(1, 2)),
    "gather: index must have an integer dtype, got float64": (TypeError, lambda x: x.gather(0, x)),
    "gather: axis must be in [-2, 2), got 2": (IndexError, lambda x: x.gather(2, tg.zeros(2, 3, dtype=tg.int64))),
    "gather: index must have 2 axes, all but axis 1 no longer than those of (2, 3), got (3, 1)": (
        ValueError, lambda x: x.gather(1, tg.zeros(3, 1, dtype=tg.int64)),
    ),
    "gather: index must have 2 axes, all but axis 0 no longer than those of (2, 3), got (2,)": (
        ValueError, lambda x: x.gather(0, tg.zeros(2, dtype=tg.int64)),
    ),
    "gather: index must be in [0, 3), got -1 at position (1, 0)": (
        IndexError, lambda x: x.gather(1, tg.Tensor([[2], [-1]])).numpy(),
    ),
    "gather: index must be in [0, 0), got 0 at position (0, 0)": (
        IndexError, lambda x: x[:0].gather(0, tg.Tensor([[0]])).numpy(),
    ),
    "tril: x must have at least 2 axes, got shape (3,)": (ValueError, lambda x: x[0].tril()),
    "triu: diagonal must be an int, got 0.5": (TypeError, lambda x: x.triu(0.5)),
    "concat: shapes must agree but for axis 0, got (2, 3) and (3, 2)": (ValueError, lambda x: tg.concat([x, x.T])),
    "concat: shapes must agree but for axis 1, got (2, 3) and (3,)": (ValueError, lambda x: tg.concat([x, x[0]], 1)),
    "concat: axis must be in [-2, 2), got 2": (IndexError, lambda x: tg.concat([x], 2)),
    "concat: needs at least one tensor, got none": (ValueError, lambda x: tg.concat([])),
    "concat: expected Tensors, got float": (TypeError, lambda x: tg.concat([x, 1.0])),
    "stack: shapes must be the same, got (2, 3) and (3, 2)": (ValueError, lambda x: tg.stack([x, x.T])),
    "stack: axis must be in [-3, 3), got 3": (IndexError, lambda x: tg.stack([x], 3)),
    "getitem: an index must hold integers or bools, got float64": (IndexError, lambda x: x[x]),
    "getitem: an index must be an int, slice, None, ... or array, got float": (IndexError, lambda x: x[1.0]),
}  # fmt: skip


@pytest.mark.parametrize("message", ERRORS)
def test_errors(device, message):
    error, call = ERRORS[message]
    with pytest.raises(error, match=re.escape(message)):
        call(tg.Tensor(grid(2, 3)))


def get(x, key, value):
    return x[key].numpy()


def put(x, key, value):
    x[key] = value
    return x.numpy()  # a GPU tells of an index out of range when values leave it


# What NumPy and CuPy find, in their words.
@pytest.mark.parametrize(
    "key", [2, -3, (0, 3), (0, 0, 0), (..., ...), [0, 2], [-3], ([0, 1], [0, 3]), [True, False, True]], ids=str
)
@pytest.mark.parametrize("access", [get, put])
def test_keys_out_of_range(device, access, key):
    with pytest.raises(IndexError, match=r"[gs]etitem: "):
        access(tg.Tensor(grid(2, 3)), key, 1.0)


@pytest.mark.parametrize(
    ("key", "value"), [(0, [1.0, 2.0]), ([0, 1], [[1.0], [2.0], [3.0]]), ((0, 0), [1.0, 2.0])], ids=str
)
def test_values_that_do_not_fit(device, key, value):
    x = tg.Tensor(grid(2, 3))
    with pytest.raises(ValueError, match=r"setitem: .* \(shape \(2, 3\)\)"):
        put(x, key, tg.Tensor(value))
    assert x.tolist() == grid(2, 3).tolist()
