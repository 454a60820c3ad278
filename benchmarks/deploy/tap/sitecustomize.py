"""Tap on a party's process, outside of the program: on PYTHONPATH of a trial's kits only.

Every answer of a round is recorded as one line before it is sent: seconds, session, round, run, digest of what it says.
The tap parses the message's header by its offsets, and knows nothing of ledgers. So a ledger can be compared with what
was released. The digest of an empty answer, as of a round in which a party learns alone, is "-".
"""

import hashlib
import importlib.abc
import importlib.util
import os
import struct
import sys
import time

_MODULE = "pbmvfl.deploy.job.party_job"
_KIND, _RUN, _SESSION, _ROUND, _EMBEDDING, _PAYLOAD = 5, slice(8, 16), slice(16, 32), 32, 6, 44
FILE = "released.log"


def _watch(module):
    handle = module.PartySite.handle

    def watched(self, channel, body):
        answer = handle(self, channel, body)
        if channel == 2 and len(answer) >= _PAYLOAD and answer[_KIND] == _EMBEDDING:
            (number,) = struct.unpack_from("<I", answer, _ROUND)
            said = bytes(answer[_PAYLOAD:])
            digest = hashlib.sha256(said).hexdigest() if said else "-"
            line = f"{time.time():.3f} {bytes(answer[_SESSION]).hex()} {number} {bytes(answer[_RUN]).hex()} {digest}\n"
            file = os.open(self._site_folder.path / FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.write(file, line.encode())
            os.close(file)
        return answer

    module.PartySite.handle = watched


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):  # noqa: ARG002
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            _watch(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder())
