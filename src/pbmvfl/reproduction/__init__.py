"""The paper's tables and figures again: what to run, what was printed, what came out."""
