"""The errors of this floor: each is one line that says what is wrong, where, and what to do about it."""

from __future__ import annotations


class RegistryError(Exception):
    """A user's mistake or an unreachable service, said in one line."""


class IllegalTransition(RegistryError):
    """The release is not in a state from which this act is possible."""


class Conflict(RegistryError):
    """Somebody else acted on the same release in between; nothing was written."""
