"""The releases whose step the plugin may take in one piece, see ``steady``.

``steady`` stands in for whole methods of torch's, so it must know all of what they do. It does for
the sources that were read and compared against, by their digest; any other torch, be it one line
that differs, runs its own methods, with the smaller trims.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fsdp_skip1 import others
from fsdp_skip1.points import without_ours

if TYPE_CHECKING:
    from fsdp_skip1.releases import Fsdp2

# What ``steady`` stands in for, and what that calls.
GROUP_METHODS = (
    "pre_forward",
    "post_forward",
    "pre_backward",
    "post_backward",
    "unshard",
    "wait_for_unshard",
    "reshard",
    "_to_sharded",
    "_to_unsharded",
    "_record_post_forward",
    "_backward_prefetch",
    "_prefetch_unshard",
    "_register_post_backward_hook",
    "_wait_for_post_backward",
    "_reshard_after_forward",
    "_use_post_forward_mesh",
    "finalize_backward",
)
PARAM_METHODS = (
    "to_sharded",
    "to_unsharded",
    "_setattr_on_modules",
    "free_unsharded_param",
    "unsharded_param",
    "unsharded_grad_data",
    "_get_grad_inner_tensor",
    "to_sharded_dtensor",
)
STATE_METHODS = (
    "_pre_forward",
    "_post_forward",
    "_pre_backward",
    "_root_pre_forward",
    "_register_pre_backward_hook",
    "_register_root_post_backward_final_callback",
    "_root_post_backward_final_callback",
)
SOME_STATE_METHODS = (
    "_cast_forward_inputs",
    "_cast_output_dtype",
    "_finalize_backward",
    "_end_backward_iteration",
    "wait_for_gradient_reduction",
)
# Of some releases only.
_LATER_GROUP_METHODS = (
    "_set_unsharded_grad_dtypes",
    "_validate_unused_param_grad_dtypes",
    "_take_unsharded_grads_to_reduce",
    "_get_unsharded_grad_to_reduce",
    "_prepare_partial_reduce_output",
    "_get_reduce_dtype",
)
_EARLIER_PARAM_METHODS = (
    "accumulate_unsharded_grad_if_needed",
    "to_accumulated_grad_if_needed",
    "unsharded_accumulated_grad_data",
)


@dataclass(frozen=True)
class Release:
    """What differs between releases in the methods that ``steady`` stands in for.

    Attributes:
        name: the first torch release with this source.
        registers_once: ``pre_forward`` registers ``post_backward`` for the first module only of
            ``fully_shard([a, b])``.
        stays_out_of_recompute: ``post_forward`` neither reshards nor records while backward runs.
        shares_modules: a module may have several groups.
        inputs: where the context holds the inputs of reduce-scatters in flight.
        factor: where a group holds the user's divide factor.
        waits_for_streams: the context keeps the last event of each stream, for finalization.
        constructs_dtensors: DTensors are constructed in Python.
        finalizes_groups: the end of a backward finalizes groups, not states.
        leaf_accumulates: gradients accumulate in the leaf, in a dtype of its own.
    """

    name: str
    registers_once: bool = False
    stays_out_of_recompute: bool = False
    shares_modules: bool = False
    inputs: str = "reduce_scatter_states"
    factor: str = "gradient_divide_factor"
    waits_for_streams: bool = False
    constructs_dtensors: bool = False
    finalizes_groups: bool = False
    leaf_accumulates: bool = False

    def let_go_of_inputs(self, context: Any) -> None:
        """Drop what ``context`` holds for reduce-scatters that are over."""
        held = getattr(context, self.inputs)
        if isinstance(held, list):
            held.clear()
        else:
            setattr(context, self.inputs, None)


_2_8 = Release("2.8", inputs="reduce_scatter_state", constructs_dtensors=True)
_2_9 = replace(_2_8, name="2.9", constructs_dtensors=False)
_2_10 = replace(_2_9, name="2.10", stays_out_of_recompute=True)
_2_12 = Release("2.12", stays_out_of_recompute=True, shares_modules=True)
_2_13 = replace(
    _2_12, name="2.13", registers_once=True, waits_for_streams=True, finalizes_groups=True
)

_RELEASES: dict[str, Release] = {
    "38f99bbdf2eadb5a": replace(_2_8, name="2.7", factor="reduce_scatter_reduce_op"),
    "268a73b831ebc3cd": _2_8,
    "f0f160075115d030": _2_9,
    "543f0da9b49beaaa": _2_10,
    "167e07d350c0004d": replace(_2_10, name="2.11"),
    "af1e188d238a9c54": _2_12,
    "82105e066f84cce2": _2_13,
    "043d399533c1fc1f": replace(_2_13, name="2.14"),
    "2a6320713ad00aec": replace(_2_13, name="2.15", leaf_accumulates=True),
}


def find(fsdp2: Fsdp2) -> Release | None:
    """The release that was proven, if the FSDP2 that is loaded has its source to the letter."""
    return _RELEASES.get(digest(fsdp2) or "")


def digest(fsdp2: Fsdp2) -> str | None:
    """A digest of what ``steady`` stands in for; None if that is not torch's own, or not there."""
    functions = []
    for owner, names, optional in (
        (fsdp2.group_classes[0], GROUP_METHODS, _LATER_GROUP_METHODS),
        (fsdp2.param_class, PARAM_METHODS, _EARLIER_PARAM_METHODS),
        (fsdp2.state_class, STATE_METHODS, SOME_STATE_METHODS),
    ):
        for name in (*names, *optional):
            function = torchs(owner, name)
            if function is not None:
                functions.append(function)
            elif name not in optional or name in vars(owner):
                return None
    return _digest(tuple(function.__code__ for function in functions))


def torchs(owner: Any, name: str) -> Any:
    """Torch's own function ``name`` of a class, below torch's own decorators; None if it is not."""
    value: Any = without_ours(vars(owner).get(name))
    value = value.__func__ if isinstance(value, staticmethod) else value
    if not others.is_untouched(value):
        return None
    value = value.fget if isinstance(value, property) else value
    return inspect.unwrap(value)


@functools.lru_cache(maxsize=4)
def _digest(codes: tuple[Any, ...]) -> str | None:
    try:
        text = "".join(inspect.getsource(code) for code in codes)
    except (OSError, TypeError):  # compiled files alone
        return None
    return hashlib.sha256(text.encode()).hexdigest()[:16]
