"""`python -m benchmarks.deploy.cuts`: a cable that is cut for some seconds, and how soon rounds go on after the mend.

Two networks of their own with one cable between them (needs root and `ip`). A party with rounds of Activity's size
sits in one, the server in the other. Results go to benchmarks/results/cuts.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from line_parties import EchoProcess, Federation
from networks import Networks, why_not
from pbmvfl.deploy.links import Channel

RESULTS = Path(__file__).resolve().parents[1] / "results" / "cuts.json"
CUTS = (3, 8, 20, 60)
#: Bytes of a round's message to a party, of Activity's shape.
MESSAGE = 6444
PATIENCE = 120.0


class Asking(threading.Thread):
    """One round after the other, and the time at which each was over."""

    def __init__(self, federation: Federation) -> None:
        super().__init__(daemon=True)
        self._line = federation.line
        self.over = threading.Event()
        self.ended = [time.monotonic()]
        self.lost = ""

    def run(self) -> None:
        while not self.over.is_set():
            answers = self._line.ask({0: bytes(MESSAGE)}, channel=Channel.PROTOCOL)
            if answers.lost:
                self.lost = answers.lost[0]
                return
            self.ended.append(time.monotonic())
            self.over.wait(0.002)

    def seconds_after(self, moment: float, *, at_most: float) -> float | None:
        """How long after a moment a round was over; None if none was."""
        while self.ended[-1] <= moment and not self.lost and time.monotonic() < moment + at_most:
            time.sleep(0.005)
        later = [each for each in self.ended[-1000:] if each > moment]
        return later[0] - moment if later else None


def cut_for(seconds: float) -> dict[str, object]:
    networks = Networks()
    with tempfile.TemporaryDirectory() as folder:
        try:
            with networks.at_the_server():
                federation = Federation(Path(folder), ["bank"], patience=PATIENCE, host=networks.host)
            with federation:
                process = EchoProcess(federation.site("bank"), Path(folder), network=networks.party)
                try:
                    federation.line.join(timeout=60)
                    asking = Asking(federation)
                    asking.start()
                    time.sleep(1)
                    networks.cut()
                    time.sleep(seconds)
                    networks.mend()
                    after = asking.seconds_after(time.monotonic(), at_most=60)
                    asking.over.set()
                    asking.join(timeout=60)
                    return {
                        "cut_seconds": seconds,
                        "seconds_until_rounds_go_on": None if after is None else round(after, 3),
                        "redials": federation.line.traffic.redials,
                        "lost": asking.lost,
                    }
                finally:
                    process.kill()
        finally:
            networks.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.deploy.cuts", description=__doc__)
    parser.add_argument("--seconds", type=float, nargs="+", default=CUTS, help="of each cut")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the rows go")
    given = parser.parse_args(arguments)
    if reason := why_not():
        print(f"no networks here: {reason}", file=sys.stderr)
        return 2
    rows = []
    for seconds in given.seconds:
        rows.append(cut_for(seconds))
        print(rows[-1])
    given.json.parent.mkdir(exist_ok=True)
    given.json.write_text(json.dumps({"patience": PATIENCE, "rows": rows}, indent=1) + "\n")
    return 0 if all(row["seconds_until_rounds_go_on"] is not None for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
