"""A lock excludes all other processes, also processes that wait while it is released."""

import fcntl
import math
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest

from runtime.lock import Busy, Lock
from tests.programs import ROOT

HOLDER = "import sys, time; from pathlib import Path; from runtime.lock import Lock\n"
HOLDER += "Lock(Path(sys.argv[1], '.lock'), 'x').acquire(); print('held', flush=True); time.sleep(120)"


def holder(folder):
    """Start a process that locks a folder."""
    command = [sys.executable, "-c", HOLDER, str(folder)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def test_a_busy_lock_says_who_holds_it(tmp_path):
    holder = rf"process {os.getpid()} on .* since 20.*"
    with (
        Lock(tmp_path / ".lock", "out=x"),
        pytest.raises(Busy, match=rf"^out=x is in use by {holder}: end it, or try again"),
    ):
        Lock(tmp_path / ".lock", "out=x").acquire()
    assert not (tmp_path / ".lock").exists()
    Lock(tmp_path / ".lock", "out=x").acquire().release()


def test_a_waiting_process_prints_so_and_gets_the_lock(tmp_path, capsys):
    first = Lock(tmp_path / ".lock", "out=x").acquire()
    threading.Timer(0.3, first.release).start()
    second = Lock(tmp_path / ".lock", "out=x", wait_sec=math.inf).acquire()
    assert second.is_in_place() and not first.is_in_place()
    assert re.fullmatch("out=x is in use by process .*; waiting for it to end\n", capsys.readouterr().out)
    second.release()


def test_a_removed_lock_file_that_is_still_open_locks_nothing(tmp_path, monkeypatch):
    """A waiting process has the file open when the holder removes it; a lock on that file excludes nobody."""
    first, flock, others = Lock(tmp_path / ".lock", "x").acquire(), fcntl.flock, []

    def slowly(descriptor, how):
        if not others:
            first.release()
            others.append(None)
            others.append(Lock(tmp_path / ".lock", "x").acquire())
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", slowly)
    with pytest.raises(Busy):
        Lock(tmp_path / ".lock", "x").acquire()
    assert others[1].is_in_place()


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    with holder(tmp_path) as process:
        with pytest.raises(Busy, match=f"process {process.pid} on"):
            Lock(tmp_path / ".lock", "x").acquire()
        process.kill()
    with Lock(tmp_path / ".lock", "x") as lock:
        assert f"process {os.getpid()} on" in lock.holder()


def test_a_lock_that_was_moved_locks_nothing(tmp_path):
    (tmp_path / "run").mkdir()
    lock = Lock(tmp_path / "run/.lock", "x").acquire()
    (tmp_path / "run").rename(tmp_path / "moved")
    assert not lock.is_in_place()
    with Lock(tmp_path / "run/.lock", "x") as other:
        lock.release()
        assert other.is_in_place(), "nor does it take away the lock of another"
    assert (tmp_path / "moved/.lock").exists(), "only its own place is tidied up"


def test_a_file_system_without_locks_gives_a_warning(tmp_path, monkeypatch, capsys):
    def without(descriptor, how):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", without)
    assert Lock(tmp_path / ".lock", "x").acquire().is_in_place()
    assert capsys.readouterr().out == (
        f"warning: {tmp_path}/.lock cannot be locked ([Errno 95] Operation not supported): "
        "let no other process write there\n"
    )


def test_a_link_is_not_a_lock(tmp_path):
    (tmp_path / "victim").write_text("mine")
    (tmp_path / ".lock").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        Lock(tmp_path / ".lock", "x").acquire()
    assert (tmp_path / "victim").read_text() == "mine"


def test_a_folder_removed_while_locking_is_made_again(tmp_path, monkeypatch):
    opened, gone = os.open, []

    def late(path, *arguments, **options):
        if str(path).endswith(".lock") and not gone:
            gone.append((tmp_path / "x").rmdir())
        return opened(path, *arguments, **options)

    (tmp_path / "x").mkdir()
    monkeypatch.setattr(os, "open", late)
    with Lock(tmp_path / "x/.lock", "x") as lock:
        assert lock.is_in_place()
    assert gone


def test_a_stale_file_handle_does_not_release_the_lock(tmp_path, monkeypatch):
    with Lock(tmp_path / ".lock", "x") as lock:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "stat", mock.Mock(side_effect=OSError(116, "Stale file handle")))
            assert lock.is_in_place()
        assert lock.is_in_place()


def test_a_file_system_with_changing_inodes_gives_a_warning(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os.path, "samestat", lambda one, other: False)
    assert Lock(tmp_path / ".lock", "x").acquire().is_in_place()
    told = capsys.readouterr().out
    assert told.count("\n") == 1 and "cannot be locked (an open file and its path do not match)" in told
