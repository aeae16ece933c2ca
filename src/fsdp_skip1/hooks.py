"""FSDP2's hooks of one module in one piece, where its only group is steady.

torch binds the hooks when ``fully_shard`` runs, and wraps torch.compile's off-switch around them
anew at every call. They sit on live modules, so they are exchanged there, module by module, and put
back when the plugin is switched off. Inside, they do what torch's do for a module that is not the
root and has nothing to cast; else torch's run.
"""

from __future__ import annotations

import types
import weakref
from typing import TYPE_CHECKING, Any

import torch

from fsdp_skip1.frames import frame_callback
from fsdp_skip1.gradients import after_output, before_input, nothing
from fsdp_skip1.others import is_untouched
from fsdp_skip1.releases import groups_of
from fsdp_skip1.trims import below_switch, is_one_tensor
from fsdp_skip1.unshard import ATTRIBUTE, lock

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

    from fsdp_skip1.steady import Stepper

_compiling = torch.compiler.is_dynamo_compiling  # a constant to who traces


class Hooks:
    """The hooks that are exchanged while the plugin is on."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._roots: weakref.WeakSet[Any] = weakref.WeakSet()
        self._states: weakref.WeakSet[Any] = weakref.WeakSet()
        self._stopped = False

    def take(self, root: Any) -> None:
        """Exchange the hooks of all states below an FSDP2 root, where they are torch's own."""
        if root in self._roots:
            return
        with lock:
            if self._stopped:  # by another thread
                return
            self._roots.add(root)
            place = nothing()
            for state in root._state_ctx.all_states:
                if len(state._modules) == 1 and len(groups_of(state)) == 1:
                    self._states.add(state)
                    state.__dict__[ATTRIBUTE] = ModuleHooks(self._stepper, state, place)

    def stop(self) -> None:
        """Put torch's hooks back wherever ours still are, for good."""
        with lock:
            self._stopped = True
            for state in list(self._states):
                hooks: ModuleHooks | None = state.__dict__.pop(ATTRIBUTE, None)
                if hooks is not None:
                    hooks.give_back()
            self._states.clear()
            self._roots.clear()


class ModuleHooks:
    """The hooks of one module."""

    def __init__(self, stepper: Stepper, state: Any, place: Callable[..., Any]) -> None:
        self._stepper = stepper
        self._state = state
        self._place = place
        (self._group,) = groups_of(state)
        # Found before forward, by which nothing has changed after it.
        self._is_torchs = True
        self._looked = False
        module = state._modules[0]
        # On other devices it has to run on the stream of the module's own forward.
        self._on_input = self._before_input() if self._group.device.type == "cpu" else None
        self._taken: list[tuple[MutableMapping[Any, Any], Any, Any]] = []
        self._take(module._forward_pre_hooks, "_pre_forward_hook_handle", self._before_forward)
        self._take(module._forward_hooks, "_post_forward_hook_handle", self._after_forward)

    def _take(
        self,
        registry: MutableMapping[Any, Any],
        handle: str,
        make: Callable[[Any, Any], Callable[..., Any]],
    ) -> None:
        key = getattr(getattr(self._state, handle, None), "id", None)
        theirs: Any = registry.get(key)
        raw = _below_switch(theirs)
        if raw is not None:
            ours: Any = make(theirs, raw)
            ours.__name__ = theirs.__name__
            registry[key] = ours
            self._taken.append((registry, theirs, ours))

    def give_back(self) -> None:
        for registry, theirs, ours in self._taken:
            for key, hook in list(registry.items()):  # perhaps under another handle by now
                if hook is ours:
                    registry[key] = theirs

    def _looks_untouched(self) -> bool:
        self._is_torchs = self._stepper.is_torchs(self._state)
        return self._is_torchs

    # Each hook, when it is traced, has to be torch's, at which torch.compile breaks its graph. As a
    # frame of its own it is passed over, as torch's are. With no frame evaluation set in this
    # thread, there is nothing to switch off.

    def _before_forward(self, theirs: Any, raw: Any) -> Callable[..., Any]:
        stepper, state, group = self._stepper, self._state, self._group
        on_input = self._on_input
        policy, states = state._mp_policy, stepper.states
        casts = policy.cast_forward_inputs and policy.param_dtype

        def pre_forward(module: Any, args: Any, kwargs: Any) -> Any:
            self._looked = False
            if _compiling() or stepper.aside or frame_callback() is not None:
                return theirs(module, args, kwargs)
            if (
                not self._looks_untouched()
                or state._training_state is not states.IDLE
                or state._is_root is not False
                or state._state_ctx.iter_forward_root is None
                or state._states_to_forward_prefetch
                or state._mp_policy is not policy
                or casts
                or stepper.reduction_pending(state)
            ):
                return raw(module, args, kwargs)
            state._training_state = states.FORWARD
            result = stepper.before_forward(group, args, kwargs, on_input)
            if result is None:
                return group.pre_forward(module, args, kwargs)
            self._looked = True
            return result

        return pre_forward

    def _before_input(self) -> Callable[[torch.Tensor], bool]:
        stepper, group, place = self._stepper, self._group, self._place
        after_backward = stepper.after_backward_of(group)

        def post_backward(_: torch.Tensor) -> None:
            if stepper.is_in_backward(group):
                after_backward()

        def on_input(tensor: torch.Tensor) -> bool:
            return before_input(tensor, post_backward, place)

        return on_input

    def _after_forward(self, theirs: Any, raw: Any) -> Callable[..., Any]:
        stepper, state, group = self._stepper, self._state, self._group
        states, place = stepper.states, self._place

        def post_forward(module: Any, inputs: Any, output: Any) -> Any:
            looked = self._looked
            if _compiling() or stepper.aside or not (looked or frame_callback() is None):
                return theirs(module, inputs, output)
            if (
                state._training_state is states.PRE_BACKWARD
                or state._state_ctx.iter_forward_root is state
                or not self._is_torchs
                or state._mp_policy.output_dtype is not None
            ):
                return raw(module, inputs, output)
            if not stepper.after_forward(group, looked=looked):
                output = group.post_forward(module, inputs, output)
            if not is_one_tensor(output):
                output = state._register_pre_backward_hook(output)
            elif output.requires_grad and torch.is_grad_enabled():
                after_output(output, pre_backward, place)
            state._training_state = states.IDLE
            return output

        def pre_backward(grad: torch.Tensor) -> Any:
            if (
                _compiling()
                or stepper.aside
                or frame_callback() is not None
                or state._states_to_backward_prefetch
                or not stepper.is_torchs(state)
            ):
                # The one that torch would have put on the tensor in forward.
                return stepper.torchs_pre_backward(state)(grad)
            state._training_state = states.PRE_BACKWARD
            state._register_root_post_backward_final_callback()
            if not stepper.before_backward(group, prefetch=True):
                group.pre_backward(True)
            return None  # the gradient stays

        return post_forward


def _below_switch(hook: Any) -> Callable[..., Any] | None:
    """The hook without the off-switch around it; None if that is not what it is."""
    if type(hook) is not types.MethodType or not is_untouched(hook.__func__):
        return None
    raw = below_switch(hook.__func__)
    return None if raw is None else types.MethodType(raw, hook.__self__)
