"""For each actor, the mismatch of its tokens at lag 0, and the lags of its tokens used for training."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from leeway.buffer.schema import VersionSpan, to_batch
from leeway.common.staleness import PolicyVersion
from leeway.learner.batch import StepBatch, lag0_by_actor, lag_by_actor
from leeway.learner.packing import PackingRule
from tests.world.learner import TOKEN_BUDGET, build, make_rows

VERSION = 3


def rows_of_two_actors(*, wrong_by: float):
    """Return rows of two actors: 'good' recorded the learner's log-probability -2, 'bad' -2 minus `wrong_by`."""
    rows = []
    for number, row in enumerate(make_rows(0)):
        length = row.num_completion_tokens
        actor, logprob = ("good", -2.0) if number % 2 else ("bad", -2.0 - wrong_by)
        spans = (VersionSpan(PolicyVersion(0, VERSION), 0, length),)
        rows.append(replace(row, actor=actor, logprobs=np.full(length, logprob, np.float32), spans=spans))
    return rows


def found(rows):
    batch = build(rows, VERSION)
    return lag0_by_actor(batch, torch.full((len(batch.sequence_T),), -2.0, dtype=torch.float64))


def test_an_actor_with_wrong_log_probabilities_is_identified_by_name():
    rows = rows_of_two_actors(wrong_by=0.5)
    by_actor = found(rows)
    assert by_actor["good"] == (0.0, sum(row.num_completion_tokens for row in rows if row.actor == "good"))
    assert by_actor["bad"] == (pytest.approx(0.5), sum(row.num_completion_tokens for row in rows if row.actor == "bad"))


def test_tokens_of_another_version_do_not_count_as_mismatch():
    rows = rows_of_two_actors(wrong_by=0.5)
    older = [replace(row, spans=(VersionSpan(PolicyVersion(0, 2), 0, row.num_completion_tokens),)) for row in rows]
    assert found(older) == {}
    crossing_an_update = []
    for row in rows:
        length = row.num_completion_tokens
        if length > 1:
            spans = (VersionSpan(PolicyVersion(0, 2), 0, 1), VersionSpan(PolicyVersion(0, VERSION), 1, length))
            crossing_an_update.append(replace(row, spans=spans))
    assert found(crossing_an_update) == {}


def test_tokens_of_an_abandoned_version_are_no_mismatch_although_their_lag_is_0():
    rows = []
    for row in rows_of_two_actors(wrong_by=0.5):
        spans = (VersionSpan(PolicyVersion(0, VERSION + 2), 0, row.num_completion_tokens),)
        rows.append(replace(row, spans=spans))
    batch = StepBatch.build(to_batch(rows, "run"), VERSION, {0: 0, 1: VERSION}, PackingRule(TOKEN_BUDGET))
    assert set(batch.lag_T) == {0}
    assert batch.abandoned_T.all()
    assert not batch.fresh_T.any()
    assert lag0_by_actor(batch, torch.full((len(batch.sequence_T),), -2.0, dtype=torch.float64)) == {}


def test_a_missing_log_probability_does_not_count():
    rows = rows_of_two_actors(wrong_by=0.5)
    bad = next(row for row in rows if row.actor == "bad" and row.num_completion_tokens > 1)
    bad.logprobs[0] = np.nan
    assert found(rows)["bad"][0] == pytest.approx(0.5)


def test_the_lags_of_training_tokens_are_counted_exactly_per_actor():
    rows = []
    for number, row in enumerate(make_rows(0)):
        length = row.num_completion_tokens
        old, new = VersionSpan(PolicyVersion(0, 1), 0, 1), VersionSpan(PolicyVersion(0, VERSION), 1, length)
        spans = (old, new) if length > 1 else (old,)
        rows.append(replace(row, actor="even" if number % 2 == 0 else "odd", spans=spans))
    one, two = build(rows, VERSION), build(rows, VERSION + 1)
    tokens = {name: [row.num_completion_tokens for row in rows if row.actor == name] for name in ("even", "odd")}
    expected = {
        name: {
            2: len(lengths),
            0: sum(lengths) - len(lengths),
            3: len(lengths),
            1: sum(lengths) - len(lengths),
        }
        for name, lengths in tokens.items()
    }
    assert lag_by_actor([one, two]) == expected, "a token counts once per update that trains on it"
    counted = [(lag, number) for lags in lag_by_actor([one]).values() for lag, number in lags.items()]
    assert sum(lag * number for lag, number in counted) / sum(number for _, number in counted) == one.lag_T.mean()
    assert lag_by_actor([]) == {}
