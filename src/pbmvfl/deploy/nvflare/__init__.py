"""The only package that imports NVFlare: provisioning, kits, job processes, and the guard around NVFlare's commands.

Dotted paths of `executor`, `controller`, `validator`, `launcher`, `readiness` and `keeper` are written into kits and
jobs: these modules keep their names.
May import everything else of `deploy`.
Begin with `authority` for kits, `supervisor` for jobs, `guard` for what other sites may ask of this one.
"""
