"""One worker or reader of a cluster.

Users call `connect` and then `cluster`. `remote` reaches servers by their addresses, `scheduler_client` by a scheduler;
`open_clusters` knows the clusters of this process. `reports` keeps the numbers that a worker shows, `buffer_ring` the
registered arrays that take turns. `first_weights` starts all workers alike, and `local_steps` trains locally between
exchanges.
"""
