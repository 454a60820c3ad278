"""The frozen plan of a run: every public number, its checks, the schedule, and searches from a privacy budget.

`groups` has the settings in small frozen values, `schedule` is the only counter of rounds, rows and uses, `search`,
`local_search` and `prediction_search` find a plan for a budget, `policy` is what an owner accepts.
May import `mechanisms`, `wire`, `privacy`, `crypto`, `errors` and `_settings`; imports without torch.
Begin with `plan`.
"""
