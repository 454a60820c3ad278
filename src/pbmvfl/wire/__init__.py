"""Versioned messages as bytes, with exact sizes. No pickle, no self-describing formats: the plan fixes every length."""
