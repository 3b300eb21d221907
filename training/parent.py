"""End a process when the one it works for is gone, however that one ended.

Two means, because each has a hole: Linux sends a signal to the direct child when its parent dies
(`PR_SET_PDEATHSIG`, inherited through exec but not through fork), and a thread looks twice a second whether the parent,
and the process at the head of the launch, are still there.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

HEAD = "NORIA_LAUNCH_HEAD"
"""Environment variable with `pid:start` of the process at the head of the launch."""
_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.5


def identity(pid: int) -> str | None:
    """`pid:start time` of a living process, None of one that is gone; the start time tells a reused pid."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        if Path("/proc/self/stat").exists() or not _answers(pid):
            return None
        return f"{pid}:0"  # no /proc on this system: the pid alone must do
    fields = status.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else f"{pid}:{fields[19]}"


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies; kept through exec. Does nothing but on Linux."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the kernel knew
        os.kill(os.getpid(), signal.SIGKILL)


def watch() -> None:
    """Kill this process within a second of the death of its parent or of the head of its launch."""
    die_with_parent()
    parent = os.getppid()
    head = os.environ.get(HEAD)

    def look() -> None:
        while True:
            gone = os.getppid() != parent
            if head is not None:
                gone = gone or identity(int(head.partition(":")[0])) != head
            if gone:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(_POLL_SECONDS)

    threading.Thread(target=look, name="parent-watch", daemon=True).start()
