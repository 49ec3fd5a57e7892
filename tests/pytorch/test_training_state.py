"""wl.torch.training_state(): what a rank wants back beside the weights, kept in checkpoints as JSON."""

import json
import logging
import pathlib
import random

import numpy as np
import pytest
import torch
from helpers import PATIENCE_S

import windlass as wl


def drawn() -> list[float]:
    return [random.random(), random.gauss(0, 1), *np.random.rand(2), *torch.rand(2).tolist(), np.random.randn()]


def schedulers() -> tuple[torch.optim.Optimizer, dict[str, object]]:
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1.0)
    of = torch.optim.lr_scheduler
    return optimizer, {
        "steps": of.MultiStepLR(optimizer, [2, 4]),  # its milestones are a Counter
        "cosine": of.CosineAnnealingLR(optimizer, 10),
        "plateau": of.ReduceLROnPlateau(optimizer),  # its best is infinite
        "scaler": torch.amp.GradScaler("cpu"),
    }


def test_random_numbers_and_schedulers_go_on_as_if_nothing_had_happened() -> None:
    optimizer, parts = schedulers()
    state = wl.torch.training_state(**parts)
    drawn()
    for _ in range(3):
        optimizer.step()
        parts["steps"].step(), parts["cosine"].step()
    kept = json.loads(json.dumps(state(), allow_nan=False))
    after = drawn()
    _, fresh = schedulers()
    assert wl.torch.training_state(**fresh).load(kept)
    assert drawn() == after
    for name, part in parts.items():
        assert fresh[name].state_dict() == part.state_dict(), name
    assert not state.load(None)


def test_what_cannot_be_kept_or_put_back_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(wl.InvalidArgument, match=r"thing: expected something with state_dict\(\)"):
        wl.torch.training_state(thing=3)
    with pytest.raises(wl.InvalidArgument, match="'random' is the name"):
        wl.torch.training_state(random=3)
    with pytest.raises(wl.InvalidArgument, match="expected what training_state"):
        wl.torch.training_state().load({"epoch": 3})
    with pytest.raises(wl.InvalidArgument, match="torch: the checkpoint has something else there"):
        wl.torch.training_state().load({"random": {"torch": [{"tensor": "os", "shape": [], "data": ""}]}})
    with wl.connect() as cluster:
        opt = wl.torch.ServerOptimizer(torch.nn.Linear(2, 2), wl.SGD(lr=0.1), cluster=cluster)
        kept = wl.torch.training_state(opt=opt)()
        assert len(json.dumps(kept["opt"])) < 2000  # no weights
        opt.param_groups[0]["lr"] = 0.5
        wl.torch.training_state(opt=opt).load(kept)
        assert opt.param_groups[0]["lr"] == 0.1
        kept["opt"][0]["dict"][0][1][0]["list"] *= 2
        with pytest.raises(wl.InvalidArgument, match="opt: expected 1 groups of parameters, saw 2"):
            wl.torch.training_state(opt=opt).load(kept)
    _, parts = schedulers()
    parts["steps"].other = object()
    with pytest.raises(wl.InvalidArgument, match=r"steps\.state\.other: expected numbers, texts.*saw object"):
        wl.torch.training_state(**parts)()
    kept = wl.torch.training_state()()
    with caplog.at_level(logging.WARNING):
        wl.torch.training_state(cosine=parts["cosine"]).load(kept)
    assert "the checkpoint has no 'cosine'; it begins anew" in caplog.text


def test_a_training_loop_with_dropout_and_a_scheduler_goes_on_bit_for_bit(tmp_path: pathlib.Path) -> None:
    def train(steps: int, save_at: int = -1, resume: bool = False) -> str:
        with wl.connect(checkpoint_dir=tmp_path, resume=resume) as cluster:
            torch.manual_seed(1)
            model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 2))
            opt = wl.torch.ServerOptimizer(model, wl.Adam(lr=0.1), cluster=cluster)
            scheduler = torch.optim.lr_scheduler.StepLR(opt, 3, gamma=0.5)
            state = wl.torch.training_state(scheduler=scheduler)
            if not state.load(cluster.resumed):
                torch.manual_seed(2)
            while cluster.clock < steps:
                model(torch.randn(4, 8)).square().mean().backward()
                opt.step()
                opt.zero_grad()
                scheduler.step()
                if cluster.clock == save_at:
                    cluster.save(extra=state()).wait(PATIENCE_S)
            return cluster.fingerprint()

    final = train(12, save_at=7)
    assert train(12, resume=True) == final
