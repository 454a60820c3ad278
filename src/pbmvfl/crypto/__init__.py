"""Secret and public randomness, key exchange, and the secure sum (Protocol 0 of the paper).

`entropy` is the only source of secret randomness and takes no seed; `public_streams` derives streams from the public
seed of a plan; `rounded_normal` draws exactly rounded normal noise.
May import `errors` and `_compiled`, nothing else of the package.
Begin with `ring`, arithmetic in Z/2^k and packing, then `secure_sum`, pairwise masks that cancel in the sum.
"""
