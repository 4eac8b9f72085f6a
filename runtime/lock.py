"""A lock on what one process alone may write, from when it is taken to the end of that process, however it ends."""

import fcntl
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import TracebackType

TRY_AGAIN = os.EX_TEMPFAIL  # exit status where the same command may do better later


class Busy(OSError):
    """Another process holds what this one wants: the same command can be given again when it has ended."""


class Lock:
    """A lock in a file that tells who holds it; the file goes when the lock is given back.

    Args:
        file: in a folder that is there.
        what: is locked, for messages: a key and its value.
        wait_sec: how long to wait for another to end; None for ever, and saying so.
        show: prints a line.
    """

    def __init__(self, file: Path, what: str, wait_sec: float | None = 0.0, show: Callable[[str], None] = print):
        self.file, self.what, self.wait_sec, self.show = file, what, wait_sec, show
        self._held: int | None = None

    def acquire(self) -> "Lock":
        """Take the lock.

        Raises:
            Busy: another process holds it.
            OSError: the file cannot be made.
        """
        started, told = time.monotonic(), False
        while not self._try():
            holder = self.holder()
            if self.wait_sec is not None and time.monotonic() - started >= self.wait_sec:
                raise Busy(f"{self.what} is in use by {holder}: end it, or try again when it has ended")
            if self.wait_sec is None and not told:
                self.show(f"{self.what} is in use by {holder}; waiting for its end")
            told = True
            time.sleep(0.5)
        now = datetime.now().isoformat(sep=" ", timespec="seconds")
        with suppress(OSError):  # a full disk: the lock holds, it only does not tell whose it is
            os.ftruncate(self._held, 0)
            os.pwrite(self._held, f"process {os.getpid()} on {socket.gethostname()} since {now}".encode(), 0)
        return self

    def release(self) -> None:
        """Give the lock back; nothing happens where it is not held."""
        if self._held is None:
            return
        if self.is_in_place():
            self.file.unlink()
        os.close(self._held)
        self._held = None

    def is_in_place(self) -> bool:
        """Return False if the lock is not held, or its file was moved or removed, so that it keeps nobody out any more."""
        try:
            return self._held is not None and os.path.samestat(os.fstat(self._held), self.file.stat())
        except (FileNotFoundError, NotADirectoryError):
            return False

    def holder(self) -> str:
        """Return who holds the lock."""
        with suppress(OSError):  # the holder may just have ended
            return self.file.read_text() or "another process"
        return "another process"

    def _try(self) -> bool:
        self._held = os.open(self.file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._held)
            self._held = None
            return False
        except OSError as error:  # some file systems of clusters know no locks
            self.show(f"warning: {self.file} cannot be locked ({error}): see to it that no other process writes there")
            return True
        if self.is_in_place():
            return True
        # Its last holder removed the file while it was opened here: by now another may hold a new one of this name.
        os.close(self._held)
        self._held = None
        return self._try()

    def __enter__(self) -> "Lock":
        return self.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()
