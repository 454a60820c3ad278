"""Vertical federated learning with the Poisson binomial mechanism."""
