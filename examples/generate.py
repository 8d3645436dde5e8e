"""Let a GPT that train_gpt.py trained write on from a prompt.

python examples/generate.py runs/gpt --prompt "def "
"""

import argparse
import json
from pathlib import Path

import numpy as np
from train_gpt import Parser, number, positive  # beside this file

import tinygrad_gpu as tg
from tinygrad_gpu import io
from tinygrad_gpu.data import ByteTokenizer


def parse_arguments():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("run", type=Path, help="the directory that train_gpt.py wrote")
    add("--prompt", default="def ", help="the text to begin with")
    add("--tokens", type=positive, default=500, help="bytes to write")
    add(
        "--temperature", type=number(float, 0, 1e6, "a number of at least 0"), default=0.8, help="0 takes the likeliest"
    )
    add("--top-k", type=positive, help="draw from the K likeliest bytes alone")
    add("--top-p", type=number(float, 1e-9, 1.0000001, "in (0, 1]"), help="draw from the fewest bytes of probability P")
    add("--seed", type=number(int, 0, 2**64, "an integer in [0, 2**64)"), default=0)
    add("--device", help="cpu, cuda or cuda:N (default: a GPU where one works)")
    return parser, parser.parse_args()


def load(run):
    """The model that lies in a run's directory."""
    text = (run / "config.json").read_text()
    try:
        config = tg.gpt.GPTConfig(**json.loads(text)["model"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"config.json is not as train_gpt.py writes it: {error}") from error
    state = io.load(run / "model.safetensors")
    model = tg.gpt.GPT(config).to(next(iter(state.values())).dtype)
    model.load_state_dict(state)
    return model.eval()


def main():
    parser, args = parse_arguments()
    tokenizer = ByteTokenizer()
    prompt = tokenizer.encode(args.prompt)
    if not len(prompt):
        parser.error("argument --prompt: must not be empty")
    parser.use_device(args.device)
    try:
        model = load(args.run)
    except (OSError, ValueError) as error:
        parser.error(f"{args.run}: {error}")
    ids = tg.Tensor(prompt[None].astype(np.int64))
    options = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p, "seed": args.seed}
    print(tokenizer.decode(model.generate(ids, args.tokens, **options)[0]))


if __name__ == "__main__":
    main()
