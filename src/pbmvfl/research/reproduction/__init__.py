"""The paper's tables and figures: what to run, what was printed, what came out.

`studies` reads the configurations, `study_runner` runs them and resumes, `claims` compares with the printed numbers,
`tables` shows them, `publish` draws the figures and writes the pages.
May import what `research` may. Begin with `studies`.
"""
