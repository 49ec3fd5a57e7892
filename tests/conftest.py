"""What all tests share: which cases run when, server processes, and a cluster that closes.

A test that takes `cluster` has each of its cases three times: inside the process, over TCP, and over Unix sockets with
memory that is shared, each of those with two server processes. All cases run inside the process; over each kind of
socket some of them do, one in eight and at least one of each function. A test that is about connections, with a
parameter `kind`, has each case over one kind of them. With --accurate, all cases run over all kinds.

A test that can only be about the engine inside the process says why with a mark, which drops the others:
``@pytest.mark.embedded("reads the memory of the process")``, on a test, a module, or one case of a parametrised test.

Tests run beside each other (``make test``). One that measures the machine, or that the others would disturb, says so
with a mark, and runs by itself: ``@pytest.mark.alone("measures the memory of a server")``.
"""

import os

# Before numpy is imported, here and in every process that tests start: the threads of its OpenBLAS spin when they
# begin, a tenth of a second of a core, and we need none of them.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import collections
import contextlib
import hashlib
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
from helpers import HASTY_SECONDS, PATIENCE_S, SHARED, Connect, new_app

import windlass as wl
from windlass.testing import Servers

TRANSPORTS = ["embedded", "tcp", "unix"]
ONE_IN = 8  # of the cases of a function, over each kind of socket, unless all are asked for
SLOW = ("test_demo.py", "test_bench_train.py", "test_cli.py", "test_compare.py", "sim", "fault", "launch", "wire")
ALLOWING = re.compile(
    r"tests/.*(test_(functions|not_applied|user_rules|user_rule_options|user_rules_in_torch)\.py::.*"
    r"|::test_a_reader_calls_functions_that_read|::test_so_does_what_rules_of_ones_own_keep"
    r"|::test_a_(torch_optimizer|rule_of_the_users)_comes_with_the_name)\[(tcp|unix)"
)
SHARING = re.compile(r"tests/pytorch/test_hybrid\.py(?=::)")  # files whose tests look at the same run
SERVER_BYTES_MAX = 1 << 30  # tests leave their objects behind; servers that have grown so large are replaced

ALWAYS = {"deadline": None, "print_blob": True, "database": None}
hypothesis.settings.register_profile("short", max_examples=400, stateful_step_count=25, **ALWAYS)
hypothesis.settings.register_profile("accurate", max_examples=1500, stateful_step_count=60, **ALWAYS)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accurate", action="store_true", help="also run the long forms of tests, and all their cases")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell; processes would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Runs that tests start are kept apart from those of the user, and of tests beside them. Modules of tests that take
    # over the environment when they are imported get this, too.
    folder = tempfile.TemporaryDirectory(prefix="wl-")
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_RUNTIME_DIR", folder.name)
    config.add_cleanup(folder.cleanup)
    config.add_cleanup(patch.undo)
    hypothesis.settings.load_profile("accurate" if config.getoption("--accurate") else "short")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keeps tests together that share what takes seconds of both cores to start: servers that allow own_rules.py, or
    the run that a file's tests look at.

    Marks of groups would do, but xdist 3.8 adds them to names that pytest 9.2 does not read.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if ALLOWING.match(nodeid):
                return "allowing"
            sharing = SHARING.match(nodeid)
            return nodeid if sharing is None else sharing[0]

    return Scheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if not only_embedded(item)]
    items.sort(key=slowness)
    for item in items:
        mark = item.get_closest_marker("alone")
        if mark is not None:
            reason_of(mark, item)
    if config.getoption("--accurate"):
        return
    passed_over = passed_over_of(items)
    if passed_over:
        config.hook.pytest_deselected(items=[item for item in items if item in passed_over])
        items[:] = [item for item in items if item not in passed_over]
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.skip(reason="the long form; runs with --accurate"))


def slowness(item: pytest.Item) -> int:
    """A test's place in the order: what takes longest begins, so that nobody waits for it at the end."""
    first = item.path.relative_to(pathlib.Path(__file__).parent).parts[0]
    return SLOW.index(first) if first in SLOW else len(SLOW)


def passed_over_of(items: list[pytest.Item]) -> set[pytest.Item]:
    """The cases that only run with --accurate.

    A hash of its name decides about a case: the choice is the same everywhere, and spread over the parameters.
    """
    embedded_too: dict[tuple[str, str], list[pytest.Item]] = collections.defaultdict(list)
    sockets_only: dict[str, dict[tuple[str, str], pytest.Item]] = collections.defaultdict(dict)
    for item in items:
        function = item.nodeid.partition("[")[0]
        if (kind := transport_of(item)) in ("tcp", "unix"):
            embedded_too[function, kind].append(item)
        elif (kind := kind_of(item)) is not None:
            others = re.sub(rf"(^|-){kind}(?=-|$)", r"\1", item.callspec.id, count=1)
            sockets_only[function][others, kind] = item
    found: set[pytest.Item] = set()
    for cases in embedded_too.values():
        cases.sort(key=lambda item: hashed(item.nodeid))
        found.update(cases[max(1, len(cases) // ONE_IN) :])
    for function, by_kind in sockets_only.items():
        others = sorted({other for other, _ in by_kind}, key=lambda other: hashed(function + other))
        kinds = sorted({kind for _, kind in by_kind})
        chosen = {(others[i % len(others)], kinds[i % len(kinds)]) for i in range(max(len(others), len(kinds)))}
        if chosen <= by_kind.keys():  # all of them are there to choose from
            found.update(item for case, item in by_kind.items() if case not in chosen)
    return found


def hashed(name: str) -> bytes:
    """The same in every process."""
    return hashlib.sha256(name.encode()).digest()


def kind_of(item: pytest.Item) -> str | None:
    """Over which connections a case runs of a test that is about them."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    kind = params.get("kind", params.get("pair"))
    return kind if kind in ("tcp", "unix", "arena") else None


def transport_of(item: pytest.Item) -> str | None:
    """How this case reaches its servers; None of a test that does not take `transport`."""
    return item.callspec.params.get("transport") if hasattr(item, "callspec") else None


def reason_of(mark: pytest.Mark, item: pytest.Item) -> str:
    """Marks that make an exception say why."""
    if len(mark.args) != 1 or not isinstance(mark.args[0], str):
        raise pytest.UsageError(f"{item.nodeid}: the mark `{mark.name}` needs a reason")
    return mark.args[0]


def only_embedded(item: pytest.Item) -> bool:
    """Whether this is a run with servers of a test that is not about them."""
    mark = item.get_closest_marker("embedded")
    return mark is not None and bool(reason_of(mark, item)) and transport_of(item) in ("tcp", "unix")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch computes on one thread: the same bits each time, and tests beside each other do not wait for each other."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def accurate(request: pytest.FixtureRequest) -> bool:
    """Whether the long form is asked for."""
    return bool(request.config.getoption("--accurate"))


def fit(pair: Servers) -> bool:
    """Whether both servers run and are not too large."""
    try:
        return max(map(pair.rss_bytes, range(2))) < SERVER_BYTES_MAX
    except ProcessLookupError:
        return False


@pytest.fixture(scope="session")
def pair_of() -> Iterator[Callable[[str], Servers]]:
    """Gives the two servers of a socket kind, which all tests share; started when first asked for.

    Whoever uses them takes an app of its own and leaves them running.
    """
    with contextlib.ExitStack() as stack:

        def get(kind: str) -> Servers:
            pair = SHARED.get(kind)
            if pair is not None and not fit(pair):
                pair.close()
                pair = None
            if pair is None:
                pair = SHARED[kind] = stack.enter_context(Servers(2, kind=kind, threads=2))
            return pair

        yield get


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How a test reaches its servers."""
    if request.param == "tcp":
        monkeypatch.setenv("WINDLASS_TRANSPORT", "socket")
    return request.param


@pytest.fixture
def pair(transport: str, pair_of: Callable[[str], Servers]) -> Iterator[Servers | None]:
    """The servers of this test's transport, which are there after it, too."""
    pair = None if transport == "embedded" else pair_of(transport)
    yield pair
    if pair is not None:
        for i in range(2):
            pair.threads(i)  # raises, and quotes the server, if it has ended


@pytest.fixture
def connect(pair: Servers | None) -> Connect:
    """Like ``wl.connect``, by this test's transport; without an `app` in one of its own. The caller closes."""

    def connect(**options: Any) -> wl.Cluster:
        if pair is None:
            return wl.connect(threads=2, **options)
        return pair.connect(**{"app": new_app(), **options})

    return connect


@pytest.fixture
def here(pair: Servers | None) -> dict[str, str]:
    """What the environment of a script must have for its ``connect_here()`` to use this test's transport."""
    return {} if pair is None else {"TEST_SERVERS": " ".join(pair.addresses), "TEST_APP": new_app()}


@pytest.fixture
def cluster(connect: Connect) -> Iterator[wl.Cluster]:
    """A cluster with two threads, whatever the machine has, or two servers.

    Closing it raises the error of a dropped future.
    """
    with connect() as opened:
        yield opened


@pytest.fixture(scope="session")
def allowing() -> Iterator[Callable[[str, bool], Servers]]:
    """Pairs of servers that allow the rules and functions of own_rules.py, by socket kind; hasty: not for long."""
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(pathlib.Path(__file__).parent))
        found: dict[tuple[str, bool], Servers] = {}

        def get(kind: str, hasty: bool = False) -> Servers:
            if (kind, hasty) not in found:
                options: dict[str, Any] = {"allow": "own_rules, own_compiled, torch.optim"}
                if hasty:
                    options = {"allow": "own_rules", "function_seconds": HASTY_SECONDS}
                servers = Servers(2, kind=kind, threads=2, start_seconds=PATIENCE_S, **options)
                found[kind, hasty] = stack.enter_context(servers)
            return found[kind, hasty]

        yield get


@pytest.fixture
def own_servers(transport: str, allowing: Callable[[str, bool], Servers]) -> Servers | None:
    """Servers that allow own_rules.py, by this test's transport."""
    return None if transport == "embedded" else allowing(transport, False)


@pytest.fixture
def own(own_servers: Servers | None) -> Iterator[wl.Cluster]:
    """A cluster on them."""
    with wl.connect(threads=2) if own_servers is None else own_servers.connect(app=new_app()) as cluster:
        yield cluster


@pytest.fixture
def hasty(
    transport: str, allowing: Callable[[str, bool], Servers], monkeypatch: pytest.MonkeyPatch
) -> Iterator[wl.Cluster]:
    """A cluster whose servers give functions little time."""
    monkeypatch.setenv("WINDLASS_FUNCTION_SECONDS", str(HASTY_SECONDS))
    embedded = transport == "embedded"
    with wl.connect(threads=2) if embedded else allowing(transport, True).connect(app=new_app()) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with cert.pem, which signed itself, key.pem, and other.pem, which signed nothing of ours."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no `openssl` here to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    for name in ("cert", "other"):
        key = folder / ("key.pem" if name == "cert" else "other-key.pem")
        what = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}"]
        names = ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
        files = ["-keyout", str(key), "-out", str(folder / f"{name}.pem")]
        subprocess.run(["openssl", *what, *names, *files], check=True, capture_output=True, timeout=PATIENCE_S)
    return folder
