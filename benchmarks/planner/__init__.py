"""How far planned training is from the best of a grid, over tables that no rule was chosen on."""
