"""A lock file for output that one process writes at a time; the system releases it when the process ends."""

import fcntl
import math
import os
import socket
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path

TRY_AGAIN = os.EX_TEMPFAIL  # exit status if the same command may succeed later
ATTEMPTS = 100  # an attempt fails only if another process releases the lock at that moment


class Busy(OSError):
    """Another process holds the lock."""


class Lock:
    """A lock file that names its holder, and is removed when the lock is released.

    Args:
        file: missing folders are created, and removed with the lock if they are empty.
        what: the locked key and its value, for messages.
        wait_sec: time to wait for the holder; math.inf: print a message and wait without a limit.
    """

    def __init__(self, file: Path, what: str, wait_sec: float = 0.0):
        self.file, self.what, self.wait_sec = file, what, wait_sec
        self._held: int | None = None
        self._is_supported = True
        self._made: list[Path] = []

    def acquire(self) -> "Lock":
        """Acquire the lock.

        Raises:
            Busy: another process holds it.
            OSError: the file cannot be created.
        """
        started, announced = time.monotonic(), False
        while not self._try():
            in_use = f"{self.what} is in use by {self.holder()}"
            if time.monotonic() - started >= self.wait_sec:
                raise Busy(f"{in_use}: end it, or try again when it has ended")
            if math.isinf(self.wait_sec) and not announced:
                print(f"{in_use}; waiting for it to end")
            announced = True
            time.sleep(0.5)
        now = datetime.now().isoformat(sep=" ", timespec="seconds")
        by = f"process {os.getpid()} on {socket.gethostname()} since {now}"
        with suppress(OSError):  # a full disk: the lock works, but does not name its holder
            if self._held is not None:
                os.ftruncate(self._held, 0)
                os.pwrite(self._held, by.encode(), 0)
        return self

    def release(self) -> None:
        """Release the lock, if it is held."""
        if self._held is None:
            return
        if self.is_in_place():
            self.file.unlink()
            for folder in self._made:
                with suppress(OSError):  # it is not empty
                    folder.rmdir()
        self._close()

    def is_in_place(self) -> bool:
        """True if the lock is held, and its file still exists."""
        try:
            if not self._is_supported:
                return self.file.exists()
            return self._held is not None and os.path.samestat(os.fstat(self._held), self.file.stat())
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # a short failure of a network file system
            return True

    def holder(self) -> str:
        """Describe the process that holds the lock."""
        with suppress(OSError):  # the holder may just have ended
            return self.file.read_text() or "another process"
        return "another process"

    def _try(self) -> bool:
        for _ in range(ATTEMPTS):
            try:
                # O_NOFOLLOW: a link could point to any file.
                self._held = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
                fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except FileNotFoundError:  # another process may have removed the empty folder
                self._made = [folder for folder in self.file.parents if not folder.exists()]
                self.file.parent.mkdir(parents=True, exist_ok=True)
                continue
            except BlockingIOError:
                self._close()
                return False
            except OSError as error:
                if self._held is None:
                    raise
                return self._go_without(error)
            if self.is_in_place():
                return True
            # The last holder removed this file; another process may hold a new one.
            self._close()
        return self._go_without("an open file and its path do not match")

    def _go_without(self, reason: str | OSError) -> bool:
        """Continue without a lock on file systems that do not support one, as on some clusters."""
        print(f"warning: {self.file} cannot be locked ({reason}): let no other process write there")
        self._held = os.open(self.file, os.O_RDWR | os.O_NOFOLLOW) if self._held is None else self._held
        self._is_supported = False
        return True

    def _close(self) -> None:
        if self._held is not None:
            os.close(self._held)
        self._held = None

    def __enter__(self) -> "Lock":
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()
