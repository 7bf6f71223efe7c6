"""The buffer service, changed: without one of its protections, with a small first map, or with other constants.

`python -m tests.world.service CHANGE ...`, then the arguments of `buffer_process`. A change is the name of a function
here, or MODULE.NAME=NUMBER. The positive controls of the fault matrix run it, and tests that need a constant small or
out of the way.
"""

import contextlib
import importlib
import sys
import time
from types import SimpleNamespace
from unittest import mock

import lmdb
import pyarrow as pa
import zmq

from buffer import ingest, schema, store
from buffer.errors import BadBody
from buffer.ingest import Ingest
from buffer.leases import Leases
from buffer.service import BufferService
from buffer.store import Store
from buffer.transaction import Table
from buffer.upkeep import ReaderWatch
from tests.world import buffer_process as program


def tuned(where, number):
    """A constant has another value."""
    module, _, name = where.rpartition(".")
    owner = importlib.import_module(module)
    return mock.patch.object(owner, name, type(getattr(owner, name))(float(number)))


# --- on the disk ----------------------------------------------------------------------------------


def with_small_map():
    """A new store's map has 4 MiB; nothing else differs from the real service."""
    return mock.patch.dict(Store.__init__.__kwdefaults__, first_map_size=4 * 2**20)


def with_small_map_that_stays():
    """A map of 4 MiB that cannot grow."""
    refuse = mock.Mock(side_effect=lmdb.MapFullError("the map is full"))
    with_small_map().start()
    return _environment(lambda real: _Environment(real, set_mapsize=refuse))


def without_commit_before_acknowledgement():
    """A transaction is committed every 0.3 s; its answers do not wait for that."""
    return _environment(_LateCommits)


def without_regard_for_errors():
    """A commit that failed is taken for one that did not."""
    return _environment(_DeafCommits)


def without_reader_watch():
    """Nobody looks at who reads."""
    return mock.patch.object(ReaderWatch, "run", return_value=None)


def without_checksums():
    """Values are taken as they are read: 8 bytes of checksum, then the value."""
    return mock.patch.object(Table, "_checked", lambda self, key, value: value[8:])


# --- on the wire ----------------------------------------------------------------------------------


def without_epochs():
    """A new process of a name is taken for the old one."""
    open_epoch = Leases.hello

    def hello(self, tx, message):
        actor = tx.actors.get(message.name)
        if actor is None:
            return open_epoch(self, tx, message)
        if message.session not in (actor.session, *actor.replaced):
            actor.session, actor.replaced = message.session, [*actor.replaced, actor.session]
            tx.actors.put(actor, actor.name)
        return actor

    return mock.patch.object(Leases, "hello", hello)


def without_monotonic_time():
    """Deadlines are kept on the wall clock."""
    begin = BufferService.__init__

    def init(self, *arguments, **named):
        begin(self, *arguments, clock=time.time, **named)

    return mock.patch.object(BufferService, "__init__", init)


def without_deduplication():
    """Every arrival of a trajectory counts as its first."""

    def push_group(self, tx, actor, group_id, rows, bad, as_bytes):
        self.commit(tx, tx.groups.require(group_id), list(rows), rows, as_bytes)
        return {}

    patches = contextlib.ExitStack()
    patches.enter_context(mock.patch.object(Ingest, "_settle_known", return_value={}))
    patches.enter_context(mock.patch.object(Ingest, "_push_group", push_group))
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


# --- an LMDB that is not what it should be --------------------------------------------------------


def _environment(wrap):
    """Let the store see LMDB through this."""

    def opened(*arguments, **options):
        real = lmdb.open(*arguments, **options)
        return real if options.get("readonly") else wrap(real)

    parts = {name: getattr(lmdb, name) for name in dir(lmdb)}
    return mock.patch.object(store, "lmdb", SimpleNamespace(**{**parts, "open": opened}))


class _Environment:
    """An LMDB environment with some methods replaced."""

    def __init__(self, real, **replaced):
        self._real = real
        self.__dict__.update(replaced)

    def __getattr__(self, name):
        return getattr(self._real, name)


class _LateCommits(_Environment):
    """Write transactions go on in the next one, and are committed when 0.3 s have passed."""

    def __init__(self, real):
        super().__init__(real)
        self._txn, self._began_at = None, 0.0

    def begin(self, *arguments, write=False, **options):
        if not write:
            self.commit()
            return self._real.begin(*arguments, **options)
        return self

    def __enter__(self):
        if self._txn is None:
            self._txn, self._began_at = self._real.begin(write=True, buffers=True), time.monotonic()
        return self._txn

    def __exit__(self, kind, error, trace):
        if kind is not None:
            self._txn.abort()
            self._txn = None
        elif time.monotonic() - self._began_at > 0.3:
            self.commit()

    def commit(self):
        if self._txn is not None:
            self._txn.commit()
            self._txn = None

    def close(self):
        self.commit()
        self._real.close()


class _DeafCommits(_Environment):
    """Commits whose errors are not heard."""

    def begin(self, *arguments, write=False, **options):
        txn = self._real.begin(*arguments, write=write, **options)
        return _DeafCommit(txn) if write else txn


class _DeafCommit:
    def __init__(self, txn):
        self._txn = txn

    def __enter__(self):
        return self._txn

    def __exit__(self, kind, error, trace):
        if kind is not None:
            self._txn.abort()
            return
        try:
            self._txn.commit()
        except lmdb.MapFullError:
            raise
        except lmdb.Error as failed:
            print(f"a commit failed and nobody hears it: {failed}", file=sys.stderr)


if __name__ == "__main__":
    with contextlib.ExitStack() as changes:
        while not sys.argv[1].startswith("--"):
            change, is_constant, number = sys.argv.pop(1).partition("=")
            changes.enter_context(tuned(change, number) if is_constant else globals()[change]())
        sys.exit(program.main())
