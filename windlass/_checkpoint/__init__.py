"""Files of checkpoints: their layout, and how they are written, read, exported and removed.

layout (names and contents) < store (one place where files lie) < folder (checkpoints in it) < writer, reader < export,
commands. Nothing here knows of clusters, sockets or torch. docs/formats/checkpoint.md describes every byte.
"""
