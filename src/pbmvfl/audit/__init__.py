"""Audit: whether what is drawn has the law that is charged, and a lower bound on epsilon from games.

Everything here runs the code that a run uses, on made-up values alone: no row of a dataset or a run is read, no ledger
is opened and nothing is charged. `constants` has every error rate with its reason.
May import everything up to `federation`.
Begin with `audit`, which lists the parts, then `laws`, the exact laws by the charged numbers.
"""
