"""What the gradient of an activation sets off, in its order, by hooks on the tensor.

The input of a block mostly is the output of the block before. Once its gradient is there, FSDP2
runs ``post_backward`` of the groups whose input it was, from a node of the graph put before each,
and then ``pre_backward`` of the module whose output it is, from a hook on the tensor. To get to
Python from the node costs more than to go on in the hooks of the tensor, so ``post_backward`` is
one of these, too. There still is a node before the block, so that gradients are summed in the same
order, but it calls nobody.

So ``post_backward`` waits for the other uses that the tensor has, if it has any. It does nothing in
a backward that does not come from the block's output: such a one, with respect to the tensor, may
come from somewhere else. Nothing is lost so: where there is a ``pre_backward``, the end of backward
looks at every group of the same root.
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


def nothing() -> Call:
    """What stands for ``post_backward`` until there is one. Of each FSDP2 root, one of its own."""
    empty: deque[object] = deque(maxlen=0)
    return empty.append  # no frame of Python's


def after_output(tensor: torch.Tensor, pre_backward: Call, place: Call) -> None:
    """Have ``pre_backward`` called with the gradient of a module's output.

    Args:
        tensor: the output; no view, and it requires a gradient.
        pre_backward: what to call.
        place: the root's ``nothing``.
    """
    node: Any = tensor.grad_fn
    if node is None or tensor._backward_hooks is not None:
        tensor.register_hook(pre_backward)
        return
    # ``register_hook``, less the handle by which to remove it.
    hooks: Any = OrderedDict({_POST_BACKWARD: place, _PRE_BACKWARD: pre_backward})
    tensor._backward_hooks = hooks
    node._register_hook_dict(tensor)


def before_input(tensor: torch.Tensor, post_backward: Call, place: Call) -> bool:
    """Have ``post_backward`` called first when the gradient of a module's input is complete.

    False, with nothing changed, if the node before the module has to: the tensor is not the output
    of a module of the same root, has other hooks, or is the input of another module already.
    """
    hooks: Any = tensor._backward_hooks
    if hooks is None or len(hooks) != 2 or hooks.get(_POST_BACKWARD) is not place or tensor.is_leaf:
        return False
    hooks[_POST_BACKWARD] = post_backward
    return True
