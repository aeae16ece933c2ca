"""The libraries and their scenarios.

Each ``with_*`` module describes one library: ``PACKAGES``, whose releases are printed; ``IMPORTS``,
what its ranks would otherwise each import anew; and ``SCENARIOS``. They import the library itself
inside functions, so that collecting is cheap.
"""

from ecosystem import (
    with_accelerate,
    with_lightning,
    with_peft,
    with_torch,
    with_torchao,
    with_torchtitan,
    with_transformers,
)

LIBRARIES = {
    module.__name__.partition("with_")[2]: module
    for module in (
        with_torch,
        with_torchao,
        with_transformers,
        with_peft,
        with_accelerate,
        with_lightning,
        with_torchtitan,
    )
}

LIBRARY_OF = {
    scenario.name: library for library, module in LIBRARIES.items() for scenario in module.SCENARIOS
}
