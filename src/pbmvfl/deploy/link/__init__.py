"""Links between a party and the server: mutual TLS, framing, message authentication, reconnection.

May import `protocol`, `crypto`, `wire` and `errors`; nothing else of `deploy`, and not NVFlare. Begin with `interface`,
the contract of every link; `tls_server` and `tls_client` implement it, `acceptor` admits connections, `message_auth`
authenticates every message end to end.
"""
