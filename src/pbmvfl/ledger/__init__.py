"""A party's own ledger: what it has released about its rows over all runs, and the limits of its owner."""
