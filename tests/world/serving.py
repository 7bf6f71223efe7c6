"""Run a buffer or weight service in a thread of the test process."""

import threading
from contextlib import contextmanager

END_S = 60.0


@contextmanager
def serving(service):
    """Serve for the duration of the block; yield the address."""
    address, stop = service.bind(), threading.Event()
    thread = threading.Thread(target=service.serve, args=(stop,))
    thread.start()
    try:
        yield address
    finally:
        stop.set()
        thread.join(END_S)
        assert not thread.is_alive(), f"the service is still running {END_S:g} s after the stop request"
