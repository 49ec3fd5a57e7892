"""DLRM: a network for clicks, of numbers and rows of embedding tables; and how well it ranks."""

import torch
from clicks import Data, Samples, auc
from torch import Tensor, nn

import windlass as wl

INIT = wl.Normal(std=0.02)  # of rows
TEST_BATCH = 8192


def tables_of(
    data: Data, dim: int, lr: float, seed: int, cluster: wl.Cluster, sync: wl.Sync | str | None = None
) -> wl.torch.EmbeddingBags:
    """The tables of all features. What a row begins with depends on its id and the table's name."""
    return wl.torch.EmbeddingBags(
        data.train.names, dim, table=f"clicks {seed}", rule=wl.Adagrad(lr=lr), init=INIT, sync=sync, cluster=cluster
    )


class DLRM(nn.Module):  # type: ignore[misc]
    """Numbers become a vector like the features' rows; the products of all pairs of vectors say how they agree.

    ::

        numbers -- bottom --> (batch, dim) --.
                                             |-- products of pairs --.
        sparse -- embeddings --> (batch, features, dim)              |-- top --> logit
                                             numbers' vector --------'

    embeddings: a module that makes (batch, features, dim) of ids. bottom, top: the widths of hidden layers.
    """

    def __init__(
        self,
        embeddings: nn.Module,
        numbers: int,
        features: int,
        dim: int,
        bottom: tuple[int, ...] = (64,),
        top: tuple[int, ...] = (64, 32),
    ) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.bottom = mlp(numbers, *bottom, dim)
        vectors = features + 1
        row, column = torch.tril_indices(vectors, vectors, offset=-1)
        self.register_buffer("pairs", row * vectors + column, persistent=False)
        self.top = mlp(dim + len(self.pairs), *top, 1)

    def forward(self, numbers: Tensor, sparse: object) -> Tensor:
        """The logarithm of the odds, (batch,)."""
        dense = torch.relu(self.bottom(numbers))
        vectors = torch.cat([dense.unsqueeze(1), self.embeddings(sparse)], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        return self.top(torch.cat([dense, products.index_select(1, self.pairs)], dim=1)).squeeze(1)


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for i in range(1, len(widths)):
        layers += [nn.Linear(widths[i - 1], widths[i]), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


@torch.no_grad()  # type: ignore[untyped-decorator]
def area(model: nn.Module, test: Samples) -> float:
    """The AUC: how often the model ranks a positive sample above a negative one."""
    training = model.training
    model.eval()
    scores = torch.cat([model(batch.numbers, batch.sparse) for batch in test.in_order(TEST_BATCH)])
    model.train(training)
    return auc(test.labels, scores)
