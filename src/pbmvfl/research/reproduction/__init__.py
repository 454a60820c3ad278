"""The paper's tables and figures: what to run, what was printed, what came out.

`studies` reads the configurations, `runner` runs them and resumes, `claims` compares with the printed numbers,
`tables` and `figures` show them, `publish` writes the page.
May import what `research` may. Begin with `studies`.
"""
