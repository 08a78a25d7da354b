"""Requests to train a model, each of which has its place among them."""
