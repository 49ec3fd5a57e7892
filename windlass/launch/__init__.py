"""Starting clusters: one machine by `windlass run`, several by hand or by environment."""
