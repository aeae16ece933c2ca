"""torch.compile and the frames of this package.

While a thread is inside something compiled, torch.compile looks at each frame of Python's that
begins there, also at those that the autograd engine calls. What torch does around forward and
backward is switched off for it; what this package puts around that is passed over, frame by frame.
Called from what is traced, it is traced as ever.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_PACKAGE = __name__.partition(".")[0]
_evaluation: Any = torch._C._dynamo.eval_frame
_set_callback = _evaluation.set_eval_frame


def frame_callback() -> Any:
    """What torch.compile looks at this thread's frames with; None where it does not.

    Taken off and put back, as torch.compile's own off-switch does: in 2.6 and 2.7 the function
    that only looks, ``get_eval_frame_callback``, gives away a reference that it has not got, and
    after some thousand steps Python ends because ``None`` has no references left.
    """
    found = _set_callback(None)
    if found is not None:
        _set_callback(found)
    return found


def nobody_traces() -> bool:
    """Whether torch.compile looks at no frame of this thread."""
    return "torch._dynamo.eval_frame" in sys.modules and frame_callback() is None


@functools.cache
def pass_over() -> None:
    """Have torch.compile pass over all functions of this package that are loaded by now."""
    for code in _codes():
        if hasattr(_evaluation, "set_code_exec_strategy"):
            action = _evaluation._FrameAction
            strategy = _evaluation._FrameExecStrategy(action.SKIP, action.DEFAULT)
            _evaluation.set_code_exec_strategy(code, strategy)
        elif hasattr(_evaluation, "skip_code"):  # 2.6
            _evaluation.skip_code(code)


def _codes() -> Iterator[types.CodeType]:
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == _PACKAGE:
            for value in list(vars(module).values()):
                yield from _codes_of(value, name)


def _codes_of(value: Any, module: str) -> Iterator[types.CodeType]:
    if isinstance(value, type):
        if value.__module__ == module:
            for member in list(vars(value).values()):
                yield from _codes_of(member, module)
    elif isinstance(value, property):
        yield from _codes_of(value.fget, module)
    elif isinstance(value, (staticmethod, classmethod)):
        yield from _codes_of(value.__func__, module)
    elif callable(value) and getattr(value, "__module__", None) == module:
        yield from _nested(getattr(inspect.unwrap(value), "__code__", None))


def _nested(code: Any) -> Iterator[types.CodeType]:
    if isinstance(code, types.CodeType):
        yield code
        for constant in code.co_consts:
            yield from _nested(constant)
