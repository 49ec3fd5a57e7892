"""At which address tasks reach each other's hosts."""

import pathlib

import pytest

from windlass.launch.hosts import address_of, address_towards


@pytest.fixture
def scontrol(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A command that knows one node."""
    command = tmp_path / "scontrol"
    command.write_text(
        '#!/bin/sh\ntest "$*" = "show node n1" || exit 1\n'
        'echo "NodeName=n1 Arch=x86_64"\necho "   NodeAddr=10.1.2.3 NodeHostName=n1"\n'
    )
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return command


def test_an_address_is_itself_and_a_name_is_resolved():
    assert address_of("10.0.0.7", beyond=True) == "10.0.0.7"
    assert address_of("localhost", beyond=False) == "127.0.0.1"


def test_a_name_that_leads_to_loopback_is_no_address_for_others(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")  # nor does Slurm know it
    assert address_of("localhost", beyond=True) is None


def test_slurm_is_asked_for_nodes_whose_names_nobody_resolves(scontrol: pathlib.Path):
    assert address_of("n1", beyond=True) == "10.1.2.3"
    assert address_of("n2", beyond=True) is None


def test_a_node_that_slurm_knows_by_its_name_alone_has_no_other_address(scontrol: pathlib.Path):
    scontrol.write_text("#!/bin/sh\necho NodeAddr=localhost\n")
    assert address_of("n1", beyond=True) is None
    assert address_of("n1", beyond=False) == "127.0.0.1"


def test_the_way_to_another_host_shows_ones_own_address():
    assert address_towards("127.0.0.9") == "127.0.0.1"
    assert address_towards("no address") is None
