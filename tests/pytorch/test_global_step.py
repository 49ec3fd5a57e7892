"""opt.global_step: what all workers have done, where each takes steps of its own number."""

import threading

import pytest
import torch
from crew import at_once

import windlass as wl


def optimizer(worker: wl.Cluster, sync: str, **options: object) -> tuple[torch.nn.Linear, wl.torch.ServerOptimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    rule = wl.Adam(lr=0.01)
    return model, wl.torch.ServerOptimizer(model.parameters(), rule, sync=sync, cluster=worker, **options)  # type: ignore[arg-type]


def step(model: torch.nn.Linear, opt: wl.torch.ServerOptimizer) -> None:
    opt.zero_grad()
    model(torch.ones(4, 3)).sum().backward()
    opt.step()


@pytest.mark.parametrize(("sync", "expected"), [("asp", 3 + 7), ("bsp", 7)])
def test_it_counts_the_steps_of_all_and_the_iterations_under_bsp(cluster: wl.Cluster, sync: str, expected: int) -> None:
    steps, made = (3, 7), threading.Barrier(2)

    def work(rank: int) -> list[int]:
        with cluster.worker(rank, 2) as worker:
            model, opt = optimizer(worker, sync)
            made.wait(60)
            seen = [opt.global_step]
            for _ in range(steps[rank]):
                step(model, opt)
                seen.append(opt.global_step)
            return seen

    for rank, seen in enumerate(at_once(2, work)):
        assert seen == sorted(seen)
        assert all(count >= own for own, count in enumerate(seen)), "a worker sees its own steps"
        assert len(seen) == steps[rank] + 1
    with cluster.worker(0, 1) as late:
        _, opt = optimizer(late, sync)
        assert opt.global_step == expected


def test_it_goes_on_where_a_saved_state_was(cluster: wl.Cluster) -> None:
    model, opt = optimizer(cluster, "asp")
    assert opt.global_step == 0
    for _ in range(5):
        step(model, opt)
    saved = opt.state_dict()
    other, again = optimizer(cluster, "asp", name="again")
    again.load_state_dict(saved)
    assert again.global_step == opt.global_step == 5
    step(other, again)
    assert (again.global_step, opt.global_step) == (6, 5)


def test_parameters_without_gradients_do_not_hold_it_up(cluster: wl.Cluster) -> None:
    frozen, used = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))
    frozen.requires_grad_(False)
    opt = wl.torch.ServerOptimizer([frozen, used], wl.SGD(lr=0.1), sync="asp", cluster=cluster)
    for _ in range(4):
        used.sum().backward()
        opt.step()
        opt.zero_grad()
    assert opt.global_step == 4


def test_a_learning_rate_by_it_is_that_of_a_schedule_on_the_servers(cluster: wl.Cluster) -> None:
    schedule = wl.Schedule(decay="linear", updates=10, end=0.0)
    a, b = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    ours = wl.torch.ServerOptimizer([a], wl.SGD(lr=1.0), sync="asp", cluster=cluster, name="ours")
    theirs = wl.torch.ServerOptimizer(
        [b], wl.SGD(lr=1.0, schedule=schedule), sync="asp", cluster=cluster, name="theirs"
    )
    for _ in range(12):
        for group in ours.param_groups:
            group["lr"] = max(0.0, 1 - ours.global_step / 10)
        for opt, parameter in ((ours, a), (theirs, b)):
            opt.zero_grad()
            parameter.sum().backward()
            opt.step()
    assert torch.allclose(a, b)
