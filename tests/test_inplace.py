"""Changes in place, of tensors and of views of them: either the right values and gradients, or a clear error.

The random programs at the end are the judge: their gradients must be the finite differences of the same program.
"""

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

import tinygrad_gpu as tg


def leaf(*values):
    return tg.Tensor(list(values), dtype=tg.float64, requires_grad=True)


def add(x, y):
    x += y


def sub(x, y):
    x -= y


def mul(x, y):
    x *= y


def div(x, y):
    x /= y


def put(x, y):
    x[...] = y


OUT_OF_PLACE = {
    add: lambda x, y: x + y,
    sub: lambda x, y: x - y,
    mul: lambda x, y: x * y,
    div: lambda x, y: x / y,
    put: lambda x, y: x * 0.0 + y,
}


# Values and gradients


@pytest.mark.parametrize("change", OUT_OF_PLACE)
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)], ids=["both", "x", "y"])
@pytest.mark.parametrize("shape", [(3,), (1,), ()])
def test_a_change_in_place_has_the_gradients_of_its_twin(device, change, needs, shape):
    x = tg.Tensor([2.0, -3.0, 5.0], dtype=tg.float64, requires_grad=needs[0])
    y = (tg.rand(*shape, dtype=tg.float64) + 1.0).requires_grad_(needs[1])
    z = x * 1.0
    change(z, y)
    twin = OUT_OF_PLACE[change](x, y)
    assert z.tolist() == twin.tolist()
    wanted = [t for t, need in zip((x, y), needs, strict=True) if need]
    weights = tg.Tensor([1.0, 10.0, 100.0], dtype=tg.float64)
    found, expected = (tg.autograd.grad((r * weights).sum(), wanted) for r in (z, twin))
    for g, e in zip(found, expected, strict=True):
        np.testing.assert_allclose(g.numpy(), e.numpy(), rtol=1e-14)


@pytest.mark.parametrize("change", OUT_OF_PLACE)
@pytest.mark.parametrize("other", [3, 3.0, np.float32(3), [3.0, 4.0], np.array([3.0, 4.0])])
def test_a_change_in_place_keeps_memory_and_dtype_without_a_graph(device, change, other):
    for dtype in (tg.float64, tg.float32, tg.float16, tg.bfloat16):
        x = tg.Tensor([2.0, 6.0], dtype=dtype)
        array, view = x.data, x[1:]
        expected = OUT_OF_PLACE[change](x, tg.Tensor(other, dtype=dtype))
        change(x, other)
        assert x.data is array
        assert x.dtype == dtype
        assert x.tolist() == expected.tolist()
        assert view.tolist() == x.tolist()[1:]


def test_integers_and_bools_hold_what_their_kind_can(device):
    x = tg.Tensor([1, 2], dtype=tg.int32)
    x += True
    x *= tg.Tensor([2**33 + 1, 3])
    assert x.tolist() == [2, 9]
    assert x.dtype == tg.int32
    for change, y in ((add, 0.5), (div, 2), (mul, tg.ones(2)), (add, np.float32(1))):
        with pytest.raises(TypeError, match=r"a float(32|64) result cannot go into a int32 tensor"):
            change(x, y)
    with pytest.raises(TypeError, match=r"\+=: a int64 result cannot go into a bool tensor"):
        add(tg.Tensor([True]), 1)
    assert x.tolist() == [2, 9]


KEYS = [0, -1, slice(1, None), slice(None, None, -1), (0, 1), (Ellipsis, 1), (slice(None), None), [2, 0], [[0], [2]]]
KEYS += [([0, 2], [1, 0]), ..., (), (slice(1, 1),)]
MASK = [[True, False], [False, False], [False, True]]


@pytest.mark.parametrize("key", [*KEYS, MASK], ids=str)
def test_setitem_of_every_key(device, key):
    x = tg.Tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], dtype=tg.float64, requires_grad=True)
    expected = np.array(x.tolist())
    value = tg.rand(*expected[key].shape, dtype=tg.float64).requires_grad_()
    y = x * 1.0
    y[key] = value
    expected[key] = value.numpy()
    assert y.tolist() == expected.tolist()
    weights = tg.arange(1.0, 7.0, dtype=tg.float64).reshape(3, 2)
    (y * weights).sum().backward()
    kept = weights.numpy().copy()
    assert value.grad.tolist() == kept[key].tolist()
    kept[key] = 0
    assert x.grad.tolist() == kept.tolist()


@pytest.mark.parametrize(
    ("key", "shape"),
    [((0,), ()), ((0,), (1,)), ((0,), (1, 2)), ((slice(None),), (2,)), ((slice(None),), (3, 1)), (([0, 2],), (1, 2))],
)
def test_setitem_broadcasts_its_value(device, key, shape):
    x = tg.zeros(3, 2, dtype=tg.float64)
    value = tg.full(shape, 7.0, dtype=tg.float64, requires_grad=True)
    x[key] = value
    twin = np.zeros((3, 2))
    twin[key] = 7
    assert x.tolist() == twin.tolist()
    x.sum().backward()
    assert value.grad.shape == shape
    assert value.grad.sum().item() == twin.sum() / 7


def test_setitem_of_repeated_places_gives_the_gradient_to_the_value_that_stayed():
    x, value = tg.zeros(3, dtype=tg.float64, device="cpu"), leaf(5.0, 6.0).cpu().detach().requires_grad_()
    x[[1, 1]] = value
    assert x.tolist() == [0, 6, 0]
    x.sum().backward()
    assert value.grad.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        (3, 1.0, IndexError),
        ((0, 0), 1.0, IndexError),
        (1.0, 1.0, IndexError),
        ("a", 1.0, IndexError),
        ([3], 1.0, IndexError),
        ([True], 1.0, IndexError),
        (slice(None), [1.0, 2.0], ValueError),
        (0, "a", TypeError),
        (0, None, TypeError),
    ],
)
def test_errors_of_setitem_leave_the_tensor_as_it_was(key, value, error):
    x = tg.Tensor([1.0, 2.0, 3.0], device="cpu")
    with pytest.raises(error, match=r"setitem|getitem|Tensor"):
        x[key] = value
    assert x.tolist() == [1, 2, 3]


def test_a_part_changed_by_an_augmented_assignment(device):
    x = leaf(1.0, 2.0, 3.0, 4.0)
    y = x * 1.0
    y[1:3] *= 2.0
    y[0] += y[3]
    y[[0, 3]] *= 10.0
    y[::-1] -= x
    assert y.tolist() == [46, 1, 4, 39]
    (y * tg.Tensor([1.0, 2.0, 3.0, 4.0], dtype=tg.float64)).sum().backward()
    assert x.grad.tolist() == [10 - 4, 4 - 3, 6 - 2, 10 + 40 - 1]


def test_a_part_changed_by_an_augmented_assignment_from_a_graph(device):
    x, w = tg.zeros(3, dtype=tg.float64), leaf(2.0, 3.0)
    x[1:] += w
    x[1:] *= w
    assert x.tolist() == [0, 4, 9]
    x.sum().backward()
    assert w.grad.tolist() == [4, 6]


def test_a_part_of_a_view_changed_by_an_augmented_assignment(device):
    x, w = leaf(1.0, 2.0, 3.0, 4.0), leaf(10.0)
    base = x * 1.0
    view = base[1:]
    view[1:] *= w
    (view * tg.Tensor([1.0, 2.0, 3.0], dtype=tg.float64)).sum().backward()
    assert x.grad.tolist() == [0, 1, 20, 30]
    assert w.grad.tolist() == [2 * 3 + 3 * 4]
    with pytest.raises(RuntimeError, match="changed in place through another view"):
        base.sum()
    rows = tg.zeros(4, dtype=tg.float64).reshape(2, 2)
    rows[0] += w
    rows.sum().backward()
    assert w.grad.tolist() == [18 + 2]


def test_a_part_of_what_changed_does_not_stand_for_all_of_it():
    x = leaf(1.0, 2.0, 3.0)
    base = x * 1.0
    whole, pair = base[...], base[0:2]
    pair *= 5.0
    for part in (pair[0:1], pair[1:2]):
        with pytest.raises(RuntimeError, match="changed in place through another view"):
            whole[0:1] = part
    whole[0:2] = pair[...]
    whole.sum().backward()
    assert x.grad.tolist() == [5, 5, 1]


def test_views_of_views_do_not_pile_up():
    x = tg.zeros(3)
    for _ in range(5):
        x = x[...]
    assert x._base._base is None


# A change in place of a tensor that others are views of


def test_a_change_of_a_view_is_never_lost():
    x = tg.ones(4, dtype=tg.float64, requires_grad=True)
    y = x[1:3]
    with pytest.raises(RuntimeError, match="a view of a leaf that requires a gradient cannot be changed in place"):
        y *= 2
    with pytest.raises(RuntimeError, match="a leaf that requires a gradient cannot be changed in place"):
        x *= 2
    z = x * 1.0
    y = z[1:3]
    y *= 2
    with pytest.raises(RuntimeError, match="changed in place through another view"):
        z.sum()
    y.sum().backward()
    assert x.grad.tolist() == [0, 2, 2, 0]
    plain = tg.ones(4)
    part = plain[1:3]
    part *= 2
    assert plain.tolist() == [1, 2, 2, 1]


def test_softmax_used_again_after_its_loss_is_unchanged():
    logits = tg.rand(3, 5, dtype=tg.float64, requires_grad=True)

    def loss(p):
        return -p[:, 0].log().mean() + 0.1 * (p * p).sum()

    p = logits.softmax()
    before = p.tolist()
    loss(p).backward()
    assert p.tolist() == before
    assert tg.testing.gradcheck(lambda x: loss(x.softmax()), logits)


VIEWS = {
    "slice": lambda x: x[1:],
    "int": lambda x: x[0],
    "reshape": lambda x: x.reshape(-1),
    "transpose": lambda x: x.T,
    "unsqueeze": lambda x: x.unsqueeze(0),
    "split": lambda x: x.split(1)[1],
    "expand": lambda x: x.expand(2, 2, 2),
    "itself": lambda x: x[...],
    "detach": lambda x: x.detach(),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_left_behind_by_a_recorded_change_cannot_be_used(name):
    w = tg.ones(2, 2, dtype=tg.float64, requires_grad=True)
    base = w * 1.0
    view = VIEWS[name](base)
    base *= 3.0
    uses = [lambda: view.sum(), lambda: view + base, lambda: add(view, 1.0), lambda: view[0], lambda: put(view, 0.0)]
    for use in uses if name != "expand" else uses[:2]:
        with pytest.raises(RuntimeError, match="changed in place through another view"):
            use()
    with tg.no_grad():  # values can be read, and the view is still left behind
        assert view.sum().item() == 3 * VIEWS[name](tg.ones(2, 2)).sum().item()
        if name != "expand":
            view *= 1.0
            view[0].unsqueeze(0)
    with pytest.raises(RuntimeError, match="changed in place through another view"):
        (view * 2.0).sum()
    VIEWS[name](base).sum().backward() if name != "detach" else base.sum().backward()
    assert w.grad.sum().item() == 3 * VIEWS[name](tg.ones(2, 2)).sum().item()


def test_a_root_left_behind_is_an_error_too():
    x = leaf(1.0, 2.0)
    base = x * 1.0
    view = base[0]
    base *= 3.0
    with pytest.raises(RuntimeError, match="backward: this tensor's memory was changed"):
        view.backward()
    with pytest.raises(RuntimeError, match="grad: this tensor's memory was changed"):
        tg.autograd.grad(view, x)


def test_a_view_made_without_a_graph_does_not_wash_a_base():
    x = leaf(1.0, 2.0)
    base = x * 1.0
    part = base[1:]
    part *= 3.0
    with tg.no_grad():
        other = base[0:1]
    with pytest.raises(RuntimeError, match="changed in place through another view"):
        base[0:1] = other
    with pytest.raises(RuntimeError, match="changed in place through another view"):
        base[1:2] = part * 1.0
    base[1:2] = part  # the change itself
    base.sum().backward()
    assert x.grad.tolist() == [1, 3]


def test_changes_without_a_graph_leave_no_one_behind():
    x = leaf(1.0, 2.0)
    base = x * 1.0
    base += 0.0  # recorded
    view = base[:1]
    with tg.no_grad():
        view *= 5.0
        base[1] = 7.0
    (base * tg.Tensor([1.0, 10.0])).sum().backward()
    assert base.tolist() == [5, 7]
    assert x.grad.tolist() == [1, 10]
    assert view.sum().item() == 5


# Leaves


def test_leaves_change_under_no_grad():
    w = leaf(1.0, 2.0)
    with tg.no_grad():
        w -= 0.5
        w[0] = 9.0
        row = w[1:]
        row *= 2.0
    w.detach()[0] += 1.0
    assert w.tolist() == [10, 3]
    assert w.is_leaf
    assert w.requires_grad
    (w * w).sum().backward()
    assert w.grad.tolist() == [20, 6]


@pytest.mark.parametrize("change", [add, sub, mul, div, put])
def test_a_leaf_with_a_gradient_does_not_change_otherwise(change):
    w = leaf(1.0, 2.0)
    for target in (w, w[0], w.reshape(2, 1), w.T[:1]):
        with pytest.raises(RuntimeError, match=r"(leaf|view of a leaf) that requires a gradient cannot be changed"):
            change(target, 1.0)
    assert w.tolist() == [1, 2]


def test_a_leaf_without_a_gradient_joins_the_graph():
    x, w = tg.zeros(2, dtype=tg.float64), leaf(2.0, 3.0)
    x += w
    assert x.requires_grad
    assert not x.is_leaf
    (x * x).sum().backward()
    assert w.grad.tolist() == [4, 6]


# Errors


@pytest.mark.parametrize("change", [add, sub, mul, div, put])
@pytest.mark.parametrize("mode", [tg.no_grad, tg.enable_grad])
def test_an_expanded_tensor_does_not_change(change, mode):
    x = tg.Tensor([1.0, 2.0])
    wide = x.expand(3, 2)
    with mode(), pytest.raises(RuntimeError, match="an expanded tensor holds an element several times"):
        change(wide, 1.0)
    assert x.tolist() == [1, 2]
    change(wide.clone(), 1.0)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), ()])
def test_empty_tensors_and_those_with_no_axes_change(device, shape):
    x = tg.zeros(*shape)
    x += 1.0
    x *= x
    x[...] = x - 3.0
    assert x.tolist() == (tg.zeros(*shape) - 2.0).tolist()


def test_the_shape_stays():
    x = tg.ones(3)
    with pytest.raises(ValueError, match=r"\+=: the result must keep the shape \(3,\), got \(2, 3\)"):
        x += tg.ones(2, 3)
    with pytest.raises(ValueError, match="must broadcast"):
        x += tg.ones(2)
    assert x.tolist() == [1, 1, 1]


def test_an_operand_that_is_the_tensor_itself():
    x = leaf(3.0)
    y = x * 1.0
    y += y
    y -= y * 0.25
    y.backward()
    assert x.grad.tolist() == [1.5]
    y = x * 1.0
    y *= y
    assert y.tolist() == [9]
    with pytest.raises(RuntimeError, match=r"Mul saved .* was changed in place"):
        y.backward()


def test_overlapping_memory_is_read_before_it_is_written(device):
    x = tg.arange(6.0)
    x[1:] = x[:-1]
    assert x.tolist() == [0, 0, 1, 2, 3, 4]
    x[...] = x[::-1]
    assert x.tolist() == [4, 3, 2, 1, 0, 0]
    x += x[::-1]
    assert x.tolist() == [4, 3, 3, 3, 3, 4]


def test_an_index_tensor_may_change_after_it_was_used(device):
    x, index = leaf(1.0, 2.0, 3.0), tg.Tensor([0, 1])
    y, z = x[index], x * 1.0
    z[index] = x[1:]
    index[0] = 2
    (y.sum() + (z * tg.Tensor([1.0, 10.0, 100.0])).sum()).backward()
    assert x.grad.tolist() == [1, 1 + 1, 10 + 100]


# Random programs


class Program:
    """Steps drawn as tuples of integers, run on a leaf x (2, 3) and a leaf w (3,): every choice is taken modulo the
    choices that there are, so that each list of steps is a program."""

    KINDS = ("view", "change", "change", "put", "augment", "compute")

    @staticmethod
    def keys(shape):
        if not shape:
            return [...]
        keys = [
            0,
            -1,
            slice(1, None),
            slice(None, None, -1),
            slice(None, None, 2),
            ...,
            [0],
            (..., 0),
            (..., slice(0, 2)),
        ]
        return keys if len(shape) == 1 or shape[0] < 2 else [*keys, (slice(None), [1, 0]), (0, slice(1, None))]

    @staticmethod
    def views(t):
        return [
            lambda: t[Program.keys(t.shape)[0]],
            lambda: t[Program.keys(t.shape)[-1]],
            lambda: t.reshape(-1),
            lambda: t.T,
            lambda: t.unsqueeze(0),
            lambda: t.flatten(),
            lambda: t.split(max(len(t) // 2, 1))[0] if t.ndim else t[...],
            lambda: t[..., 1:] if t.ndim else t.reshape(1),
        ]

    @staticmethod
    def operands(tensors, w, n, shape):
        """What can stand beside a tensor of `shape`: a number, a part of w, a mean, w, a tensor of that shape."""
        other = tensors[n % len(tensors)]
        fits = [t for t in tensors if t.shape == shape]
        return [
            1.5,
            w[n % 3],
            other.mean(),
            *([w] if shape[-1:] == (3,) else []),
            *([fits[n % len(fits)]] if fits else []),
        ]

    @classmethod
    def run(cls, steps, x, w):
        tensors = [x * 1.0, tg.full((3,), 0.5, dtype=tg.float64)]
        for kind, which, how, key, operand in steps:
            t = tensors[which % len(tensors)]
            kind = cls.KINDS[kind % len(cls.KINDS)]
            keys = cls.keys(t.shape)
            key = keys[key % len(keys)]
            if kind == "view":
                views = cls.views(t)
                view = views[how % len(views)]()
                if view.size:
                    tensors.append(view)
                continue
            shape = t[key].shape if kind in ("put", "augment") else t.shape
            choices = cls.operands(tensors, w, operand, shape)
            y = choices[operand % len(choices)]
            op = (add, sub, mul, div)[how % 4]
            if op is div:
                y = 2.0 + y * y if isinstance(y, tg.Tensor) else y
            if kind == "change":
                op(t, y)
            elif kind == "put":
                t[key] = y
            elif kind == "augment" and op is add:
                t[key] += y
            elif kind == "augment":
                t[key] *= y
            else:
                tensors.append((t * y).tanh())
        total = 0.0
        for i, t in enumerate(tensors):
            weights = tg.arange(1.0, t.size + 1.0, dtype=tg.float64).reshape(t.shape)
            total = total + (t * weights).sum() * (i + 1.0)
        return total


def differences(f, arrays, eps=1e-5):
    """The central differences of f (a number) with respect to each element of each of the arrays."""
    result = []
    for i, a in enumerate(arrays):
        g = np.zeros(a.shape)
        for index in np.ndindex(a.shape):
            ends = []
            for sign in (1, -1):
                moved = [b.copy() for b in arrays]
                moved[i][index] += sign * eps
                ends.append(f(*moved))
            g[index] = (ends[0] - ends[1]) / (2 * eps)
        result.append(g)
    return result


X, W = np.array([[0.5, -1.25, 0.75], [1.5, 0.25, -0.5]]), np.array([0.75, -0.5, 1.25])


def check_program(steps):
    """True where the program ran and its gradients are right, False where it was refused with a clear error."""

    def value(x, w):
        with tg.no_grad():
            return Program.run(steps, tg.Tensor(x), tg.Tensor(w)).item()

    x, w = tg.Tensor(X, requires_grad=True), tg.Tensor(W, requires_grad=True)
    try:
        result = Program.run(steps, x, w)
        found = tg.autograd.grad(result, [x, w])
    except RuntimeError as error:
        if "changed in place" not in str(error):
            raise
        return False
    assert result.item() == value(X, W)
    for g, expected in zip(found, differences(value, [X, W]), strict=True):
        g = np.zeros(expected.shape) if g is None else g.numpy()
        np.testing.assert_allclose(g, expected, rtol=1e-5, atol=1e-5 * (1 + np.abs(expected).max()))
    return True


small = st.integers(0, 11)


@settings(max_examples=150)
@given(st.lists(st.tuples(st.integers(0, 5), small, small, small, small), min_size=1, max_size=6))
def test_random_programs_are_refused_or_have_the_right_gradient(steps):
    event("ran" if check_program(steps) else "refused")


@pytest.mark.parametrize("kind", range(6))
@pytest.mark.parametrize("how", range(8))
def test_every_single_step_but_a_changed_view_or_square_runs(kind, how):
    runs = [
        check_program([(kind, which, how, key, operand)]) for which in (0, 1) for key in (0, 3) for operand in (0, 3)
    ]
    assert any(runs)
