"""Links between a party and the server: gRPC streams, mutual TLS, message authentication, reconnection.

May import `protocol`, `crypto`, `wire` and `errors`; nothing else of `deploy`, and not NVFlare. Begin with `interface`,
the contract of every link; `grpc_server` and `grpc_party` implement it, `message_auth` authenticates every message end
to end.
"""
