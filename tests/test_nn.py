"""Modules: how parameters are found, saved, loaded and moved; the layers' starts, shapes and errors."""

import copy
import math

import numpy as np
import pytest

import tinygrad_gpu as tg
import tinygrad_gpu.functional as F
from tinygrad_gpu import nn


class Net(nn.Module):
    """Attributes of every kind: parameters, layers, a list, a tied weight, None, and things that are no parameters."""

    def __init__(self):
        self.scale = nn.Parameter(tg.ones(2))
        self.embed = nn.Embedding(5, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4, bias=False), nn.Dropout(0.5))])
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.bias = None
        self.mask = tg.ones(3)
        self.name = "net"


PATHS = ["scale", "embed.weight", "layers.0.weight", "layers.0.bias", "layers.1.0.weight"]
TIED = "head.weight"


@pytest.fixture
def net(device):
    return Net()


def values(module):
    return {name: t.numpy().copy() for name, t in module.state_dict().items()}


def test_parameters_come_once_in_the_order_they_were_set(net):
    assert [name for name, _ in net.named_parameters()] == PATHS
    assert [id(p) for p in net.parameters()] == [id(p) for _, p in net.named_parameters()]
    assert net.num_parameters() == 2 + 20 + 16 + 4 + 16


def test_state_dict_has_tied_weights_under_each_path_and_shares_memory(net):
    state = net.state_dict()
    assert sorted(state) == sorted([*PATHS, TIED])
    assert not any(t.requires_grad for t in state.values())
    state["scale"][...] = 7.0
    assert net.scale.tolist() == [7, 7]


def test_a_list_module_keeps_the_parameters_that_a_subclass_sets(device):
    class Scaled(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(2, 2, bias=False))
            self.gain = nn.Parameter(tg.ones(1))

        def forward(self, x):
            return super().forward(x) * self.gain

    module = Scaled()
    assert sorted(module.state_dict()) == ["0.weight", "gain"]
    module(tg.ones(1, 2)).sum().backward()
    assert module.gain.grad is not None


def test_load_state_dict_copies_and_casts(net):
    other = Net()
    net.load_state_dict({name: t.numpy().astype(np.float64) for name, t in other.state_dict().items()})
    for name, value in values(other).items():
        np.testing.assert_array_equal(net.state_dict()[name].numpy(), value)
    assert net.scale.dtype == tg.float32
    with tg.no_grad():
        other.scale += 1
    assert net.scale.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda s: s.pop("scale"), ValueError, r"missing \['scale'\], unknown nothing"),
        (lambda s: s.update(extra=s["scale"]), ValueError, r"missing nothing, unknown \['extra'\]"),
        (
            lambda s: s.update({"layers.1.0.weight": tg.ones(4, 5)}),
            ValueError,
            r"layers.1.0.weight .*\(4, 4\), got \(4, 5\)",
        ),
        (lambda s: s.update({"head.weight": [1.0]}), TypeError, "head.weight must be a Tensor or an array, got list"),
        (lambda s: s.update({"head.weight": np.full((5, 4), "a")}), TypeError, "load_state_dict: head.weight: dtype"),
        (
            lambda s: s.update({"head.weight": np.ones((5, 4), complex)}),
            TypeError,
            "load_state_dict: head.weight: dtype",
        ),
    ],
)
def test_load_state_dict_takes_all_or_nothing(net, change, error, message):
    before, state = values(net), Net().state_dict()
    change(state)
    with pytest.raises(error, match=message):
        net.load_state_dict(state)
    for name, value in before.items():
        np.testing.assert_array_equal(net.state_dict()[name].numpy(), value)


def test_a_graph_notices_that_weights_were_loaded(net):
    loss = (F.linear(tg.ones(1, 4, requires_grad=True), net.head.weight) ** 2).sum()
    net.load_state_dict(Net().state_dict())
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


def test_train_and_eval_reach_every_module(net):
    dropout = net.layers[1][1]
    assert net.eval() is net
    assert not any(module.training for module in net.modules())
    assert dropout(tg.ones(50)).tolist() == [1.0] * 50
    net.train()
    assert set(dropout(tg.ones(50)).tolist()) == {0.0, 2.0}


@pytest.mark.parametrize("dtype", [tg.float64, tg.float16, tg.bfloat16])
def test_to_casts_every_parameter_and_keeps_ties(net, dtype):
    before = values(net)
    assert net.to(dtype) is net
    assert {p.dtype for p in net.parameters()} == {dtype}
    assert net.head.weight is net.embed.weight
    for name, value in before.items():
        np.testing.assert_array_equal(net.state_dict()[name].numpy(), value.astype(dtype))
    wide = tg.float64 if dtype == tg.float64 else tg.float32
    net.head(tg.ones(1, 4, dtype=dtype)).sum().backward()
    assert net.head.weight.grad.dtype == wide  # of a half parameter it is float32


@pytest.mark.parametrize("target", [tg.int64, tg.bool, "float8", 3, "tpu", "cpu:0"])
def test_to_refuses_what_cannot_hold_parameters(net, target):
    before = values(net)
    with pytest.raises((TypeError, ValueError), match=r"^to: "):
        net.to(target)
    for name, value in before.items():
        np.testing.assert_array_equal(net.state_dict()[name].numpy(), value)


def test_to_where_it_is_already_changes_nothing(device):
    """An optimiser that owns the parameters goes on owning them, and their gradients."""
    layer = nn.Linear(2, 2, bias=False)
    optimizer = tg.optim.SGD(layer.parameters(), lr=1.0)
    before = layer.weight.numpy().copy()
    layer(tg.ones(1, 2)).sum().backward()
    layer.to(device).to(tg.float32)
    optimizer.step()
    np.testing.assert_array_equal(layer.weight.numpy(), before - 1)


def test_deepcopy_is_independent_and_keeps_ties(net):
    twin = copy.deepcopy(net)
    assert twin.head.weight is twin.embed.weight
    assert [name for name, _ in twin.named_parameters()] == PATHS
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in twin.parameters())
    with tg.no_grad():
        for p in twin.parameters():
            p += 1
    for name, value in values(net).items():
        np.testing.assert_array_equal(twin.state_dict()[name].numpy(), value + 1)


def test_deepcopy_leaves_the_optimiser_behind(device):
    layer = nn.Linear(2, 2, bias=False)
    optimizer = tg.optim.SGD(layer.parameters(), lr=1.0)
    twin = copy.deepcopy(layer)
    twin(tg.ones(1, 2)).sum().backward()
    assert layer.weight.grad is None
    before = layer.weight.numpy().copy()
    optimizer.step()
    np.testing.assert_array_equal(layer.weight.numpy(), before)


def test_zero_grad(net):
    net.head(tg.ones(1, 4)).sum().backward()
    assert net.embed.weight.grad is not None
    net.zero_grad()
    assert all(p.grad is None for p in net.parameters())


def test_frozen_parameters_get_no_gradient(net):
    net.embed.weight.requires_grad = False
    y = net.layers[0](net.embed(tg.Tensor([1]))).sum()
    y.backward()
    assert net.embed.weight.grad is None
    assert net.layers[0].weight.grad is not None


def test_module_list(device):
    layers = nn.ModuleList(nn.Linear(n, n) for n in (1, 2))
    layers.append(nn.Linear(3, 3))
    assert len(layers) == 3
    assert [layer.bias.size for layer in layers] == [1, 2, 3]
    assert layers[-1] is layers[2]
    assert "2.weight" in layers.state_dict()


def test_repr_shows_the_tree(net):
    assert repr(net).splitlines()[:4] == ["Net(", "  embed: Embedding()", "  layers: ModuleList(", "    0: Linear()"]


# Layers


@pytest.mark.parametrize(
    ("layer", "shape", "check"),
    [
        (lambda: nn.Linear(64, 500).weight, (500, 64), ("uniform", 1 / 8)),
        (lambda: nn.Linear(64, 5000).bias, (5000,), ("uniform", 1 / 8)),
        (lambda: nn.Embedding(300, 100).weight, (300, 100), ("normal", 1.0)),
        (lambda: nn.LayerNorm(7).weight, (7,), ("constant", 1.0)),
        (lambda: nn.LayerNorm(7).bias, (7,), ("constant", 0.0)),
        (lambda: nn.RMSNorm(7).weight, (7,), ("constant", 1.0)),
    ],
)
def test_initial_weights(device, layer, shape, check):
    p = layer()
    assert p.shape == shape
    assert p.dtype == tg.float32
    assert p.requires_grad
    kind, size = check
    w = p.numpy().astype(np.float64)
    if kind == "constant":
        assert (w == size).all()
        return
    deviation = size / math.sqrt(3) if kind == "uniform" else size
    assert abs(w.mean()) < 5 * deviation / math.sqrt(w.size)
    assert w.std() == pytest.approx(deviation, rel=5 / math.sqrt(w.size))
    assert (abs(w) <= size).all() == (kind == "uniform")


def test_the_same_seed_gives_the_same_weights(device):
    states = []
    for seed in (1, 1, 2):
        tg.manual_seed(seed)
        states.append(values(Net()))
    assert all((states[0][name] == states[1][name]).all() for name in states[0])
    assert (states[0]["embed.weight"] != states[2]["embed.weight"]).all()


@pytest.mark.parametrize(
    ("layer", "x", "shape"),
    [
        (lambda: nn.Linear(4, 3), (2, 5, 4), (2, 5, 3)),
        (lambda: nn.Linear(4, 3, bias=False), (4,), (3,)),
        (lambda: nn.LayerNorm(4, bias=False), (2, 4), (2, 4)),
        (lambda: nn.RMSNorm(4), (2, 4), (2, 4)),
        (lambda: nn.GELU(), (2, 4), (2, 4)),
        (lambda: nn.GELU("tanh"), (2, 4), (2, 4)),
        (lambda: nn.ReLU(), (2, 4), (2, 4)),
        (lambda: nn.Sequential(), (2, 4), (2, 4)),
        (lambda: nn.CausalSelfAttention(8, 2), (2, 3, 8), (2, 3, 8)),
        (lambda: nn.CausalSelfAttention(8, 4, n_kv_head=1, bias=False), (2, 3, 8), (2, 3, 8)),
        (lambda: nn.CausalSelfAttention(8, 2), (0, 3, 8), (0, 3, 8)),
        (lambda: nn.CausalSelfAttention(8, 2), (2, 0, 8), (2, 0, 8)),
        *((lambda a=a: nn.MLP(6, a), (2, 3, 6), (2, 3, 6)) for a in ("gelu_tanh", "gelu", "relu", "swiglu")),
        *((lambda f=f: nn.Block(8, 2, norm_first=f), (2, 3, 8), (2, 3, 8)) for f in (True, False)),
    ],
)
def test_shapes_and_gradients_of_layers(device, layer, x, shape):
    layer, x = layer(), tg.randn(*x, requires_grad=True)
    y = layer(x)
    assert y.shape == shape
    y.sum().backward()
    assert x.grad.shape == x.shape
    for name, p in layer.named_parameters():
        assert p.grad is not None, name
        assert p.grad.shape == p.shape, name


def test_attention_is_causal(device):
    """A position's output does not change when what follows it does."""
    layer, x = nn.CausalSelfAttention(8, 2), tg.randn(1, 5, 8)
    changed = x.clone()
    changed[:, 3:] = 9.0
    before, after = layer(x).numpy(), layer(changed).numpy()
    np.testing.assert_allclose(before[:, :3], after[:, :3], rtol=1e-6, atol=1e-6)
    assert abs(before[:, 3:] - after[:, 3:]).min(axis=(0, 2)).max() > 1e-3


@pytest.mark.parametrize("norm_first", [True, False])
def test_block_is_its_formula(device, norm_first):
    block, x = nn.Block(8, 2, norm_first=norm_first).to(tg.float64), tg.randn(2, 3, 8, dtype=tg.float64)
    if norm_first:
        h = x + block.attn(block.ln_1(x))
        expected = h + block.mlp(block.ln_2(h))
    else:
        h = block.ln_1(x + block.attn(x))
        expected = block.ln_2(h + block.mlp(h))
    np.testing.assert_allclose(block(x).numpy(), expected.numpy(), rtol=1e-12)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu", "relu", "swiglu"])
def test_mlp_adds_a_residual(device, activation, dropout, wrapped):
    """After dropout, and where another module stands in a layer's place."""
    layer = nn.MLP(6, activation, dropout=dropout).to(tg.float64)
    if wrapped:
        layer.c_proj = nn.Sequential(layer.c_proj)
    x, residual = (tg.randn(2, 3, 6, dtype=tg.float64) for _ in range(2))
    for training in (True, False):
        layer.train(training)
        results = []
        for call in (lambda: layer(x, residual), lambda: layer(x) + residual):
            tg.manual_seed(1)
            results.append(call().numpy())
        np.testing.assert_allclose(*results, rtol=1e-12, atol=1e-12)


def test_dropout_of_layers_is_on_in_training_alone(device):
    x = tg.randn(2, 3, 8)
    for layer in (nn.CausalSelfAttention(8, 2, dropout=0.5), nn.MLP(8, dropout=0.5), nn.Block(8, 2, dropout=0.5)):
        assert (layer(x).numpy() != layer(x).numpy()).any()
        layer.eval()
        np.testing.assert_array_equal(layer(x).numpy(), layer(x).numpy())


def test_swiglu_has_about_as_many_weights():
    for width in (48, 100, 768):
        plain, gated = (nn.MLP(width, a, bias=False).num_parameters() for a in ("gelu", "swiglu"))
        assert 1 <= gated / plain < 1 + 8 * 3 * width / plain


def test_key_value_cache(device):
    """In parts it gives what the whole sequence gives; what does not fit or would lose gradients is refused."""
    layer, x = nn.CausalSelfAttention(8, 4, n_kv_head=2), tg.randn(2, 5, 8)
    cache = nn.KeyValueCache(5)
    with tg.no_grad():
        parts = [layer(x[:, i:j], cache) for i, j in ((0, 2), (2, 3), (3, 5))]
        np.testing.assert_allclose(tg.concat(parts, 1).numpy(), layer(x).numpy(), rtol=1e-5, atol=1e-6)
        with pytest.raises(ValueError, match="KeyValueCache: holds 5 positions, got 6"):
            layer(x[:, :1], cache)
    with pytest.raises(RuntimeError, match=r"KeyValueCache: gradients would be lost in it; use it under no_grad\(\)"):
        layer(x, nn.KeyValueCache(5))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: nn.Linear(0, 3), ValueError, "Linear: in_features must be at least 1, got 0"),
        (lambda: nn.Linear(3, 2.0), TypeError, "Linear: out_features must be an int, got 2.0"),
        (lambda: nn.Linear(True, 2), TypeError, "Linear: in_features must be an int, got True"),
        (lambda: nn.Linear(3, 2)(tg.ones(1, 4)), ValueError, r"linear: x must have shape .*3\), got \(1, 4\)"),
        (lambda: nn.Linear(3, 2)(tg.ones(1, 3).half()), TypeError, "linear: weight must have dtype float16"),
        (lambda: nn.Embedding(3, 0), ValueError, "Embedding: embedding_dim must be at least 1, got 0"),
        (lambda: nn.Embedding(3, 2)(tg.ones(1)), TypeError, "embedding: ids must have an integer dtype, got float32"),
        (
            lambda: nn.Embedding(3, 2)(tg.Tensor([3])).tolist(),
            IndexError,
            r"embedding: ids .*\[0, 3\), got 3 at position",
        ),
        (lambda: nn.LayerNorm(0), ValueError, "LayerNorm: width must be at least 1, got 0"),
        (
            lambda: nn.LayerNorm(4)(tg.ones(3)),
            ValueError,
            r"layer_norm: weight must have shape \(C,\) = \(3,\), got \(4,\)",
        ),
        (lambda: nn.RMSNorm(-1), ValueError, "RMSNorm: width must be at least 1, got -1"),
        (
            lambda: nn.RMSNorm(4)(tg.ones(3)),
            ValueError,
            r"rms_norm: weight must have shape \(C,\) = \(3,\), got \(4,\)",
        ),
        (lambda: nn.Dropout(1.5), ValueError, r"Dropout: the probability must be in \[0, 1\], got 1.5"),
        (lambda: nn.Dropout("a"), TypeError, "Dropout: the probability must be a number, got str"),
        (lambda: nn.GELU("erf")(tg.ones(1)), ValueError, 'gelu: approximate must be "none" or "tanh", got \'erf\''),
        (lambda: nn.ReLU()(1.0), TypeError, "relu: x must be a Tensor, got float"),
        (lambda: nn.CausalSelfAttention(9, 2), ValueError, "n_embd must be a multiple of n_head, got 9 and 2"),
        (lambda: nn.CausalSelfAttention(8, 4, 3), ValueError, "n_head must be a multiple of n_kv_head, got 4 and 3"),
        (
            lambda: nn.CausalSelfAttention(8, 4, 0),
            ValueError,
            "CausalSelfAttention: n_kv_head must be at least 1, got 0",
        ),
        (
            lambda: nn.CausalSelfAttention(8, 2)(tg.ones(3, 8)),
            ValueError,
            r"x must have shape .*\(B, T, 8\), got \(3, 8\)",
        ),
        (lambda: nn.CausalSelfAttention(8, 2)(tg.ones(1, 3, 6)), ValueError, r"\(B, T, 8\), got \(1, 3, 6\)"),
        (
            lambda: nn.MLP(8, "tanh"),
            ValueError,
            "MLP: activation must be one of gelu_tanh, gelu, relu, swiglu, got 'tanh'",
        ),
        (lambda: nn.Block(8, 3), ValueError, "n_embd must be a multiple of n_head, got 8 and 3"),
        (lambda: nn.ModuleList([tg.ones(1)]), TypeError, "ModuleList: expected Modules, got Tensor"),
        (lambda: nn.Sequential(tg.ones), TypeError, "Sequential: expected Modules, got function"),
        (lambda: nn.ModuleList().append(3), TypeError, "append: expected a Module, got int"),
        (lambda: nn.Parameter(tg.Tensor([1])), TypeError, "only floating tensors have gradients, got int64"),
        (lambda: nn.Module()(), NotImplementedError, "Module: forward is not defined"),
    ],
)
def test_errors(device, call, error, message):
    with pytest.raises(error, match=message):
        call()
