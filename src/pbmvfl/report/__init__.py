"""Figures and tables of runs, and the HTML page of `pbmvfl report`.

Reads results and ledgers; trains nothing and writes only the files that its callers name.
May import `federation`, `ledger`, `plan`, `privacy`, `data` and the packages below them.
Begin with `page`; `view` says what `templates` show, `charts` has the geometry, `plots` draws with matplotlib.
"""
