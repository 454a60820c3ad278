"""Figures and tables of runs, and the HTML page of `pbmvfl report`.

Reads results and ledgers; trains nothing and writes only what it is told to.
May import `federation`, `ledger`, `plan`, `privacy`, `data` and what is below them.
Begin with `page`; `plots` draws with matplotlib, `charts` draws SVG, `markup` escapes all text.
"""
