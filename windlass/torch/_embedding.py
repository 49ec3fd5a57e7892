"""Embedding and EmbeddingBag: torch's modules over a table."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F

from windlass._client.first_weights import Agreement
from windlass._errors import InvalidArgument
from windlass._objects.arrays import ArrayLike, as_keys
from windlass.torch._found import Found, check_ids, mark_dynamic
from windlass.torch._pooling import sums
from windlass.torch._table_module import TableModule, check_padding
from windlass.torch._trained_table import TrainedTable

if TYPE_CHECKING:
    pass

Mode = Literal["sum", "mean", "max"]
MODES = ("sum", "mean", "max")


class _OneTable(TableModule):
    """What Embedding and EmbeddingBag have in common."""

    def __init__(
        self,
        name: str,
        dim: int,
        *,
        padding_idx: int | None = None,
        scale_grad_by_freq: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(name, dim, **options)
        self.padding_idx = padding_idx
        self._padding_key = check_padding(padding_idx, self._what)
        self.scale_grad_by_freq = scale_grad_by_freq
        self._first: tuple[Any, Any] | None = None  # keys and rows that the table begins with

    def find(self, ids: Any) -> Found:
        """The rows of a batch of ids, to be given to the module in place of them. ::

            found = emb.find(ids)
            loss = compiled(emb, found) + 1e-4 * found.rows.square().sum()

        Between it and the backward pass everything is torch's: for torch.compile without a break in the graph,
        torch.export, torch.func, a penalty on the rows at hand, tied weights and sampled softmax.
        """
        found = self._find(ids)
        mark_dynamic(found.rows)
        return found

    def _find(self, ids: Any) -> Found:
        ids = check_ids(ids, self._what)
        return self._found(ids.reshape(-1), ids.shape, self._padding_key)

    # -- rows from elsewhere -------------------------------------------------------------------------------------------

    def from_torch(self, layer: Any, keys: "ArrayLike | None" = None) -> None:
        """Puts the rows of an nn.Embedding, nn.EmbeddingBag or matrix into the table, under these keys.

        keys: one for each row; without them the rows' numbers. The padding row is left out. One worker calls it, before
        the others train.
        """
        keys, rows = self._checked_rows(layer, keys)
        self._open().table.put(keys, rows)

    def _checked_rows(self, layer: Any, keys: "ArrayLike | None") -> tuple[Any, Any]:
        weight = layer.weight if isinstance(layer, (torch.nn.Embedding, torch.nn.EmbeddingBag)) else layer
        if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or weight.shape[1] != self.dim:
            seen = tuple(weight.shape) if isinstance(weight, torch.Tensor) else type(weight).__name__
            raise InvalidArgument(f"{self._what}: expected a layer or a matrix with rows of {self.dim}, saw {seen}")
        rows = weight.detach().float().cpu().contiguous().numpy()
        listed = np.arange(len(rows)) if keys is None else np.asarray(as_keys(keys, self._what))
        if listed.shape != (len(rows),):
            raise InvalidArgument(f"{self._what}: expected a key for each of {len(rows)} rows, saw {listed.shape}")
        kept = listed.astype(np.int64) != self._padding_key if self._padding_key is not None else slice(None)
        return listed[kept], rows[kept]

    def _rows_for_torch(self, keys: ArrayLike) -> tuple[Any, int | None]:
        """A matrix with a row per key, and the padding row's place."""
        listed = np.asarray(as_keys(keys, self._what)).astype(np.int64)
        rows = torch.from_numpy(np.array(self._open().table.pull(listed, create=False), np.float32))
        padding = None
        if self._padding_key is not None and (places := np.flatnonzero(listed == self._padding_key)).size:
            padding = int(places[0])
            rows[places] = 0
        return rows.to(self._device, self._dtype), padding

    @classmethod
    def from_pretrained(
        cls, weight: Any, name: str, keys: "ArrayLike | None" = None, *, freeze: bool = True, **options: Any
    ) -> Any:
        """A module whose table begins with these rows, as nn.Embedding.from_pretrained: frozen unless told otherwise.

        weight: a matrix, an nn.Embedding or nn.EmbeddingBag. keys: one for each row; without them the rows' numbers.
        The lowest rank puts the rows, once; a worker that joins later, or a run that goes on from a checkpoint, finds
        the table as it is by then.
        """
        matrix = weight.weight if isinstance(weight, torch.nn.Module) else weight
        if not isinstance(matrix, torch.Tensor) or matrix.dim() != 2:
            raise InvalidArgument(f"{cls.__name__} {name!r}: expected a matrix of rows, not {type(weight).__name__}")
        made = cls(name, matrix.shape[1], trainable=not freeze, **options)
        made._first = made._checked_rows(matrix, keys)
        return made

    def _began(self, opened: TrainedTable) -> None:
        if self._first is None:
            return
        keys, rows = self._first
        described = [("rows", "float32", rows.shape)]
        agreement = Agreement(opened.cluster, f"{self.table_name} pretrained", described, what=self._what)
        agreement.begin(lambda: opened.table.put(keys, rows))
        self._first = None

    def extra_repr(self) -> str:
        """For print(model)."""
        return super().extra_repr() + ("" if self.padding_idx is None else f", padding_idx={self.padding_idx}")


class Embedding(_OneTable):
    """nn.Embedding over a table: rows live on the servers, ids are any 64-bit numbers, and there is no vocabulary. ::

        emb = wl.torch.Embedding("item", 64, rule=wl.RowAdagrad(lr=0.05))
        opt = wl.torch.ServerOptimizer(model, wl.Adam(lr=1e-3))  # takes the tables in the model, too

    name: of the table. Modules of the same name share it.
    dim: how many numbers a row has.
    rule: what servers do with a gradient (default: the rule of the optimizer).
    init: what a row begins with (default: ``Normal(std=0.01)``).
    padding_idx: an id whose output is zero and which is not trained.
    dtype: of outputs, and of rows and gradients that travel; servers keep float32.
    scale_grad_by_freq: as torch's.
    sync: how tightly workers are coupled at this table (default: as the optimizer).
    seed, reject_nonfinite: as for ``cluster.table()``.
    trainable: whether its rows are trained; ``requires_grad_()`` of the module changes it.
    cluster: ``connect()``'s; without it, the one that this process has.

    It has no parameters: ``ServerOptimizer(model)`` finds it in the model. Its rows are pulled in ``forward()``, and
    their gradients are sent in the optimizer's ``step()``. A row is made by its first gradient; evaluation makes none.
    Copies and pickles of it are modules of the same table. Its rows are not in ``state_dict()``, but in the cluster's
    checkpoints.
    """

    def forward(self, ids: Any) -> Any:
        """Rows of the ids, ids.shape + (dim,). Takes what ``find()`` returned, too."""
        if not isinstance(ids, Found):
            return self._looked_up(ids)
        if self.scale_grad_by_freq:
            return self._cast(F.embedding(ids.inverse, ids.rows, scale_grad_by_freq=True))
        return self._cast(self._rows_at(ids.rows, ids.inverse))

    @torch._disable_dynamo  # type: ignore[untyped-decorator]
    def _looked_up(self, ids: Any) -> Any:
        return self.forward(self._find(ids))

    def to_torch(self, keys: ArrayLike) -> Any:
        """An nn.Embedding with the rows of these keys, in their order: row i is that of ``keys[i]``."""
        rows, padding = self._rows_for_torch(keys)
        return torch.nn.Embedding.from_pretrained(
            rows, freeze=not self.trainable, padding_idx=padding, scale_grad_by_freq=self.scale_grad_by_freq
        )


class EmbeddingBag(_OneTable):
    """nn.EmbeddingBag over a table: sums, means or maxima of bags of rows that live on the servers. ::

        bag = wl.torch.EmbeddingBag("tag", 64, mode="mean", rule=wl.RowAdagrad(lr=0.05))
        bag(ids, offsets)

    mode: "sum", "mean" or "max".
    include_last_offset: as torch's: the last offset is the number of ids.

    The other arguments are those of Embedding. ``padding_idx`` is left out of bags.
    """

    def __init__(
        self, name: str, dim: int, *, mode: Mode = "mean", include_last_offset: bool = False, **options: Any
    ) -> None:
        super().__init__(name, dim, **options)
        if mode not in MODES:
            raise InvalidArgument(f"{self._what}: mode must be one of {', '.join(MODES)}, not {mode!r}")
        if self.scale_grad_by_freq and mode == "max":
            raise InvalidArgument(f"{self._what}: torch has no scale_grad_by_freq for mode='max'")
        self.mode = mode
        self.include_last_offset = include_last_offset

    def forward(self, ids: Any, offsets: Any = None, per_sample_weights: Any = None) -> Any:
        """A row per bag: the rows of a matrix of ids, or of one dimension from each of the offsets to the next."""
        if not isinstance(ids, Found):
            return self._looked_up(ids, offsets, per_sample_weights)
        return self._cast(
            F.embedding_bag(
                ids.inverse,
                ids.rows,
                self._placed(offsets, ids),
                scale_grad_by_freq=self.scale_grad_by_freq,
                mode=self.mode,
                per_sample_weights=None if per_sample_weights is None else per_sample_weights.to(ids.rows.dtype),
                include_last_offset=self.include_last_offset,
                padding_idx=ids.padding,
            )
        )

    def _placed(self, offsets: Any, found: Found) -> Any:
        """Offsets as the inverse is: of the same dtype, on the same device."""
        return offsets.to(found.inverse) if isinstance(offsets, torch.Tensor) else offsets

    @torch._disable_dynamo  # type: ignore[untyped-decorator]
    def _looked_up(self, ids: Any, offsets: Any, per_sample_weights: Any) -> Any:
        found = self._find(ids)
        if self.mode == "sum" and per_sample_weights is None and not self.scale_grad_by_freq:
            opened = self._open()
            summed = sums(found, offsets, opened.room, output=opened.output, include_last=self.include_last_offset)
            if summed is not None:
                return self._cast(summed)
        return self.forward(found, offsets, per_sample_weights)

    def to_torch(self, keys: ArrayLike) -> Any:
        """An nn.EmbeddingBag with the rows of these keys, in their order: row i is that of ``keys[i]``."""
        rows, padding = self._rows_for_torch(keys)
        return torch.nn.EmbeddingBag.from_pretrained(
            rows,
            freeze=not self.trainable,
            mode=self.mode,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
            scale_grad_by_freq=self.scale_grad_by_freq,
        )

    def extra_repr(self) -> str:
        """For print(model)."""
        return f"{super().extra_repr()}, mode={self.mode!r}"


__all__: Sequence[str] = ["Embedding", "EmbeddingBag"]
