"""Activation checkpointing (arXiv:1604.06174): keep a function's inputs, and run it again in backward for the rest."""

from . import random
from .autograd import Function, enable_grad, gradients, is_grad_enabled, no_grad, spying
from .tensor import Tensor


def _as_tuple(result):
    """What fn gave, as a tuple; TypeError unless it holds Tensors alone."""
    outputs = result if isinstance(result, tuple) else (result,)
    for out in outputs:
        if not isinstance(out, Tensor):
            raise TypeError(f"checkpoint: fn must give a Tensor or a tuple of Tensors, got {type(out).__name__}")
    return outputs


class Checkpoint(Function):
    """Its inputs are all the tensors with a gradient that the function used, given to it or closed over: the engine
    then treats them as those of any op, so that frozen ones cost nothing and a leaf's gradient is final when it should
    be."""

    materialize_grads = False

    def forward(ctx, *_, inputs, outputs, call, state, reads):
        ctx.inputs, ctx.call, ctx.state, ctx.reads = inputs, call, state, reads
        return outputs

    def _check(self):
        super()._check()
        for version, seen, shape in self.reads:
            if version.value != seen:
                raise RuntimeError(
                    f"backward: a tensor that a checkpointed function read (shape {shape}) was changed in place after "
                    f"the forward pass; use an operation that makes a new tensor, or clone() it first"
                )

    def again(ctx):
        """The function's outputs, with a graph, from the random numbers that it had the first time."""
        fn, args = ctx.call
        generator, used = random.default_generator, set()
        now = generator.state_dict()
        generator.load_state_dict(ctx.state)
        try:
            with enable_grad(), spying(lambda t: used.add(id(t))):
                outputs = _as_tuple(fn(*args))
        finally:
            generator.load_state_dict(now)
        used.update(id(out) for out in outputs)
        for t in ctx.inputs:
            if id(t) not in used:
                raise RuntimeError(
                    f"backward: a checkpointed function must do the same thing twice, but did not use a tensor of "
                    f"shape {t.shape} again; in a loop, bind what changes: lambda x, layer=layer: layer(x)"
                )
        return outputs

    def backward(ctx, *grads):
        results = [None] * len(ctx.inputs)
        outputs = ctx.again()
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None and o.requires_grad]
        if not pairs:  # only outputs that fn detached were used
            return tuple(results)
        needed = [i for i, need in enumerate(ctx.needs_input_grad) if need]
        places = {i: place for i in needed if (place := ctx.grad_place(i)) is not None}
        found = gradients(
            [o for o, _ in pairs],
            [ctx.inputs[i] for i in needed],
            [g for _, g in pairs],
            stop=True,
            places={id(ctx.inputs[i]): place for i, place in places.items()},
        )
        for i, g in zip(needed, found, strict=True):
            results[i] = places.get(i, g) if g is not None else None
        return tuple(results)


def checkpoint(fn, *args):
    """fn(*args), keeping for backward only its inputs: backward runs fn again to get what it needs.

    fn takes anything (tensors, lists of them …) and gives a Tensor or a tuple of them. Parameters and other tensors
    that fn closes over get their gradients too. Random numbers are drawn again as they were the first time, so that
    dropout is right; the generator is left as without checkpointing. Nested checkpoints work. fn must do the same thing
    twice: it may not depend on what it changes, nor on what changes before backward.
    Errors: TypeError where fn gives anything but Tensors. RuntimeError where it changes in place a tensor with a
    gradient that it reads; in backward, where one that it read has been changed since, or is not used again.

    >>> import tinygrad_gpu as tg
    >>> x = tg.ones(3, requires_grad=True)
    >>> tg.checkpoint(lambda x: (x * 2).exp(), x).sum().backward()
    >>> x.grad
    tensor([14.7781, 14.7781, 14.7781])
    """
    if not is_grad_enabled():
        return fn(*args)
    state, used, read = random.default_generator.state_dict(), {}, {}

    def see(t):
        read.setdefault(id(t._version), (t._version, t.shape))
        if t.requires_grad:
            used.setdefault(id(t), (t, t._version.value))

    with no_grad(), spying(see):
        result = fn(*args)
    outputs = _as_tuple(result)
    for out in outputs:  # one may be an input that fn passes on
        see(out)
    for t, seen in used.values():
        if t._version.value != seen:
            raise RuntimeError(
                f"checkpoint: fn must leave the tensors that it reads as they are, since it will read them again, but "
                f"it changed one of shape {t.shape} in place; clone() it first"
            )
    if not used:
        return result
    inputs = tuple(t for t, _ in used.values())
    results = Checkpoint.apply(
        *inputs,
        inputs=inputs,
        outputs=tuple(out.data for out in outputs),
        call=(fn, args),
        state=state,
        reads=[(version, version.value, shape) for version, shape in read.values()],
    )
    return results if isinstance(result, tuple) else results[0]
