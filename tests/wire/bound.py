"""`bound.py server ARGUMENT...` is `windlass server ARGUMENT...`, with a limit of processes that tests set and lift.

The kernel lets root start as many processes and threads as it likes. So the server runs under a real user of whom there
is no other process, and without the two capabilities that lift the limit; it keeps all else that root may do. SIGUSR1
sets the limit, SIGUSR2 lifts it. Without arguments: whether a thread is refused under the limit, as the exit status.
"""

import ctypes
import os
import resource
import runpy
import signal
import sys
import threading
from typing import Any

UID = 54_321  # nobody's
CAP_SYS_ADMIN, CAP_SYS_RESOURCE = 21, 24
_CAPABILITY_VERSION_3 = 0x20080522
MOST = 1  # threads count, too: every server has more


def become_bound() -> None:
    """Root only; every other user is bound already."""
    os.setresuid(UID, 0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    head, sets = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    libc.capget(head, sets)
    for i in range(3):  # effective, permitted, inheritable
        sets[i] &= ~(1 << CAP_SYS_ADMIN | 1 << CAP_SYS_RESOURCE)
    if libc.capset(head, sets) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def set_limit(number: int, frame: Any) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    resource.setrlimit(resource.RLIMIT_NPROC, (MOST if number == signal.SIGUSR1 else hard, hard))


if __name__ == "__main__":
    if os.geteuid() == 0:
        become_bound()
    if sys.argv[1:]:
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, set_limit)
        runpy.run_module("windlass", run_name="__main__", alter_sys=True)
    else:
        set_limit(signal.SIGUSR1, None)
        try:
            threading.Thread(target=int).start()
        except RuntimeError:
            sys.exit(0)
        sys.exit(1)
