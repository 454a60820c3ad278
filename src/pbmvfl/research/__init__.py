"""Studies: simulation without the protocol, and the reproduction of the paper.

Results from here say so in their records and are no claim of privacy beyond what their plan would cost.
May import everything but `deploy` and `cli`.
Begin with `simulation.engine`, then `reproduction.studies`.
"""
