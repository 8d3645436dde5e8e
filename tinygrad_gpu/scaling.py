"""Dynamic loss scaling, public as `tg.optim.GradScaler`."""

import math


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
