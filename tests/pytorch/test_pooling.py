"""What rows become and where their gradients go, on the CPU: the bits of torch, for few ids and for many."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch.nn import functional as F  # noqa: E402

from windlass import _core  # noqa: E402
from windlass._errors import InvalidArgument  # noqa: E402
from windlass.torch._found import Found  # noqa: E402
from windlass.torch._pooling import RADIX_FROM, rows_at, sums  # noqa: E402

SIZES = (1, 100, 8192, RADIX_FROM - 1, RADIX_FROM, 40_000)


def drawn(ids: int, rows: int, dim: int = 8) -> tuple[object, object]:
    generator = torch.Generator().manual_seed(ids + rows)
    return torch.randn(rows, dim, generator=generator), torch.randint(0, rows, (ids,), generator=generator)


def gradient(rows: object, call: object, grad: object) -> object:
    leaf = rows.clone().requires_grad_()
    call(leaf).backward(grad)
    return leaf.grad


@pytest.mark.parametrize("rows", [5, 3000])
@pytest.mark.parametrize("ids", SIZES)
def test_a_row_for_each_id_and_its_gradient_have_torch_s_bits(ids: int, rows: int):
    table, places = drawn(ids, rows)
    grad = torch.randn(ids, 8, generator=torch.Generator().manual_seed(1))
    leaf = table.clone().requires_grad_()
    assert torch.equal(rows_at(leaf, places), F.embedding(places, table))
    ours, torchs = (
        gradient(table, call, grad) for call in (lambda w: rows_at(w, places), lambda w: F.embedding(places, w))
    )
    assert torch.equal(ours, torchs)


@pytest.mark.parametrize("rows", [5, 3000])
@pytest.mark.parametrize("bag", [1, 3])
@pytest.mark.parametrize("ids", SIZES)
def test_sums_of_bags_and_their_gradients_have_torch_s_bits(ids: int, bag: int, rows: int):
    table, places = drawn(ids, rows)
    offsets = torch.arange(0, ids, bag)
    grad = torch.randn(len(offsets), 8, generator=torch.Generator().manual_seed(1))

    def ours(leaf: object) -> object:
        return sums(Found(leaf, places, None, None), offsets, lambda n: torch.empty(n, 8))

    def torchs(leaf: object) -> object:
        return F.embedding_bag(places, leaf, offsets, mode="sum")

    assert torch.equal(ours(table.clone().requires_grad_()), torchs(table))
    assert torch.equal(gradient(table, ours, grad), gradient(table, torchs, grad))


def test_memory_that_gradients_are_given_may_have_any_contents():
    table, _ = drawn(1, 6)
    places = torch.tensor([4, 1, 4])
    grad = torch.ones(3, 8)
    leaf = table.clone().requires_grad_()
    rows_at(leaf, places, lambda n: torch.full((n, 8), torch.nan)).backward(grad)
    assert leaf.grad[:, 0].tolist() == [0, 1, 0, 0, 2, 0]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, in jvp
def test_gradients_of_gradients_and_transforms_are_torch_s():
    table, places = drawn(50, 7)
    found = []
    for call in (lambda w: rows_at(w, places), lambda w: F.embedding(places, w)):
        leaf = table.clone().requires_grad_()
        (first,) = torch.autograd.grad((call(leaf) ** 3).sum(), leaf, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), leaf)
        jacobian = torch.func.jacrev(call)(table)
        _, tangent = torch.func.jvp(call, (table,), (table,))
        found.append((second, jacobian, tangent))
    for ours, torchs in zip(*found, strict=True):
        assert torch.allclose(ours, torchs)


@pytest.mark.parametrize("offsets", [[0, 1], [0, 3, 1], [1, 2], [0, 4], []])
def test_bags_that_do_not_fit_are_refused_and_nothing_is_touched(offsets: list[int]):
    rows, grads = np.ones((4, 2), np.float32), np.ones((len(offsets), 2), np.float32)
    places = np.array([0, 3, 4 if offsets == [0, 1] else 1])
    with pytest.raises(InvalidArgument, match="bags: offsets do not ascend"):
        _core.sum_bags(places, np.array(offsets, np.int64), grads, rows)
    assert (rows == 1).all()


def test_a_place_beyond_the_rows_is_refused():
    with pytest.raises(InvalidArgument, match="rows: a place is not one of the 3 rows"):
        _core.gather_rows(np.ones((3, 2), np.float32), np.array([0, 3]), np.zeros((2, 2), np.float32))
