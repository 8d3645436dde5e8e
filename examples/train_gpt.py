"""Train a byte-level GPT, from nothing to text.

    python examples/train_gpt.py                    on the source files of Python's own standard library
    python examples/train_gpt.py --data FILE ...    on any text; its last tenth is kept for validation

Writes runs/NAME/: config.json, metrics.csv, loss.png and model.safetensors, from which generate.py writes on.
"""

import argparse
import dataclasses
import json
import math
import os
import platform
import sysconfig
import time
from pathlib import Path

import numpy as np

import tinygrad_gpu as tg
from tinygrad_gpu import io
from tinygrad_gpu.data import ByteTokenizer, TokenLoader, evaluation_batches
from tinygrad_gpu.trainer import Trainer

# What a kind of device does in a sensible time: two CPU cores in about two minutes, a GPU in a few.
DEFAULTS = {
    "cpu": {"n_layer": 2, "n_head": 2, "n_embd": 128, "block_size": 64, "batch_size": 16, "steps": 1800, "lr": 4e-3},
    "cuda": {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256, "batch_size": 64, "steps": 2000, "lr": 1e-3},
}
DTYPES = {"float32": tg.float32, "bfloat16": tg.bfloat16, "float16": tg.float16}
NO_SOURCES = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
MOST_OF_A_FILE, MOST_BYTES = 2**17, 2**24  # read of the standard library: a few long files must not outweigh the rest


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: {message}\n")  # one line, without the usage

    def use_device(self, name):
        """Make the device the default one, or stop."""
        try:
            tg.set_default_device(name)
        except (ValueError, RuntimeError) as error:
            self.error(f"argument --device: {error}")


def number(kind, low, high, name):
    """An argparse type: a number of `kind` in [low, high), which error messages call `name`."""

    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value < high:
            raise argparse.ArgumentTypeError(f"must be {name}, got {text!r}")
        return value

    return parse


positive = number(int, 1, math.inf, "a positive integer")


def parse_arguments():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", nargs="+", metavar="FILE", help="text to train on (default: the standard library)")
    add("--name", default="gpt", help="write to runs/NAME, replacing what is there (default: gpt)")
    add("--n-layer", type=positive, help="blocks")
    add("--n-head", type=positive, help="attention heads of a block")
    add("--n-embd", type=positive, help="width, a multiple of the heads")
    add("--block-size", type=positive, help="context, in bytes")
    add("--batch-size", type=positive, help="contexts a step")
    add("--dropout", type=number(float, 0, 1, "in [0, 1)"), default=0.0)
    add("--steps", type=positive)
    add("--lr", type=number(float, 1e-12, 1e3, "a positive number"), help="peak learning rate")
    add("--seed", type=number(int, 0, 2**64, "an integer in [0, 2**64)"), default=0)
    add("--device", help="cpu, cuda or cuda:N (default: a GPU where one works)")
    add("--dtype", choices=DTYPES, default="float32", help="of weights and activations")
    args = parser.parse_args()
    parser.use_device(args.device)
    args.device = tg.default_device()
    for name, value in DEFAULTS[args.device.partition(":")[0]].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return parser, args


def standard_library(context):
    """(training, validation): the bytes of the standard library's source files in a fixed order, each tenth file for
    validation."""
    parts, size = ([], []), 0
    for i, path in enumerate(source_files(sysconfig.get_paths()["stdlib"])):
        text = path.read_bytes()[: min(MOST_OF_A_FILE, MOST_BYTES - size)]
        parts[i % 10 == 9].append(text)
        size += len(text)
    train, validation = (b"".join(texts) for texts in parts)
    if min(len(train), len(validation)) <= context:
        raise ValueError("this Python came without the sources of its standard library; use --data FILE")
    return train, validation


def source_files(root):
    for directory, inner, files in os.walk(root):
        inner[:] = sorted(set(inner) - NO_SOURCES)
        yield from (Path(directory, file) for file in sorted(files) if file.endswith(".py"))


def given_text(files, context):
    """(training, validation): the bytes of the files one after another, and the last tenth of them."""
    texts = []
    for file in files:
        try:
            texts.append(Path(file).read_bytes())
        except OSError as error:
            raise ValueError(f"{file}: {error.strerror}") from error
        if not texts[-1]:
            raise ValueError(f"{file}: the file is empty")
    text = b"".join(texts)
    cut = len(text) - max(len(text) // 10, context + 1)
    if cut <= context:
        raise ValueError(
            f"the text is too short: {len(text)} bytes; it takes {2 * context + 2}, a context of {context} and a byte "
            f"more, once to train and once to validate"
        )
    return text[:cut], text[cut:]


def bigram_loss(train, batches):
    """The mean loss on the batches of a model that sees one byte back, fitted on the training bytes: the frequencies of
    pairs, to which the frequency of the second byte alone counts as one more observation."""
    pairs = np.bincount(train[:-1].astype(np.int64) * 256 + train[1:], minlength=256 * 256).reshape(256, 256)
    single = (np.bincount(train, minlength=256) + 1) / (len(train) + 256)
    p = (pairs + single) / (pairs.sum(axis=1, keepdims=True) + 1)
    seen, following = (np.concatenate([part.numpy().ravel() for part in side]) for side in zip(*batches, strict=True))
    return -np.log(p[seen, following]).mean()


BETAS = (0.9, 0.99)


def decay_groups(parameters):
    """Parameter groups with weight decay on the matrices alone."""
    parameters = list(parameters)
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def make_trainer(args, model, train, eval_batches, metrics):
    """AdamW; the rate warms up, then falls as half a cosine."""
    return Trainer(
        model,
        tg.optim.AdamW(decay_groups(model.parameters()), betas=BETAS, max_grad_norm=1.0),
        TokenLoader(train, args.batch_size, args.block_size, seed=args.seed),
        schedule=lambda step: tg.optim.cosine_with_warmup(step, lr=args.lr, warmup=args.steps // 20, total=args.steps),
        scaler=tg.optim.GradScaler() if args.dtype == "float16" else None,
        eval_batches=eval_batches,
        eval_every=max(args.steps // 10, 1),
        metrics=metrics,
    )


def draw(history, bigram, path):
    """The losses against the step, as a picture."""
    try:
        import matplotlib
    except ImportError:
        print(f"no {path}: drawing needs matplotlib (pip install matplotlib)")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot([r["step"] for r in history], [r["loss"] for r in history], label="training", alpha=0.6)
    measured = [r for r in history if r["val_loss"] is not None]
    axes.plot([r["step"] for r in measured], [r["val_loss"] for r in measured], "o-", label="validation", markersize=3)
    axes.axhline(bigram, linestyle="--", color="gray", label="bigram model, validation")
    axes.set(xlabel="step", ylabel="loss (nats a byte)")
    axes.legend()
    figure.savefig(path, dpi=150)


def main():
    began = time.perf_counter()
    parser, args = parse_arguments()
    tokenizer = ByteTokenizer()
    try:
        sizes = {name: getattr(args, name) for name in ("block_size", "n_layer", "n_head", "n_embd", "dropout")}
        config = tg.gpt.GPTConfig(vocab_size=tokenizer.vocab_size, **sizes)
        texts = given_text(args.data, args.block_size) if args.data else standard_library(args.block_size)
        run = Path("runs", args.name)
        run.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        parser.error(str(error))

    train, validation = (tokenizer.encode(text) for text in texts)
    eval_batches = evaluation_batches(validation, args.batch_size, args.block_size, batches=20)
    bigram = bigram_loss(train, eval_batches)
    tg.manual_seed(args.seed)
    model = tg.gpt.GPT(config).to(DTYPES[args.dtype])
    source = " ".join(args.data or [f"the standard library of Python {platform.python_version()}"])
    print(f"device    {args.device}, {args.dtype}")
    print(f"data      {source}: {len(train):,} bytes to train on, {len(validation):,} to validate")
    shape = f"{args.n_layer} layers, {args.n_head} heads, {args.n_embd} wide"
    print(f"model     {shape}: {model.num_parameters():,} parameters")
    print(f"training  {args.steps:,} steps of {args.batch_size} contexts of {args.block_size} bytes; writing {run}")
    record = {"model": dataclasses.asdict(config), "training": vars(args)}
    (run / "config.json").write_text(json.dumps(record, indent=2) + "\n")

    trainer = make_trainer(args, model, train, eval_batches, run / "metrics.csv")
    trainer.fit(args.steps)
    io.save(run / "model.safetensors", model.state_dict())
    draw(trainer.history, bigram, run / "loss.png")
    print(f"validation loss {trainer.history[-1]['val_loss']:.3f}; a bigram model of the same bytes has {bigram:.3f}")

    prompt = tokenizer.encode("\n" if args.data else "def ")
    written = model.generate(tg.Tensor(prompt[None].astype(np.int64)), 400, temperature=0.8, top_k=50, seed=args.seed)
    print(f"\n{tokenizer.decode(written[0])}\n")
    print(f"{time.perf_counter() - began:.0f} s in all; for more: python examples/generate.py {run} --prompt 'def '")


if __name__ == "__main__":
    main()
