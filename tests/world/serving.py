"""A service of ours, of the buffer or of weights, that serves in a thread of the test's own process."""

import threading
from contextlib import contextmanager

END_S = 60.0


@contextmanager
def serving(service):
    """Serve for the length of the block; gives the address."""
    address, stop = service.bind(), threading.Event()
    thread = threading.Thread(target=service.serve, args=(stop,))
    thread.start()
    try:
        yield address
    finally:
        stop.set()
        thread.join(END_S)
        assert not thread.is_alive(), f"the service still serves {END_S:g} s after it was asked to end"
