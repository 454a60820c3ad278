"""A party's own ledger: what it has released about its rows over all runs, and the limits that its owner set.

`charging` charges a round before its bytes leave, `limits` refuses the round that would cross a limit, `spending` adds
up events, `history` and `tamper_evidence` notice a ledger that was changed or copied, `forecast` says what a run would
cost.
May import `plan`, `mechanisms`, `privacy`, `errors`, `_files` and `_settings`; imports without torch.
Begin with `ledger`, then `charging`.
"""
