"""Optimisers, clipping, loss scaling and schedules, step by step against PyTorch's."""

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import tinygrad_gpu as tg  # noqa: E402

SHAPES = [(5, 4), (4,), (130,), ()]
TOLERANCE = {tg.float64: 1e-12, tg.float32: 1e-6}


def pair(dtype):
    """The same parameters in both libraries."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape).astype(dtype) for shape in SHAPES]
    return [tg.nn.Parameter(tg.Tensor(a)) for a in arrays], [torch.nn.Parameter(torch.tensor(a)) for a in arrays]


def groups(params, options):
    """Two groups, the second with options of its own."""
    return [{"params": params[:2]}, {"params": params[2:], **options}]


def give(ours, theirs, step, scale=1.0):
    """New gradients each step; now and then a parameter has none."""
    rng = np.random.default_rng(step)
    for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
        g = (scale * rng.standard_normal(p.shape)).astype(p.dtype)
        missing = (step + i) % 4 == 3
        p.grad, q.grad = (None, None) if missing else (tg.Tensor(g), torch.tensor(g))


def assert_close(ours, theirs, dtype, what):
    tolerance = TOLERANCE[dtype]
    np.testing.assert_allclose(ours.numpy(), theirs.detach().numpy(), rtol=tolerance, atol=tolerance, err_msg=what)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("name", "options", "second"),
    [
        ("AdamW", {}, {}),
        (
            "AdamW",
            {"lr": 0.1, "betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.3},
            {"lr": 0.01, "weight_decay": 0.0},
        ),
        ("AdamW", {"betas": (0.0, 0.0)}, {"betas": (0.9, 0.9), "eps": 0.1}),
        ("SGD", {"lr": 0.1}, {}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}, {"momentum": 0.0}),
        ("SGD", {"lr": 0.1, "weight_decay": 0.1}, {"weight_decay": 0.0, "momentum": 0.5}),
    ],
)
def test_steps(name, options, second, dtype, device):
    ours, theirs = pair(dtype)
    optimizer = getattr(tg.optim, name)(groups(ours, second), **options)
    peer = getattr(torch.optim, name)(groups(theirs, second), **options)
    for step in range(9):
        if step == 5:  # in the midst of training
            optimizer.param_groups[0]["lr"] = peer.param_groups[0]["lr"] = 0.05
        give(ours, theirs, step)
        assert optimizer.step()
        peer.step()
        for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            assert_close(p, q, dtype, f"parameter {i} after step {step}")
    state, expected = optimizer.state_dict()["state"], peer.state_dict()["state"]
    for i in range(len(SHAPES)):
        for key, value in expected.get(i, {}).items():
            if value is not None:  # PyTorch has no buffer of a momentum of 0
                found = tg.Tensor(state[i][key]) if key == "step" else state[i][key]
                assert_close(found, value, dtype, f"{key} of parameter {i}")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("max_norm", [0.0, 0.1, 1.0, 1e6, math.inf])
def test_clip_grad_norm(max_norm, dtype, device):
    ours, theirs = pair(dtype)
    for step in range(4):
        give(ours, theirs, step, scale=10.0**-step)
        found = tg.optim.clip_grad_norm_(ours, max_norm)
        expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
        assert found == pytest.approx(expected.item(), rel=1e-6)
        for p, q in zip(ours, theirs, strict=True):
            assert (p.grad is None) == (q.grad is None)
            if p.grad is not None:
                assert_close(p.grad, q.grad, dtype, f"step {step}")


def test_grad_scaler(device):
    """The same scales, skipped steps and weights, with infinities now and then."""
    options = {"init_scale": 64.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 2}
    ours, theirs = pair(tg.float32)
    optimizer, peer = tg.optim.SGD(ours, lr=0.1), torch.optim.SGD(theirs, lr=0.1)
    scaler, peer_scaler = tg.optim.GradScaler(**options), torch.amp.GradScaler("cpu", **options)
    factors = [1.0, 1.0, 1.0, math.inf, 1.0, math.nan, math.inf, 1.0, 1.0, 1.0, 1.0, 1.0]
    for step, factor in enumerate(factors):
        optimizer.zero_grad()
        scaler.scale(sum((p * p).sum() for p in ours) * factor).backward()
        assert scaler.step(optimizer) == math.isfinite(factor)
        scaler.update()

        peer.zero_grad()
        peer_scaler.scale(sum((q * q).sum() for q in theirs) * factor).backward()
        peer_scaler.step(peer)
        peer_scaler.update()

        assert scaler.get_scale() == peer_scaler.get_scale(), step
        for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            assert_close(p, q, tg.float32, f"parameter {i} after step {step}")


def rates(make, steps):
    """What a PyTorch scheduler gives for an optimiser of rate 2.0."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    scheduler, found = make(optimizer), []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def warmed(after, warmup=5):
    """A linear rise to the full rate, reached in the last of `warmup` steps, and then another schedule."""
    schedulers = torch.optim.lr_scheduler

    def make(optimizer):
        rise = schedulers.LinearLR(optimizer, 1 / warmup, 1.0, warmup - 1)
        return schedulers.SequentialLR(optimizer, [rise, after(optimizer)], [warmup])

    return make


def test_schedules():
    schedulers = torch.optim.lr_scheduler
    table = [
        (tg.optim.cosine_with_warmup, lambda o: schedulers.CosineAnnealingLR(o, 15, eta_min=0.5), 20),
        (tg.optim.linear, lambda o: schedulers.LinearLR(o, 1.0, 0.25, 15), 30),
    ]
    for ours, after, steps in table:  # a cosine of PyTorch's rises again after its end
        found = [ours(step, lr=2.0, warmup=5, total=20, final=0.25) for step in range(steps)]
        np.testing.assert_allclose(found, rates(warmed(after), steps), rtol=1e-12)
    found = [tg.optim.constant(step, lr=2.0, warmup=5) for step in range(20)]
    np.testing.assert_allclose(found, rates(warmed(lambda o: schedulers.ConstantLR(o, 1.0)), 20), rtol=1e-12)
