"""Bytes that pass between server and parties: messages, their bodies, refusals, gradient codecs, predicted traffic.

Parsing is total: bytes that do not fit raise a typed error and change no state.
May import `errors` and `crypto`.
Begin with `messages`, the envelope of every message; `bodies` has what is inside of it.
"""
