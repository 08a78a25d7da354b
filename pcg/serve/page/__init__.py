"""The page of a server at `/`: what a key may see of its state, and a box to try an adapter."""
