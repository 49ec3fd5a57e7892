"""Slots: a ring of arrays, so that a worker fills one while requests use another."""

from typing import TYPE_CHECKING, Any

from windlass._errors import Timeout

if TYPE_CHECKING:
    from windlass._client.cluster import Cluster


class Slots:
    """Registered arrays of one shape; made by ``cluster.slots()``.

    A step that does not wait for its requests needs two of everything: a gradient to fill while the last one travels,
    and a place where weights land while the ones before are in use. ::

        grads, landing = cluster.slots(n), cluster.slots(n)
        future = None
        for batch in batches:
            grad = grads.next()  # the one that no request uses; waits if both are under way
            backward(params, batch, grad)
            if future is not None:
                params[:] = future.wait()
            future = w.push_pull_async(grad, out=landing.next())
    """

    __slots__ = ("_at", "_cluster", "arrays")

    def __init__(self, cluster: "Cluster", arrays: tuple[Any, ...]) -> None:
        self._cluster = cluster
        self._at = -1
        self.arrays = arrays  #: all of them

    def next(self, *, timeout: float | None = None) -> Any:
        """The array whose turn it is, once no request uses it. Raises Timeout if one still does."""
        seconds = self._cluster._timeout if timeout is None else timeout
        at = (self._at + 1) % len(self.arrays)
        if not self._cluster._engine.wait_returned(self.arrays[at], seconds):
            raise Timeout(f"slots: all {len(self.arrays)} arrays are used by requests, for {seconds:g} s now")
        self._at = at
        return self.arrays[at]

    def __len__(self) -> int:
        return len(self.arrays)

    def __repr__(self) -> str:
        return f"<Slots, {len(self.arrays)} of {self.arrays[0].dtype}{tuple(self.arrays[0].shape)}>"
