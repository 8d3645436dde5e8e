"""Optimisers over flat buffers, and gradient clipping; public from here, loss scaling and learning-rate schedules.

All parameters of one dtype, device and group lie in one buffer, and so do their gradients and moments: a step is one
pass, the norm one reduction, and a low-precision parameter is a rounded copy of a float32 master. What changes from
step to step, and whether a step is taken, is on the device too: the host learns the norm once all is under way.
"""

import functools
import itertools
import math
import operator

import numpy as np

from . import device, dtypes, kernel
from .ops import adamw
from .ops.common import pick
from .scaling import GradScaler
from .schedules import constant, cosine_with_warmup, linear
from .tensor import Tensor

__all__ = [
    "SGD", "AdamW", "GradScaler", "Optimizer", "clip_grad_norm_", "constant", "cosine_with_warmup", "linear",
]  # fmt: skip

_ALIGNMENT = 128  # elements: every parameter starts at a multiple of 256 bytes, in half types too


class _Bucket:
    """The parameters of one group, dtype and device, in one flat buffer; `slots` names the state kept for each, and a
    step needs `numbers` of options."""

    def __init__(self, params, group, slots, numbers):
        self.params, self.group, self.device = params, group, params[0].device
        self.parts, end = [], 0
        for p in params:
            self.parts.append(slice(end, end + p.size))
            end += -(-p.size // _ALIGNMENT) * _ALIGNMENT
        dtype, wide = params[0].dtype, dtypes.accumulator(params[0].dtype)
        with device.current(params[0].data):
            self.xp = xp = device.array_module(params[0].data)
            self.weights = xp.zeros(end, dtype)
            self.masters = self.weights if dtype == wide else xp.zeros(end, wide)
            self.grads = xp.zeros(end, wide)
            self.state = {name: xp.zeros(end, wide) for name in slots}
            self.counts, self.options = xp.zeros(len(params), "int32"), xp.zeros(numbers)
        self.told = ()  # the options that the device has
        self.steps = [0] * len(params)  # as in counts, for the host; a parameter without a gradient takes no step
        self.views, self.versions = [], []
        for p, part in zip(params, self.parts, strict=True):
            self.weights[part] = p.data.ravel()
            self.masters[part] = p.data.ravel()
            p.data = self.weights[part].reshape(p.shape)
            p._home = self.grads[part].reshape(p.shape)
            if p._grad is not None:
                p._home[...] = p._grad
                p._grad, p._grad_version = p._home, None
            self.views.append(p.data)
            self.versions.append(p._version.value)

    def refresh(self):
        """Check that the parameters are still here, and take over values written since the last step."""
        for i, (p, view, part) in enumerate(zip(self.params, self.views, self.parts, strict=True)):
            if p.data is not view:
                raise RuntimeError(
                    f"optimizer: a parameter of shape {p.shape} was moved or cast after the optimiser took it, or was "
                    f"taken by another; make the optimiser after model.to(...), and only one for a parameter"
                )
            if p._version.value != self.versions[i]:
                new = self.weights[part]
                if self.masters is not self.weights:  # a value that is the master's rounding is no change of it
                    new = self.xp.where(new == self.masters[part].astype(new.dtype), self.masters[part], new)
                self.masters[part] = new
                self.versions[i] = p._version.value

    def kept(self):
        """Name to flat array of all that the next step depends on besides the parameters."""
        return self.state if self.masters is self.weights else {**self.state, "master": self.masters}

    def runs(self):
        """(elements, parameters), two slices, of neighbours that have a gradient and took the same number of steps."""
        keys = [self.steps[i] if p._grad is not None else None for i, p in enumerate(self.params)]
        for key, run in itertools.groupby(range(len(keys)), keys.__getitem__):
            if key is not None:
                run = list(run)
                yield slice(self.parts[run[0]].start, self.parts[run[-1]].stop), slice(run[0], run[-1] + 1)

    def tell(self, *options):
        """Put the options of the step in the array that it reads, unless they are there."""
        if options != self.told:
            with device.current(self.options):
                self.options[...] = self.xp.asarray(np.array(options))
            self.told = options

    def of(self, part, run):
        """What a step of a run takes: master, state, low-precision copy or None, gradient, step counts, options."""
        copy = None if self.masters is self.weights else self.weights[part]
        state = (flat[part] for flat in self.state.values())
        return self.masters[part], *state, copy, self.grads[part], self.counts[run], self.options

    def written(self, run):
        """A run took its step: count it for each parameter, and that it changed."""
        for i in range(run.start, run.stop):
            self.steps[i] += 1
            self.params[i]._version.value += 1
            self.versions[i] = self.params[i]._version.value


class Optimizer:
    """What AdamW and SGD share: groups, buckets, the norm, skipped steps, the state. A subclass gives `_update`, a
    function of a bucket's arrays and the square sum, and `_options`, what it finds after grad_scale and max_grad_norm.

    >>> import tinygrad_gpu as tg
    >>> isinstance(tg.optim.SGD([tg.nn.Parameter(tg.ones(1))], lr=0.1), tg.optim.Optimizer)
    True
    """

    _slots = ()

    def __init__(self, params, defaults, max_grad_norm=None):
        name = type(self).__name__
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"{name}: max_grad_norm must be positive or None, got {max_grad_norm}")
        self.max_grad_norm = max_grad_norm
        self.grad_norm, self.skipped_steps, self.steps = 0.0, 0, 0
        self.param_groups = _groups(name, params, defaults)
        for group in self.param_groups:
            self._check(name, group)
        self._buckets = []
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.requires_grad]
            for kind in dict.fromkeys((p.dtype, p.device) for p in trained):
                members, numbers = [p for p in trained if (p.dtype, p.device) == kind], 2 + len(self._options(group))
                self._buckets.append(_Bucket(members, group, self._slots, numbers))
        self._frozen = [p for group in self.param_groups for p in group["params"] if not p.requires_grad]

    @staticmethod
    def _check(name, group):
        for what in ("lr", "weight_decay"):
            if not 0 <= group[what] < math.inf:
                raise ValueError(f"{name}: {what} must be a finite number of at least 0, got {group[what]}")

    @property
    def lr(self):
        """The learning rate of the first group; assigning sets that of every group."""
        return self.param_groups[0]["lr"]

    @lr.setter
    def lr(self, value):
        for group in self.param_groups:
            self._check(type(self).__name__, {**group, "lr": value})
            group["lr"] = value

    def zero_grad(self):
        """Set the `.grad` of every parameter to None: a parameter that no backward reaches before the next step is left
        alone by it, decay included.

        >>> import tinygrad_gpu as tg
        >>> w = tg.nn.Parameter(tg.ones(1))
        >>> optimizer = tg.optim.SGD([w], lr=0.5)
        >>> w.sum().backward()
        >>> optimizer.zero_grad()
        >>> w.grad is None
        True
        """
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None

    def step(self, grad_scale=1.0):
        """Update every parameter that has a gradient; gives whether it did.

        grad_scale: what the loss was multiplied by; gradients are divided by it, and clipped to max_grad_norm if that
        is set, without changing `.grad`. Where their norm is not finite nothing changes and `skipped_steps` counts it.
        RuntimeError where a parameter was moved, or was frozen when the optimiser was made and now has a gradient;
        ValueError for a grad_scale that is not positive.

        >>> import tinygrad_gpu as tg
        >>> w = tg.nn.Parameter(tg.ones(1))
        >>> optimizer = tg.optim.SGD([w], lr=0.5)
        >>> optimizer.step()  # no gradient: nothing to update
        True
        >>> (1024 * w.sum()).backward()
        >>> optimizer.step(grad_scale=1024.0)
        True
        >>> w.item()
        0.5
        """
        if not 0 < grad_scale < math.inf:
            raise ValueError(f"step: grad_scale must be a positive number, got {grad_scale}")
        if any(p._grad is not None for p in self._frozen):
            raise RuntimeError(
                "step: a parameter that was frozen when the optimiser was made has a gradient now; make a new one"
            )
        runs, totals = self._start(grad_scale)
        self.grad_norm = _norm(totals) / grad_scale  # here the host waits for the device
        if not math.isfinite(self.grad_norm):
            self.skipped_steps += 1
            return False
        for bucket, _, run in runs:
            bucket.written(run)
        self.steps += 1
        return True

    def _start(self, grad_scale):
        """Queue the step, which changes nothing where the norm is not finite: gives its runs and their square sums."""
        max_norm = math.inf if self.max_grad_norm is None else self.max_grad_norm
        for bucket in self._buckets:
            bucket.refresh()
            bucket.tell(grad_scale, max_norm, *self._options(bucket.group))
        runs = [(bucket, *run) for bucket in self._buckets for run in bucket.runs()]
        totals = _square_sums(bucket.grads[part] for bucket, part, _ in runs)
        for bucket, part, run in runs:
            with device.current(bucket.grads), np.errstate(all="ignore"):
                self._update(*bucket.of(part, run), totals[bucket.device])
        return runs, totals

    def state_dict(self):
        """Steps, options and per-parameter state (Tensors), laid out as PyTorch's: parameters numbered over all groups.

        For a half parameter "master" is its float32 value; step counts are ints.

        >>> import tinygrad_gpu as tg
        >>> w = tg.nn.Parameter(tg.ones(1))
        >>> optimizer = tg.optim.AdamW([w])
        >>> sorted(optimizer.state_dict()["state"][0])
        ['exp_avg', 'exp_avg_sq', 'step']
        """
        state = {}
        for number, bucket, i in self._numbered():
            p, part = bucket.params[i], bucket.parts[i]
            with device.current(p.data):
                arrays = {name: flat[part].reshape(p.shape).copy() for name, flat in bucket.kept().items()}
            state[number] = {"step": bucket.steps[i], **{name: Tensor._wrap(a) for name, a in arrays.items()}}
        numbers = itertools.count()
        groups = [{**group, "params": [next(numbers) for _ in group["params"]]} for group in self.param_groups]
        return {"steps": self.steps, "skipped_steps": self.skipped_steps, "state": state, "param_groups": groups}

    def _numbered(self):
        """(number, bucket, index there) of every trained parameter, its values since the last step taken over."""
        numbers = {id(p): i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}
        for bucket in self._buckets:
            bucket.refresh()
            yield from ((numbers[id(p)], bucket, i) for i, p in enumerate(bucket.params))

    def load_state_dict(self, state):
        """Take over what `state_dict` gave, for parameters of the same shapes in the same order.

        ValueError otherwise, before anything changes.

        >>> import tinygrad_gpu as tg
        >>> one, two = (tg.optim.AdamW([tg.nn.Parameter(tg.ones(1))], lr=lr) for lr in (0.1, 0.5))
        >>> one.load_state_dict(two.state_dict())
        >>> one.lr
        0.5
        """
        name = f"{type(self).__name__}.load_state_dict"
        lengths = [len(group["params"]) for group in self.param_groups]
        given = [len(group["params"]) for group in state["param_groups"]]
        if given != lengths:
            raise ValueError(f"{name}: groups must have {lengths} parameters, got {given}")
        for group, new in zip(self.param_groups, state["param_groups"], strict=True):
            if set(new) != set(group):
                raise ValueError(f"{name}: a group needs {sorted(group)}, got {sorted(new)}")
            self._check(name, new)
        numbered = list(self._numbered())
        for number, bucket, i in numbered:
            entry, wanted = state["state"].get(number, {}), {"step", *bucket.kept()}
            if set(entry) != wanted:
                raise ValueError(f"{name}: parameter {number} needs {sorted(wanted)}, got {sorted(entry)}")
            for key in bucket.kept():
                shape = bucket.params[i].shape
                if entry[key].shape != shape:
                    raise ValueError(f"{name}: {key} of parameter {number} needs shape {shape}, got {entry[key].shape}")
        for group, new in zip(self.param_groups, state["param_groups"], strict=True):
            group.update({**new, "params": group["params"]})
        self.steps, self.skipped_steps = state["steps"], state["skipped_steps"]
        for number, bucket, i in numbered:
            entry = state["state"][number]
            bucket.steps[i] = bucket.counts[i] = int(entry["step"])
            for key, flat in bucket.kept().items():
                flat[bucket.parts[i]] = device.put(entry[key].data, bucket.params[i].device).ravel()


def _groups(name, params, defaults):
    """Parameter groups with their options filled in, each parameter in one place."""
    if isinstance(params, (Tensor, dict)):
        raise TypeError(f"{name}: params must be an iterable of Tensors or of groups, got {type(params).__name__}")
    params = list(params)
    if not params:
        raise ValueError(f"{name}: needs at least one parameter, got none")
    groups = params if isinstance(params[0], dict) else [{"params": params}]
    seen, result = {}, []
    for group in groups:
        if not isinstance(group, dict):
            raise TypeError(f"{name}: all groups must be dicts, got {type(group).__name__}")
        unknown = set(group) - set(defaults) - {"params"}
        if "params" not in group or unknown:
            raise ValueError(f"{name}: a group needs params and may set {', '.join(defaults)}, got {sorted(group)}")
        members = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        options = {**defaults, **{k: v for k, v in group.items() if k != "params"}}
        own = []
        for p in members:
            if not isinstance(p, Tensor):
                raise TypeError(f"{name}: parameters must be Tensors, got {type(p).__name__}")
            if not p.is_leaf or not dtypes.is_float(p.dtype):
                raise ValueError(f"{name}: parameters must be floating leaves, got {p.dtype} of shape {p.shape}")
            if id(p) in seen:
                if seen[id(p)] != options:
                    raise ValueError(f"{name}: a parameter of shape {p.shape} is in two groups with different options")
                continue
            seen[id(p)] = options
            own.append(p)
        result.append({"params": own, **options})
    return result


def _square_sums(arrays):
    """Device name to the sum of the squares of all the arrays together, (1,) in float64, for each of their devices."""
    kinds = {}
    for g in arrays:
        kinds.setdefault((device.of(g), kernel.runs(g)), []).append(g)
    sums = []
    for members in kinds.values():
        with device.current(members[0]):
            sums.append(pick(members[0], adamw.square_sum, adamw.square_sum_kernel)(members))
    totals = {}
    for place, _ in kinds:
        with device.on(place, "step"):
            totals[place] = functools.reduce(operator.add, (device.put(part, place) for part in sums))
    return totals


def _norm(totals):
    """The norm that `_square_sums` are of, a float: 0 for no arrays."""
    return math.sqrt(next(iter(totals.values())).item()) if totals else 0.0


class AdamW(Optimizer):
    """Adam with decoupled weight decay (arXiv:1711.05101, algorithm 2) over flat buffers; options and defaults are
    PyTorch's.

    params: Parameters (other leaves too), or groups, dicts with "params" and their own options. A parameter listed
    twice is updated once; in two groups that disagree it is an error. Those with requires_grad False are left out.
    max_grad_norm clips the gradients' global norm, taken in float64; a norm that is not finite skips the step. After
    `step()`, `.grad_norm` is the norm before clipping, `.steps` the number of steps taken, `.skipped_steps` of those
    skipped. Half parameters are rounded copies of float32 masters. `.lr` may be set at any time. Errors: ValueError and
    TypeError for options out of range and for what is no floating leaf.

    >>> import tinygrad_gpu as tg
    >>> w = tg.nn.Parameter(tg.ones(2))
    >>> optimizer = tg.optim.AdamW([w], lr=0.1, weight_decay=0.0)
    >>> w.sum().backward()
    >>> optimizer.step()
    True
    >>> w.detach()
    tensor([0.9, 0.9])
    """

    _slots = ("exp_avg", "exp_avg_sq")

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, max_grad_norm=None):
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, max_grad_norm)

    @staticmethod
    def _check(name, group):
        Optimizer._check(name, group)
        if len(group["betas"]) != 2 or not all(0 <= b < 1 for b in group["betas"]):
            raise ValueError(f"{name}: betas must be two numbers in [0, 1), got {group['betas']}")
        if not 0 <= group["eps"] < math.inf:
            raise ValueError(f"{name}: eps must be a finite number of at least 0, got {group['eps']}")

    @staticmethod
    def _options(group):
        return group["lr"], *group["betas"], group["eps"], group["weight_decay"]

    @staticmethod
    def _update(w, *others):
        pick(w, adamw.step, adamw.step_kernel)(w, *others)


class SGD(Optimizer):
    """w -= lr * u with u = momentum * u + g + weight_decay * w (u starts as the first g): torch.optim.SGD's update.

    Groups, clipping and skipped steps are as AdamW's.

    >>> import tinygrad_gpu as tg
    >>> w = tg.nn.Parameter(tg.ones(1))
    >>> optimizer = tg.optim.SGD([w], lr=0.5)
    >>> w.sum().backward()
    >>> optimizer.step()
    True
    >>> w.item()
    0.5
    """

    _slots = ("momentum_buffer",)

    def __init__(self, params, lr, momentum=0.0, weight_decay=0.0, max_grad_norm=None):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}, max_grad_norm)

    @staticmethod
    def _check(name, group):
        Optimizer._check(name, group)
        if not 0 <= group["momentum"] < math.inf:
            raise ValueError(f"{name}: momentum must be a finite number of at least 0, got {group['momentum']}")

    @staticmethod
    def _options(group):
        return group["lr"], group["momentum"], group["weight_decay"]

    @staticmethod
    def _update(w, u, copy, gradient, steps, options, total):
        factor, lr, momentum, decay = adamw.begin(steps, options, total)
        if factor is None:
            return
        g = gradient * factor
        if decay:
            g += decay * w
        u *= momentum
        u += g
        w -= lr * u
        if copy is not None:
            copy[...] = w


def clip_grad_norm_(params, max_norm):
    """Scale the gradients of `params` so that their global norm is at most max_norm; gives the norm before, a float.

    The norm is taken in float64. Parameters without a gradient do not count; with none the norm is 0. A norm that is
    not finite leaves the gradients as they are (an optimiser then skips its step). ValueError for a negative or NaN
    max_norm, TypeError for what is no Tensor.

    >>> import tinygrad_gpu as tg
    >>> w = tg.nn.Parameter(tg.ones(2))
    >>> (w * tg.Tensor([3.0, 4.0])).sum().backward()
    >>> tg.optim.clip_grad_norm_([w], 1.0)
    5.0
    """
    if not max_norm >= 0:
        raise ValueError(f"clip_grad_norm_: max_norm must be at least 0, got {max_norm}")
    params = [params] if isinstance(params, Tensor) else list(params)
    for p in params:
        if not isinstance(p, Tensor):
            raise TypeError(f"clip_grad_norm_: params must be Tensors, got {type(p).__name__}")
    params = {id(p): p for p in params if p._grad is not None}.values()
    norm = _norm(_square_sums(p._grad for p in params))
    factor = adamw.clip_factor(norm, max_norm)
    if math.isfinite(norm) and factor < 1:
        for p in params:
            p.grad *= factor
    return norm
