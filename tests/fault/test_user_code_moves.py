"""Objects with rules of the user's own move like any other: what the rule keeps goes with the shard."""

import numpy as np
import own_rules
import pytest
import torch
from moving import Moving

import windlass as wl
from windlass._rules.user_code import Allowed, Calls


@pytest.mark.parametrize("kind", ["tcp", "arena"])
def test_a_shard_moves_with_what_its_rule_keeps(kind: str) -> None:
    random = np.random.default_rng(0)
    calls = [Calls(Allowed(["own_rules", "torch.optim"])) for _ in range(3)]
    try:
        with Moving(kind) as moving:
            for server, its in zip(moving.servers, calls, strict=True):
                server.host.set_user_code(its.core)
                its.start()
            with moving.connect() as cluster, wl.connect() as near:
                rules = {
                    "ball": own_rules.heavy_ball(lr=0.1),
                    "start": own_rules.towards_start(),
                    "torch": wl.TorchRule(torch.optim.NAdam, lr=0.01),
                    "rows": own_rules.row_adagrad(lr=0.1),
                }
                pairs = [
                    tuple(c.tensor(name, (2000, 50), rule=rule, init=wl.Normal()) for c in (cluster, near))
                    for name, rule in rules.items()
                ]
                tables = [
                    c.table("t", dim=4, rule=own_rules.towards_start(), init=wl.Normal()) for c in (cluster, near)
                ]
                for step in range(6):
                    g = random.standard_normal((2000, 50), np.float32)
                    for far, close in pairs:
                        np.testing.assert_allclose(far.push_pull(g), close.push_pull(g), rtol=1e-6, atol=1e-7)
                    keys, rows = random.integers(0, 300, 200), random.standard_normal((200, 4), np.float32)
                    np.testing.assert_array_equal(*(t.push_pull(keys, rows) for t in tables))
                    for number, (far, _) in enumerate(pairs, 1):
                        for shard in range(step % 2, far.shards, 2):
                            moving.move(number, shard, (moving.owner(number, shard) + 1) % 3)
                    for shard in range(step, 256, 7):
                        moving.move(len(pairs) + 1, shard, (moving.owner(len(pairs) + 1, shard) + 1) % 3)
    finally:
        for its in calls:
            its.close()


def test_a_shard_that_is_larger_than_a_chunk_moves_with_pushes_that_wait_for_their_update() -> None:
    size = 4_500_000  # 18 MB, which the rule wants in one shard
    random = np.random.default_rng(1)
    calls = [Calls(Allowed(["own_rules"])) for _ in range(3)]
    try:
        with Moving("tcp") as moving:
            for server, its in zip(moving.servers, calls, strict=True):
                server.host.set_user_code(its.core)
                its.start()
            with moving.connect() as cluster, wl.connect() as near:
                pairs = [(c, c.tensor("w", size, rule=own_rules.by_norm(lr=0.1), sync="bsp")) for c in (cluster, near)]
                assert pairs[0][1].shards == 1
                for step in range(3):
                    g = random.standard_normal(size, np.float32)
                    pushed = [w.push(g) for _, w in pairs]
                    if step:
                        moving.move(1, 0, (moving.owner(1, 0) + 1) % 3)
                    for (c, _), push in zip(pairs, pushed, strict=True):
                        c.tick()
                        push.wait()
                    np.testing.assert_array_equal(*(w.pull() for _, w in pairs))
    finally:
        for its in calls:
            its.close()
