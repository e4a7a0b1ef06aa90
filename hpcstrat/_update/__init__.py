"""What happens to the elements of variables in an update: formulas, and what runs them."""
