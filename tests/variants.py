"""What the ops may launch on each GPU, found by asking them.

Each op is called at shapes that take every way through its launcher, with a stand-in for the GPU that notes launches
and runs nothing: what is compiled in the tests is what the ops' own configs choose for that GPU.
"""

import contextlib
import functools
import itertools
import math
import operator
import os
import re
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np

import tinygrad_gpu as tg
import tinygrad_gpu.functional as F
from tests.compilers import compile_for
from tinygrad_gpu import kernel, tma
from tinygrad_gpu.kernel import Limits

# The GPUs to compile for, each with the multiprocessors and shared memory of a card that has it.
TARGETS = {
    "sm_75": Limits("sm_75", 32, 40, 64 << 10),  # T4
    "sm_80": Limits("sm_80", 32, 108, 163 << 10),  # A100
    "sm_86": Limits("sm_86", 32, 84, 99 << 10),  # A40
    "sm_89": Limits("sm_89", 32, 128, 99 << 10),  # RTX 4090
    "sm_90": kernel.H200,
    "sm_90a": kernel.H200,
    "sm_100": Limits("sm_100", 32, 148, 227 << 10),  # B200
    "sm_120": Limits("sm_120", 32, 170, 99 << 10),  # RTX 5090
    "gfx908": Limits("gfx908", 64, 120, 64 << 10),  # MI100
    "gfx90a": Limits("gfx90a", 64, 104, 64 << 10),  # MI210
    "gfx1030": Limits("gfx1030", 32, 40, 64 << 10),  # RX 6900 XT
}


SOURCES = sorted(path.name for path in kernel.folder().glob("*.cu"))


def text(source):
    """A kernel source as it stands in its file."""
    return (kernel.folder() / source).read_text()


def header(source):
    """The comment that a source begins with."""
    return re.match(r"(//.*\n)*", text(source))[0]


def names(source):
    """The kernels of a source, those of what it includes first."""
    return [name for name, _ in kernel._KERNEL.findall(kernel.source(source))]


# ---- the calls; `new(*shape)` makes a leaf, and what they yield is differentiated


def adamw(new):
    layer = tg.nn.Linear(9, 5).to(new().dtype)
    optimizer = tg.optim.AdamW(layer.parameters(), max_grad_norm=1.0)
    yield layer(new(4, 9))
    optimizer.step()


def copy(new):
    yield new(4, 3, 8).transpose(0, 1).contiguous()
    yield new(4, 8).T.contiguous()


def dropout(new):
    yield F.dropout(new(4, 8), 0.5)


def elementwise(new):
    for f in (operator.add, operator.sub, operator.mul):
        yield f(new(4, 8), new(8))
    for name in ("relu", "tanh", "sigmoid", "silu"):
        yield getattr(new(4, 8), name)()


def embedding(new):
    for dtype in _INDICES:
        yield F.embedding(tg.zeros(9, dtype=dtype), new(6, 16))


def gelu(new):
    for form in ("none", "tanh"):
        yield F.gelu(new(4, 8), form)


def gemm(new):
    for m in (64, 2048):  # few tiles and many
        yield new(m, 72) @ new(72, m)  # whose gradients are products with a transposed factor
    yield new(2, 5, 3) @ new(3, 7)
    yield new(64, 8192) @ new(8192, 64)  # cut along K
    for rows, inner in ((16384, 3072), (32768, 768)):  # whose weights' gradients take the larger tiles
        yield F.linear(new(rows, inner), new(768, inner), new(768))
    for rows, hidden, form in itertools.product((64, 2048), (72, 2048), ("none", "tanh")):
        x, r = new(rows, 72), new(rows, 72)
        yield F.mlp(x, new(hidden, 72), new(hidden), new(72, hidden), new(72), approximate=form, residual=r)
    layer = tg.nn.Linear(72, 64).to(new().dtype)
    tg.optim.SGD(layer.parameters(), lr=0.1)  # gives places for gradients, into which the second one is added
    for _ in range(2):
        yield layer(new(4, 72))


def layernorm(new):
    for width in _WIDTHS:
        x, w = new(4, width), new(width)
        yield F.layer_norm(x, w, w)
        yield F.layer_norm(x)
        yield F.rms_norm(x, w)


def linear_cross_entropy(new):
    kinds = (33, tg.int64, None), (3000, tg.int64, 3.0), (5000, tg.int64, None), (33, tg.int32, 3.0)
    for classes, dtype, softcap in kinds:
        targets = tg.zeros(4, dtype=dtype)
        yield F.linear_cross_entropy(new(4, 16), new(classes, 16), targets, new(classes), softcap=softcap)


def softmax(new):
    for width in _WIDTHS:
        yield F.softmax(new(4, width))
        yield F.log_softmax(new(4, width))
        keys, values = new(1, 1, width, 8), new(1, 1, width, 8)
        yield F.scaled_dot_product_attention(new(1, 1, 3, 8), keys, values, is_causal=True)


_INDICES = (tg.int64, tg.int32)
_WIDTHS = (5, 768, 12288, 50000)  # from a warp a row to rows that no block can keep
CALLS = (adamw, copy, dropout, elementwise, embedding, gelu, gemm, layernorm, linear_cross_entropy, softmax)


# ---- what they launch


class _Recorder:
    """Stands where a host build may: launches go nowhere but into a list."""

    def __init__(self, limits):
        self.limits, self.launches = limits, []

    def function(self, key):
        source, name, defines = key
        parameters = kernel.signature(kernel.source(source), name, defines)
        return kernel.Function(name, parameters, lambda what, values, arguments: self.launches.append(what))


@contextlib.contextmanager
def _recording(limits):
    before, device = kernel._host, tg.default_device()
    kernel._host = _Recorder(limits)
    tg.set_default_device("cpu")
    try:
        # Nothing computes what the ops go on with, and no driver describes tiles.
        with np.errstate(all="ignore"), mock.patch.object(tma, "_packed"):
            yield kernel._host.launches
    finally:
        kernel._host = before
        tg.set_default_device(device)


def _leaf(dtype, skipped, *shape):
    """Zeros that begin at a multiple of 16 bytes, or `skipped` elements further."""
    x = tg.Tensor(np.zeros(0, dtype), requires_grad=True)
    x.data = np.zeros(skipped + math.prod(shape), dtype)[skipped:].reshape(shape)
    return x


@functools.cache
def launches(target):
    """Every Launch of CALLS, forward and backward, in each dtype, at addresses with and without vector loads."""
    with _recording(TARGETS[target]) as found:
        for call in CALLS:
            for dtype in kernel.KERNEL_DTYPES:
                for skipped in (0, 1):
                    for y in call(functools.partial(_leaf, dtype, skipped)):
                        if y is not None:
                            y.backward(tg.ones_like(y), retain_graph=True)
    return tuple(found)


# How many values of defines are tried together, whatever the others are: three on the GPU that kernels are tuned on,
# two on the oldest, elsewhere each alone: a compile takes 0.1 to 1.5 s.
_TOGETHER = {"sm_75": 2, "sm_90": 3}


@functools.cache
def variants(source, target):
    """{defines: [Launch]}: what a source is compiled with for a target, not all of `launches` but so many of them that
    any values of _TOGETHER defines, or of one less and a kernel, which occur together there do here."""
    found, values = {}, {}
    for launch in launches(target):
        if launch.source == source:
            found.setdefault(launch.defines, []).append(launch)
            parts = (launch.name, *launch.defines)
            together = itertools.combinations(parts, min(_TOGETHER.get(target, 1), len(parts)))
            values.setdefault(launch.defines, set()).update(together)
    chosen, missing = {}, set().union(*values.values())
    while missing:
        best = max(found, key=lambda defines: len(values[defines] & missing))
        chosen[best] = found[best]
        missing -= values[best]
    return chosen


@functools.cache
def compiled(source, target):
    """[(Launch, Needs)] of the variants of a source on a target; RuntimeError where it does not compile."""

    def one(defines, group):
        needs = compile_for(target, *kernel.program(source, defines, TARGETS[target].warp_size))
        return [(launch, needs[launch.name]) for launch in group]

    found = variants(source, target)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # compilers run without Python's lock
        return [pair for pairs in pool.map(one, found.keys(), found.values()) for pair in pairs]


def fault(launch, needs, target):
    """What keeps a launch from running on a target as the source's header says, or None."""
    shared, threads, most = launch.shared + needs.shared, math.prod(launch.block), TARGETS[target].shared_memory
    if (needs.stack or needs.spills) and "spill" not in header(launch.source):
        return f"{needs.stack} bytes of stack and {needs.spills} of spills, of which the header says nothing"
    if shared > most:
        return f"{shared} bytes of shared memory, where a block has {most}"
    if threads > needs.threads:
        return f"{threads} threads a block, where {needs.registers} registers allow {needs.threads}"
    return None
