"""Copies from a device to memory whose pages may change under its addresses."""

from windlass.torch._device import Fetch


class Pages:
    """Memory that gets fresh pages at given copies."""

    def __init__(self, changes: set[int]) -> None:
        self.changes = changes
        self.copies = self.count = 0

    def settle(self) -> int:
        return self.count

    def copy(self) -> "Pages":
        self.copies += 1
        return self

    def synchronize(self) -> None:
        self.count += self.copies in self.changes


def test_a_copy_to_pages_that_were_replaced_meanwhile_is_made_again():
    for changes, copies in (set(), 1), ({1}, 2), ({1, 2}, 3):
        memory = Pages(changes)
        Fetch(memory, memory.copy).synchronize()
        assert memory.copies == copies
