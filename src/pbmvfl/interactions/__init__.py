"""Columns of different parties that act on the label together: symbols, a screen, context. Mathematics only.

`symbols` turns columns into symbols and reads released ones; `screen` finds pairs; `context` makes features and tables
out of what was released; `offer` says from public numbers whether it can pay.
"""
