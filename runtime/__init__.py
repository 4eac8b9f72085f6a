"""Shared utilities: files, locks, ranks, errors, Hydra. Imports no other package of this project."""
