"""Party and server as state machines: bytes in, bytes out, no I/O of their own (Algorithm 2 of the paper).

`handshake` agrees on keys, `session` drives a server over a `transport`, `stored_answers` keeps released answers so
that a repeated request gets the same bytes.
May import `training`, `data`, `plan`, `mechanisms`, `wire`, `privacy`, `crypto`, `errors` and `_files`.
Begin with `server`, then `party`.
"""
