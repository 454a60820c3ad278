"""Preloaded by the template process that parties are forked from, so that each of them starts with compiled loops.

Numba loads its own tables at the first call of a compiled loop: more than half a second, which every party would pay.
The template handles no party's data and draws nothing.
"""

from pbmvfl._compiled import load_compiler

load_compiler()
