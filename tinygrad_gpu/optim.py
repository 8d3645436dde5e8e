"""Optimisers over flat buffers, gradient clipping, loss scaling, and learning-rate schedules.

All parameters of one dtype, device and group lie in one buffer, and so do their gradients and moments: a step is one
pass, the norm one reduction, and a low-precision parameter is a rounded copy of a float32 master.
"""

import itertools
import math

import numpy as np

from . import device, dtypes
from .ops import adamw
from .tensor import Tensor

_ALIGNMENT = 128  # elements: every parameter starts at a multiple of 256 bytes, in half types too


class _Bucket:
    """The parameters of one group, dtype and device, in one flat buffer; `slots` names the state kept for each."""

    def __init__(self, params, group, slots):
        self.params, self.group = params, group
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
        self.steps = [0] * len(params)  # a parameter without a gradient takes no step
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
        """(slice, step count so far, indices) of neighbours that have a gradient and took the same number of steps."""
        keys = [self.steps[i] if p._grad is not None else None for i, p in enumerate(self.params)]
        for key, run in itertools.groupby(range(len(keys)), keys.__getitem__):
            if key is not None:
                run = list(run)
                yield slice(self.parts[run[0]].start, self.parts[run[-1]].stop), key, run

    def written(self, part, indices):
        """The masters of a run were updated: round them into the parameters, and count the change of each."""
        if self.masters is not self.weights:
            self.weights[part] = self.masters[part]
        for i in indices:
            self.steps[i] += 1
            self.params[i]._version.value += 1
            self.versions[i] = self.params[i]._version.value


class Optimizer:
    """What AdamW and SGD share: groups, buckets, the norm, skipped steps, the state. A subclass gives `_update`.

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
                self._buckets.append(_Bucket([p for p in trained if (p.dtype, p.device) == kind], group, self._slots))
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
        for bucket in self._buckets:
            bucket.refresh()
        self.grad_norm = _norm(b.grads[part] for b in self._buckets for part, _, _ in b.runs()) / grad_scale
        if not math.isfinite(self.grad_norm):
            self.skipped_steps += 1
            return False
        factor = _clip_factor(self.grad_norm, self.max_grad_norm) / grad_scale
        for bucket in self._buckets:
            with device.current(bucket.grads), np.errstate(all="ignore"):
                for part, t, indices in list(bucket.runs()):
                    self._update(bucket, part, t + 1, factor)
                    bucket.written(part, indices)
        self.steps += 1
        return True

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
            bucket.steps[i] = int(entry["step"])
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


def _norm(arrays):
    """The norm of all the arrays together, a float: their squares are summed in float64."""
    total = 0.0
    for g in arrays:
        with device.current(g):
            total += float(adamw.square_sum(device.array_module(g), g.ravel()))
    return math.sqrt(total)


def _clip_factor(norm, max_norm):
    """What gradients are multiplied by, as torch.nn.utils.clip_grad_norm_ does it."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))


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

    def _update(self, bucket, part, t, factor):
        options = {k: bucket.group[k] for k in ("lr", "betas", "eps", "weight_decay")}
        state = (bucket.state[name][part] for name in self._slots)
        adamw.step(bucket.masters[part], bucket.grads[part], *state, t=t, factor=factor, **options)


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

    def _update(self, bucket, part, t, factor):
        lr, momentum, decay = (bucket.group[k] for k in ("lr", "momentum", "weight_decay"))
        w, u = bucket.masters[part], bucket.state["momentum_buffer"][part]
        g = bucket.grads[part] * factor
        if decay:
            g += decay * w
        u *= momentum
        u += g
        w -= lr * u


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
    norm = _norm(p._grad for p in params)
    factor = _clip_factor(norm, max_norm)
    if math.isfinite(norm) and factor < 1:
        for p in params:
            p.grad *= factor
    return norm


class GradScaler:
    """Dynamic loss scaling for float16 (arXiv:1710.03740, section 3.2), with torch.amp.GradScaler's names.

    The loss is multiplied by a power of two so that small gradients do not underflow. The optimiser gets the scale,
    divides by it and decides: a step whose gradients are not finite is skipped, and `update` then halves the scale;
    after growth_interval good steps in a row it doubles.

    >>> import tinygrad_gpu as tg
    >>> w = tg.nn.Parameter(tg.ones(1))
    >>> optimizer, scaler = tg.optim.SGD([w], lr=0.5), tg.optim.GradScaler(1024.0)
    >>> scaler.scale(w.sum()).backward()
    >>> scaler.step(optimizer)
    True
    >>> scaler.update()
    >>> w.item(), optimizer.grad_norm
    (0.5, 1.0)
    """

    def __init__(self, init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000):
        for what, ok, value in (
            ("init_scale", 0 < init_scale < math.inf, init_scale),
            ("growth_factor", growth_factor > 1, growth_factor),
            ("backoff_factor", 0 < backoff_factor < 1, backoff_factor),
            ("growth_interval", growth_interval >= 1, growth_interval),
        ):
            if not ok:
                raise ValueError(f"GradScaler: {what} is out of range, got {value}")
        self._scale, self._good, self._found = float(init_scale), 0, []
        self.growth_factor, self.backoff_factor, self.growth_interval = growth_factor, backoff_factor, growth_interval

    def get_scale(self):
        """The present scale.

        >>> import tinygrad_gpu as tg
        >>> tg.optim.GradScaler(1024.0).get_scale()
        1024.0
        """
        return self._scale

    def scale(self, loss):
        """The loss times the scale, to call backward on.

        >>> import tinygrad_gpu as tg
        >>> tg.optim.GradScaler(1024.0).scale(tg.Tensor(0.5))
        tensor(512.)
        """
        return loss * self._scale

    def step(self, optimizer):
        """optimizer.step with this scale; gives whether it changed the parameters.

        >>> import tinygrad_gpu as tg
        >>> w, scaler = tg.nn.Parameter(tg.ones(1)), tg.optim.GradScaler(1024.0)
        >>> (w * float("inf")).sum().backward()
        >>> scaler.step(tg.optim.SGD([w], lr=0.5))
        False
        """
        done = optimizer.step(grad_scale=self._scale)
        self._found.append(done)
        return done

    def update(self):
        """Once an iteration, after `step`: adapt the scale. RuntimeError where no step was taken since the last update.

        >>> import tinygrad_gpu as tg
        >>> w, scaler = tg.nn.Parameter(tg.ones(1)), tg.optim.GradScaler(1024.0)
        >>> (w * float("inf")).sum().backward()
        >>> _ = scaler.step(tg.optim.SGD([w], lr=0.5))
        >>> scaler.update()
        >>> scaler.get_scale()
        512.0
        """
        if not self._found:
            raise RuntimeError("update: call step first")
        if all(self._found):
            self._good += 1
            if self._good == self.growth_interval:
                self._scale, self._good = self._scale * self.growth_factor, 0
        else:
            self._scale, self._good = self._scale * self.backoff_factor, 0
        self._found = []

    def state_dict(self):
        """The scale and the number of good steps since it changed.

        >>> import tinygrad_gpu as tg
        >>> tg.optim.GradScaler(1024.0).state_dict()
        {'scale': 1024.0, 'good_steps': 0}
        """
        return {"scale": self._scale, "good_steps": self._good}

    def load_state_dict(self, state):
        """Take over what `state_dict` gave.

        >>> import tinygrad_gpu as tg
        >>> scaler = tg.optim.GradScaler()
        >>> scaler.load_state_dict({"scale": 8.0, "good_steps": 5})
        >>> scaler.get_scale()
        8.0
        """
        self._scale, self._good = float(state["scale"]), int(state["good_steps"])


def _warmed(name, step, lr, warmup, total):
    """lr on its linear way up over `warmup` steps, or None after it; and how far (0 to 1) step is from there to
    total."""
    if step < 0 or warmup < 0 or total < warmup:
        raise ValueError(f"{name}: needs 0 <= step and 0 <= warmup <= total, got {step}, {warmup}, {total}")
    if step < warmup:
        return lr * (step + 1) / warmup, 0.0
    return None, min((step - warmup) / max(total - warmup, 1), 1.0)


def cosine_with_warmup(step, *, lr, warmup, total, final=0.1):
    """The rate of step number `step` (from 0): up to lr over `warmup` steps, then half a cosine down to final * lr at
    `total`, and flat (arXiv:1608.03983, eq. 5, one period).

    >>> from tinygrad_gpu.optim import cosine_with_warmup
    >>> [round(cosine_with_warmup(s, lr=1.0, warmup=2, total=6), 3) for s in range(7)]
    [0.5, 1.0, 1.0, 0.868, 0.55, 0.232, 0.1]
    """
    rising, way = _warmed("cosine_with_warmup", step, lr, warmup, total)
    return lr * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * way))) if rising is None else rising


def linear(step, *, lr, warmup, total, final=0.0):
    """The rate of step number `step` (from 0): up to lr over `warmup` steps, then straight down to final * lr at
    `total`.

    >>> from tinygrad_gpu.optim import linear
    >>> [linear(s, lr=1.0, warmup=1, total=3) for s in range(4)]
    [1.0, 1.0, 0.5, 0.0]
    """
    rising, way = _warmed("linear", step, lr, warmup, total)
    return lr * (1 - (1 - final) * way) if rising is None else rising


def constant(step, *, lr, warmup=0):
    """The rate of step number `step` (from 0): up to lr over `warmup` steps, then lr.

    >>> from tinygrad_gpu.optim import constant
    >>> [constant(s, lr=1.0, warmup=2) for s in range(3)]
    [0.5, 1.0, 1.0]
    """
    rising, _ = _warmed("constant", step, lr, warmup, warmup)
    return lr if rising is None else rising
