"""The ground floor: files, locks, ranks, errors, Hydra; imports none of the other rooms."""
