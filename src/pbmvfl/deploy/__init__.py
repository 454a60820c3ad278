"""Federation between organisations: each trusts its own machine alone.

In the order of imports: `link` carries messages, `site` is an organisation's folder, policy and keys, `alignment`
matches rows privately, `monitoring` writes logs, status and metrics, `job` runs one role of one job, `nvflare` starts
jobs. NVFlare gives identity, jobs and their life cycle; only `deploy.nvflare` imports it. May import everything but
`report`, `research` and `cli`. Begin with `job.process`, which runs one role of one job.
"""
