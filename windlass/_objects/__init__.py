"""Tensors and tables as a client sees them, and the requests about them.

Users call `tensor` and `table`. `arrays` converts between their arrays and the core's, `outputs` is where answers are
written, `rows` and `keys` say what a request is about. A request is a `future`, part of a `step`, or late on purpose
(`delay`). `query` with `expressions` asks about rows, `vector` computes between tensors, `snapshot` reads and puts rule
state, and a `version` is what a pull has seen.
"""
