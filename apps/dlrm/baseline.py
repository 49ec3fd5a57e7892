"""The same training with plain torch: an nn.EmbeddingBag for each feature, with rows for a vocabulary known beforehand.

What compare.py holds train.py against. It begins with the rows that train.py begins with, which a table's initialiser
makes of their ids, and has the same network and the same batches in the same order.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from clicks import CHOICES, Data, Samples, Sparse, load
from model import DLRM, area, tables_of
from side_by_side import use_cores
from torch import Tensor, nn

import windlass as wl


class Tables(nn.Module):  # type: ignore[misc]
    """An nn.EmbeddingBag for each feature; takes what EmbeddingBags takes, with the rows' numbers in place of ids."""

    def __init__(self, weights: list[Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.EmbeddingBag.from_pretrained(weight, freeze=False, mode="sum", sparse=True) for weight in weights
        )

    def forward(self, sparse: Sparse) -> Tensor:
        """(batch, features, dim)."""
        columns = sparse.values() if isinstance(sparse, dict) else sparse.unbind(1)
        made = []
        for layer, column in zip(self.layers, columns, strict=True):
            made.append(layer(*column) if isinstance(column, tuple) else layer(column.unsqueeze(1)))
        return torch.stack(made, dim=1)


def with_vocabularies(data: Data) -> tuple[Data, list[Tensor]]:
    """The data with numbers of rows in place of ids, and the ids of each feature that occur. Where ids are numbers
    already, they stay."""
    parts, bags = (data.train, data.test), list(data.train.bags)
    known = [torch.cat([part.ids[:, i] for part in parts]).unique() for i in range(len(data.train.features))]
    in_bags = [torch.cat([part.bags[name].ids for part in parts]).unique() for name in bags]
    if data.sizes is not None:
        return data, known

    def numbered(part: Samples) -> Samples:
        columns = [torch.searchsorted(ids, part.ids[:, i].contiguous()) for i, ids in enumerate(known)]
        found = {
            name: part.bags[name]._replace(ids=torch.searchsorted(ids, part.bags[name].ids))
            for name, ids in zip(bags, in_bags, strict=True)
        }
        return dataclasses.replace(part, ids=torch.stack(columns, dim=1), bags=found)

    return data._replace(train=numbered(data.train), test=numbered(data.test)), [*known, *in_bags]


def first_rows(data: Data, known: list[Tensor], args: argparse.Namespace) -> list[Tensor]:
    """What the rows of each feature's ids begin with."""
    with wl.connect() as cluster:
        tables = tables_of(data, args.dim, args.lr, args.seed, cluster)
        rows = [tables.to_torch(name, ids).weight.detach() for name, ids in zip(data.train.names, known, strict=True)]
    if data.sizes is None:
        return rows
    weights = [torch.zeros(size, args.dim) for size in data.sizes]  # those of ids that do not occur stay zero
    for weight, ids, some in zip(weights, known, rows, strict=True):
        weight[ids] = some
    return weights


def main() -> None:
    args = arguments()
    given = load(args.data, args.samples, args.rows)
    data, known = with_vocabularies(given)
    use_cores(workers=1)
    tables = Tables(first_rows(given, known, args))
    torch.manual_seed(args.seed)
    model = DLRM(tables, data.train.numbers.shape[1], len(data.train.names), args.dim)
    opt = torch.optim.Adagrad(model.parameters(), lr=args.lr)
    losses: list[tuple[float, float]] = []
    begin = time.perf_counter()
    for epoch in range(1, args.epochs + 1):
        for batch in data.train.shuffled(args.batch, 1000 * args.seed + epoch):
            loss = F.binary_cross_entropy_with_logits(model(batch.numbers, batch.sparse), batch.labels)
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append((time.perf_counter() - begin, loss.item()))
    about = {"data": data.name, "samples": len(losses) * args.batch, "seconds": losses[-1][0], "losses": losses}
    args.history.write_text(json.dumps({"auc": area(model, data.test), **about}))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The training of train.py with plain torch.")
    parser.add_argument("--history", type=Path, required=True, metavar="FILE", help="where losses and the AUC go, JSON")
    parser.add_argument("--data", choices=list(CHOICES), default="census", help="(%(default)s)")
    for name in ("epochs", "batch", "dim"):
        parser.add_argument(f"--{name}", type=int, required=True, metavar="N", help="as train.py's")
    parser.add_argument("--lr", type=float, required=True, metavar="X", help="as train.py's")
    for name in ("samples", "rows"):
        parser.add_argument(f"--{name}", type=int, metavar="N", help="as train.py's")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(%(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
