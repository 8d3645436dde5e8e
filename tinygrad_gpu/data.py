"""Text as tokens, and tokens as batches: a byte tokenizer, a loader for training, fixed batches for evaluation."""

import numpy as np

from . import device as devices
from .random import philox
from .tensor import Tensor


class ByteTokenizer:
    """A token a byte of the text's UTF-8: `vocab_size` is 256, and every text has an encoding.

    >>> from tinygrad_gpu.data import ByteTokenizer
    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.encode("né")
    array([110, 195, 169], dtype=uint8)
    >>> tokenizer.decode([110, 195, 169])
    'né'
    """

    vocab_size = 256

    def encode(self, text):
        """The tokens of a str (as UTF-8) or of bytes (as they are): a uint8 array (N,). TypeError for anything else."""
        if not isinstance(text, (str, bytes)):
            raise TypeError(f"encode: text must be str or bytes, got {type(text).__name__}")
        return np.frombuffer(text.encode() if isinstance(text, str) else text, np.uint8)

    def decode(self, ids):
        """The text of tokens (N,), a Tensor, array or list; bytes that are no UTF-8 become U+FFFD, as a model may write
        them. ValueError for other shapes and for values outside [0, 256)."""
        ids = np.asarray(ids.numpy() if isinstance(ids, Tensor) else ids)
        if ids.ndim != 1:
            raise ValueError(f"decode: ids must have shape (N,), got {ids.shape}")
        if ids.size and not (ids.min() >= 0 and ids.max() < 256):
            raise ValueError(f"decode: ids must be in [0, 256), got {ids.min()} to {ids.max()}")
        return bytes(ids.astype(np.uint8)).decode(errors="replace")


# Draws from here on belong to loaders: the generator of `tg.manual_seed` counts from 0 and never comes so far.
_FIRST_DRAW = 2**63


class TokenLoader:
    """Endless batches for training: an iterator of `(ids, targets)`, int64 Tensors (batch_size, seq_len) on `device`.

    tokens: a 1-D integer array (a memory map too). targets[b, t] is the token that follows ids[b, t]. An epoch cuts the
    tokens into windows of seq_len that do not overlap, from a random first token on, and takes them in random order:
    it predicts each token once, but for fewer than 2 seq_len of them at the ends. A batch may hold the last windows of
    one epoch and the first of the next.

    What comes next depends on the seed and on `position`, the number of windows given out, alone: `state_dict()` is
    these two, and after `load_state_dict()` the same batches follow.

    ValueError for fewer than seq_len + 1 tokens or sizes below 1, TypeError for tokens that are no integers.

    >>> import numpy as np
    >>> from tinygrad_gpu.data import TokenLoader
    >>> ids, targets = next(TokenLoader(np.arange(5), batch_size=1, seq_len=4, seed=0, device="cpu"))
    >>> ids.tolist(), targets.tolist()
    ([[0, 1, 2, 3]], [[1, 2, 3, 4]])
    """

    def __init__(self, tokens, batch_size, seq_len, *, seed=0, device=None):
        self._tokens = _check("TokenLoader", tokens, batch_size, seq_len)
        self._device = device or devices.default_device()
        devices.index(self._device, "TokenLoader")
        self.batch_size, self.seq_len = batch_size, seq_len
        self.load_state_dict({"seed": seed, "position": 0})
        self.windows = max((len(self._tokens) - seq_len) // seq_len, 1)  # of an epoch, whatever its first token

    def __iter__(self):
        return self

    def __next__(self):
        drawn = range(self.position, self.position + self.batch_size)
        starts = [self._starts(i // self.windows)[i % self.windows] for i in drawn]
        self.position = drawn.stop
        return _batch(self._tokens, np.array(starts), self.seq_len, self._device)

    def _starts(self, epoch):
        """Where the windows of an epoch start, in the order in which they are drawn."""
        if self._epoch != epoch:
            words = philox(np, self.seed, _FIRST_DRAW + epoch, self.windows + 1)
            room = min(len(self._tokens) - self.windows * self.seq_len, self.seq_len)
            first = int(words[-1]) * room >> 32
            self._epoch, self._order = epoch, first + self.seq_len * np.argsort(words[:-1], kind="stable")
        return self._order

    def state_dict(self):
        """{"seed": …, "position": …}: with the same tokens and sizes, all that decides the batches to come.

        >>> import numpy as np
        >>> from tinygrad_gpu.data import TokenLoader
        >>> loader = TokenLoader(np.arange(9), batch_size=2, seq_len=4, seed=1)
        >>> _ = next(loader)
        >>> loader.state_dict()
        {'seed': 1, 'position': 2}
        """
        return {"seed": self.seed, "position": self.position}

    def load_state_dict(self, state):
        """Go to where `state_dict()` was taken. ValueError for a state that is not one.

        >>> import numpy as np
        >>> from tinygrad_gpu.data import TokenLoader
        >>> loader = TokenLoader(np.arange(9), batch_size=2, seq_len=4, seed=1)
        >>> state, first = loader.state_dict(), next(loader)[0].tolist()
        >>> loader.load_state_dict(state)
        >>> next(loader)[0].tolist() == first
        True
        """
        if set(state) != {"seed", "position"}:
            raise ValueError(f"load_state_dict: the state must have seed and position, got {sorted(state)}")
        for what, n in state.items():
            _check_int("TokenLoader", what, n, 0)
        self.seed, self.position = int(state["seed"]), int(state["position"])
        self._epoch = None


def evaluation_batches(tokens, batch_size, seq_len, *, batches=None, device=None):
    """The batches on which to measure a model, always the same: a list of `(ids, targets)` as TokenLoader's, in order.

    All windows of the tokens (the last batch may be smaller), or as many as fill `batches`, evenly spread. Errors as
    TokenLoader's.

    >>> import numpy as np
    >>> from tinygrad_gpu.data import evaluation_batches
    >>> [ids.tolist() for ids, _ in evaluation_batches(np.arange(8), batch_size=2, seq_len=2, device="cpu")]
    [[[0, 1], [2, 3]], [[4, 5]]]
    """
    tokens = _check("evaluation_batches", tokens, batch_size, seq_len)
    if batches is not None:
        _check_int("evaluation_batches", "batches", batches, 1)
    device = device or devices.default_device()
    windows = (len(tokens) - 1) // seq_len
    taken = windows if batches is None else min(windows, batches * batch_size)
    starts = np.arange(taken) * windows // taken * seq_len
    return [_batch(tokens, starts[i : i + batch_size], seq_len, device) for i in range(0, taken, batch_size)]


def _batch(tokens, starts, seq_len, device):
    """The windows that begin at `starts`, and the same one token later, as Tensors on the device."""
    windows = tokens[starts[:, None] + np.arange(seq_len + 1)].astype(np.int64)
    return tuple(Tensor._wrap(devices.put(np.ascontiguousarray(w), device)) for w in (windows[:, :-1], windows[:, 1:]))


def _check(name, tokens, batch_size, seq_len):
    """`tokens` as an array, if a window of them can be taken."""
    _check_int(name, "batch_size", batch_size, 1)
    _check_int(name, "seq_len", seq_len, 1)
    tokens = np.asarray(tokens)
    if tokens.dtype.kind not in "iu":
        raise TypeError(f"{name}: tokens must be integers, got {tokens.dtype}")
    if tokens.ndim != 1 or len(tokens) <= seq_len:
        raise ValueError(
            f"{name}: tokens must have shape (N,), N > seq_len = {seq_len} (inputs and targets), got {tokens.shape}"
        )
    return tokens


def _check_int(name, what, n, least):
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or not least <= n < 2**64:
        raise ValueError(f"{name}: {what} must be an int of at least {least} (and below 2**64), got {n!r}")
