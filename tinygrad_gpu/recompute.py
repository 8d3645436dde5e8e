"""Activation checkpointing (arXiv:1604.06174): keep a function's inputs, and run it again in backward for the rest."""

from . import random
from .autograd import Function, enable_grad, gradients, is_grad_enabled, no_grad, spying
from .tensor import Tensor


class Checkpoint(Function):
    """Its inputs are all the tensors with a gradient that the function used, given to it or closed over: the engine then
    treats them as those of any op, so that frozen ones cost nothing and a leaf's gradient is final when it should be."""

    materialize_grads = False

    def forward(ctx, *arrays, inputs, outputs, replay):
        ctx.inputs, ctx.replay = inputs, replay
        ctx.save_for_backward(*arrays)  # for the check that nobody changes them in place before backward
        return outputs

    def backward(ctx, *grads):
        with enable_grad():
            outputs = ctx.replay()
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None and o.requires_grad]
        needed = [i for i, need in enumerate(ctx.needs_input_grad) if need]
        places = {i: place for i in needed if (place := ctx.grad_place(i)) is not None}
        found = gradients(
            [o for o, _ in pairs],
            [ctx.inputs[i] for i in needed],
            [g for _, g in pairs],
            stop=True,
            places={id(ctx.inputs[i]): place for i, place in places.items()},
        )
        results = [None] * len(ctx.inputs)
        for i, g in zip(needed, found, strict=True):
            results[i] = places.get(i, g) if g is not None else None
        return tuple(results)


def checkpoint(fn, *args):
    """fn(*args), keeping for backward only its inputs: backward runs fn again to get what it needs.

    fn takes anything (tensors, lists of them …) and gives a Tensor or a tuple of them. Parameters and other tensors that fn
    closes over get their gradients too. Random numbers are drawn again as they were the first time, so that dropout is right;
    the generator is left as without checkpointing. fn must compute the same thing twice: it may not depend on what it changes.
    TypeError where fn gives anything but Tensors. Nested checkpoints work.

    >>> import tinygrad_gpu as tg
    >>> x = tg.ones(3, requires_grad=True)
    >>> tg.checkpoint(lambda x: (x * 2).exp(), x).sum().backward()
    >>> x.grad
    tensor([14.7781, 14.7781, 14.7781])
    """
    if not is_grad_enabled():
        return fn(*args)
    state, seen = random.default_generator.state_dict(), {}
    with no_grad(), spying(lambda t: seen.setdefault(id(t), t)):
        result = fn(*args)
    outputs = result if isinstance(result, tuple) else (result,)
    for out in outputs:
        if not isinstance(out, Tensor):
            raise TypeError(f"checkpoint: fn must give a Tensor or a tuple of Tensors, got {type(out).__name__}")
        if out.requires_grad:  # an input that fn passes on
            seen.setdefault(id(out), out)
    if not seen:
        return result

    def replay():
        generator = random.default_generator
        now = generator.state_dict()
        generator.load_state_dict(state)
        try:
            again = fn(*args)
        finally:
            generator.load_state_dict(now)
        return again if isinstance(again, tuple) else (again,)

    inputs = tuple(seen.values())
    results = Checkpoint.apply(*inputs, inputs=inputs, outputs=tuple(o.data for o in outputs), replay=replay)
    return results if isinstance(result, tuple) else results[0]
