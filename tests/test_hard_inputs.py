"""Inputs that broke other libraries, on the kernels, in each dtype that these compute in: the host build with warps of
32 and of 64 and every access checked, and a GPU where there is one. Expected values are NumPy's, in float64."""

import math

import numpy as np
import pytest

import tinygrad_gpu as tg
import tinygrad_gpu.functional as F
from tests.ops.helpers import ROUNDING, assert_near, gradients, leaf, poisoned, returned_by
from tinygrad_gpu.device import array_module
from tinygrad_gpu.ops import gemm
from tinygrad_gpu.ops import linear_cross_entropy as fused

each_dtype = pytest.mark.parametrize("dtype", ROUNDING, ids=str)


def leaves(dtype, *shapes):
    """Leaves of each shape, and their values in float64."""
    found = [leaf(np.random.default_rng(i).uniform(-1, 1, s), dtype=dtype) for i, s in enumerate(shapes)]
    return found, [values(x) for x in found]


def values(x):
    return x.numpy().astype(np.float64)


def near(found, exact, dtype, roundings=4, size=None):
    """To a few roundings in `dtype` of what is largest, or of a number of that size."""
    bound = roundings * ROUNDING[dtype]
    assert_near(values(found), exact, rtol=bound, atol=bound * (abs(exact).max() if size is None else size))


def softmax(z):
    p = np.exp(z - z.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def normalise(x, eps=1e-5):
    """Rows of mean 0 and variance 1, and what they were multiplied with."""
    x = x - x.mean(-1, keepdims=True)
    rstd = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    return x * rstd, rstd


def cross_entropy(z, t):
    """The losses of rows of scores, and their gradient."""
    p, each = softmax(z), np.arange(len(z))
    losses = -np.log(p[each, t])
    p[each, t] -= 1
    return losses, p


@each_dtype
def test_a_bias_is_added_once(kernels, dtype):
    x, w = tg.zeros(1, 8, dtype=dtype), tg.ones(5, 8, dtype=dtype)
    loss, db = gradients(lambda b: F.linear_cross_entropy(x, w, tg.Tensor([0]), b), leaf([7, 0, 0, 0, 0], dtype=dtype))
    assert loss.item() == pytest.approx(0.003641, abs=1e-6)
    near(db, cross_entropy(np.float64([[7, 0, 0, 0, 0]]), [0])[1][0], dtype, size=1)  # p - 1 where p is nearly 1


@each_dtype
@pytest.mark.parametrize("trunk", [True, False])
@pytest.mark.parametrize("head", [True, False])
def test_only_what_trains_costs_work(kernels, monkeypatch, dtype, trunk, head):
    """A frozen trunk with a trainable head gets dW; products and gradients that nobody needs are not made."""
    (x, gain, w), (_, gain_exact, w_exact) = leaves(dtype, (6, 8), (8,), (11, 8))
    x.requires_grad, gain.requires_grad, w.requires_grad = False, trunk, head
    t, products, product = np.arange(6), [], fused.product
    monkeypatch.setattr(fused, "product", lambda *a, **k: products.append(1) or product(*a, **k))
    returned = returned_by(monkeypatch, fused.LinearCrossEntropy)
    h = F.layer_norm(x, gain)
    loss = F.linear_cross_entropy(h, w, tg.Tensor(t), reduction="sum", memory_budget=10**6)
    assert loss.requires_grad == (trunk or head)
    if trunk or head:
        loss.backward()
        assert [g is not None for g in returned] == [trunk, head, False, False, False]
    assert len(products) == 1 + trunk + head
    assert [a.grad is not None for a in (x, gain, w)] == [False, trunk, head]
    dz = cross_entropy(values(h) @ w_exact.T, t)[1]
    if trunk:
        near(gain.grad, (dz @ w_exact * values(h) / gain_exact).sum(0), dtype, 8)
    if head:
        near(w.grad, dz.T @ values(h), dtype)


@each_dtype
def test_a_loss_of_probabilities_leaves_them_alone(kernels, dtype):
    """Their other use sees them as they were, in backward too; a head of ones on its diagonal hands them on."""
    (a,), (a_exact,) = leaves(dtype, (3, 8))
    t, eye = np.array([7, 0, 2]), tg.Tensor(np.eye(8), dtype=dtype)
    p = softmax(a_exact)
    dp = cross_entropy(p, t)[1] / 3 + 0.2 * p
    for loss in (F.cross_entropy, lambda p, t: F.linear_cross_entropy(p, eye, t).to(dtype)):
        a.grad, found = None, a.softmax()
        before = values(found)
        (loss(found, tg.Tensor(t)) + 0.1 * (found * found).sum()).backward()
        assert (values(found) == before).all()
        near(a.grad, p * (dp - (p * dp).sum(-1, keepdims=True)), dtype, 8)


FAR = {
    "linear_cross_entropy": lambda x, w, t: F.linear_cross_entropy(x, w, t, reduction="none"),
    "linear": lambda x, w, t: F.linear(x, w),
    "softmax": lambda x, w, t: x.softmax(),
    "layer_norm": lambda x, w, t: F.layer_norm(x, w[0]),
}


@pytest.mark.parametrize("name", FAR)
def test_rows_millions_of_elements_apart(kernels, name):
    """The last, which begins beyond 2^31 elements, is as that row alone."""
    n, stride = (2100, 2**20) if kernels == "cuda" else (40, 2**26)
    (x, w), _ = leaves(tg.float16, (n, 8), (11, 8))
    t, last = tg.Tensor(np.arange(n) % 8), leaf(x.numpy()[-1:])
    far = array_module(x.data).zeros((n, stride), np.float16)[:, :8]
    far[...] = x.data
    x.data = far
    found, alone = (gradients(lambda x, t=t: FAR[name](x, w, t), x) for x, t in ((x, t), (last, t[-1:])))
    for a, b in zip(found, alone, strict=True):
        near(a[-1:], values(b), tg.float16)


@each_dtype
def test_strided_inputs_and_an_upstream_gradient_of_stride_0(kernels, dtype):
    (base, w), (_, w_exact) = leaves(dtype, (6, 16), (11, 8))
    t, x = np.arange(12) % 11, values(base)[:, ::2]
    losses = F.linear_cross_entropy(base[:, ::2], w, tg.Tensor(t)[::2], reduction="none")
    losses.backward(tg.Tensor(2.0, dtype=losses.dtype).expand(6))
    exact, dz = cross_entropy(x @ w_exact.T, t[::2])
    near(losses, exact, tg.float32, 8)
    near(base.grad[:, ::2], 2 * dz @ w_exact, dtype)
    near(w.grad, 2 * dz.T @ x, dtype)
    assert (values(base.grad[:, 1::2]) == 0).all()


@each_dtype
def test_an_odd_vocabulary(kernels, monkeypatch, dtype):
    """Targets in the last columns of 50,257, where vectors end: the same finite results every time. The products, which
    other tests here have, are NumPy's on the host build."""
    if kernels != "cuda":
        monkeypatch.setattr(gemm, "pick", lambda x, mathematics, kernels: mathematics)
    v, results = 50257, []
    arrays, exact = leaves(dtype, (3, 8), (v, 8), (v,))
    t = np.array([v - 1, v - 2, v - 5])
    for _ in range(1000 if kernels == "cuda" else 3):
        x, w, b = (leaf(a.data) for a in arrays)
        found = gradients(lambda x, w, b: F.linear_cross_entropy(x, w, tg.Tensor(t), b), x, w, b)
        results.append([float(abs(a).sum().item()) for a in found])
    assert all(r == results[0] for r in results)
    losses, dz = cross_entropy(exact[0] @ exact[1].T + exact[2], t)
    assert found[0].item() == pytest.approx(losses.mean(), rel=1e-6)
    for a, b in zip(found[1:], (dz @ exact[1], dz.T @ exact[0], dz.sum(0)), strict=True):
        near(a, b / 3, dtype)


@each_dtype
def test_a_head_tied_to_the_embedding(kernels, dtype):
    """The gradient of the weight holds what reaches it as the table and what reaches it as the head."""
    (w,), (exact,) = leaves(dtype, (11, 8))
    ids, t = np.array([0, 2, 2, 10]), np.array([2, 1, 0, 10])
    _, dw = gradients(lambda w: F.linear_cross_entropy(F.embedding(tg.Tensor(ids), w), w, tg.Tensor(t)), w)
    dz = cross_entropy(exact[ids] @ exact.T, t)[1] / 4
    head, table = dz.T @ exact[ids], np.zeros_like(exact)
    np.add.at(table, ids, dz @ exact)
    near(dw, head + table, dtype)


@each_dtype
def test_a_query_that_sees_no_key(kernels, dtype):
    """Of five causal queries over two keys the first three: output and gradient are 0, the others' as without them."""
    (q, k, v), (q_exact, k_exact, v_exact) = leaves(dtype, *[(1, 2, n, 4) for n in (5, 2, 2)])
    y, dq, dk, dv = gradients(lambda *x: F.scaled_dot_product_attention(*x, is_causal=True), q, k, v)
    assert not values(y)[:, :, :3].any()
    assert not values(dq)[:, :, :3].any()
    seen = q_exact[:, :, 3:]
    p = softmax(np.where([[True, False], [True, True]], seen @ k_exact.swapaxes(-1, -2) / 2, -math.inf))
    dp = v_exact.sum(-1)[:, :, None]  # the gradient of the output is 1 everywhere
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / 2
    near(y[:, :, 3:], p @ v_exact, dtype)
    near(dq[:, :, 3:], ds @ k_exact, dtype, 8)
    near(dk, ds.swapaxes(-1, -2) @ seen, dtype, 8)
    near(dv, np.broadcast_to(p.sum(-2)[..., None], dv.shape), dtype)


ROWS = {  # an op on rows of 3, and its values
    "softmax": (tg.Tensor.softmax, softmax),
    "layer_norm": (F.layer_norm, lambda x: normalise(x)[0]),
}


@pytest.mark.parametrize("name", ROWS)
def test_more_rows_than_a_grid_has_in_y(kernels, name):
    """And than four times as many, on a GPU, where a block has some: the last is as that row alone."""
    n = 2**18 + 1 if kernels == "cuda" else 5001
    op, exact = ROWS[name]
    (x,), (rows,) = leaves(tg.float16, (n, 3))
    cotangent = np.broadcast_to([1, 2, 0], (n, 3))
    y, dx = gradients(op, x, cotangent=cotangent)
    near(y, exact(rows), tg.float16)
    alone = gradients(op, leaf(x.numpy()[-1:]), cotangent=cotangent[-1:])
    for a, b in zip((y, dx), alone, strict=True):
        assert (values(a[-1:]) == values(b)).all()


@each_dtype
def test_a_product_over_nothing(kernels, dtype):
    """Zeros, in memory that held something too, and gradients with no elements."""
    (a, b), _ = leaves(dtype, (3, 0), (0, 4))
    out = tg.full((3, 4), 7.0, dtype=dtype)
    gemm.product(a.data, b.data, out=out.data)
    with poisoned(array_module(a.data)):
        y, da, db = gradients(tg.matmul, a, b)
    assert not values(out).any()
    assert not values(y).any()
    assert (y.shape, da.shape, db.shape) == ((3, 4), (3, 0), (0, 4))


@each_dtype
def test_huge_gradients_are_clipped_before_they_are_squared(kernels, dtype):
    """Four of 1e20: a norm of 2e20, and moments of gradients of 1/2."""
    w = tg.nn.Parameter(tg.ones(4, dtype=dtype))
    optimizer = tg.optim.AdamW([w], lr=0.5, weight_decay=0.0, max_grad_norm=1.0)
    w.grad = tg.full((4,), 1e20, dtype=tg.float32)
    assert optimizer.step()
    assert optimizer.grad_norm == pytest.approx(2e20)
    state = optimizer.state_dict()["state"][0]
    assert state["exp_avg"].tolist() == pytest.approx([0.05] * 4)
    assert state["exp_avg_sq"].tolist() == pytest.approx([0.00025] * 4)
    near(w, np.full(4, 0.5), dtype)


@pytest.mark.parametrize(("n", "dtype"), [(33, tg.float16), (64, tg.float32), (65, tg.bfloat16)], ids=str)
def test_sums_about_the_width_of_a_warp(kernels, n, dtype):
    """Of 32 lanes and of 64, along rows and down columns: each element counts, once."""
    (x, gain, h, w), (x_exact, g, h_exact, w_exact) = leaves(dtype, (3, n), (n,), (2, 8), (n, 8))
    y, dx, dgain = gradients(F.layer_norm, x, gain)
    hat, rstd = normalise(x_exact)
    near(y, hat * g, dtype)
    near(dx, rstd * (g - g.mean() - hat * (g * hat).mean(-1, keepdims=True)), dtype)
    near(dgain, hat.sum(0), dtype)
    near(tg.Tensor(gemm.column_sum(x.data.T)), x_exact.sum(1), tg.float32)
    t = np.array([0, n - 1])
    found = gradients(lambda h, w: F.linear_cross_entropy(h, w, tg.Tensor(t), reduction="none"), h, w)
    losses, dz = cross_entropy(h_exact @ w_exact.T, t)
    near(found[0], losses, tg.float32)
    near(found[1], dz @ w_exact, dtype)
    near(found[2], dz.T @ h_exact, dtype)
