"""Many features in one table: what a batch is, and which key an id of a feature has.

    key        63      56 55                     0
               | feature |           id          |      one pull and one push for all features

A feature's number is its place in the list, or given; features with one number share rows. Numbers that were used are
kept on the servers, beside the table, so that a script whose features stand in another order is noticed.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from windlass._errors import InvalidArgument
from windlass._objects.arrays import is_whole
from windlass._rules.rule import Max
from windlass._rules.sync import ASP
from windlass.torch._found import check_ids

if TYPE_CHECKING:
    from windlass._client.cluster import Cluster

NUMBERS_MAX = 256
ID_BITS = 56
PADDING = -1  # the key of padding: no feature is the last one where there is padding
_ID_MASK = (1 << ID_BITS) - 1


class Column(NamedTuple):
    """What a batch has of one feature."""

    ids: Any  #: in one dimension
    shape: tuple[int, ...]  #: as they were given
    offsets: Any  #: where bags begin, and the end of the last; None: bags are as long as each other
    weights: Any  #: of ids, or None


def numbered(features: Any, padded: bool, what: str) -> dict[str, int]:
    """Each feature with its number."""
    if isinstance(features, Mapping):
        numbers = dict(features)
    elif isinstance(features, Sequence) and not isinstance(features, str):
        numbers = {name: i for i, name in enumerate(features)}
        if len(numbers) != len(features):
            raise InvalidArgument(f"{what}: a feature is named twice; {{'a': 0, 'b': 0}} lets features share rows")
    else:
        raise InvalidArgument(f"{what}: expected a list of features, or features with their numbers, not {features!r}")
    most = NUMBERS_MAX - int(padded)
    for name, number in numbers.items():
        if not isinstance(name, str) or not is_whole(number) or not 0 <= number < most:
            raise InvalidArgument(
                f"{what}: features are names with numbers from 0 to {most - 1}, not {name!r}: {number!r}"
            )
    if not numbers:
        raise InvalidArgument(f"{what}: expected at least one feature")
    return {name: int(number) for name, number in numbers.items()}


def columns_of(batch: Any, features: Sequence[str], pools: bool, what: str) -> list[Column]:
    """A batch as its features' columns, in their order. `pools`: ids are in bags."""
    if isinstance(batch, Mapping):
        _check_present(batch, features, what)
        return [_column(batch[name], pools, f"{what}, feature {name!r}") for name in features]
    if all(hasattr(batch, name) for name in ("keys", "values", "lengths", "weights_or_none", "stride")):
        return _of_jagged(batch, features, what)
    raise InvalidArgument(
        f"{what}: expected ids by feature, a tensor of ids (batch, features) or a KeyedJaggedTensor, not "
        f"{type(batch).__name__}"
    )


def _check_present(names: Any, features: Sequence[str], what: str) -> None:
    missing = [name for name in features if name not in names]
    if missing:
        raise InvalidArgument(f"{what}: the batch lacks {', '.join(map(repr, missing))}; it has {list(names)}")


def _column(given: Any, pools: bool, what: str) -> Column:
    if isinstance(given, tuple) and not (pools and 2 <= len(given) <= 3):
        form = "ids, (ids, offsets) or (ids, offsets, weights)" if pools else "ids"
        raise InvalidArgument(f"{what}: expected {form}, not a tuple of {len(given)}")
    ids, offsets, weights = (*given, None, None)[:3] if isinstance(given, tuple) else (given, None, None)
    ids = check_ids(ids, what)
    if weights is not None and weights.shape != ids.shape:
        raise InvalidArgument(f"{what}: expected a weight per id, {tuple(ids.shape)}, saw {tuple(weights.shape)}")
    if offsets is not None:
        if ids.dim() != 1 or not isinstance(offsets, torch.Tensor) or offsets.dim() != 1:
            raise InvalidArgument(f"{what}: offsets go with ids in one dimension, and are a tensor of one dimension")
        offsets = check_ids(offsets, f"{what}, offsets").to(ids.device)
        if len(offsets) and int(offsets[0]) != 0:
            raise InvalidArgument(f"{what}: the first offset must be 0, not {int(offsets[0])}")
        offsets = torch.cat([offsets, offsets.new_tensor([len(ids)])])
    elif pools and ids.dim() not in (1, 2):
        raise InvalidArgument(f"{what}: expected ids of shape (batch,) or (batch, bag), saw {tuple(ids.shape)}")
    return Column(ids.reshape(-1), tuple(ids.shape), offsets, None if weights is None else weights.reshape(-1))


def _of_jagged(batch: Any, features: Sequence[str], what: str) -> list[Column]:
    """Of TorchRec's KeyedJaggedTensor, or what looks like one."""
    names = list(batch.keys())
    _check_present(names, features, what)
    varies = getattr(batch, "variable_stride_per_key", None)
    if varies is not None and (varies() if callable(varies) else varies):
        raise InvalidArgument(f"{what}: the features of this KeyedJaggedTensor have batches of different sizes")
    values, weights = check_ids(batch.values(), what), batch.weights_or_none()
    ends = batch.lengths().to(torch.int64).view(len(names), batch.stride()).cumsum(1)
    ends = torch.cat([ends.new_zeros((len(names), 1)), ends], dim=1)
    starts = [0, *ends[:, -1].cumsum(0).tolist()]
    found = []
    for name in features:
        at = names.index(name)
        part = slice(starts[at], starts[at + 1])
        ids = values[part]
        found.append(Column(ids, tuple(ids.shape), ends[at], None if weights is None else weights[part]))
    return found


def check_range(ids: Any, what: str) -> None:
    """Whether ids leave room for the feature's number."""
    if ids.numel() == 0:
        return
    least, most = (int(x) for x in torch.aminmax(ids))
    if least < 0 or most > _ID_MASK:
        raise InvalidArgument(
            f"{what}: features share a table, so ids must be from 0 to 2**56 - 1, saw {least if least < 0 else most}; "
            "fold=True mixes ids of 64 bits into 56"
        )


def prefix(number: int) -> int:
    """What a feature's number adds to its ids, as int64."""
    return (number << ID_BITS) - (1 << 64 if number >= NUMBERS_MAX // 2 else 0)


def folded(ids: Any) -> Any:
    """Ids of 64 bits mixed into 56: equal ones stay equal, and others are as unlikely to be as in any hash."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        ids = (ids ^ _shifted(ids, shift)) * (factor - (1 << 64))
    return (ids ^ _shifted(ids, 31)) & _ID_MASK


def _shifted(x: Any, by: int) -> Any:
    return (x >> by) & ((1 << (64 - by)) - 1)


def check_numbers(cluster: "Cluster", table: str, numbers: Mapping[str, int], what: str) -> None:
    """Whether the numbers are those that the table's rows were made with. New ones are added to them."""
    names: dict[int, dict[int, str]] = {}  # by number: checksums of names, and the names
    for name, number in numbers.items():
        names.setdefault(number, {})[1 + zlib.crc32(name.encode())] = name
    kept = cluster.tensor(f"{table} features", (NUMBERS_MAX,), rule=Max(), dtype=np.int64, sync=ASP())
    for _ in range(2):  # somebody else may add the same number under another name
        there = np.asarray(kept.pull())
        added = np.zeros(NUMBERS_MAX, np.int64)
        for number, ours in names.items():
            if there[number] == 0:
                added[number] = min(ours)
            elif int(there[number]) not in ours:
                raise InvalidArgument(
                    f"{what}: number {number} is {' and '.join(map(repr, ours.values()))} here, and another feature in "
                    f"table {table!r} as it is; features keep their numbers, and new ones are added at the end"
                )
        if not added.any():
            return
        kept.push(added).wait()
