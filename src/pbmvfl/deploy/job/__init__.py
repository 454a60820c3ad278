"""One role of one job at a site: admission, agreement with the peers, training or prediction, reporting.

May import `link`, `site`, `alignment` and `monitoring` of this package, and everything that `deploy` may; not
NVFlare.
Begin with `process`, which runs a job, then `party_job` and `server_job`; `admission` decides which jobs a site takes.
"""
