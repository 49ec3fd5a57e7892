"""With which exit code servers and scheduler end, for whoever starts them again."""

import signal

import pytest
from helpers import PATIENCE_S

from windlass.testing import LocalCluster
from windlass.testing.cluster import until


@pytest.mark.parametrize("code", [0, 75])
def test_a_server_and_a_scheduler_that_are_told_to_end_say_that_their_work_is_not_done(code: int):
    with LocalCluster(servers=2, unfinished_code=code) as cluster:
        until(lambda: len(cluster.members("server")) == 2, "the servers have come", PATIENCE_S)
        cluster.servers[0].process.send_signal(signal.SIGTERM)
        assert cluster.servers[0].wait(PATIENCE_S) == code
        cluster.scheduler.process.send_signal(signal.SIGTERM)
        assert cluster.scheduler.wait(PATIENCE_S) == code
        assert cluster.servers[1].wait(PATIENCE_S) == code
