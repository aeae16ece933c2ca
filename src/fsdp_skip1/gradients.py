"""What the gradient of an activation sets off, in its order, by hooks on the tensor.

The input of a block mostly is the output of the block before. Once its gradient is there, FSDP2
runs ``post_backward`` of the groups whose input it was, from a node of the graph put before each,
and then ``pre_backward`` of the module whose output it is, from a hook on the tensor. To get to
Python from the node costs more than to go on in the hooks of the tensor, so ``post_backward`` is
one of these, too. There still is a node before the block, so that gradients are summed in the same
order, but it calls nobody.

So ``post_backward`` waits for the other uses that the tensor has, if it has any.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    Call = Callable[[torch.Tensor], object]


# Places in the order of a tensor's hooks. The handles that torch gives out count from zero.
_POST_BACKWARD, _PRE_BACKWARD = -2, -1
_nothing: Call = deque[object](maxlen=0).append  # no frame of Python's


def after_output(tensor: torch.Tensor, pre_backward: Call) -> None:
    """Have ``pre_backward`` called with the gradient of a module's output.

    Args:
        tensor: the output; no view, and it requires a gradient.
        pre_backward: what to call.
    """
    if tensor._backward_hooks is None and not tensor.is_leaf:
        _register(tensor, {_POST_BACKWARD: _nothing, _PRE_BACKWARD: pre_backward})
    else:
        tensor.register_hook(pre_backward)


def before_input(tensor: torch.Tensor, post_backward: Call) -> bool:
    """Have ``post_backward`` called first when the gradient of a module's input is complete.

    False, with nothing changed, if the node before the module has to: the tensor is a leaf or a
    view, has hooks that are not ours, or is the input of another module already.
    """
    hooks: Any = tensor._backward_hooks
    if tensor.is_leaf:
        return False
    if hooks is None:
        if tensor._is_view():
            return False
        _register(tensor, {_POST_BACKWARD: post_backward})
        return True
    if len(hooks) != 2 or hooks.get(_POST_BACKWARD) is not _nothing:
        return False
    hooks[_POST_BACKWARD] = post_backward
    return True


def _register(tensor: Any, hooks: dict[int, Call]) -> None:
    """``register_hook``, less the handles by which to remove them."""
    tensor._backward_hooks = OrderedDict(hooks)
    tensor.grad_fn._register_hook_dict(tensor)
