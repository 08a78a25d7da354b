"""Tinker's protocol, under /tinker/api/v1: sessions, models, training and futures."""
