"""Every library's scenarios against the unwrapped model and against stock FSDP2, bit for bit."""

from ecosystem.libraries import LIBRARIES
from support.arms import PLUGIN, STOCK, Scenario
from support.features import RELEASE
from support.results import arm_tests


@arm_tests([scenario for module in LIBRARIES.values() for scenario in module.SCENARIOS])
def test_library(scenario: Scenario, arm: str, ledger) -> None:
    ledger.judge(scenario, arm)
    for outcomes in ledger.outcomes(scenario):
        assert outcomes[STOCK].skipped is None, "the plugin was loaded where nobody asked for it"
        assert outcomes[PLUGIN].skipped["all_gathers"] > 0
        if scenario.size_one:
            assert outcomes[PLUGIN].counts, "no step was counted"
            if RELEASE < (2, 9):  # later releases skip the all-gather themselves
                gathers = sum(count.all_gathers for count in outcomes[STOCK].counts.values())
                assert gathers > 0, "not one was seen on stock either"
