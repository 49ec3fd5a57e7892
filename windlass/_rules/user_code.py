"""Runs the user's functions where the parameters are: on one Python thread of a server.

The core hands over calls (csrc/server/object/user_code.h); a thread here answers them one by one. A call that takes too
long is given up: its thread is interrupted, if Python notices, and another takes its place. The function was
working on a copy.
"""

import contextlib
import ctypes
import importlib
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from windlass import _core
from windlass._errors import ERRORS, AccessDenied, Closed, FunctionFailed, InvalidArgument, WindlassError
from windlass._release import owns_native
from windlass._rules.functions import Function
from windlass._rules.user_rules import RuleFunction

if TYPE_CHECKING:
    from windlass._core import UserCall

FUNCTION_SECONDS = 10.0
_WAIT_SECONDS = 1.0
_TORCH = "torch.optim"
_log = logging.getLogger("windlass")


class _GivenUp(BaseException):
    """Raised in a thread whose call nobody waits for any more."""


@owns_native("native")
class RunningCall:
    """A call that is being answered.

    The frames of a function that still runs when the process ends are never freed. So callers of user functions hold
    this in their variables, and not the native call.
    """

    __slots__ = ("native",)

    def __init__(self, native: "UserCall") -> None:
        self.native = native


class _Runner(threading.Thread):
    """Answers calls until it is given up."""

    def __init__(self, calls: "Calls") -> None:
        super().__init__(name="windlass-functions", daemon=True)
        self._calls = calls
        self.at: RunningCall | None = None

    def run(self) -> None:
        try:
            while self._calls.runner is self and not self._calls.core.closed:
                self._answer_next()
        except (_GivenUp, Closed):  # Closed: the process is ending
            pass

    def _answer_next(self) -> None:
        call = self._calls.core.next(_WAIT_SECONDS)
        if call is None:
            return
        self.at = RunningCall(call)
        del call
        self._calls.answer(self.at)
        self.at = None


@owns_native("core")
class Calls:
    """The functions of one server, found by their names, and the thread that runs them."""

    def __init__(self, find: "Own | Allowed", seconds: float = FUNCTION_SECONDS) -> None:
        self.core = _core.UserCode(seconds)
        self.runner: _Runner | None = None
        self._find = find
        self._functions: list[Callable[[RunningCall], None]] = []
        self._threads: list[threading.Thread] = []
        self._stuck: list[_Runner] = []  # interrupted, and not ended yet
        self._lock = threading.Lock()

    @property
    def own(self) -> "Own":
        """Where this process registers what it uses itself."""
        assert isinstance(self._find, Own)
        return self._find

    def start(self) -> None:
        """Starts the threads, once; close() ends them."""
        with self._lock:
            if self._threads:
                return
            watch = threading.Thread(target=self._watch, name="windlass-watch-functions", daemon=True)
            self._new_runner()
            self._threads.append(watch)
            watch.start()

    def close(self) -> None:
        """Waiting callers get Closed. Does not wait for a function that still runs."""
        self.core.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_WAIT_SECONDS)

    def _new_runner(self) -> None:
        self.runner = runner = _Runner(self)
        runner.start()
        self._threads.append(runner)

    def _watch(self) -> None:
        while not self.core.closed:
            if not self.core.wait_given_up(_WAIT_SECONDS):
                self._interrupt()
                continue
            stuck = self.runner
            running = None if stuck is None else stuck.at
            if stuck is None or running is None or not running.native.given_up:
                continue  # it has finished in the meantime
            _log.error(
                "%s: a function takes too long; it is interrupted, and others go on without it", running.native.what
            )
            try:
                self._new_runner()
            except RuntimeError as error:  # no thread to be had: try again soon; meanwhile calls wait their time
                self.runner = stuck
                _log.error("functions: %s", error)
                time.sleep(_WAIT_SECONDS)
                continue
            self._stuck.append(stuck)
            self._interrupt()

    def _interrupt(self) -> None:
        """Interrupts threads whose calls were given up. Python drops an exception that it raises in a callback of its
        own, such as that of a weak reference; so this is repeated until the thread has ended."""
        self._stuck = [runner for runner in self._stuck if runner.is_alive()]
        for runner in self._stuck:
            if runner.ident is not None and runner.at is not None:
                thread = ctypes.c_ulong(runner.ident)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(_GivenUp))

    def answer(self, running: RunningCall) -> None:
        """Runs what is asked for. The caller sees what it raises, and the log has it, too."""
        what = running.native.what
        try:
            if running.native.finds:
                self._functions.append(bound(self._find(running.native), running.native))
                running.native.function = len(self._functions) - 1
            elif running.native.reads:
                self._reader(running.native)._run(running)
            else:
                self._functions[running.native.function](running)
        except WindlassError as error:
            self.core.end(running.native, ERRORS.index(type(error)), str(error))
        except _GivenUp:
            self.core.end(running.native, ERRORS.index(FunctionFailed), f"{what}: its function was given up")
            raise
        except BaseException as error:
            _log.exception("%s: a function of the user's raised", what)
            said = f"{what}: its function raised {type(error).__name__}: {error}; nothing was changed"
            self.core.end(running.native, ERRORS.index(FunctionFailed), said)
        else:
            self.core.end(running.native)

    def _reader(self, call: "UserCall") -> Function:
        found = self._find(call)
        if not isinstance(found, Function):
            raise AccessDenied(f"{call.what}: {call.text!r} is not a function with @wl.function")
        return found


class Own:
    """Finds what this process has used itself: for a server inside it."""

    def __init__(self) -> None:
        self._known: dict[str, object] = {}

    def add(self, name: str, found: object) -> None:
        """Registers it; call this before a server asks for it."""
        self._known[name] = found

    def find(self, name: str) -> object:
        """What is registered under a name, without the options behind it."""
        return next((found for known, found in self._known.items() if known.partition(" ")[0] == name), None)

    def __call__(self, call: "UserCall") -> object:
        return self._known[call.text]


class Allowed:
    """Finds functions in modules that the settings of a server allow, and imports nothing else."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules: dict[str, Any] = {}
        for name in modules:
            try:
                self._modules[name] = importlib.import_module(name)
            except Exception as error:
                raise InvalidArgument(f"allow: module {name!r} cannot be imported: {error}") from error
            for found in vars(self._modules[name]).values():
                for dims in (1, 2):  # of tensors, and of tables
                    with contextlib.suppress(Exception):  # it may be for one of them only
                        found.compile(dims) if isinstance(found, RuleFunction) else None

    def __call__(self, call: "UserCall") -> object:
        name = call.text.partition(" ")[0]
        module, _, path = name.partition(":")
        if module not in self._modules:
            hint = "; a script is no module: put it into a file of its own" if module == "__main__" else ""
            raise AccessDenied(
                f"{call.what}: {name!r} is in module {module!r}, and this server allows "
                f"{', '.join(map(repr, self._modules))}; start servers with --allow {module} (WINDLASS_ALLOW){hint}"
            )
        found: Any = self._modules[module]
        for part in path.split("."):
            found = getattr(found, part, None)
        return found


def bound(found: object, call: "UserCall") -> Callable[[RunningCall], None]:
    """The function that answers calls for the object that `call` is about."""
    name, _, text = call.text.partition(" ")
    try:
        options = json.loads(text) if text else {}
        assert isinstance(options, dict)
    except (ValueError, AssertionError):
        raise InvalidArgument(f"{call.what}: rule {name!r} has malformed options") from None
    if isinstance(found, RuleFunction):
        return found.bind(call.layout, options.get("shape"))
    if name.startswith(f"{_TORCH}:"):
        from windlass._rules.torch_rule import run_optimizer

        return run_optimizer(found, options, call.layout, call.what)
    raise AccessDenied(f"{call.what}: {name!r} is not a rule; expected a function with @wl.rule")
