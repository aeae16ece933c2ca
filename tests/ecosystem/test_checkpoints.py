"""Distributed checkpoints that stock FSDP2 and the plugin pass to one another, and reshard."""

import pickle

import pytest

from ecosystem.conftest import TIMEOUT_SECONDS, start

LEGS = {
    "stock to plugin to stock": (None, "1", None),
    "plugin to stock to plugin": ("1", None, "1"),
}


@pytest.mark.parametrize("legs", LEGS.values(), ids=LEGS.keys())
def test_relay(legs, tmp_path) -> None:
    """Every way through the layouts is the same training as two plain ranks that average."""
    for index, variable in enumerate(legs):
        result = tmp_path / f"{index}.pickle"
        source, target = (str(tmp_path / f"checkpoint-{i}") for i in (index - 1, index))
        process, log = start(["relay", source, target, result, index], tmp_path, variable)
        assert process.wait(TIMEOUT_SECONDS) == 0, log.read_text()[-5000:]
        for rank, found in enumerate(pickle.loads(result.read_bytes())):
            reference = found["plain to plain" if index else "nothing to plain"]
            for way, records in found.items():
                assert records.keys() == reference.keys()
                problems = [
                    f"{key}: {how}"
                    for key, image in records.items()
                    if (how := image.differs(reference[key], layout=False))
                ]
                assert not problems, f"leg {index}, rank {rank}, {way}:\n" + "\n".join(problems)
