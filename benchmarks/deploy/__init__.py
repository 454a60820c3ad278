"""A federation between organisations, measured: the line, the cell, alignment, large tables, faults."""
