"""The functions that models are written with, `import tinygrad_gpu.functional as F`: each checks, then calls its op."""

import math
import numbers

from .ops.attention import Attention
from .ops.common import check, check_float
from .ops.cross_entropy import REDUCTIONS, CrossEntropy
from .ops.dropout import Dropout, check_probability
from .ops.elementwise import Relu, Silu
from .ops.embedding import Embedding
from .ops.gelu import FORMS as GELU_FORMS
from .ops.gelu import Gelu
from .ops.gemm import GeluMLP, Linear
from .ops.layernorm import AddLayerNorm, LayerNorm, RMSNorm
from .ops.linear_cross_entropy import LinearCrossEntropy
from .ops.rotary import Rotary
from .ops.softmax import LogSoftmax, Softmax
from .tensor import Tensor


def _check_tensors(name, optional=(), **tensors):
    """TypeError unless each is a Tensor (or None, if its name is in `optional`)."""
    for what, x in tensors.items():
        if not (isinstance(x, Tensor) or (x is None and what in optional)):
            or_none = " or None" if what in optional else ""
            raise TypeError(f"{name}: {what} must be a Tensor{or_none}, got {type(x).__name__}")


_FINITE = ("finite", math.isfinite)
_POSITIVE = ("positive and finite", lambda x: 0 < x < math.inf)
_NOT_NEGATIVE = ("finite and at least 0", lambda x: 0 <= x < math.inf)
_SHARE = ("in [0, 1]", lambda x: 0 <= x <= 1)


def _number(name, what, x, must_be=_FINITE, integer=False):
    """x as a Python number; TypeError where it is none (or no int), ValueError where it is not what it must be."""
    kind, noun = (numbers.Integral, "an int") if integer else (numbers.Real, "a number")
    check(isinstance(x, kind) and not isinstance(x, bool), f"{name}: {what} must be {noun}, got {x!r}", TypeError)
    wording, holds = must_be
    check(holds(x), f"{name}: {what} must be {wording}, got {x}")
    return int(x) if integer else float(x)


def _loss_options(name, ignore_index, reduction, label_smoothing, **constant):
    """The options that the two losses share, checked; `constant` is one for which they have no gradient."""
    for what, x in constant.items():
        check(x is None or not x.requires_grad, f"{name}: {what} must be a constant, got one with requires_grad")
    check(reduction in REDUCTIONS, f"{name}: reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    return {
        "ignore_index": _number(name, "ignore_index", ignore_index, integer=True),
        "reduction": reduction,
        "label_smoothing": _number(name, "label_smoothing", label_smoothing, _SHARE),
    }


def linear(x, weight, bias=None, *, residual=None):
    """x @ weight.T + bias + residual, rounded once.

    x (..., in), weight (out, in), bias (out,) or None, residual (..., out) or None, all of one floating dtype; gives
    (..., out). Half types are summed in float32. Errors: TypeError for other dtypes, ValueError for shapes that do not
    fit.

    >>> import tinygrad_gpu as tg, tinygrad_gpu.functional as F
    >>> F.linear(tg.ones(1, 3), tg.ones(2, 3), tg.Tensor([0.0, 1.0]))
    tensor([[3., 4.]])
    """
    _check_tensors("linear", ("bias", "residual"), x=x, weight=weight, bias=bias, residual=residual)
    return Linear.apply(x, weight, bias, residual)


def mlp(x, fc_weight, fc_bias, proj_weight, proj_bias, *, approximate="none", residual=None):
    """linear(gelu(linear(x, fc_weight, fc_bias), approximate), proj_weight, proj_bias) + residual, the feed-forward
    half of a Transformer's block, with the GELU and its gradient in the products' kernels.

    x (..., in), fc_weight (hidden, in), fc_bias (hidden,) or None, proj_weight (out, hidden), proj_bias (out,) or None,
    residual (..., out) or None, all of one floating dtype; gives (..., out). Half types are summed in float32 and
    rounded before the GELU, after it, and at the end. Errors: TypeError for other dtypes, ValueError for shapes that do
    not fit and for an approximate other than "none" and "tanh".

    >>> import tinygrad_gpu as tg, tinygrad_gpu.functional as F
    >>> F.mlp(tg.ones(1, 2), tg.ones(4, 2), None, tg.ones(1, 4), tg.Tensor([-8.0]), approximate="tanh")
    tensor([[-0.1816]])
    """
    tensors = {"x": x, "fc_weight": fc_weight, "fc_bias": fc_bias, "proj_weight": proj_weight, "proj_bias": proj_bias}
    _check_tensors("mlp", ("fc_bias", "proj_bias", "residual"), **tensors, residual=residual)
    check(approximate in GELU_FORMS, f'mlp: approximate must be "none" or "tanh", got {approximate!r}')
    return GeluMLP.apply(*tensors.values(), residual, approximate=approximate)


def embedding(ids, weight):
    """Rows of `weight` (V, C) by number: ids (...) of int64 or int32 gives (..., C).

    The gradient of a row is the sum over the places that took it, in a fixed order: the same bits every time.
    IndexError for an id outside [0, V): at once on the CPU, at the next synchronisation on a GPU.

    >>> import tinygrad_gpu as tg, tinygrad_gpu.functional as F
    >>> F.embedding(tg.Tensor([1, 0]), tg.Tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([[3., 4.],
            [1., 2.]])
    """
    _check_tensors("embedding", ids=ids, weight=weight)
    return Embedding.apply(ids, weight)


def dropout(x, p=0.5, training=True):
    """x with each element 0 with probability p, the others times 1 / (1 - p); x itself if not training or p is 0.

    x (...) of a floating dtype; the mask comes from the generator that `tg.manual_seed` seeds (Srivastava et al., JMLR
    15, 2014). ValueError for p outside [0, 1].

    >>> import tinygrad_gpu as tg, tinygrad_gpu.functional as F
    >>> F.dropout(tg.ones(2), 0.5, training=False)
    tensor([1., 1.])
    """
    _check_tensors("dropout", x=x)
    check_probability("dropout", p)
    check_float("dropout", x=x.data)
    return Dropout.apply(x, p=p) if training and p else x


def layer_norm(x, weight=None, bias=None, eps=1e-5):
    """(x - mean) / sqrt(var + eps) * weight + bias over the last axis, var biased (arXiv:1607.06450, eqs. 3 and 4).

    x (..., C), weight and bias (C,) or None, of one floating dtype; gives (..., C). Statistics are float32 for half
    types, the variance from a second pass. Errors: TypeError for other dtypes, ValueError for shapes that do not fit.

    >>> import tinygrad_gpu as tg, tinygrad_gpu.functional as F
    >>> F.layer_norm(tg.Tensor([[1.0, 3.0]]))
    tensor([[-1.,  1.]])
    """
    _check_tensors("layer_norm", ("weight", "bias"), x=x, weight=weight, bias=bias)
    return LayerNorm.apply(x, weight, bias, eps=_number("layer_norm", "eps", eps, _NOT_NEGATIVE))


def add_layer_norm(x, residual, weight=None, bias=None, eps=1e-5):
    """(y, s) with s = x + residual and y = layer_norm(s): the two steps between the halves of a Transformer block.

    x and residual (..., C), weight and bias (C,) or None; both results (..., C). Errors as `layer_norm`.

    >>> import tinygrad_gpu as tg, tinygrad_gpu.functional as F
    >>> F.add_layer_norm(tg.Tensor([[1.0, 1.0]]), tg.Tensor([[0.0, 2.0]]))
    (tensor([[-1.,  1.]]), tensor([[1., 3.]]))
    """
    _check_tensors("add_layer_norm", ("weight", "bias"), x=x, residual=residual, weight=weight, bias=bias)
    return AddLayerNorm.apply(x, residual, weight, bias, eps=_number("add_layer_norm", "eps", eps, _NOT_NEGATIVE))


def rms_norm(x, weight=None, eps=1e-6):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (arXiv:1910.07467, eq. 4).

    x (..., C), weight (C,) or None, of one floating dtype; gives (..., C). Errors as `layer_norm`.

    >>> import tinygrad_gpu as tg, tinygrad_gpu.functional as F
    >>> F.rms_norm(tg.Tensor([[3.0, 3.0]]))
    tensor([[1., 1.]])
    """
    _check_tensors("rms_norm", ("weight",), x=x, weight=weight)
    return RMSNorm.apply(x, weight, eps=_number("rms_norm", "eps", eps, _NOT_NEGATIVE))


def softmax(x, axis=-1):
    """exp(x) / sum(exp(x)) along `axis`, shifted by the maximum; float32 inside for half types.

    x (...) of a floating dtype. A row of nothing but -inf gives NaN, as in PyTorch. IndexError for an axis x lacks.

    >>> import tinygrad_gpu as tg, tinygrad_gpu.functional as F
    >>> F.softmax(tg.Tensor([0.0, 0.0]))
    tensor([0.5, 0.5])
    """
    _check_tensors("softmax", x=x)
    return Softmax.apply(x, axis=axis)


def log_softmax(x, axis=-1):
    """x - log(sum(exp(x))) along `axis`; dtypes and errors as `softmax`.

    >>> import tinygrad_gpu as tg, tinygrad_gpu.functional as F
    >>> F.log_softmax(tg.Tensor([0.0, 0.0]))
    tensor([-0.6931, -0.6931])
    """
    _check_tensors("log_softmax", x=x)
    return LogSoftmax.apply(x, axis=axis)


def gelu(x, approximate="none"):
    """x P(X <= x) for a standard normal X (arXiv:1606.08415), exactly ("none") or by its "tanh" approximation.

    x (...) of a floating dtype. ValueError for another `approximate`.

    >>> import tinygrad_gpu as tg, tinygrad_gpu.functional as F
    >>> F.gelu(tg.Tensor([1.0]), approximate="tanh")
    tensor([0.8412])
    """
    _check_tensors("gelu", x=x)
    return Gelu.apply(x, approximate=approximate)


def relu(x):
    """max(x, 0) of each element; the gradient at 0 is 0.

    >>> import tinygrad_gpu as tg, tinygrad_gpu.functional as F
    >>> F.relu(tg.Tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """
    _check_tensors("relu", x=x)
    return Relu.apply(x)


def silu(x):
    """x sigmoid(x) of each element (arXiv:1702.03118); x (...) of a floating dtype.

    >>> import tinygrad_gpu as tg, tinygrad_gpu.functional as F
    >>> F.silu(tg.Tensor([1.0]))
    tensor([0.7311])
    """
    _check_tensors("silu", x=x)
    check_float("silu", x=x.data)
    return Silu.apply(x)


def cross_entropy(logits, targets, *, weight=None, ignore_index=-100, reduction="mean", label_smoothing=0.0):
    """The cross-entropy of class scores against class numbers, as torch.nn.functional.cross_entropy.

    logits (V,), (N, V) or (N, V, ...) of a floating dtype, targets of the shape without the class axis, int64 or int32.
    weight (V,) scales each class; label_smoothing in [0, 1] moves that share to all classes evenly (arXiv:1512.00567,
    section 7). reduction "mean" divides by the weight of the targets that count, "sum", or "none" (the shape of
    targets). A target equal to ignore_index does not count; where none does, the mean is 0 (PyTorch gives NaN) and
    every gradient exactly 0. Errors: TypeError and ValueError for dtypes, shapes and options; IndexError for a target
    outside [0, V), at once on the CPU, at the next synchronisation on a GPU.

    >>> import tinygrad_gpu as tg, tinygrad_gpu.functional as F
    >>> F.cross_entropy(tg.zeros(1, 4), tg.Tensor([2]))
    tensor(1.3863)
    """
    _check_tensors("cross_entropy", ("weight",), logits=logits, targets=targets, weight=weight)
    options = _loss_options("cross_entropy", ignore_index, reduction, label_smoothing, weight=weight)
    return CrossEntropy.apply(logits, targets, weight, **options)


def linear_cross_entropy(
    x,
    weight,
    targets,
    bias=None,
    *,
    ignore_index=-100,
    reduction="mean",
    label_smoothing=0.0,
    z_loss=0.0,
    softcap=None,
    token_weight=None,
    memory_budget=None,
):
    """The cross-entropy of x @ weight.T + bias against class numbers, with no (N, V) array in memory.

    x (..., C), weight (V, C), bias (V,) or None, of one floating dtype; targets (...), int64 or int32. With z the
    logits, softcapped first as softcap * tanh(z / softcap), a token's loss is its smoothed cross-entropy + z_loss *
    logsumexp(z)^2, times its token_weight (...) of any dtype. "mean" divides by the sum of the weights of the tokens
    that count (1 each with none given), "none" gives (...). The loss is float32, for float64 inputs float64. A token
    whose target is ignore_index does not count; where none does, the mean is 0 and every gradient exactly 0.
    memory_budget in bytes bounds the workspace, from one row up. Errors as `cross_entropy`. Sources: arXiv:2410.10989
    (chunks), arXiv:2204.02311 (z_loss), arXiv:2408.00118 (softcap).

    >>> import tinygrad_gpu as tg, tinygrad_gpu.functional as F
    >>> F.linear_cross_entropy(tg.zeros(1, 8), tg.ones(4, 8), tg.Tensor([2]))
    tensor(1.3863)
    """
    name, optional = "linear_cross_entropy", ("bias", "token_weight")
    _check_tensors(name, optional, x=x, weight=weight, targets=targets, bias=bias, token_weight=token_weight)
    options = _loss_options(name, ignore_index, reduction, label_smoothing, token_weight=token_weight)
    options["z_loss"] = _number(name, "z_loss", z_loss, _NOT_NEGATIVE)
    options["softcap"] = None if softcap is None else _number(name, "softcap", softcap, _POSITIVE)
    budget = None if memory_budget is None else _number(name, "memory_budget", memory_budget, _POSITIVE)
    return LinearCrossEntropy.apply(x, weight, targets, bias, token_weight, memory_budget=budget, **options)


def scaled_dot_product_attention(q, k, v, *, is_causal=False, scale=None, window=None, dropout_p=0.0):
    """softmax(scale q k^T) v by heads (arXiv:1706.03762), groups of which may share keys and values (arXiv:2305.13245).

    q (B, H, Tq, D), k and v (B, Hkv, Tk, D) of one floating dtype, H a multiple of Hkv; gives (B, H, Tq, D). scale is
    1 / sqrt(D) by default. Causal is aligned bottom-right (PyTorch aligns top-left): query i sees the keys up to
    i + Tk - Tq; window=w leaves the last w of those, its own position included. A query that sees no key gets output 0
    and gradient 0. dropout_p drops weights after the softmax. Errors: TypeError for dtypes, ValueError for shapes and
    options.

    >>> import tinygrad_gpu as tg, tinygrad_gpu.functional as F
    >>> q, v = tg.zeros(1, 1, 2, 1), tg.Tensor([[[[1.0], [3.0]]]])
    >>> F.scaled_dot_product_attention(q, q, v, is_causal=True).flatten()
    tensor([1., 2.])
    """
    name = "scaled_dot_product_attention"
    _check_tensors(name, q=q, k=k, v=v)
    check_probability(name, dropout_p)
    scale = None if scale is None else _number(name, "scale", scale)
    window = None if window is None else _number(name, "window", window, _POSITIVE, integer=True)
    check(window is None or is_causal, f"{name}: window needs is_causal=True, got {is_causal!r}")
    return Attention.apply(q, k, v, is_causal=is_causal, scale=scale, window=window, dropout_p=dropout_p)


def rotary_embedding(x, positions, base=10000.0):
    """x with its halves x[:D/2] and x[D/2:] rotated by positions / base^(2i/D) (arXiv:2104.09864, section 3.2.2).

    x (..., T, D), D even, of a floating dtype; positions integer, (T,) or a shape that broadcasts to (..., T). The
    layout is that of Llama's weights in Hugging Face's format. Errors: TypeError for dtypes, ValueError for shapes.

    >>> import tinygrad_gpu as tg, tinygrad_gpu.functional as F
    >>> F.rotary_embedding(tg.ones(1, 2), tg.Tensor([0]))
    tensor([[1., 1.]])
    """
    _check_tensors("rotary_embedding", x=x, positions=positions)
    return Rotary.apply(x, positions, base=_number("rotary_embedding", "base", base, _POSITIVE))
