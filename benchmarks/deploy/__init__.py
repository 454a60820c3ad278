"""What a federation between organisations costs: the line, cuts of the cable."""
