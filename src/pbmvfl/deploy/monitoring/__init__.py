"""Monitoring of a site by its own operators: structured log, status file, metrics, `watch`.

No private value can get into a log line: sentences are fixed in `log_events`, errors pass through `redaction`. May
import `site` of this package, and everything that `deploy` may; not NVFlare. Begin with `log`, then `status`.
"""
