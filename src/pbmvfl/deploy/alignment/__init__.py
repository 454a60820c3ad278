"""Private alignment: organisations find their common rows and agree on one order without showing other ids.

May import `link` and `site` of this package, and everything that `deploy` may; not NVFlare.
Begin with `coordinator` and `party`, the two roles, then `psi`, the private set intersection; `runner` connects them
to sites and tables.
"""
