"""Runs scenarios of one library in a process of its own: ``worker LIBRARY RESULT SCENARIO...``.

The environment it is started in decides about the plugin, and nothing here touches it: with
FSDP_SKIP1 in it, the process runs the plugin's arm, and without it, the other two.
"""

import gc
import importlib
import os
import pickle
import sys
import time
import traceback
import warnings
from pathlib import Path

# What a job does first: if the plugin is wanted, this import has to bring it.
import torch

from ecosystem.libraries import LIBRARIES
from support import arms, ranks, warmup


def run_arms(scenario: arms.Scenario, rank: ranks.Rank) -> dict[str, arms.Outcome]:
    """Body of a forked rank."""
    wanted = (arms.PLUGIN,) if "FSDP_SKIP1" in os.environ else (arms.PLAIN, arms.STOCK)
    outcomes = {}
    for arm in wanted:
        if arm == arms.PLAIN and not scenario.like_plain:
            continue
        directory = rank.directory / arm
        directory.mkdir(exist_ok=True)  # ranks share it
        run = arms.Run(scenario, arm, rank, directory)
        outcomes[arm] = run.outcome
        try:
            run.setup()
            scenario.steps(run)
            run.outcome.skipped = _skipped()
        except Exception:
            run.outcome.error = traceback.format_exc()
            if rank.world > 1:
                raise  # the other rank may be waiting in a collective
        torch._dynamo.reset()
    return outcomes


def _skipped() -> dict[str, int] | None:
    """What the plugin counted; None where nobody has loaded it."""
    plugin = sys.modules.get("fsdp_skip1")
    return None if plugin is None else plugin.stats().to_dict()


def main(library: str, result: str, names: list[str]) -> None:
    module = LIBRARIES[library]
    warnings.simplefilter("ignore")
    for name in module.IMPORTS:
        importlib.import_module(name)
    warmup.load()
    gc.freeze()
    results = {}
    for scenario in module.SCENARIOS:
        if scenario.name in names:
            began = time.monotonic()
            try:
                results[scenario.name] = ranks.run_ranks(
                    lambda rank, scenario=scenario: run_arms(scenario, rank),
                    scenario.world,
                    scenario.timeout,
                )
            except AssertionError as error:
                results[scenario.name] = str(error)
            sys.stderr.write(f"{time.monotonic() - began:6.1f} s  {scenario.name}\n")
    Path(result).write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
