"""Simulation for studies: the same plan and the same mathematics as Party and Server, all parties in one batch.

No messages, no masks, no keys, and noise from an ordinary generator: what comes out is a study of learning, marked
`"noise": "simulation"`, and never a claim of privacy. An epsilon beside such a result is that of the same plan in a
deployment. Imports with torch and numpy alone, because a machine with a GPU may have nothing else.
Begin with `engine`.
"""

from pbmvfl.research.simulation.engine import Simulation

__all__ = ["Simulation"]
