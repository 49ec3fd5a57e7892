"""EmbeddingBags and Embeddings: many features of one dim, in one table."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from windlass._errors import InvalidArgument
from windlass._objects.arrays import ArrayLike, as_keys
from windlass.torch._embedding import MODES, Mode
from windlass.torch._features import (
    PADDING,
    Column,
    check_numbers,
    check_range,
    columns_of,
    folded,
    numbered,
    prefix,
)
from windlass.torch._found import Found, check_ids, mark_dynamic
from windlass.torch._pooling import sums
from windlass.torch._table_module import TableModule, check_padding
from windlass.torch._trained_table import TrainedTable

if TYPE_CHECKING:
    pass


class FoundFeatures(NamedTuple):
    """The rows of a batch of many features; made by ``find()``, and taken by ``forward()`` in place of the batch."""

    rows: Any  #: (n, dim) of float32: a leaf whose gradient goes to the servers in the optimizer's step
    inverse: Any  #: int64, the place of each id's row: (batch, features, ...), or feature after feature
    keys: Any  #: (n,) of int64 on the CPU: whose row each is
    padding: int | None  #: the place of the padding row, which is zero and not trained
    offsets: Any = None  #: (features, batch + 1): where bags begin among a feature's ids, and the end of the last
    weights: Any = None  #: of ids
    shapes: tuple[tuple[int, ...], ...] | None = None  #: of each feature's ids; None: (batch, features, ...)


class _Features(TableModule):
    """What EmbeddingBags and Embeddings have in common."""

    def __init__(
        self,
        features: Sequence[str] | Mapping[str, int],
        dim: int,
        *,
        table: str,
        padding_idx: int | None = None,
        fold: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(table, dim, **options)
        self.padding_idx = padding_idx
        self._padding_id = check_padding(padding_idx, self._what)
        self.fold = bool(fold)
        self._numbers = numbered(features, padding_idx is not None, self._what)
        self.features = tuple(self._numbers)

    def _began(self, opened: TrainedTable) -> None:
        check_numbers(opened.cluster, self.table_name, self._numbers, self._what)

    _POOLS = True  #: whether ids are in bags

    def _keys(self, ids: Any, prefixes: Any, what: str) -> Any:
        """The keys of int64 ids."""
        is_padding = None if self._padding_id is None else ids == self._padding_id
        if self.fold:
            ids = folded(ids)
        else:
            check_range(ids if is_padding is None else ids[~is_padding], what)
        keys = ids | prefixes
        return keys if is_padding is None else torch.where(is_padding, PADDING, keys)

    def find(self, batch: Any) -> FoundFeatures:
        """The rows of a batch, to be given to the module in place of it: see ``Embedding.find()``."""
        found = self._find(batch)
        mark_dynamic(found.rows)
        return found

    def _find(self, batch: Any) -> FoundFeatures:
        padding = None if self._padding_id is None else PADDING
        if isinstance(batch, torch.Tensor):
            return self._find_matrix(check_ids(batch, self._what), padding)
        columns = columns_of(batch, self.features, self._POOLS, self._what)
        if all(c.offsets is None and c.weights is None and c.shape == (len(columns[0].ids),) for c in columns):
            return self._find_matrix(torch.stack([column.ids for column in columns], dim=1), padding)
        keys = torch.cat(
            [
                self._keys(column.ids, prefix(self._numbers[name]), f"{self._what}, feature {name!r}")
                for name, column in zip(self.features, columns, strict=True)
            ]
        )
        found = self._found(keys, keys.shape, padding)
        offsets = self._offsets(columns).to(found.inverse) if self._POOLS else None
        return FoundFeatures(*found, offsets, _weights(columns, found.rows), tuple(c.shape for c in columns))

    def _find_matrix(self, ids: Any, padding: int | None) -> FoundFeatures:
        if ids.dim() not in (2, 3) or ids.shape[1] != len(self.features):
            n = len(self.features)
            raise InvalidArgument(
                f"{self._what}: expected ids of shape (batch, {n}) or (batch, {n}, bag), saw {tuple(ids.shape)}"
            )
        prefixes = torch.tensor([prefix(number) for number in self._numbers.values()], device=ids.device)
        keys = self._keys(ids, prefixes if ids.dim() == 2 else prefixes[:, None], self._what)
        return FoundFeatures(*self._found(keys.reshape(-1), keys.shape, padding))

    def _offsets(self, columns: list[Column]) -> Any:
        """(features, batch + 1): where bags begin among the ids of their feature."""
        made = []
        for column in columns:
            offsets = column.offsets
            if offsets is None:
                batch, bag = (*column.shape, 1)[:2]
                offsets = torch.arange(batch + 1, device=column.ids.device) * bag
            made.append(offsets)
        sizes = {name: len(offsets) - 1 for name, offsets in zip(self.features, made, strict=True)}
        if len(set(sizes.values())) != 1:
            raise InvalidArgument(f"{self._what}: features have batches of different sizes: {sizes}")
        return torch.stack(made)

    # -- rows from elsewhere -------------------------------------------------------------------------------------------

    def from_torch(self, feature: str, layer: Any, ids: "ArrayLike | None" = None) -> None:
        """Puts the rows of an nn.Embedding, nn.EmbeddingBag or matrix under these ids of a feature.

        ids: one for each row; without them the rows' numbers. The padding row is left out. One worker calls it, before
        the others train.
        """
        weight = layer.weight if isinstance(layer, (torch.nn.Embedding, torch.nn.EmbeddingBag)) else layer
        if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or weight.shape[1] != self.dim:
            seen = tuple(weight.shape) if isinstance(weight, torch.Tensor) else type(weight).__name__
            raise InvalidArgument(f"{self._what}: expected a layer or a matrix with rows of {self.dim}, saw {seen}")
        keys = self._keys_for_torch(feature, np.arange(len(weight)) if ids is None else ids)
        if len(keys) != len(weight):
            raise InvalidArgument(f"{self._what}: expected an id for each of {len(weight)} rows, saw {len(keys)}")
        kept = keys != PADDING if self._padding_id is not None else np.full(len(keys), True)
        self._open().table.put(keys[kept], weight.detach().float().cpu().numpy()[kept])

    def to_torch(self, feature: str, ids: ArrayLike) -> Any:
        """An nn.Embedding with the rows of these ids of a feature, in their order: row i is that of ``ids[i]``."""
        keys = self._keys_for_torch(feature, ids)
        rows = torch.from_numpy(np.array(self._open().table.pull(keys, create=False), np.float32))
        padding = None
        if self._padding_id is not None and (places := np.flatnonzero(keys == PADDING)).size:
            padding = int(places[0])
            rows[places] = 0
        made = torch.nn.Embedding.from_pretrained(rows, freeze=not self.trainable, padding_idx=padding)
        return made.to(self._device, self._dtype)

    def _keys_for_torch(self, feature: str, ids: ArrayLike) -> Any:
        if feature not in self._numbers:
            raise InvalidArgument(f"{self._what}: there is no feature {feature!r}, only {', '.join(self.features)}")
        listed = torch.from_numpy(np.array(as_keys(ids, self._what)).astype(np.int64))
        return self._keys(listed, prefix(self._numbers[feature]), f"{self._what}, feature {feature!r}").numpy()

    def extra_repr(self) -> str:
        """For print(model)."""
        shown = ", ".join(self.features[:6]) + (", ..." if len(self.features) > 6 else "")
        return f"{super().extra_repr()}, {len(self.features)} features: {shown}"


def _weights(columns: list[Column], rows: Any) -> Any:
    """Of all ids, as the rows are; 1 where a feature has none. None: no feature has any."""
    if all(column.weights is None for column in columns):
        return None
    found = [torch.ones(len(column.ids)) if column.weights is None else column.weights for column in columns]
    return torch.cat([weights.to(rows) for weights in found])


class EmbeddingBags(_Features):
    """Bags of many features, whose rows are in one table: one pull, one push, and one pooling for all. ::

        many = wl.torch.EmbeddingBags(["user", "item", "tags"], 64, table="ctr", rule=wl.RowAdagrad(lr=0.05))
        many({"user": ids, "item": ids, "tags": (ids, offsets)})  # -> (batch, 3, 64)

    features: names; a feature's number is its place. ``{"item": 0, "clicked": 0, "user": 1}`` says which number each
        has: features with one number share rows. A table keeps its features' numbers: add new ones at the end.
    table: its name.
    mode: "sum", "mean" or "max"; for all features or, as ``{"tags": "mean", ...}``, for each.
    padding_idx: an id that is left out of bags, in every feature.
    fold: ids of any 64 bits, mixed into 56. Otherwise ids are from 0 to 2**56 - 1.

    The other arguments are those of Embedding. A batch is

    - ids by feature: (batch,), or (batch, bag), or ``(ids, offsets)`` or ``(ids, offsets, weights)`` as nn.EmbeddingBag
      takes them (without the last offset);
    - or one tensor of ids: (batch, features) or (batch, features, bag);
    - or TorchRec's KeyedJaggedTensor.
    """

    def __init__(
        self,
        features: Sequence[str] | Mapping[str, int],
        dim: int,
        *,
        mode: Mode | Mapping[str, Mode] = "sum",
        **options: Any,
    ) -> None:
        super().__init__(features, dim, **options)
        modes = dict(mode) if isinstance(mode, Mapping) else dict.fromkeys(self.features, mode)
        if set(modes) != set(self.features) or not set(modes.values()) <= set(MODES):
            raise InvalidArgument(
                f"{self._what}: mode must be one of {', '.join(MODES)}, or one of them for each feature, not {mode!r}"
            )
        self.mode = mode
        self._modes = [modes[name] for name in self.features]

    def forward(self, batch: Any) -> Any:
        """(batch, features, dim): of each feature its bags. Takes what ``find()`` returned, too."""
        if not isinstance(batch, FoundFeatures):
            return self._looked_up(batch)
        if batch.shapes is not None:
            return self._cast(self._pooled(batch, batch.shapes))
        if batch.inverse.dim() == 2:  # bags of one id: the rows themselves
            return self._cast(self._rows_at(batch.rows, batch.inverse))
        n, features, bag = batch.inverse.shape
        if len(set(self._modes)) > 1:
            parts = [self._bags(batch, mode, batch.inverse[:, i]) for i, mode in enumerate(self._modes)]
            return self._cast(torch.stack(parts, dim=1))
        pooled = self._bags(batch, self._modes[0], batch.inverse.reshape(n * features, bag))
        return self._cast(pooled.view(n, features, self.dim))

    def _bags(self, found: FoundFeatures, mode: str, inverse: Any, offsets: Any = None, weights: Any = None) -> Any:
        if mode == "sum" and weights is None and not torch.compiler.is_compiling() and self._opened is not None:
            plain = Found(found.rows, inverse, found.keys, found.padding)
            summed = sums(plain, offsets, self._opened.room, in_torchs_order=False)
            if summed is not None:
                return summed
        return F.embedding_bag(
            inverse, found.rows, offsets, mode=mode, per_sample_weights=weights, padding_idx=found.padding
        )

    @torch._disable_dynamo  # type: ignore[untyped-decorator]
    def _looked_up(self, batch: Any) -> Any:
        return self.forward(self._find(batch))

    def _pooled(self, found: FoundFeatures, shapes: tuple[tuple[int, ...], ...]) -> Any:
        """By mode, all features that have it at once."""
        sizes = [math.prod(shape) for shape in shapes]
        if len(set(self._modes)) == 1:
            return self._pool(found, self._modes[0], range(len(sizes)), sizes).transpose(0, 1)
        parts: list[Any] = [None] * len(sizes)
        for mode in MODES:
            chosen = [i for i, one in enumerate(self._modes) if one == mode]
            if chosen:
                for i, part in zip(chosen, self._pool(found, mode, chosen, sizes), strict=True):
                    parts[i] = part
        return torch.stack(parts, dim=1)

    def _pool(self, found: FoundFeatures, mode: str, chosen: Sequence[int], sizes: list[int]) -> Any:
        """(features, batch, dim) of some of the features."""
        inverse, offsets, weights = found.inverse, found.offsets, found.weights
        if weights is not None and mode != "sum":
            raise InvalidArgument(f"{self._what}: weights of ids go with mode='sum', not {mode!r}")
        if len(chosen) < len(sizes):
            inverse = torch.cat([inverse.split(sizes)[i] for i in chosen])
            weights = None if weights is None else torch.cat([weights.split(sizes)[i] for i in chosen])
            offsets, sizes = offsets[list(chosen)], [sizes[i] for i in chosen]
        batch = offsets.shape[1] - 1
        firsts = torch.tensor([0, *itertools.accumulate(sizes[:-1])], device=offsets.device)
        pooled = self._bags(found, mode, inverse, (offsets[:, :-1] + firsts[:, None]).reshape(-1), weights)
        return pooled.view(len(sizes), batch, self.dim)

    def extra_repr(self) -> str:
        """For print(model)."""
        return f"{super().extra_repr()}, mode={self.mode!r}"


class Embeddings(_Features):
    """Rows of many features, unpooled, in one table: one pull and one push for all. ::

        many = wl.torch.Embeddings(["query", "clicked"], 64, table="search", rule=wl.RowAdagrad(lr=0.05))
        rows = many({"query": ids, "clicked": histories})  # {"query": (batch, 64), "clicked": (batch, bag, 64)}

    Its arguments are those of EmbeddingBags, without `mode`. A batch is ids by feature, of any shape; or one tensor of
    ids, (batch, features) or (batch, features, bag), whose rows come as one tensor; or a KeyedJaggedTensor, whose
    features' values have a row each.
    """

    _POOLS = False

    def forward(self, batch: Any) -> Any:
        """The rows of each feature's ids. Takes what ``find()`` returned, too."""
        if not isinstance(batch, FoundFeatures):
            return self._looked_up(batch)
        rows = self._cast(self._rows_at(batch.rows, batch.inverse))
        if batch.shapes is None:
            return dict(zip(self.features, rows.unbind(1), strict=True))
        parts = rows.split([math.prod(shape) for shape in batch.shapes])
        shaped = (part.view(*shape, self.dim) for part, shape in zip(parts, batch.shapes, strict=True))
        return dict(zip(self.features, shaped, strict=True))

    @torch._disable_dynamo  # type: ignore[untyped-decorator]
    def _looked_up(self, batch: Any) -> Any:
        rows = self.forward(self._find(batch))
        return torch.stack(list(rows.values()), dim=1) if isinstance(batch, torch.Tensor) else rows
