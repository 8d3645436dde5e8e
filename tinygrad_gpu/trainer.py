"""The training loop: batches in, updates of the weights and a record of how they went out."""

import csv
import time
from pathlib import Path

from .autograd import no_grad
from .nn import evaluating
from .tensor import stack

COLUMNS = ("step", "loss", "val_loss", "lr", "grad_norm", "tokens_per_second")


class Trainer:
    """Trains `model` with `optimizer` on the batches of `loader`, an iterable of (ids, targets) that does not end.

    model(ids, targets): the loss, a Tensor of one element. schedule(step): the learning rate of an update, counted from
    0; a step that the optimiser skips does not count. A step takes `accumulate` batches and the mean of their
    gradients. scaler: a GradScaler, which float16 needs.
    eval_batches: pairs (ids, targets) on which `evaluate` measures the model, every eval_every steps and at the end.
    progress: show a bar, with the loss and the tokens taken a second.

    Every log_every steps a dict of COLUMNS goes into `history` and, as a row, into the CSV file `metrics` (a path;
    a file that is there is replaced): the mean loss since the last record, the validation loss if it was measured, and
    learning rate and gradient norm of the last step. Only then is a loss read: in between a GPU runs ahead of Python.

    >>> import tinygrad_gpu as tg
    >>> from tinygrad_gpu.trainer import Trainer
    >>> class Line(tg.nn.Module):
    ...     def __init__(self):
    ...         self.slope = tg.nn.Parameter(tg.zeros(1))
    ...
    ...     def forward(self, x, y):
    ...         return ((self.slope * x - y) ** 2).mean()
    >>> line, x = Line(), tg.randn(8)
    >>> trainer = Trainer(line, tg.optim.SGD(line.parameters(), lr=0.1), [(x, 3 * x)] * 200, progress=False)
    >>> trainer.fit(200)
    >>> round(line.slope.item(), 3)
    3.0
    """

    def __init__(
        self,
        model,
        optimizer,
        loader,
        *,
        schedule=None,
        accumulate=1,
        scaler=None,
        eval_batches=(),
        eval_every=250,
        log_every=10,
        metrics=None,
        progress=True,
    ):
        for what, n in (("accumulate", accumulate), ("eval_every", eval_every), ("log_every", log_every)):
            if isinstance(n, bool) or not isinstance(n, int) or n < 1:
                raise ValueError(f"Trainer: {what} must be an int of at least 1, got {n!r}")
        self.model, self.optimizer, self.batches = model, optimizer, iter(loader)
        self.schedule, self.accumulate, self.scaler = schedule, accumulate, scaler
        self.eval_batches, self.eval_every, self.log_every = list(eval_batches), eval_every, log_every
        self.metrics, self.progress = metrics and Path(metrics), progress
        self.step = 0  # steps taken
        self.history = []
        if self.metrics:
            self._write(dict(zip(COLUMNS, COLUMNS, strict=True)), "w")

    def fit(self, steps):
        """Train for `steps` steps more; the model is then in training mode.

        RuntimeError where the loader ends before.
        """
        from tqdm import tqdm  # here: a third of what importing the package would take

        self.model.train()
        last = self.step + steps
        losses, tokens, since = [], 0, time.perf_counter()
        with tqdm(total=steps, disable=not self.progress, unit="step", dynamic_ncols=True) as bar:
            while self.step < last:
                loss, taken = self._train_step()
                losses.append(loss)
                tokens += taken
                self.step += 1
                bar.update()
                evaluating = self.eval_batches and (self.step % self.eval_every == 0 or self.step == last)
                if not evaluating and self.step % self.log_every and self.step != last:
                    continue
                loss = stack(losses).mean().item()  # waits for the GPU: the time is that of finished work
                rate = tokens / (time.perf_counter() - since)
                val_loss = self.evaluate() if evaluating else None
                self._log(loss, val_loss, rate, bar)
                losses, tokens, since = [], 0, time.perf_counter()

    def evaluate(self):
        """The mean loss a token over `eval_batches`, in evaluation mode and without a graph. Nothing that training uses
        changes: not the weights, the modes, the gradients, nor the random numbers to come.

        ValueError where the Trainer has no eval_batches.

        >>> import tinygrad_gpu as tg
        >>> from tinygrad_gpu.trainer import Trainer
        >>> model = tg.gpt.GPT(tg.gpt.GPTConfig(vocab_size=4, block_size=2, n_layer=1, n_head=1, n_embd=4))
        >>> ids = tg.zeros(1, 2, dtype=tg.int64)
        >>> trainer = Trainer(model, tg.optim.SGD(model.parameters(), lr=0.1), [], eval_batches=[(ids, ids)])
        >>> 0 < trainer.evaluate() < 2
        True
        """
        if not self.eval_batches:
            raise ValueError("evaluate: the Trainer has no eval_batches")
        with evaluating(self.model), no_grad():
            total = sum(self.model(ids, targets).item() * targets.size for ids, targets in self.eval_batches)
        return total / sum(targets.size for _, targets in self.eval_batches)

    def _train_step(self):
        """One update of the weights: (the loss before it, a Tensor not waited for; how many tokens it took)."""
        if self.schedule is not None:
            self.optimizer.lr = self.schedule(self.optimizer.steps)
        self.optimizer.zero_grad()
        total, tokens = 0.0, 0
        for _ in range(self.accumulate):
            ids, targets = self._next_batch()
            loss = self.model(ids, targets) / self.accumulate
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            total, tokens = total + loss.detach(), tokens + targets.size
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return total, tokens

    def _next_batch(self):
        try:
            return next(self.batches)
        except StopIteration:
            raise RuntimeError(f"fit: the loader ended within step {self.step}; it must be endless") from None

    def _log(self, loss, val_loss, rate, bar):
        """Record what happened up to this step, and show it."""
        values = (self.step, loss, val_loss, self.optimizer.lr, float(self.optimizer.grad_norm), rate)
        record = dict(zip(COLUMNS, values, strict=True))
        self.history.append(record)
        if self.metrics:
            self._write(record, "a")
        bar.set_postfix_str(f"loss {loss:.3f}, {rate:,.0f} tokens/s")
        if self.progress and val_loss is not None:
            bar.write(f"step {self.step:5d}: loss {loss:.3f}, validation loss {val_loss:.3f}")

    def _write(self, record, mode):
        row = [f"{x:.6g}" if isinstance(x, float) else x for x in record.values()]
        with open(self.metrics, mode, newline="") as file:
            csv.writer(file).writerow(row)
