"""The README's example runs as it stands."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_example_of_the_readme_runs(capsys):
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert example is not None
    exec(compile(example.group(1), "README.md", "exec"), {})
    assert "Tensor 'w'" in capsys.readouterr().out
