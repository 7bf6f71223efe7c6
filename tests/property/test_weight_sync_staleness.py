"""The theorem of docs/staleness.md: schedules that satisfy its premises never train on a token beyond the bound."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leeway.common.staleness import PolicyVersion, StalenessConfig, StalenessContract, StaleTokens, held_back


@st.composite
def contracts(draw):
    """Draw any consistent configuration."""
    updates_per_step = draw(st.sampled_from([1, 2, 3, 4]))
    actor_lag, publish_every = draw(st.integers(0, 3)), draw(st.integers(1, 3))
    max_lag = actor_lag + publish_every - 1 + updates_per_step - 1 + draw(st.integers(0, 9))
    config = StalenessConfig(max_lag=max_lag, max_actor_lag=actor_lag, publish_every=publish_every)
    return StalenessContract(config, draw(st.integers(1, 3)), updates_per_step)


class Run:
    """Model of a learner and its groups that satisfies the premises of the theorem."""

    def __init__(self, contract, capacity):
        self.contract = contract
        self.capacity = capacity
        self.version = self.published = contract.actor_lag
        self.outstanding = []
        """Versions of the oldest token of each group: groups of the current step first, then by age."""
        self.num_in_step = 0
        self.greatest_lag = 0

    def lease(self, behind):
        """If admission is open, add a group whose oldest token is at most `behind` versions old."""
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
def test_no_trained_token_exceeds_the_bound_if_the_premises_hold(contract, moves):
    run = Run(contract, contract.capacity())
    for name, *arguments in moves:
        if name == "fill":
            for _ in range(run.capacity):
                run.lease(9)
        else:
            getattr(run, name)(*arguments)
    assert run.greatest_lag <= contract.bound()


@given(contract=contracts())
def test_one_group_above_the_capacity_can_exceed_the_bound(contract):
    """In the worst case, the bound holds at the capacity and fails with one group more than the capacity."""
    for extra in (0, 1):
        run = Run(contract, contract.capacity() + extra)
        # The worst case: the newest weights and the groups are as old as the contract allows.
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
def test_steps_left_counts_the_steps_that_can_use_a_group(contract, oldest, version):
    left = contract.steps_left(oldest, version)
    for num_steps in range(12):
        at = contract.latest_version(version, num_steps)
        assert contract.usable(oldest, at) == (num_steps <= left)
    assert contract.usable(oldest, version) == (version + contract.updates_per_step - 1 - oldest <= contract.bound())


@pytest.mark.parametrize(("max_lag", "actor_lag", "publish_every"), [(0, 0, 1), (4, 1, 1), (4, 0, 1), (7, 1, 3)])
def test_with_one_update_per_step_the_capacity_is_one_step_plus_one_per_free_version(max_lag, actor_lag, publish_every):
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
def test_a_bound_that_no_group_can_meet_is_refused_with_the_smallest_valid_bound(knobs, updates_per_step, need):
    config = StalenessConfig(**knobs)
    with pytest.raises(ValueError, match=r"^weight_sync\.max_lag = ") as refused:
        StalenessContract(config, 8, updates_per_step)
    message = str(refused.value)
    assert f"Raise weight_sync.max_lag to {need} or more" in message
    assert "learner.num_minibatches or learner.num_epochs" in message
    raised = StalenessConfig(**{**knobs, "max_lag": need})
    assert StalenessContract(raised, 8, updates_per_step).capacity() >= 8


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0)])
def test_a_step_without_groups_or_updates_is_refused(sizes):
    with pytest.raises(ValueError, match="expected at least 1"):
        StalenessContract(StalenessConfig(), *sizes)


def test_an_unset_actor_lag_leaves_room_for_the_updates_of_a_step():
    config = StalenessConfig(max_lag=3)
    assert [StalenessContract(config, 1, updates).actor_lag for updates in (1, 2, 3, 4)] == [1, 0, 1, 0]
    assert StalenessContract(config, 1, 4).min_version(7) == 7


# --- decisions of actors, buffer and learner ------------------------------------------------------


@given(contract=contracts(), num_before=st.integers(0, 40), version=st.integers(0, 20), debt=st.integers(0, 9))
def test_a_group_is_admitted_exactly_if_its_step_can_use_its_oldest_possible_token(contract, num_before, version, debt):
    published = max(0, version - debt)
    reason = contract.admit(num_before, version=version, published=published)
    begins_at = contract.latest_version(version, num_before // contract.groups_per_step)
    fits = contract.usable(contract.min_version(published), begins_at)
    assert (reason == "") == (fits and num_before < contract.capacity())
    if debt < contract.config.publish_every and num_before < contract.capacity():
        assert reason == "", "if publication is on time, only the capacity limits admission"


def test_with_max_lag_0_nothing_is_admitted_between_a_step_and_its_publication():
    contract = StalenessContract(StalenessConfig(max_lag=0), 2)
    assert contract.admit(0, version=1, published=1) == ""
    reason = "the learner is at version 1, but the newest published version is 0"
    assert contract.admit(0, version=1, published=0) == reason
    assert "2 groups are outstanding" in contract.admit(2, version=1, published=1)


VERSIONS = st.builds(PolicyVersion, st.integers(0, 2), st.integers(0, 8))


@given(served=VERSIONS, newest=VERSIONS, min_version=st.integers(0, 8), actor_lag=st.integers(0, 3))
def test_a_request_starts_only_on_recent_weights_and_always_on_the_newest(served, newest, min_version, actor_lag):
    contract = StalenessContract(StalenessConfig(max_lag=9, max_actor_lag=actor_lag), 1)
    is_new = served >= newest
    is_near = served.incarnation == newest.incarnation and newest.version - served.version <= actor_lag
    is_unreachable = min_version > newest.version  # a version of an abandoned incarnation
    is_sufficient = served.version >= (newest.version if is_unreachable else min_version)
    assert contract.may_start(served, newest, min_version) == ((is_new or is_near) and is_sufficient)
    assert contract.may_start(newest, newest, min_version), "a request on the newest weights never waits"


@given(contract=contracts(), ages=st.lists(st.integers(0, 20), max_size=8), version=st.integers(0, 30))
def test_every_group_is_either_selected_or_evicted(contract, ages, version):
    groups = sorted((age, number) for number, age in enumerate(ages))
    selected, evicted = contract.select(groups, version), list(contract.evict(iter(groups), version))
    assert evicted + selected == [number for _, number in groups]
    assert all(version + contract.updates_per_step - 1 - ages[number] <= contract.bound() for number in selected)


def test_eviction_stops_reading_at_the_first_usable_group():
    contract = StalenessContract(StalenessConfig(max_lag=1), 1)
    unread = iter([(0, "old"), (4, "young"), (5, "younger")])
    assert list(contract.evict(unread, 5)) == ["old"]
    assert next(unread) == (5, "younger")


DUE = st.lists(st.integers(-2, 4), max_size=5)


@given(chosen=st.lists(st.integers(0, 4), min_size=2, max_size=2), left=DUE, still_open=DUE)
def test_a_step_waits_only_for_open_groups_that_benefit(chosen, left, still_open):
    waits = held_back(chosen, left, still_open, 2)
    for place in waits:
        assert 0 <= still_open[place] < max(chosen), "the group is older than a chosen one, and not stale"
    if not waits:
        # No wait would help: each open group is due no earlier than the chosen groups, or after every late group.
        others = sorted(due for due in [*left, *still_open] if due >= 0)
        late = [due for i, due in enumerate(others) if due < 1 + i // 2]
        assert all(due >= max(chosen) or due > max(late, default=-1) for due in still_open if due >= 0)


def test_no_step_waits_with_on_stale_drop():
    contract = StalenessContract(StalenessConfig(max_lag=4), 2)
    assert contract.held_back([3, 3], [], [0]) == []
    assert held_back([3, 3], [], [0], 2) == [0]


def test_the_learner_refuses_tokens_beyond_the_bound_with_the_fix():
    contract = StalenessContract(StalenessConfig(max_lag=2), 1)
    contract.check_trained(7, 2)
    with pytest.raises(StaleTokens, match=r"version 7 .* lag of 3 versions, but max_lag = 2.*restart the learner"):
        contract.check_trained(7, 3)
    StalenessContract(StalenessConfig(max_lag="unbounded"), 1).check_trained(7, 1000)
