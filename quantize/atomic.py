"""Folders and files that exist whole or not at all.

A folder is built as `OUT.partial`, locked while it is being built, and renamed into place. The lock is a `flock` on the
folder itself, so a killed process leaves nothing that would have to be cleaned up by hand.
"""

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from quantize.errors import QuantizeError

PRIVATE = 0o600
NO_LOCKS_HERE = (errno.EBADF, errno.ENOLCK, errno.ENOTSUP, errno.EINVAL)
"""What flock on a folder answers on network file systems without such locks; there the check is given up, not the
work."""


@contextmanager
def atomic_directory(
    out: Path, *, resumable: bool = False, replace: bool = False, error: type[Exception] = QuantizeError
) -> Iterator[Path]:
    """Yields `OUT.partial`; at a clean end it becomes `OUT`.

    resumable: what an earlier, killed run left in `OUT.partial` is kept, and an error here leaves it too; otherwise
    both are removed. replace: an existing `OUT` is replaced at the end; otherwise it is an error (an empty folder never
    is). Raises `error` with one line when `OUT` exists, when another process builds it now, and when the disk does not
    take it.
    """
    out = Path(os.path.abspath(out))
    partial = out.with_name(out.name + ".partial")
    with one_line_os_errors(out, error):
        if not replace:
            refuse_existing(out, error)
        lock = lock_directory(partial, out, error)
    try:
        with one_line_os_errors(out, error):
            # The other process may have finished between the look above and the lock.
            if not replace:
                refuse_existing(out, error)
            if not resumable:
                empty_directory(partial)
            yield partial
            open_to_readers(partial)
            move_into_place(partial, out)
    except BaseException:
        if not resumable or (partial.is_dir() and not any(partial.iterdir())):
            shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def open_to_readers(folder: Path) -> None:
    """Files that their writer made private (safetensors does) get the mode that any new file has here, which the
    folder's own tells; where the file system allows it."""
    mode = stat.S_IMODE(folder.stat().st_mode) & 0o666
    for file in folder.rglob("*"):
        if file.is_file() and not file.is_symlink() and stat.S_IMODE(file.stat().st_mode) == PRIVATE:
            with suppress(PermissionError):
                file.chmod(mode)


def refuse_unwritable(out: Path, error: type[Exception] = QuantizeError) -> None:
    """Raises `error` with one line where `atomic_directory` could not begin: what it does first is done, and undone."""
    out = Path(os.path.abspath(out))
    partial = out.with_name(out.name + ".partial")
    with one_line_os_errors(out, error):
        os.close(lock_directory(partial, out, error))
        if not any(partial.iterdir()):
            partial.rmdir()


@contextmanager
def atomic_file(out: Path) -> Iterator[Path]:
    """Yields `OUT.partial`, an empty file; at a clean end it becomes `OUT`, after an error it is gone. What a killed
    run left in it is written over. Raises QuantizeError with one line where `atomic_directory` does."""
    out = Path(os.path.abspath(out))
    partial = out.with_name(out.name + ".partial")
    with one_line_os_errors(out):
        refuse_existing_file(out)
        out.parent.mkdir(parents=True, exist_ok=True)
        lock = lock_file(partial, out)
        try:
            # The other process may have finished between the look above and the lock.
            refuse_existing_file(out)
            yield partial
            os.fsync(lock)
            os.replace(partial, out)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        finally:
            os.close(lock)


def refuse_existing_file(out: Path) -> None:
    if out.exists():
        raise QuantizeError(f"{out}: exists already; remove it or choose another name")


def lock_file(partial: Path, out: Path) -> int:
    """The locked file descriptor of the file `partial`, which is made if need be."""

    def open_file() -> int:
        if partial.exists() and not partial.is_file():
            raise QuantizeError(f"{partial}: is in the way; remove it or choose another name")
        return os.open(partial, os.O_RDWR | os.O_CREAT, 0o666)

    busy = QuantizeError(f"{out}: another process is writing it now; wait for it or choose another name")
    return lock_opened(partial, open_file, busy)


def refuse_existing(out: Path, error: type[Exception]) -> None:
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists():
        raise error(f"{out}: exists already; remove it or choose another folder")


def lock_directory(partial: Path, out: Path, error: type[Exception]) -> int:
    """The locked file descriptor of `partial`, which is made if need be."""

    def open_directory() -> int:
        if partial.exists() and not partial.is_dir():
            raise error(f"{partial}: a file is in the way; remove it or choose another folder")
        partial.mkdir(parents=True, exist_ok=True)
        return os.open(partial, os.O_RDONLY)

    busy = error(f"{out}: another process is writing it now; wait for it or choose another folder")
    return lock_opened(partial, open_directory, busy)


def lock_opened(partial: Path, open_partial: Callable[[], int], busy: Exception) -> int:
    """The locked descriptor that `open_partial` gives for `partial`. Raises `busy` when another process has the
    lock."""
    while True:
        descriptor = open_partial()
        try:
            locked = take_lock(descriptor)
        except OSError:
            os.close(descriptor)
            raise
        if not locked:
            os.close(descriptor)
            raise busy
        # It may have been renamed away between opening and locking it: then this lock guards nothing.
        if partial.exists() and os.path.samestat(os.fstat(descriptor), os.stat(partial)):
            return descriptor
        os.close(descriptor)


def take_lock(descriptor: int) -> bool:
    """Locks an open file or folder until the descriptor is closed or the process ends; False when another has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as failure:
        if failure.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        if failure.errno not in NO_LOCKS_HERE:
            raise
    return True


def empty_directory(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def move_into_place(partial: Path, out: Path) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        os.rename(partial, out)
        return
    retired = out.with_name(out.name + ".replaced")
    if retired.exists():
        shutil.rmtree(retired)
    os.rename(out, retired)
    os.rename(partial, out)
    shutil.rmtree(retired, ignore_errors=True)


def write_atomically(path: Path, content: bytes | str) -> None:
    """`path` holds all of `content` or what it held before."""
    content = content.encode() if isinstance(content, str) else content
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as handle:
        handle.write(content)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(partial, path)


@contextmanager
def one_line_os_errors(where: Path, error: type[Exception] = QuantizeError) -> Iterator[None]:
    """Turns what the file system says (disk full, not allowed, read-only) into `error` with one line."""
    try:
        yield
    except OSError as failure:
        if failure.errno in (errno.ENOSPC, errno.EDQUOT):
            raise error(
                f"{where}: the disk is full; free space or choose another folder, then run the same command"
            ) from None
        if failure.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG):
            raise error(f"{where}: {os.strerror(failure.errno)}; choose a folder that can be written") from None
        raise
    except Exception as failure:
        # safetensors reports a full disk as its own exception, with the system's words in it.
        if "No space left on device" in str(failure):
            raise error(
                f"{where}: the disk is full; free space or choose another folder, then run the same command"
            ) from None
        raise
