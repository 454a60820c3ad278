"""Attacks on what leaves a federation, each with its baseline, a confidence interval and the account's bound.

An attacker is what it sees; a score is what it gets beyond the same attacker who sees nothing. Noise comes from
ordinary generators over the caller's own rows: no role is opened, no ledger is read and nothing is charged.
May import `federation` and the packages below it. Begin with `suite`; `scores` has the values that all attacks return.
"""
