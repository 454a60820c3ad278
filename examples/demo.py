"""Both algorithms on one data set: train digits by `staged` and by `pbm`, and compare what they cost.

Run it anywhere: `python demo.py`. It writes nothing. Four parties hold one quadrant of every picture each.
"""

import pbmvfl
from pbmvfl.privacy.table import format_advantage, format_epsilon
from pbmvfl.wire.traffic import human_bytes

TITLES = (
    "algorithm",
    "test accuracy",
    "strict epsilon",
    "paper's count",
    "advantage",
    "label epsilon",
    "bytes",
    "seconds",
)

data = pbmvfl.load_dataset("digits")
print(f"digits: {data.num_samples:,} training rows, {data.num_test_samples} test rows, {data.num_parties} parties\n")

plans = {
    # The default: a budget of 8 that is a theorem.
    "staged": pbmvfl.Plan.for_budget(epsilon=8, data=data),
    # Within 8 as the paper counts, which is not a proof; a strict budget of 8 leaves joint rounds nothing to learn.
    "pbm": pbmvfl.Plan.for_budget(epsilon=8, data=data, algorithm="pbm", accounting="paper"),
}
lines = []
for name, plan in plans.items():
    result = pbmvfl.Federation(plan).fit(data)
    table = result.privacy()
    strict = table.bound("cell", "strict")
    lines.append(
        (
            name,
            f"{result.metrics['test_accuracy']:.3f}",
            format_epsilon(strict.epsilon),
            format_epsilon(table.epsilon("cell", "paper")),
            format_advantage(strict.advantage_upper_bound),
            "in clear" if plan.label_epsilon is None else f"{plan.label_epsilon:g}",
            human_bytes(result.traffic.total),
            f"{result.seconds:.1f}",
        )
    )

widths = [max(len(line[column]) for line in (TITLES, *lines)) for column in range(len(TITLES))]
for line in (TITLES, *lines):
    print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))
print(f"""
Epsilon and advantage are of a cell (a row at one party) against the server, at delta {strict.delta:g}.
With staged the advantage is that of fusion rows, which are released once at 8 as predictions are; smaller epsilons
protect them (--epsilon 2 --prediction-epsilon 2). Label epsilon is of each training label, against all parties
together. Accuracy is the simulator's, outside of all: of simulated releases with staged, of exact sums with pbm.
Choose staged to protect people; choose pbm to reproduce the paper or study joint training: its count is no proof.""")
