"""Error rates and sizes of an audit, with their reasons.

An audit makes many tests, each with a p-value, and raises an alarm if any p-value is below LEVEL = NOMINAL_RATE /
MOST_TESTS (Bonferroni: the tests need not be independent). An audit never makes more than MOST_TESTS tests.
"""

from __future__ import annotations

#: Stated upper bound on the probability that a sound build raises any alarm in one whole audit.
FALSE_ALARM_RATE = 1e-6
#: Rate that the tests share. Counts have exact p-values. Means of many draws, products of neighbours and chi-squares
#: have asymptotic ones: with SMALLEST_EXPECTED they are below the true ones by a factor of at most 5 at these levels
#: (`test_the_true_rate_of_a_chi_square_is_below_ten_times_the_nominal_one`). The factor of 10 is left for that.
NOMINAL_RATE = 1e-7
MOST_TESTS = 1000
LEVEL = NOMINAL_RATE / MOST_TESTS
#: Neighbouring cells of a chi-square are joined until each expects this many draws.
SMALLEST_EXPECTED = 500.0
#: Largest number of cells of a chi-square: more cells find no more of what is wrong with a mean or a tail.
LARGEST_CELLS = 256
#: Probability of both tails together in the test of tails: far out, and still some hundred draws.
TAIL_SHARE = 1e-3

#: Draws of each value of each law by default. `laws.trials_for` raises it where it would not find a beta that is wrong
#: by 1%: with n bits at the ends of the range, successes towards the own end then move by
#: 0.01 beta sqrt(n / (1/4 - beta^2)) standard deviations.
TRIALS = 200_000
#: So many must they move: 6.5 for an alarm at 1e-7 / 1000, and 3.5 more for a power of 0.9997.
DEVIATIONS = 10.0
#: Games of each world by default, and the most random bits that they may take; at least a hundredth are played.
GAMES = 1_000_000
LARGEST_GAME_BITS = 1 << 31
#: The most draws of one value of a law: some seconds, and some hundred megabytes. They are enough for 1% of beta where
#: b beta^2 is 0.004 or more.
LARGEST_DRAWS = 1 << 24

#: Confidence of the lower bounds that are printed. Such a bound is wrong once in 20 audits, so no verdict depends on
#: it: a verdict uses the same bound at the level of an alarm.
CONFIDENCE = 0.95
#: Delta of the distinguishing game.
DELTA = 1e-5

#: Rows and local steps of the audited training, and the epsilon that its noise is planned for: large enough that some
#: hundred sessions show most of it, small enough that it is no formality.
TRAINING_ROWS, TRAINING_STEPS, TRAINING_EPSILON = 200, 40, 8.0
#: Sessions of each world by default: 10 to 20 s. They show about 0.7 of mu, ten times as many 0.9 of it.
SESSIONS = 200
#: Fewer have too few steps for a chi-square of their noise.
SMALLEST_SESSIONS = 10
#: Sums of clipped gradients are read from float32 weights; a shift may exceed its limit by this share.
READING_SHARE = 1e-3
