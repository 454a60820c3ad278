"""One organisation's site: its folder, the federation file, its policy, enrolment, preflight checks, job specs.

May import `link` of this package, and everything that `deploy` may; not NVFlare.
Begin with `folder`, which names every file of a site, then `federation_file` and `policy_file`.
"""
