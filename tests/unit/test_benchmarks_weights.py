"""benchmarks/weights.py: metrics computed from raw measurements, and the shutdown of its processes."""

import psutil
import pytest
from benchmarks.lib.processes import MeasurementFailed
from benchmarks.weights_parts import page, training
from benchmarks.weights_parts.peers import Peer


def update(pause, step, bare, **changes):
    others = {"load": 0.0, "bare_pause": bare, "gap": pause, "bare_gap": 0.0, "update": 0.0, "staging_steps": []}
    return {"pause": pause, "step": step, "bare": bare, **others, **changes}


def test_a_pause_is_divided_by_the_step_and_the_bare_reload_of_its_round():
    engines = [[update(1.0, 0.5, 0.5), update(6.0, 1.0, 3.0)], [update(6.0, 0.5, 1.5)]]
    found = page.pause_figures(engines)
    assert found["pause_over_step"] == pytest.approx(1.5)
    assert found["pause_over_step_worst"] == pytest.approx(3.0)
    assert found["num_updates"] == 3


def test_steps_during_staging_are_compared_with_other_steps():
    rounds = [update(1.0, 0.5, 0.5, staging_steps=[1.0, 1.0]), update(1.0, 0.5, 0.5, staging_steps=[2.0])]
    assert page.pause_figures([rounds])["staging_step_over_step"] == pytest.approx(2.0)
    assert page.pause_figures([[update(1.0, 0.5, 0.5)]])["staging_step_over_step"] is None


def test_the_stall_is_the_publish_call_over_the_step_without_it():
    steps = [{"step": 2.0, "publish": 0.1, "committed": 0.5}, {"step": 4.0, "publish": 0.4}]
    found = page.learner_figures(steps)
    assert found["publish_stall_frac"] == pytest.approx(0.075)
    assert found["publish_stall_frac_worst"] == pytest.approx(0.1)


def test_deltas_are_compared_in_bytes_and_speeds_use_the_bytes_of_weights():
    def step(delta):
        return {"delta_bytes": delta, "full_bytes": 1e6, "unchanged": 0.9, "encode_s": 0.01, "decode_s": 0.001}

    found = page.delta_figures({"1e-6": [step(1e5), step(2e4), step(3e4)], "1e-5": [step(4e5)]})
    assert found["delta_over_full"] == {"1e-6": pytest.approx(0.03), "1e-5": pytest.approx(0.4)}
    assert found["delta_encode_mb_per_s"] == pytest.approx(100)
    assert found["delta_decode_mb_per_s"] == pytest.approx(1000)


def synced(**changes):
    one = {"sync": 1.0, "save": 1.0, "load": 1.0, "call": 0.1, "until_seen": 0.8, "fetch": 0.2}
    rounds = [one, {**one, "sync": 4.0, "save": 3.0}, {**one, "sync": 0.6, "load": 5.0}]
    return {"num_bytes": 2e9, "rounds": rounds, **changes}


def test_a_sync_is_divided_by_save_and_load_of_its_round():
    network = {"num_bytes": 2e9, "rounds": [{"sync": 2.0, "fetch": 1.0, "sent_bytes": 2e8}]}
    found = page.sync_figures({"bfloat16_disk": synced()}, {"delta": network})
    assert found["sync"]["bfloat16_disk"]["over_torch"] == pytest.approx(0.5)
    assert found["sync"]["bfloat16_disk"]["gb_per_s"] == pytest.approx(2.0)
    assert found["sync_network"]["delta"]["sent_share"] == pytest.approx(0.1)


def test_the_reload_is_added_to_both_sides_of_a_sync():
    result = {**page.sync_figures({"bfloat16_disk": synced()}, {}), "memcpy_gb_per_s": 10.0, "bare_reload_s": 2.0}
    found = page.summed_up(result)
    assert found["sync_over_torch_save_load"] == pytest.approx(0.5)
    assert found["sync_over_torch_save_load_with_reload"] == pytest.approx(3 / 4)
    assert found["sync_over_memcpy"] == pytest.approx(0.2)
    assert page.summed_up({}) == {}


def test_host_reads_count_sent_bytes_and_verifications_count_verified_bytes():
    pullers = {"network": [{"sync": 1.0, "verified_bytes": 10}, {"sync": 3.0, "verified_bytes": 0}]}
    found = page.hosts_figures(10, 1.5, pullers)
    assert found["host_reads"] == pytest.approx(1.5)
    assert found["host_verified"] == {"network": 1.0}
    assert found["host_last_s"] == {"network": 3.0}


def test_fairness_is_the_slowest_time_over_the_median_of_its_round():
    found = page.fairness_figures(100, [[1.0, 1.0, 2.0], [2.0, 2.0, 3.0], [1.0, 1.0, 1.2]])
    assert found["fairness"] == pytest.approx(1.5)
    assert found["fairness_worst"] == pytest.approx(2.0)


def test_the_reward_is_the_closeness_of_the_first_number():
    assert training.closeness(" 30. And 5", 30) == 1.0
    assert training.closeness(" 25", 30) == pytest.approx(0.25)
    assert training.closeness("none", 30) == 0.0


@pytest.mark.process
def test_a_failed_call_names_role_and_reason():
    with (
        Peer("copying") as peer,
        pytest.raises(MeasurementFailed, match=r"copying, 'rates': TypeError: .*no_such"),
    ):
        peer.call("rates", no_such=1)


@pytest.mark.process
def test_a_call_that_times_out_ends_its_process():
    with (
        pytest.raises(MeasurementFailed, match=r"took longer than 0\.01 s for 'rates'"),
        Peer("copying") as peer,
    ):
        peer.call("rates", num_rounds=1000, limit_s=0.01)
    assert not psutil.pid_exists(peer.pid)


@pytest.mark.process
def test_a_peer_ends_when_its_pipe_is_closed():
    peer = Peer("copying")
    process = psutil.Process(peer.pid)
    peer.call("rates", num_rounds=1)
    peer.disconnect()
    process.wait(60)
    peer.end()
