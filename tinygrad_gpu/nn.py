"""Modules: parameters found by attribute, and the layers of a Transformer."""

import contextlib
import math

from . import creation, dtypes
from . import functional as F
from .device import current, is_array
from .tensor import Tensor


class Parameter(Tensor):
    """A Tensor that a Module trains. Its gradient is float32 even where it is a half type (PyTorch's has the
    parameter's dtype): a sum over a batch is not rounded to half before the optimiser sees it.

    >>> import tinygrad_gpu as tg
    >>> tg.nn.Parameter(tg.zeros(2, dtype=tg.bfloat16)).requires_grad
    True
    """

    __slots__ = ()

    def __init__(self, data, requires_grad=True):
        super().__init__(data, requires_grad=requires_grad)

    @property
    def _grad_dtype(self):
        return dtypes.accumulator(self.dtype)


class Module:
    """The base of models and layers: a subclass sets Parameters and Modules as attributes and defines `forward`.

    >>> import tinygrad_gpu as tg
    >>> class Double(tg.nn.Module):
    ...     def __init__(self):
    ...         self.scale = tg.nn.Parameter(tg.full((1,), 2.0))
    ...
    ...     def forward(self, x):
    ...         return x * self.scale
    >>> Double()(tg.ones(2)), list(Double().state_dict())
    (tensor([2., 2.], requires_grad=True), ['scale'])
    """

    training = True

    def forward(self, *args, **kwargs):
        raise NotImplementedError(f"{type(self).__name__}: forward is not defined")

    def __call__(self, *args, **kwargs):
        return self.forward(*args, **kwargs)

    def _members(self):
        """(name, value) of every attribute, in the order they were set."""
        return vars(self).items()

    def _walk(self, prefix=""):
        """(dotted path, value) of every Parameter and Module below, depth first."""
        for name, value in self._members():
            if isinstance(value, Parameter):
                yield prefix + name, value
            elif isinstance(value, Module):
                yield prefix + name, value
                yield from value._walk(f"{prefix}{name}.")

    def modules(self):
        """This module and all below it.

        >>> import tinygrad_gpu as tg
        >>> len(list(tg.nn.Sequential(tg.nn.ReLU(), tg.nn.ReLU()).modules()))
        3
        """
        yield self
        yield from (value for _, value in self._walk() if isinstance(value, Module))

    def named_parameters(self):
        """(dotted path, Parameter) pairs; a Parameter found twice (a tied weight) comes once, under its first path.

        >>> import tinygrad_gpu as tg
        >>> [name for name, _ in tg.nn.Linear(2, 3).named_parameters()]
        ['weight', 'bias']
        """
        seen = set()
        for name, value in self._walk():
            if isinstance(value, Parameter) and id(value) not in seen:
                seen.add(id(value))
                yield name, value

    def parameters(self):
        """The Parameters, each once.

        >>> import tinygrad_gpu as tg
        >>> [p.shape for p in tg.nn.Linear(2, 3).parameters()]
        [(3, 2), (3,)]
        """
        return (p for _, p in self.named_parameters())

    def num_parameters(self):
        """How many numbers the Parameters hold.

        >>> import tinygrad_gpu as tg
        >>> tg.nn.Linear(2, 3).num_parameters()
        9
        """
        return sum(p.size for p in self.parameters())

    def state_dict(self):
        """Dotted path to Tensor for every Parameter, tied ones under each of their paths; the tensors share the memory.

        >>> import tinygrad_gpu as tg
        >>> sorted(tg.nn.Sequential(tg.nn.Linear(2, 3)).state_dict())
        ['0.bias', '0.weight']
        """
        return {name: value.detach() for name, value in self._walk() if isinstance(value, Parameter)}

    def load_state_dict(self, state):
        """Copy values (Tensors or arrays) by dotted path into the Parameters, in their dtype and on their device.

        Before anything is copied: ValueError where a path is missing or unknown or a shape differs, TypeError for a
        value that is neither Tensor nor array of numbers.

        >>> import tinygrad_gpu as tg
        >>> layer = tg.nn.Linear(1, 1, bias=False)
        >>> layer.load_state_dict({"weight": tg.ones(1, 1)})
        >>> layer.weight.item()
        1.0
        """
        own = self.state_dict()
        missing, unknown = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        if missing or unknown:
            raise ValueError(f"load_state_dict: missing {missing or 'nothing'}, unknown {unknown or 'nothing'}")
        for name, tensor in own.items():
            value = state[name]
            if not isinstance(value, Tensor):
                if not is_array(value):
                    raise TypeError(f"load_state_dict: {name} must be a Tensor or an array, got {type(value).__name__}")
                dtypes.as_dtype(value.dtype, f"load_state_dict: {name}")
            if value.shape != tensor.shape:
                raise ValueError(f"load_state_dict: {name} must have shape {tensor.shape}, got {value.shape}")
        for name, tensor in own.items():
            tensor[...] = Tensor(state[name], dtype=tensor.dtype, device=tensor.device)

    def train(self, mode=True):
        """Set training mode (dropout on) for this module and all below; gives the module.

        >>> import tinygrad_gpu as tg
        >>> tg.nn.Dropout(0.5).train(False).training
        False
        """
        for module in self.modules():
            module.training = mode
        return self

    def eval(self):
        """Set evaluation mode (dropout off); gives the module.

        >>> import tinygrad_gpu as tg
        >>> tg.nn.Dropout(0.5).eval()(tg.ones(2))
        tensor([1., 1.])
        """
        return self.train(False)

    def to(self, target):
        """Move every Parameter to a device ("cuda") or cast it to a floating dtype (tg.bfloat16); gives the module.

        Call it before an optimiser is made: an optimiser keeps the parameters in a buffer of its own. A Parameter that
        moves loses its gradient; one that is there already is left as it is.

        >>> import tinygrad_gpu as tg
        >>> tg.nn.Linear(1, 1).to(tg.float16).weight.dtype == tg.float16
        True
        """
        if not isinstance(target, str) or target.partition(":")[0] not in ("cpu", "cuda"):
            dtype = dtypes.as_dtype(target, "to")
            if not dtypes.is_float(dtype):
                raise TypeError(f"to: parameters need a floating dtype, got {dtype}")
        for p in self.parameters():
            moved = p.detach().to(target).data
            if moved is not p.data:
                p.data, p._home, p.grad = moved, None, None
        return self

    def zero_grad(self):
        """Set the `.grad` of every Parameter to None.

        >>> import tinygrad_gpu as tg
        >>> tg.nn.Linear(1, 1).zero_grad()
        """
        for p in self.parameters():
            p.grad = None

    def __repr__(self):
        children = [f"{name}: {value!r}" for name, value in self._members() if isinstance(value, Module)]
        inner = "".join("\n  " + line for child in children for line in child.splitlines())
        return f"{type(self).__name__}({inner}\n)" if inner else f"{type(self).__name__}()"


@contextlib.contextmanager
def evaluating(module):
    """Within it a module and all below are in evaluation mode; afterwards each has the mode that it had.

    >>> import tinygrad_gpu as tg
    >>> layer = tg.nn.Dropout(0.5)
    >>> with tg.nn.evaluating(layer):
    ...     print(layer(tg.ones(2)))
    tensor([1., 1.])
    >>> layer.training
    True
    """
    modes = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for m, training in modes:
            m.training = training


class ModuleList(Module):
    """Modules in a list, found under the paths "0", "1" …

    >>> import tinygrad_gpu as tg
    >>> layers = tg.nn.ModuleList([tg.nn.ReLU(), tg.nn.GELU()])
    >>> len(layers), type(layers[1]).__name__
    (2, 'GELU')
    """

    def __init__(self, modules=()):
        self._modules = list(modules)
        for m in self._modules:
            if not isinstance(m, Module):
                raise TypeError(f"{type(self).__name__}: expected Modules, got {type(m).__name__}")

    def _members(self):
        yield from super()._members()  # what a subclass sets besides
        yield from ((str(i), m) for i, m in enumerate(self._modules))

    def append(self, module):
        """Add a Module at the end.

        >>> import tinygrad_gpu as tg
        >>> layers = tg.nn.ModuleList()
        >>> layers.append(tg.nn.ReLU())
        >>> len(layers)
        1
        """
        if not isinstance(module, Module):
            raise TypeError(f"append: expected a Module, got {type(module).__name__}")
        self._modules.append(module)

    def __len__(self):
        return len(self._modules)

    def __iter__(self):
        return iter(self._modules)

    def __getitem__(self, i):
        return self._modules[i]


class Sequential(ModuleList):
    """Modules that run one after another.

    >>> import tinygrad_gpu as tg
    >>> tg.nn.Sequential(tg.nn.Linear(2, 3), tg.nn.ReLU())(tg.ones(1, 2)).shape
    (1, 3)
    """

    def __init__(self, *modules):
        super().__init__(modules)

    def forward(self, x):
        for module in self:
            x = module(x)
        return x


def _check_sizes(name, **sizes):
    for what, n in sizes.items():
        if isinstance(n, bool) or not isinstance(n, int):
            raise TypeError(f"{name}: {what} must be an int, got {n!r}")
        if n < 1:
            raise ValueError(f"{name}: {what} must be at least 1, got {n}")


def _check_heads(name, n_embd, n_head, n_kv_head):
    """The number of heads of keys and values: n_head where it is None."""
    n_kv_head = n_head if n_kv_head is None else n_kv_head
    _check_sizes(name, n_embd=n_embd, n_head=n_head, n_kv_head=n_kv_head)
    if n_embd % n_head:
        raise ValueError(f"{name}: n_embd must be a multiple of n_head, got {n_embd} and {n_head}")
    if n_head % n_kv_head:
        raise ValueError(f"{name}: n_head must be a multiple of n_kv_head, got {n_head} and {n_kv_head}")
    return n_kv_head


class Linear(Module):
    """x @ weight.T + bias; weight (out, in) and bias (out,) start uniform in ±1/sqrt(in), as PyTorch's.

    >>> import tinygrad_gpu as tg
    >>> tg.nn.Linear(2, 3)(tg.ones(5, 2)).shape
    (5, 3)
    """

    def __init__(self, in_features, out_features, bias=True):
        _check_sizes("Linear", in_features=in_features, out_features=out_features)
        bound = 1 / math.sqrt(in_features)
        self.weight = Parameter((creation.rand(out_features, in_features) * 2 - 1) * bound)
        self.bias = Parameter((creation.rand(out_features) * 2 - 1) * bound) if bias else None

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class Embedding(Module):
    """Rows of weight (num_embeddings, embedding_dim) by number; they start standard normal.

    >>> import tinygrad_gpu as tg
    >>> tg.nn.Embedding(10, 4)(tg.Tensor([1, 2])).shape
    (2, 4)
    """

    def __init__(self, num_embeddings, embedding_dim):
        _check_sizes("Embedding", num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        self.weight = Parameter(creation.randn(num_embeddings, embedding_dim))

    def forward(self, ids):
        return F.embedding(ids, self.weight)


class LayerNorm(Module):
    """`F.layer_norm` over a last axis of `width`, with a weight and (by default) a bias.

    >>> import tinygrad_gpu as tg
    >>> tg.nn.LayerNorm(2)(tg.Tensor([[1.0, 3.0]])).detach()
    tensor([[-1.,  1.]])
    """

    def __init__(self, width, eps=1e-5, bias=True):
        _check_sizes("LayerNorm", width=width)
        self.eps = eps
        self.weight = Parameter(creation.ones(width))
        self.bias = Parameter(creation.zeros(width)) if bias else None

    def forward(self, x):
        return F.layer_norm(x, self.weight, self.bias, self.eps)


class RMSNorm(Module):
    """`F.rms_norm` over a last axis of `width`, with a weight.

    >>> import tinygrad_gpu as tg
    >>> tg.nn.RMSNorm(2)(tg.Tensor([[3.0, 3.0]])).detach()
    tensor([[1., 1.]])
    """

    def __init__(self, width, eps=1e-6):
        _check_sizes("RMSNorm", width=width)
        self.eps = eps
        self.weight = Parameter(creation.ones(width))

    def forward(self, x):
        return F.rms_norm(x, self.weight, self.eps)


class Dropout(Module):
    """`F.dropout` while training.

    >>> import tinygrad_gpu as tg
    >>> tg.nn.Dropout(0.0)(tg.ones(2))
    tensor([1., 1.])
    """

    def __init__(self, p=0.5):
        F.check_probability("Dropout", p)
        self.p = p

    def forward(self, x):
        return F.dropout(x, self.p, self.training)


class GELU(Module):
    """`F.gelu`.

    >>> import tinygrad_gpu as tg
    >>> tg.nn.GELU("tanh")(tg.zeros(1))
    tensor([0.])
    """

    def __init__(self, approximate="none"):
        self.approximate = approximate

    def forward(self, x):
        return F.gelu(x, self.approximate)


class ReLU(Module):
    """`F.relu`.

    >>> import tinygrad_gpu as tg
    >>> tg.nn.ReLU()(tg.Tensor([-1.0]))
    tensor([0.])
    """

    def forward(self, x):
        return F.relu(x)


class KeyValueCache:
    """The keys and values of the positions that one attention layer has seen, (B, Hkv, up to `capacity`, D) each.

    It holds no graph: RuntimeError for keys that require a gradient. ValueError for more positions than fit.

    >>> import tinygrad_gpu as tg
    >>> layer, cache = tg.nn.CausalSelfAttention(8, 2), tg.nn.KeyValueCache(3)
    >>> with tg.no_grad():
    ...     _ = layer(tg.ones(1, 2, 8), cache)
    >>> cache.length
    2
    """

    def __init__(self, capacity):
        self.capacity, self.length = capacity, 0
        self.k = self.v = None

    def append(self, k, v):
        """Add those of new positions, (B, Hkv, T, D); gives all so far.

        >>> import tinygrad_gpu as tg
        >>> cache = tg.nn.KeyValueCache(3)
        >>> k, v = cache.append(tg.zeros(1, 1, 2, 4), tg.ones(1, 1, 2, 4))
        >>> v.shape
        (1, 1, 2, 4)
        """
        if k.requires_grad or v.requires_grad:
            raise RuntimeError("KeyValueCache: gradients would be lost in it; use it under no_grad()")
        if self.k is None:
            b, h, _, d = k.shape
            self.k, self.v = (creation.zeros(b, h, self.capacity, d, dtype=k.dtype, device=k.device) for _ in range(2))
        end = self.length + k.shape[2]
        if end > self.capacity:
            raise ValueError(f"KeyValueCache: holds {self.capacity} positions, got {end}")
        with current(k.data):
            self.k.data[:, :, self.length : end], self.v.data[:, :, self.length : end] = k.data, v.data
        self.length = end
        return self.k[:, :, :end], self.v[:, :, :end]


class CausalSelfAttention(Module):
    """Multi-head attention of a sequence to its own past (arXiv:1706.03762, section 3.2.2): x (B, T, C) gives (B, T,
    C).

    n_head query heads share n_kv_head heads of keys and values (n_head by default; arXiv:2305.13245). `c_attn` makes
    queries, keys and values in one product. `cache`, a KeyValueCache, holds the past of x for generation, without a
    graph. ValueError where the heads do not divide n_embd, or n_kv_head does not divide n_head.

    >>> import tinygrad_gpu as tg
    >>> tg.nn.CausalSelfAttention(8, 2)(tg.ones(1, 3, 8)).shape
    (1, 3, 8)
    """

    def __init__(self, n_embd, n_head, n_kv_head=None, dropout=0.0, bias=True):
        n_kv_head = _check_heads("CausalSelfAttention", n_embd, n_head, n_kv_head)
        self.heads, self.head_width = (n_head, n_kv_head, n_kv_head), n_embd // n_head
        self.c_attn = Linear(n_embd, self.head_width * sum(self.heads), bias)
        self.c_proj = Linear(n_embd, n_embd, bias)
        self.dropout = Dropout(dropout)

    def forward(self, x, cache=None):
        width = self.heads[0] * self.head_width
        if x.ndim != 3 or x.shape[2] != width:
            raise ValueError(f"CausalSelfAttention: x must have shape (B, T, C) = (B, T, {width}), got {x.shape}")
        b, t, c = x.shape
        heads = self.c_attn(x).reshape(b, t, sum(self.heads), self.head_width).transpose(1, 2)
        q, k, v = heads.split(self.heads, axis=1)
        if cache is not None:
            k, v = cache.append(k, v)
        dropout_p = self.dropout.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout_p)
        return self.dropout(self.c_proj(y.transpose(1, 2).reshape(b, t, c)))


_ACTIVATIONS = {"gelu_tanh": lambda x: F.gelu(x, "tanh"), "gelu": F.gelu, "relu": F.relu, "swiglu": F.silu}
_GELU_FORMS = {"gelu_tanh": "tanh", "gelu": "none"}


def _check_activation(name, activation):
    if activation not in _ACTIVATIONS:
        raise ValueError(f"{name}: activation must be one of {', '.join(_ACTIVATIONS)}, got {activation!r}")


class MLP(Module):
    """The feed-forward half of a block: c_proj(act(c_fc(x))), or with "swiglu" c_proj(silu(c_gate(x)) * c_fc(x)).

    The width inside is 4 n_embd; with "swiglu" 2/3 of that, up to a multiple of 8, so that three matrices hold what two
    do otherwise (arXiv:2002.05202). ValueError for another activation.

    >>> import tinygrad_gpu as tg
    >>> tg.nn.MLP(8, activation="swiglu")(tg.ones(1, 8)).shape
    (1, 8)
    """

    def __init__(self, n_embd, activation="gelu_tanh", dropout=0.0, bias=True):
        _check_sizes("MLP", n_embd=n_embd)
        _check_activation("MLP", activation)
        self.activation = activation
        gated = activation == "swiglu"
        width = -(-8 * n_embd // 24) * 8 if gated else 4 * n_embd
        self.c_fc = Linear(n_embd, width, bias)
        self.c_gate = Linear(n_embd, width, bias) if gated else None
        self.c_proj = Linear(width, n_embd, bias)
        self.dropout = Dropout(dropout)

    def forward(self, x, residual=None):
        """The sum with `residual` (..., n_embd), if given, is the last product's kernel's where there is no dropout.

        >>> import tinygrad_gpu as tg
        >>> tg.nn.MLP(8)(tg.ones(1, 8), residual=tg.ones(1, 8)).shape
        (1, 8)
        """
        fused = None if self.dropout.training and self.dropout.p else residual
        act, form = _ACTIVATIONS[self.activation], _GELU_FORMS.get(self.activation)
        plain = type(self.c_fc) is Linear and type(self.c_proj) is Linear  # not other modules put in their places
        if form and plain:
            weights = self.c_fc.weight, self.c_fc.bias, self.c_proj.weight, self.c_proj.bias
            y = F.mlp(x, *weights, approximate=form, residual=fused)
        else:
            h = act(self.c_fc(x)) if self.c_gate is None else act(self.c_gate(x)) * self.c_fc(x)
            y, fused = self.c_proj(h), None
        y = self.dropout(y)
        return y if fused is residual else y + residual


class Block(Module):
    """A Transformer block: attention, then MLP, each with a residual and a layer norm; x (B, T, C) gives (B, T, C).

    norm_first (arXiv:2002.04745, GPT-2): x += attn(norm(x)); x += mlp(norm(x)). Otherwise, as in the original
    Transformer: x = norm(x + attn(x)); x = norm(x + mlp(x)).

    >>> import tinygrad_gpu as tg
    >>> tg.nn.Block(8, 2, norm_first=False, activation="relu")(tg.ones(1, 3, 8)).shape
    (1, 3, 8)
    """

    def __init__(self, n_embd, n_head, n_kv_head=None, dropout=0.0, bias=True, activation="gelu_tanh", norm_first=True):
        self.norm_first = norm_first
        self.ln_1 = LayerNorm(n_embd, bias=bias)
        self.attn = CausalSelfAttention(n_embd, n_head, n_kv_head, dropout, bias)
        self.ln_2 = LayerNorm(n_embd, bias=bias)
        self.mlp = MLP(n_embd, activation, dropout, bias)

    def forward(self, x, cache=None):
        if self.norm_first:
            y, x = _add_norm(self.ln_2, self.attn(self.ln_1(x), cache), x)
            return self.mlp(y, x) if isinstance(self.mlp, MLP) else x + self.mlp(y)  # or another module in its place
        x, _ = _add_norm(self.ln_1, self.attn(x, cache), x)
        return _add_norm(self.ln_2, self.mlp(x), x)[0]


def _add_norm(norm, x, residual):
    return F.add_layer_norm(x, residual, norm.weight, norm.bias, norm.eps)
