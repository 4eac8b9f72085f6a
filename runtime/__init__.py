"""The ground floor: files, locks, ranks, errors, Hydra. It imports no other package of this project."""
