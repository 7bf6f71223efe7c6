"""What can go wrong between a client, the service and its store.

BufferError
├── BufferUnavailable   no answer from the service for `GIVE_UP_S` of its client
├── BufferRefused       the service answered that it will not serve the request
│   └── NotBelieved     no client of the run would have sent it: its sender is counted
├── BadBody             a message body that is not what the schema says
└── StoreError          the store cannot be opened or written
    ├── StoreFull       the disk is full; it may be tried again
    ├── StoreBusy       too many processes read it; it may be tried again
    └── CorruptRecord   a stored value does not match its checksum
"""

from __future__ import annotations


class BufferError(Exception):
    """Base of every error of this package."""


class BufferUnavailable(BufferError, ConnectionError):
    """The service did not answer in time; names its address."""


class BufferRefused(BufferError, RuntimeError):
    """The service refuses the request; says why. Raised in the service, sent to the client, raised again there."""


class NotBelieved(BufferRefused):
    """The service refuses what no client of the run would send."""


class BadBody(BufferError, ValueError):
    """A message body cannot be read as trajectories; `category` is a few fixed words to count it under."""

    def __init__(self, category: str, detail: str) -> None:
        super().__init__(f"{category}: {detail}")
        self.category = category


class StoreError(BufferError, OSError):
    """The store's folder cannot be used; names it and says what to do."""


class StoreFull(StoreError):
    """The disk is full. Nothing of the transaction was committed; it may be tried again."""


class StoreBusy(StoreError):
    """Too many read transactions are open. They may be fewer in a moment."""


class CorruptRecord(StoreError):
    """A value on disk does not match the checksum written with it."""
