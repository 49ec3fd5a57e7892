"""What a user could pick instead of us on one machine: torch RPC and Ray, where they are installed.

The work is a push_pull: a worker process sends a float32 gradient, a server process does w -= lr * g and returns the
new weights. Both ends are processes of their own, so that no peer's threads, allocator or signal handlers are in ours::

    this process               a session of its own per process
    Peer -- "16000000 3" --->  worker -- gradient -->  server
         <- "0.0084 ..." ----         <-- weights ---

The worker reads the clock, so that the way to it costs the peer nothing. A peer that spins stands still between its
rounds: torch RPC takes 1.6 cores for doing nothing, and would take them from whoever is measured next.

::

    for peer in peers():
        with peer:
            mine, theirs = in_turns(ours, peer.push_pull(16_000_000))
        if peer.why:
            print(f"{peer.name}: not measured, {peer.why}")
"""

import contextlib
import ctypes
import importlib
import logging
import os
import pathlib
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import numpy as np

from windlass import _core
from windlass.bench._turns import Side
from windlass.bench.peers import have

START_S = 60.0  # until all processes of a peer have found each other
ROUND_S = 30.0  # for a turn; the first of a size makes the arrays, too
EXIT_S = 10.0  # from SIGKILL until the kernel has cleared up
WARM_UP = 3  # round trips before the first round
REPEATS_MAX = 1000  # per turn
LR = 1e-6
MESSAGE_BYTES_MAX = 16 * REPEATS_MAX
OUTPUT_BYTES_MAX = 4096  # of what a process wrote, looked at for its last words
WHY_CHARACTERS_MAX = 200
PR_SET_PDEATHSIG = 1
STORE_BYTES = 1_000_000_000  # of Ray's shared memory

Call = Callable[[], object]  # one round trip
Make = Callable[[Any], Call]  # with this gradient, a flat float32 array
Process = tuple[str, ...]  # the name of a function in ROLES and what it is given


class PeerFailed(RuntimeError):
    """A peer did not start, or did not answer in time. Ends the `with` block of that peer, and no more."""

    def __init__(self, peer: "Peer", why: str) -> None:
        super().__init__(f"{peer.name}: {why}")
        self.peer = peer


class Peer:
    """A context manager: its processes live from enter to exit. One thread at a time.

    name: for the tables. why: empty, or why it is not measured, or not any further. spins: it takes the processor for
    waiting, and is stopped between its rounds.

    It never gets in the way of the suite: a start that fails only sets `why`. push_pull() and what it returns raise
    PeerFailed from then on, and exit swallows that. Nothing waits without a deadline. No process outlives the block,
    and if this process is killed, theirs end by themselves. The thread that enters must not end before the block does.
    """

    def __init__(self, name: str, processes: tuple[Process, ...], environment: dict[str, str], *, spins: bool) -> None:
        """The last of the processes is the worker."""
        self.name, self.spins = name, spins
        self.why = ""
        self._wanted, self._environment = processes, environment
        self._processes: list[_Process] = []
        self._files = contextlib.ExitStack()

    def push_pull(self, size_bytes: int) -> Side:
        """Makes the arrays and warms up. A turn has one round trip more, to wake up, which does not count."""
        self._round(size_bytes, WARM_UP)
        return lambda calls: self._round(size_bytes, min(calls, REPEATS_MAX))

    def _round(self, size_bytes: int, repeats: int) -> list[float]:
        if self.why or not self._processes:
            raise PeerFailed(self, self.why or "not running")
        worker = self._processes[-1]
        self._signal(signal.SIGCONT)
        try:
            worker.send(f"{size_bytes} {repeats}")
            return [float(seconds) for seconds in worker.answer(time.monotonic() + ROUND_S).split()]
        except (OSError, _Said) as error:
            self.why = worker.why(error)
            raise PeerFailed(self, self.why) from error
        except BaseException:  # Ctrl-C: its answer may still come, and is not that of the next round
            self.why = "interrupted"
            raise
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        if self.spins:
            for process in self._processes:
                process.signal(number)

    def __enter__(self) -> "Peer":
        try:
            # Ray keeps Unix sockets deep below, and their paths are short: so is the prefix.
            directory = self._files.enter_context(tempfile.TemporaryDirectory(prefix="wl-", ignore_cleanup_errors=True))
            for role, *arguments in self._wanted:
                self._processes.append(_Process([role, directory, *arguments], self._environment))
            self._wait_until_ready(time.monotonic() + START_S)
            self._signal(signal.SIGSTOP)
        except OSError as error:
            self.why = _short(error)
        except BaseException:  # Ctrl-C
            self.close()
            raise
        return self

    def _wait_until_ready(self, deadline: float) -> None:
        """They wait for each other, so the first that fails speaks for all."""
        waiting = list(self._processes)
        while waiting and not self.why:
            ready = select.select(waiting, [], [], max(0.0, deadline - time.monotonic()))[0]
            for process in ready or waiting[:1]:
                try:
                    process.answer(deadline)
                except (OSError, _Said) as error:
                    self.why = process.why(error)
                    return
                waiting.remove(process)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self.close()
        return isinstance(error, PeerFailed) and error.peer is self

    def close(self) -> None:
        """Ends all processes, the worker first."""
        with self._files:
            for process in self._processes:
                self._files.callback(process.close)
            self._processes = []


def peers() -> Iterator[Peer]:
    """Those installed, not yet started."""
    if have("torch"):
        # TensorPipe looks for the address of the host's name unless it is told the interface.
        loopback = {"TP_SOCKET_IFNAME": "lo"}
        both: tuple[Process, ...] = (("torch", "server"), ("torch", "worker"))
        yield Peer("torch RPC", both, loopback, spins=True)
        # TensorPipe receives each tensor in fresh memory, and the page faults of that are most of 100 MB. Huge pages
        # make it two to three times as fast there and change nothing at 1 MB. A tuned jemalloc comes to the same.
        huge = {**loopback, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
        yield Peer("torch RPC, huge pages", both, huge, spins=True)
    if have("ray"):
        # The second is Ray's switch for loopback only, on Linux too: otherwise it listens on every interface.
        quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
        yield Peer("Ray", (("ray",),), quiet, spins=False)


class _Said(Exception):
    """Why a process of a peer cannot go on, in its own words."""


class _Process:
    """One process of a peer: says that it is ready, then answers each request.

    It leads a session of its own. Ctrl-C does not reach it, and whatever it starts can be found by the session.
    """

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (open for as long as the process is known)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # keeps messages apart
        code = f"from windlass.bench import local_peers; local_peers._serve({theirs.fileno()}, *{arguments!r})"
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", code],
                    stdin=subprocess.DEVNULL,
                    stdout=self._output,
                    stderr=subprocess.STDOUT,
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, "PYTHONWARNINGS": "ignore", **environment},
                    start_new_session=True,
                )
        except BaseException:
            self._socket.close()
            self._output.close()
            raise

    def fileno(self) -> int:
        """For select()."""
        return self._socket.fileno()

    def send(self, message: str) -> None:
        self._socket.send(message.encode())

    def signal(self, number: signal.Signals) -> None:
        """Safe at any time before close(): until then the number of an ended process stays its own."""
        os.kill(self._process.pid, number)

    def answer(self, deadline: float) -> str:
        """The next message. Raises TimeoutError at the deadline, ConnectionError if the process has ended."""
        self._socket.settimeout(max(0.001, deadline - time.monotonic()))
        message = self._socket.recv(MESSAGE_BYTES_MAX).decode()
        if not message:
            raise ConnectionError("its process has ended")
        if message.startswith("!"):
            raise _Said(message[1:])
        return message

    def why(self, error: Exception) -> str:
        """Few words about a failed request: the process's own, or the last it wrote anywhere."""
        if isinstance(error, _Said):
            return str(error)
        if isinstance(error, TimeoutError):
            return "no answer in time"
        size = os.fstat(self._output.fileno()).st_size
        tail = os.pread(self._output.fileno(), OUTPUT_BYTES_MAX, max(0, size - OUTPUT_BYTES_MAX))
        last = tail.decode(errors="replace").strip().rpartition("\n")[2]
        return f"its process has ended; it last wrote: {last or 'nothing'}"[:WHY_CHARACTERS_MAX]

    def close(self) -> None:
        """Kills it and all that it has started, at once: there is nothing to save. Returns when they are gone."""
        self._socket.close()
        deadline = time.monotonic() + EXIT_S
        # It stays a zombie meanwhile: the number of its session cannot pass to somebody else.
        while _kill_session(self._process.pid) and time.monotonic() < deadline:
            time.sleep(0.005)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_S)
        self._output.close()


def _kill_session(session: int) -> bool:
    """All but the caller. Returns whether there was anybody to kill."""
    found = False
    for name in filter(str.isdecimal, os.listdir("/proc")):
        if int(name) == os.getpid():
            continue
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            state, _, _, its_session = pathlib.Path("/proc", name, "stat").read_text().rpartition(")")[2].split()[:4]
            if int(its_session) == session and state not in "ZX":
                os.kill(int(name), signal.SIGKILL)
                found = True
    return found


def _short(error: BaseException) -> str:
    text = str(error).strip() or "no reason given"
    return f"{type(error).__name__}: {text.splitlines()[0]}"[:WHY_CHARACTERS_MAX]


# From here on: inside the processes of a peer.


def _serve(descriptor: int, role: str, directory: str, *arguments: str) -> None:
    """Answers requests until it is killed. If the other end is gone instead, kills itself and all it has started."""
    os.set_inheritable(descriptor, False)
    link = socket.socket(fileno=descriptor)
    calls: dict[int, Call] = {}
    try:
        make = ROLES[role](directory, *arguments)
        link.send(b"ready")
        while request := link.recv(MESSAGE_BYTES_MAX):
            size_bytes, repeats = (int(number) for number in request.split())
            if size_bytes not in calls:
                grad = np.random.default_rng(0).standard_normal(size_bytes // 4, dtype=np.float32)
                calls[size_bytes] = make(grad)
            took = _round(calls[size_bytes], repeats)
            link.send(" ".join(f"{seconds:.9f}" for seconds in took).encode())
    except Exception as error:
        with contextlib.suppress(OSError):
            link.send(f"!{_short(error)}".encode())
            link.recv(MESSAGE_BYTES_MAX)  # nothing more is asked
    while _kill_session(os.getpid()):
        time.sleep(0.005)
    os._exit(0)  # on its way out torch would wait for the other process


def _round(call: Call, repeats: int) -> list[float]:
    took = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        call()
        took.append(time.perf_counter() - start)
    return took[1:]


_weights: dict[int, Any] = {}  # torch's server: by number of elements


def _torch_step(grad: Any) -> Any:
    """On the server. One worker waits for the answer, so that the weights can leave without a copy."""
    import torch

    with torch.no_grad():
        w = _weights.get(grad.numel())
        if w is None:
            w = _weights[grad.numel()] = torch.zeros_like(grad)
        return w.sub_(grad, alpha=LR)


def _torch(directory: str, name: str) -> Make:
    import torch
    from torch.distributed import rpc

    if not torch.distributed.is_available() or not rpc.is_available():
        raise RuntimeError("torch is built without RPC")
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # while stopped, it sees no end of the socket
    torch.set_num_threads(_core.cores())
    # They meet in a file: no port to choose, and none that somebody else takes first. Transport and channel are
    # TensorPipe's choice, shared memory and cross-memory attach: faster than any other pair we asked for. As many
    # threads as cores, not 16, since one request is under way: at 1 MB 1.1 to 1.5 times as fast.
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{directory}/store", rpc_timeout=START_S, num_worker_threads=max(2, _core.cores())
    )
    rpc.init_rpc(name, rank=int(name == "worker"), world_size=2, rpc_backend_options=options)

    def make(grad: Any) -> Call:
        tensor = torch.from_numpy(grad)
        return lambda: rpc.rpc_sync("server", _torch_step, args=(tensor,), timeout=ROUND_S)

    return make


def _ray(directory: str) -> Make:
    if shutil.disk_usage("/dev/shm").free < STORE_BYTES:
        raise RuntimeError(f"/dev/shm has no room for a store of {STORE_BYTES} bytes")
    ray: Any = importlib.import_module("ray")  # no types where it is not installed
    ray.init(
        address="local",  # never a cluster that is there already
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=STORE_BYTES,
        _node_ip_address="127.0.0.1",
        _temp_dir=directory,
    )

    class Server:  # in here, it travels by value
        def __init__(self) -> None:
            self.arrays: dict[int, Any] = {}

        def push_pull(self, grad: Any) -> Any:
            if grad.size not in self.arrays:
                self.arrays[grad.size] = np.zeros_like(grad), np.zeros_like(grad)
            w, scaled = self.arrays[grad.size]
            np.multiply(grad, np.float32(LR), out=scaled)  # w -= LR * grad is a fifth slower: fresh memory each time
            w -= scaled
            return w

    server = ray.remote(num_cpus=1)(Server).remote()

    # The gradient goes as it is: Ray then puts it into its store itself. Neither won against ray.put(grad) beforehand,
    # in turns: 0.20 and 0.19, 1.08 and 1.07, 2.08 and 2.11 GB/s at 1, 16 and 100 MB.
    return lambda grad: lambda: ray.get(server.push_pull.remote(grad), timeout=ROUND_S)


ROLES: dict[str, Callable[..., Make]] = {"torch": _torch, "ray": _ray}
