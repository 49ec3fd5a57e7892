"""Slurm's lists of hosts, ports and counts."""

import pytest

import windlass as wl
from windlass.launch.hostlist import HOSTS_MAX, expand_counts, expand_hosts, expand_numbers


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("node[01-03,7]", ["node01", "node02", "node03", "node7"]),
        ("a,b[1-2],c", ["a", "b1", "b2", "c"]),
        ("rack[1-2]-n[08-10]", [f"rack{r}-n{n}" for r in (1, 2) for n in ("08", "09", "10")]),
        ("n[9-11]x", ["n9x", "n10x", "n11x"]),
        ("gpu-[001],gpu-b.cluster.example", ["gpu-001", "gpu-b.cluster.example"]),
        ("[1-2]", ["1", "2"]),
    ],
)
def test_a_list_of_hosts_is_expanded_as_slurm_means_it(text: str, hosts: list[str]):
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(
    "text",
    ["", "a,", "a[", "a]", "a[1", "a[[1]]", "a[1-]", "a[x]", "a[3-1]", "a[]", f"a[0-{HOSTS_MAX}]", "n[0-9999][0-99]"],
)
def test_a_list_that_is_none_is_an_error_that_quotes_it(text: str):
    with pytest.raises(wl.InvalidArgument, match="list of hosts"):
        expand_hosts(text)


def test_numbers_and_counts_are_expanded_and_errors_name_the_variable():
    assert expand_numbers("12000-12002,12010", "P") == [12000, 12001, 12002, 12010]
    assert expand_counts("2(x3),1", "T") == [2, 2, 2, 1]
    with pytest.raises(wl.InvalidArgument, match=r"P='7-x'"):
        expand_numbers("7-x", "P")
    for text in ("", "2(3)", "x", "1(x9999999)"):
        with pytest.raises(wl.InvalidArgument, match=r"T=.* expected counts such as 2\(x3\),1"):
            expand_counts(text, "T")
