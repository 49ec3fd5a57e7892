"""Data out of files, of which each worker reads its part: ``windlass.data``.

    part = (cluster.rank, cluster.world_size)
    rows = wl.data.sparse("s3://bucket/days/*.svm", part=part)

Every loader takes a path, a glob, a folder, a URL that fsspec knows, a list of them, or `Files`; and `part`, (i, n):
the i-th of n parts of all bytes, cut at ends of lines, so that each line is in one part. Compressed files are not cut.
"""

from windlass.data._files import Block, Files
from windlass.data._loaders import Edges, SparseRows, dense, edges, lines, sparse

__all__ = ["Block", "Edges", "Files", "SparseRows", "dense", "edges", "lines", "sparse"]
