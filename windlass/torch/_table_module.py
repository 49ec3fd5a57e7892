"""What modules over tables have in common: the table's spec, device and dtype, freezing, copies, and saved state.

They have no parameters and no buffers, so DistributedDataParallel has nothing of theirs to exchange.
"""

import copy
import warnings
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from windlass._client.open_clusters import default_cluster
from windlass._errors import InvalidArgument
from windlass._objects.arrays import is_whole
from windlass._rules.init import Init
from windlass._rules.rule import Rule
from windlass._rules.sync import BSP, Sync, parse_sync
from windlass.torch._found import Found, distinct
from windlass.torch._pooling import rows_at
from windlass.torch._trained_table import TableSpec, TrainedTable, trained_table

if TYPE_CHECKING:
    from windlass._client.cluster import Cluster

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_HALVES = (torch.bfloat16, torch.float16)


class TableModule(torch.nn.Module):  # type: ignore[misc]
    """Base of Embedding, EmbeddingBag, EmbeddingBags and Embeddings."""

    #: Options of torch's modules that say something else here, or nothing.
    _REFUSED: ClassVar[dict[str, str]] = {
        "max_norm": "rows are changed by pushes alone; a rule's clip_weight bounds them on the servers",
        "norm_type": "it belongs to max_norm",
        "sparse": "gradients are those of the batch's rows already",
        "num_embeddings": "a table has no vocabulary; rows are made for the ids that come",
        "freeze": "use trainable=False",
        "device": "move the module with .to(device)",
    }

    def __init__(
        self,
        name: str,
        dim: int,
        *,
        rule: Rule | None = None,
        init: Init | None = None,
        dtype: torch.dtype = torch.float32,
        sync: Sync | str | None = None,
        seed: int = 0,
        reject_nonfinite: bool = False,
        trainable: bool = True,
        cluster: "Cluster | None" = None,
        **options: Any,
    ) -> None:
        super().__init__()
        what = self._what = f"{type(self).__name__} {name!r}"
        for option in options:
            if option in self._REFUSED:
                raise InvalidArgument(f"{what}: there is no {option}=: {self._REFUSED[option]}")
            raise TypeError(f"{what}: unexpected keyword argument {option!r}")
        if not isinstance(name, str) or not name or not name.isprintable():
            raise InvalidArgument(f"{what}: the table's name must be a string of printable characters, not {name!r}")
        if not is_whole(dim) or not 1 <= dim <= 2**20:
            raise InvalidArgument(f"{what}: dim must be a whole number between 1 and {2**20}, not {dim!r}")
        if rule is not None and not isinstance(rule, Rule):
            raise InvalidArgument(f"{what}: rule must be a windlass rule such as RowAdagrad(lr=0.05), not {rule!r}")
        if init is not None and not isinstance(init, Init):
            raise InvalidArgument(f"{what}: init must be a windlass initialiser such as Normal(std=0.01), not {init!r}")
        if sync is not None:
            sync = parse_sync(sync, BSP(), what)
        if dtype not in _DTYPES[:3]:
            raise InvalidArgument(f"{what}: dtype must be float32, bfloat16 or float16 of torch's, not {dtype!r}")
        self.table_name = name
        self.dim = int(dim)
        self.trainable = bool(trainable)
        self._spec = TableSpec(name, int(dim), rule, init, seed, sync, reject_nonfinite)
        self._dtype = dtype
        self._device = torch.device("cpu")
        self._cluster = cluster
        self._opened: TrainedTable | None = None

    # -- its table -----------------------------------------------------------------------------------------------------

    @property
    def table(self) -> Any:
        """The table itself, for queries, exports and puts. Opens it."""
        return self._open().table

    def _open(self, rule: Rule | None = None, sync: Sync | None = None) -> TrainedTable:
        """Its table, made or opened at the first use. `rule`, `sync`: an optimizer's, where the module has none."""
        if self._opened is None:
            cluster = default_cluster() if self._cluster is None else self._cluster
            opened = trained_table(cluster, self._spec, rule, sync)
            self._began(opened)
            self._opened = opened
        return self._opened

    def _began(self, opened: TrainedTable) -> None:
        """Called once the table is open."""

    # -- lookups -------------------------------------------------------------------------------------------------------

    def _found(self, all_keys: Any, shape: Any, padding_key: int | None) -> Found:
        """The rows of int64 keys in one dimension, each of which may come often; a leaf where gradients are computed.

        shape: that of the ids.
        """
        if getattr(self, "_is_replica", False):
            raise InvalidArgument(
                f"{self._what}: DataParallel's replicas look no rows up; use DistributedDataParallel, or find() before"
            )
        table = self._open()
        keys, inverse = distinct(all_keys)
        padding = None
        if padding_key is not None:
            place = int(keys.searchsorted(padding_key))
            padding = place if place < len(keys) and keys[place] == padding_key else None
        travels = self._dtype if self._dtype in _HALVES else torch.float32
        rows = table.rows(keys, self._device, travels, padding)
        if self.trainable and torch.is_grad_enabled():
            table.watch(rows, keys, padding, travels)
        if inverse.device != self._device:
            inverse = inverse.to(self._device)
        return Found(rows, inverse.view(shape), torch.from_numpy(keys), padding)

    def _rows_at(self, rows: Any, places: Any) -> Any:
        """A row for each place."""
        if torch.compiler.is_compiling() or self._opened is None:
            return rows_at(rows, places)
        return rows_at(rows, places, self._opened.room, self._opened.output)

    def _cast(self, output: Any) -> Any:
        return output if output.dtype is self._dtype else output.to(self._dtype)

    # -- as a module ---------------------------------------------------------------------------------------------------

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Where outputs are, and of which dtype, is what `fn` does to a tensor: ``.to("cuda")``, ``.bfloat16()``."""
        moved = fn(torch.empty(1, dtype=self._dtype, device=self._device))
        if moved.device.type not in ("cpu", "cuda", "meta") or moved.dtype not in _DTYPES:
            raise InvalidArgument(
                f"{self._what}: rows can be float32, float64, bfloat16 or float16 on the cpu or a CUDA device, not "
                f"{moved.dtype} on {moved.device}"
            )
        self._device, self._dtype = moved.device, moved.dtype
        return super()._apply(fn, recurse)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Freezes its rows, or trains them again. That of a module around it does not reach tables."""
        self.trainable = bool(requires_grad)
        return super().requires_grad_(requires_grad)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles are modules of the same table, which they open when they need it."""
        return {**self.__dict__, "_opened": None, "_cluster": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        made._opened, made._cluster = self._opened, self._cluster
        return made

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Rows are in the cluster's checkpoints; here is where."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):
            destination._metadata[prefix[:-1]]["table"] = self.table_name

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        weights = [key for key in state_dict if key.startswith(prefix) and key.endswith("weight")]
        if weights:  # torch counts them as unexpected, which is an error unless strict=False
            warnings.warn(
                f"{', '.join(map(repr, weights))}: the rows of {self._what} are on the servers; put these there with "
                "its from_torch(layer, keys), and load the rest with strict=False",
                stacklevel=2,
            )

    def extra_repr(self) -> str:
        """For print(model)."""
        parts = [repr(self.table_name), f"dim={self.dim}"]
        if self._spec.rule is not None:
            parts.append(str(self._spec.rule))
        return ", ".join([*parts, *([] if self.trainable else ["trainable=False"])])


def check_padding(padding_idx: Any, what: str) -> int | None:
    """An id whose row is zero, as int64's bits; None: there is none."""
    if padding_idx is None:
        return None
    if not is_whole(padding_idx) or not -(2**63) <= padding_idx < 2**64:
        raise InvalidArgument(f"{what}: padding_idx must be a 64-bit id, not {padding_idx!r}")
    return int(padding_idx) - (2**64 if padding_idx >= 2**63 else 0)


def modules_of(module: Any) -> list[TableModule]:
    """The table modules in a module, itself included."""
    return [part for part in module.modules() if isinstance(part, TableModule)]
