"""linear_cross_entropy on a GPU, forward and backward, in time and memory, against PyTorch, torch.compile, Liger-Kernel
and cut-cross-entropy; and its kernel of losses alone against a copy.

python benchmarks/bench_linear_cross_entropy.py [--budget BYTES] [--keep]
"""

import argparse
import importlib
import sys
from pathlib import Path

import cupy

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import tinygrad_gpu as tg  # noqa: E402
import tinygrad_gpu.functional as F  # noqa: E402
from benchmarks.harness import as_torch, copy_ceiling, distance, gemm_ceiling, gpu, keep, milliseconds  # noqa: E402
from tinygrad_gpu.ops import cross_entropy  # noqa: E402
from tinygrad_gpu.ops import linear_cross_entropy as op  # noqa: E402

PROBLEMS = [(16384, 4096, 128256), (32768, 768, 50304)]  # N, C, V: Llama 3's and GPT-2's last layers
BOUND = 2.0**-7  # of a gradient's error, relative to its size: it is rounded to bfloat16, and so is dz


def arrays(n, c, v):
    x, w = (cupy.random.standard_normal(s, dtype=cupy.float32) for s in ((n, c), (v, c)))
    w *= 2 / c**0.5  # logits of standard deviation 2
    return x.astype(tg.bfloat16), w.astype(tg.bfloat16), cupy.random.randint(0, v, n)


def run_ours(x, w, t, budget=None):
    """The loss and the gradients, W's in float32."""
    x, w = tg.from_dlpack(x).requires_grad_(), tg.nn.Parameter(tg.from_dlpack(w))
    loss = F.linear_cross_entropy(x, w, tg.from_dlpack(t), memory_budget=budget)
    loss.backward()
    return loss.data, x.grad.data, w.grad.data


def check(x, w, t, budget, rows=512):
    """The largest error of loss and gradients of some rows, against float64."""
    x, t = x[:rows], t[:rows]
    wide, weight = x.astype(cupy.float64), w.astype(cupy.float64)
    z, u = wide @ weight.T, cupy.ones(rows)
    losses, p, *sums = cross_entropy.fwd(z, t, u, None, 0.0, out=z)
    dz = cross_entropy.bwd(u / rows, p, t, None, 0.0, *sums)
    exact = losses.mean(), dz @ weight, dz.T @ wide
    return max(distance(a, b) for a, b in zip(run_ours(x, w, t, budget), exact, strict=True))


def peers(x, w, t):
    """{name: its loss as a function of PyTorch tensors}; None where it is not installed."""
    import torch

    def plain(x, w, t):
        return torch.nn.functional.cross_entropy((x @ w.T).float(), t)

    def found(module, name, call):
        try:
            function = getattr(importlib.import_module(module), name)
        except ImportError:
            return None
        return lambda *arguments: call(function, *arguments)

    losses = {
        "torch": plain,
        "torch.compile": torch.compile(plain),
        "Liger-Kernel": found(
            "liger_kernel.ops.fused_linear_cross_entropy",
            "LigerFusedLinearCrossEntropyFunction",
            lambda f, *arguments: f.apply(*arguments)[0],  # the loss, then what was not asked for
        ),
        "cut-cross-entropy": found("cut_cross_entropy", "linear_cross_entropy", lambda f, *arguments: f(*arguments)),
    }
    x, w, t = (as_torch(a) for a in (x, w, t))
    x.requires_grad_(), w.requires_grad_()

    def run(loss):
        loss(x, w, t).backward()
        x.grad = w.grad = None

    return {name: loss and (lambda loss=loss: run(loss)) for name, loss in losses.items()}


def memory_of_ours(run):
    """The bytes that a run adds to an empty memory pool."""
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        run()
    return pool.total_bytes()


def memory_of_torch(run):
    import torch

    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() - before


def compare(n, c, v, budget):
    import torch

    x, w, t = arrays(n, c, v)
    error = check(x, w, t, budget)
    if not error <= BOUND:
        raise SystemExit(
            f"bench_linear_cross_entropy: N={n}, C={c}, V={v}: the error is {error:.3g}, more than {BOUND:.3g}"
        )
    lines, flops, gradients = [], 6 * n * c * v, x.nbytes + 4 * w.size
    print(f"N={n}, C={c}, V={v}, bfloat16; error {error:.2g}")
    for name, run in {"ours": lambda: run_ours(x, w, t, budget), **peers(x, w, t)}.items():
        if run is None:
            print(f"  {name:18} not installed")
            continue
        cupy.get_default_memory_pool().free_all_blocks()
        torch.cuda.empty_cache()
        run()  # compiled, and what is kept from run to run is there
        memory = (memory_of_ours if name == "ours" else memory_of_torch)(run)
        time = milliseconds(run, 10)
        speed = flops / time["median"] / 1e9
        share = speed * 1e12 / gemm_ceiling(x.dtype)
        lines.append({"peer": name, "ms": time, "bytes": memory, "TFLOP/s": speed, "of_gemm": share})
        print(f"  {name:18} {time['median']:7.2f} ms {speed:5.0f} TFLOP/s {share:4.0%} of GEMM {memory / 1e9:6.2f} GB")
    ours, *others = lines
    for other in others:
        print(f"  {other['peer']:18} takes {other['ms']['median'] / ours['ms']['median']:.2f}x the time of ours")
    print(f"  the gradients alone, x's in bfloat16 and W's in float32: {gradients / 1e9:.2f} GB", flush=True)
    return {"N": n, "C": c, "V": v, "error": error, "gradients": gradients, "runs": lines}


def losses_alone(n, c, v):
    """A chunk's logits to losses and dz: each logit read once from memory, dz written."""
    rows = op.config_kernel(n, v, c, tg.bfloat16, None)
    z = cupy.random.standard_normal((rows, op.padded(v)), dtype=cupy.float32)
    losses, t, u = cupy.empty(rows, cupy.float32), cupy.random.randint(0, v, rows), cupy.ones(rows, cupy.float32)
    exact, expected = z[:, :v].astype(cupy.float64), cupy.empty(rows)
    exact = op.fwd(expected, exact, t, u, u, 0.0, 0.0, None)

    def run():
        return op.fwd_kernel(losses, z, t, u, u, 0.0, 0.0, None, v, tg.bfloat16)

    error = max(distance(run(), exact), distance(losses, expected))
    if not error <= BOUND:
        raise SystemExit(
            f"bench_linear_cross_entropy: {rows} rows of {v}: the error is {error:.3g}, more than {BOUND:.3g}"
        )
    time = milliseconds(run)
    speed = 6 * rows * v / time["median"] * 1e3
    share = speed / copy_ceiling()
    print(f"losses and dz {rows}x{v}: {time['median'] * 1e3:.1f} us {speed / 1e9:.0f} GB/s {share:.0%} of copy")
    return {"R": rows, "V": v, "error": error, "ms": time, "of_copy": share}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, help="memory_budget in bytes")
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/bench_linear_cross_entropy.json")
    options = parser.parse_args()
    alone = [losses_alone(*p) for p in PROBLEMS]
    whole = [compare(*p, options.budget) for p in PROBLEMS]
    if options.keep:
        found = {
            "gpu": gpu(),
            "copy_GB/s": copy_ceiling() / 1e9,
            "budget": options.budget,
            "kernel": alone,
            "whole": whole,
        }
        print("kept in", keep("bench_linear_cross_entropy", found))
