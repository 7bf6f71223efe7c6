"""Errors of the buffer's client, service and store.

BufferError
├── BufferUnavailable   the service did not answer for `GIVE_UP_S`
├── BufferRefused       the service refused the request
│   └── InvalidRequest  the request is invalid: no correct client sends it; counted per sender
├── BadBody             a message body does not match its schema
└── StoreError          the store cannot be opened or written
    ├── StoreFull       the disk is full; the write may be retried
    ├── StoreBusy       too many processes read the store; the read may be retried
    └── CorruptRecord   a stored value does not match its checksum
"""

from __future__ import annotations

from leeway.common.errors import LeewayError


class BufferError(LeewayError):
    """Base of every error of this package."""


class BufferUnavailable(BufferError, ConnectionError):
    """The service did not answer in time; the message has the address of the service."""


class BufferRefused(BufferError, RuntimeError):
    """The service refused the request; the message has the reason. Raised in the service and again in the client."""


class InvalidRequest(BufferRefused):
    """The service refused an invalid request, which no correct client sends."""


class BadBody(BufferError, ValueError):
    """A message body is not a valid Arrow stream of its schema; `category` is a fixed name to count the error by."""

    def __init__(self, category: str, detail: str) -> None:
        super().__init__(f"{category}: {detail}")
        self.category = category


class StoreError(BufferError, OSError):
    """The store's folder cannot be used; the message has the folder and the fix."""


class StoreFull(StoreError):
    """The disk is full. The transaction was not committed and may be retried."""


class StoreBusy(StoreError):
    """Too many read transactions are open; the read may be retried."""


class CorruptRecord(StoreError):
    """A value on disk does not match the checksum written with it."""
