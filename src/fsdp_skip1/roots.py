"""What an FSDP2 root does once a pass, in one piece: the start of forward and the end of backward.

torch opens a profiler range around each, which costs more than what is inside. For the releases in
``proven``; with a profiler, with something to wait for or with a caller who finalizes backward
himself, torch's methods run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fsdp_skip1.frames import nobody_traces
from fsdp_skip1.releases import groups_of
from fsdp_skip1.trims import observed

if TYPE_CHECKING:
    from fsdp_skip1.steady import Stepper

_profiling = torch.autograd._profiler_enabled


def begin_forward(stepper: Stepper, state: Any) -> bool:
    """``_root_pre_forward`` on the CPU, whose streams need no order. False if torch has to."""
    context = state._state_ctx
    if (
        stepper.aside
        or not state._is_root
        or context.iter_forward_root is not None
        or context.post_optim_event is not None
        or state._device.type != "cpu"
        or _profiling()
        or observed()
        or not stepper.is_torchs(state)
    ):
        return False
    context.iter_forward_root = state
    return True


def end_backward(stepper: Stepper, state: Any) -> bool:
    """``_root_post_backward_final_callback``. False, with nothing changed, if torch has to."""
    context, release, states = state._state_ctx, stepper.release, stepper.states
    if stepper.aside or _profiling() or observed() or not nobody_traces():
        return False
    if not context.is_last_backward or not stepper.is_torchs(state):
        return False
    if release.leaf_accumulates and context.manual_backward_finalization_active is not False:
        return False
    communication = state._comm_ctx
    every = [(each, groups_of(each)) for each in context.all_states]
    # Where all hand their gradients over, nobody leaves anything on another stream to wait for.
    if getattr(communication, release.inputs) or not all(
        stepper.hands_over(group) for _, groups in every for group in groups
    ):
        return False
    if release.finalizes_groups:
        context.iter_forward_root = None
    for each, groups in every:
        if release.finalizes_groups:
            each._modules_to_run_forward.clear()
        for group in reversed(groups):
            if group._training_state is not states.POST_BACKWARD:
                group.post_backward()  # of modules whose inputs need no gradient
            group._training_state = states.IDLE
        each._training_state = states.IDLE
        if not release.finalizes_groups and each._modules_to_run_forward:
            each._finalize_backward()  # warns
        elif not release.leaf_accumulates:
            for group in groups:
                if not stepper.finish_backward(group):
                    group.finalize_backward()
    if release.leaf_accumulates:
        state.wait_for_gradient_reduction()
    else:
        communication.post_forward_order.clear()
        release.let_go_of_inputs(communication)
    context.post_backward_final_callback_queued = False
    return True
