"""Looking at a cluster from outside."""
