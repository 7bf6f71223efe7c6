"""What can go wrong with published weights."""

from __future__ import annotations


class WeightsError(Exception):
    """Base of everything that can go wrong with published weights."""


class WeightsCorrupt(WeightsError):
    """What was read is not what was published: it was cut, changed or belongs to another version."""


class WeightsGone(WeightsError):
    """The version is not in the store: it was never committed, or retention has removed it."""


class TransferFailed(WeightsError):
    """The weight service did not answer in time, or refused; try again later."""


class PublishFailed(WeightsError):
    """A version could not be published; the previous one remains the newest."""
