"""GPT (GPT-2's architecture: Radford et al., Language models are unsupervised multitask learners, 2019), and
generation."""

import dataclasses
import math

import numpy as np

from . import creation, nn, random
from . import functional as F
from .autograd import no_grad
from .device import array_module, current
from .tensor import Tensor, concat


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """The sizes of a GPT; ValueError or TypeError, naming the field, for one that is impossible.

    >>> from tinygrad_gpu.gpt import GPTConfig
    >>> GPTConfig(vocab_size=256, block_size=64, n_layer=2, n_head=2, n_embd=32).n_embd
    32
    """

    vocab_size: int
    block_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float = 0.0
    bias: bool = True
    n_kv_head: int | None = None
    activation: str = "gelu_tanh"
    norm_first: bool = True

    def __post_init__(self):
        sizes = {name: getattr(self, name) for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd")}
        nn._check_sizes("GPTConfig", **sizes)
        nn._check_heads("GPTConfig", self.n_embd, self.n_head, self.n_kv_head)
        nn._check_activation("GPTConfig", self.activation)
        F.check_probability("GPTConfig: dropout", self.dropout)


class GPT(nn.Module):
    """A causal language model: token and position embeddings, blocks, a layer norm, and a head tied to the embedding.

    ids (B, T) of int64 or int32 with T <= block_size give logits (B, T, vocab_size); with targets (B, T), the mean loss
    instead, through `F.linear_cross_entropy`: targets[b, t] is what should follow ids[b, t], there is no further shift.
    Weights start normal with deviation 0.02, those before a residual sum divided by sqrt(2 n_layer), biases 0 (GPT-2).
    ValueError for a T beyond block_size; IndexError for an id outside the vocabulary.

    >>> import tinygrad_gpu as tg
    >>> model = tg.gpt.GPT(tg.gpt.GPTConfig(vocab_size=10, block_size=8, n_layer=1, n_head=2, n_embd=16))
    >>> model(tg.zeros(1, 3, dtype=tg.int64)).shape
    (1, 3, 10)
    """

    def __init__(self, config):
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)
        shared = (config.n_embd, config.n_head, config.n_kv_head, config.dropout, config.bias)
        self.h = nn.ModuleList(nn.Block(*shared, config.activation, config.norm_first) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, bias=config.bias)
        self._initialise()

    def _initialise(self):
        residual = 0.02 / math.sqrt(2 * self.config.n_layer)
        with no_grad():
            for name, p in self.named_parameters():
                if name.endswith("bias"):
                    p[...] = 0.0
                elif p.ndim == 2:
                    p[...] = creation.randn(*p.shape) * (residual if name.endswith("c_proj.weight") else 0.02)

    def forward(self, ids, targets=None, caches=None):
        if not isinstance(ids, Tensor) or ids.ndim != 2:
            raise ValueError(
                f"GPT: ids must be a Tensor of shape (B, T), got {getattr(ids, 'shape', type(ids).__name__)}"
            )
        past = caches[0].length if caches else 0
        end = past + ids.shape[1]
        if end > self.config.block_size:
            raise ValueError(f"GPT: T must be at most block_size = {self.config.block_size}, got {end}")
        x = self.dropout(self.wte(ids) + self.wpe.weight[past:end])
        for i, block in enumerate(self.h):
            x = block(x, caches and caches[i])
        x = self.ln_f(x)
        if targets is None:
            return F.linear(x, self.wte.weight)
        return F.linear_cross_entropy(x, self.wte.weight, targets)

    def generate(self, ids, max_new_tokens, *, temperature=1.0, top_k=None, top_p=None, seed=None):
        """ids (B, T) followed by max_new_tokens sampled ones, (B, T + max_new_tokens).

        Each is drawn from softmax(logits / temperature), restricted to the top_k most likely tokens and to the fewest
        that together have probability top_p (nucleus sampling, arXiv:1904.09751); temperature 0 takes the most likely.
        The same seed gives the same tokens; None draws from the generator of `tg.manual_seed`. The model sees the last
        block_size tokens; up to there keys and values are cached. ValueError for options out of range, an empty prompt,
        or logits that are NaN or infinite; TypeError for options that are no numbers.

        >>> import tinygrad_gpu as tg
        >>> model = tg.gpt.GPT(tg.gpt.GPTConfig(vocab_size=10, block_size=8, n_layer=1, n_head=2, n_embd=16))
        >>> model.generate(tg.zeros(1, 3, dtype=tg.int64), 4, seed=1).shape
        (1, 7)
        """
        if not isinstance(ids, Tensor) or ids.ndim != 2 or 0 in ids.shape:
            raise ValueError(f"generate: ids must be a Tensor of shape (B, T), T > 0, got {getattr(ids, 'shape', ids)}")
        _check_sampling(max_new_tokens, temperature, top_k, top_p)
        generator = random.default_generator if seed is None else random.Generator(seed)
        size, caches, new = self.config.block_size, None, ids
        with nn.evaluating(self), no_grad(), current(ids.data):
            for _ in range(max_new_tokens):
                if caches is None or caches[0].length == size:
                    # Positions are absolute: once the window slides, every key and value changes.
                    caches = [nn.KeyValueCache(size) for _ in self.h]
                    new = ids[:, -size:]
                logits = self(new, caches=caches)[:, -1]
                new = sample(logits, temperature, top_k, top_p, generator.next_draw())
                ids = concat([ids, new.to(ids.dtype)], axis=1)
        return ids


def _check_sampling(max_new_tokens, temperature, top_k, top_p):
    for what, n, least in (("max_new_tokens", max_new_tokens, 0), ("top_k", 1 if top_k is None else top_k, 1)):
        if isinstance(n, bool) or not isinstance(n, int):
            raise TypeError(f"generate: {what} must be an int, got {n!r}")
        if n < least:
            raise ValueError(f"generate: {what} must be at least {least}, got {n}")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"generate: temperature must be a finite number of at least 0, got {temperature}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"generate: top_p must be in (0, 1], got {top_p}")


def sample(logits, temperature, top_k, top_p, drawn):
    """Token ids (B, 1), drawn from logits (B, V) by inverting the distribution function at a random number each.

    The options are those of `GPT.generate`; drawn is the (seed, draw) of the random numbers.

    >>> import tinygrad_gpu as tg
    >>> from tinygrad_gpu.gpt import sample
    >>> sample(tg.Tensor([[0.0, 50.0, 0.0]]), temperature=1.0, top_k=None, top_p=None, drawn=(0, 0))
    tensor([[1]])
    """
    xp, z = array_module(logits.data), logits.data.astype("float64")
    if not bool(xp.isfinite(z.max(axis=1)).all()):
        raise ValueError("generate: the model's logits must be finite numbers, got NaN or infinity")
    if temperature == 0:
        return logits.argmax(axis=1, keepdims=True)
    order = xp.argsort(-z, axis=1, kind="stable")
    z = xp.take_along_axis(z, order, axis=1)
    with np.errstate(over="ignore"):  # a temperature near 0 makes -inf, and of that a probability 0
        p = xp.exp((z - z[:, :1]) / temperature)
    if top_k is not None:
        p[:, top_k:] = 0
    p /= p.sum(axis=1, keepdims=True)
    if top_p is not None:
        p[xp.cumsum(p, axis=1) - p >= top_p] = 0
    reached = xp.cumsum(p, axis=1)
    u = random.uniform(xp, len(z), z.dtype, drawn)[:, None]
    index = xp.minimum(
        (reached <= u * reached[:, -1:]).sum(axis=1, keepdims=True), (p > 0).sum(axis=1, keepdims=True) - 1
    )
    return Tensor._wrap(xp.take_along_axis(order, index, axis=1))
