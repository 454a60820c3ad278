"""Distance of planned training from the best of a grid, over tables that no rule was chosen on."""
