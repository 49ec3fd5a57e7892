"""`windlass run --allow`: servers import a module that lies beside the script."""

import pathlib
import re
import subprocess
import sys
import textwrap

import pytest
from helpers import PATIENCE_S, unannounced


@pytest.fixture
def script(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "my_rules.py").write_text(
        textwrap.dedent(
            """
            import windlass as wl

            @wl.rule
            def descend(w, g, lr=0.5):
                w -= lr * g

            @wl.function(merge=sum)
            def total(part):
                return float(part.weights.sum())
            """
        )
    )
    path = tmp_path / "train.py"
    path.write_text(
        textwrap.dedent(
            """
            import my_rules
            import numpy as np
            import windlass as wl

            with wl.connect(timeout=1000) as cluster:
                try:
                    w = cluster.tensor("w", (4000, 10), rule=my_rules.descend(), sync="bsp")
                    w.push_pull(np.full((4000, 10), cluster.rank * 2.0, np.float32))
                    print("total", w.call(my_rules.total))
                except wl.AccessDenied as error:
                    print("denied:", error)
            """
        )
    )
    return path


def run(script: pathlib.Path, *options: str) -> str:
    command = [sys.executable, "-m", "windlass", "run", "--servers", "2", "--workers", "2", *options, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, cwd="/")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_module_is_found_where_the_script_finds_it(script: pathlib.Path) -> None:
    assert run(script, "--allow", "my_rules").count("total -20000.0") == 2


def test_without_it_the_setting_is_named(script: pathlib.Path) -> None:
    out = run(script)
    assert out.count("denied:") == 2
    assert out.count("start servers with --allow MODULE (WINDLASS_ALLOW)") == 2


def test_a_module_that_is_not_there_ends_it_all(script: pathlib.Path) -> None:
    command = [sys.executable, "-m", "windlass", "run", "--allow", "there_is_none", "--start-timeout", "1000"]
    done = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=PATIENCE_S, cwd="/")
    assert done.returncode == 2
    assert re.match(r"windlass run: server \d ended with exit code 2:\n  ERROR ", unannounced(done.stderr))
    assert (done.stdout + done.stderr).count("allow: module 'there_is_none' cannot be imported") == 1
