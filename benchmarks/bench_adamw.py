"""AdamW's step with clipping on a GPU against PyTorch's fused one: GPT-2's tensors, and 10^9 parameters in one.

python benchmarks/bench_adamw.py [--keep]
"""

import sys
from pathlib import Path

import cupy

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import tinygrad_gpu as tg  # noqa: E402
from benchmarks.harness import Case, as_torch, distance, main  # noqa: E402

C = 768
BLOCK = [(C,), (C,), (3 * C, C), (3 * C,), (C, C), (C,), (C,), (C,), (4 * C, C), (4 * C,), (C, 4 * C), (C,)]
SHAPES = {
    "124M in 148 tensors": [(50257, C), (1024, C), *BLOCK * 12, (C,), (C,)],
    "1G in one": [(10**9,)],
}
OPTIONS = {"lr": 6e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}


def normal(shape):
    return cupy.random.standard_normal(shape, dtype=cupy.float32)


def cases(name, dtype):
    """Half weights are copies of float32 masters, in PyTorch too."""
    import torch

    starts = [(0.02 * normal(shape)).astype(dtype) for shape in SHAPES[name]]
    ours = tg.optim.AdamW([tg.nn.Parameter(tg.Tensor(w)) for w in starts], max_grad_norm=1.0, **OPTIONS)
    masters = [torch.nn.Parameter(as_torch(w).float().clone()) for w in starts]
    peer = torch.optim.AdamW(masters, fused=True, **OPTIONS)
    for p, q in zip(ours.param_groups[0]["params"], masters, strict=True):
        g = normal(p.shape)
        p.grad, q.grad = tg.Tensor(g), as_torch(g)
    copies = [as_torch(w) for w in starts]

    def theirs():
        torch.nn.utils.clip_grad_norm_(masters, 1.0, foreach=True)
        peer.step()
        if dtype != tg.float32:
            with torch.no_grad():
                torch._foreach_copy_(copies, masters)

    def check():
        """The masters after three more steps; what is timed keeps both at the same number of them."""
        for _ in range(3):
            ours.step()
            theirs()
        (bucket,) = ours._buckets
        pairs = zip(bucket.parts, masters, strict=True)
        return max(distance(bucket.masters[part], cupy.from_dlpack(q.detach()).ravel()) for part, q in pairs), 2e-6

    # The gradient is read twice; weight and moments are read and written; half weights are written.
    moved = (32 if dtype == tg.float32 else 34) * sum(w.size for w in starts)
    # What step() queues, and step(), which also waits for the norm and counts the step.
    for label, run in (("launches", lambda: ours._start(1.0)), ("step()", ours.step)):
        yield Case(f"{label} {name} {dtype}", run, {"torch": theirs}, check, bytes=moved)


def every():
    for name, dtype in (
        ("124M in 148 tensors", tg.float32),
        ("124M in 148 tensors", tg.bfloat16),
        ("1G in one", tg.float32),
    ):
        yield from cases(name, dtype)


if __name__ == "__main__":
    main("bench_adamw", __doc__, every)
