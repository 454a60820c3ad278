"""Learning at a party and at the server: encoders, features, plain, noisy and correlated updates, head, metrics.

May import `data`, `plan`, `privacy`, `crypto`, `errors` and `_compiled`; knows no messages, ledgers or files.
Begin with `updates`, which chooses how a plan's network learns from a gradient; `noisy` clips each row's gradient and
adds exact noise to the sum.
"""
