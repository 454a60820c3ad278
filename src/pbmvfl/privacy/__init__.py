"""Privacy accounting, mathematics only: units, events, curves, loss distributions, composition, conversion, tables.

May import `errors` and `_settings`, and neither torch nor anything that trains, so that it can be audited alone.
Begin with `events`, the frozen descriptions of what was released, then `accounting`, which turns a plan's events into
epsilon. None comes from the theorems that the paper prints: docs/explanation/theory.md says what is wrong with them.
"""
