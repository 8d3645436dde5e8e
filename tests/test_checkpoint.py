"""Activation checkpointing: whatever a function does, its results and gradients are those of calling it."""

import gc
import tracemalloc
import weakref

import numpy as np
import pytest

import tinygrad_gpu as tg
import tinygrad_gpu.functional as F
from tinygrad_gpu import random


def call(fn, *args):
    return fn(*args)


# Programs over leaves a, b (3, 4) and w (4, 4) that give what to differentiate; `ck` is tg.checkpoint or a plain call.


def dropout(ck, a, b, w):
    return [ck(lambda x: F.dropout(x * 2, 0.5), a), F.dropout(b, 0.5)]


def nested_with_a_list(ck, a, b, w):
    def inner(h):
        return F.dropout(h.tanh() @ w, 0.5)

    def outer(tensors, scale, *, deep=True):
        x, y = tensors
        h = ck(inner, F.dropout(x * y, 0.5))
        return ck(lambda: inner(h) * scale)

    return [ck(outer, [a, b], 2.0), F.dropout(a, 0.5)]


def closed_over_leaf(ck, a, b, w):
    return [ck(lambda x: (x @ w).exp() * b, a)]


def closed_over_result(ck, a, b, w):
    h = a.tanh()
    return [ck(lambda x: x @ w * h, b)]


def inputs_that_depend_on_each_other(ck, a, b, w):
    h = a * b
    return [ck(lambda x, y: x * y.exp() + h, a, h)]


def all_inputs_of_a_chain(ck, a, b, w):
    h = a
    for _ in range(3):
        h = ck(lambda x: (x @ w).tanh() + b, h)
    return [h]


def several_outputs_some_unused(ck, a, b, w):
    x, _, z = ck(lambda x: (x.exp(), x @ w, x * b), a)
    return [x * z]


def output_without_a_gradient(ck, a, b, w):
    x, place = ck(lambda x: (x * 2, x.argmax(axis=1)), a)
    return [x[np.arange(3), place.numpy()]]


def detached_output(ck, a, b, w):
    x, y = ck(lambda x: (x * 2, (x * 3).detach()), a)
    return [x * b, y * b]


def only_the_detached_output(ck, a, b, w):
    _, y = ck(lambda x: (x * 2, (x * 3).detach()), a)
    return [y * b]


def outputs_that_are_inputs(ck, a, b, w):
    h = b.exp()
    x, y, z = ck(lambda x, y: (x, y, x * y), a, h)
    return [x * 2, y * 3, z]


def nothing_but_an_input(ck, a, b, w):
    return [ck(lambda x: x, a), ck(lambda x: x, b.exp())]


def an_output_that_no_op_read(ck, a, b, w):
    x, y = ck(lambda x: (x, b * 2), a.exp())
    return [x * 2, y]


def the_same_output_twice(ck, a, b, w):
    x, y = ck(lambda x: (x.exp(),) * 2, a)
    return [x * b, y]


def views_of_an_input(ck, a, b, w):
    x, y = ck(lambda x: (x[1:], x.T), a * 2)
    return [x * b[1:], y]


def same_argument_twice(ck, a, b, w):
    return [ck(lambda x, y: x * y, a, a)]


def leaf_inside_and_outside(ck, a, b, w):
    x = a * w[:3]
    x = ck(lambda x: x @ w + a, x)
    x = ck(lambda x: x @ w * a, x)
    return [x @ w + a]


def change_of_an_intermediate(ck, a, b, w):
    def fn(x):
        h = x.exp() * 2
        h *= b
        h[0] = x[1]
        return h

    return [ck(fn, a)]


def change_of_an_output(ck, a, b, w):
    x = ck(lambda x: x * 2, a)
    x += b
    return [x * b]


def no_gradient_within(ck, a, b, w):
    def fn(x):
        with tg.no_grad():
            scale = (x * w[0]).exp()
        return x * scale

    return [ck(fn, a)]


def random_numbers_of_all_kinds(ck, a, b, w):
    return [ck(lambda x: x * tg.rand(4) + tg.randn(4) * tg.randint(0, 9, (4,)), a), tg.randn(4) * b]


def nothing_to_differentiate(ck, a, b, w):
    return [ck(lambda: tg.randn(4)) * a]


def a_block(ck, a, b, w):
    block = tg.nn.Block(4, 2, dropout=0.3)
    return [ck(block, a[None]), *(p * 0.5 for p in block.parameters())]


PROGRAMS = [
    dropout, nested_with_a_list, closed_over_leaf, closed_over_result, inputs_that_depend_on_each_other,
    all_inputs_of_a_chain, several_outputs_some_unused, output_without_a_gradient, detached_output,
    only_the_detached_output, outputs_that_are_inputs, nothing_but_an_input, an_output_that_no_op_read,
    the_same_output_twice, views_of_an_input, same_argument_twice, leaf_inside_and_outside, change_of_an_intermediate,
    change_of_an_output, no_gradient_within, random_numbers_of_all_kinds, nothing_to_differentiate, a_block,
]  # fmt: skip


def leaves(dtype=tg.float32, frozen=()):
    tg.manual_seed(3)
    shapes = {"a": (3, 4), "b": (3, 4), "w": (4, 4)}
    return {name: tg.randn(*s, dtype=dtype, requires_grad=name not in frozen) for name, s in shapes.items()}


def loss_of(outputs):
    return sum((y * (i + 1)).sum() for i, y in enumerate(outputs))


def record(program, ck, frozen=()):
    """All that a run leaves: outputs, gradients, the state of the generator after forward and after backward."""
    t = leaves(frozen=frozen)
    outputs = program(ck, **t)
    states = [random.default_generator.state_dict()]
    loss = loss_of(outputs)
    if loss.requires_grad:
        loss.backward()
    states.append(random.default_generator.state_dict())
    gradients = {name: None if x.grad is None else x.grad.numpy() for name, x in t.items()}
    return [y.numpy() for y in outputs], gradients, states


@pytest.mark.parametrize("frozen", [(), ("w",), ("a", "b")], ids=str)
@pytest.mark.parametrize("program", PROGRAMS)
def test_bits_are_those_of_the_plain_run(program, frozen, device):
    plain, checkpointed = record(program, call, frozen), record(program, tg.checkpoint, frozen)
    for a, b in zip(plain[0], checkpointed[0], strict=True):
        np.testing.assert_array_equal(a, b)
    for name, expected in plain[1].items():
        found = checkpointed[1][name]
        assert (found is None) == (expected is None), name
        if expected is not None:
            np.testing.assert_array_equal(found, expected, err_msg=name)
    assert plain[2] == checkpointed[2]


def counting(fn):
    def counted(*args):
        counted.calls += 1
        return fn(*args)

    counted.calls = 0
    return counted


def test_runs_again_once_a_backward(device):
    a = leaves()["a"]
    fn = counting(lambda x: x.exp() * x)
    y = tg.checkpoint(fn, a)
    assert fn.calls == 1
    y.sum().backward(retain_graph=True)
    once = a.grad.numpy().copy()
    y.sum().backward()
    assert fn.calls == 3
    np.testing.assert_allclose(a.grad.numpy(), once * 2, rtol=1e-6)
    with pytest.raises(RuntimeError, match="backward: the graph through Checkpoint was released"):
        y.sum().backward()
    assert fn.calls == 3


def test_without_gradients_it_is_a_plain_call(device):
    t = leaves()
    fn = counting(lambda x: x * t["b"])
    with tg.no_grad():
        assert not tg.checkpoint(fn, t["a"]).requires_grad
    assert not tg.checkpoint(lambda x: x * 2, t["a"].detach()).requires_grad
    assert tg.checkpoint(fn, t["a"]).requires_grad
    assert fn.calls == 2


def test_what_fn_sees_is_not_recorded_the_first_time():
    seen = []
    x = leaves()["a"]
    y = tg.checkpoint(lambda x: seen.append((x * 2).requires_grad) or x * 2, x)
    y.sum().backward()
    assert seen == [False, True]


def test_frozen_inputs_cost_nothing(device):
    """The rules within see which gradients are wanted, as without checkpointing."""
    wanted = []

    class Product(tg.autograd.Function):
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x * w

        def backward(ctx, dy):
            wanted.append(ctx.needs_input_grad)
            x, w = ctx.saved_arrays
            return dy * w, dy * x

    t = leaves(frozen=("b",))
    tg.checkpoint(Product.apply, t["a"], t["b"]).sum().backward()
    y = tg.checkpoint(Product.apply, t["a"], t["a"] * 2)
    tg.autograd.grad(y.sum(), t["a"])
    y = tg.checkpoint(Product.apply, t["a"][:, :3], t["w"][:3, :3])
    tg.autograd.grad(y.sum(), t["w"])
    assert wanted == [(True, False), (True, True), (False, True)]
    assert t["b"].grad is None


def test_hooks_of_a_leaf_see_the_final_gradient_once(device):
    def run(ck):
        t, seen = leaves(), []
        t["w"].register_hook(lambda g: seen.append(g.numpy().copy()))
        t["w"].register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.numpy().copy()))
        loss_of(leaf_inside_and_outside(ck, **t)).backward()
        return seen

    plain, checkpointed = run(call), run(tg.checkpoint)
    assert len(checkpointed) == 2
    np.testing.assert_array_equal(plain, checkpointed)


def test_hooks_of_results_run_once(device):
    """Of one that goes into the function, of one that it closes over, and of one that it gives."""

    def run(ck):
        t, seen = leaves(), []
        x, h = t["a"] * 2, t["b"].exp()
        y = ck(lambda x: (x @ t["w"]) * h, x)
        for result in (x, h, y):
            result.retain_grad()
            result.register_hook(lambda g: seen.append(g.numpy().copy()))
            result.register_hook(lambda g: g * 10)
        y.sum().backward()
        return [*seen, *(r.grad.numpy() for r in (x, h, y)), *(t[n].grad.numpy() for n in "abw")]

    plain, checkpointed = run(call), run(tg.checkpoint)
    assert len(checkpointed) == 9
    for a, b in zip(plain, checkpointed, strict=True):
        np.testing.assert_array_equal(a, b)


def test_grad_through_a_checkpoint(device):
    """With respect to a leaf, to one closed over, to a result before it and to its own output; no .grad changes."""

    def run(ck):
        t = leaves()
        h = t["a"] * 2
        y = ck(lambda x: x.exp() @ t["w"], h)
        found = tg.autograd.grad((y * y).sum(), [t["a"], h, t["w"], y, t["b"]])
        assert all(x.grad is None for x in t.values())
        return found

    plain, checkpointed = run(call), run(tg.checkpoint)
    assert plain[-1] is checkpointed[-1] is None
    for a, b in zip(plain[:-1], checkpointed[:-1], strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_gradients_land_in_the_optimisers_buffer(device):
    def run(ck):
        tg.manual_seed(0)
        model = tg.nn.Sequential(*(tg.nn.Linear(4, 4) for _ in range(3)))
        optimizer = tg.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            x = tg.ones(2, 4)
            for layer in model:
                x = ck(lambda x, layer=layer: layer(x).tanh(), x)
            x.sum().backward()
            assert optimizer.step()
        return [p.numpy() for p in model.parameters()]

    for a, b in zip(run(call), run(tg.checkpoint), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", [tg.float16, tg.bfloat16])
def test_half_parameters_have_float32_gradients(dtype, device):
    w = tg.nn.Parameter(tg.randn(4, 4, dtype=dtype))
    x = tg.randn(3, 4, dtype=dtype)
    grads = []
    for ck in (call, tg.checkpoint):
        w.grad = None
        ck(lambda x: (x @ w).tanh() @ w, x).sum().backward()
        assert w.grad.dtype == tg.float32
        grads.append(w.grad.numpy().copy())
    np.testing.assert_array_equal(*grads)


def test_memory_is_saved():
    """Of eight layers with four activations each, the layers' inputs are kept; one layer at a time is made again."""
    n = 1 << 18
    size = 4 * n  # bytes of one activation

    def layer(x):
        return (x.exp() + 1.0).log().tanh().sin()

    def peak(ck):
        x = tg.zeros(n, device="cpu", requires_grad=True)
        tracemalloc.start()
        h = x
        for _ in range(8):
            h = ck(layer, h)
        kept, _ = tracemalloc.get_traced_memory()
        h.backward(tg.ones(n, device="cpu"))
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return kept / size, most / size

    plain, checkpointed = peak(call), peak(tg.checkpoint)
    assert checkpointed[0] < 8.5 < 24 < plain[0]
    assert checkpointed[1] < 18 < plain[1]


def test_nothing_is_kept_alive():
    """Neither after backward nor where the result is dropped; no reference cycle, so it needs no garbage collector."""
    gc.disable()
    try:
        for backward in (False, True):
            x = tg.ones(3, requires_grad=True) * 2
            reference = weakref.ref(x)
            y = tg.checkpoint(lambda x: x.exp(), x)
            if backward:
                y.sum().backward()
            else:
                del y
            del x
            assert reference() is None
    finally:
        gc.enable()


def test_changes_in_place_before_backward_are_errors(device):
    def change(x):
        with tg.no_grad():
            x += 1

    for name in ("a", "b", "w", "h"):
        t = leaves()
        t["h"] = t["b"].exp()
        y = tg.checkpoint(lambda x, t=t: x @ t["w"] * t["h"] + t["b"], t["a"])
        change(t[name])
        with pytest.raises(RuntimeError, match=r"a tensor that a checkpointed function read \(shape \(\d, 4\)\)"):
            y.sum().backward()
        assert all(t[n].grad is None for n in "abw")


def test_outputs_of_one_memory_know_of_each_others_changes(device):
    """As without checkpointing: one that was left behind by a change of the other is refused."""
    for ck in (call, tg.checkpoint):
        h, part = ck(lambda x: (lambda y: (y, y[1:]))(x * 2), leaves()["a"])
        h *= 2
        with pytest.raises(RuntimeError, match="changed in place through another view"):
            part * part


def test_fn_may_not_change_what_it_reads(device):
    """It would change it a second time in backward."""

    def scaled(x):
        x *= 3
        return x * x

    def through_a_view(x):
        view = x[0]
        view += 1
        return x * x

    for fn in (scaled, through_a_view):
        x = leaves()["a"] * 1
        with pytest.raises(RuntimeError, match=r"checkpoint: fn must leave .* changed one of shape \(3, 4\) in place"):
            tg.checkpoint(fn, x)


def test_fn_must_use_the_same_tensors_again(device):
    """A function made in a loop that looks its layer up when it runs would find the last one in backward."""
    layers = [tg.nn.Linear(4, 4) for _ in range(3)]

    def run(bind):
        x = leaves()["a"]
        for layer in layers:
            fn = (lambda x, layer=layer: layer(x).tanh()) if bind else (lambda x: layer(x).tanh())  # noqa: B023
            x = tg.checkpoint(fn, x)
        x.sum().backward()

    run(bind=True)
    with pytest.raises(RuntimeError, match=r"twice, but did not use a tensor of shape \(4, 4\) again; in a loop, bind"):
        run(bind=False)


def test_a_result_kept_from_the_first_run_is_an_error(device):
    t, kept = leaves(), []

    def fn(x):
        if not kept:
            kept.append(t["w"].exp())
        return x @ kept[0]

    y = tg.checkpoint(fn, t["a"])
    with pytest.raises(RuntimeError, match=r"did not use a tensor of shape \(4, 4\) again"):
        y.sum().backward()


@pytest.mark.parametrize("result", [None, 1.0, [1], ("tensor", 2)], ids=str)
def test_fn_must_give_tensors(result, device):
    def fn(x):
        return (x * 2, result[1]) if isinstance(result, tuple) else result

    with pytest.raises(TypeError, match="checkpoint: fn must give a Tensor or a tuple of Tensors, got"):
        tg.checkpoint(fn, leaves()["a"])


def test_an_error_in_fn_leaves_everything_as_it_was(device):
    a = leaves()["a"]
    fail = True

    def fn(x):
        y = F.dropout(x, 0.5)
        if fail:
            raise KeyError("fn")
        return y * y

    with pytest.raises(KeyError):
        tg.checkpoint(fn, a)
    assert tg.is_grad_enabled()
    fail = False
    y = tg.checkpoint(fn, a)
    fail, state = True, random.default_generator.state_dict()
    with pytest.raises(KeyError):
        y.sum().backward(retain_graph=True)
    assert tg.is_grad_enabled()
    assert random.default_generator.state_dict() == state
    assert a.grad is None
    fail = False
    y.sum().backward()
    np.testing.assert_allclose(a.grad.numpy(), 2 * y.numpy() / np.where(a.numpy() == 0, 1, a.numpy()), rtol=1e-5)


def test_constants_that_fn_reads_may_not_change_before_backward(device):
    """Neither one that it is given nor one that it closes over."""
    for closed_over in (False, True):
        t, mask = leaves(), tg.ones(4)
        fn = (lambda x: x * mask) if closed_over else (lambda x, m: x * m)  # noqa: B023
        y = tg.checkpoint(fn, t["a"], *([] if closed_over else [mask]))
        mask *= 5
        with pytest.raises(
            RuntimeError, match=r"a tensor that a checkpointed function read \(shape \(4,\)\) was changed"
        ):
            y.sum().backward()
