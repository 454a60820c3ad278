"""A federation between organisations: each trusts its own machine alone.

NVFlare gives identity, jobs and their life; everything that parties and server say to each other goes over a line of
our own. Only `deploy.nvflare` imports NVFlare.
"""
