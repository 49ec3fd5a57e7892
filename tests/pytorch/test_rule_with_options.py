"""Options of rules under ServerOptimizer: what one process would do with the joined batch."""

import torch
from crew import together
from nets import STEPS, assert_close, loss_of, mlp, weights

import windlass as wl
from windlass.torch import ServerOptimizer


def test_servers_clip_the_mean_and_run_the_schedule(cluster: wl.Cluster) -> None:
    schedule = wl.Schedule(warmup=4, decay="linear", updates=STEPS)
    rule = wl.SGD(lr=0.5, momentum=0.9, clip_value=0.002, schedule=schedule)

    def work(worker: wl.Cluster) -> list[torch.Tensor]:
        model = models[worker.rank]
        opt = ServerOptimizer(model.parameters(), rule, cluster=worker)
        assert "schedule" not in opt.param_groups[0]
        for step in range(STEPS):
            loss_of(model, step, worker.rank).backward()
            opt.step()
            opt.zero_grad()
        return weights(model)

    models = [mlp(), mlp()]
    one, other = together(cluster, 2, work)
    joined = mlp()
    start = weights(joined)
    sgd = torch.optim.SGD(joined.parameters(), lr=0.5, momentum=0.9)
    for step in range(STEPS):
        sgd.param_groups[0]["lr"] = 0.5 * (min((step + 1) / 4, 1.0) if step < 4 else 1 - (step - 4) / STEPS)
        for rank in range(2):
            (loss_of(joined, step, rank) / 2).backward()
        torch.nn.utils.clip_grad_value_(joined.parameters(), 0.002)
        sgd.step()
        sgd.zero_grad()
    assert_close(one, other, rtol=0.0, atol=0.0)
    assert_close(one, weights(joined), rtol=1e-3, atol=1e-4)
    assert max(float((a - b).abs().max()) for a, b in zip(one, start, strict=True)) > 0.01
