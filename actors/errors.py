"""Errors that end an actor: its supervisor restarts it, and the text says why.

ActorError
    PolicyTimeout   weights.py: a policy version did not arrive or was not applied in time
    ActorFenced     loop.py: a newer process acts under this actor's name

Beside it `actors.engine.EngineDead`, and `buffer.errors.BufferError` where the service is gone.
"""

from __future__ import annotations


class ActorError(RuntimeError):
    """Base of the errors above."""
