"""Ledgers of format 1, as version 0.1 wrote them, into the present format.

Format 1 kept each session's plan and priced it anew whenever it was read. What those plans meant is written out here
once more, without a look at today's plans: flat names, joint rounds and one pass over the test rows, three mechanisms.
"""

from __future__ import annotations

import json
from typing import Any

from pbmvfl.errors import LedgerError
from pbmvfl.ledger import history
from pbmvfl.ledger.database import FORMAT, Database, add_new_tables


def migrate(db: Database) -> None:
    """Bring a ledger of format 1 to the present one, inside the caller's transaction."""
    db.run("PRAGMA secure_delete = ON")  # what is dropped here is overwritten too
    db.run("ALTER TABLE plans ADD COLUMN terms TEXT NOT NULL DEFAULT ''")
    for key, text in db.rows("SELECT hash, plan FROM plans"):
        try:
            terms = terms_of(json.loads(text))
        except (KeyError, TypeError, ValueError) as error:
            raise LedgerError(
                f"ledger={str(db.path)!r} has a plan that version 0.1 did not write (hash {key!r}: {error!r}), and was "
                "left as it is; put a copy of it back"
            ) from error
        db.run("UPDATE plans SET terms = ? WHERE hash = ?", (json.dumps(terms), key))
    db.run("ALTER TABLE charged ADD COLUMN writes INTEGER NOT NULL DEFAULT 1")
    # Without a key: whoever read them could try values against them.
    db.run("UPDATE sessions SET fingerprint = ''")
    add_new_tables(db)
    db.run('INSERT INTO orders SELECT dataset, unit, accounting, colluding_parties, "order" FROM limits')
    db.run("UPDATE book SET format = ?", (FORMAT,))
    history.append(db, "migrated")


def terms_of(plan: dict[str, Any]) -> dict[str, Any]:
    """Return the terms of a plan of version 0.1, as `SessionTerms.from_json` reads them."""
    phases = [{"kind": "joint", "passes": plan["num_epochs"], "order": "shuffled"}]
    release, words = _release(plan)
    update: dict[str, Any] = {"event": "plain-update"}
    if plan["noise_multiplier"]:
        update = {
            "event": "noisy-update",
            "clip_norm": plan["clip_norm"],
            "noise_multiplier": plan["noise_multiplier"],
        }
    events = {"joint": [release, update]}
    if plan["evaluation"] == "released":
        phases.append({"kind": "prediction", "passes": 1, "order": "as-given"})
        events["prediction"] = [release]
    schedule = {name: plan[name] for name in ("num_samples", "num_test_samples", "batch_size", "seed")}
    return {
        "schedule": {**schedule, "phases": phases},
        "events": events,
        "num_parties": plan["num_parties"],
        "couples_rows": plan["encoder"] == "resnet18-batchnorm",
        "words": f"{words} P={plan['embedding_dim']} M={plan['num_parties']}",
        # Format 1 did not look at first weights: its sessions keep the price that it gave them.
        "public_start": True,
    }


def _release(plan: dict[str, Any]) -> tuple[dict[str, Any], str]:
    sizes = {"num_parties": plan["num_parties"], "embedding_dim": plan["embedding_dim"]}
    trials, beta = plan["num_trials"], plan["beta"]
    match plan["mechanism"]:
        case "pbm":
            event = {"event": "poisson-binomial", **sizes, "num_trials": trials, "beta": beta}
            return {**event, "secure_sum": plan["secure_aggregation"]}, f"PBM b={trials}, beta={beta:g}"
        case "ldp":
            variance = plan["bound"] ** 2 * (2 * plan["num_parties"] / (trials * beta**2))
            event = {"event": "local-gaussian", **sizes, "variance": variance, "bound": plan["bound"]}
            return event, f"local Gaussian, b={trials}, beta={beta:g}"
        case "none":
            return {"event": "exact", **sizes}, "no privacy"
        case other:
            raise ValueError(f"mechanism={other!r}")
