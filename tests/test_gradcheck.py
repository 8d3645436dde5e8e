"""gradcheck accepts right rules and says what is wrong with others."""

import re

import numpy as np
import pytest

import tinygrad_gpu as tg
from tinygrad_gpu.testing import GradcheckError, gradcheck


def leaf(*values, dtype=tg.float64):
    return tg.Tensor(list(values), dtype=dtype, requires_grad=True)


class Product(tg.autograd.Function):
    """a b, with a rule whose gradient of b is off by `error` at element `at`."""

    def forward(ctx, a, b, error=0.0, at=0):
        ctx.save_for_backward(a, b)
        ctx.error, ctx.at = error, at
        return a * b

    def backward(ctx, dy):
        a, b = ctx.saved_arrays
        db = dy * a
        db[ctx.at] += ctx.error
        return dy * b, db


@pytest.mark.parametrize(
    "fn",
    [
        lambda a, b: Product.apply(a, b),
        lambda a, b: (a * b).sum(),
        lambda a, b: (a.exp(), b.sin(), a @ b),
        lambda a, b: [a * 2.0, (a > 1).sum(), b * b],
        lambda a, b: a,
        lambda a, b: tg.ones(3, dtype=tg.float64),
        lambda a, b: a[:0] * b[:0],
    ],
)
def test_right_rules_pass(device, fn):
    assert gradcheck(fn, leaf(1.0, 2.0, 3.0), leaf(-1.0, 0.5, 2.0)) is True


def test_a_wrong_rule_is_named_by_input_element_and_both_values(device):
    a, b = leaf(1.0, 2.0, 3.0), leaf(-1.0, 0.5, 2.0)
    with pytest.raises(GradcheckError) as caught:
        gradcheck(lambda b, a: Product.apply(a, b, error=1.0, at=2).sum(), b, a)
    message = str(caught.value)
    assert message.startswith("gradcheck: input 0, element (2,): backward gives ")
    backward, difference = map(float, re.findall(r"(?:gives|difference) ([-\d.]+)", message))
    assert 1.5 <= difference < 4.5
    assert backward == pytest.approx(difference + 1, abs=1e-6)
    assert "relative error" in message
    with pytest.raises(GradcheckError, match=r"input 1, element \(0,\)"):
        gradcheck(lambda a, b: Product.apply(a, b, error=1e-3), a, b)
    assert gradcheck(lambda a, b: Product.apply(a, b, error=1e-3), a, b, atol=2e-3)
    assert gradcheck(lambda a, b: Product.apply(a, b, error=1e-7), a, b)


def test_inputs_without_a_gradient_are_not_differenced(device):
    a, ids = leaf(1.0, 2.0, 3.0), tg.Tensor([0, 2])
    assert gradcheck(lambda ids, a, scale: a[ids] * scale, ids, a, 2.0)
    frozen = tg.Tensor([1.0, 1.0, 1.0])
    assert gradcheck(lambda a, frozen: Product.apply(a, frozen.to(tg.float64), error=9.0), a, frozen)
    with pytest.raises(GradcheckError, match="input 2, element"):
        gradcheck(lambda x, y, a: Product.apply(x, a, error=1.0), tg.ones(3, dtype=tg.float64), 1, a)


def test_every_axis_is_walked(device):
    x = tg.rand(2, 1, 3, dtype=tg.float64, requires_grad=True)

    class Wrong(tg.autograd.Function):
        def forward(ctx, x):
            return x * 2

        def backward(ctx, dy):
            dx = dy * 2
            dx[1, 0, 2] = 0
            return dx

    with pytest.raises(GradcheckError, match=r"element \(1, 0, 2\): backward gives 0,"):
        gradcheck(Wrong.apply, x)
    assert gradcheck(lambda x: x * x, tg.Tensor(2.0, dtype=tg.float64, requires_grad=True))


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda x: x.detach() * x, "input 0"),
        (lambda x: (x.detach() * 2.0).sum(), "backward gives 0, the central difference"),
        (lambda x: x * float("nan"), "backward gives nan, the central difference nan"),
        (lambda x: x.relu() if (x.data > 0).all() else x * 5.0, "input 0"),
    ],
    ids=["half of the product rule", "no graph", "nan", "a jump"],
)
def test_a_lost_gradient_is_found(fn, message):
    with pytest.raises(GradcheckError, match=message):
        gradcheck(fn, leaf(1e-7, 2.0))


def test_an_unused_input_has_gradient_0(device):
    assert gradcheck(lambda a, b: a * 2.0, leaf(1.0), leaf(1.0))


@pytest.mark.parametrize("view", [lambda a: a, lambda a: a.T, lambda a: a[::-1], lambda a: a[:, ::2]])
def test_inputs_are_as_they_were_afterwards(view):
    array = np.arange(8.0).reshape(2, 4) / 3
    x = tg.Tensor(array, requires_grad=True)
    x.data = view(x.data)
    x.grad = tg.ones(*x.shape)
    before, values = x.data, x.tolist()
    assert gradcheck(lambda x: x.tanh(), x)

    def fail(x):
        if x.tolist() != values:
            raise KeyError("moved")
        return x * 1.0

    with pytest.raises(KeyError):
        gradcheck(fail, x)
    assert x.data is before
    assert x.tolist() == values
    assert x.grad.tolist() == np.ones(x.shape).tolist()


def test_it_works_within_no_grad():
    with tg.no_grad():
        assert gradcheck(lambda x: x.exp(), leaf(1.0))
        assert not tg.is_grad_enabled()


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        (
            (leaf(1.0, dtype=tg.float32),),
            TypeError,
            "gradcheck: input 0 must be float64 to be differenced, got float32",
        ),
        ((1.0, leaf(1.0, dtype=tg.bfloat16)), TypeError, "input 1 must be float64 to be differenced, got bfloat16"),
        ((tg.ones(2, dtype=tg.float64), 3), ValueError, "at least one input must have requires_grad=True"),
        ((), ValueError, "at least one input"),
    ],
)
def test_errors(inputs, error, message):
    with pytest.raises(error, match=message):
        gradcheck(lambda *inputs: inputs[-1] * 2.0, *inputs)
