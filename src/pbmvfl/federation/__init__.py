"""The embedded federation: all roles on one machine, in one process or in several, with the protocol of a deployment.

`run` trains, `results`, `checkpoints` and `run_folder` keep what comes of it, `model` and `serving` answer
predictions that are charged, `estimator` is the scikit-learn interface.
May import everything above `protocol` and `ledger` in the data path, and those two; not `deploy`, `report` or `cli`.
Begin with `federation`.
"""
