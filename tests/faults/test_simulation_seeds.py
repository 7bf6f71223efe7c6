"""Row S of the fault matrix: random faults in virtual time, with only the policy and with the real buffer rules."""

import pytest
from tests.full import pick
from tests.simulation.core import Environment
from tests.simulation.mutations import MUTATIONS
from tests.simulation.seeds import Totals

NUM_POLICY_SEEDS = pick(2_000, 300_000)
NUM_SYSTEM_SEEDS = pick(100, 6_000)


@pytest.fixture
def environment():
    env = Environment()
    yield env
    env.close()


@pytest.mark.timeout(3600)
@pytest.mark.fault("S", "simulator: any mix of faults in virtual time, the policy alone")
def test_the_policy_keeps_every_invariant_in_any_mix_of_faults(show):
    totals = Totals.of(range(NUM_POLICY_SEEDS))
    show(f"{totals.num_seeds} seeds")
    show(f"{totals.num_updates} updates")
    show(f"{totals.num_at_bound} seeds at the bound, none beyond")
    assert totals.num_updates > 2 * totals.num_seeds


@pytest.mark.timeout(3600)
@pytest.mark.fault("S", "simulator: any mix of faults in virtual time, the real buffer over LMDB")
def test_the_real_buffer_keeps_every_invariant_in_any_mix_of_faults(show, environment):
    totals = Totals.of(range(NUM_SYSTEM_SEEDS), environment)
    show(f"{totals.num_seeds} seeds")
    show(f"{totals.num_updates} updates")
    show("ledger gap 0 after every event")
    assert totals.num_updates > 2 * totals.num_seeds


@pytest.mark.fault("S", "each check of the policy, one by one", control=True)
def test_a_seed_fails_if_any_single_check_is_removed(show):
    for mutation in MUTATIONS.values():
        assert mutation.first_failure().invariant == mutation.breaks
    show(f"{len(MUTATIONS)} checks removed, {len(MUTATIONS)} seeds fail")
