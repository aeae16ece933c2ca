"""Stand-ins for other projects that patch FSDP2, each in the manner of its original.

Each is a module with ``install()`` and ``undo()``, to be imported in a forked child: what the
original does on import, the stand-in does on import. None changes a number. ``calls`` counts how
often its code ran.
"""

import inspect
import textwrap
from typing import Any


def copied(function: Any, namespace: dict[str, Any]) -> Any:
    """The function as if its source had been pasted into another project's module."""
    function = inspect.unwrap(function)
    source = "from __future__ import annotations\n" + textwrap.dedent(inspect.getsource(function))
    names = {**function.__globals__, **namespace}
    code = compile(source, namespace["__file__"], "exec", dont_inherit=True)
    exec(code, names)
    return names[function.__name__]
