"""What a user's mistake looks like at the front door: one line on stderr and exit code 1.

Every room raises its own small exception type with a one-line message. This file knows them all, so that the
command line can tell a mistake that was explained (one line) from a defect of ours (a stack trace).
"""

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

OF_A_PATH = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.ENOENT, errno.ENXIO)
"""What the file system answers to a path that cannot be what it was given for."""

LONGEST_SHOWN = 200


class FrontDoorError(Exception):
    """A mistake found by the front door itself: an unknown checkpoint, a wrong campaign file, a failed download."""


def explained_errors() -> tuple[type[Exception], ...]:
    """The exception types whose text is meant for the user."""
    from eval.errors import EvalError
    from quantize.errors import QuantizeError
    from registry.errors import RegistryError
    from tasks.errors import TaskError

    return (FrontDoorError, QuantizeError, TaskError, EvalError, RegistryError)


def refuse_what_is_no_text(arguments: Sequence[str]) -> None:
    """Arguments end up in JSON documents and databases, which hold text only.

    Raises:
        FrontDoorError: naming the first argument with bytes that are not UTF-8.
    """
    for argument in arguments:
        if any("\ud800" <= character <= "\udfff" for character in argument):
            raise FrontDoorError(f"the argument {argument!r} is not UTF-8 text: rename it")


@contextmanager
def operating_system_errors_explained() -> Iterator[None]:
    """Turn the operating system's refusals (disk full, no permission) into one line that names the path.

    Raises:
        FrontDoorError: in place of an OSError whose cause lies outside the program.
    """
    try:
        yield
    except OSError as error:
        where = f" at {_printable(error.filename)}" if error.filename else ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FrontDoorError(f"the disk is full{where}: free some space and run the same command again") from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise FrontDoorError(f"no permission to write{where}: choose another output folder") from error
        if error.errno in OF_A_PATH and error.filename:
            said = f"{_printable(error.filename)}: {os.strerror(error.errno)}; check this path"
            raise FrontDoorError(said) from error
        raise


def _printable(filename: object) -> str:
    """A path as a message shows it: one that is too long for any file system would fill the screen."""
    text = os.fsdecode(filename) if isinstance(filename, str | bytes | os.PathLike) else str(filename)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"
