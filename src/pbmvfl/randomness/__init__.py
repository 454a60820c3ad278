"""Randomness, secret and public: two doors, and no third."""
