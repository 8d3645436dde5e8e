"""The training loop: it learns, evaluation leaves it alone, and what it writes down is what happened."""

import csv
import math

import numpy as np
import pytest

import tinygrad_gpu as tg
from tinygrad_gpu import random
from tinygrad_gpu.data import TokenLoader, evaluation_batches
from tinygrad_gpu.trainer import COLUMNS, Trainer

TOKENS = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 20, np.uint8) % 32


def make(lr=1e-2, batch_size=4, dropout=0.0, **options):
    """A Trainer of a tiny GPT from a fixed seed."""
    tg.manual_seed(1)
    model = tg.gpt.GPT(tg.gpt.GPTConfig(32, 8, n_layer=1, n_head=2, n_embd=16, dropout=dropout))
    optimizer = tg.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, max_grad_norm=1.0)
    loader = TokenLoader(TOKENS, batch_size, 8, seed=2)
    return Trainer(model, optimizer, loader, progress=False, **options)


def weights(trainer):
    return {name: t.numpy().copy() for name, t in trainer.model.state_dict().items()}


def assert_same_weights(a, b):
    a, b = weights(a), weights(b)
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def test_overfits_one_batch(device):
    trainer = make()
    trainer.batches = iter([next(trainer.batches)] * 300)
    trainer.fit(300)
    assert trainer.history[-1]["loss"] < 0.1 < 2 < trainer.history[0]["loss"]


def test_validation_loss_is_the_mean_over_all_tokens(device):
    batches = evaluation_batches(TOKENS[:53], 4, 8)  # the last batch is smaller
    trainer = make(eval_batches=batches)
    assert len(batches[0][0]) > len(batches[-1][0])
    ids = tg.concat([ids for ids, _ in batches])
    targets = tg.concat([targets for _, targets in batches])
    assert trainer.evaluate() == pytest.approx(trainer.model(ids, targets).item(), rel=1e-6)


def test_evaluation_does_not_disturb_training():
    """With dropout, the weights are the same bit for bit whether or not the model is evaluated on the way."""
    alone = make(dropout=0.3)
    alone.fit(12)
    drawn = random.default_generator.state_dict()
    evaluated = make(dropout=0.3, eval_batches=evaluation_batches(TOKENS, 4, 8, batches=2), eval_every=3)
    evaluated.fit(12)
    assert random.default_generator.state_dict() == drawn
    assert evaluated.model.training
    assert_same_weights(alone, evaluated)


@pytest.mark.parametrize("training", [True, False])
def test_evaluate_keeps_the_modes_and_the_gradients(training):
    trainer = make(dropout=0.3, eval_batches=evaluation_batches(TOKENS, 4, 8, batches=1))
    trainer.model.train(training)
    trainer.model.h.train(not training)
    assert trainer.evaluate() == trainer.evaluate()
    assert trainer.model.training is training
    assert trainer.model.h[0].training is not training
    assert all(p.grad is None for p in trainer.model.parameters())


def test_evaluate_restores_the_mode_after_an_error():
    bad = (tg.full((1, 8), 99), tg.full((1, 8), 99))
    trainer = make(eval_batches=[bad])
    trainer.model.train()
    with pytest.raises(IndexError):
        trainer.evaluate()
    assert trainer.model.training


def test_fit_goes_on_where_it_stopped():
    at_once = make(dropout=0.3, schedule=lambda step: 0.01 / (1 + step))
    at_once.fit(7)
    in_parts = make(dropout=0.3, schedule=lambda step: 0.01 / (1 + step))
    in_parts.fit(3)
    in_parts.fit(4)
    assert in_parts.step == at_once.step == 7
    assert_same_weights(at_once, in_parts)


def test_accumulation_equals_one_larger_batch():
    large = make(batch_size=8, lr=1e-3)
    small = make(batch_size=2, lr=1e-3, accumulate=4)
    large.fit(5)
    small.fit(5)
    for (name, a), b in zip(weights(large).items(), weights(small).values(), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, err_msg=name)
    assert small.history[-1]["loss"] == pytest.approx(large.history[-1]["loss"], rel=1e-5)


def test_schedule_sets_the_rate_of_each_step():
    seen = []
    trainer = make(schedule=lambda step: seen.append(step) or 1e-3 * (step + 1), log_every=1)
    trainer.fit(3)
    trainer.fit(1)
    assert seen == [0, 1, 2, 3]
    assert [r["lr"] for r in trainer.history] == [1e-3, 2e-3, 3e-3, 4e-3]


def test_records(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("of an earlier run\n")
    batches = evaluation_batches(TOKENS, 4, 8, batches=1)
    trainer = make(metrics=path, log_every=2, eval_every=3, eval_batches=batches)
    trainer.fit(5)
    trainer.fit(2)
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert tuple(rows[0]) == COLUMNS
    assert [(int(r["step"]), r["val_loss"] != "") for r in rows] == [
        (2, False), (3, True), (4, False), (5, True), (6, True), (7, True)
    ]  # fmt: skip
    for row, record in zip(rows, trainer.history, strict=True):
        for name in COLUMNS:
            assert (row[name] == "") == (record[name] is None)
            assert row[name] == "" or float(row[name]) == pytest.approx(record[name], rel=1e-5)
    assert all(r["grad_norm"] > 0 and r["tokens_per_second"] > 0 for r in trainer.history)


def test_the_loss_of_a_record_is_the_mean_since_the_last():
    fine = make(log_every=1)
    fine.fit(8)
    coarse = make(log_every=4)
    coarse.fit(8)
    losses = [r["loss"] for r in fine.history]
    assert [r["loss"] for r in coarse.history] == pytest.approx([np.mean(losses[:4]), np.mean(losses[4:])], rel=1e-6)


def test_loss_is_read_at_records_alone(monkeypatch):
    """Between records no value reaches the host, so that a GPU need not be waited for."""
    reads = []
    item = tg.Tensor.item
    trainer = make(log_every=5)
    monkeypatch.setattr(tg.Tensor, "item", lambda self: reads.append(trainer.step) or item(self))
    trainer.fit(11)
    assert set(reads) == {5, 10, 11}


def test_scaler_trains_float16(device):
    trainer = make(lr=3e-3)
    trainer.model.to(tg.float16)
    trainer.optimizer = tg.optim.AdamW(trainer.model.parameters(), lr=1e-2, weight_decay=0.0)
    trainer.scaler = tg.optim.GradScaler()
    trainer.fit(100)
    assert all(p.dtype == tg.float16 for p in trainer.model.parameters())
    assert trainer.history[-1]["loss"] < 0.7 * trainer.history[0]["loss"]
    assert math.isfinite(trainer.history[-1]["grad_norm"])


def test_a_skipped_step_holds_the_schedule(device):
    """Two steps with an infinite gradient change nothing, and their rate comes again."""
    seen, factors = [], iter([math.inf, 1.0, math.inf])
    trainer = make(schedule=lambda step: seen.append(step) or 1e-3, scaler=tg.optim.GradScaler(1024.0))
    trainer.model.wte.weight.register_hook(lambda grad: grad * next(factors, 1.0))
    trainer.fit(5)
    assert seen == [0, 0, 1, 1, 2]
    assert trainer.scaler.get_scale() == 256.0
    assert (trainer.optimizer.steps, trainer.optimizer.skipped_steps) == (3, 2)


def test_the_bar_shows_loss_and_speed(capsys):
    trainer = make(eval_batches=evaluation_batches(TOKENS, 4, 8, batches=1))
    trainer.progress = True
    trainer.fit(10)
    out, err = capsys.readouterr()
    record = trainer.history[-1]
    assert out.strip() == f"step    10: loss {record['loss']:.3f}, validation loss {record['val_loss']:.3f}"
    assert f"loss {record['loss']:.3f}, {record['tokens_per_second']:,.0f} tokens/s" in err


@pytest.mark.parametrize("what", ["accumulate", "eval_every", "log_every"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True])
def test_errors_of_the_counts(what, value):
    with pytest.raises(ValueError, match=f"Trainer: {what} must be an int of at least 1, got {value}"):
        make(**{what: value})


def test_other_errors():
    with pytest.raises(ValueError, match="evaluate: the Trainer has no eval_batches"):
        make().evaluate()
    trainer = make()
    trainer.batches = iter([next(trainer.batches)] * 2)
    with pytest.raises(RuntimeError, match="fit: the loader ended within step 2; it must be endless"):
        trainer.fit(3)
