"""SIGTERM in a worker where checkpoints are taken: it holds still until nothing of one can be lost, and then ends.

Slurm, Kubernetes and spot machines send SIGTERM to all processes at once. A worker that is between two iterations waits
there and says so (Holds); one that is within an iteration goes on until it is through, for others may need its pushes.
When the scheduler says that nothing of the cut can be lost (HoldOver), or time is up, the worker leaves and ends by the
signal. A second signal ends it at once. Where the servers are inside the process, it saves and waits itself.

Python calls handlers in the main thread, also while that waits for servers.
"""

import contextlib
import logging
import os
import signal
import threading
import time
import weakref
from types import FrameType
from typing import TYPE_CHECKING

from windlass._client import saving
from windlass._errors import WindlassError
from windlass._settings import SAVE_SECONDS
from windlass.control import messages as m
from windlass.launch import ENDING, is_echo

if TYPE_CHECKING:
    from windlass._client.cluster import Cluster

_LEAVE_SECONDS = 1.0
_log = logging.getLogger("windlass")
_clusters: "weakref.WeakSet[Cluster]" = weakref.WeakSet()
_process = 0  # that has the handler
_deadline: float | None = None  # since the signal
_released = threading.Event()  # nobody needs to hold any more


def watch(cluster: "Cluster") -> None:
    """From now on SIGTERM is held for this worker, if nobody else handles it."""
    global _process
    if threading.current_thread() is not threading.main_thread():
        if _process == os.getpid():
            _clusters.add(cluster)
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _told)
        _process = os.getpid()
    if signal.getsignal(signal.SIGTERM) is _told:
        _clusters.add(cluster)


def is_due() -> bool:
    """Whether the process was told to end."""
    return _deadline is not None


def over() -> None:
    """The scheduler's word: what is to be saved cannot be lost any more. From any thread."""
    _released.set()
    if _deadline is not None:
        os.kill(os.getpid(), signal.SIGTERM)


def _told(number: int, frame: FrameType | None) -> None:
    global _deadline
    here = [cluster for cluster in list(_clusters) if _can_hold(cluster)]
    run = os.environ.get("WINDLASS_RUN_DIR")
    if run and os.path.exists(os.path.join(run, ENDING)):  # the launcher ends what is left
        here = []
    if _deadline is not None and not _released.is_set() and is_echo(_deadline - SAVE_SECONDS):
        return
    if _process != os.getpid() or _deadline is not None or not here:
        _end()
        return
    _deadline = time.monotonic() + SAVE_SECONDS
    _log.warning("worker: SIGTERM; ends when a checkpoint is taken, within %g s", SAVE_SECONDS)
    timer = threading.Timer(SAVE_SECONDS, over)
    timer.daemon = True
    timer.start()
    for cluster in here:
        cluster._saver.holds = cluster._saver.awake = True
    for cluster in here:
        if cluster._main_thread:
            hold(cluster)  # others do between two iterations


def _can_hold(cluster: "Cluster") -> bool:
    attendance = cluster._attendance
    if attendance is None and cluster._near.terms.where is None:
        return False
    if attendance is not None and (attendance.over is not None or attendance.member.away):
        return False
    return not (cluster._reads or cluster._engine.closed or cluster._session.closed)


def hold(cluster: "Cluster") -> None:
    """Between two iterations: waits for the checkpoint, and ends the process. Within one it returns at once."""
    attendance, session = cluster._attendance, cluster._session
    if _deadline is None or session.begun == 1:
        return
    left = max(0.0, _deadline - time.monotonic())
    if attendance is None:
        _save_here(cluster, left)
        return
    extra = b""
    try:
        if session.begun == 2:
            session.tick(left)
        session.await_settled(session.clock, left)  # what the cut needs of this worker is there
        if attendance.saver.keeps is not None:
            extra = saving.as_json(attendance.saver.keeps(), "keep")
    except Exception as error:
        _log.warning("worker: before the last checkpoint: %s", error)
    places = cluster._places.at(session.clock) or {}
    attendance.holds = m.Holds(session.clock, extra, places, saving.notes_of(cluster))
    if attendance.member.tell(attendance.holds):
        _released.wait(left)
    _end_process()


def _save_here(cluster: "Cluster", left: float) -> None:
    """The last checkpoint of servers inside the process."""
    try:
        if cluster._session.begun == 2:
            cluster._session.tick(left)
        keeps = cluster._saver.keeps
        saving.save(cluster, None, None, None if keeps is None else keeps(), None, left).wait(left)
    except Exception as error:
        _log.warning("no checkpoint before the end: %s", error)
    _end_process()


def _end_process() -> None:
    """From any thread."""
    if threading.current_thread() is threading.main_thread():
        _end()
    else:
        over()
        threading.Event().wait()  # the main thread ends the process


def _end() -> None:
    """By the signal, as if nobody had handled it; the scheduler is told first."""
    if _process == os.getpid():
        for cluster in list(_clusters):
            if cluster._attendance is not None:
                with contextlib.suppress(WindlassError, OSError):
                    cluster._attendance.member.close(failed=True, why_="SIGTERM", timeout=_LEAVE_SECONDS)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
    if os.getpid() == 1:  # of a container: the kernel spares it what it does not handle
        os._exit(128 + signal.SIGTERM)
