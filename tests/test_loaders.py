"""Data out of files: every line is in one part, and what is wrong with a file is said with its name."""

import gzip
import itertools
import pathlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import windlass as wl
from windlass.data import Files, dense, edges, lines, sparse


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """Three files of lines of different lengths, the second without an end of its last line, and one that is empty."""
    for name, first, end in (("a.txt", 0, "\n"), ("b.txt", 40, ""), ("d.txt", 80, "\n")):
        (tmp_path / name).write_text("\n".join(f"{i} {'x' * (i % 7)}" for i in range(first, first + 40)) + end)
    (tmp_path / "c.txt").write_text("")
    return tmp_path


def expected(folder: pathlib.Path) -> list[str]:
    return [line for name in "abcd" for line in (folder / f"{name}.txt").read_text().splitlines()]


def test_parts_have_every_line_once_however_they_are_cut(folder: pathlib.Path):
    for count in (1, 2, 3, 7, 50, 121, 1000):
        parts = [list(lines(folder, part=(i, count))) for i in range(count)]
        assert list(itertools.chain(*parts)) == expected(folder)
    halves = [len(list(lines(folder, part=(i, 2)))) for i in range(2)]
    assert abs(halves[0] - halves[1]) < 20


@given(text=st.lists(st.text("ab\r", max_size=6), max_size=12), count=st.integers(1, 9), size=st.integers(1, 9))
def test_so_do_blocks_of_any_size(text: list[str], count: int, size: int, tmp_path_factory: pytest.TempPathFactory):
    file = tmp_path_factory.mktemp("cut") / "x"
    whole = "\n".join(text).encode()
    file.write_bytes(whole)
    blocks = [block for i in range(count) for block in Files(file).blocks((i, count), size)]
    assert b"".join(block.data for block in blocks) == whole
    assert [block.begin for block in blocks] == [0, *itertools.accumulate(len(block.data) for block in blocks)][
        : len(blocks)
    ]
    assert all(block.data.endswith(b"\n") for block in blocks[:-1])


def test_files_are_found_by_path_glob_folder_url_and_list(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    import fsspec

    assert [pathlib.Path(name).name for name in Files(folder / "[ab].txt").names] == ["a.txt", "b.txt"]
    assert Files(str(folder)).names == Files(f"file://{folder}").names == Files(folder / "*.txt").names
    assert Files([folder / "d.txt", folder / "a.txt"]).names == [str(folder / "d.txt"), str(folder / "a.txt")]
    memory = fsspec.filesystem("memory")
    memory.pipe("/bucket/one.txt", b"1\n2\n")
    memory.pipe("/bucket/two.txt", b"3\n")
    assert list(lines("memory://bucket/*.txt")) == ["1", "2", "3"]
    assert Files("memory://bucket").names == ["memory:///bucket/one.txt", "memory:///bucket/two.txt"]
    assert [list(lines("memory://bucket", part=(i, 3))) for i in range(3)] == [["1"], ["2"], ["3"]]


def test_a_compressed_file_is_one_workers(folder: pathlib.Path):
    with gzip.open(folder / "a.txt.gz", "wt") as file:
        file.write("1\n2\n3\n")
    parts = [list(lines([folder / "a.txt.gz", folder / "a.txt"], part=(i, 4))) for i in range(4)]
    assert parts[0][:3] == ["1", "2", "3"]
    assert sum(map(len, parts)) == 43
    whole = (folder / "a.txt.gz").read_bytes()
    (folder / "cut.gz").write_bytes(whole[:-9])
    with pytest.raises(wl.StorageFailed, match=r"cut\.gz: "):
        list(lines(folder / "cut.gz"))


def test_a_lease_can_hand_out_parts(folder: pathlib.Path):
    files = Files(folder)
    count = files.portions(100)
    assert count > 5
    with wl.connect() as cluster:
        seen: list[str] = []
        for number in cluster.lease(count, batch_size=1):
            seen += lines(files, part=(int(number[0]), count))
            cluster.tick()
    assert sorted(seen) == sorted(expected(folder))


@pytest.mark.parametrize("part", [(2, 2), (-1, 2), (0, 0), 3, (0.0, 2), "ab", None])
def test_a_part_that_is_none_is_refused(folder: pathlib.Path, part: Any):
    with pytest.raises(wl.InvalidArgument, match=re.escape(f"expected part=(i, n) with 0 <= i < n, not {part!r}")):
        list(lines(folder, part=part))


def test_files_that_are_not_there_are_named(tmp_path: pathlib.Path):
    for where in (tmp_path / "none", tmp_path / "*.txt", tmp_path):
        with pytest.raises(wl.NotFound, match=re.escape(f"there is no file {where}")):
            Files(where)
    with pytest.raises(wl.StorageFailed, match="no-such-protocol"):
        Files("no-such-protocol://x")
    with pytest.raises(wl.InvalidArgument, match="at least one file"):
        Files([])


def test_text_that_is_not_in_its_encoding_says_where(tmp_path: pathlib.Path):
    (tmp_path / "x").write_bytes(b"good\n\xff\xfe\n")
    with pytest.raises(wl.InvalidArgument, match=r"x, byte 5: expected a line in utf-8"):
        list(lines(tmp_path / "x"))
    assert list(lines(tmp_path / "x", encoding="latin-1")) == ["good", "ÿþ"]


# -- matrices --------------------------------------------------------------------------------------------------------


def test_sparse_rows_have_labels_keys_of_64_bits_and_values(tmp_path: pathlib.Path):
    (tmp_path / "x").write_text("1 3:0.5 18446744073709551615:2\n\n# none\n-1\n0.5 -7 9:1e-3 # the rest\n")
    rows = sparse(tmp_path / "x")
    assert len(rows) == 3
    np.testing.assert_array_equal(rows.labels, np.array([1, -1, 0.5], np.float32))
    np.testing.assert_array_equal(rows.starts, [0, 2, 2, 4])
    np.testing.assert_array_equal(rows.keys, [3, -1, -7, 9])
    np.testing.assert_array_equal(rows.values, np.array([0.5, 2, 1, 0.001], np.float32))
    chosen = rows[np.array([2, 0])]
    np.testing.assert_array_equal(chosen.keys, [-7, 9, 3, -1])
    np.testing.assert_array_equal(chosen.starts, [0, 2, 4])
    assert len(rows[1:]) == 2


def test_sparse_rows_are_scikit_learns(tmp_path: pathlib.Path):
    from scipy.sparse import csr_matrix, random
    from sklearn.datasets import dump_svmlight_file

    matrix = random(60, 50, 0.1, "csr", random_state=1)
    dump_svmlight_file(matrix, np.arange(60), str(tmp_path / "x"))
    parts = [sparse(tmp_path / "x", part=(i, 4)) for i in range(4)]
    again = np.concatenate([csr_matrix((p.values, p.keys, p.starts), (len(p), 50)).toarray() for p in parts])
    np.testing.assert_allclose(again, matrix.toarray(), rtol=1e-6)
    np.testing.assert_array_equal(np.concatenate([p.labels for p in parts]), np.arange(60))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("1 2:3\nx 1:2\n", "byte 6: expected a label, a number, not 'x'"),
        ("1 2:3\n1 a:2\n", "byte 6: expected a key of 64 bits, or KEY:VALUE, not 'a:2'"),
        ("1 2:3:4 5\n", "byte 0: expected a key of 64 bits, or KEY:VALUE, not '2:3:4'"),
        ("1 2:\n", "not '2:'"),
        ("1 :2\n", "not ':2'"),
        ("1 1.5:2\n", "not '1.5:2'"),
        ("1 18446744073709551616:2\n", "not '18446744073709551616:2'"),
    ],
)
def test_a_malformed_sparse_row_is_named(tmp_path: pathlib.Path, text: str, complaint: str):
    (tmp_path / "rows").write_text(text)
    with pytest.raises(wl.InvalidArgument, match=re.escape(complaint)) as error:
        sparse(tmp_path / "rows")
    assert str(tmp_path / "rows") in str(error.value)


def test_dense_rows_are_read_part_by_part(tmp_path: pathlib.Path):
    table = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    for i in range(2):
        np.savetxt(tmp_path / f"{i}.csv", table[25 * i : 25 * (i + 1)], delimiter=",", header="a,b,c,d", comments="")
    parts = [dense(tmp_path / "*.csv", part=(i, 5), header=True) for i in range(5)]
    np.testing.assert_allclose(np.concatenate(parts), table, rtol=1e-6)
    assert dense(tmp_path / "0.csv", header=True, dtype=np.float64).dtype == np.float64


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("1,2\n3\n", "number of columns changed from 2 to 1"), ("1,2\n3,x\n", "could not convert string 'x'")],
)
def test_a_malformed_dense_row_is_named(tmp_path: pathlib.Path, text: str, complaint: str):
    (tmp_path / "rows").write_text(text)
    with pytest.raises(wl.InvalidArgument, match=f"rows, from byte 0 on: .*{complaint}"):
        dense(tmp_path / "rows")


def test_rows_of_several_files_are_as_long_as_each_other(tmp_path: pathlib.Path):
    (tmp_path / "a").write_text("1,2\n")
    (tmp_path / "b").write_text("1,2,3\n")
    with pytest.raises(wl.InvalidArgument, match=r"b: expected rows of 2 numbers, not of 3"):
        dense([tmp_path / "a", tmp_path / "b"])


# -- graphs ----------------------------------------------------------------------------------------------------------


def test_edges_come_out_of_files_with_or_without_weights_and_out_of_an_iterator(tmp_path: pathlib.Path):
    (tmp_path / "plain").write_text("# a graph\n1 2\n2 3\n9007199254740992 0\n")
    (tmp_path / "weighted").write_text("1,2,0.5\n3,4,2\n")
    plain = edges(tmp_path / "plain")
    assert list(zip(plain.source.tolist(), plain.target.tolist(), strict=True)) == [(1, 2), (2, 3), (2**53, 0)]
    assert plain.weight is None
    weighted = edges([tmp_path / "weighted"], delimiter=",")
    assert weighted.weight is not None
    assert (len(weighted), weighted.weight.tolist()) == (2, [0.5, 2.0])
    pairs = [(i, i * i) for i in range(10)]
    parts = [edges(iter(pairs), part=(i, 3)) for i in range(3)]
    assert (
        sorted(
            zip(*(np.concatenate([getattr(p, a) for p in parts]).tolist() for a in ("source", "target")), strict=True)
        )
        == pairs
    )
    assert len(edges(iter([]))) == 0


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("1\n", "expected edges of 2 nodes, or 2 and a weight, not 1"), ("1 2.5\n", "whole numbers"), ("1 x\n", "'x'")],
)
def test_malformed_edges_are_named(tmp_path: pathlib.Path, text: str, complaint: str):
    (tmp_path / "graph").write_text(text)
    with pytest.raises(wl.InvalidArgument, match=complaint):
        edges(tmp_path / "graph")
    with pytest.raises(wl.InvalidArgument, match="expected pairs of whole numbers"):
        edges(iter([("a", "b")]))


@pytest.mark.parametrize("load", [sparse, dense, edges])
def test_a_file_that_is_empty_or_cut_anywhere_gives_fewer_rows_or_an_error_with_its_name(
    load: Callable[..., Any], tmp_path: pathlib.Path
):
    whole = {sparse: b"1 2:3 4:5\n0 6:7\n", dense: b"1,2,3\n4,5,6\n", edges: b"1 2\n3 4\n"}[load]
    rows = len(load(_file(tmp_path, whole)))
    for end in range(len(whole)):
        file = _file(tmp_path, whole[:end])
        try:
            found = load(file)
        except wl.InvalidArgument as error:
            complaint = str(error)
        else:
            complaint = ""
            assert len(found) <= rows
            assert end > 0 or len(found) == 0
        assert not complaint or str(file) in complaint


def _file(folder: pathlib.Path, content: bytes) -> pathlib.Path:
    (folder / "rows").write_bytes(content)
    return folder / "rows"
