"""Optimisers: the numbers of their steps, where gradients and masters live, and what a mistake does."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tinygrad_gpu as tg
from tinygrad_gpu import kernel, optim
from tinygrad_gpu.nn import Parameter
from tinygrad_gpu.optim import SGD, AdamW, GradScaler, clip_grad_norm_, constant, cosine_with_warmup, linear

DTYPES = [tg.float64, tg.float32, tg.float16, tg.bfloat16]
HALVES = [tg.float16, tg.bfloat16]
OPTIMISERS = [
    lambda params, **options: AdamW(params, **{"lr": 0.1, **options}),
    lambda params, **options: SGD(params, **{"lr": 0.1, "momentum": 0.9, **options}),
]


def ones(*shape, dtype=tg.float32):
    return Parameter(tg.ones(*shape, dtype=dtype))


def give(p, gradient):
    """Set p.grad to an array, or to one number everywhere."""
    p.grad = tg.Tensor(np.broadcast_to(np.asarray(gradient, np.float64), p.shape), dtype=tg.float64)


def adamw(w, grads, lr, betas, eps, decay, max_norm=None):
    """The weights after AdamW steps with the given gradients, in float64, from the paper's formulas."""
    m = v = np.zeros_like(w)
    for t, g in enumerate(grads, 1):
        g = g if max_norm is None else g * min(1, max_norm / (np.linalg.norm(g) + 1e-6))
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
        w = w - lr * decay * w
        w = w - lr * m / (1 - betas[0] ** t) / (np.sqrt(v / (1 - betas[1] ** t)) + eps)
    return w


def sgd(w, grads, lr, momentum, decay):
    u = np.zeros_like(w)
    for g in grads:
        u = momentum * u + g + decay * w
        w = w - lr * u
    return w


# The numbers


@given(
    size=st.sampled_from([0, 1, 127, 128, 129, 300]),
    lr=st.sampled_from([0.0, 1e-3, 0.1]),
    betas=st.sampled_from([(0.9, 0.999), (0.0, 0.0), (0.5, 0.9)]),
    decay=st.sampled_from([0.0, 0.1]),
    max_norm=st.sampled_from([None, 0.5, 1e6]),
    steps=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_adamw_is_its_formula(size, lr, betas, decay, max_norm, steps, seed):
    rng = np.random.default_rng(seed)
    start, grads = rng.standard_normal(size), rng.standard_normal((steps, size))
    w = Parameter(tg.Tensor(start))
    optimizer = AdamW([w], lr, betas, 1e-8, decay, max_norm)
    for g in grads:
        give(w, g)
        assert optimizer.step()
        assert optimizer.grad_norm == pytest.approx(np.linalg.norm(g))
    expected = adamw(start, grads, lr, betas, 1e-8, decay, max_norm)
    np.testing.assert_allclose(w.numpy(), expected, rtol=1e-12, atol=1e-12)


@given(
    momentum=st.sampled_from([0.0, 0.9]),
    decay=st.sampled_from([0.0, 0.1]),
    steps=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_sgd_is_its_formula(momentum, decay, steps, seed):
    rng = np.random.default_rng(seed)
    start, grads = rng.standard_normal(5), rng.standard_normal((steps, 5))
    w = Parameter(tg.Tensor(start))
    optimizer = SGD([w], 0.1, momentum, decay)
    for g in grads:
        give(w, g)
        optimizer.step()
    np.testing.assert_allclose(w.numpy(), sgd(start, grads, 0.1, momentum, decay), rtol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_three_hundred_steps(dtype, backend):
    """The count and the second moment's correction are exact, in half types too: 1 - 0.999^300 = 0.2593."""
    w = ones(3, dtype=dtype)
    optimizer = AdamW([w], lr=1e-3, weight_decay=0.0)
    for _ in range(300):
        give(w, 0.5)
        optimizer.step()
    state = optimizer.state_dict()["state"][0]
    assert state["step"] == optimizer.steps == 300
    correction = 1 - 0.999**300
    assert correction == pytest.approx(0.2593, abs=5e-5)
    np.testing.assert_allclose(state["exp_avg_sq"].numpy(), 0.25 * correction, rtol=1e-4)
    np.testing.assert_allclose(w.numpy().astype(np.float64), 1 - 300 * 1e-3, rtol=2**-8)  # each step is one of lr


@pytest.mark.parametrize("make", OPTIMISERS)
def test_narrow_types_take_the_steps_of_float64(make, backend):
    """Over groups and buckets, clipped by one norm, with a loss scale and rates that change, some weights left out of
    some steps; and half weights are their rounded masters."""
    dtypes, sizes = (tg.float32, tg.bfloat16, tg.float32, tg.float16, tg.float32), (5, 130, 128, 7, 300)
    rng = np.random.default_rng(0)
    starts = [rng.integers(-16, 16, n) / 8 for n in sizes]  # any type has these
    grads = [[rng.standard_normal(n) for n in sizes] for _ in range(6)]

    def train(dtypes):
        params = [Parameter(tg.Tensor(w, dtype=dtype)) for w, dtype in zip(starts, dtypes, strict=True)]
        optimizer = make([{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:]}], max_grad_norm=1.0)
        norms = []
        for step, gradients in enumerate(grads):
            optimizer.lr = 0.1 / (step + 1)
            optimizer.zero_grad()
            for i, (p, g) in enumerate(zip(params, gradients, strict=True)):
                if (step + i) % 4 != 3:
                    give(p, 1024 * g)
            assert optimizer.step(grad_scale=1024.0)
            norms.append(optimizer.grad_norm)
        state = [optimizer.state_dict()["state"][i] for i in range(5)]
        masters = [entry.get("master", p).numpy() for entry, p in zip(state, params, strict=True)]
        return norms, [entry["step"] for entry in state], masters, params

    *found, masters, params = train(dtypes)
    *expected, exact, _ = train([tg.float64] * 5)
    assert found == [pytest.approx(expected[0], rel=1e-6), expected[1]]
    for p, master, w in zip(params, masters, exact, strict=True):
        np.testing.assert_allclose(master, w, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(p.numpy(), master.astype(p.dtype))


def test_a_step_waits_once_and_at_its_end(kernels, monkeypatch):
    """The host asks for the norm when all launches are under way, two for each run of a bucket."""
    seen, launch, norm = [], kernel.launch, optim._norm
    monkeypatch.setattr(kernel, "launch", lambda what, *arguments: seen.append(what.name) or launch(what, *arguments))
    monkeypatch.setattr(optim, "_norm", lambda totals: seen.append("norm") or norm(totals))
    params = [ones(3), ones(200), ones(5, dtype=tg.bfloat16)]
    optimizer = AdamW(params, max_grad_norm=1.0)
    for p in params:
        give(p, 1.0)
    seen.clear()
    optimizer.step()
    assert seen == ["adamw_square_sum"] * 2 + ["adamw_square_sum_total"] + ["adamw_begin", "adamw"] * 2 + ["norm"]


@pytest.mark.parametrize("make", OPTIMISERS)
def test_a_weight_listed_twice_is_updated_once(make, backend):
    once, twice, grouped = ones(2), ones(2), ones(2)
    optimizers = [make([once]), make([twice, twice]), make([{"params": [grouped]}, {"params": [grouped], "lr": 0.1}])]
    for w, optimizer in zip((once, twice, grouped), optimizers, strict=True):
        give(w, 1.0)
        optimizer.step()
    assert once.tolist() == twice.tolist() == grouped.tolist() != [1, 1]


def test_groups_have_options_of_their_own(device):
    a, b, c = ones(2), ones(2), ones(2)
    optimizer = SGD([{"params": [a], "lr": 1.0}, {"params": b}, {"params": [c], "weight_decay": 1.0}], lr=0.5)
    for w in (a, b, c):
        give(w, 0.25)
    optimizer.step()
    assert [w.tolist()[0] for w in (a, b, c)] == [0.75, 0.875, 0.375]
    assert optimizer.lr == 1.0
    optimizer.lr = 0.25
    assert [group["lr"] for group in optimizer.param_groups] == [0.25] * 3
    optimizer.param_groups[1]["lr"] = 0.0
    for w in (a, b, c):
        give(w, 1.0)
    optimizer.step()
    assert [w.tolist()[0] for w in (a, b, c)] == [0.5, 0.875, 0.03125]


# Clipping


@pytest.mark.parametrize("clip", [True, False], ids=["in_the_step", "before_it"])
@pytest.mark.parametrize(
    ("gradient", "norm", "factor"),
    [
        ([0.0, 0.0, 0.0, 0.0], 0.0, 1.0),
        ([1e20] * 4, 2e20, 0.5e-20),
        ([0.3, 0.0, 0.4, 0.0], 0.5, 1.0),
        ([6.0, 0.0, 8.0, 0.0], 10.0, 0.1),
    ],
)
def test_clipping_to_norm_one(gradient, norm, factor, clip, backend):
    w = ones(4)
    optimizer = SGD([w], lr=1.0, max_grad_norm=1.0 if clip else None)
    give(w, gradient)
    found = clip_grad_norm_([w], 1.0) if not clip else None
    assert optimizer.step()
    assert (optimizer.grad_norm if clip else found) == pytest.approx(norm, rel=1e-6)
    np.testing.assert_allclose(w.numpy(), 1 - factor * np.array(gradient), rtol=2e-6)
    np.testing.assert_allclose(w.grad.numpy(), np.array(gradient) * (1 if clip else factor), rtol=2e-6)


@pytest.mark.parametrize("make", OPTIMISERS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_norm_that_is_not_finite_skips_the_step(make, bad, max_norm, backend):
    a, b = ones(2), ones(3)
    optimizer = make([a, b], max_grad_norm=max_norm)
    give(a, 1.0)
    give(b, 1.0)
    optimizer.step()
    before, weights = optimizer.state_dict(), [a.tolist(), b.tolist()]
    give(b, [1.0, bad, 1.0])
    assert not optimizer.step()
    assert (optimizer.skipped_steps, optimizer.steps) == (1, 1)
    assert not math.isfinite(optimizer.grad_norm)
    assert [a.tolist(), b.tolist()] == weights
    after = optimizer.state_dict()
    assert_same_state({**after, "skipped_steps": 0}, before)
    give(b, 1.0)
    assert optimizer.step()
    assert optimizer.steps == 2


def test_norm_without_gradients_is_zero(backend):
    w = ones(2)
    optimizer = AdamW([w], max_grad_norm=1.0)
    assert optimizer.step()
    assert optimizer.grad_norm == clip_grad_norm_([w], 1.0) == clip_grad_norm_([], 1.0) == 0
    assert w.tolist() == [1, 1]


def test_clip_grad_norm_leaves_what_is_not_finite(backend):
    a, b = ones(1), ones(2)
    give(a, 3.0)
    give(b, [math.nan, 1.0])
    assert math.isnan(clip_grad_norm_(iter([a, b]), 1.0))
    assert a.grad.item() == 3.0
    assert clip_grad_norm_(a, 0.0) == 3.0
    assert a.grad.item() == 0.0


def test_clip_counts_a_weight_once_and_its_change(backend):
    """Of a gradient that a graph has saved, the change in place is noticed."""
    w, scale = ones(1), tg.ones(1, requires_grad=True)
    give(w, 3.0)
    loss = (scale * w.grad).sum()
    assert clip_grad_norm_([w, w], 1.5) == 3.0
    assert w.grad.item() == pytest.approx(1.5, rel=1e-6)
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


# Where gradients live


def test_gradients_are_views_of_one_place(device):
    model = tg.nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.5)
    x = tg.ones(1, 3)
    for _ in range(2):  # the same memory each time
        optimizer.zero_grad()
        assert model.weight.grad is model.bias.grad is None
        model(x).sum().backward()
        for p in model.parameters():
            assert p.grad.tolist() == np.ones(p.shape).tolist()
    first = model.weight.grad
    model(x).sum().backward()  # adds
    assert first.tolist() == [[2.0] * 3] * 2
    first *= 2
    assert model.weight.grad.tolist() == [[4.0] * 3] * 2
    before = model.weight.numpy().copy()
    optimizer.step()
    np.testing.assert_allclose(model.weight.numpy(), before - 2, rtol=1e-6)


def test_assigning_a_gradient_copies_it(device):
    w = ones(2)
    optimizer = SGD([w], lr=1.0)
    g = tg.Tensor([0.25, 0.5])
    w.grad = g
    g *= 100
    assert w.grad.tolist() == [0.25, 0.5]
    w.grad = w.grad * 2
    optimizer.step()
    assert w.tolist() == [0.5, 0.0]


def test_gradients_from_before_the_optimiser_count(device):
    w = ones(2)
    (w * 3).sum().backward()
    old = w.grad
    optimizer = SGD([w], lr=0.25)
    assert w.grad.tolist() == [3, 3]
    (w * 1).sum().backward()
    optimizer.step()
    assert w.tolist() == [0, 0]
    assert old.tolist() == [3, 3]


def test_hooks_see_each_gradient_on_its_way_to_the_buffer(device):
    w = ones(2)
    optimizer = SGD([w], lr=1.0)
    w.register_hook(lambda g: g * 10)
    for _ in range(2):
        w.sum().backward()
    assert w.grad.tolist() == [20, 20]
    optimizer.step()
    assert w.tolist() == [-19, -19]


@pytest.mark.parametrize("make", OPTIMISERS)
def test_no_gradient_means_no_update_and_no_decay(make, backend):
    """In the middle of a buffer, what was left there from an earlier step included."""
    params = [ones(n) for n in (3, 200, 5, 128)]
    optimizer = make(params, weight_decay=0.5)
    for p in params:
        give(p, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    before = [p.numpy().copy() for p in params]
    for i in (0, 3):
        give(params[i], 1.0)
    optimizer.step()
    assert optimizer.grad_norm == pytest.approx(math.sqrt(3 + 128))
    changed = [bool((p.numpy() != w).all()) for p, w in zip(params, before, strict=True)]
    assert changed == [True, False, False, True]
    steps = [entry["step"] for entry in optimizer.state_dict()["state"].values()]
    assert steps == [2, 1, 1, 2]


def test_step_counts_are_per_parameter(device):
    """A weight that joins later starts its moments' correction at 1, whatever lies beside it."""
    a, b = Parameter(tg.ones(2, dtype=tg.float64)), Parameter(tg.ones(2, dtype=tg.float64))
    optimizer = AdamW([a, b], lr=0.1)
    grads = np.random.default_rng(0).standard_normal((4, 2))
    for t, g in enumerate(grads):
        optimizer.zero_grad()
        give(a, g)
        if t % 2:
            give(b, g)
        optimizer.step()
    for w, seen in ((a, grads), (b, grads[1::2])):
        expected = adamw(np.ones(2), seen, 0.1, (0.9, 0.999), 1e-8, 1e-2)
        np.testing.assert_allclose(w.numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", OPTIMISERS)
def test_padding_stays_zero(make, dtype, backend):
    params = [ones(n, dtype=dtype) for n in (1, 127, 128, 0, 129)]
    optimizer = make(params, weight_decay=0.1)
    for _ in range(3):
        for p in params:
            give(p, 1.0)
        assert optimizer.step()
    (bucket,) = optimizer._buckets
    used = np.zeros(bucket.weights.size, bool)
    for part in bucket.parts:
        assert part.start * bucket.weights.itemsize % 256 == 0
        assert not used[part].any()
        used[part] = True
    assert used.sum() == sum(p.size for p in params)
    for flat in (bucket.weights, bucket.masters, bucket.grads, *bucket.state.values()):
        values = tg.Tensor(flat).numpy()
        assert not values[~used].any()
        assert values[used].any()


# Half types


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_small_updates_of_half_weights_add_up(dtype, device):
    """1.0 in bfloat16 has neighbours 1/256 away: without a float32 master a step of 1e-3 would never move it."""
    w = ones(2, dtype=dtype)
    optimizer = SGD([w], lr=1e-3)
    for _ in range(100):
        give(w, 1.0)
        optimizer.step()
    np.testing.assert_allclose(w.numpy().astype(np.float64), 0.9, rtol=2**-8)
    np.testing.assert_allclose(optimizer.state_dict()["state"][0]["master"].numpy(), 0.9, rtol=1e-5)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_weights_have_float32_gradients(dtype, device):
    """They hold a sum that the half type cannot, from backward to the step."""
    w = ones(1, dtype=dtype)
    optimizer = SGD([w], lr=1.0)
    for scale in (1.0, 2.0**-12):
        (w * tg.Tensor([scale], dtype=dtype)).sum().backward()
    assert w.grad.dtype == tg.float32
    assert w.grad.item() == 1 + 2.0**-12
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["master"].item() == -(2.0**-12)
    assert w.item() == -(2.0**-12)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_masters_follow_values_written_between_steps(dtype, device):
    """By load_state_dict and by a change in place; masters of values that stay are not rounded."""
    layer = tg.nn.Linear(2, 1, bias=False).to(dtype)
    optimizer = SGD(layer.parameters(), lr=1e-4)

    def master():
        return optimizer.state_dict()["state"][0]["master"].tolist()[0]

    layer.load_state_dict({"weight": tg.Tensor([[1.0, 2.0]])})
    assert master() == [1, 2]
    give(layer.weight, 1.0)
    optimizer.step()
    assert master() == pytest.approx([0.9999, 1.9999], abs=3e-7)
    with tg.no_grad():
        layer.weight[0, 0] = 3.0
    assert master() == pytest.approx([3.0, 1.9999], abs=3e-7)
    give(layer.weight, 1.0)
    optimizer.step()
    assert master() == pytest.approx([2.9999, 1.9998], abs=3e-7)


def test_dtypes_and_devices_may_be_mixed(backend):
    params = [ones(3, dtype=dtype) for dtype in (*DTYPES, *DTYPES)]
    optimizer = AdamW(params, lr=0.5, weight_decay=0.0, max_grad_norm=100.0)
    for p in params:
        give(p, 1.0)
    assert optimizer.step()
    assert optimizer.grad_norm == pytest.approx(math.sqrt(24))
    for p in params:
        np.testing.assert_allclose(p.numpy().astype(np.float64), 0.5, rtol=1e-2)


# State


def assert_same_state(a, b):
    if isinstance(a, tg.Tensor):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same_state(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same_state(x, y)
    else:
        assert a == b


@pytest.mark.parametrize("order", ["model_first", "optimizer_first"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", OPTIMISERS)
def test_resuming_continues_exactly(make, dtype, order, backend):
    """Six steps in one go, and with all state handed to a new model and optimiser after three: the same bits."""

    def fresh():
        tg.manual_seed(0)
        model = tg.nn.Sequential(tg.nn.Linear(3, 4), tg.nn.ReLU(), tg.nn.Linear(4, 1)).to(dtype)
        weights, biases = ([p for n, p in model.named_parameters() if kind in n] for kind in ("weight", "bias"))
        return model, make([{"params": weights, "weight_decay": 0.1}, {"params": biases}], max_grad_norm=1.0)

    def train(model, optimizer, steps):
        for step in steps:
            optimizer.lr = 0.01 * (step + 1)
            optimizer.zero_grad()
            x = tg.Tensor(np.random.default_rng(step).standard_normal((5, 3)), dtype=dtype)
            (model(x) ** 2).mean().backward()
            assert optimizer.step()

    model, optimizer = fresh()
    train(model, optimizer, range(3))
    weights = {name: t.clone() for name, t in model.state_dict().items()}
    state = optimizer.state_dict()
    train(model, optimizer, range(3, 6))

    again, resumed = fresh()
    loads = [lambda: again.load_state_dict(weights), lambda: resumed.load_state_dict(state)]
    for load in loads if order == "model_first" else loads[::-1]:
        load()
    assert_same_state(resumed.state_dict(), state)
    train(again, resumed, range(3, 6))
    assert_same_state(again.state_dict(), model.state_dict())
    assert_same_state(resumed.state_dict(), optimizer.state_dict())


def test_state_dict_is_a_copy_laid_out_as_pytorchs(backend):
    a, b, frozen = ones(2), ones(3), Parameter(tg.ones(4), requires_grad=False)
    optimizer = AdamW([{"params": [a, frozen]}, {"params": [b], "lr": 0.5}])
    state = optimizer.state_dict()
    assert [group["params"] for group in state["param_groups"]] == [[0, 1], [2]]
    assert sorted(state["state"]) == [0, 2]
    give(a, 1.0)
    optimizer.step()
    assert state["state"][0]["step"] == 0
    assert state["state"][0]["exp_avg"].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["param_groups"][0].update(params=[0]), r"groups must have \[2\] parameters, got \[1\]"),
        (lambda s: s["param_groups"].append(s["param_groups"][0]), r"groups must have \[2\] parameters, got \[2, 2\]"),
        (lambda s: s["param_groups"][0].pop("eps"), "a group needs .*'eps'.*, got"),
        (lambda s: s["param_groups"][0].update(lr=-1.0), "lr must be a finite number of at least 0, got -1.0"),
        (lambda s: s["state"].pop(1), r"parameter 1 needs \['exp_avg', 'exp_avg_sq', 'step'\], got \[\]"),
        (lambda s: s["state"][1].update(master=tg.ones(3)), "parameter 1 needs .*, got .*'master'"),
        (lambda s: s["state"][1].update(exp_avg=tg.ones(2)), r"exp_avg of parameter 1 needs shape \(3,\), got \(2,\)"),
    ],
)
def test_load_state_dict_takes_all_or_nothing(change, message, device):
    optimizer, other = (AdamW([ones(2), ones(3)], lr=lr) for lr in (0.1, 0.2))
    for p in other.param_groups[0]["params"]:
        give(p, 1.0)
    other.step()
    state, before = other.state_dict(), optimizer.state_dict()
    change(state)
    with pytest.raises(ValueError, match=f"AdamW.load_state_dict: {message}"):
        optimizer.load_state_dict(state)
    assert_same_state(optimizer.state_dict(), before)


# Parameters that change


def test_frozen_parameters_are_left_out(device):
    a, b = ones(2), Parameter(tg.ones(2), requires_grad=False)
    optimizer = SGD([a, b], lr=1.0, weight_decay=0.5)
    (a * b).sum().backward()
    optimizer.step()
    assert b.tolist() == [1, 1]
    assert a.tolist() == [-0.5, -0.5]
    a.requires_grad = False  # frozen later: it gets no gradient any more
    optimizer.zero_grad()
    optimizer.step()
    assert a.tolist() == [-0.5, -0.5]
    b.requires_grad = True
    (b * 2).sum().backward()
    with pytest.raises(RuntimeError, match="frozen when the optimiser was made has a gradient now; make a new one"):
        optimizer.step()


@pytest.mark.parametrize("move", [lambda m: m.to(tg.float64), lambda m: SGD(m.parameters(), lr=1.0)])
def test_parameters_that_moved_are_an_error(move, device):
    model = tg.nn.Linear(2, 2)
    optimizer = SGD(model.parameters(), lr=1.0)
    move(model)
    for use in (optimizer.step, optimizer.state_dict):
        with pytest.raises(RuntimeError, match=r"a parameter of shape \(2, 2\) was moved or cast after the optimiser"):
            use()


def test_a_graph_notices_a_step(backend):
    w = ones(2)
    optimizer = SGD([w], lr=1.0)
    loss = (w * w).sum()
    give(w, 1.0)
    optimizer.step()
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


def test_any_floating_leaf_can_be_trained(device):
    """Plain Tensors, without axes or elements, not contiguous; and what the optimiser took has the values it had."""
    leaves = [
        tg.Tensor(2.0, requires_grad=True),
        tg.zeros(0, 3, requires_grad=True),
        tg.Tensor(np.arange(6.0).reshape(2, 3).T, requires_grad=True),
    ]
    before = [leaf.tolist() for leaf in leaves]
    optimizer = SGD(leaves, lr=1.0)
    assert [leaf.tolist() for leaf in leaves] == before
    sum((leaf * leaf).sum() for leaf in leaves).backward()
    optimizer.step()
    for leaf, w in zip(leaves, before, strict=True):
        np.testing.assert_array_equal(leaf.numpy(), -np.array(w).reshape(leaf.shape))


P = ones(2)


@pytest.mark.parametrize("make", [AdamW, SGD])
@pytest.mark.parametrize(
    ("params", "options", "error", "message"),
    [
        ([], {}, ValueError, "needs at least one parameter, got none"),
        (P, {}, TypeError, "params must be an iterable of Tensors or of groups, got Parameter"),
        ({"params": [P]}, {}, TypeError, "params must be an iterable of Tensors or of groups, got dict"),
        ([1.0], {}, TypeError, "parameters must be Tensors, got float"),
        ([P, {"params": [P]}], {}, TypeError, "parameters must be Tensors, got dict"),
        ([{"params": [P]}, P], {}, TypeError, "all groups must be dicts, got Parameter"),
        ([P * 2], {}, ValueError, r"parameters must be floating leaves, got float32 of shape \(2,\)"),
        ([tg.Tensor([1])], {}, ValueError, r"parameters must be floating leaves, got int64 of shape \(1,\)"),
        ([{"lr": 1.0}], {}, ValueError, r"a group needs params and may set lr, .*, got \['lr'\]"),
        ([{"params": [P], "learning_rate": 1.0}], {}, ValueError, "a group needs params and may set lr"),
        (
            [{"params": [P]}, {"params": [P], "weight_decay": 0.5}],
            {},
            ValueError,
            r"a parameter of shape \(2,\) is in two groups with different options",
        ),
        ([P], {"lr": -1.0}, ValueError, "lr must be a finite number of at least 0, got -1.0"),
        ([P], {"lr": math.nan}, ValueError, "lr must be a finite number of at least 0, got nan"),
        ([P], {"weight_decay": math.inf}, ValueError, "weight_decay must be a finite number of at least 0, got inf"),
        ([{"params": [P], "lr": -1.0}], {}, ValueError, "lr must be a finite number of at least 0, got -1.0"),
        ([P], {"max_grad_norm": -1}, ValueError, "max_grad_norm must be positive or None, got -1"),
        ([P], {"max_grad_norm": 0.0}, ValueError, "max_grad_norm must be positive or None, got 0.0"),
    ],
)
def test_errors(make, params, options, error, message):
    with pytest.raises(error, match=f"{make.__name__}: {message}"):
        make(params, **{"lr": 0.1, **options})


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: AdamW([P], betas=(0.9, 1.0)),
            ValueError,
            r"AdamW: betas must be two numbers in \[0, 1\), got \(0.9, 1.0\)",
        ),
        (lambda: AdamW([P], betas=(0.9,)), ValueError, "AdamW: betas must be two numbers"),
        (lambda: AdamW([P], eps=-1e-8), ValueError, "AdamW: eps must be a finite number of at least 0, got -1e-08"),
        (
            lambda: SGD([P], 0.1, momentum=-0.1),
            ValueError,
            "SGD: momentum must be a finite number of at least 0",
        ),
        (lambda: clip_grad_norm_([P], -1), ValueError, "clip_grad_norm_: max_norm must be at least 0, got -1"),
        (lambda: clip_grad_norm_([1.0], 1.0), TypeError, "clip_grad_norm_: params must be Tensors, got float"),
        (lambda: clip_grad_norm_([P], math.nan), ValueError, "clip_grad_norm_: max_norm must be at least 0, got nan"),
        (lambda: SGD([P], 0.1).step(grad_scale=0.0), ValueError, "step: grad_scale must be a positive number, got 0.0"),
        (lambda: setattr(SGD([P], 0.1), "lr", -2), ValueError, "SGD: lr must be a finite number of at least 0, got -2"),
        (lambda: GradScaler(0.0), ValueError, "GradScaler: init_scale is out of range, got 0.0"),
        (lambda: GradScaler(growth_factor=1.0), ValueError, "GradScaler: growth_factor is out of range, got 1.0"),
        (lambda: GradScaler(backoff_factor=1.0), ValueError, "GradScaler: backoff_factor is out of range, got 1.0"),
        (lambda: GradScaler(growth_interval=0), ValueError, "GradScaler: growth_interval is out of range, got 0"),
        (lambda: GradScaler().update(), RuntimeError, "update: call step first"),
        (lambda: cosine_with_warmup(-1, lr=1.0, warmup=0, total=1), ValueError, "cosine_with_warmup: needs 0 <= step"),
        (lambda: linear(0, lr=1.0, warmup=3, total=2), ValueError, "linear: needs .* warmup <= total, got 0, 3, 2"),
        (lambda: constant(0, lr=1.0, warmup=-1), ValueError, "constant: needs"),
    ],
)
def test_more_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


# Loss scaling and schedules


def test_loss_scaling_and_clipping(backend):
    """At a scale of 1024 a norm of 0.5 is not clipped at 1; then an infinity halves the scale and holds all else."""
    w = ones(4)
    optimizer, scaler = SGD([w], lr=1.0, max_grad_norm=1.0), GradScaler(1024.0)

    def step(factor):
        optimizer.lr = linear(optimizer.steps, lr=1.0, warmup=0, total=4)
        optimizer.zero_grad()
        scaler.scale((w * factor).sum()).backward()
        done = scaler.step(optimizer)
        scaler.update()
        return done

    assert step(0.25)
    assert optimizer.grad_norm == pytest.approx(0.5)
    assert w.tolist() == [0.75] * 4
    assert not step(math.inf)
    assert (scaler.get_scale(), optimizer.steps, optimizer.skipped_steps, optimizer.lr) == (512.0, 1, 1, 0.75)
    assert w.tolist() == [0.75] * 4
    assert step(0.25)
    assert optimizer.lr == 0.75
    assert w.tolist() == [0.5625] * 4


def test_scale_grows_after_good_steps(device):
    w = ones(1)
    optimizer, scaler = SGD([w], lr=0.0), GradScaler(8.0, growth_interval=3)
    scales = []
    for gradient in (1.0, 1.0, 1.0, 1.0, math.nan, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0):
        give(w, gradient)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [8, 8, 16, 16, 8, 8, 8, 16, 16, 16, 32]
    again = GradScaler(growth_interval=3)
    again.load_state_dict({"scale": 16.0, "good_steps": 2})
    give(w, 1.0)
    again.step(optimizer)
    again.update()
    assert again.state_dict() == scaler.state_dict() == {"scale": 32.0, "good_steps": 0}


def test_one_bad_optimiser_of_two_lowers_the_scale(device):
    a, b = ones(1), ones(1)
    scaler, one, two = GradScaler(8.0), SGD([a], lr=8.0), SGD([b], lr=8.0)
    give(a, 1.0)
    give(b, math.inf)
    assert (scaler.step(one), scaler.step(two)) == (True, False)
    scaler.update()
    assert (scaler.get_scale(), a.item(), b.item()) == (4.0, 0.0, 1.0)


@pytest.mark.parametrize("schedule", [cosine_with_warmup, linear])
def test_schedules_rise_and_fall(schedule):
    rates = [schedule(s, lr=2.0, warmup=4, total=20, final=0.25) for s in range(30)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[4] == 2.0
    assert all(a > b for a, b in itertools.pairwise(rates[4:21]))
    assert rates[20:] == [0.5] * 10
    assert rates[12] == pytest.approx(1.25)  # half way
    assert schedule(5, lr=1.0, warmup=2, total=2, final=0.5) == 0.5


def test_constant_schedule():
    assert [constant(s, lr=2.0, warmup=4) for s in range(7)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0, 2.0]
    assert constant(0, lr=2.0) == 2.0
