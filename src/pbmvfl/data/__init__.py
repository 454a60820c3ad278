"""Aligned rows, columns split over the parties, labels at the server."""
