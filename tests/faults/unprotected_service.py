"""The buffer service without one of its protections: what the positive controls of network faults run.

`python -m tests.faults.unprotected_service PROTECTION ...`, then the arguments of `python -m buffer`.
"""

import contextlib
import sys
import time
from unittest import mock

import pyarrow as pa
import zmq

from buffer import __main__ as program
from buffer import ingest, schema
from buffer.errors import BadBody
from buffer.ingest import Ingest
from buffer.leases import Leases
from buffer.service import BufferService


def without_epochs():
    """A new process of a name is taken for the old one."""
    open_epoch = Leases.hello

    def hello(self, tx, message):
        actor = tx.actors.get(message.name)
        return open_epoch(self, tx, message) if actor is None else actor

    return mock.patch.object(Leases, "hello", hello)


def without_monotonic_time():
    """Deadlines are kept on the wall clock."""
    begin = BufferService.__init__

    def init(self, *arguments):
        begin(self, *arguments, clock=time.time)

    return mock.patch.object(BufferService, "__init__", init)


def without_deduplication():
    """Every arrival of a trajectory counts as its first."""

    def claimed(self, tx, actor, row, touched):
        group = touched.get(row.group_id) or tx.groups.get(row.group_id)
        return touched.setdefault(row.group_id, group)

    patches = contextlib.ExitStack()
    patches.enter_context(mock.patch.object(Ingest, "_is_first", return_value=True))
    patches.enter_context(mock.patch.object(Ingest, "_claimed", claimed))
    return patches


def without_validation():
    """What Arrow can open is believed."""

    def read_stream(body, expected=schema.SCHEMA, *, max_rows=None):
        try:
            return pa.ipc.open_stream(pa.py_buffer(body)).read_next_batch()
        except (pa.ArrowException, OSError, StopIteration) as error:
            raise BadBody("body", str(error)) from error

    patches = contextlib.ExitStack()
    patches.enter_context(mock.patch.object(schema, "read_stream", read_stream))
    patches.enter_context(mock.patch.object(ingest, "faults", return_value={}))
    return patches


def without_size_limits():
    """Messages may be as large as they like, and expand."""

    class Limitless(zmq.Socket):
        def setsockopt(self, option, value):
            if option != zmq.MAXMSGSIZE:
                super().setsockopt(option, value)

    patches = contextlib.ExitStack()
    patches.enter_context(mock.patch.object(zmq.Context, "_socket_class", Limitless))
    patches.enter_context(mock.patch.object(schema, "is_compressed", return_value=False))
    return patches


if __name__ == "__main__":
    protection = globals()[f"without_{sys.argv.pop(1)}"]
    with protection():
        sys.exit(program.main())
