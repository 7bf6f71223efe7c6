"""The theorem of docs/staleness.md: random schedules that keep its premises never ask for a group past the bound."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weight_sync.staleness import StalenessConfig, StalenessContract


@st.composite
def contracts(draw):
    """Any knobs that do not contradict each other."""
    updates_per_step = draw(st.sampled_from([1, 2, 3, 4]))
    actor_lag, publish_every = draw(st.integers(0, 3)), draw(st.integers(1, 3))
    max_lag = actor_lag + publish_every - 1 + updates_per_step - 1 + draw(st.integers(0, 9))
    config = StalenessConfig(max_lag=max_lag, max_actor_lag=actor_lag, publish_every=publish_every)
    return StalenessContract(config, draw(st.integers(1, 3)), updates_per_step)


class Run:
    """A learner and its groups, as the theorem sees them."""

    def __init__(self, contract, capacity):
        self.contract = contract
        self.capacity = capacity
        self.version = self.published = contract.actor_lag
        self.outstanding = []
        """Versions of their oldest tokens; those of the step at hand first, then by age."""
        self.num_in_step = 0
        self.greatest_lag = 0

    def lease(self, behind):
        """While admission is open, one more group, whose oldest token is `behind` versions old at most."""
        if len(self.outstanding) < self.capacity:
            oldest = max(self.contract.min_version(self.published), self.published - behind)
            rest = sorted([*self.outstanding[self.num_in_step :], oldest])
            self.outstanding[self.num_in_step :] = rest

    def begin(self):
        if not self.num_in_step and len(self.outstanding) >= self.contract.groups_per_step:
            self.num_in_step = self.contract.groups_per_step
            for oldest in self.outstanding[: self.num_in_step]:
                last_update = self.version + self.contract.updates_per_step - 1
                self.greatest_lag = max(self.greatest_lag, last_update - oldest)
                bound = self.contract.bound()
                assert self.contract.usable(oldest, self.version) == (last_update - oldest <= bound)

    def finish(self, num_skipped):
        if self.num_in_step:
            self.outstanding = self.outstanding[self.num_in_step :]
            self.num_in_step = 0
            self.version += max(0, self.contract.updates_per_step - num_skipped)
            if self.version - self.published >= self.contract.config.publish_every:
                self.published = self.version


MOVES = st.one_of(
    st.tuples(st.just("lease"), st.integers(0, 3)),
    st.tuples(st.just("begin")),
    st.tuples(st.just("finish"), st.sampled_from([0, 0, 0, 1, 4])),
    st.tuples(st.just("fill")),
)


@given(contract=contracts(), moves=st.lists(MOVES, max_size=60))
def test_while_the_premises_hold_no_trained_token_passes_the_bound(contract, moves):
    run = Run(contract, contract.capacity())
    for name, *arguments in moves:
        if name == "fill":
            for _ in range(run.capacity):
                run.lease(9)
        else:
            getattr(run, name)(*arguments)
    assert run.greatest_lag <= contract.bound()


@given(contract=contracts())
def test_one_more_outstanding_group_could_pass_the_bound(contract):
    """At the capacity the bound is kept in the worst case, and one group above it, it is not."""
    for extra in (0, 1):
        run = Run(contract, contract.capacity() + extra)
        # The worst case: the newest weights are as old as they may be, and all groups begin as old as they may.
        run.version = run.published + contract.config.publish_every - 1
        for _ in range(run.capacity):
            run.lease(contract.actor_lag)
        while run.outstanding:
            missing = contract.groups_per_step - len(run.outstanding)
            run.outstanding += [run.version] * missing
            run.begin()
            run.finish(0)
        assert (run.greatest_lag > contract.bound()) == bool(extra)


@given(contract=contracts(), oldest=st.integers(0, 20), version=st.integers(0, 40))
def test_the_steps_that_are_left_are_those_that_may_use_the_group(contract, oldest, version):
    left = contract.steps_left(oldest, version)
    for num_steps in range(12):
        at = contract.latest_version(version, num_steps)
        assert contract.usable(oldest, at) == (num_steps <= left)
    assert contract.usable(oldest, version) == (version + contract.updates_per_step - 1 - oldest <= contract.bound())


@pytest.mark.parametrize(("max_lag", "actor_lag", "publish_every"), [(0, 0, 1), (4, 1, 1), (4, 0, 1), (7, 1, 3)])
def test_with_one_update_per_step_the_capacity_is_one_step_and_one_for_each_version_of_room(
    max_lag, actor_lag, publish_every
):
    config = StalenessConfig(max_lag=max_lag, max_actor_lag=actor_lag, publish_every=publish_every)
    assert StalenessContract(config, 8).capacity() == (max_lag - actor_lag - (publish_every - 1) + 1) * 8


@pytest.mark.parametrize(
    ("knobs", "updates_per_step", "capacity"),
    [
        ({"max_lag": 3}, 4, 8),
        ({"max_lag": 3, "max_actor_lag": 0}, 2, 16),
        ({"max_lag": 8}, 4, 16),
        ({"max_lag": 16}, 4, 32),
        ({"max_lag": "unbounded"}, 4, 32),
    ],
)
def test_with_several_updates_per_step_only_whole_steps_fit_into_the_bound(knobs, updates_per_step, capacity):
    assert StalenessContract(StalenessConfig(**knobs), 8, updates_per_step).capacity() == capacity


@pytest.mark.parametrize(
    ("knobs", "updates_per_step", "need"),
    [
        ({"max_lag": 0}, 2, 1),
        ({"max_lag": 2}, 4, 3),
        ({"max_lag": 4, "max_actor_lag": 1, "publish_every": 2}, 4, 5),
    ],
)
def test_a_bound_that_no_group_could_keep_is_refused_in_a_sentence_with_the_way_out(knobs, updates_per_step, need):
    config = StalenessConfig(**knobs)
    with pytest.raises(ValueError, match=r"^weight_sync\.max_lag = ") as refused:
        StalenessContract(config, 8, updates_per_step)
    said = str(refused.value)
    assert f"Raise weight_sync.max_lag to {need} or more" in said
    assert "learner.num_minibatches or learner.num_epochs" in said
    raised = StalenessConfig(**{**knobs, "max_lag": need})
    assert StalenessContract(raised, 8, updates_per_step).capacity() >= 8


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0)])
def test_a_step_without_groups_or_updates_is_refused(sizes):
    with pytest.raises(ValueError, match="a step needs at least one"):
        StalenessContract(StalenessConfig(), *sizes)


def test_an_unset_actor_lag_leaves_room_for_the_updates_of_a_step():
    config = StalenessConfig(max_lag=3)
    assert [StalenessContract(config, 1, updates).actor_lag for updates in (1, 2, 3, 4)] == [1, 1, 1, 0]
    assert StalenessContract(config, 1, 4).min_version(7) == 7
