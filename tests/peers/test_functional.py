"""tinygrad_gpu.functional against PyTorch: values and gradients, for each option that PyTorch has or can be given."""

import itertools
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")
TF = torch.nn.functional

import tinygrad_gpu as tg  # noqa: E402
import tinygrad_gpu.functional as F  # noqa: E402

rng = np.random.default_rng(0)
V = 11
IDS = rng.integers(0, V, (4, 3))
TARGETS = np.where(rng.random(24) < 0.25, -100, rng.integers(0, V, 24))
CLASS_WEIGHT, TOKEN_WEIGHT = rng.random(V), rng.random(24)
REDUCTIONS = ("mean", "sum", "none")
POSITIONS = np.array([0, 1, 5, 1000])

# name: (ours, PyTorch's, shapes of the tensors with a gradient). `c` gives an array to the library at hand.
CASES = {
    "linear": (lambda c, *t: F.linear(*t), lambda c, *t: TF.linear(*t), [(4, 3, 5), (7, 5), (7,)]),
    "linear_no_bias": (lambda c, *t: F.linear(*t), lambda c, *t: TF.linear(*t), [(5,), (7, 5)]),
    "embedding": (lambda c, w: F.embedding(c(IDS), w), lambda c, w: TF.embedding(c(IDS), w), [(V, 5)]),
    "layer_norm": (
        lambda c, x, w, b: F.layer_norm(x, w, b, eps=1e-3),
        lambda c, x, w, b: TF.layer_norm(x, (17,), w, b, eps=1e-3),
        [(4, 3, 17), (17,), (17,)],
    ),
    "layer_norm_weight": (
        lambda c, x, w: F.layer_norm(x, w),
        lambda c, x, w: TF.layer_norm(x, (17,), w),
        [(4, 3, 17), (17,)],
    ),
    "layer_norm_plain": (lambda c, x: F.layer_norm(x), lambda c, x: TF.layer_norm(x, (17,)), [(4, 17)]),
    "add_layer_norm": (
        lambda c, x, r, w, b: F.add_layer_norm(x, r, w, b, 1e-3),
        lambda c, x, r, w, b: (TF.layer_norm(x + r, (17,), w, b, 1e-3), x + r),
        [(4, 17), (4, 17), (17,), (17,)],
    ),
    "rms_norm": (
        lambda c, x, w: F.rms_norm(x, w, eps=1e-3),
        lambda c, x, w: TF.rms_norm(x, (17,), w, eps=1e-3),
        [(4, 3, 17), (17,)],
    ),
    "rms_norm_plain": (lambda c, x: F.rms_norm(x), lambda c, x: TF.rms_norm(x, (17,), eps=1e-6), [(4, 17)]),
    "softmax": (lambda c, x: F.softmax(x), lambda c, x: TF.softmax(x, -1), [(4, 7)]),
    "softmax_axis": (lambda c, x: F.softmax(x, axis=1), lambda c, x: TF.softmax(x, 1), [(4, 3, 7)]),
    "log_softmax": (lambda c, x: F.log_softmax(x), lambda c, x: TF.log_softmax(x, -1), [(4, 7)]),
    "log_softmax_axis": (lambda c, x: F.log_softmax(x, axis=0), lambda c, x: TF.log_softmax(x, 0), [(4, 3, 7)]),
    "gelu": (lambda c, x: F.gelu(x), lambda c, x: TF.gelu(x), [(4, 7)]),
    "gelu_tanh": (lambda c, x: F.gelu(x, "tanh"), lambda c, x: TF.gelu(x, approximate="tanh"), [(4, 7)]),
    "mlp": (
        lambda c, x, w, b, v, d, r: F.mlp(x, w, b, v, d, residual=r),
        lambda c, x, w, b, v, d, r: TF.linear(TF.gelu(TF.linear(x, w, b)), v, d) + r,
        [(2, 4, 7), (9, 7), (9,), (5, 9), (5,), (2, 4, 5)],
    ),
    "mlp_tanh": (
        lambda c, x, w, v: F.mlp(x, w, None, v, None, approximate="tanh"),
        lambda c, x, w, v: TF.linear(TF.gelu(TF.linear(x, w), approximate="tanh"), v),
        [(4, 7), (9, 7), (5, 9)],
    ),
    "relu": (lambda c, x: F.relu(x), lambda c, x: TF.relu(x), [(4, 7)]),
    "silu": (lambda c, x: F.silu(x), lambda c, x: TF.silu(x), [(4, 7)]),
    "dropout_off": (lambda c, x: F.dropout(x, 0.7, training=False), lambda c, x: TF.dropout(x, 0.7, False), [(4, 7)]),
    "dropout_none": (lambda c, x: F.dropout(x, 0.0), lambda c, x: TF.dropout(x, 0.0), [(4, 7)]),
    "dropout_all": (lambda c, x: F.dropout(x, 1.0), lambda c, x: TF.dropout(x, 1.0), [(4, 7)]),
}


def cross_entropy(function, targets, weighted=False, **options):
    """A case of one library's cross_entropy: both take the same options."""
    return lambda c, z: function(z, c(targets), weight=c(CLASS_WEIGHT, z) if weighted else None, **options)


def add_cross_entropy():
    """All reductions, smoothings and class weights, for logits of two to four axes and of one; an ignored index."""

    def add(name, shape, *options, **more):
        CASES[name] = *(cross_entropy(f, *options, **more) for f in (F.cross_entropy, TF.cross_entropy)), [shape]

    for shape, weighted, reduction, smoothing in itertools.product(
        ((24, V), (2, V, 12), (2, V, 3, 4)), (False, True), REDUCTIONS, (0.0, 0.3, 1.0)
    ):
        name = f"cross_entropy_{len(shape)}d{'_weighted' * weighted}_{reduction}_{smoothing}"
        targets = TARGETS.reshape(shape[0], *shape[2:])
        add(name, shape, targets, weighted, reduction=reduction, label_smoothing=smoothing)
    add("cross_entropy_1d", (V,), np.array(2))
    add("cross_entropy_ignore_index", (24, V), TARGETS % V, ignore_index=3)


def torch_linear_cross_entropy(x, w, t, b, *, reduction, token_weight, label_smoothing=0.0, z_loss=0.0, softcap=None):
    """The definition, from the logits."""
    z = TF.linear(x, w, b)
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    loss = TF.cross_entropy(z, t, reduction="none", label_smoothing=label_smoothing) + z_loss * z.logsumexp(1) ** 2
    u = (t != -100) * (1.0 if token_weight is None else token_weight)
    return {"none": loss * u, "sum": (loss * u).sum(), "mean": (loss * u).sum() / u.sum()}[reduction]


def linear_cross_entropy(function, weighted, **options):
    return lambda c, x, w, b: function(
        x, w, c(TARGETS), b, token_weight=c(TOKEN_WEIGHT, x) if weighted else None, **options
    )


def add_linear_cross_entropy():
    kinds = {
        "plain": {},
        "smoothed": {"label_smoothing": 0.3},
        "z_loss": {"z_loss": 0.1},
        "softcap": {"softcap": 2.0},
        "all": {"label_smoothing": 0.2, "z_loss": 0.1, "softcap": 3.0},
    }
    for kind, reduction, weighted, budget in itertools.product(kinds, REDUCTIONS, (False, True), (None, 1)):
        options = {
            "reduction": reduction,
            **kinds[kind],
        }  # a budget of 1 byte: one row of x, one of the weight at a time
        name = f"linear_cross_entropy_{kind}_{reduction}{'_weighted' * weighted}{'_chunked' * bool(budget)}"
        ours = linear_cross_entropy(F.linear_cross_entropy, weighted, memory_budget=budget, **options)
        CASES[name] = (
            ours,
            linear_cross_entropy(torch_linear_cross_entropy, weighted, **options),
            [(24, 5), (V, 5), (V,)],
        )


def torch_attention(c, q, k, v, window=None, **options):
    """PyTorch's attention under a mask that is aligned bottom-right; a query that sees no key has output 0, as ours."""
    tq, tk = q.shape[2], k.shape[2]
    seen = np.tri(tq, tk, tk - tq, dtype=bool)
    if window is not None:
        seen &= ~np.tri(tq, tk, tk - tq - window, dtype=bool)
    blind = c(~seen.any(1))[:, None]
    mask = c(seen | ~seen.any(1, keepdims=True))
    y = TF.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True, **options)
    return y.masked_fill(blind, 0)


def add_attention():
    def add(name, shapes, theirs, **options):
        CASES[f"attention_{name}"] = lambda c, *t: F.scaled_dot_product_attention(*t, **options), theirs, shapes

    def library(**options):
        return lambda c, *t: TF.scaled_dot_product_attention(*t, enable_gqa=True, **options)

    same, grouped = [(2, 4, 5, 3)] * 3, [(2, 6, 5, 3), (2, 2, 5, 3), (2, 2, 5, 3)]
    for name, shapes in (("heads", same), ("grouped", grouped)):
        add(f"{name}_full", shapes, library())
        add(f"{name}_causal", shapes, library(is_causal=True), is_causal=True)
        add(f"{name}_scale", shapes, library(scale=0.3), scale=0.3)
    for tq, tk in ((2, 5), (5, 2), (1, 7)):
        shapes = [(2, 4, tq, 3), (2, 2, tk, 3), (2, 2, tk, 3)]
        add(f"{tq}x{tk}", shapes, library())
        add(f"{tq}x{tk}_causal", shapes, torch_attention, is_causal=True)
        add(f"{tq}x{tk}_window", shapes, lambda c, *t: torch_attention(c, *t, window=2), is_causal=True, window=2)


def torch_rotary(c, x, base=10000.0):
    """Hugging Face's Llama: x cos + rotate_half(x) sin."""
    d = x.shape[-1]
    angle = c(POSITIONS)[:, None] / base ** (torch.arange(0, d, 2, dtype=torch.float64) / d)
    cos, sin = (torch.cat([f(angle)] * 2, -1).to(x.dtype) for f in (torch.cos, torch.sin))
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


add_cross_entropy()
add_linear_cross_entropy()
add_attention()
CASES["rotary"] = lambda c, x: F.rotary_embedding(x, c(POSITIONS)), torch_rotary, [(2, 3, 4, 6)]
CASES["rotary_base"] = (
    lambda c, x: F.rotary_embedding(x, c(POSITIONS), base=50.0),
    lambda c, x: torch_rotary(c, x, base=50.0),
    [(2, 3, 4, 6)],
)


def to_ours(array, like=None):
    return tg.Tensor(array, dtype=None if like is None else like.dtype)


def to_theirs(array, like=None):
    return torch.as_tensor(array, dtype=None if like is None else like.dtype)


def as_tuple(x):
    return x if isinstance(x, tuple) else (x,)


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name, device):
    """float64 to 1e-10 and float32 to 1e-5; half types, against PyTorch in float64 on the same rounded inputs, to three
    roundings: of an intermediate that is stored, of the result, and of the upstream gradient."""
    ours, theirs, shapes = CASES[name]
    for dtype, tolerance in (
        (tg.float64, 1e-10),
        (tg.float32, 1e-5),
        (tg.float16, 3 * 2**-11),
        (tg.bfloat16, 3 * 2**-8),
    ):
        draw = np.random.default_rng(1)
        arrays = [draw.standard_normal(shape).astype(dtype) for shape in shapes]
        x = [tg.Tensor(a, requires_grad=True) for a in arrays]
        wide = torch.float32 if dtype == tg.float32 else torch.float64
        y = [torch.tensor(a.astype(np.float64), dtype=wide, requires_grad=True) for a in arrays]
        found, expected = as_tuple(ours(to_ours, *x)), as_tuple(theirs(to_theirs, *y))
        upstream = [draw.standard_normal(f.shape).astype(f.dtype) for f in found]
        found_grads = tg.autograd.grad(found, x, [tg.Tensor(g) for g in upstream])
        expected_grads = torch.autograd.grad(
            expected, y, [torch.tensor(g.astype(np.float64), dtype=wide) for g in upstream]
        )
        for what, a, b in (
            *(("output", *pair) for pair in zip(found, expected, strict=True)),
            *(("gradient", *pair) for pair in zip(found_grads, expected_grads, strict=True)),
        ):
            assert a.shape == tuple(b.shape)
            scale = float(b.detach().abs().max()) or 1.0
            np.testing.assert_allclose(
                a.numpy().astype(np.float64),
                b.detach().numpy(),
                rtol=tolerance,
                atol=tolerance * scale,
                err_msg=f"{what} in {dtype}",
            )


def test_every_function_is_compared():
    functions = [f for f in vars(F) if callable(vars(F)[f]) and getattr(vars(F)[f], "__module__", "") == F.__name__]
    public = {f for f in functions if not f.startswith("_")}
    compared = {f for f in public for name in CASES if name.startswith(f)}
    assert public - compared == {"scaled_dot_product_attention", "rotary_embedding"}  # here "attention" and "rotary"


def test_dropout_keeps_and_scales(device):
    """What is kept is scaled as in PyTorch, as often as there, and the gradient has the mask of the value."""
    x = tg.ones(50_000, requires_grad=True)
    y = F.dropout(x, 0.3)
    (dx,) = tg.autograd.grad(y.sum(), x)
    np.testing.assert_array_equal(dx.numpy(), y.numpy())
    theirs = TF.dropout(torch.ones(50_000), 0.3)
    assert set(np.unique(y.numpy())) == set(np.unique(theirs.numpy()))
    assert y.numpy().mean() == pytest.approx(1.0, abs=5 * math.sqrt(0.3 / 0.7 / 50_000))


# Where we depart from PyTorch


def test_causal_masks_align_bottom_right(device):
    q, k, v = (np.random.default_rng(0).standard_normal((1, 1, t, 4)).astype(np.float32) for t in (2, 5, 5))
    ours = F.scaled_dot_product_attention(*map(tg.Tensor, (q, k, v)), is_causal=True)
    theirs = TF.scaled_dot_product_attention(*map(torch.tensor, (q, k, v)), is_causal=True)
    full = TF.scaled_dot_product_attention(*map(torch.tensor, (q, k, v)))
    np.testing.assert_allclose(ours.numpy()[..., 1, :], full[..., 1, :].numpy(), rtol=1e-5)  # the last query sees all
    np.testing.assert_allclose(theirs[0, 0, 0].numpy(), v[0, 0, 0], rtol=1e-5)  # PyTorch's first query sees one key
    assert abs(ours.numpy()[0, 0, 0] - v[0, 0, 0]).max() > 0.1


@pytest.mark.parametrize("fused", [False, True])
def test_a_mean_over_nothing_is_zero(fused, device):
    x, w = (tg.randn(*shape, requires_grad=True) for shape in ((6, 8), (V, 8)))
    targets = np.full(6, -100)
    if fused:
        loss = F.linear_cross_entropy(x, w, tg.Tensor(targets))
    else:
        loss = F.cross_entropy(F.linear(x, w), tg.Tensor(targets))
    loss.backward()
    assert loss.item() == 0
    assert not x.grad.numpy().any()
    assert not w.grad.numpy().any()
    assert TF.cross_entropy(torch.zeros(6, V), torch.tensor(targets)).isnan()
