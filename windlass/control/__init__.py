"""The control plane: who is there, where shards are, and who waits for whom. Never on the path of a push or a pull."""
