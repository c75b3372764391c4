"""Transforms of derivatives around a compiled graph, which PyTorch runs eagerly, wrongly or not at all: typed errors instead.

- `torch.func.grad(compiled)` and its like never call the backend: Dynamo gives up inside a functorch level, runs the function
  as it is, and from then on skips it outside of transforms too. Only a start callback of Dynamo's sees the attempt.
- Forward-mode AD (`torch.autograd.forward_ad`) through a compiled graph loses the tangents.
- Second derivatives (`create_graph=True`) reach a node of AOTAutograd's that raises without a way out.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import Node

from fxamp import errors


def is_active() -> bool:
    """Does the code that runs now stand inside a `torch.func` transform?"""
    return torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportAttributeAccessIssue]


def refuse_around(backend: object) -> None:
    """From now on, a function that was compiled with `backend` raises TransformAround inside a `torch.func` transform.

    May be called again: `torch._dynamo.reset()` forgets it. Lasts as long as `backend` does.
    """
    from torch._dynamo import disable
    from torch._dynamo.callback import callback_handler

    known = (getattr(c, "_torchdynamo_orig_callable", None) for c in callback_handler.start_callbacks)
    if any(isinstance(c, _Refusal) and c.backend() is backend for c in known):
        return
    # A backward that is compiled late, below a graph break, calls it where Dynamo watches. To compile it, Dynamo would call
    # it, and wait for ever for the lock that it holds.
    refusal = cast(Any, disable)(_Refusal(backend))
    callback_handler.register_start_callback(refusal)
    weakref.finalize(backend, _forget, refusal)


def _forget(refusal: Callable[..., None]) -> None:
    handler = sys.modules["torch._dynamo.callback"].callback_handler
    # A new list: the garbage collector may come by while Dynamo walks along the old one.
    handler.start_callbacks = [callback for callback in handler.start_callbacks if callback is not refusal]


class _Refusal:
    """A start callback of Dynamo's, for one backend."""

    def __init__(self, backend: object) -> None:
        self.backend = weakref.ref(backend)

    def __call__(self, _: object) -> None:
        backend = self.backend()
        if backend is None or not is_active() or not any(b is backend for b in _compiling()):
            return
        raise errors.TransformAround(
            "torch.func transforms (grad, vmap, jvp, vjp, hessian, ...) around a compiled function are not compiled: PyTorch "
            "would run it eagerly, in the precision it was written in, now and in every later call",
            way_out="Compile the transform: torch.compile(lambda x: torch.func.grad(f)(x), backend=...), f being plain",
        )


def _compiling() -> Iterator[object]:
    """The backends of the compilations that are on the stack, as their users gave them."""
    frame = sys._getframe()
    while frame is not None:
        backend = frame.f_locals.get("compiler_fn")
        while backend is not None:
            yield backend
            inner = getattr(backend, "_torchdynamo_orig_backend", None)  # around every backend
            backend = inner if inner is not None else getattr(backend, "compiler_fn", None)  # torch.compile's own
        frame = frame.f_back


def guarded(run: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled graph that raises SecondOrder where it would be differentiated twice, or in forward mode."""
    is_watched = False

    def call(*args: Any) -> Any:
        nonlocal is_watched
        if forward_ad._current_level >= 0 and any(_has_tangent(x) for x in args):
            raise errors.SecondOrder(
                "forward-mode AD goes through a compiled graph, which drops the tangents",
                way_out="Leave the function uncompiled, or compile torch.func.jvp of it as a whole",
            )
        outputs = run(*args)
        if not is_watched and torch.is_grad_enabled():
            is_watched = _watch(outputs)
        return outputs

    return call


def _has_tangent(value: object) -> bool:
    return isinstance(value, torch.Tensor) and forward_ad.unpack_dual(value).tangent is not None


def _watch(outputs: Any) -> bool:
    """Lets the backward of a compiled graph look at what it hands out. It is one autograd.Function of AOTAutograd's, made when
    the graph was compiled: so once is enough. False: the outputs have no history, this time."""
    for output in outputs if isinstance(outputs, (tuple, list)) else (outputs,):  # Dynamo's graphs return them flat
        node = output.grad_fn if isinstance(output, torch.Tensor) else None
        if node is not None and node.name() == "CompiledFunctionBackward":
            function = type(node)._forward_cls  # pyright: ignore[reportAttributeAccessIssue]
            function.backward = staticmethod(_watching(function.backward))
            return True
    return False


def _watching(backward: Callable[..., Any]) -> Callable[..., Any]:
    """The backward of an autograd.Function, whose first argument is its node."""

    @functools.wraps(backward)
    def call(node: Node, *grad_outputs: Any) -> Any:
        grad_inputs = backward(node, *grad_outputs)
        if torch.is_grad_enabled():  # create_graph=True
            _check_history(node, grad_inputs if isinstance(grad_inputs, tuple) else (grad_inputs,))
        return grad_inputs

    return call


def _check_history(node: Node, grad_inputs: tuple[torch.Tensor | None, ...]) -> None:
    """With create_graph=True, gradients have a history, which begins with the node that cannot be differentiated.

    Where what was saved for the backward are intermediates alone, that history leads nowhere: second derivatives would come
    out as zeros (`torch.autograd.functional.hessian`), so there the error comes at once.
    """
    first = next((g.grad_fn for g in grad_inputs if g is not None and g.grad_fn is not None), None)
    if first is None:
        return
    wanted = {source for source, _ in node.next_functions if source is not None}
    if not wanted & _reachable(first):
        _refuse_second_order(None)
    first.register_prehook(_refuse_second_order)


def _reachable(node: Node) -> set[Node]:
    seen, queue = {node}, [node]
    while queue:
        new = {source for source, _ in queue.pop().next_functions if source is not None} - seen
        seen |= new
        queue += new
    return seen


def _refuse_second_order(_: object) -> None:
    raise errors.SecondOrder(
        "a gradient of a compiled graph is differentiated again (create_graph=True), which AOTAutograd cannot do",
        way_out="Leave the part of the model that needs second derivatives uncompiled, or compile a function that takes the "
        "first gradient inside, by torch.func.grad or torch.autograd.grad",
    )
