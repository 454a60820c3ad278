"""What accuracy strict privacy leaves: studies with simulated noise, beside the product's own runs."""
