"""What holds for each public function: mistakes are errors that name it, before any work; inputs stay as they were."""

import inspect
import math
import tracemalloc

import pytest

import tinygrad_gpu as tg
import tinygrad_gpu.functional as F
from tinygrad_gpu.random import default_generator

FUNCTIONS = {
    name: f for name, f in inspect.getmembers(F, inspect.isfunction) if f.__module__ == F.__name__ and name[0] != "_"
}
N = 256
x, row, ids = tg.ones(N, N, device="cpu"), tg.ones(N, device="cpu"), tg.zeros(N, dtype=tg.int64, device="cpu")
heads = x.reshape(1, 16, 16, N)

# Bad calls of each function by the kind of mistake: arguments, options. The messages are in the tests of its op.
TYPES = {
    "linear": [(1.0, x), (x, None), (x, x, 1.0), (x, x.half()), (ids, x), (x, x, row.half())],
    "mlp": [
        (1.0, x, row, x, row), (x, None, row, x, row), (x, x, 1.0, x, row), (x, x, row.half(), x, row),
        (ids, x, row, x, row), (x, x, row, x.half(), row), (x, x, row, x, row, {"residual": 1.0}),
        (x, x, row, x, row, {"residual": x.half()}),
    ],
    "embedding": [([0], x), (ids, None), (x, x), (ids, ids), (ids == 0, x)],
    "dropout": [(1.0,), (ids,), (x, "0.5"), (x, None), (x, True), (ids, 0.5, False)],
    "layer_norm": [(1.0,), (ids,), (x, row.half()), (x, 1.0), (x, row, row.half()), (x, row, row, "1")],
    "add_layer_norm": [(x, None), (x, x.half()), (ids, ids), (x, x, row.half()), (x, x, row, row, "")],
    "rms_norm": [(1.0,), (ids,), (x, row.half()), (x, 1.0), (x, row, "1"), (x, row, True)],
    "softmax": [(1.0,), (ids,), (x, 0.5), (x, None), (x, True)],
    "log_softmax": [(1.0,), (ids,), (x, 0.5), (x, None), (x, True)],
    "gelu": [(1.0,), (ids,)],
    "relu": [(1.0,), (None,)],
    "silu": [(1.0,), (ids,)],
    "cross_entropy": [
        (1.0, ids), (x, None), (x, row), (ids, ids), (x, ids, {"weight": 1.0}), (x, ids, {"weight": row.half()}),
        (x, ids, {"ignore_index": None}), (x, ids, {"label_smoothing": "1"}), (x, ids, {"label_smoothing": True}),
    ],
    "linear_cross_entropy": [
        (1.0, x, ids), (x, None, ids), (x, x, row), (x, x.half(), ids), (x, x, ids, row.half()), (x, x, ids, 1.0),
        (x, x, ids, {"ignore_index": 0.5}), (x, x, ids, {"label_smoothing": None}), (x, x, ids, {"z_loss": "1"}),
        (x, x, ids, {"softcap": "1"}), (x, x, ids, {"token_weight": 1.0}), (x, x, ids, {"memory_budget": "1"}),
    ],
    "scaled_dot_product_attention": [
        (1.0, heads, heads), (heads, None, heads), (heads, heads, heads.half()), (heads.to(tg.int64), heads, heads),
        (heads, heads, heads, {"scale": "1"}), (heads, heads, heads, {"is_causal": True, "window": 1.5}),
        (heads, heads, heads, {"dropout_p": "0"}),
    ],
    "rotary_embedding": [(1.0, ids), (x, None), (ids, ids), (x, row), (x, ids, "1"), (x, ids, None)],
}  # fmt: skip
VALUES = {
    "linear": [(x, row), (x, x[:, 1:]), (row.sum(), x), (x, x, x), (x, x, row[1:]), (x, x, row, {"residual": row})],
    "mlp": [
        (x, row, row, x, row), (row[1:], x, row, x, row), (x, x, row[1:], x, row), (x, x, row, x[:, 1:], row),
        (x, x, row, row, row), (x, x, row, x, row[1:]), (x, x, row, x, row, {"residual": row}),
        (x, x, row, x, row, {"approximate": "erf"}),
    ],
    "embedding": [(ids, row), (ids, x[None])],
    "dropout": [(x, -0.1), (x, 1.1), (x, math.nan), (x, 2.0, False)],
    "layer_norm": [(row.sum(),), (x, row[1:]), (x, x), (x, row, row[1:]), (x, row, row, -1.0), (x, row, row, math.inf)],
    "add_layer_norm": [(x, row), (x, x[1:]), (x, x, x), (x, x, row, row[1:]), (x, x, row, row, -1.0)],
    "rms_norm": [(row.sum(),), (x, row[1:]), (x, x), (x, row, -1.0), (x, row, math.nan)],
    "gelu": [(x, "exact"), (x, None)],
    "cross_entropy": [
        (row.sum(), ids), (x[:, :0], ids), (x, ids[1:]), (x, ids[:, None]), (x, ids, {"weight": row[1:]}),
        (x, ids, {"weight": row.detach().requires_grad_()}), (x, ids, {"reduction": "max"}),
        (x, ids, {"label_smoothing": 2}), (x, ids, {"label_smoothing": -1}), (x, ids, {"label_smoothing": math.nan}),
    ],
    "linear_cross_entropy": [
        (x, row, ids), (x, x[:0], ids), (x, x[:, 1:], ids), (row.sum(), x, ids), (x, x, ids[1:]), (x, x, ids, row[1:]),
        (x, x, ids, {"token_weight": row[1:]}), (x, x, ids, {"token_weight": row.detach().requires_grad_()}),
        (x, x, ids, {"reduction": "max"}), (x, x, ids, {"label_smoothing": 2}), (x, x, ids, {"z_loss": -1}),
        (x, x, ids, {"softcap": 0}), (x, x, ids, {"softcap": math.inf}), (x, x, ids, {"memory_budget": 0}),
    ],
    "scaled_dot_product_attention": [
        (x, heads, heads), (heads, x, x), (heads, heads, heads[:, :, 1:]), (heads, heads[:, 1:], heads[:, 1:]),
        (heads[..., 1:], heads, heads), (heads[:0], heads, heads), (heads, heads, heads, {"window": 2}),
        (heads, heads, heads, {"is_causal": True, "window": 0}), (heads, heads, heads, {"scale": math.nan}),
        (heads, heads, heads, {"dropout_p": 1.5}),
    ],
    "rotary_embedding": [(row, ids), (x[:, 1:], ids), (x, ids[1:]), (x, ids[None, None]), (x, ids, 0), (x, ids, -1.0)],
}  # fmt: skip
INDICES = {
    "embedding": [(ids + N, x), (ids - 1, x)],
    "softmax": [(x, 2), (x, -3), (row.sum(),)],
    "log_softmax": [(x, 2), (x, -3), (row.sum(),)],
    "cross_entropy": [(x, ids + N), (x, ids - 1), (x, ids - 100, {"ignore_index": -1})],
    "linear_cross_entropy": [(x, x, ids + N), (x, x, ids - 1)],
}
MISTAKES = {TypeError: TYPES, ValueError: VALUES, IndexError: INDICES}
CALLS = [
    pytest.param(error, name, call, id=f"{name}-{error.__name__}-{i}")
    for error, table in MISTAKES.items()
    for name, calls in table.items()
    for i, call in enumerate(calls)
]


@pytest.mark.parametrize(("error", "name", "call"), CALLS)
def test_mistakes(error, name, call):
    """The message reads `name: ...`; nothing was computed, drawn or kept."""
    options = call[-1] if isinstance(call[-1], dict) else {}
    arguments = call[: len(call) - bool(options)]
    draws = default_generator.draw
    tracemalloc.start()
    try:
        with pytest.raises(error, match=rf"^{name}: .+, got "):
            FUNCTIONS[name](*arguments, **options)
        assert tracemalloc.get_traced_memory()[1] < N * N * 4 / 2  # of one float32 matrix
    finally:
        tracemalloc.stop()
    assert default_generator.draw == draws


def test_each_function_has_its_mistakes_and_an_example():
    assert set(TYPES) == set(FUNCTIONS)
    assert set(VALUES) | set(INDICES) | {"relu", "silu"} == set(FUNCTIONS)
    assert all(">>>" in f.__doc__ for f in FUNCTIONS.values())


# A call of each function on float32 Tensors.
EXAMPLES = {
    "linear": lambda a, w, v, i: F.linear(a, w, v, residual=a),
    "mlp": lambda a, w, v, i: F.mlp(a, w, v, w, v, residual=a),
    "embedding": lambda a, w, v, i: F.embedding(i, w),
    "dropout": lambda a, w, v, i: F.dropout(a, 0.5),
    "layer_norm": lambda a, w, v, i: F.layer_norm(a, v, v),
    "add_layer_norm": lambda a, w, v, i: F.add_layer_norm(a, w, v, v)[0],
    "rms_norm": lambda a, w, v, i: F.rms_norm(a, v),
    "softmax": lambda a, w, v, i: F.softmax(a),
    "log_softmax": lambda a, w, v, i: F.log_softmax(a),
    "gelu": lambda a, w, v, i: F.gelu(a),
    "relu": lambda a, w, v, i: F.relu(a),
    "silu": lambda a, w, v, i: F.silu(a),
    "cross_entropy": lambda a, w, v, i: F.cross_entropy(a, i, weight=v.detach()),
    "linear_cross_entropy": lambda a, w, v, i: F.linear_cross_entropy(a, w, i, v, softcap=2.0, label_smoothing=0.1),
    "scaled_dot_product_attention": lambda a, w, v, i: F.scaled_dot_product_attention(
        a.reshape(1, 2, 3, 6), w.reshape(1, 1, 6, 6), w.reshape(1, 1, 6, 6), is_causal=True
    ),
    "rotary_embedding": lambda a, w, v, i: F.rotary_embedding(a, i),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [tg.float16, tg.bfloat16, tg.float32, tg.float64], ids=str)
def test_inputs_are_left_alone_and_dtypes_kept(device, dtype, name):
    """Neither forward nor backward writes to an input or to the upstream gradient; results and gradients have the
    dtype, but for the float32 loss of linear_cross_entropy on half types."""
    a, w, v = (tg.Tensor(tg.randn(*s), dtype=dtype, requires_grad=True) for s in ((6, 6), (6, 6), (6,)))
    i = tg.Tensor([0, 5, 2, 2, 1, 3])
    before = [t.numpy().copy() for t in (a, w, v, i)]
    y = EXAMPLES[name](a, w, v, i)
    wide = name == "linear_cross_entropy" and dtype in (tg.float16, tg.bfloat16)
    assert y.dtype == (tg.float32 if wide else dtype)
    upstream = tg.randn(*y.shape).to(y.dtype)
    given = upstream.numpy().copy()
    y.backward(upstream)
    for t, old in zip((a, w, v, i, upstream), (*before, given), strict=True):
        assert (t.numpy() == old).all()
    assert {t.grad.dtype for t in (a, w, v) if t.grad is not None} == {dtype}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_graph_where_none_is_asked_for(device, name):
    inputs = tg.randn(6, 6), tg.randn(6, 6), tg.randn(6), tg.Tensor([0, 5, 2, 2, 1, 3])
    assert EXAMPLES[name](*inputs).is_leaf
    for t in inputs[:3]:
        t.requires_grad_()
    with tg.no_grad():
        assert EXAMPLES[name](*inputs).is_leaf
    assert not EXAMPLES[name](*inputs).is_leaf


@pytest.mark.skipif(not tg.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "name", sorted(set(FUNCTIONS) - {"embedding", "dropout", "softmax", "log_softmax", "gelu", "relu", "silu"})
)
def test_tensors_of_two_devices(name):
    a, w, v, i = tg.randn(6, 6), tg.randn(6, 6), tg.randn(6), tg.Tensor([0, 5, 2, 2, 1, 3])
    with pytest.raises(ValueError, match="must be on one device"):
        EXAMPLES[name](a, w.cpu(), v.cpu(), i.cpu())
    with pytest.raises(ValueError, match="must be on one device"):
        F.embedding(i.cpu(), w)
