"""The same weights give the same logits, loss, gradients and AdamW steps as a GPT written in PyTorch."""

import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import tinygrad_gpu as tg  # noqa: E402
from tests.peers import torch_gpt  # noqa: E402

BASE = tg.gpt.GPTConfig(vocab_size=23, block_size=9, n_layer=2, n_head=4, n_embd=16)
CONFIGS = {
    "gpt2": {},
    "no_bias": {"bias": False},
    "grouped_queries": {"n_kv_head": 2},
    "one_key_head": {"n_kv_head": 1, "bias": False},
    "post_norm_relu": {"norm_first": False, "activation": "relu"},
    "exact_gelu": {"activation": "gelu"},
    "swiglu": {"activation": "swiglu", "bias": False},
    "post_norm_swiglu_grouped": {"norm_first": False, "activation": "swiglu", "n_kv_head": 2},
}
TOLERANCE = {tg.float64: 1e-10, tg.float32: 1e-5}


@pytest.fixture(params=CONFIGS)
def config(request):
    return dataclasses.replace(BASE, **CONFIGS[request.param])


def pair(config, dtype):
    """Our GPT and PyTorch's, with weights of unit scale (so that every part of the model matters) copied from ours."""
    ours, theirs = tg.gpt.GPT(config).to(dtype), torch_gpt.GPT(config)
    with tg.no_grad():
        for p in ours.parameters():
            p[...] = p + 0.2 * tg.randn(*p.shape, dtype=dtype)
    theirs.to(getattr(torch, dtype.name))
    theirs.load_state_dict({name: torch.tensor(t.numpy()) for name, t in ours.state_dict().items()})
    return ours, theirs


def batch(step=0):
    """ids and targets (3, 7); some targets are ignored."""
    rng = np.random.default_rng(step)
    ids, targets = rng.integers(0, BASE.vocab_size, (2, 3, 7))
    targets[rng.random(targets.shape) < 0.2] = -100
    return ids, targets


def assert_close(ours, theirs, tolerance, what):
    np.testing.assert_allclose(ours.numpy(), theirs.detach().numpy(), rtol=tolerance, atol=tolerance, err_msg=what)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_logits_loss_and_all_gradients(config, dtype, device):
    ours, theirs = pair(config, dtype)
    ids, targets = batch()
    assert_close(ours(tg.Tensor(ids)), theirs(torch.tensor(ids)), TOLERANCE[dtype], "logits")

    loss, expected = (
        ours(tg.Tensor(ids), tg.Tensor(targets)),
        torch_gpt.loss(theirs, *map(torch.tensor, (ids, targets))),
    )
    assert_close(loss, expected, TOLERANCE[dtype], "loss")
    loss.backward()
    expected.backward()
    parameters = dict(theirs.named_parameters())
    assert parameters.keys() == dict(ours.named_parameters()).keys()
    for name, p in ours.named_parameters():
        assert_close(p.grad, parameters[name].grad, TOLERANCE[dtype], name)


def groups(model):
    """Matrices decay, vectors do not and learn faster."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0, "lr": 3e-3},
    ]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_ten_adamw_steps(config, dtype, device):
    # The gradient of a key's bias is 0 but for rounding; eps keeps Adam from blowing that up to a step of size lr.
    options = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8 if dtype == tg.float64 else 1e-4}
    ours, theirs = pair(config, dtype)
    optimizer = tg.optim.AdamW(groups(ours), max_grad_norm=0.5, **options)
    peer = torch.optim.AdamW(groups(theirs), **options)
    clipped = 0
    for step in range(10):
        ids, targets = batch(step)
        optimizer.zero_grad()
        loss = ours(tg.Tensor(ids), tg.Tensor(targets))
        loss.backward()
        assert optimizer.step()

        peer.zero_grad()
        expected = torch_gpt.loss(theirs, torch.tensor(ids), torch.tensor(targets))
        expected.backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        peer.step()

        assert_close(loss, expected, TOLERANCE[dtype], f"loss of step {step}")
        assert optimizer.grad_norm == pytest.approx(norm.item(), rel=TOLERANCE[dtype])
        clipped += optimizer.grad_norm > 0.5
    assert clipped
    for name, p in theirs.named_parameters():
        assert_close(dict(ours.named_parameters())[name], p, TOLERANCE[dtype], name)
    state, expected = optimizer.state_dict()["state"], peer.state_dict()["state"]
    for number, entry in state.items():
        assert entry["step"] == expected[number]["step"] == 10
        for key in ("exp_avg", "exp_avg_sq"):
            assert_close(entry[key], expected[number][key], TOLERANCE[dtype], f"{key} of parameter {number}")
