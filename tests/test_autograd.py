"""The engine: the graph, backward, saved arrays, places of gradients, hooks, user Functions, grad modes."""

import gc
import inspect
import sys
import threading
import tracemalloc
import weakref

import numpy as np
import pytest

import tinygrad_gpu as tg
from tinygrad_gpu.autograd import Place
from tinygrad_gpu.device import array_module, cupy


def leaf(*values, dtype=tg.float64):
    return tg.Tensor(list(values), dtype=dtype, requires_grad=True)


def scalar(value):
    return tg.Tensor(value, dtype=tg.float64, requires_grad=True)


class Scale(tg.autograd.Function):
    """y = factor x; notes in `log` what its rule is asked for."""

    def forward(ctx, x, factor=1.0, log=None):
        ctx.factor, ctx.log = factor, log
        return x * factor

    def backward(ctx, dy):
        if ctx.log is not None:
            ctx.log.append(ctx.factor)
        return dy * ctx.factor


class Pair(tg.autograd.Function):
    """(2 x, 3 x); notes the gradients that its rule is given."""

    @staticmethod
    def forward(ctx, x, log):
        ctx.log = log
        return 2 * x, 3 * x

    @staticmethod
    def backward(ctx, *grads):
        ctx.log.append(tuple(g if g is None else g.tolist() for g in grads))
        return sum(factor * g for factor, g in zip((2, 3), grads, strict=True) if g is not None)


class PairOfNones(Pair):
    materialize_grads = False


# Gradients


def test_fan_out_accumulates():
    a = scalar(3.0)
    b = a + a
    (b * b).backward()
    assert a.grad.item() == 24


def test_a_diamond_of_several_depths_visits_each_node_once():
    log, x = [], scalar(1.0)
    y = Scale.apply(x, factor=2.0, log=log)
    z = y
    for _ in range(20):  # 2^20 paths
        z = z + z
    (z + y).backward()
    assert log == [2.0]
    assert x.grad.item() == 2 * (2**20 + 1)


@pytest.mark.parametrize(
    ("a", "b"), [((3,), ()), ((2, 3), (3,)), ((2, 3), (2, 1)), ((2, 1), (1, 3)), ((4, 1, 3), (2, 1)), ((0, 3), (3,))]
)
@pytest.mark.parametrize("op", [lambda a, b: a + b, lambda a, b: a - b, lambda a, b: a * b, lambda a, b: a / b])
def test_gradients_of_broadcast_inputs_have_the_inputs_shapes(op, a, b):
    x = (tg.rand(*a, dtype=tg.float64) + 1).requires_grad_()
    y = (tg.rand(*b, dtype=tg.float64) + 1).requires_grad_()
    assert tg.testing.gradcheck(op, x, y)
    op(x, y).sum().backward()
    assert (x.grad.shape, y.grad.shape) == (a, b)


BINARY = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "pow": lambda a, b: a**b,
    "maximum": lambda a, b: a.maximum(b),
    "minimum": lambda a, b: a.minimum(b),
    "matmul": lambda a, b: a @ b,
    "concat": lambda a, b: tg.concat([a, b]),
    "where": lambda a, b: tg.where(tg.Tensor([[True, False], [False, True]]), a, b),
}


@pytest.mark.parametrize("frozen", [0, 1])
@pytest.mark.parametrize("name", BINARY)
def test_a_frozen_input_gets_no_gradient(name, frozen):
    operands = [tg.rand(2, 2) + 0.5, tg.rand(2, 2) + 0.5]
    operands[1 - frozen].requires_grad_()
    BINARY[name](*operands).sum().backward()
    assert operands[frozen].grad is None
    assert operands[1 - frozen].grad.shape == (2, 2)


def test_a_rule_knows_which_inputs_need_a_gradient():
    seen = []

    class Three(tg.autograd.Function):
        def forward(ctx, a, b, c, d):
            seen.append(ctx.needs_input_grad)
            return a + b + c

        def backward(ctx, dy):
            seen.append(ctx.needs_input_grad)
            return dy, dy, dy, None

    a, b = leaf(1.0), leaf(1.0)
    Three.apply(a, tg.ones(1, dtype=tg.float64), b, 4).backward(retain_graph=False)
    y = Three.apply(a, tg.ones(1, dtype=tg.float64), b, None)
    tg.autograd.grad(y, b)
    assert seen == [(True, False, True, False)] * 3 + [(False, False, True, False)]
    assert b.grad.item() == 1


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "matmul", "concat"])
def test_a_frozen_input_keeps_nothing_alive(name):
    x = tg.ones(2, 2, requires_grad=True) * 1.0
    array = weakref.ref(x.data)
    y = BINARY[name](x, tg.ones(2, 2) * 2.0)
    del x
    assert array() is None  # the rule of x needs the other operand alone
    y.sum().backward()


def test_a_leaf_frozen_after_the_forward_pass_gets_no_gradient():
    seen, x, w = [], leaf(2.0), leaf(3.0)

    class Product(tg.autograd.Function):
        def forward(ctx, x, w):
            return x * w

        def backward(ctx, dy):
            seen.append(ctx.needs_input_grad)
            return dy, dy

    y = Product.apply(x, w)
    w.requires_grad = False
    y.backward()
    assert seen == [(True, False)]
    assert x.grad.tolist() == [1]
    assert w.grad is None


def test_nothing_is_recorded_or_kept_where_no_input_needs_a_gradient():
    kept = []

    class Keep(tg.autograd.Function):
        def forward(ctx, x):
            y = x + 1
            ctx.save_for_backward(y)
            kept.append(weakref.ref(y))
            return x * 2

    out = Keep.apply(tg.ones(3))
    assert kept[0]() is None
    assert not out.requires_grad
    assert out.is_leaf
    with tg.no_grad():
        out = Keep.apply(leaf(1.0))
    assert kept[1]() is None
    assert not out.requires_grad


# Long chains


class low_recursion_limit:
    def __enter__(self):
        self.before = sys.getrecursionlimit()
        sys.setrecursionlimit(len(inspect.stack(0)) + 50)

    def __exit__(self, *_):
        sys.setrecursionlimit(self.before)


class Alias(tg.autograd.Function):
    """y = x, a view of it."""

    def forward(ctx, x):
        return x[...]

    def backward(ctx, dy):
        return dy


@pytest.mark.parametrize("step", [lambda y: y + 1.0, Alias.apply], ids=["additions", "views"])
def test_chains_of_100_000_neither_recurse_forwards_backwards_nor_when_freed(step):
    x = leaf(1.0)
    step(step(x)).backward()  # a first call may import and compile
    x.grad = None
    with low_recursion_limit():
        y = x
        for _ in range(100_000):
            y = step(y)
        y.backward()
        node = weakref.ref(y._node)
        del y
    assert x.grad.item() == 1
    assert node() is None


def test_a_chain_of_100_000_is_freed_without_a_backward():
    x = leaf(1.0)
    first = x * 1.0
    node = weakref.ref(first._node)
    with low_recursion_limit():
        y = first
        for _ in range(100_000):
            y = Alias.apply(y)
        del first, y
    assert node() is None


# What is kept, and for how long


def test_saved_arrays_go_as_backward_passes_them():
    arrays, alive = [], []

    class Keep(tg.autograd.Function):
        def forward(ctx, x):
            copy = x.copy()
            arrays.append(weakref.ref(copy))
            ctx.save_for_backward(copy)
            ctx.attribute = copy
            return x + 0

        def backward(ctx, dy):
            alive.append(sum(ref() is not None for ref in arrays))
            return dy

    y = leaf(1.0)
    for _ in range(4):
        y = Keep.apply(y)
    y.backward()
    assert alive == [4, 3, 2, 1]
    assert all(ref() is None for ref in arrays)


def test_activations_go_with_the_last_tensor():
    x = tg.ones(1000, requires_grad=True)
    y = x * 2.0
    array = weakref.ref(y.data)
    z = (y * y).sum()
    del y
    assert array() is not None
    del z
    assert array() is None


def bytes_in_use():
    if tg.cuda.is_available():
        return cupy().get_default_memory_pool().used_bytes()
    return tracemalloc.get_traced_memory()[0]


def test_200_steps_without_the_garbage_collector_leave_no_garbage():
    w = tg.rand(16, 16, requires_grad=True)
    x = tg.rand(512, 16)  # a result has at least 16 KiB, 200 of them 3.2 MiB

    def step():
        h = (x @ w).tanh()
        h.retain_grad()
        h.register_hook(lambda g: g * 1.0)
        h = h[:, 1:].clone()
        h += 1.0
        a, b = (h @ w[1:]).split(8, axis=1)
        (a * b).sum().backward()
        w.grad = None

    step()  # on a GPU the first one compiles
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        step()
        before = bytes_in_use()
        for _ in range(200):
            step()
        grown = bytes_in_use() - before
        unreachable = gc.collect()
    finally:
        tracemalloc.stop()
        gc.enable()
    assert grown < 2**20
    assert unreachable == 0


def test_a_detached_tensor_does_not_keep_the_graph():
    y = leaf(1.0) * 2.0
    node = weakref.ref(y._node)
    y = y.detach()
    assert node() is None


# Backward twice


def test_a_second_backward_is_an_error_that_names_the_op_and_changes_nothing():
    x = leaf(2.0)
    y = x * x
    z = y + 1.0
    y.backward()
    for again in (y, z):
        with pytest.raises(RuntimeError, match=r"the graph through Mul was released.*retain_graph=True"):
            again.backward()
    assert x.grad.tolist() == [4]


def test_retain_graph_keeps_it():
    x = leaf(2.0)
    y = x * x
    for times in (1, 2, 3):
        y.backward(retain_graph=True)
        assert x.grad.tolist() == [4 * times]
    y.backward()
    with pytest.raises(RuntimeError, match="released"):
        y.backward()


def test_every_version_is_checked_before_any_gradient_is_written():
    x, w = leaf(2.0), leaf(5.0)
    y = w * 1.0
    z = x * x + y * y
    w.grad = tg.ones(1, dtype=tg.float64)
    with tg.no_grad():
        y += 1.0
    calls = []
    x.register_hook(calls.append)
    with pytest.raises(RuntimeError, match=r"Mul saved \(number 0, shape \(1,\)\) was changed in place"):
        z.backward()
    assert x.grad is None
    assert w.grad.tolist() == [1]
    assert calls == []
    y.data -= 1.0  # put back; the array alone, so that the error stays
    with pytest.raises(RuntimeError, match="changed in place"):
        z.backward()


def test_a_change_that_no_rule_on_the_way_needs_is_no_error():
    x, w = leaf(2.0), leaf(3.0)
    y = w * 1.0
    z = x * x + y * y
    with tg.no_grad():
        y += 1.0
    (dx,) = tg.autograd.grad(z, x)
    assert dx.tolist() == [4]


@pytest.mark.parametrize(
    "change", [lambda x: x.detach(), lambda x: x[0:1], lambda x: x.reshape(1, 1), lambda x: x.T, lambda x: x]
)
def test_a_change_through_any_tensor_of_the_memory_is_seen(change):
    w = leaf(2.0)
    x = w * 1.0
    y = x * x
    with tg.no_grad():
        view = change(x)
        view *= 3.0
    with pytest.raises(RuntimeError, match="changed in place"):
        y.backward()


def test_a_saved_output_is_watched_too():
    y = leaf(1.0).exp()
    z = y * 2.0
    y += 1.0
    with pytest.raises(RuntimeError, match="Exp saved"):
        y.backward()
    with pytest.raises(RuntimeError, match="Exp saved"):
        z.backward()


def test_overflow_is_infinity_and_no_warning():
    x = tg.full((1,), 1.0, dtype=tg.float16, requires_grad=True)
    y = x * 1.0
    (y * 60000.0 + y * 60000.0).backward()
    (x * 60000.0 + x * 60000.0).backward(tg.Tensor([0.75]))
    (x.to(tg.float32) * 1e6).backward()
    assert x.grad.tolist() == [np.inf]


# Places


def test_a_gradient_is_summed_in_its_home():
    buffer = tg.full((6,), 7.0, dtype=tg.float64)
    x = leaf(1.0, 2.0)
    x._home = buffer.data[2:4]
    (x * 3.0).sum().backward()  # the 7s are not added to
    assert buffer.tolist() == [7, 7, 3, 3, 7, 7]
    (x * 1.0 + x).sum().backward()
    assert buffer.tolist() == [7, 7, 5, 5, 7, 7]
    assert x.grad.tolist() == [5, 5]
    x.grad = None
    (x * 2.0).sum().backward()
    assert buffer.tolist() == [7, 7, 2, 2, 7, 7]
    x.grad = tg.Tensor([8.0, 9.0])
    assert buffer.tolist() == [7, 7, 8, 9, 7, 7]


def test_grad_of_targets_leaves_homes_alone():
    x = leaf(1.0)
    x._home = tg.full((1,), 7.0, dtype=tg.float64).data
    (g,) = tg.autograd.grad(x * 3.0, x)
    assert g.tolist() == [3]
    assert x._home.tolist() == [7]
    assert x.grad is None


class IntoPlace(tg.autograd.Function):
    """y = 5 x; its rule writes the gradient where the engine wants it."""

    def forward(ctx, x, log):
        ctx.log = log
        return x * 5

    def backward(ctx, dy):
        place = ctx.grad_place(0)
        ctx.log.append(None if place is None else place.filled)
        if place is None:
            return dy * 5
        assert isinstance(place, Place)
        place.add(dy * 5)
        return place


@pytest.mark.parametrize("home", [False, True])
def test_a_rule_adds_into_the_place_itself(home):
    log, x = [], leaf(1.0)
    x._home = tg.full((1,), 7.0, dtype=tg.float64).data if home else None
    (IntoPlace.apply(x, log=log) + x + IntoPlace.apply(x, log=log)).sum().backward()
    assert x.grad.tolist() == [11]
    assert sorted(log) == [False, True]
    IntoPlace.apply(x, log=log).sum().backward()
    assert x.grad.tolist() == [16]
    assert log[-1] is True
    (g,) = tg.autograd.grad(IntoPlace.apply(x, log=log), x)
    assert g.tolist() == [5]
    assert log[-1] is False


def test_a_result_has_no_place():
    log, x = [], leaf(1.0)
    IntoPlace.apply(x * 2.0, log=log).backward()
    assert log == [None]
    assert x.grad.tolist() == [10]


# .grad


def test_grad_is_none_until_a_backward_reaches_the_leaf_and_after_zeroing():
    x, far = leaf(1.0), leaf(1.0)
    y = x * 2.0
    assert x.grad is None
    y.backward()
    assert x.grad.tolist() == [2]
    assert far.grad is None
    assert y.grad is None
    x.grad = None
    assert x.grad is None


def test_grad_is_a_view_and_assigning_copies():
    x = leaf(1.0, 2.0)
    (x * 2.0).sum().backward()
    g = x.grad
    x.grad[0] = 10.0
    assert g.tolist() == [10, 2]
    given = tg.Tensor([3.0, 4.0])
    x.grad = given
    given[0] = 9.0
    assert g.tolist() == [3, 4]
    x.grad *= 2.0
    assert g.tolist() == [6, 8]
    assert x.grad.dtype == tg.float64


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (np.ones(2), TypeError, "grad: must be a Tensor or None, got ndarray"),
        (1.0, TypeError, "got float"),
        (tg.ones(3, device="cpu"), ValueError, r"grad: must have shape \(2,\) on cpu, got \(3,\) on cpu"),
    ],
)
def test_grad_takes_only_a_tensor_of_its_shape(value, error, message):
    x = tg.ones(2, device="cpu", requires_grad=True)
    with pytest.raises(error, match=message):
        x.grad = value


def test_a_gradient_has_the_leafs_dtype():
    for dtype in (tg.float64, tg.float32, tg.float16, tg.bfloat16):
        x = tg.ones(3, dtype=dtype, requires_grad=True)
        (x.to(tg.float32) * 2.0).sum().backward()
        assert x.grad.dtype == dtype
        assert x.grad.tolist() == [2, 2, 2]


def test_what_saved_a_gradient_sees_that_backward_changed_it():
    x, v = leaf(2.0), leaf(3.0)
    (x * x).backward()
    product = v * x.grad
    (x * x).backward()
    with pytest.raises(RuntimeError, match=r"Mul saved .* was changed in place"):
        product.backward()
    product = v * x.grad
    x.grad = tg.ones(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        product.backward()


def test_a_new_gradient_does_not_touch_the_old_one():
    x, v = leaf(2.0), leaf(3.0)
    (x * x).backward()
    product = v * x.grad
    x.grad = None
    (x * x * x).backward()
    product.backward()
    assert v.grad.tolist() == [4]


def test_a_gradient_does_not_share_memory_with_another():
    x, y = leaf(1.0), leaf(1.0)
    upstream = tg.ones(1, dtype=tg.float64)
    (x + y).backward(upstream)
    x.grad *= 5.0
    assert y.grad.tolist() == [1]
    assert upstream.tolist() == [1]
    (g,) = tg.autograd.grad(x + y, x, upstream)
    g *= 5.0
    assert upstream.tolist() == [1]


def test_retain_grad():
    x = scalar(3.0)
    y = x * 2.0
    y.retain_grad()
    y.retain_grad()
    z = y * y
    z.backward(retain_graph=True)
    assert y.grad.item() == 12
    z.backward()
    assert y.grad.item() == 24
    assert y.grad.device == x.device
    assert y.grad.shape == ()
    x.retain_grad()  # a leaf keeps it anyway
    assert x.grad.item() == 48


def test_retain_grad_follows_a_change_in_place():
    y = leaf(1.0) * 2.0
    y.retain_grad()
    y *= 5.0
    (y * 7.0).backward()
    assert y.grad.tolist() == [7]


# Hooks


def test_hooks_on_a_leaf_see_the_sum_in_order_and_replace_it():
    x, log = leaf(1.0), []

    def first(g):
        log.append(("first", g.item()))
        return g * 10.0

    def second(g):
        log.append(("second", g.item()))

    remove = x.register_hook(first)
    x.register_hook(second)
    (x * 2.0 + x * 3.0).backward()
    assert log == [("first", 5), ("second", 50)]
    assert x.grad.item() == 50
    (x * 1.0).backward()  # a hook sees what this backward brings
    assert log[2:] == [("first", 1), ("second", 10)]
    assert x.grad.item() == 60
    remove()
    remove()
    (x * 1.0).backward()
    assert log[4:] == [("second", 1)]
    assert x.grad.item() == 61


def test_hooks_on_a_result_see_the_sum_and_pass_on_what_they_return():
    x, log = leaf(1.0), []
    y = x * 2.0
    y.retain_grad()
    remove = y.register_hook(lambda g: log.append(g.item()))
    y.register_hook(lambda g: g * 10.0)
    (y * 3.0 + y * 4.0).backward(retain_graph=True)
    assert log == [7]
    assert y.grad.item() == 70
    assert x.grad.item() == 140
    remove()
    (y * 1.0).backward()
    assert log == [7]
    assert x.grad.item() == 160


def test_one_function_registered_twice_is_two_hooks():
    x = leaf(1.0)

    def double(g):
        return g * 2.0

    remove = x.register_hook(double)
    x.register_hook(double)
    (x * 1.0).backward()
    assert x.grad.item() == 4
    remove()
    x.grad = None
    (x * 1.0).backward()
    assert x.grad.item() == 2


def test_hooks_run_for_targets_of_grad():
    x = leaf(1.0)
    y = x * 2.0
    x.register_hook(lambda g: g * 10.0)
    y.register_hook(lambda g: g * 100.0)
    dx, dy = tg.autograd.grad(y * 3.0, [x, y])
    assert (dx.item(), dy.item()) == (6000, 300)
    assert x.grad is None


def test_a_hook_gets_a_tensor_and_must_give_one():
    x = leaf(1.0, 2.0)
    remove = x.register_hook(lambda g: g.data)
    with pytest.raises(TypeError, match=r"register_hook: the hook must return None or a Tensor, got"):
        (x * 1.0).sum().backward()
    remove()
    x.register_hook(lambda g: g[:1])
    with pytest.raises(ValueError, match=r"the hook must return shape \(2,\) on .*, got \(1,\)"):
        (x * 1.0).sum().backward()


@pytest.mark.parametrize("uses", [1, 2, 5])
def test_a_post_accumulate_hook_fires_once_with_the_final_gradient(uses):
    log, w = [], leaf(1.0)
    w.register_hook(lambda g: g * 2.0)
    remove = w.register_post_accumulate_grad_hook(lambda t: log.append((t is w, t.grad.item())))
    h = leaf(1.0)
    for _ in range(uses):
        h = h * w
    (h + PairOfNones.apply(w, log=[])[0]).sum().backward()
    assert log == [(True, 2.0 * (uses + 2))]
    remove()
    (w * 1.0).backward()
    assert len(log) == 1


def test_a_post_accumulate_hook_waits_for_a_contribution_that_is_none():
    class Never(tg.autograd.Function):
        def forward(ctx, x):
            return x * 0

        def backward(ctx, dy):
            return None

    log, w, alone = [], leaf(1.0), leaf(1.0)
    w.register_post_accumulate_grad_hook(lambda t: log.append(t.grad.item()))
    alone.register_post_accumulate_grad_hook(lambda t: log.append("never"))
    late = Never.apply(w)  # made first, so walked last
    (late + w * 3.0 + Never.apply(alone)).backward()
    assert log == [3]
    assert alone.grad is None


def test_a_post_accumulate_hook_may_step():
    w = leaf(4.0)

    @w.register_post_accumulate_grad_hook
    def step(leaf):
        with tg.no_grad():
            leaf -= leaf.grad * 0.25
        leaf.grad = None

    for expected in (2, 1, 0.5):
        (w * w).backward()
        assert w.item() == expected
        assert w.grad is None


@pytest.mark.parametrize("register", ["register_hook", "retain_grad"])
def test_hooks_need_a_gradient(register):
    args = [print] if register == "register_hook" else []
    with pytest.raises(RuntimeError, match=f"{register}: the tensor does not require a gradient"):
        getattr(tg.ones(1), register)(*args)


@pytest.mark.parametrize("x", [lambda: leaf(1.0) * 2.0, lambda: tg.ones(1)])
def test_only_a_leaf_has_a_final_gradient(x):
    with pytest.raises(RuntimeError, match="only a leaf that requires a gradient has a final one"):
        x().register_post_accumulate_grad_hook(print)


# Functions of several outputs


@pytest.mark.parametrize(("function", "unused"), [(Pair, [0.0]), (PairOfNones, None)])
def test_an_output_nobody_used_gets_zeros_or_none(function, unused):
    log, x = [], leaf(1.0)
    a, b = function.apply(x, log=log)
    (a * 5.0).backward()
    assert x.grad.item() == 10
    a, b = function.apply(x, log=log)
    (b * 7.0).backward()
    assert x.grad.item() == 31
    a, b = function.apply(x, log=log)
    (a * b).backward()
    assert log == [([5.0], unused), (unused, [7.0]), ([3.0], [2.0])]
    assert x.grad.item() == 43


def test_an_integer_output_takes_no_gradient():
    class Order(tg.autograd.Function):
        def forward(ctx, x):
            order = x.argsort()
            ctx.save_for_backward(order)
            return x[order], order

        def backward(ctx, dy, _):
            (order,) = ctx.saved_arrays
            dx = array_module(dy).empty_like(dy)
            dx[order] = dy
            return dx

    x = leaf(3.0, 1.0, 2.0)
    values, order = Order.apply(x)
    assert not order.requires_grad
    assert order.tolist() == [1, 2, 0]
    (values * tg.Tensor([1.0, 10.0, 100.0])).sum().backward()
    assert x.grad.tolist() == [100, 1, 10]


# autograd.grad


def test_grad_of_leaves_and_results_through_one_another():
    x = leaf(3.0)
    y = x * x
    z = y * y
    dx, dy, dz = tg.autograd.grad(z, [x, y, z])
    assert (dx.item(), dy.item(), dz.item()) == (4 * 27, 18, 1)
    assert x.grad is None


def test_grad_gives_none_where_nothing_depends():
    x, other = leaf(3.0), leaf(1.0)
    y = x * x
    later = y * 2.0
    assert tg.autograd.grad(y, [other, x, later])[0::2] == (None, None)


def test_grad_runs_no_rule_that_leads_to_no_target():
    log, x, w = [], leaf(1.0), leaf(1.0)
    y = Scale.apply(x, factor=2.0, log=log)
    v = Scale.apply(w, factor=3.0, log=log)
    z = Scale.apply(y, factor=4.0, log=log) + Scale.apply(v, factor=5.0, log=log)
    assert tg.autograd.grad(z, y, retain_graph=True)[0].item() == 4
    assert log == [4]
    assert tg.autograd.grad(z, w, retain_graph=True)[0].item() == 15
    assert log == [4, 5, 3]
    assert tg.autograd.grad(z, [x, w])[0].item() == 8
    assert sorted(log[3:]) == [2, 3, 4, 5]


def test_grad_releases_only_what_it_walked():
    x, w = leaf(2.0), leaf(3.0)
    y, v = x * x, w * w
    z = y + v
    tg.autograd.grad(z, x)
    with pytest.raises(RuntimeError, match="released"):
        z.backward()
    v.backward()
    assert w.grad.item() == 6


def test_grad_with_several_outputs_and_their_gradients():
    x = leaf(1.0, 2.0)
    y, z = x * 2.0, (x * x).sum()
    (dx,) = tg.autograd.grad((y, z, y), (x,), (tg.Tensor([1.0, 10.0]), None, tg.Tensor([0.0, 1.0])))
    assert dx.tolist() == [2 + 2, 20 + 4 + 2]


def test_grad_of_a_target_itself_and_of_one_output_of_several():
    x = leaf(1.0)
    assert tg.autograd.grad(x, x)[0].item() == 1
    a, b = PairOfNones.apply(x, log=[])
    da, db, dx = tg.autograd.grad(a * 7.0, [a, b, x])
    assert da.item() == 7
    assert db is None
    assert dx.item() == 14


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x, y: tg.autograd.grad(y, np.ones(2)), TypeError, "outputs and inputs must be Tensors, got ndarray"),
        (lambda x, y: tg.autograd.grad(None, x), TypeError, "must be Tensors, got NoneType"),
        (lambda x, y: tg.autograd.grad(y, tg.ones(2)), RuntimeError, "every output and input must require a gradient"),
        (lambda x, y: tg.autograd.grad(tg.ones(1), x), RuntimeError, "every output and input must require"),
        (lambda x, y: tg.autograd.grad((), x), ValueError, "needs at least one output"),
        (lambda x, y: tg.autograd.grad(y, x), RuntimeError, r"a gradient is needed for an output of shape \(2,\)"),
        (lambda x, y: tg.autograd.grad([y, y], x, [tg.ones(2)]), ValueError, r"one entry an output \(2\), got 1"),
        (lambda x, y: tg.autograd.grad(y, x, tg.ones(3)), ValueError, r"must have shape \(2,\) on .*, got \(3,\)"),
        (lambda x, y: tg.autograd.grad(y, x, [np.ones(2)]), TypeError, "the gradient must be a Tensor, got ndarray"),
        (lambda x, y: y.backward(), RuntimeError, r"backward: a gradient is needed for an output of shape \(2,\)"),
        (lambda x, y: y.backward(tg.ones(1, 2)), ValueError, r"backward: the gradient must have shape \(2,\)"),
        (lambda x, y: y.backward(2.0), TypeError, "backward: the gradient must be a Tensor, got float"),
        (lambda x, y: tg.ones(1).backward(), RuntimeError, "backward: the tensor does not require a gradient"),
    ],
)
def test_errors_of_grad_and_backward(call, error, message):
    x = leaf(1.0, 2.0)
    y = x * 2.0
    with pytest.raises(error, match=message):
        call(x, y)
    assert x.grad is None
    y.sum().backward()  # the graph is as it was
    assert x.grad.tolist() == [2, 2]


# Functions of a user


def test_static_methods_options_and_attributes():
    class Power(tg.autograd.Function):
        @staticmethod
        def forward(ctx, x, scale, *, exponent):
            ctx.exponent = exponent
            ctx.save_for_backward(x, scale)
            return scale * x**exponent

        @staticmethod
        def backward(ctx, dy):
            x, scale = ctx.saved_arrays
            return dy * scale * ctx.exponent * x ** (ctx.exponent - 1), None

    x = leaf(1.0, -2.0, 0.5)
    assert tg.testing.gradcheck(lambda x: Power.apply(x, 1.5, exponent=3), x)
    with tg.no_grad():
        assert Power.apply(x, 2, exponent=2).tolist() == [2, 8, 0.5]


def test_a_function_with_slots():
    class Slotted(tg.autograd.Function):
        __slots__ = ("factor",)

        def forward(ctx, x):
            ctx.factor = 3
            return x * 3

        def backward(ctx, dy):
            return dy * ctx.factor

    x = leaf(1.0)
    Slotted.apply(x).backward()
    assert x.grad.item() == 3


def rule(result):
    """A Function of two inputs whose rule returns result(dy)."""

    class Rule(tg.autograd.Function):
        def forward(ctx, a, b):
            return a + b

        def backward(ctx, dy):
            return result(dy)

    return Rule


@pytest.mark.parametrize("through", [lambda x: x, lambda x: x * 1.0], ids=["leaf", "result"])
@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        (lambda dy: dy, RuntimeError, r"Rule.backward: must return 2 gradients, one an input, got 1"),
        (lambda dy: (dy, dy, dy), RuntimeError, "must return 2 gradients, one an input, got 3"),
        (lambda dy: (dy[:1], None), RuntimeError, r"of an input of shape \(2,\) has shape \(1,\)"),
        (lambda dy: (dy.sum(), None), RuntimeError, r"of an input of shape \(2,\) has shape \(\)"),
        (lambda dy: (1.0, None), TypeError, "Rule.backward: must return arrays or None, got float"),
        (lambda dy: (tg.ones(2), None), TypeError, "must return arrays or None, got Tensor"),
        (lambda dy: ([1.0, 1.0], None), TypeError, "must return arrays or None, got list"),
    ],
)
def test_errors_of_a_rule(through, result, error, message):
    x = leaf(1.0, 2.0)
    with pytest.raises(error, match=message):
        rule(result).apply(through(x), through(x)).sum().backward()


def test_a_rule_may_give_a_numpy_scalar_another_dtype_or_a_broadcast_view():
    x = scalar(2.0)
    rule(lambda dy: (dy.astype("float32")[()], dy.reshape(1)[0])).apply(x, x * 1.0).backward()
    assert x.grad.item() == 2
    assert x.grad.dtype == tg.float64
    y = leaf(1.0, 2.0)
    rule(lambda dy: (array_module(dy).broadcast_to(dy[:1], (2,)), None)).apply(y, y).sum().backward()
    y.grad += 1.0
    assert y.grad.tolist() == [2, 2]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Scale.apply("a"), "Scale: inputs must be Tensors, numbers or None, got str"),
        (lambda: Scale.apply(np.ones(2)), "Scale: inputs must be Tensors, numbers or None, got ndarray"),
        (lambda: Scale.apply(leaf(1.0), factor=leaf(1.0)), "Scale: Tensors must be given by position.*option factor"),
    ],
)
def test_errors_of_apply(call, message):
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize("result", [2.0, None, [1.0]])
def test_forward_must_give_arrays(result):
    class Wrong(tg.autograd.Function):
        def forward(ctx, x):
            return result

    with pytest.raises(TypeError, match=r"Wrong.forward: must return arrays, got (float|NoneType|list)"):
        Wrong.apply(leaf(1.0))


def test_an_op_that_gives_its_input_back_shares_it():
    class Same(tg.autograd.Function):
        def forward(ctx, x):
            return x

        def backward(ctx, dy):
            return dy * 5

    x = leaf(1.0)
    y = Same.apply(x)
    y.backward()
    assert x.grad.item() == 5
    with pytest.raises(RuntimeError, match="a view of a leaf"):
        y += 1.0


def test_outputs_that_share_memory_know_of_each_other():
    class Twice(tg.autograd.Function):
        def forward(ctx, x):
            y = x * 2
            return y, y[:1]

        def backward(ctx, dy, dz):
            dx = 2 * dy
            dx[:1] += 2 * dz
            return dx

    x = leaf(1.0, 2.0)
    y, z = Twice.apply(x)
    product = y * y
    with tg.no_grad():
        z += 1.0
    with pytest.raises(RuntimeError, match="changed in place"):
        product.sum().backward()
    z *= 3.0
    with pytest.raises(RuntimeError, match="changed in place through another view"):
        y.sum()


# Grad modes


def test_modes_nest_as_context_managers_and_decorators():
    @tg.no_grad()
    def outer():
        return tg.is_grad_enabled(), inner(), tg.is_grad_enabled()

    @tg.enable_grad()
    def inner():
        return tg.is_grad_enabled()

    assert outer() == (False, True, False)
    mode = tg.no_grad()
    with mode:
        with mode, tg.enable_grad(), mode:  # one object entered three times
            assert not tg.is_grad_enabled()
        assert not tg.is_grad_enabled()
    assert tg.is_grad_enabled()
    with pytest.raises(KeyError), tg.no_grad():
        raise KeyError
    assert tg.is_grad_enabled()


@pytest.mark.parametrize("mode", [tg.no_grad, tg.enable_grad])
def test_a_mode_cannot_decorate_what_runs_later(mode):
    with pytest.raises(TypeError, match=f"{mode.__name__}: the body of generate runs after the call returns"):

        @mode()
        def generate():
            yield


def test_backward_works_within_no_grad():
    x = leaf(3.0)
    y = x * x
    with tg.no_grad():
        y.backward()
        assert not (x * x).requires_grad
        with tg.enable_grad():
            assert (x * x).requires_grad
    assert x.grad.item() == 6


def test_modes_belong_to_their_thread():
    inside, checked, seen = threading.Event(), threading.Event(), {}

    @tg.no_grad()
    def quiet(name, wait):
        seen[name] = tg.is_grad_enabled()
        inside.set()
        wait()

    def other():
        seen["start"] = tg.is_grad_enabled()
        with tg.enable_grad():
            quiet("within", checked.wait)
        seen["end"] = tg.is_grad_enabled()

    thread = threading.Thread(target=other)
    with tg.no_grad():
        thread.start()
        assert inside.wait(10)
        quiet("main", lambda: None)  # the same decorated function, entered in two threads and left in the other order
        checked.set()
        thread.join(10)
        assert not tg.is_grad_enabled()
    assert tg.is_grad_enabled()
    assert seen == {"start": True, "within": False, "main": False, "end": True}


def test_threads_build_and_walk_graphs_of_their_own():
    results = [None] * 4

    def work(i):
        x = leaf(float(i))
        for _ in range(50):
            y = x
            for _ in range(20):
                y = y + x
            y.backward()
        results[i] = x.grad.item()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert results == [50 * 21] * 4


def test_a_backward_inside_a_rule():
    class Inner(tg.autograd.Function):
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        def backward(ctx, dy):
            x = tg.Tensor(ctx.saved_arrays[0], requires_grad=True)
            with tg.enable_grad():
                y = x * x * x
            (g,) = tg.autograd.grad(y, x, tg.Tensor(dy))
            return g.data

    x = leaf(2.0)
    (Inner.apply(x) * x).backward()
    assert x.grad.item() == 4 * 8


@pytest.mark.skipif(not tg.cuda.is_available(), reason="needs a GPU")
def test_gradients_cross_devices():
    x = tg.Tensor([1.0, 2.0], device="cpu", requires_grad=True)
    y = x.cuda() * 3.0
    (y.cpu() * x).sum().backward()
    assert x.grad.device == "cpu"
    assert x.grad.tolist() == [6, 12]
