"""The native module of the benchmarks: who loads it, and what it refuses."""

import socket

import numpy as np
import pytest
from helpers import check_python

from windlass import _core
from windlass.bench import _native


def test_only_the_benchmarks_load_it():
    check_python(
        """
        import sys
        import windlass
        import windlass._cli
        windlass.connect(threads=1).close()
        assert "windlass._core" in sys.modules
        assert "windlass.bench._native" not in sys.modules
        import windlass.bench.core
        assert "windlass.bench._native" in sys.modules
        """
    )


@pytest.mark.parametrize("rule", [_core.RuleKind.FOREIGN.value, len(_core.RuleKind), 255])
def test_a_limit_of_no_rule_of_ours_is_refused(rule: int):
    w, g = np.zeros(64, np.float32), np.zeros(64, np.float32)
    with pytest.raises(ValueError, match="no such rule"):
        _native.limit_rule(rule, [], w, [], g, 64, 1, 1)


def test_a_gate_of_no_policy_is_refused():
    with pytest.raises(ValueError, match="no such policy"):
        _native.time_gate((4, 0, 0.0), 2, 10, 1)


def test_a_limit_of_a_socket_that_fails_says_why():
    here, there = socket.socketpair()
    there.close()
    with here, pytest.raises(RuntimeError, match="bare socket: send: Broken pipe"):
        _native.limit_wire_push(here.fileno(), np.zeros(4, np.float32), 4096, 1)
