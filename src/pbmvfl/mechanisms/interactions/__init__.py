"""Columns of different parties that act on the label together: symbols, a screen for pairs, features, plan settings.

`symbols` codes columns and reads released symbols; `screen` finds pairs with a proven false-alarm rate and estimates
from public numbers whether it pays; `features` builds features and tables from what was released.
Mathematics only: may import what `mechanisms` may. Begin with `symbols`.
"""
