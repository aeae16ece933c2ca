"""What the gradient of an activation sets off, in its order, by one hook on the tensor.

The input of a block mostly is the output of the block before. Once its gradient is there, FSDP2
runs ``post_backward`` of the groups whose input it was, through a node of the graph put before
each, and then ``pre_backward`` of the module whose output it is, through a hook on the tensor. On
small layers the nodes cost more than what they call. Here the hook calls all of them.

So a block sees the tensor that it was given, as in the plain module. In stock it sees another one,
whose gradient is the block's share, where the tensor has other uses, too.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from fsdp_skip1.trims import untraced

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    Call = Callable[[torch.Tensor], object]

# Handles of ``Tensor.register_hook`` count from zero.
_KEY = -1


def after_output(tensor: torch.Tensor, pre_backward: Call) -> None:
    """Have ``pre_backward`` called with the gradient of a module's output.

    Args:
        tensor: the output; no view, and it requires a gradient.
        pre_backward: what to call.
    """
    if tensor._backward_hooks is None and not tensor.is_leaf:
        _hang(tensor, [], pre_backward)
    else:
        tensor.register_hook(pre_backward)


def before_input(tensor: torch.Tensor, post_backward: Call) -> bool:
    """Have ``post_backward`` called when the gradient of a module's input is complete.

    False, with nothing changed, if a node before the module has to: the tensor is a leaf or a view,
    has hooks that come first, or is the input of the same module once more.
    """
    hooks: Any = tensor._backward_hooks
    if hooks is None:
        if tensor.is_leaf or tensor._is_view():
            return False
        _hang(tensor, [post_backward], None)
        return True
    posts = _posts(tensor, hooks)
    if posts is None or len(hooks) != 1 or post_backward in posts:
        return False
    posts.append(post_backward)
    return True


def after_input(tensor: torch.Tensor, post_backward: Call) -> None:
    """Let what the module has put on its own input come before ``post_backward``.

    That is hooks of its own, or ``pre_backward`` where it returns its input.

    Args:
        tensor: the input, which has more hooks than ours.
        post_backward: what ``before_input`` was given, if it was called.
    """
    hooks: Any = tensor._backward_hooks
    if post_backward in (_posts(tensor, hooks) or ()):
        # Not ``move_to_end``: torch calls them in the order of the dict below.
        hooks[_KEY] = hooks.pop(_KEY)


@untraced
def _run(_: int, posts: list[Call], pre_backward: Call | None, grad: torch.Tensor) -> None:
    for post_backward in reversed(posts):
        post_backward(grad)
    if pre_backward is not None:
        pre_backward(grad)


def _hang(tensor: Any, posts: list[Call], pre_backward: Call | None) -> None:
    """``register_hook``, less the handle by which to remove it."""
    hook = functools.partial(_run, tensor._version, posts, pre_backward)
    tensor._backward_hooks = OrderedDict({_KEY: hook})
    tensor.grad_fn._register_hook_dict(tensor)


def _posts(tensor: torch.Tensor, hooks: Any) -> list[Call] | None:
    """What our hook calls first, if there is one and it still is before all of the tensor's uses.

    Not once the tensor was written to: then its hooks are behind the writing.
    """
    hook = None if hooks is None else hooks.get(_KEY)
    if type(hook) is not functools.partial or hook.func is not _run:
        return None
    version, posts, _ = hook.args
    found: list[Call] | None = posts
    return found if version == tensor._version and not tensor.is_leaf else None
