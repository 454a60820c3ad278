"""Studies: simulation without the protocol, the reproduction of the paper, joint screening of column pairs.

Results from here say so in their records and are no claim of privacy beyond what their plan would cost.
May import everything but `deploy` and `cli`.
Begin with `simulation.engine`, then `reproduction.studies`.
"""
