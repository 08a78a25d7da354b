"""The base executor: frozen weights, the queues of their pieces, and how requests are batched."""
