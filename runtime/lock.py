"""A lock on what one process alone may write, released at the end of that process, however it ends."""

import fcntl
import math
import os
import socket
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path

TRY_AGAIN = os.EX_TEMPFAIL  # exit status where the same command may succeed later
ATTEMPTS = 100  # each fails only if another process releases the lock at that moment


class Busy(OSError):
    """Another process holds the lock."""


class Lock:
    """A lock in a file that says who holds it, and is removed when the lock is released.

    Args:
        file: its folder is made if there is none, and removed with the lock if it is empty.
        what: is locked, for messages: a key and its value.
        wait_sec: how long to wait for the holder; math.inf: as long as it takes, and print so.
    """

    def __init__(self, file: Path, what: str, wait_sec: float = 0.0):
        self.file, self.what, self.wait_sec = file, what, wait_sec
        self._held: int | None = None
        self._certain = True
        self._made: list[Path] = []

    def acquire(self) -> "Lock":
        """Acquire the lock.

        Raises:
            Busy: another process holds it.
            OSError: the file cannot be made.
        """
        started, announced = time.monotonic(), False
        while not self._try():
            in_use = f"{self.what} is in use by {self.holder()}"
            if time.monotonic() - started >= self.wait_sec:
                raise Busy(f"{in_use}: end it, or try again when it has ended")
            if math.isinf(self.wait_sec) and not announced:
                print(f"{in_use}; waiting for its end")
            announced = True
            time.sleep(0.5)
        now = datetime.now().isoformat(sep=" ", timespec="seconds")
        by = f"process {os.getpid()} on {socket.gethostname()} since {now}"
        with suppress(OSError):  # a full disk: the lock works, but does not say who holds it
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
        """True if the lock is held, and its file is still in its place."""
        try:
            if not self._certain:
                return self.file.exists()
            return self._held is not None and os.path.samestat(os.fstat(self._held), self.file.stat())
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # a network that fails for a moment
            return True

    def holder(self) -> str:
        """Describe the process that holds the lock."""
        with suppress(OSError):  # the holder may just have ended
            return self.file.read_text() or "another process"
        return "another process"

    def _try(self) -> bool:
        for _ in range(ATTEMPTS):
            try:
                # A link could lead to anybody's file.
                self._held = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
                fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except FileNotFoundError:  # another may have removed its empty folder
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
            # Its last holder removed the file in between; by now another may hold a new one.
            self._close()
        return self._go_without("an open file is not known by its name")

    def _go_without(self, reason: str | OSError) -> bool:
        """Continue where a file system cannot lock, as on some clusters."""
        print(f"warning: {self.file} cannot be locked ({reason}): let no other process write there")
        self._held = os.open(self.file, os.O_RDWR | os.O_NOFOLLOW) if self._held is None else self._held
        self._certain = False
        return True

    def _close(self) -> None:
        if self._held is not None:
            os.close(self._held)
        self._held = None

    def __enter__(self) -> "Lock":
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()
