"""Bytes between processes: addresses, connections, the proof of the token, and shards that move.

Both ends use `address` and `handshake`. A client connects with `dial`, a server accepts with `serve`, and a shard goes
from one server to another with `move`. `tls` is for the way to a scheduler, and `value_codec` turns plain values into
bytes. Nothing here knows tensors or tables.
"""
