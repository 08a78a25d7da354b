"""A compiled program: its graphs, its folder on disk, and the manifest."""
