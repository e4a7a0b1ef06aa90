"""Updates of variables' elements: formulas, and the code that runs them."""
