"""The default training step of examples/train_gpt.py on the CPU, against PyTorch's eager step of the same model.

    python benchmarks/bench_cpu.py [--rounds 10] [--keep]

Both start from the same weights, batches and AdamW settings, and the benchmark stops unless their losses agree. Each
library runs in a process of its own, since two thread pools in one process slow each other down; the processes take
turns, a few steps at a time, so that whatever else the machine does meets both. PyTorch gets its fused attention and
its fused AdamW.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks.harness import keep, spread  # noqa: E402
from examples.train_gpt import BETAS, DEFAULTS, decay_groups  # noqa: E402

SIZES = DEFAULTS["cpu"]
STEPS = 5  # a turn
TARGET = 1.5
ADAMW = {"lr": SIZES["lr"], "betas": BETAS}


def batches():
    rng = np.random.default_rng(0)
    while True:
        tokens = rng.integers(0, 256, (SIZES["batch_size"], SIZES["block_size"] + 1))
        yield np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])


def config():
    from tinygrad_gpu.gpt import GPTConfig

    return GPTConfig(256, SIZES["block_size"], SIZES["n_layer"], SIZES["n_head"], SIZES["n_embd"])


def ours(weights):
    import tinygrad_gpu as tg

    tg.set_default_device("cpu")
    model = tg.gpt.GPT(config())
    model.load_state_dict(weights)
    optimizer = tg.optim.AdamW(decay_groups(model.parameters()), max_grad_norm=1.0, **ADAMW)

    def step(ids, targets):
        optimizer.zero_grad()
        loss = model(tg.Tensor(ids), tg.Tensor(targets))
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def theirs(weights):
    import torch
    import torch.nn.functional as F

    from tests.peers import torch_gpt

    class Attention(torch_gpt.Attention):
        def forward(self, x):
            b, t, c = x.shape
            heads = self.c_attn(x).view(b, t, 3 * self.heads, self.width).transpose(1, 2)
            y = F.scaled_dot_product_attention(*heads.split(self.heads, dim=1), is_causal=True)
            return self.c_proj(y.transpose(1, 2).reshape(b, t, c))

    torch_gpt.Attention = Attention
    model = torch_gpt.GPT(config())
    model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
    optimizer = torch.optim.AdamW(decay_groups(model.parameters()), fused=True, **ADAMW)

    def step(ids, targets):
        optimizer.zero_grad()
        loss = torch_gpt.loss(model, torch.from_numpy(ids), torch.from_numpy(targets))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


def work(library, weights):
    """Answer each line on standard input with the times (s) and losses of the next STEPS steps."""
    step, source = {"ours": ours, "torch": theirs}[library](dict(np.load(weights))), batches()
    for _ in sys.stdin:
        times, losses = [], []
        for _ in range(STEPS):
            batch = next(source)
            began = time.perf_counter()
            losses.append(step(*batch))
            times.append(time.perf_counter() - began)
        print(json.dumps({"times": times, "losses": losses}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="turns of each library")
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/bench_cpu.json")
    parser.add_argument("--work", nargs=2, metavar=("LIBRARY", "WEIGHTS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        return work(*args.work)

    import tinygrad_gpu as tg

    tg.set_default_device("cpu")
    tg.manual_seed(0)
    weights = {name: value.numpy() for name, value in tg.gpt.GPT(config()).state_dict().items()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "weights.npz")
        np.savez(path, **weights)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        workers = {
            library: subprocess.Popen([sys.executable, __file__, "--work", library, path], **pipes)
            for library in ("ours", "torch")
        }
        times = {library: [] for library in workers}
        for turn in range(args.rounds + 1):
            answers = {}
            for library, worker in workers.items():
                print("go", file=worker.stdin, flush=True)
                answer = worker.stdout.readline()
                if not answer:
                    sys.exit(f"bench_cpu: the process of {library} failed")
                answers[library] = json.loads(answer)
                if turn:  # the first warms up
                    times[library] += answers[library]["times"]
            losses = [answers[library]["losses"] for library in workers]
            if not np.allclose(*losses, rtol=1e-4):
                sys.exit(f"bench_cpu: the losses differ, ours {losses[0]}, torch {losses[1]}")
        for worker in workers.values():
            worker.stdin.close()
            worker.wait()

    results = {library: {k: round(1e3 * v, 2) for k, v in spread(t).items()} for library, t in times.items()}
    ratio = results["ours"]["median"] / results["torch"]["median"]
    print(f"model: {SIZES}; {args.rounds * STEPS} steps each, losses agree to 1e-4")
    for library, row in results.items():
        print(f"{library:6s} {row['median']:8.2f} ms a step (p20 {row['p20']:.2f}, p80 {row['p80']:.2f})")
    print(f"ratio  {ratio:8.2f} (target: at most {TARGET})")
    if args.keep:
        print(
            "kept in",
            keep("bench_cpu", {"sizes": SIZES, "ms_per_step": results, "ratio": round(ratio, 3), "target": TARGET}),
        )


if __name__ == "__main__":
    main()
