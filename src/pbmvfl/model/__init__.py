"""A trained federation as a thing: parts that live with their owners, and predictions that are charged."""
