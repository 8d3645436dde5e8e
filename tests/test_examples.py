"""The example programs, run as a user runs them: what they write, and one line and status 2 for what they cannot do."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tinygrad_gpu as tg
from tinygrad_gpu import io
from tinygrad_gpu.trainer import COLUMNS

EXAMPLES = Path(__file__).parents[1] / "examples"
TEXT = "def double(x):\n    return 2 * x\n\n\n" * 60
TINY = "--n-layer 1 --n-head 2 --n-embd 16 --block-size 8 --batch-size 4 --steps 12 --device cpu"


def run(script, arguments, directory):
    """The finished process of an example, run in `directory`."""
    where = os.pathsep.join(filter(None, [str(EXAMPLES.parent), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, EXAMPLES / script, *arguments.split()],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": where, "OPENBLAS_NUM_THREADS": "1"},  # tiny products: threads only wait
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A directory that holds text.py and, in runs/tiny, what the example made of it; and what it printed."""
    directory = tmp_path_factory.mktemp("trained")
    (directory / "text.py").write_text(TEXT)
    done = run("train_gpt.py", f"--data text.py --name tiny {TINY}", directory)
    assert done.returncode == 0, done.stderr
    return directory, done


def test_train_shows_what_it_does(trained):
    _, done = trained
    parameters = 256 * 16 + 8 * 16 + (16 * 48 + 48 + 16 * 16 + 16 + 2 * 16 * 64 + 64 + 16 + 4 * 16) + 2 * 16
    for line in (
        r"device +cpu, float32",
        r"data +text.py: 1,836 bytes to train on, 204 to validate",
        rf"model +1 layers, 2 heads, 16 wide: {parameters:,} parameters",
        r"step +12: loss \d\.\d{3}, validation loss \d\.\d{3}",
        r"validation loss \d\.\d{3}; a bigram model of the same bytes has 0\.\d{3}",
    ):
        assert re.search(f"^{line}$", done.stdout, re.MULTILINE), line
    assert re.search(r"12/12 .*loss \d\.\d{3}, [\d,]+ tokens/s", done.stderr)
    sample = done.stdout.partition("bytes has ")[2]
    assert len(sample) > 200


def test_train_writes_a_run(trained):
    directory, _ = trained
    tiny = directory / "runs" / "tiny"
    assert {path.name for path in tiny.iterdir()} == {"config.json", "metrics.csv", "loss.png", "model.safetensors"}
    config = json.loads((tiny / "config.json").read_text())
    assert config["model"]["n_embd"] == 16
    assert config["training"]["steps"] == 12
    rows = list(csv.DictReader((tiny / "metrics.csv").read_text().splitlines()))
    assert tuple(rows[0]) == COLUMNS
    assert int(rows[-1]["step"]) == 12
    assert float(rows[-1]["val_loss"]) < float(rows[0]["val_loss"])
    assert (tiny / "loss.png").read_bytes().startswith(b"\x89PNG")
    state = io.load(tiny / "model.safetensors", device="cpu")
    tg.gpt.GPT(tg.gpt.GPTConfig(**config["model"])).load_state_dict(state)


def test_the_same_seed_gives_the_same_weights(trained):
    directory, _ = trained
    for name, seed in (("again", 0), ("other", 1)):
        assert run("train_gpt.py", f"--data text.py --name {name} --seed {seed} {TINY}", directory).returncode == 0
    tiny, again, other = (
        (directory / "runs" / n / "model.safetensors").read_bytes() for n in ("tiny", "again", "other")
    )
    assert tiny == again
    assert tiny != other


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_types_train_and_generate(trained, dtype):
    directory, _ = trained
    done = run("train_gpt.py", f"--data text.py text.py --name {dtype} --dtype {dtype} {TINY}", directory)
    assert done.returncode == 0, done.stderr
    state = io.load(directory / "runs" / dtype / "model.safetensors", device="cpu")
    assert {t.dtype.name for t in state.values()} == {dtype}
    assert run("generate.py", f"runs/{dtype} --tokens 5 --device cpu", directory).returncode == 0


def test_the_default_text_is_the_standard_library(tmp_path):
    done = run("train_gpt.py", TINY, tmp_path)
    assert done.returncode == 0, done.stderr
    found = re.search(
        r"data +the standard library of Python [\d.]+: ([\d,]+) bytes to train on, ([\d,]+) to", done.stdout
    )
    train, validation = (int(n.replace(",", "")) for n in found.groups())
    assert 4e6 < train < 2**24
    assert 0.05 < validation / train < 0.2
    assert (tmp_path / "runs" / "gpt" / "model.safetensors").exists()


def test_generate_writes_on_from_the_prompt(trained):
    directory, _ = trained
    texts = [
        run("generate.py", f"runs/tiny --prompt def --tokens 20 --device cpu {options}", directory).stdout
        for options in ("--seed 1", "--seed 1", "--seed 2", "--temperature 0 --seed 1", "--top-k 1", "--top-p 1e-6")
    ]
    assert all(text.startswith("def") for text in texts)
    assert texts[0] == texts[1] != texts[2]
    assert texts[3] == texts[4] == texts[5]  # each takes the likeliest


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("train_gpt.py", "--data missing.txt", "missing.txt: No such file or directory"),
        ("train_gpt.py", "--data text.py empty.txt", "empty.txt: the file is empty"),
        ("train_gpt.py", "--data .", ".: Is a directory"),
        ("train_gpt.py", "--data short.txt --block-size 8", "the text is too short: 17 bytes; it takes 18, .*"),
        ("train_gpt.py", "--n-embd 30 --n-head 4", "GPTConfig: n_embd must be a multiple of n_head, got 30 and 4"),
        ("train_gpt.py", "--n-layer 0", "argument --n-layer: must be a positive integer, got '0'"),
        ("train_gpt.py", "--batch-size -4", "argument --batch-size: must be a positive integer, got '-4'"),
        ("train_gpt.py", "--block-size 1.5", "argument --block-size: must be a positive integer, got '1.5'"),
        ("train_gpt.py", "--steps many", "argument --steps: must be a positive integer, got 'many'"),
        ("train_gpt.py", "--lr 0", "argument --lr: must be a positive number, got '0'"),
        ("train_gpt.py", "--lr nan", "argument --lr: must be a positive number, got 'nan'"),
        ("train_gpt.py", "--dropout 1", r"argument --dropout: must be in \[0, 1\), got '1'"),
        ("train_gpt.py", "--seed -1", r"argument --seed: must be an integer in \[0, 2\*\*64\), got '-1'"),
        ("train_gpt.py", "--dtype int8", "argument --dtype: invalid choice: 'int8' .*"),
        ("train_gpt.py", "--device tpu", 'argument --device: .*must be "cpu", "cuda" or "cuda:N", got \'tpu\''),
        ("train_gpt.py", "--device cuda:99", "argument --device: .*"),
        (
            "generate.py",
            "runs/tiny --device tpu",
            'argument --device: .*must be "cpu", "cuda" or "cuda:N", got \'tpu\'',
        ),
        ("train_gpt.py", "--data text.py --name file/of --device cpu", ".*Not a directory.*"),
        ("generate.py", "runs/missing", r"runs/missing: .*No such file or directory.*config.json.*"),
        ("generate.py", "runs/no_json", "runs/no_json: config.json is not as train_gpt.py writes it: .*"),
        ("generate.py", "runs/no_weights", "runs/no_weights: load: there is no file .*model.safetensors"),
        ("generate.py", "runs/other_weights", "runs/other_weights: load_state_dict: missing .*"),
        ("generate.py", "runs/tiny --prompt=", "argument --prompt: must not be empty"),
        (
            "generate.py",
            "runs/tiny --temperature -1",
            "argument --temperature: must be a number of at least 0, got '-1'",
        ),
        ("generate.py", "runs/tiny --top-k 0", "argument --top-k: must be a positive integer, got '0'"),
        ("generate.py", "runs/tiny --top-p 0", r"argument --top-p: must be in \(0, 1\], got '0'"),
        ("generate.py", "", "the following arguments are required: run"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_status_2(broken, script, arguments, message):
    before = sorted(broken.rglob("*"))
    done = run(script, arguments, broken)
    assert done.returncode == 2
    assert re.fullmatch(f"{script}: {message}\n", done.stderr), done.stderr
    assert done.stdout == ""
    assert sorted(broken.rglob("*")) == before  # no run was begun


@pytest.fixture(scope="module")
def broken(trained, tmp_path_factory):
    """A directory of files that are no good, and runs that lack something."""
    directory = tmp_path_factory.mktemp("broken")
    shutil.copytree(trained[0], directory, dirs_exist_ok=True)
    (directory / "empty.txt").touch()
    (directory / "short.txt").write_text("seventeen bytes..")
    (directory / "runs" / "file").touch()
    tiny = directory / "runs" / "tiny"
    for name in ("no_json", "no_weights", "other_weights"):
        shutil.copytree(tiny, directory / "runs" / name)
    (directory / "runs" / "no_json" / "config.json").write_text("{")
    (directory / "runs" / "no_weights" / "model.safetensors").unlink()
    io.save(directory / "runs" / "other_weights" / "model.safetensors", {"w": tg.ones(1)})
    return directory
